"""Training without labels: masks, and `train.py --task masked-image-modeling`."""

import json

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from safetensors.torch import load_file
from test_train_script import SMALL, train
from transformers import AutoModelForMaskedImageModeling, ViTImageProcessor

from hf_vit_scratch.data.augmentation import Augmentation
from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset
from hf_vit_scratch.data.masking import MaskedImageDataset, random_masks
from hf_vit_scratch.data.sampler import Sample
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.data.transforms import SampleRNG
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation import report

MASKED = [*SMALL, "--task", "masked-image-modeling"]


@pytest.fixture
def make_dataset(photographs):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a"])})
    crops = [photographs[0].crop((9 * i, 0, 9 * i + 40, 30)) for i in range(6)]
    rows = Dataset.from_dict({"image": crops, "label": [0] * 6}, features=features)
    processor = ViTImageProcessor(size={"height": 16, "width": 24})

    def make(dataset_class=MaskedImageDataset, stages=(), seed=0, **masking):
        return dataset_class(rows, BatchTransform(processor, stages, None, seed), **masking)

    return make


def inputs(dataset, *keys):
    """The model's inputs."""
    return dataset.batch_transform(dataset.__getitems__(keys))


def test_each_mask_hides_its_share_and_no_two_are_alike():
    masks = random_masks(SampleRNG([(row,) for row in range(200)]), (6, 8), 0.6)

    assert masks.shape == (200, 6, 8)
    assert set(masks.sum((1, 2))) == {29}  # 0.6 * 48
    assert len({mask.tobytes() for mask in masks}) == 200
    assert np.abs(masks.mean(0) - 0.6).max() < 0.15  # no place is preferred


@pytest.mark.parametrize(("ratio", "expected"), [(0.55, 55), (0.07, 7), (0.551, 55)])
def test_share_of_the_units_is_masked(ratio, expected):
    assert random_masks(SampleRNG([(0,)]), (10, 10), ratio).sum() == expected


def test_masks_are_made_of_squares_of_patches(make_dataset):
    dataset = make_dataset(patch_size=(4, 4), mask_patch_size=8)

    masks = inputs(dataset, 0, 1, 2)["bool_masked_pos"]

    squares = masks.view(3, 2, 2, 3, 2).transpose(2, 3).flatten(3)  # (B, 2, 3, 4): of 2x2 patches each
    assert masks.dtype == torch.bool
    assert torch.equal(squares.all(-1), squares.any(-1))
    assert squares.all(-1).flatten(1).sum(1).tolist() == [4, 4, 4]  # 0.6 * 6


def test_masks_depend_on_seed_epoch_and_row_alone(make_dataset):
    def mask(*samples, seed=0):
        return inputs(make_dataset(patch_size=(4, 4), stages=[None], seed=seed), *samples)["bool_masked_pos"][-1]

    alone = mask(Sample(1, 0, 4))

    assert torch.equal(mask(Sample(1, 0, 2), Sample(1, 0, 4)), alone)
    assert not torch.equal(mask(Sample(2, 0, 4)), alone)
    assert not torch.equal(mask(Sample(1, 0, 3)), alone)
    assert not torch.equal(mask(Sample(1, 0, 4), seed=1), alone)


def test_pixels_are_those_of_a_classifier(make_dataset):
    stages = [Augmentation((16, 24), rotation_degrees=20)]
    masked, labelled = (
        inputs(make_dataset(which, stages, **options), Sample(3, 0, 1), Sample(3, 0, 5))["pixel_values"]
        for which, options in ((MaskedImageDataset, {"patch_size": (4, 4)}), (ImageClassificationDataset, {}))
    )

    assert torch.equal(masked, labelled)


@pytest.mark.parametrize(
    ("masking", "message"),
    [
        ({"mask_ratio": 1.0}, r"mask_ratio must mask some of the 24 parts of an image, got 1.0"),
        ({"mask_patch_size": 6}, r"mask_patch_size must be a multiple of patch_size \(4, 4\), got 6"),
        ({"mask_patch_size": 16}, r"mask_patch_size must divide the image size 16x24, got 16"),
        (
            {"mask_patch_size": 8, "stages": (Augmentation((16, 24)), Augmentation((8, 12)))},
            r"the image size 8x12, got 8",
        ),
        (
            {"mask_patch_size": 8, "mask_ratio": 0.95},
            r"mask_ratio must mask some of the 6 parts of an image, got 0\.95",
        ),
    ],
)
def test_impossible_masks_are_refused(masking, message, make_dataset):
    with pytest.raises(UserError, match=message):
        make_dataset(patch_size=(4, 4), **masking)


