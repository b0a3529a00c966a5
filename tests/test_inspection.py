"""What is chosen by the images, and `--check`: what a user is told about data and model before a long run."""

import math
import shutil

import datasets
import pytest
import torch
import yaml
from datasets import Dataset, Features
from PIL import Image
from test_train_script import ROOT, SMALL, train

from hf_vit_scratch import inspection
from hf_vit_scratch.arguments import ViTTrainingArguments, parse_recipe
from hf_vit_scratch.data import load_splits


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(inspection, "SECONDS", 0.2)


def check(capsys, *argv):
    passed = train.main([*argv, "--check", "true"])["check"]
    lines = capsys.readouterr().out.splitlines()
    return passed, {line.split()[0]: line for line in lines if line[:1].isupper()}, "\n".join(lines)


def test_digits_pass(capsys, tmp_path):
    passed, lines, printed = check(capsys, *SMALL, "--output_dir", str(tmp_path), "--num_hidden_layers", "4")

    assert passed, printed
    assert "train: 1295 images of 10 classes, from 125 (8) to 131 (1)" in printed
    assert "500 RGB; width 8 to 8, height 8 to 8; the model gets 8x8" in lines["Images"].replace(" L;", " RGB;")
    assert "0 parameters are without one" in lines["Gradients"]
    assert "Nothing stands in the way of training." in lines["Verdict"]
    assert "the model alone" in lines["Speed"]
    with Image.open(tmp_path / "samples.png") as sheet:
        assert sheet.size == (1200, 700)
    # The folder of a check is no run that must not be overwritten.
    short = ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
    train.main([*SMALL, *short, "--output_dir", str(tmp_path)])


def test_rare_class_and_small_images_are_pointed_out(capsys, tmp_path, class_folders):
    for number in range(3, 12):
        (class_folders / "flower" / f"{number:02}.jpg").unlink()
    for number in range(12, 60):
        shutil.copy(class_folders / "temple" / "00.jpg", class_folders / "temple" / f"{number}.jpg")
    recipe = str(ROOT / "recipes" / "cifar10_cpu.yaml")
    argv = [
        recipe,
        *SMALL,
        "--num_attention_heads",
        "4",
        "--data",
        str(class_folders),
        "--output_dir",
        str(tmp_path / "run"),
    ]

    passed, lines, printed = check(capsys, *argv, "--image_size", "128", "--patch_size", "32",
                                   "--initial_image_size", "96", "--whiten_patches", "false",
                                   "--validation_fraction", "0.1", "--dataloader_num_workers", "1")  # fmt: skip

    assert not passed
    assert "'flower' has 1 training images, 'temple' 48" in printed
    assert "100% of the images are smaller than what the model gets" in printed
    assert "width 96 to 96, height 64 to 64" in lines["Images"]


def test_labels_that_do_not_belong_to_images_are_pointed_out(capsys, tmp_path, monkeypatch):
    batch = inspection._batch

    def same_images(*args, **kwargs):
        pixel_values, labels = batch(*args, **kwargs)
        return torch.zeros_like(pixel_values), labels

    monkeypatch.setattr(inspection, "_batch", same_images)
    monkeypatch.setattr(inspection, "MAX_STEPS", 5)

    passed, _, printed = check(capsys, *SMALL, "--output_dir", str(tmp_path))

    assert not passed
    assert "images by heart. Are labels and images those that belong together" in printed


def test_parameters_without_a_gradient_are_named(capsys, tmp_path, monkeypatch):
    init = train.ViTScratchForImageClassification.__init__

    def with_unused(self, config):
        init(self, config)
        self.unused = torch.nn.Linear(2, 2)

    monkeypatch.setattr(train.ViTScratchForImageClassification, "__init__", with_unused)

    _, lines, printed = check(capsys, *SMALL, "--output_dir", str(tmp_path))

    assert "2 parameters are without one" in lines["Gradients"]
    assert "These parameters get no gradient: unused.weight, unused.bias." in printed


YOUR_IMAGES = ROOT / "recipes" / "your_images.yaml"


def fitted(sizes, *flags):
    """The values that are chosen for images of these (width, height), by name, and the lines that say why."""
    different = list(dict.fromkeys(sizes))
    rows = Dataset.from_dict(
        {"image": [Image.new("RGB", size) for size in different]}, features=Features({"image": datasets.Image()})
    ).select([different.index(size) for size in sizes])
    args, recipe = parse_recipe([str(YOUR_IMAGES), *flags], YOUR_IMAGES)
    lines = inspection.fit_to_images(args, rows, set(yaml.safe_load(recipe)))
    return {name: value for part in args for name, value in vars(part).items()}, lines


def test_broken_image_is_no_hindrance_to_the_choice(class_folders):
    for file in class_folders.glob("*/*.jpg"):
        file.write_bytes(file.read_bytes()[:-100])  # named when it is read
    args, recipe = parse_recipe([str(YOUR_IMAGES)], YOUR_IMAGES)
    lines = inspection.fit_to_images(args, load_splits(str(class_folders))["train"], set(yaml.safe_load(recipe)))
    assert lines[0].startswith("image_size 64: half of the images are 64 pixels or less")


