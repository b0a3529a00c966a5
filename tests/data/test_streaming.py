"""Training images that are read while training."""

import io
import itertools
import json
import re
import shutil

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from test_train_script import SMALL, train
from torch.utils.data import DataLoader
from transformers import ViTImageProcessor

import vit_scratch
from hf_vit_scratch.data.augmentation import Augmentation
from hf_vit_scratch.data.dataset import BatchTransform, collate
from hf_vit_scratch.data.images import decode_image
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.data.streaming import ImageClassificationStream
from hf_vit_scratch.errors import UserError

FEATURES = Features({"picture": ImageFeature(), "kind": ClassLabel(names=["a", "b", "c"])})
PLAIN = Augmentation((8, 8))


def stream_splits(data, **choices):
    """The training stream, and the other splits."""
    splits = load_splits(data, streaming=True, **choices)
    return splits.pop("train"), splits


def workers(stream):
    """Batches that two worker processes load."""
    return DataLoader(stream, batch_size=None, num_workers=2, collate_fn=collate)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    """`datasets` sleeps for five seconds after each pass over a stream, until threads of Arrow's have ended."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def write(folder, split, files, rows, features=FEATURES, unlabelled=False):
    """Parquet files of grey images, of which no two have the same brightness."""
    for number in range(files):
        shades = range(number * rows, (number + 1) * rows)
        kinds = [-1 if unlabelled else shade % 3 for shade in shades]
        kinds = [str(kind) for kind in kinds] if isinstance(features["kind"], Value) else kinds
        pictures = [Image.new("L", (8, 8), 2 * shade) for shade in shades]
        Dataset.from_dict({"picture": pictures, "kind": kinds}, features=features).to_parquet(
            folder / f"{split}-{number:05}-of-{files:05}.parquet"
        )


def content(shade):
    """A grey image as the bytes of a PNG file."""
    file = io.BytesIO()
    Image.new("L", (8, 8), shade).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Four files of 25 training images, and one of 30 for validation."""
    path = tmp_path / "data"
    path.mkdir()
    write(path, "train", 4, 25)
    write(path, "validation", 1, 30)
    return path


@pytest.fixture
def make_stream(folder):
    rows, _ = stream_splits(str(folder))

    def make(stages=(PLAIN,), mixing=None, seed=0, **arguments):
        processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.0] * 3, image_std=[1.0] * 3)
        arguments = {"batch_size": 5, "stage_of_batch": [0], "buffer_size": 30} | arguments
        return ImageClassificationStream(rows, BatchTransform(processor, stages, mixing, seed), **arguments)

    return make


