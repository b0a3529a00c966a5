"""`--model` with a trained model of any library: what a run takes from it, and what stays frozen."""

import functools
import logging
import shutil
from pathlib import Path

import pandas as pd
import pytest
import timm
import torch
import yaml
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from helpers import randomize_
from safetensors.torch import load_file
from test_train_script import SMALL, train
from timm.models import save_for_hf
from torchvision.models import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTModel
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

import vit_scratch
from hf_vit_scratch.data.splits import SPLITS
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training import auto_config, steps
from hf_vit_scratch.training.recipe import RECIPES, parse_recipe

SIZES = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48}  # fmt: skip
PLAIN = "{data: digits, use_cpu: true, disable_tqdm: true, bf16: false, load_best_model_at_end: false}"
SHORT = ["--eval_strategy", "no", "--save_strategy", "no"]


def transformers_vit(folder, **fields):
    """A saved ViT of transformers that tells flowers from temples, and the model."""
    vit = randomize_(ViTForImageClassification(ViTConfig(**SIZES, id2label={0: "flower", 1: "temple"}, **fields)), 0.2)
    vit.save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(folder)
    return vit.eval(), lambda pixels: vit(pixels).logits


def timm_vit(folder):
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    vit = randomize_(timm.create_model("vit_tiny_patch16_224", num_classes=2, **args), 0.2).eval()
    vit.pretrained_cfg |= {"mean": (0.3, 0.2, 0.1), "std": (0.4, 0.5, 0.6)}
    config = {"label_names": ["flower", "temple"]}
    save_for_hf(vit, folder, safe_serialization=True, model_config=config, model_args=args)
    return vit, vit


def torchvision_vit(path):
    """A file knows no names of classes, and no number of heads."""
    norm = functools.partial(torch.nn.LayerNorm, eps=1e-6)
    vit = randomize_(VisionTransformer(16, 4, 2, 4, 32, 48, num_classes=2, norm_layer=norm), 0.2).eval()
    torch.save(vit.state_dict(), path)
    return vit, vit


@pytest.fixture
def vit(tmp_path):
    """The folder of a ViT of transformers."""
    transformers_vit(tmp_path / "vit")
    return str(tmp_path / "vit")


@pytest.fixture
def begin(tmp_path, class_folders):
    """Take the steps of a run up to its model; return the model and the image processor."""

    def begin(*argv, recipe=PLAIN):
        (tmp_path / "recipe.yaml").write_text(recipe)
        args, recipe = parse_recipe([str(tmp_path / "recipe.yaml"), "--data", str(class_folders), *argv])
        steps.check_and_seed(args, recipe)
        config, start = steps.make_choices(args, recipe, steps.load_data(args))
        return steps.build_model(args, config, start).eval(), steps.build_image_processor(config, start)

    return begin