@pytest.mark.parametrize(
    ("flags", "augmented"),
    [
        ([], "300 passes"),
        (["--num_train_epochs", "70"], "70 passes"),
        (["--max_steps", "1000"], "267 passes"),
        (["--num_train_epochs", "2"], None),
        (["--max_steps", "10"], None),
    ],
)
def test_augmentation_is_chosen_by_the_passes_that_are_made(flags, augmented):
    chosen, lines = fitted([(32, 32)] * 60, *flags)  # in batches of 16
    assert chosen["auto_augment"] == ("trivialaugment" if augmented else None)
    assert (chosen["mixup_alpha"] > 0) == bool(augmented)
    assert [line for line in lines if "trivialaugment" in line] == [
        f"auto_augment trivialaugment: {augmented} over the same images"
    ] * bool(augmented)
    assert any("num_train_epochs" in line for line in lines) == (not flags)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("side", [20, 33, 64, 100, 223, 500])
def test_chosen_size_enlarges_no_image_and_is_cut_into_whole_patches(side, device, monkeypatch):
    monkeypatch.setattr(ViTTrainingArguments, "device", torch.device(device))

    chosen, _ = fitted([(side, side + 9), (side + 50, side), (side, side)])

    (image_size,), (patch_size,) = chosen["image_size"], chosen["patch_size"]
    assert image_size <= max(side, 32)
    assert image_size % patch_size == 0
    assert image_size // patch_size == (8 if device == "cpu" or image_size <= 64 else 16)


def test_large_photographs_get_a_large_image_on_a_gpu_and_a_small_one_on_a_cpu(monkeypatch):
    photographs = [(640, 480), (3000, 4000), (800, 600)]

    on_cpu, lines = fitted(photographs)
    monkeypatch.setattr(ViTTrainingArguments, "device", torch.device("cuda"))
    on_gpu, _ = fitted(photographs)

    assert (on_cpu["image_size"], on_gpu["image_size"]) == ([64], [224])
    assert lines[0] == (
        "image_size 64: half of the images are 600 pixels or less on their shorter side, and a CPU is slow beyond 64"
    )


def test_few_images_are_seen_more_often_in_smaller_batches_and_augmented_more():
    few, _ = fitted([(32, 32)] * 100)
    many, _ = fitted([(32, 32)] * 30_000)

    assert few["num_train_epochs"] > 4 * many["num_train_epochs"]
    assert few["per_device_train_batch_size"] < many["per_device_train_batch_size"]
    assert (few["auto_augment"], many["auto_augment"]) == ("trivialaugment", None)
    assert few["mixup_alpha"] > many["mixup_alpha"] == 0


def test_images_of_one_small_size_are_shifted_and_others_are_cropped():
    alike, _ = fitted([(32, 32)] * 50)
    mixed, _ = fitted([(32, 32)] * 50 + [(48, 32)])

    assert (alike["crop_padding"], alike["random_resized_crop_scale"]) == (4, None)
    assert (mixed["crop_padding"], mixed["random_resized_crop_scale"]) == (0, 0.35)


def test_what_is_set_is_not_chosen():
    flags = ["--image_size", "48", "96", "--hidden_size", "64", "--num_train_epochs", "3", "--mixup_alpha", "0"]

    chosen, lines = fitted([(500, 400)] * 50, *flags)

    assert (chosen["image_size"], chosen["num_train_epochs"]) == ([48, 96], 3)
    assert (chosen["hidden_size"], chosen["num_hidden_layers"]) == (64, None)
    assert (chosen["mixup_alpha"], chosen["cutmix_alpha"]) == (0, 0)
    assert 48 * 96 / chosen["patch_size"][0] ** 2 <= 64
    assert not any(name in line for line in lines for name in ("image_size", "hidden_size", "epochs 3", "mixup"))


def test_model_that_is_named_keeps_its_sizes():
    chosen, _ = fitted([(500, 400)] * 50, "--model", "Ti/8")

    assert (chosen["patch_size"], chosen["hidden_size"]) == (None, None)


def test_own_photographs_of_mixed_modes_train_with_the_recipe_and_the_choices_are_kept(
    class_folders, tmp_path, caplog
):
    for number, mode in enumerate(["L", "RGBA", "P", "CMYK"]):
        path = class_folders / "temple" / f"{number:02}.jpg"
        with Image.open(path) as image:
            image.resize((90 + 20 * number, 70)).convert(mode).save(path.with_suffix(".tif"))
        path.unlink()
    short = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    argv = [str(YOUR_IMAGES), "--data", str(class_folders), *short, "--output_dir", str(tmp_path / "run")]

    with caplog.at_level("INFO"):
        metrics = train.main([*argv, "--use_cpu", "true", "--disable_tqdm", "true"])

    assert math.isfinite(metrics["test_loss"])
    assert "image_size 64: half of the images are 64 pixels or less on their shorter side\n" in caplog.text
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "# chosen: patch_size 8: at most 64 tokens\n" in recipe
