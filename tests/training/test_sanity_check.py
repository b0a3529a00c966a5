"""`--check`: what a user is told about data and model before a long run."""

import csv
import re
import shutil

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from test_train_script import SMALL, train

from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.data.dataset import ImageClassificationDataset
from hf_vit_scratch.model.modeling_vit_scratch import ViTScratchLayer
from hf_vit_scratch.training import sanity_check
from hf_vit_scratch.training.trainer import ViTTrainer


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(sanity_check, "SECONDS", 0.2)
    monkeypatch.setattr(sanity_check, "TRIAL_SECONDS", 2.0)


def check(capsys, *argv):
    passed = train.main([*argv, "--check", "true"])["check"]
    lines = capsys.readouterr().out.splitlines()
    return passed, {line.split()[0]: line for line in lines if line[:1].isupper()}, "\n".join(lines)


def test_digits_pass(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sanity_check, "TRIAL_SECONDS", 4.0)  # also on a busy machine the loss falls
    passed, lines, printed = check(capsys, *SMALL, "--output_dir", str(tmp_path), "--num_hidden_layers", "4")

    assert passed, printed
    assert "train: 1295 images of 10 classes, from 125 (8) to 131 (1)" in printed
    assert "500 of 1295 looked at: 500 RGB; width 8 to 8, height 8 to 8; the model gets 8x8" in lines[
        "Images"
    ].replace(" L;", " RGB;")
    assert "Nothing stands in the way of training." in lines["Verdict"]
    assert "the model alone" in lines["Speed"]
    assert re.search(r"about \d+\.\d minutes of training, about 60 passes", lines["Time"])
    assert re.search(r"\d images/s\): it falls$", lines["Trial"])
    with Image.open(tmp_path / "_samples.png") as sheet:
        assert sheet.size == (1056, 1386)  # six rows of six images
    # The folder of a check is no run that must not be overwritten.
    short = ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
    train.main([*SMALL, *short, "--output_dir", str(tmp_path)])


def test_check_makes_no_repository(tmp_path, monkeypatch, without):
    without("_overfit", "_trial")
    monkeypatch.setattr(ViTTrainer, "init_hf_repo", lambda trainer: pytest.fail("the Hub is called"))
    train.main([*SMALL, "--check", "true", "--push_to_hub", "true", "--output_dir", str(tmp_path)])


@pytest.fixture
def without(monkeypatch):
    """Leave out parts of the check that take time."""

    def without(*names):
        for name in names:
            monkeypatch.setattr(sanity_check, name, lambda trainer: [])

    return without


def test_rare_class_and_small_images_are_pointed_out(capsys, tmp_path, class_folders, without):
    without("_overfit", "_trial")
    for number in range(3, 12):
        (class_folders / "flower" / f"{number:02}.jpg").unlink()
    for number in range(12, 60):
        shutil.copy(class_folders / "temple" / "00.jpg", class_folders / "temple" / f"{number}.jpg")
    recipe = "cifar10_cpu"
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


def test_copies_with_different_labels_are_pointed_out(capsys, tmp_path, class_folders, without):
    without("_overfit", "_trial", "data_report")
    shutil.copy(class_folders / "temple" / "00.jpg", class_folders / "flower" / "copy.jpg")
    argv = ["cifar10_cpu", *SMALL, "--data", str(class_folders), "--output_dir", str(tmp_path / "run")]

    passed, _, printed = check(capsys, *argv, "--image_size", "32", "--num_attention_heads", "4",
                               "--near_duplicates", "keep_together", "--whiten_patches", "false")  # fmt: skip

    assert not passed
    listing = tmp_path / "run" / "_near_duplicates.csv"
    differ = sum(row["same_label"] == "False" for row in csv.DictReader(listing.read_text().splitlines()))
    assert differ >= 1
    assert f"with different labels: {differ}. Is one of each wrong? See {listing}." in printed


def test_labels_that_do_not_belong_to_images_are_pointed_out(capsys, tmp_path, monkeypatch, without):
    without("_trial")
    sample = ImageClassificationDataset.sample

    def same_images(*args, **kwargs):
        batch = sample(*args, **kwargs)
        return batch | {"pixel_values": torch.zeros_like(batch["pixel_values"])}

    monkeypatch.setattr(ImageClassificationDataset, "sample", same_images)
    monkeypatch.setattr(sanity_check, "MAX_STEPS", 5)

    passed, _, printed = check(capsys, *SMALL, "--output_dir", str(tmp_path))

    assert not passed
    assert "images by heart. Are labels and images those that belong together" in printed


def test_number_that_is_the_same_in_all_images_is_no_problem():
    labels = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    near, far = labels + 0.1, labels + torch.tensor([0.1, 1.0])

    assert sanity_check._is_right(near, labels).tolist() == [True] * 3
    assert sanity_check._is_right(far, labels).tolist() == [False] * 3


def test_loss_that_does_not_move_is_pointed_out(capsys, tmp_path, without):
    without("_overfit")
    passed, lines, printed = check(capsys, *SMALL, "--output_dir", str(tmp_path), "--learning_rate", "1e-9")

    assert not passed
    assert "has hardly moved" in lines["Trial"]
    assert "The loss has hardly moved in a short trial. Do the labels belong to the images" in printed


def test_samples_are_plain_above_and_mixed_below(capsys, tmp_path, monkeypatch, without):
    without("_overfit", "_trial", "data_report")
    drawn = []
    monkeypatch.setattr(sanity_check, "plot_images", lambda images, captions, path: drawn.extend(captions))
    check(capsys, *SMALL, "--output_dir", str(tmp_path), "--mixup_alpha", "0.8", "--mixup_prob", "1")
    assert all(re.fullmatch(r"\d", caption) for caption in drawn[:18])
    assert all(re.fullmatch(r"\d \d+%", caption) for caption in drawn[18:])
    assert len(drawn) == 36


