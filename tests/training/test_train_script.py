"""`train.py` as a user runs it, and its results as a user uses them."""

import functools
import json
import runpy
import shutil
import sys
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import TINY
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, ViTImageProcessor, pipeline
from transformers.trainer_utils import PredictionOutput

import vit_scratch
from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchForMaskedImageModeling
from hf_vit_scratch.data.groups import LISTING
from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation import report
from hf_vit_scratch.speed import optimize
from hf_vit_scratch.training import steps
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.recipe import RECIPES, parse_recipe
from hf_vit_scratch.training.run_directory import resolve_checkpoint
from hf_vit_scratch.training.trainer import ViTTrainer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import train  # noqa: E402

SMALL = ["--hidden_size", "32", "--num_hidden_layers", "2", "--intermediate_size", "64", "--use_cpu", "true",
         "--disable_tqdm", "true"]  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A short run on the digits: its folder and metrics."""
    output_dir = tmp_path_factory.mktemp("run")
    argv = [*SMALL, "--output_dir", str(output_dir), "--num_train_epochs", "12", "--warmup_steps", "0.1"]
    argv += ["--eval_tta", "flip"]
    return output_dir, train.main([*argv, "--learning_rate", "4e-3", "--save_steps", "0.5", "--eval_steps", "0.5"])


@pytest.fixture
def digit():
    """A test image of the digits and its label."""
    row = load_digits()["test"][0]
    return row["image"], str(row["label"])


def test_run_learns(run):
    assert run[1]["test_accuracy"] > 0.6  # one in ten by chance; the recipe itself goes much further


def test_run_leaves_its_results(run):
    output_dir, metrics = run

    report = json.loads((output_dir / "metrics.json").read_text())
    assert {name: report[name] for name in metrics} == metrics
    matrix = np.array(report["confusion_matrix"])
    assert matrix.sum() == 360
    assert matrix.trace() / 360 == pytest.approx(metrics["test_accuracy"])
    assert metrics["test_flip_accuracy"] < metrics["test_accuracy"]  # a mirrored 2 is no 2
    assert report["per_class"]["3"]["recall"] == pytest.approx(matrix[3, 3] / matrix[3].sum())
    assert report["command"].startswith("python train.py --hidden_size 32")
    assert f"torch {torch.__version__.partition('+')[0]}" in report["versions"]
    text = (output_dir / "recipe.yaml").read_text()
    assert text.startswith("# python train.py --hidden_size 32")
    assert yaml.safe_load(text) | {"hidden_size": 32, "data": "digits", "learning_rate": 0.004} == yaml.safe_load(text)
    assert {"model.safetensors", "config.json", "preprocessor_config.json", "curves.png", "log.json", "README.md"} <= {
        p.name for p in output_dir.iterdir()
    }


def test_what_was_chosen_for_the_machine_is_used_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    dtypes = set()

    def remember(module, args, output):
        dtypes.add(getattr(output, "dtype", None))

    recipe = yaml.safe_load((RECIPES / "digits.yaml").read_text())
    del recipe["bf16"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    argv = [*SMALL, "--hidden_size", "128", "--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no"]
    with torch.nn.modules.module.register_module_forward_hook(remember):
        train.main([str(tmp_path / "recipe.yaml"), *argv, "--output_dir", str(tmp_path / "run")])

    assert torch.bfloat16 in dtypes
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "# chosen: bf16 true" in text
    assert "# not measured\nspeed_choice: sdpa\n" in text


def test_patch_embedding_starts_from_the_images_where_asked(tmp_path):
    flags = ["--max_steps", "1", "--learning_rate", "1e-12", "--whiten_patches", "true"]
    train.main([*SMALL, "--output_dir", str(tmp_path), *flags])

    embeddings = AutoModel.from_pretrained(tmp_path).embeddings.patch_embeddings
    digits = AutoImageProcessor.from_pretrained(tmp_path)(load_digits()["train"]["image"][:], return_tensors="pt")
    tokens = embeddings(digits["pixel_values"])
    torch.testing.assert_close(tokens.mean((0, 1)), torch.zeros(32), rtol=0, atol=0.05)
    assert embeddings.projection.bias.abs().mean() > 0.1  # it takes the mean patch away


def test_patch_embedding_of_a_saved_model_is_not_whitened(run, tmp_path):
    with pytest.raises(UserError, match="--whiten_patches does not go together with the trained model of --model"):
        train.main([*SMALL, "--output_dir", str(tmp_path), "--whiten_patches", "true", "--model", str(run[0])])


def test_run_shows_what_it_got_wrong(run):
    matrix = np.array(json.loads((run[0] / "metrics.json").read_text())["confusion_matrix"])
    assert matrix.trace() < 360, "no mistake to be shown"
    assert "(mistakes.png)" in (run[0] / "README.md").read_text()
    assert "(reliability.png)" in (run[0] / "README.md").read_text()
    assert (run[0] / "reliability.png").is_file()


@pytest.mark.parametrize("from_home", [False, True])
def test_images_of_a_folder_are_not_where_they_would_be_pushed(from_home, class_folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(class_folders.parent))
    data = f"~/{class_folders.name}" if from_home else str(class_folders)
    recipe = tmp_path / "photos.yaml"
    recipe.write_text("{image_size: 32, patch_size: 8, num_attention_heads: 2, max_steps: 1, learning_rate: 1e-5}")

    metrics = train.main([str(recipe), *SMALL, "--data", data, "--output_dir", str(tmp_path / "out")])

    assert metrics["test_accuracy"] < 1
    Image.open(tmp_path / "out" / "_mistakes.png").verify()
    assert not (tmp_path / "out" / "mistakes.png").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "mistakes" not in card
    assert "datasets:" not in card


def test_mistakes_of_before_a_resumption_go(tmp_path):
    (tmp_path / "mistakes.png").write_text("an older one")
    rows = load_digits()["test"].select([0])
    logits = np.array([[0.0, 2.0]])

    report.list_answers(PredictionOutput(logits, np.array([1]), {}), rows, ["a", "b"], tmp_path / "mistakes.png")

    assert [file.name for file in tmp_path.iterdir()] == ["_answers.csv"]


def test_resolved_recipe_gives_the_same_model_again(run, tmp_path):
    again = train.main([str(run[0] / "recipe.yaml"), "--output_dir", str(tmp_path)])

    assert again["test_loss"] == run[1]["test_loss"]
    assert (tmp_path / "model.safetensors").read_bytes() == (run[0] / "model.safetensors").read_bytes()


def test_model_loads_by_the_auto_classes(run):
    model = AutoModelForImageClassification.from_pretrained(run[0])
    digits = load_digits()["test"]
    pixel_values = AutoImageProcessor.from_pretrained(run[0])(digits["image"][:], return_tensors="pt")["pixel_values"]

    with torch.no_grad():
        predicted = model(pixel_values).logits.argmax(1)

    assert (predicted.numpy() == np.asarray(digits["label"])).mean() == pytest.approx(run[1]["test_accuracy"])


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_pipeline_takes_images_of_every_mode(run, digit, mode):
    image, label = digit
    classify = pipeline("image-classification", model=str(run[0]), device="cpu")

    answers = classify(image.convert(mode))

    assert answers[0]["label"] == label
    assert answers == classify(image)


def test_pipeline_takes_a_path_and_a_url(run, digit, tmp_path):
    image, label = digit
    image.save(tmp_path / "digit.png")
    classify = pipeline("image-classification", model=str(run[0]), device="cpu")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    from_path = classify(str(tmp_path / "digit.png"))
    from_url = classify(f"http://127.0.0.1:{server.server_port}/digit.png")
    server.shutdown()
    server.server_close()

    assert from_path == from_url == classify(image)
    assert from_path[0]["label"] == label


def test_feature_pipeline_gives_the_vector_that_the_classifier_reads(run, digit):
    extract = pipeline("image-feature-extraction", model=str(run[0]), device="cpu", pool=True)
    model = AutoModelForImageClassification.from_pretrained(run[0])
    pixel_values = AutoImageProcessor.from_pretrained(run[0])(digit[0], return_tensors="pt")["pixel_values"]

    with torch.no_grad():
        expected = AutoModel.from_pretrained(run[0])(pixel_values).pooler_output
        logits = model(pixel_values).logits
        from_features = model.classifier(torch.tensor(extract(digit[0])))

    assert extract(digit[0]) == expected.tolist()
    assert torch.equal(from_features, logits)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_nothing_is_written_among_the_images(command, run, class_folders, capsys):
    place = class_folders / "report"
    given = {"train": ["digits", *SMALL], "evaluate": [str(run[0])]}[command]

    exit_code = vit_scratch.main([command, *given, "--data", str(class_folders), "--output_dir", str(place)])

    assert exit_code == 2
    assert "report is in the folder of the images, " in capsys.readouterr().err
    assert not place.exists()


def test_folder_of_photographs_trains(class_folders, tmp_path):
    recipe = "cifar10_cpu"
    where = ["--data", str(class_folders), "--output_dir", str(tmp_path / "run")]
    short = ["--max_steps", "3", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    metrics = train.main([recipe, *where, *SMALL, *short, "--num_attention_heads", "4", "--image_size", "16", "24"])

    assert metrics["epoch"] == 3  # one batch of the twenty images that remain for training each
    labels = AutoModelForImageClassification.from_pretrained(tmp_path / "run").config.id2label
    assert labels == {0: "flower", 1: "temple"}
    classify = pipeline("image-classification", model=str(tmp_path / "run"), device="cpu")
    assert {answer["label"] for answer in classify(Image.new("RGB", (64, 48)))} == {"flower", "temple"}


START = ["--num_train_epochs", "1", "--eval_strategy", "no", "--save_strategy", "no"]


def test_saved_model_can_be_started_from(run, tmp_path):
    saved, before = run
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("data: digits\n")
    argv = [str(recipe), "--model", str(saved), "--use_cpu", "true", "--disable_tqdm", "true", *START]
    argv += ["--near_duplicates", "ignore", "--calibrate", "false"]  # or the temperature would be found anew

    after = train.main([*argv, "--bf16", "false", "--learning_rate", "1e-9", "--output_dir", str(tmp_path / "same")])

    assert after["test_accuracy"] == before["test_accuracy"]  # nothing was learnt, and nothing lost
    assert after["test_loss"] == pytest.approx(before["test_loss"], abs=1e-4)


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_starting_from_a_run_with_other_splits_is_warned_of(run, tmp_path, caplog, share):
    recipe = tmp_path / "empty.yaml"
    recipe.write_text(f"{{data: digits, seed: 43, validation_fraction: {share}, max_steps: 1}}")
    argv = [str(recipe), "--model", str(run[0]), "--use_cpu", "true", "--disable_tqdm", "true", *START]

    train.main([*argv, "--near_duplicates", "ignore", "--output_dir", str(tmp_path / "new")])

    said = f"{run[0]} was trained on other splits, of digits. Some test images may be among its training images"
    assert (said in caplog.text) == (share == 0.2)  # another seed cuts the same splits


def test_list_of_near_duplicates_of_a_check_is_replaced(tmp_path):
    listing = tmp_path / LISTING
    listing.write_text("image_1,split_1,image_2,split_2,same_label\na,train,b,test,True\n")

    steps.load_data(parse_recipe([])[0], listing)

    assert not listing.exists()  # the recipe ignores near duplicates


def test_near_duplicates_are_listed_where_a_run_asks_and_nowhere_else(tmp_path, class_folders):
    shutil.copy(class_folders / "temple" / "00.jpg", class_folders / "temple" / "copy.jpg")
    args, _ = parse_recipe(["your_images", "--data", str(class_folders), "--output_dir", str(tmp_path / "run")])

    steps.load_data(args)
    assert not (tmp_path / "run").exists()
    steps.load_data(args, tmp_path / "run" / LISTING)
    assert "copy.jpg" in (tmp_path / "run" / LISTING).read_text()


def test_image_processor_of_a_saved_model_does_not_crop(tmp_path, class_folders):
    ViTScratchForImageClassification(ViTScratchConfig(**TINY | {"image_size": 16, "patch_size": 8})).save_pretrained(
        tmp_path / "model"
    )
    ViTImageProcessor(size={"height": 20, "width": 20}, do_center_crop=True, crop_size=16).save_pretrained(
        tmp_path / "model"
    )
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("{max_steps: 1, eval_strategy: no, save_strategy: no, load_best_model_at_end: false}")
    train.main([str(recipe), "--model", str(tmp_path / "model"), "--data", str(class_folders), "--image_size", "32",
                "--use_cpu", "true", "--disable_tqdm", "true", "--output_dir", str(tmp_path / "run")])  # fmt: skip
    processor = AutoImageProcessor.from_pretrained(tmp_path / "run")
    assert processor(Image.new("RGB", (50, 40)), return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)


def test_saved_model_without_an_image_processor_is_refused(tmp_path):
    ViTScratchForImageClassification(ViTScratchConfig(**TINY)).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("data: digits\n")
    with pytest.raises(UserError, match=r"model does not say how RGB pixels are normalized\."):
        train.main([str(recipe), "--model", str(tmp_path / "model"), "--output_dir", str(tmp_path / "run")])


def test_encoder_without_a_head_can_be_started_from(tmp_path):
    config = ViTScratchConfig(image_size=8, patch_size=2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    encoder = ViTScratchForMaskedImageModeling(config)
    encoder.save_pretrained(tmp_path / "encoder")
    ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.1] * 3).save_pretrained(tmp_path / "encoder")
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("data: digits\n")
    argv = [str(recipe), "--model", str(tmp_path / "encoder"), "--use_cpu", "true", "--disable_tqdm", "true", *START]

    train.main([*argv, "--image_size", "12", "--learning_rate", "0", "--output_dir", str(tmp_path / "run")])

    tuned = AutoModelForImageClassification.from_pretrained(tmp_path / "run")
    assert tuned.config.image_size == 12
    assert tuned.classifier.out_features == 10
    expected = encoder.vit.layers.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tuned.vit.layers.state_dict().items())
    processor = AutoImageProcessor.from_pretrained(tmp_path / "run")
    assert (list(processor.image_mean), processor.size["height"]) == ([0.1] * 3, 12)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            ["--hidden_size", "64"],
            r"does not fit: hidden_size 64 \(saved: 32\)\. Leave these out: the saved model has its own",
        ),
        (["--pooling", "mean"], r"does not fit: pooling mean \(saved: cls\)\. Leave"),
        (["--patch_size", "5"], r"does not fit: patch_size 5 \(saved: 2\)"),
        (["--image_size", "9"], r"must be divisible by patch_size"),
    ],
)
def test_flags_that_do_not_fit_a_saved_model_are_named(run, choice, message, tmp_path):
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("data: digits\n")

    with pytest.raises(UserError, match=message):
        train.main([str(recipe), "--model", str(run[0]), *choice, "--output_dir", str(tmp_path / "x"), *START])


@pytest.mark.parametrize(("device", "choice"), [("cpu", "plain"), ("cuda", "auto")])
def test_attention_that_is_named_is_not_measured(device, choice, monkeypatch):
    monkeypatch.setattr(ViTTrainingArguments, "device", torch.device(device))
    monkeypatch.setattr(ViTTrainingArguments, "world_size", 1)
    args, recipe = parse_recipe(["--attn_implementation", "sdpa"])

    steps.make_choices(args, recipe, steps.load_data(args))

    assert args.training.speed_choice == choice


def test_folder_of_a_finished_run_is_not_overwritten(run):
    before = (run[0] / "model.safetensors").read_bytes()

    with pytest.raises(UserError, match=r"is not empty, and a run is never overwritten"):
        train.main(["--output_dir", str(run[0])])
    assert (run[0] / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("recipe", ["your_images", "finetune"])
def test_recipe_for_own_images_needs_images(recipe, tmp_path):
    with pytest.raises(UserError, match=r"This recipe is for images of your own: add --data FOLDER\."):
        train.main([recipe, "--output_dir", str(tmp_path / "run")])


def test_mistake_ends_in_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--learning_rat", "1"])

    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

    message = "python train.py: error: the command line: unknown flag 'learning_rat'. Did you mean learning_rate?"
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--image_size", "9"], r"^image_size \(height 9\) must be divisible by patch_size \(height 2\)\."),
        (["--translate", "2"], r"^translate must lie in \[0, 1\), got 2"),
        (
            ["--initial_image_size", "4", "5", "--initial_image_size_fraction", "0.5"],
            r"^initial_image_size must be divisible by patch_size \(2, 2\), got \(4, 5\)\.",
        ),
        (
            ["--metric_for_best_model", "acc"],
            r"^metric_for_best_model must be one of accuracy, top5_accuracy, balanced_accuracy, macro_f1, loss; got",
        ),
        (["--include_num_input_tokens_seen", "maybe"], r"[^.]\. Run python train\.py --help for the flags\.$"),
        (["--eval_tta", "crops"], r"^eval_tta must be flip, or left out, got 'crops'\."),
        (["--num_train_epochs", "0"], r"^num_train_epochs must be a positive number, got 0"),
        (["--num_train_epochs", "inf"], r"^num_train_epochs must be a positive number, got inf"),
        (["--gradient_accumulation_steps", "0"], r"^gradient_accumulation_steps must be at least 1, got 0"),
        (["--per_device_train_batch_size", "0"], r"^per_device_train_batch_size must be at least 1, got 0"),
        (["--image_size", "0"], r"^image_size must be one or two positive numbers, got \[0\]"),
        (["--patch_size", "1", "2", "2"], r"^patch_size must be one or two positive numbers, got \[1, 2, 2\]"),
        (["--initial_image_size", "0"], r"^initial_image_size must be one or two positive numbers, got \[0\]"),
        (["--muon_beta2", "0.9"], r"^--muon_beta2 does nothing without --muon true\. Add that, or leave it out\."),
        (
            ["--muon", "true", "--muon_learning_rate=-1"],
            r"^muon_learning_rate must be 0 or more, got -1",
        ),
        (["--mask_ratio", "0.5"], r"^--mask_ratio does nothing without --task masked-image-modeling\."),
        (["--randaugment_num_ops", "3"], r"^--randaugment_num_ops does nothing without --auto_augment randaugment"),
        (["--mixup_prob", "0.5"], r"^--mixup_prob does nothing without --mixup_alpha or --cutmix_alpha\."),
        (
            ["--policy_start_fraction", "0.5"],
            r"^--policy_start_fraction does nothing without --auto_augment or --random_erasing_prob\.",
        ),
        (["--classifier_act", "relu"], r"^--classifier_act does nothing without --classifier_hidden_size\."),
        (
            ["--whiten_patches", "true", "--patch_initializer_range", "0.1"],
            r"^--patch_initializer_range does nothing without --whiten_patches false\.",
        ),
        (["--target_accuracy", "0.9", "--calibrate", "false"], r"^target_accuracy needs calibrate, which is false"),
        (
            ["--attn_implementation", "eager", "--speed_choice", "sdpa"],
            r"^--speed_choice does not go together with --attn_implementation",
        ),
        (
            ["--dataloader_drop_last", "true", "--per_device_train_batch_size", "4000"],
            r"^dataloader_drop_last leaves no batch: the 1295 training images must be at least 4000\.",
        ),
        (
            ["--dataloader_drop_last", "true", "--per_device_train_batch_size", "4000", "--fit_to_images", "true"],
            r"^dataloader_drop_last leaves no batch: the 1295 training images must be at least 4000\.",
        ),
    ],
)
def test_mistake_is_found_before_anything_is_written(argv, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train.main([*SMALL, "--output_dir", str(tmp_path / "run"), *argv])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--attn_implementation", "fast"], r"`attn_implementation=\"fast\"`"),
        (["--seed=-1"], r"Seed must be between 0 and"),
        (["--learning_rate=-1"], r"Invalid learning rate: -1"),
        (["--lr_scheduler_type", "cosine_with_min_lr"], r"min_lr"),
        (["--report_to", "somewhere"], r"somewhere"),
        (["--train_split", "all"], r"there is no split 'all'"),
    ],
)
def test_value_that_a_library_refuses_is_the_users_mistake(argv, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        train.main([*SMALL, "--output_dir", str(tmp_path / "run"), *argv])
    assert "\n" not in str(error.value)


def test_null_is_not_called_idle():
    steps.check_and_seed(*parse_recipe(["--mask_ratio", "null", "--randaugment_num_ops=null", "--muon_beta2", "null"]))


def test_file_that_macos_writes_is_no_run(tmp_path):
    (tmp_path / ".DS_Store").touch()
    args, recipe = parse_recipe(["--output_dir", str(tmp_path)])
    assert resolve_checkpoint(args.training, recipe) is None


def test_error_within_training_keeps_its_type(tmp_path, monkeypatch):
    def fail(self, model, inputs, *args):
        self.has_seen_batch = True
        raise ValueError("a fault of the program")

    monkeypatch.setattr(ViTTrainer, "training_step", fail)
    with pytest.raises(ValueError, match=r"a fault of the program") as error:
        train.main([*SMALL, "--output_dir", str(tmp_path)])
    assert not isinstance(error.value, UserError)


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        train.main(["--help"])

    shown = capsys.readouterr().out
    for flag in ("--patch_size", "--data ", "--horizontal_flip_prob", "--learning_rate"):
        assert flag in shown


def test_push_that_fails_loses_nothing_of_the_run(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route\nto the Hub")

    monkeypatch.setattr(ViTTrainer, "init_hf_repo", lambda trainer: setattr(trainer, "hub_model_id", "me/digits"))
    monkeypatch.setattr(ViTTrainer, "push_to_hub", fail)
    argv = [*SMALL, "--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--push_to_hub", "true"]

    again = r'hf upload me/d.* --exclude "_\*" --exclude training_args\.bin'
    with pytest.raises(UserError, match=rf"not on the Hub: no route to the Hub\. Try: {again}$"):
        train.main([*argv, "--load_best_model_at_end", "false", "--output_dir", str(tmp_path / "run")])

    assert {"model.safetensors", "metrics.json", "README.md"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_attention_that_the_user_gave_is_used_without_a_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(optimize, "_choose", lambda *args: pytest.fail("it was measured"))
    flags = ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--attn_implementation", "eager"]
    train.main([*SMALL, *flags, "--output_dir", str(tmp_path)])
    assert "speed_choice" not in (tmp_path / "recipe.yaml").read_text()