def shades(batches):
    """Which images these are; constant brightness tells."""
    return [value // 2 for batch in batches for value in batch["pixel_values"][:, 0, 0, 0].tolist()]


def test_file_of_the_working_directory_is_not_taken_for_an_image_of_its_name(tmp_path, monkeypatch):
    pictures = [{"bytes": content(shade), "path": "IMG_1.png"} for shade in range(30)]
    for split in ("train", "validation"):
        rows = Dataset.from_dict({"picture": pictures, "kind": [0, 1, 2] * 10}, features=FEATURES)
        rows.to_parquet(tmp_path / f"{split}.parquet")
    Image.new("L", (8, 8), 99).save(tmp_path / "IMG_1.png")
    monkeypatch.chdir(tmp_path)

    _, splits = stream_splits(str(tmp_path))

    images = [decode_image(image, "") for rows in splits.values() for image in rows["image"]]
    assert {image.getpixel((0, 0))[0] for image in images} == {*range(30)}


@pytest.mark.parametrize("choices", [{"group_by": "1"}, {"labelled": False}])
def test_stream_has_no_groups_and_needs_labels(folder, choices):
    with pytest.raises(UserError, match=r"^A stream has no groups, and needs labels"):
        stream_splits(str(folder), **choices)


def test_every_image_is_read_once_by_all_processes_and_workers_together(make_stream):
    seen = []
    for process in range(2):
        loader = workers(make_stream(process=(process, 2)))
        seen += shades(itertools.islice(loader, 10))

    assert sorted(seen) == list(range(100))
    assert seen != sorted(seen)


@pytest.mark.parametrize("column", ["picture", "image"])
def test_images_are_the_bytes_of_the_files(column, tmp_path, photographs):
    path = tmp_path / "data"
    path.mkdir()
    encoded = []
    for number in range(12):
        content = io.BytesIO()
        photographs[0].crop((8 * number, 0, 8 * number + 32, 32)).save(content, "JPEG", quality=95)
        encoded.append({"path": None, "bytes": content.getvalue()})
    features = Features({column: ImageFeature(), "kind": ClassLabel(names=["a", "b"])})
    for split in ("train", "validation", "test"):
        Dataset.from_dict({column: encoded, "kind": [0, 1] * 6}, features=features).to_parquet(
            path / f"{split}.parquet"
        )

    stream, splits = stream_splits(str(path))

    expected = [image["bytes"] for image in encoded]
    assert [row["image"]["bytes"] for row in stream] == expected
    assert [row["image"]["bytes"] for row in splits["test"]] == expected


def with_broken_images(folder, split, broken):
    (file,) = folder.glob(f"{split}-*.parquet")
    rows = Dataset.from_parquet(str(file)).cast_column("picture", ImageFeature(decode=False))
    pictures = [{"path": None, "bytes": b"no image" if number in broken else row["picture"]["bytes"]}
                for number, row in enumerate(rows)]  # fmt: skip
    Dataset.from_dict({"picture": pictures, "kind": rows["kind"][:]}, features=FEATURES).to_parquet(file)


def test_broken_images_of_validation_are_named_or_left_out(folder):
    with_broken_images(folder, "validation", {3, 4})
    _, splits = stream_splits(str(folder))
    with pytest.raises(UserError, match=r"cannot be decoded as an image"):
        [decode_image(row, "x") for rows in splits.values() for row in rows["image"]]
    _, splits = stream_splits(str(folder), corrupt_images="skip")
    assert sum(map(len, splits.values())) == 28


@pytest.mark.parametrize("augment", [None, PLAIN])
def test_broken_images_are_left_out_of_whole_batches(augment, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, "train", 1, 12)
    write(folder, "validation", 1, 12)
    with_broken_images(folder, "train", set(range(8)))
    rows, _ = stream_splits(str(folder))
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.0] * 3, image_std=[1.0] * 3)

    def batches(first_batch=0, **options):
        stream = ImageClassificationStream(
            rows, BatchTransform(processor, [augment]), batch_size=2, stage_of_batch=[0], **options
        )
        stream.first_batch = first_batch
        return list(itertools.islice(stream, 12))

    whole, resumed = batches(skip_corrupt=True), batches(6, skip_corrupt=True)
    assert set(shades(whole)) == {8, 9, 10, 11}
    assert {len(batch["labels"]) for batch in whole} == {2}
    assert shades(resumed[6:]) == shades(whole[6:])
    with pytest.raises(UserError, match=r"label \d cannot be decoded as an image"):
        batches()
    with_broken_images(folder, "train", set(range(12)))
    rows, _ = stream_splits(str(folder))
    with pytest.raises(UserError, match=r"nothing to read\. Either none of its images can be decoded"):
        batches(skip_corrupt=True)


def test_each_pass_has_an_order_of_its_own_that_the_seed_repeats(make_stream):
    orders = [shades(itertools.islice(make_stream(seed=seed), 40)) for seed in (0, 0, 1)]

    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:100] != orders[0][100:]
    assert sorted(orders[0][100:]) == list(range(100))


def test_labels_are_those_of_the_images(make_stream):
    batch = next(iter(make_stream()))

    assert [shade % 3 for shade in shades([batch])] == batch["labels"].tolist()


def test_augmentation_depends_on_seed_pass_and_image_wherever_it_is_read(make_stream):
    augment = Augmentation((8, 8), auto_augment="trivialaugment", rotation_degrees=20)

    def by_brightness(process, batches):
        stream = make_stream([augment], process=process)
        return {
            shade: image
            for batch in itertools.islice(stream, batches)
            for shade, image in zip(shades([batch]), stream.batch_transform(batch)["pixel_values"], strict=True)
        }

    alone, second = by_brightness((0, 1), 20), by_brightness((1, 2), 10)

    assert len(alone) == 100
    assert len(second) == 50
    assert all(torch.equal(image, alone[shade]) for shade, image in second.items())