def test_speed_is_measured_in_the_precision_of_the_run(capsys, tmp_path, monkeypatch):
    precisions, loss = set(), ViTScratchForImageClassification._loss
    monkeypatch.setattr(sanity_check, "_overfit", lambda trainer: [])  # which is in float32
    monkeypatch.setattr(sanity_check, "TRIAL_SECONDS", 0.2)
    monkeypatch.setattr(
        ViTScratchForImageClassification,
        "_loss",
        lambda self, logits, labels: precisions.add(logits.dtype) or loss(self, logits, labels),
    )

    check(capsys, *SMALL, "--output_dir", str(tmp_path), "--bf16", "true", "--speed_choice", "plain")

    assert precisions == {torch.bfloat16}


def test_check_saves_memory_as_training_does(tmp_path, monkeypatch, without):
    without("_trial", "data_report")
    seen, call = [], ViTScratchLayer.__call__

    def remember(layer, hidden_states, *args, **kwargs):
        if torch.is_grad_enabled():
            seen.append((layer.gradient_checkpointing, len(hidden_states)))
        return call(layer, hidden_states, *args, **kwargs)

    monkeypatch.setattr(sanity_check, "MAX_STEPS", 1)
    monkeypatch.setattr(ViTScratchLayer, "__call__", remember)
    train.main([*SMALL, "--check", "true", "--output_dir", str(tmp_path / "run"), "--gradient_checkpointing", "true",
                "--per_device_train_batch_size", "24", "--speed_choice", "plain"])  # fmt: skip

    assert {*seen} == {(True, 24), (True, 16)}  # 64 images by heart, in batches


@pytest.mark.parametrize("bf16", [True, False])
def test_images_are_learnt_in_the_precision_of_the_run(bf16, tmp_path, monkeypatch, without):
    without("_trial", "data_report")
    monkeypatch.setattr(sanity_check, "MAX_STEPS", 1)
    seen = []
    forward = ViTScratchLayer.forward
    monkeypatch.setattr(
        ViTScratchLayer, "forward",
        lambda self, *given, **more: seen.append(torch.is_autocast_enabled("cpu")) or forward(self, *given, **more),
    )  # fmt: skip
    train.main([*SMALL, "--check", "true", "--output_dir", str(tmp_path / "run"), "--bf16", str(bf16),
                "--speed_choice", "plain"])  # fmt: skip

    assert {*seen} == {bf16}


def test_images_learnt_in_batches_give_the_gradients_of_all(tmp_path, monkeypatch, without):
    without("_trial", "data_report")
    monkeypatch.setattr(sanity_check, "MAX_STEPS", 1)
    gradients = []

    class Optimizer(torch.optim.AdamW):
        def step(self, closure=None):
            gradients.append([parameter.grad.clone() for parameter in self.param_groups[0]["params"]])

    monkeypatch.setattr(torch.optim, "AdamW", Optimizer)
    for size in ("24", "64"):
        train.main([*SMALL, "--check", "true", "--output_dir", str(tmp_path / size), "--speed_choice", "plain",
                    "--per_device_train_batch_size", size, "--bf16", "false"])  # fmt: skip

    for part, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-5)


def test_trial_accumulates_and_clips_as_the_run_does(capsys, tmp_path, monkeypatch, without):
    without("_overfit", "data_report")
    monkeypatch.setattr(sanity_check, "TRIAL_SECONDS", 0.5)
    batches, clipped, scaled = [], [], []
    prepare, clip, backward = ViTTrainer._prepare_inputs, torch.nn.utils.clip_grad_norm_, Accelerator.backward
    monkeypatch.setattr(ViTTrainer, "_prepare_inputs", lambda self, *given: batches.append(1) or prepare(self, *given))
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *given, **more: clipped.append(given[1]) or clip(*given, **more)
    )
    # It scales the loss, as float16 needs it.
    monkeypatch.setattr(Accelerator, "backward", lambda self, *given: scaled.append(1) or backward(self, *given))

    check(capsys, *SMALL, "--output_dir", str(tmp_path / "run"), "--per_device_train_batch_size", "16",
          "--gradient_accumulation_steps", "4", "--max_grad_norm", "0.5")  # fmt: skip

    assert {*clipped} == {0.5}
    assert len(batches) == len(scaled) == 4 * len(clipped)


def test_speed_is_that_of_full_batches(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sanity_check, "images_per_second", lambda step, seconds: float(step()))

    # The first of two batches is full, and the second has one image.
    train.main([*SMALL, "--data_report", "true", "--output_dir", str(tmp_path / "run"), "--num_train_epochs", "1",
                "--per_device_train_batch_size", "1294"])  # fmt: skip

    assert "the model alone 1294: loading limits the speed" in capsys.readouterr().out


def test_minutes_count_the_larger_images_of_later_training(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sanity_check, "images_per_second", lambda step, seconds: 100.0)

    train.main([*SMALL, "--data_report", "true", "--output_dir", str(tmp_path / "run"), "--num_train_epochs", "100",
                "--initial_image_size", "4", "--initial_image_size_fraction", "0.5"])  # fmt: skip

    # Each of 1,295 images is loaded, and then computed: half of the time with four times as many pixels.
    assert f"about {3.5 * 100 * 1295 / 100 / 60:.1f} minutes of training, about 100 passes" in capsys.readouterr().out