# Data


def test_images_without_labels_are_found_anywhere(tmp_path):
    for name in ("1.png", "deep/2.png", "deep/er/3.png", "no.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name, "PNG")

    splits = load_splits(str(tmp_path), labelled=False)

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 1, "validation": 1, "test": 1}


def test_images_beside_a_training_split_are_not_left_out_silently(tmp_path, caplog):
    for name in ("train/1.png", "train/2.png", "val/2.png", "car/3.png", "notes/4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name, "PNG")
    load_splits(str(tmp_path), labelled=False, test_split="validation", near_duplicates="ignore")
    assert "1 images are in no class folder, split or table and are not used; the first is " in caplog.text
    assert "car/3.png" in caplog.text


def test_labels_of_a_source_are_not_read(tmp_path):
    features = Features({"picture": ImageFeature(), "kind": ClassLabel(names=["a", "b"])})
    pictures = [Image.new("L", (8, 8))] * 10
    Dataset.from_dict({"picture": pictures, "kind": [None] * 10}, features=features).to_parquet(tmp_path / "a.parquet")

    splits = load_splits(str(tmp_path), labelled=False)

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 8, "validation": 1, "test": 1}


def test_folder_without_images_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there are no images"):
        load_splits(str(tmp_path), labelled=False)


# Runs


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A short run on the digits without their labels: its folder and metrics."""
    output_dir = tmp_path_factory.mktemp("masked")
    argv = [*MASKED, "--output_dir", str(output_dir), "--num_train_epochs", "32", "--learning_rate", "4e-3",
            "--mask_ratio", "0.3"]  # fmt: skip
    outputs = []
    predict = report.predict_split
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "predict_split", lambda *given: outputs.append(predict(*given)) or outputs[0])
        metrics = train.main([*argv, "--save_steps", "0.5", "--eval_steps", "0.5"])
    assert outputs[0].predictions is None  # all reconstructions would fill the memory
    return output_dir, metrics


def test_model_learns_to_reconstruct_what_is_masked(encoder):
    output_dir, metrics = encoder
    grey = load_splits("digits", labelled=False)["test"]

    # As good as one grey for each pixel is what ignores the picture.
    pixels = np.stack([np.asarray(image.convert("L"), float) for image in grey["image"]]) / 127.5 - 1
    constant = np.abs(pixels - np.median(pixels, axis=0)).mean()
    assert metrics["test_loss"] < 0.95 * constant
    assert json.loads((output_dir / "metrics.json").read_text())["test_loss"] == metrics["test_loss"]
    with Image.open(output_dir / "_reconstructions.png") as picture:
        assert picture.size[0] > 500
    model, found = AutoModelForMaskedImageModeling.from_pretrained(output_dir, output_loading_info=True)
    assert not any(found.values())


def test_classifier_starts_from_what_was_learnt_without_labels(encoder, tmp_path):
    train.main([*SMALL, "--model", str(encoder[0]), "--max_steps", "1", "--learning_rate", "0", "--calibrate", "false",
                "--eval_strategy", "no", "--output_dir", str(tmp_path / "run")])  # fmt: skip

    learnt, start = (load_file(folder / "model.safetensors") for folder in (encoder[0], tmp_path / "run"))
    names = {name for name in learnt if name.startswith("vit.")} - {"vit.embeddings.mask_token"}
    assert names == {name for name in start if name.startswith("vit.")}
    assert all(torch.equal(start[name], learnt[name]) for name in names)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--check"], r"--check does not go together with --task masked-image-modeling"),
        (["--mixup_alpha", "1"], r"--mixup_alpha does not go together"),
        (["--label_smoothing_factor", "0.1"], r"--label_smoothing_factor does not go together"),
        (["--streaming", "true"], r"--streaming does not go together"),
        (["--fc_norm", "true"], r"fc_norm=True"),
        (["--task", "painting"], r"task must be one of image-classification, masked-image-modeling; got 'painting'"),
    ],
)
def test_what_needs_labels_is_refused(more, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train.main([*MASKED, *more, "--output_dir", str(tmp_path / "run")])