@pytest.mark.parametrize(
    ("save", "flags", "mean", "std"),
    [
        (transformers_vit, [], [0.1, 0.2, 0.3], [0.5] * 3),
        (timm_vit, [], [0.3, 0.2, 0.1], [0.4, 0.5, 0.6]),
        (torchvision_vit, ["--num_attention_heads", "4"], IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    ],
    ids=["transformers", "timm", "torchvision"],
)
@torch.no_grad()
def test_run_starts_from_the_logits_and_the_normalization_of_the_source(
    save, flags, mean, std, begin, tmp_path, class_folders
):
    _, logits = save(tmp_path / "model.pth")
    if flags:
        (class_folders / "flower").rename(class_folders / "LABEL_0")
        (class_folders / "temple").rename(class_folders / "LABEL_1")

    model, processor = begin("--model", str(tmp_path / "model.pth"), *flags)

    pixels = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(model(pixels).logits, logits(pixels), rtol=0, atol=1e-5)
    assert (list(processor.image_mean), list(processor.image_std)) == (list(mean), list(std))


@torch.no_grad()
def test_positions_of_another_size_are_those_that_the_source_interpolates(begin, tmp_path, caplog):
    source, _ = transformers_vit(tmp_path / "vit")

    with caplog.at_level(logging.INFO):
        model, processor = begin("--model", str(tmp_path / "vit"), "--image_size", "24")

    pixels = torch.randn(2, 3, 24, 24)
    expected = source(pixels, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(model(pixels).logits, expected, rtol=0, atol=1e-5)
    assert (model.config.image_size, processor.size["height"]) == (24, 24)
    assert (
        f"Starts from {tmp_path / 'vit'} (ViTForImageClassification): 2 layers of 32, positions resampled from 4x4 to "
        "6x6, pixel mean [0.1, 0.2, 0.3] and std [0.5, 0.5, 0.5], its classifier for 2 classes"
    ) in caplog.messages


@pytest.mark.parametrize("names", [["flower", "temple", "tree"], ["flower", "fountain"]], ids=str)
def test_classifier_is_new_where_the_classes_differ(names, begin, tmp_path, class_folders, caplog):
    source, _ = transformers_vit(tmp_path / "vit")
    (class_folders / "temple").rename(class_folders / names[1])
    if len(names) > 2:
        shutil.copytree(class_folders / "flower", class_folders / names[2])

    with caplog.at_level(logging.INFO):
        model, _ = begin("--model", str(tmp_path / "vit"))

    assert list(model.config.id2label.values()) == names
    assert model.classifier.weight.shape == (len(names), 32)
    assert model.classifier.weight.std() < 0.05  # newly drawn, and not of the 0.2 of the source
    assert torch.equal(model.vit.layers[1].mlp.fc2.weight, source.vit.layers[1].mlp.fc2.weight)
    assert caplog.messages[-1].endswith(f"new classifier for {len(names)} classes")


def test_classifier_is_new_where_the_classes_come_in_another_order(begin, tmp_path, photographs):
    transformers_vit(tmp_path / "vit")  # flower, temple
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["temple", "flower"])})
    rows = {"image": [photographs[0].resize((30, 20))] * 20, "label": [0, 1] * 10}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "data.parquet")

    model, _ = begin(
        "--model", str(tmp_path / "vit"), "--data", str(tmp_path / "data.parquet"), "--near_duplicates", "ignore"
    )

    assert list(model.config.id2label.values()) == ["temple", "flower"]
    assert model.classifier.weight.std() < 0.05  # newly drawn, and not of the 0.2 of the source


def test_weights_of_half_precision_are_trained_in_float32(begin, vit):
    ViTForImageClassification.from_pretrained(vit).bfloat16().save_pretrained(vit)

    model, _ = begin("--model", vit)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_encoder_without_a_head_gets_a_classifier(begin, tmp_path, caplog):
    ViTModel(ViTConfig(**SIZES)).save_pretrained(tmp_path / "vit")
    ViTImageProcessor().save_pretrained(tmp_path / "vit")

    with caplog.at_level(logging.INFO):
        begin("--model", str(tmp_path / "vit"))

    assert caplog.messages[-1].endswith("new classifier for 2 classes")


def test_name_of_timm_means_its_pretrained_weights(begin, tmp_path, monkeypatch):
    source, _ = timm_vit(tmp_path / "vit")
    asked = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: asked.append((args, options)) or source)

    begin("--model", "vit_tiny_patch16_224.augreg_in21k")

    assert asked == [(("vit_tiny_patch16_224.augreg_in21k",), {"pretrained": True})]


def test_saved_labels_of_another_problem_do_not_choose_the_loss(begin, tmp_path):
    transformers_vit(tmp_path / "vit", problem_type="multi_label_classification")

    model, _ = begin("--model", str(tmp_path / "vit"))

    assert model(torch.zeros(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss > 0


# The recipe, and flags


def test_model_of_a_flag_wins_over_what_the_recipe_sets_for_its_own(begin, vit, caplog):
    recipe = f"{PLAIN[:-1]}, qk_norm: true, pooling: mean, patch_size: 8, drop_path_rate: 0.25, whiten_patches: true}}"

    with caplog.at_level(logging.INFO):
        model, _ = begin("--model", vit, recipe=recipe)

    config = model.config
    assert (config.qk_norm, config.pooling, config.patch_size, config.drop_path_rate) == (False, "cls", 4, 0.25)
    expected = "Left out of the recipe, because a flag replaces it: qk_norm, pooling, patch_size, whiten_patches"
    assert expected in caplog.messages


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        (
            "",
            ["--qk_norm", "true"],
            r"does not fit: qk_norm True \(saved: False\)\. Leave these out: the saved model has its own",
        ),
        ("", ["--num_attention_heads", "8"], r"does not fit: num_attention_heads 8 \(saved: 4\)\."),
        (", qk_norm: true, model: {vit}", [], r"does not fit: qk_norm True \(saved: False\)\."),
    ],
)
def test_contradiction_of_the_model_is_refused(recipe, flags, message, begin, vit):
    flags = flags and ["--model", vit, *flags]
    with pytest.raises(UserError, match=message):
        begin(*flags, recipe=PLAIN[:-1] + recipe.format(vit=vit) + "}")


