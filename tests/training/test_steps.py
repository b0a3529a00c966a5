"""What the flags say reaches the trainer, its images and its model."""

import pytest
from test_train_script import SMALL

from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training import steps
from hf_vit_scratch.training.recipe import parse_recipe


@pytest.fixture
def build(tmp_path):
    """Take the steps of a run up to its trainer."""

    def build(*flags):
        args, recipe = parse_recipe(
            ["digits", *SMALL, "--output_dir", str(tmp_path / "run"), "--speed_choice", "plain", *flags]
        )
        steps.check_and_seed(args, recipe)
        splits = steps.load_data(args)
        config, start = steps.make_choices(args, recipe, splits)
        model = steps.build_model(args, config, start)
        return steps.build_trainer(args, splits, model, steps.build_image_processor(config, start))[0]

    return build


def test_stages_of_training(build):
    trainer = build("--initial_image_size", "4", "--initial_image_size_fraction", "0.5",
                    "--augmentation_off_fraction", "0.1")  # fmt: skip
    assert [trainer.stage(share) for share in (0, 0.49, 0.5, 0.89, 0.9, 1)] == [0, 0, 1, 1, 2, 2]
    transform = trainer.train_dataset.batch_transform
    assert [transform.image_size(stage) for stage in range(3)] == [(4, 4), (8, 8), (8, 8)]
    assert [stage is None for stage in transform.stages] == [False, False, True]


def test_label_smoothing_moves_into_the_training_images(build):
    trainer = build("--label_smoothing_factor", "0.2")
    assert trainer.train_dataset.batch_transform.mixing.label_smoothing == 0.2
    assert trainer.args.label_smoothing_factor == 0


@pytest.mark.parametrize("local", ["true", "false"])
def test_local_attention(build, local):
    (first, *_) = build("--qk_norm", "false", "--local_attention", local).model.vit.layers
    assert bool(first.attention.q_proj.bias.any()) == (local == "true")


def test_top_5_of_five_classes_chooses_no_model(build, class_folders):
    with pytest.raises(UserError, match=r"must be one of accuracy, balanced_accuracy, macro_f1, loss; got 'top5_acc"):
        build("--data", str(class_folders), "--metric_for_best_model", "top5_accuracy")


def test_cache_of_images(build):
    assert build("--cache_images", "true").train_dataset.cache_images
    assert not build().train_dataset.cache_images


def test_unit_of_masks(build):
    trainer = build("--task", "masked-image-modeling", "--mask_patch_size", "4", "--mask_ratio", "0.3")
    assert (trainer.train_dataset.unit, trainer.train_dataset.mask_ratio) == ((4, 4), 0.3)


def test_muons_rate_and_average_of_squares(build):
    optimizer = build("--muon", "true", "--muon_learning_rate", "0.5", "--muon_beta2", "0.9").create_optimizer()
    assert {group["lr"] for group in optimizer.param_groups if group["muon"]} == {0.5}
    assert {group["lr"] for group in optimizer.param_groups if not group["muon"]} == {2e-3}
    assert optimizer._muon._beta2 == 0.9


def test_stream(build, tmp_path):
    digits = load_digits()
    for split, rows in (("train", digits["train"]), ("validation", digits["test"])):
        (tmp_path / "data").mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")

    stream = build(
        "--data", str(tmp_path / "data"), "--streaming", "true", "--max_steps", "4", "--eval_strategy", "no",
        "--save_strategy", "no", "--gradient_accumulation_steps", "2", "--corrupt_images", "skip",
        "--initial_image_size", "4", "--initial_image_size_fraction", "0.5",
    ).train_dataset  # fmt: skip

    assert stream.skip_corrupt
    assert stream.stage_of_batch == [0, 0, 0, 0, 1, 1, 1, 1]  # two batches for each step
    assert stream.process == (0, 1)