def test_neighbours_in_a_batch_are_mixed(make_stream):
    stream = make_stream(mixing=Mixup(3, mixup_alpha=1.0))
    batch = next(iter(stream))

    mixed = stream.batch_transform(batch)

    own = batch["pixel_values"][:4, 0, 0, 0] / 255
    order = [1, 0, 3, 2]
    share = (mixed["pixel_values"][:4, 0, 0, 0] - own[order]) / (own - own[order])
    assert ((share >= 0) & (share <= 1)).all()
    eye = torch.eye(3)
    expected = share[:, None] * eye[batch["labels"][:4]] + (1 - share[:, None]) * eye[batch["labels"][order]]
    torch.testing.assert_close(mixed["labels"][:4], expected, rtol=0, atol=1e-4)


def test_stages_follow_the_number_of_the_batch(make_stream):
    stages = [Augmentation((4, 4)), Augmentation((6, 6)), None]
    stream = make_stream(stages, stage_of_batch=[0, 0, 0, 1, 2])

    batches = [stream.batch_transform(batch) for batch in itertools.islice(workers(stream), 6)]

    assert [batch["pixel_values"].shape[-1] for batch in batches] == [4, 4, 4, 6, 8, 8]


def test_resumed_stream_goes_on_where_it_was(make_stream):
    expected = list(itertools.islice(workers(make_stream()), 30))
    stream = make_stream()
    stream.first_batch = 23

    batches = list(itertools.islice(workers(stream), 30))

    assert batches[:23] == [{}] * 23
    assert shades(batches[23:]) == shades(expected[23:])


def test_process_without_anything_to_read_is_reported(make_stream):
    loader = workers(make_stream(process=(0, 4)))  # one file for two workers

    with pytest.raises(UserError, match=r"nothing to read\. .* the training split has too few files, 4: use fewer"):
        list(itertools.islice(loader, 10))


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "label"), ("image", "fine_label")])
def test_columns_may_have_any_names(image, label, tmp_path):
    features = Features({image: FEATURES["picture"], label: FEATURES["kind"]})
    content = {image: [Image.new("L", (8, 8), shade) for shade in range(12)], label: [0, 1, 2] * 4}
    for split in ("train", "validation"):
        Dataset.from_dict(content, features=features).to_parquet(tmp_path / f"{split}.parquet")

    rows, splits = stream_splits(str(tmp_path))

    assert [row["label"] for row in rows] == content[label]
    assert set(splits["test"].column_names) == {"image", "label"}


def test_without_a_test_split_half_of_validation_is_one(folder):
    _, splits = stream_splits(str(folder))

    assert {name: len(rows) for name, rows in splits.items()} == {"validation": 15, "test": 15}
    for rows in splits.values():
        assert np.bincount(rows["label"]).tolist() == [5, 5, 5]


def test_validation_split_that_changes_is_read_again(folder):
    _, before = stream_splits(str(folder))
    write(folder, "validation", 1, 33)

    _, after = stream_splits(str(folder))

    assert [sum(map(len, splits.values())) for splits in (before, after)] == [30, 33]


def test_test_split_without_labels_is_not_used(folder):
    write(folder, "test", 1, 12, unlabelled=True)

    assert len(stream_splits(str(folder))[1]["test"]) == 15


def test_splits_can_be_named(folder):
    write(folder, "test", 1, 12)

    _, splits = stream_splits(str(folder), validation_split="test", test_split="validation")

    assert {name: len(rows) for name, rows in splits.items()} == {"validation": 12, "test": 30}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"validation_split": "dev"},
            r"no split 'dev', only \['train', 'validation'\]. Choose with --validation_split",
        ),
        ({"label_column": "class"}, r"no label column 'class', only \['kind'\]"),
    ],
)
def test_what_is_not_there_is_named(choice, message, folder):
    with pytest.raises(UserError, match=message):
        stream_splits(str(folder), **choice)


def test_stream_needs_a_validation_split(tmp_path):
    write(tmp_path, "train", 2, 6)

    with pytest.raises(UserError, match=r"a stream cannot be cut, so it needs a validation split\. Choose one with"):
        stream_splits(str(tmp_path))


def test_stream_needs_named_classes(tmp_path):
    features = Features({"picture": ImageFeature(), "kind": Value("string")})
    write(tmp_path, "train", 2, 6, features)

    with pytest.raises(UserError, match=r"the column 'kind' must be of the type ClassLabel"):
        stream_splits(str(tmp_path), label_column="kind")