def test_recipe_of_a_size_does_not_decide_for_a_trained_model_only(begin):
    _, recipe = parse_recipe(["cifar10_gpu", "--model", "Ti/4"])

    assert recipe.left_out == []
    assert recipe.values()["norm_first"] is True


def test_model_may_lie_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    (model, *_), _ = parse_recipe(["your_images", "--model=~/vit"])

    assert model.model == str(tmp_path / "vit")


@pytest.mark.parametrize("name", ["no/such", "nothing", "S/x"])
def test_model_that_is_nowhere_is_named(name, begin):
    with pytest.raises(UserError, match=rf"--model: {name} is .*A new model is named by its size, such as S/16 \(siz"):
        begin("--model", name)


def test_grey_model_is_refused(tmp_path, begin):
    transformers_vit(tmp_path / "grey", num_channels=1)

    with pytest.raises(UserError, match=r"grey is for images with num_channels 1, but every image is read as RGB\."):
        begin("--model", str(tmp_path / "grey"))


def test_sizes_are_the_models_and_passes_are_fewer(vit, class_folders, monkeypatch):
    monkeypatch.setattr(auto_config, "measure_speed", lambda *_: 1e6)
    args, recipe = parse_recipe(["your_images", "--data", str(class_folders), "--model", vit, "--use_cpu", "true"])

    config, _ = steps.make_choices(args, recipe, steps.load_data(args))

    assert config.image_size == 16  # of images of 96x64 pixels
    assert not {"image_size", "patch_size", "hidden_size", "initial_image_size"} & recipe.settings.keys()
    assert args.training.num_train_epochs == auto_config.MOST_PASSES / auto_config.PASSES_SAVED
    assert any("20 images, and a trained model" in line for line in recipe.choices())


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--learning_rate", "0.03"], True),  # 32 wide
        (["--learning_rate", "0.02"], False),
        (["--learning_rate", "0.03", "--freeze_layers", "all"], False),
    ],
)
def test_rate_too_high_for_fine_tuning_is_named_with_its_remedy(flags, warned, begin, vit, caplog):
    begin("--model", vit, *flags)

    remedy = "Try --learning_rate 5e-4 --layer_decay 0.75, as in the recipe finetune."
    assert any(f"of 0.03 is high for a trained model of width 32, which may forget what it knows. {remedy}" in line
               for line in caplog.messages) == warned  # fmt: skip


# Fine-tuning


def tune(vit, class_folders, output_dir, *flags, recipe=PLAIN):
    """Train; return the tensors of the model."""
    path = output_dir.parent / "recipe.yaml"
    path.write_text(recipe)
    argv = [str(path), "--data", str(class_folders), "--model", vit, "--output_dir", str(output_dir)]
    train.main([*argv, "--learning_rate", "1e-3", *flags])
    return load_file(output_dir / "model.safetensors")


@pytest.mark.parametrize(
    ("layers", "frozen", "flags"),
    [
        ("0", ("vit.embeddings.",), []),
        ("1", ("vit.embeddings.", "vit.layers.0."), ["--speed_choice", "eager+joined"]),
        ("all", ("vit.",), ["--ema_decay", "0.5"]),
    ],
)
def test_frozen_parameters_and_no_others_stay(layers, frozen, flags, class_folders, tmp_path):
    source, _ = transformers_vit(tmp_path / "vit")
    flags = ["--freeze_layers", layers, "--weight_decay", "0.5", "--max_steps", "3", *flags]

    tuned = tune(str(tmp_path / "vit"), class_folders, tmp_path / "run", *flags,
                 "--eval_strategy", "no", "--save_strategy", "steps", "--save_steps", "3")  # fmt: skip

    # The gradient of a key's bias is zero but for rounding, because a softmax cancels it.
    state = {name: tensor for name, tensor in source.state_dict().items() if not name.endswith("k_proj.bias")}
    unchanged = {name for name, tensor in state.items() if torch.equal(tuned[name], tensor)}
    assert unchanged == {name for name in state if name.startswith(frozen)}
    optimizer = torch.load(tmp_path / "run" / "last" / "optimizer.pt", weights_only=True)
    in_optimizer = sum(len(group["params"]) for group in optimizer["param_groups"])
    assert in_optimizer == len([name for name in tuned if not name.startswith(frozen)])


def test_resumed_run_with_frozen_layers_ends_with_the_same_bits(vit, class_folders, tmp_path):
    flags = ["--freeze_layers", "1", "--drop_path_rate", "0.5", "--ema_decay", "0.9", "--max_steps", "6",
             "--eval_strategy", "no", "--save_strategy", "steps", "--save_steps", "3"]  # fmt: skip
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    tune(vit, class_folders, whole, *flags)
    stopped.mkdir()
    (whole / "checkpoint-3").rename(stopped / "checkpoint-3")

    tune(vit, class_folders, stopped, *flags, "--resume_from_checkpoint", "true")

    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--freeze_layers", "3"], r"freeze_layers must be all or at most the model's 2 layers, got 3\."),
        (["--freeze_layers", "some"], r"freeze_layers must be a number of layers or all, got 'some'\."),
    ],
)
def test_what_cannot_be_frozen_is_refused(flags, message, begin, vit):
    with pytest.raises(UserError, match=message):
        begin("--model", vit, *flags)


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["digits", "--freeze_layers", "all", "--model", "Ti/4"], "Ti/4"),
        (["digits", "--layer_decay", "0.75", "--model", "Ti/4"], "Ti/4"),
        (["finetune", "--data", "nowhere"], "not given"),
    ],
)
def test_missing_model_is_reported_before_images_are_read(argv, given):
    with pytest.raises(UserError, match=rf"need a trained model, but --model is {given}\."):
        steps.check_and_seed(*parse_recipe(argv))


def test_recipe_for_fine_tuning_trains(vit, class_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_config, "SECONDS", 0.1)
    recipe = (RECIPES / "finetune.yaml").read_text()

    tuned = tune(vit, class_folders, tmp_path / "run", "--max_steps", "2", *SHORT, "--use_cpu", "true",
                 "--disable_tqdm", "true", recipe=recipe)  # fmt: skip

    assert all(torch.isfinite(tensor).all() for tensor in tuned.values())
    saved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (saved["layer_decay"], saved["model"]) == (0.75, vit)


@pytest.mark.parametrize("task", ["image-classification", "masked-image-modeling"])
def test_test_images_that_the_starting_model_has_learnt_from_are_counted(task, class_folders, tmp_path, caplog):
    recipe = tmp_path / "short.yaml"
    recipe.write_text(
        "{image_size: [32], patch_size: [8], max_steps: 1, eval_strategy: no, load_best_model_at_end: no, "
        "use_cpu: yes, disable_tqdm: yes}"
    )
    argv = [str(recipe), "--data", str(class_folders)]
    train.main([*argv, *SMALL, "--num_attention_heads", "2", "--task", task, "--output_dir", str(tmp_path / "first")])
    splits = pd.read_csv(tmp_path / "first" / SPLITS)
    for name in splits.query("split == 'test'")["image"]:
        Path(name).unlink()  # so that all others of the new test split were trained on, or in validation

    new = tmp_path / "new"
    train.main([*argv, "--model", str(tmp_path / "first"), "--test_fraction", "0.5", "--output_dir", str(new)])

    trained = {*splits.query("split == 'train'")["image"]}
    tested = [*pd.read_csv(new / SPLITS).query("split == 'test'")["image"]]
    number = len(trained.intersection(tested))
    assert number > 0
    assert f"{number} of the {len(tested)} test images may be among its training images" in caplog.text
    if task == "masked-image-modeling":
        return
    shutil.copytree(class_folders, tmp_path / "copies")  # as whoever sorts images into other folders makes them
    evaluate = ["evaluate", str(tmp_path / "first"), "--data", str(tmp_path / "copies"), "--use_cpu", "true"]
    assert vit_scratch.main([*evaluate, "--output_dir", str(tmp_path / "report")]) == 0
    left = len([*(tmp_path / "copies").rglob("*.jpg")])
    assert f"{len(trained)} of the {left} images have the names and sizes of training images" in caplog.text