def test_lists_of_classes_are_streamed(tmp_path):
    features = Features({"image": ImageFeature(), "labels": List(ClassLabel(names=["a", "b", "c"]))})
    for split in ("train", "validation"):
        pictures = [Image.new("L", (8, 8), 2 * shade) for shade in range(20)]
        labels = [[shade % 3, (shade + 1) % 3][: shade % 2 + 1] for shade in range(20)]
        rows = Dataset.from_dict({"image": pictures, "labels": labels}, features=features)
        rows.to_parquet(tmp_path / f"{split}.parquet")
    rows, splits = stream_splits(str(tmp_path))
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.0] * 3, image_std=[1.0] * 3)

    transform = BatchTransform(processor, [None])
    batch = next(iter(ImageClassificationStream(rows, transform, batch_size=20, stage_of_batch=[0])))

    for shade, target in zip(shades([batch]), batch["labels"].tolist(), strict=True):
        assert [place for place, value in enumerate(target) if value] == sorted({shade % 3, (shade + shade % 2) % 3})
    assert {name: len(split) for name, split in splits.items()} == {"validation": 10, "test": 10}


def test_folders_of_images_are_not_streamed():
    with pytest.raises(
        UserError, match=r"digits: --streaming is for parquet files and the Hub, --data_config for the Hub"
    ):
        stream_splits("digits")


ARGV = [*SMALL, "--streaming", "true", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2",
        "--dataloader_num_workers", "2", "--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "5",
        "--eval_strategy", "steps", "--eval_steps", "4", "--load_best_model_at_end", "false", "--mixup_alpha", "0.3",
        "--horizontal_flip_prob", "0.5", "--augmentation_off_fraction", "0.3"]  # fmt: skip
RECIPE = "digits"


def test_run_on_a_stream_is_resumed_with_the_same_bits(folder, tmp_path, capsys):
    argv = [RECIPE, "--data", str(folder), *ARGV, "--max_steps", "10"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    metrics = train.main([*argv, "--output_dir", str(whole)])
    shutil.copytree(whole, stopped, symlinks=True)
    (stopped / "model.safetensors").unlink()

    train.main([*argv, "--output_dir", str(stopped), "--resume_from_checkpoint", str(stopped / "checkpoint-4")])

    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert metrics["test_loss"] == pytest.approx(json.loads((stopped / "metrics.json").read_text())["test_loss"])
    assert vit_scratch.main(["evaluate", str(whole), "--output_dir", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["test_loss"] == pytest.approx(
        metrics["test_loss"]
    )
    assert vit_scratch.main(["evaluate", str(whole), "--split", "train", "--output_dir", str(tmp_path / "no")]) == 2
    assert "--split train is a stream of unknown length" in capsys.readouterr().err


def test_speed_of_a_stream_can_be_measured(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_vit_scratch.training.sanity_check.SECONDS", 0.2)

    report = train.main([RECIPE, "--data", str(folder), *ARGV, "--max_steps", "9", "--data_report",
                         "--output_dir", str(tmp_path / "run")])  # fmt: skip

    (speed,) = re.findall(
        r"loading alone (\d+) images/s, the model alone (\d+): (\w+) limits the speed", capsys.readouterr().out
    )
    assert report["bound"] == speed[2] == ("computing" if int(speed[1]) < int(speed[0]) else "loading")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], r"--streaming needs --max_steps"),
        (["--max_steps", "5", "--check"], r"--check does not go together with --streaming"),
        (["--max_steps", "5", "--max_train_minutes", "1"], r"--max_train_minutes does not go together"),
        (["--max_steps", "5", "--test_fraction", "0.2"], r"--test_fraction does not go together"),
        (["--max_steps", "5", "--near_duplicates", "drop"], r"A stream is not searched for near duplicates"),
        (
            ["--max_steps", "5", "--eval_strategy", "epoch"],
            r"A stream has no epochs\. Give --eval_strategy no, or steps with --eval_steps",
        ),
    ],
)
def test_what_needs_all_of_the_data_is_refused(more, message, folder, tmp_path):
    with pytest.raises(UserError, match=message):
        train.main([RECIPE, "--data", str(folder), *ARGV, *more, "--output_dir", str(tmp_path / "run")])
