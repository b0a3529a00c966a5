import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetInfo, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight
from torch.utils.data import DataLoader
from transformers import ViTImageProcessor
from transformers.image_utils import load_image

from hf_vit_scratch.data import dataset as data
from hf_vit_scratch.data.augmentation import Augmentation
from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset, collate
from hf_vit_scratch.data.images import decode_image, size_and_mode
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.data.sampler import EpochSampler, Sample
from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.data.splits import find_split, fingerprint, load_splits
from hf_vit_scratch.data.transforms import SampleRNG
from hf_vit_scratch.errors import UserError


@pytest.fixture
def image_processor():
    return ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True)


def encode(image: Image.Image, kind: str, **options) -> dict:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return {"path": None, "bytes": file.getvalue()}


def write_parquet(path, features, **columns):
    small = {  # to encode photographs takes seconds
        name: [value.resize((60, 40)) if isinstance(value, Image.Image) else value for value in values]
        for name, values in columns.items()
    }
    Dataset.from_dict(small, features=features).to_parquet(path)


# Sources


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits as load_sklearn_digits

    digits = load_digits()

    assert (len(digits["train"]), len(digits["test"])) == (1437, 360)
    assert digits["train"].features["label"].names == [str(digit) for digit in range(10)]
    pictures = [*digits["train"]["image"], *digits["test"]["image"]]
    ours = sorted(np.asarray(picture).tobytes() for picture in pictures)
    theirs = sorted(np.round(image * 255 / 16).astype(np.uint8).tobytes() for image in load_sklearn_digits().images)
    assert ours == theirs


def test_class_folders_become_classes(class_folders, photographs):
    (class_folders / "temple" / "notes.txt").write_text("not an image")
    (class_folders / "temple" / ".hidden.jpg").write_text("not an image")

    splits = load_splits(str(class_folders), seed=1)

    assert splits["train"].features["label"].names == ["flower", "temple"]
    assert {name: sorted(np.bincount(rows["label"])) for name, rows in splits.items()} == {
        "train": [10, 10], "validation": [1, 1], "test": [1, 1]
    }  # fmt: skip
    for row in splits["train"]:
        assert splits["train"].features["label"].names[row["label"]] in row["image"].filename


def test_split_folders_are_used_as_they_are(tmp_path, photographs):
    for split, count in (("train", 4), ("val", 2), ("test", 3)):
        for name, photograph in zip(("temple", "flower"), photographs, strict=True):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                photograph.resize((20, 20)).save(tmp_path / split / name / f"train_{number}.png")

    splits = load_splits(str(tmp_path), near_duplicates="ignore")

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 8, "validation": 4, "test": 6}


def test_parquet_columns_are_found_by_type_and_string_labels_become_classes(tmp_path, photographs):
    names = ["temple", "flower"] * 10
    features = Features({"picture": ImageFeature(), "label": Value("string"), "year": Value("int64")})
    write_parquet(tmp_path / "data.parquet", features, picture=photographs * 10, label=names, year=[2000] * 20)

    for source in (tmp_path, tmp_path / "data.parquet"):
        splits = load_splits(str(source), near_duplicates="ignore")

        assert splits["train"].column_names == ["image", "label"]
        assert splits["train"].features["label"].names == ["flower", "temple"]
        assert sorted(np.bincount(splits["train"]["label"])) == [8, 8]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_numbers_can_be_labels(tmp_path, dtype):
    pictures = [Image.new("L", (2, 2), number) for number in range(20)]
    features = Features({"image": ImageFeature(), "label": Value(dtype)})
    write_parquet(tmp_path / "data.parquet", features, image=pictures, label=[0, 1] * 10)

    splits = load_splits(str(tmp_path))

    assert splits["train"].features["label"].names == (["False", "True"] if dtype == "bool" else ["0", "1"])


def test_splits_are_cut_with_the_same_share_of_every_class_and_without_overlap(tmp_path):
    pictures = [Image.new("L", (2, 2), number) for number in range(200)]
    labels = [0] * 150 + [1] * 50
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    write_parquet(tmp_path / "data.parquet", features, image=pictures, label=labels)

    first, again, other = (load_splits(str(tmp_path), validation_fraction=0.2, seed=seed) for seed in (1, 1, 2))

    ids = {name: [image.getpixel((0, 0)) for image in rows["image"]] for name, rows in first.items()}
    assert {name: np.bincount(rows["label"]).tolist() for name, rows in first.items()} == {
        "train": [105, 35], "validation": [30, 10], "test": [15, 5]
    }  # fmt: skip
    assert sorted(sum(ids.values(), [])) == list(range(200))
    assert ids["test"] == [image.getpixel((0, 0)) for image in again["test"]["image"]]
    assert ids["test"] != [image.getpixel((0, 0)) for image in other["test"]["image"]]


def test_rare_class_is_in_every_split(tmp_path, photographs):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["often", "rarely"])})
    pictures = [Image.new("L", (2, 2), number) for number in range(203)]
    write_parquet(tmp_path / "data.parquet", features, image=pictures, label=[0] * 200 + [1] * 3)

    splits = load_splits(str(tmp_path), validation_fraction=0.05, test_fraction=0.05)

    counts = {name: np.bincount(rows["label"]).tolist() for name, rows in splits.items()}
    assert counts == {"train": [180, 1], "validation": [10, 1], "test": [10, 1]}


def test_fraction_that_leaves_too_little_is_refused(class_folders):
    with pytest.raises(UserError, match=r": train has one image of '(flower|temple)', too few to cut another split"):
        load_splits(str(class_folders), validation_fraction=0.89)


def test_fractions_that_leave_nothing_are_refused(class_folders):
    with pytest.raises(UserError, match=r"--test_fraction must add up to less than 1, got 1: no training image"):
        load_splits(str(class_folders), validation_fraction=0.5, test_fraction=0.5)


@pytest.mark.parametrize("split", ["validation_split", "test_split"])
def test_no_split_serves_two_purposes(split):
    with pytest.raises(UserError, match=r"train, validation and test must be different splits"):
        load_splits("digits", **{split: "train"})


def test_split_to_train_on_is_not_reported_on_too():
    splits = load_splits("digits", train_split="test")

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 280, "validation": 40, "test": 40}
    pictures = [{np.asarray(image).tobytes() for image in rows["image"]} for rows in splits.values()]
    assert not pictures[0] & pictures[2]


@pytest.mark.parametrize("labels", [ClassLabel(names=["temple", "flower"]), Value("int64")], ids=["names", "numbers"])
def test_test_split_without_labels_is_not_used(labels, tmp_path, photographs):
    features = Features({"image": ImageFeature(), "label": labels})
    for split, labels in (("train", [0, 1] * 10), ("test", [-1, -1])):
        images = (photographs * 10)[: len(labels)]
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", features, image=images, label=labels)

    splits = load_splits(str(tmp_path), near_duplicates="ignore")

    assert min(splits["test"]["label"]) == 0


def test_parquet_file_beside_class_folders_changes_nothing(class_folders):
    (class_folders / "temple" / "deep").mkdir()
    shutil.copy(class_folders / "temple" / "00.jpg", class_folders / "temple" / "deep")
    before = load_splits(str(class_folders), near_duplicates="ignore")
    Dataset.from_dict({"vector": [[0.0, 1.0]]}).to_parquet(class_folders / "temple" / "vectors.parquet")

    after = load_splits(str(class_folders), near_duplicates="ignore")

    assert after["train"].features == before["train"].features
    assert {split: rows["label"][:] for split, rows in after.items()} == {
        split: rows["label"][:] for split, rows in before.items()
    }


def test_folder_that_cannot_be_read_is_no_empty_folder(class_folders, monkeypatch):
    scandir = os.scandir

    def refusing(path):  # root may read everything
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (class_folders / "temple" / "deep").mkdir()
    monkeypatch.setattr(os, "scandir", refusing)

    with pytest.raises(UserError, match=r"deep cannot be read: Permission denied\. Its images would be left out"):
        load_splits(str(class_folders))


def test_figures_beside_parquet_files_change_nothing(photographs, tmp_path):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["temple", "flower"])})
    folder = tmp_path / "photos [2024]*"
    (folder / "data").mkdir(parents=True)
    write_parquet(folder / "data" / "train-0.parquet", features, image=photographs * 10, label=[0, 1] * 10)
    (folder / "assets").mkdir()
    for number in range(3):
        photographs[0].save(folder / "assets" / f"{number}.png")

    splits = load_splits(str(folder), near_duplicates="ignore")

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 16, "validation": 2, "test": 2}


@pytest.mark.parametrize(
    "names", [("train-00000-of-00001", "val-00000-of-00001"), ("train/0", "validation/0"), ("a_training_1", "a_dev_1")]
)
def test_words_of_parquet_paths_name_the_splits(names, photographs, tmp_path):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["temple", "flower"])})
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path / f"{name}.parquet", features, image=photographs * 10, label=[0, 1] * 10)

    splits = load_splits(str(tmp_path), near_duplicates="ignore", test_fraction=0.2)

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 16, "validation": 20, "test": 4}


def test_configuration_is_for_the_hub(photographs, tmp_path):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["temple", "flower"])})
    write_parquet(tmp_path / "a.parquet", features, image=photographs * 10, label=[0, 1] * 10)

    with pytest.raises(UserError, match=r"--data_config for the Hub\. Leave them out"):
        load_splits(str(tmp_path / "a.parquet"), data_config="plain_text")


@pytest.mark.parametrize("several", [False, True])
def test_parquet_files_of_other_class_names_are_refused(several, photographs, tmp_path):
    for split, names in (("train", ["cat", "cow"]), ("test", ["cat", "dog"])):
        label = List(ClassLabel(names=names)) if several else ClassLabel(names=names)
        labels = [[0], [1]] * 10 if several else [0, 1] * 10
        features = Features({"image": ImageFeature(), "label": label, "camera": ClassLabel(names=[split, "x"])})
        columns = {"image": photographs * 10, "label": labels, "camera": [0] * 20}
        write_parquet(tmp_path / f"{split}.parquet", features, **columns)

    with pytest.raises(
        UserError, match=r"'label', the classes of .* are \['cat', '...'\], but those of .* are \['cat', '...'\]\."
    ):
        load_splits(str(tmp_path))
    assert len(load_splits(str(tmp_path), labelled=False, near_duplicates="ignore")["test"]) == 20
    for column in ("camera", ["camera"]):
        with pytest.raises(UserError, match=r"column 'camera', the classes of .*, but those of"):
            load_splits(str(tmp_path), label_column=column)


@pytest.mark.parametrize("choices", [{}, {"label_column": ["label"]}], ids=str)
def test_parquet_file_without_labels_is_no_file_with_other_classes(choices, photographs, tmp_path, caplog):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"])})
    write_parquet(tmp_path / "train.parquet", features, image=photographs * 10, label=[0, 1] * 10)
    write_parquet(tmp_path / "test.parquet", Features({"image": ImageFeature()}), image=photographs)

    splits = load_splits(str(tmp_path), near_duplicates="ignore", **choices)

    assert sum(map(len, splits.values())) == 20
    assert "the split 'test' has no labels and is not used" in caplog.text


def test_parquet_files_that_no_split_has_are_counted(photographs, tmp_path, caplog):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"])})
    for name in ("train", "test", "more"):
        write_parquet(tmp_path / f"{name}.parquet", features, image=photographs * 10, label=[0, 1] * 10)

    splits = load_splits(str(tmp_path), near_duplicates="ignore")

    assert sum(map(len, splits.values())) == 40
    assert "1 parquet files are not used; the first is " in caplog.text
    assert "more.parquet. Where names of files hold train" in caplog.text


def test_links_to_parquet_files_are_used(photographs, tmp_path, caplog):  # as in the cache of the Hub
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"])})
    (tmp_path / "snapshot").mkdir()
    write_parquet(tmp_path / "blob", features, image=photographs * 10, label=[0, 1] * 10)
    (tmp_path / "snapshot" / "train.parquet").symlink_to(tmp_path / "blob")

    splits = load_splits(str(tmp_path / "snapshot"), near_duplicates="ignore")

    assert sum(map(len, splits.values())) == 20
    assert "not used" not in caplog.text


def test_column_of_a_parquet_file_names_the_splits(photographs, tmp_path):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "split": Value("string")})
    split = ["train", "train", "val", "val", "TEST", "TEST"] * 3
    write_parquet(tmp_path / "all.parquet", features, image=photographs * 9, label=[0, 1] * 9, split=split)

    splits = load_splits(str(tmp_path / "all.parquet"), near_duplicates="ignore")

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 6, "validation": 6, "test": 6}


def test_parquet_of_another_program_names_no_files_outside(photographs, tmp_path):
    photographs[0].save(tmp_path / "secret.png")
    rows = [{"bytes": None, "path": str(tmp_path / "secret.png")}] * 20
    (tmp_path / "data").mkdir()
    features = Features(
        {"image": {"bytes": Value("binary"), "path": Value("string")}, "label": ClassLabel(names=["a", "b"])}
    )
    write_parquet(tmp_path / "data" / "a.parquet", features, image=rows, label=[0, 1] * 10)

    with pytest.raises(UserError, match=r"lies outside of"):
        load_splits(str(tmp_path / "data"))


def test_split_is_found_by_its_own_name_first():
    assert find_split("data", "dev", {"validation": [], "dev": []}) == "dev"
    assert find_split("data", "dev", {"validation": []}) == "validation"


def test_test_split_with_one_label_missing_is_refused(tmp_path, photographs):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["temple", "flower"])})
    for split, labels in (("train", [0, 1] * 10), ("test", [-1, 1, 0])):
        images = (photographs * 10)[: len(labels)]
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", features, image=images, label=labels)

    with pytest.raises(UserError, match=r"1 rows of test have no label, .*; the first is row 0"):
        load_splits(str(tmp_path), near_duplicates="ignore")


def test_a_split_can_serve_another_purpose(tmp_path, photographs):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["temple", "flower"])})
    for split, count in (("train", 20), ("validation", 6)):
        write_parquet(
            tmp_path / f"{split}-00000-of-00001.parquet", features,
            image=(photographs * 10)[:count], label=([0, 1] * 10)[:count],
        )  # fmt: skip

    splits = load_splits(str(tmp_path), test_split="validation", near_duplicates="ignore")

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 18, "validation": 2, "test": 6}


# What cannot be used


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("./nowhere", r"\./nowhere: there is no such file or folder\. Give"),
        ("photos/nowhere", r"photos/nowhere: there is no such file or folder\. Give"),
        ("my photos", r"my photos: there is no such file or folder\. Give"),
        ("someone/no-such-dataset", r"no-such-dataset: there is no such file or folder, and no dataset of this name"),
    ],
)
def test_data_that_is_not_there_is_refused(data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match=message):
        load_splits(data)


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there are no images\. The folder must hold one folder per class"):
        load_splits(str(tmp_path))


def test_split_without_class_folders_is_not_used(class_folders, photographs, tmp_path, caplog):
    (tmp_path / "root" / "test").mkdir(parents=True)
    class_folders.rename(tmp_path / "root" / "train")
    photographs[0].save(tmp_path / "root" / "test" / "1.jpg")

    splits = load_splits(str(tmp_path / "root"))

    assert "the split 'test' has no labels and is not used." in caplog.text
    assert sum(map(len, splits.values())) == 24


def test_folders_of_splits_without_classes_are_refused(photographs, tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        photographs[0].save(tmp_path / split / "1.jpg")
    (tmp_path / "train.csv").write_text("photo,kind\n1.jpg,cat\n")

    message = (
        r"the folders \['test', 'train'\] are splits, not classes\. If train\.csv lists them, give .*train\.csv\."
    )
    with pytest.raises(UserError, match=message):
        load_splits(str(tmp_path))


def test_class_folder_that_macos_has_named_is_the_class_of_the_same_name(class_folders):
    (class_folders / "temple").rename(class_folders / "cafe\u0301")

    assert load_splits(str(class_folders))["train"].features["label"].names == ["caf\u00e9", "flower"]


def test_images_may_be_bytes_in_parquet(class_folders, tmp_path):
    files = sorted(class_folders.glob("*/*.jpg"))
    rows = {"image": [file.read_bytes() for file in files], "label": [file.parent.name for file in files]}
    pd.DataFrame(rows).to_parquet(tmp_path / "images.parquet")

    assert sum(map(len, load_splits(str(tmp_path / "images.parquet")).values())) == 24


def test_folders_that_systems_make_are_no_classes(class_folders):
    for name in ("__MACOSX", "@eaDir"):
        (class_folders / name).mkdir()

    assert load_splits(str(class_folders))["train"].features["label"].names == ["flower", "temple"]


def test_images_without_class_folders_are_refused(tmp_path, photographs):
    photographs[0].save(tmp_path / "1.jpg")

    message = rf"none of its 1 images is in a class folder\. If {tmp_path.name} is one, give the folder above\."
    with pytest.raises(UserError, match=message + " The"):
        load_splits(str(tmp_path))
    (tmp_path / "labels.csv").write_text("photo,kind\n1.jpg,cat\n")
    with pytest.raises(UserError, match=message + r" If labels\.csv lists them, give .*labels\.csv\. The"):
        load_splits(str(tmp_path))


def test_single_class_is_refused(class_folders):
    for file in (class_folders / "temple").iterdir():
        file.unlink()
    (class_folders / "temple").rmdir()

    with pytest.raises(UserError, match=r"there is only one class, \['flower'\], but a classifier needs two"):
        load_splits(str(class_folders))


@pytest.mark.parametrize("names", [("train2017", "val2017"), ("trian", "val")])
def test_splits_of_unknown_names_are_not_taken_for_classes(tmp_path, photographs, names):
    for folder in (f"{split}/{name}" for split in names for name in ("cat", "dog")):
        (tmp_path / folder).mkdir(parents=True)
        photographs[0].resize((8, 8)).save(tmp_path / folder / "1.png")

    with pytest.raises(
        UserError, match=r"hold folders, not images\. If they are splits, name them train, val and test"
    ):
        load_splits(str(tmp_path))


def test_folder_around_the_class_folders_is_named(class_folders):
    with pytest.raises(
        UserError, match=rf"If the folders in {class_folders.name} are the classes, give .*{class_folders}\."
    ):
        load_splits(str(class_folders.parent))


def test_link_to_a_class_folder_is_no_second_class(class_folders):
    (class_folders / "blossom").symlink_to(class_folders / "flower")
    with pytest.raises(UserError, match=r"blossom leads to .*flower\. If this is intended, add --follow_links true"):
        load_splits(str(class_folders))
    assert len(load_splits(str(class_folders), follow_links=True)["train"].features["label"].names) == 3


@pytest.mark.parametrize("choices", [{}, {"group_by": "1"}], ids=str)
def test_test_images_beside_class_folders_are_no_class(choices, tmp_path, photographs):
    for folder in ("cat", "dog", "test/cat", "test/dog"):
        (tmp_path / folder).mkdir(parents=True)
        photographs[0].resize((8, 8)).save(tmp_path / folder / "1.png")

    with pytest.raises(UserError, match=r"test holds folders of classes, but there is no folder train"):
        load_splits(str(tmp_path), **choices)


def test_splits_without_a_train_folder_are_refused(tmp_path, photographs):
    for folder in ("val/cat", "val/dog", "test/cat", "test/dog"):
        (tmp_path / folder).mkdir(parents=True)
        photographs[0].resize((8, 8)).save(tmp_path / folder / "1.png")

    with pytest.raises(UserError, match=r"If they are splits, name them train, val and test"):
        load_splits(str(tmp_path))


def test_class_may_be_called_train(tmp_path, photographs):
    for name in ("car", "train", "plane"):
        (tmp_path / name).mkdir()
        for number in range(4):
            photographs[0].resize((8, 8)).save(tmp_path / name / f"{number}.png")

    splits = load_splits(str(tmp_path), near_duplicates="ignore")

    assert splits["train"].features["label"].names == ["car", "plane", "train"]


def test_empty_class_folder_is_refused(class_folders):
    (class_folders / "nothing").mkdir()

    with pytest.raises(
        UserError, match=r"no images in the class folders \['nothing'\]\. Delete these folders, or fill them"
    ):
        load_splits(str(class_folders))


def test_class_that_train_lacks_is_refused(tmp_path, photographs):
    for folder in ("train/cat", "train/dog", "test/cat", "test/cow"):
        (tmp_path / folder).mkdir(parents=True)
        photographs[0].resize((8, 8)).save(tmp_path / folder / "1.png")

    with pytest.raises(UserError, match=r"test: the classes \['cow'\] are not in .*train"):
        load_splits(str(tmp_path))


def test_numbers_that_are_too_few_as_classes_may_be_quantities(class_folders):
    for number, name in enumerate(("flower", "temple")):
        (class_folders / name).rename(class_folders / str(number))

    with pytest.raises(UserError, match=r"too few to cut .*test\)\. If they are quantities, write them with a"):
        load_splits(str(class_folders), validation_fraction=0.89)


def test_class_with_one_image_is_refused(class_folders, photographs):
    (class_folders / "rare").mkdir()
    photographs[0].save(class_folders / "rare" / "1.jpg")

    with pytest.raises(UserError, match=r": train has one image of 'rare', too few to cut another split from it\."):
        load_splits(str(class_folders))


@pytest.mark.parametrize("content", [b"", b"a text that was renamed"], ids=["zero_bytes", "text"])
def test_file_that_is_no_image_is_named_before_training(class_folders, content):
    (class_folders / "temple" / "broken.jpg").write_bytes(content)

    with pytest.raises(
        UserError, match=r"temple/broken\.jpg cannot be decoded as an image .*Correct, replace or delete it"
    ):
        load_splits(str(class_folders))


def test_truncated_image_is_named_before_training(class_folders):
    truncated = class_folders / "temple" / "03.jpg"
    truncated.write_bytes(truncated.read_bytes()[:-100])

    with pytest.raises(UserError, match=r"/temple/03\.jpg cannot be decoded as an image \(.*truncated.*\)\. Correct"):
        load_splits(str(class_folders))


def test_truncated_image_is_named_when_it_is_read(class_folders, image_processor):
    for file in class_folders.glob("*/*.jpg"):
        file.write_bytes(file.read_bytes()[:-100])
    rows = load_splits(str(class_folders), near_duplicates="ignore")["train"]
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor))

    with pytest.raises(UserError, match=r"/\d\d\.jpg cannot be decoded as an image \(.*truncated.*\)\. Correct"):
        dataset[0]


def test_error_of_a_worker_process_is_one_line(class_folders, image_processor):
    for file in class_folders.glob("*/*.jpg"):
        file.write_bytes(file.read_bytes()[:-100])
    rows = load_splits(str(class_folders), near_duplicates="ignore")["train"]
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor))

    with pytest.raises(
        UserError,
        match=r"^/.*/\d\d\.jpg cannot be decoded as an image \(.*\)\. Correct, replace or delete it, .* skip\.$",
    ):
        next(iter(DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=collate)))


def test_missing_image_is_named(tmp_path, photographs, image_processor):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    write_parquet(tmp_path / "a.parquet", features, image=[None] * 20, label=[0, 1] * 10)
    dataset = ImageClassificationDataset(
        load_splits(str(tmp_path), near_duplicates="ignore")["train"], BatchTransform(image_processor)
    )

    with pytest.raises(UserError, match=r"^image 3 is missing: its row holds no image"):
        dataset[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"label_column": "breed"},
            r"there is no label column 'breed', only \['label'\]\. Choose with --label_column",
        ),
        ({"image_column": "photo"}, r"there is no image column 'photo', only .*Choose with --image_column"),
        ({"image_column": "label"}, r"there is no image column 'label', only \['image'\]"),
        ({"train_split": "training"}, r"there is no split 'training', only \['test', 'train'\]"),
        (
            {"validation_split": "dev"},
            r"there is no split 'dev', only \['test', 'train'\]\. Choose with --validation_split",
        ),
        ({"validation_fraction": 1.5}, r"validation_fraction must lie between 0 and 1, got 1.5"),
    ],
)
def test_wrong_name_or_fraction_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        load_splits("digits", **arguments)


def test_missing_label_column_is_refused(tmp_path, photographs):
    write_parquet(tmp_path / "a.parquet", Features({"image": ImageFeature()}), image=photographs)

    with pytest.raises(UserError, match=r"no column holds labels, or has a known name\. Add a column of labels\.$"):
        load_splits(str(tmp_path))


def test_several_label_columns_are_refused(tmp_path, photographs):
    label = ClassLabel(names=["a", "b"])
    features = Features({"image": ImageFeature(), "fine": label, "coarse": label})
    write_parquet(tmp_path / "a.parquet", features, image=photographs, fine=[0, 1], coarse=[0, 1])

    with pytest.raises(UserError, match=r"fine and coarse may hold the labels\. Choose one of .*--label_column"):
        load_splits(str(tmp_path))


def test_label_that_is_no_class_is_refused(tmp_path, photographs):
    features = Features({"image": ImageFeature(), "label": Value("binary")})
    write_parquet(tmp_path / "a.parquet", features, image=photographs, label=[b"a", b"b"])

    with pytest.raises(UserError, match=r"a label must be a name, .*'label' holds Value\('binary'\)"):
        load_splits(str(tmp_path))


@pytest.mark.parametrize("label", [-1, None])
def test_train_rows_without_labels_are_refused(tmp_path, photographs, label):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    write_parquet(tmp_path / "a.parquet", features, image=photographs, label=[0, label])

    with pytest.raises(UserError, match=r"1 rows of train have no label, .*; the first is row 1"):
        load_splits(str(tmp_path))


# Files


def test_hidden_folders_are_left_out_and_other_files_are_counted(class_folders, photographs, caplog):
    hidden = class_folders / "temple" / ".ipynb_checkpoints"
    hidden.mkdir()
    shutil.copy(class_folders / "temple" / "00.jpg", hidden / "00-checkpoint.jpg")
    for name in ("a.heic", "b.HEIC", "notes.txt", "none", ".DS_Store", *(f"frame.{number}" for number in range(7))):
        (class_folders / ("temple" if name == "notes.txt" else "flower") / name).touch()
    photographs[0].resize((8, 8)).save(class_folders / "flower" / "d.avif", "PNG")

    splits = load_splits(str(class_folders))

    assert sum(map(len, splits.values())) == 25
    assert "files left out: 2 .heic (flower/a.heic), 1 .0 (flower/frame.0), 1 .1 (flower/frame.1), " in caplog.text


def test_images_in_no_class_folder_are_counted(class_folders, caplog):
    (class_folders / "train").mkdir()
    for name in ("temple", "flower"):
        (class_folders / name).rename(class_folders / "train" / name)
    for place in ("extra", "train"):
        (class_folders / place).mkdir(exist_ok=True)
        shutil.copy(class_folders / "train" / "temple" / "00.jpg", class_folders / place / "loose.jpg")

    splits = load_splits(str(class_folders))

    assert sum(map(len, splits.values())) == 24
    assert "photos: 2 images are in no class folder, split or table and are not used; the first is " in caplog.text


def test_name_of_a_file_that_is_not_utf_8_is_refused(class_folders):
    file = class_folders / "temple" / "00.jpg"
    file.rename(os.fsdecode(os.fsencode(file.parent) + b"/caf\xe9.jpg"))

    with pytest.raises(UserError, match=r"the names of files and classes must be UTF-8: .*surrogates not allowed"):
        load_splits(str(class_folders))


def test_links_to_folders_are_followed_once_where_asked(class_folders, tmp_path):
    (class_folders / "flower").rename(tmp_path / "elsewhere")
    (class_folders / "flower").mkdir()
    (class_folders / "flower" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(class_folders / "flower")
    with pytest.raises(UserError, match=r"flower/more leads to .*elsewhere\. If this is intended, add --follow_links"):
        load_splits(str(class_folders))
    assert sum(map(len, load_splits(str(class_folders), follow_links=True).values())) == 24


# Decoding


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_every_mode_decodes_to_the_rgb_of_the_pipelines(mode, photographs):
    image = photographs[0].resize((30, 20)).convert("L" if mode in ("I;16", "F") else "RGB").convert(mode)

    decoded = decode_image(encode(image, "TIFF"), "an image")

    assert decoded.mode == "RGB"
    assert decoded.tobytes() == load_image(image).tobytes()


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # of Pillow, in transformers' pipeline
@pytest.mark.parametrize(
    ("mode", "transparent"), [("P", 3), ("P", bytes([255, 0, 128, 255])), ("L", 90), ("RGB", (10, 200, 30))]
)
def test_transparent_color_is_that_of_the_pipelines(mode, transparent, tmp_path):
    colors = np.tile(np.array([[10, 200, 30], [90, 90, 90], [0, 0, 255], [9, 9, 9]], np.uint8), (5, 5, 1))
    image = Image.fromarray(colors).quantize(4) if mode == "P" else Image.fromarray(colors).convert(mode)
    image.save(tmp_path / "image.png", transparency=transparent)
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)

    decoded = decode_image({"path": str(tmp_path / "image.png"), "bytes": None}, "an image")

    expected = processor(load_image(str(tmp_path / "image.png")), return_tensors="pt")["pixel_values"]
    pixels = Image.fromarray(np.asarray(decoded))  # nothing but them
    assert torch.equal(processor(pixels, return_tensors="pt")["pixel_values"], expected)


@pytest.mark.parametrize(("mode", "highest"), [("I;16", 65535), ("I;16", 4095), ("I", 70_000), ("F", 1.0)])
def test_grey_values_that_would_become_white_or_black_are_refused(mode, highest):
    values = np.linspace(0, highest, 600).reshape(20, 30)
    image = Image.fromarray(values.astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]))
    assert image.mode == mode
    with pytest.raises(UserError, match=rf"grey values go from 0 to {highest:g}, not from 0 to 255: save it"):
        decode_image(encode(image, "TIFF"), "an image")


@pytest.mark.parametrize("highest", [255, 4095])
def test_sixteen_bits_of_the_other_order_are_read_too(highest):  # as ImageJ writes them
    content = io.BytesIO()
    Image.frombytes("I;16B", (8, 8), np.full((8, 8), highest, ">u2").tobytes()).save(content, "TIFF")
    encoded = {"path": None, "bytes": content.getvalue()}
    assert Image.open(content).mode == "I;16B"
    if highest == 255:
        assert decode_image(encoded, "an image").getpixel((0, 0)) == (255, 255, 255)
    else:
        with pytest.raises(UserError, match=r"from 4095 to 4095, not from 0 to 255: save it with 8 bits"):
            decode_image(encoded, "an image")


@pytest.mark.parametrize(
    "values", [np.int32([[-1000, 200]]), np.float32([[-1, 0]]), np.full((1, 2), np.nan, np.float32)]
)
def test_values_that_would_become_black_are_refused(values):  # those of a CT scan, for example
    with pytest.raises(UserError, match=r"grey values go from .*, not from 0 to 255: save it with 8 bits"):
        decode_image(encode(Image.fromarray(values), "TIFF"), "an image")


def test_black_image_of_floats_is_black():
    image = Image.fromarray(np.zeros((8, 8), np.float32))
    assert decode_image(encode(image, "TIFF"), "an image").getextrema() == ((0, 0),) * 3


def test_sixteen_bits_are_named_before_training(class_folders):
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(class_folders / "temple" / "x-ray.png")
    with pytest.raises(UserError, match=r"x-ray\.png cannot be decoded .*save it with 8 bits"):
        load_splits(str(class_folders))


def test_size_and_mode_are_those_of_the_upright_image(photographs, monkeypatch):
    image = photographs[0].resize((30, 20)).convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    assert size_and_mode(encode(image, "PNG"), "an image") == ((30, 20), "L")
    assert size_and_mode(encode(image, "PNG", exif=exif), "an image") == ((20, 30), "L")
    monkeypatch.setattr(Image.Image, "getexif", lambda self: {0x0112: "6"})  # some cameras
    assert size_and_mode(encode(image, "PNG"), "an image") == ((30, 20), "L")


@pytest.mark.parametrize("format", ["TIFF", "PNG", "JPEG"])
def test_size_of_an_image_on_its_side_is_that_of_its_pixels(format, photographs):
    exif = Image.Exif()
    exif[0x0112] = 6
    row = encode(photographs[0].resize((30, 20)), format, exif=exif)
    assert size_and_mode(row, "an image")[0] == decode_image(row, "an image").size == (20, 30)


def test_exif_rotation_is_undone(photographs):
    image = photographs[0].resize((30, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: to be shown after a quarter turn clockwise

    decoded = decode_image(encode(image, "PNG", exif=exif), "an image")

    assert decoded.tobytes() == image.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_image_without_a_path_is_named_by_its_place():
    with pytest.raises(UserError, match=r"^image 7 cannot be decoded as an image"):
        decode_image({"path": None, "bytes": b"no image"}, "image 7")


# Batches


@pytest.fixture(params=["decoded for each batch", "kept"])
def kept(request):
    """Whether all images are kept decoded, or each is decoded when it is wanted."""
    return request.param == "kept"


def make_dataset(image_processor, photographs, *stages, mixing=None, seed=0, kept=False):
    crops = [photographs[0].crop((9 * i, 5 * i, 9 * i + 40, 5 * i + 30)) for i in range(12)]
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": crops, "label": [0, 1] * 6}, features=features)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor, stages, mixing, seed))
    assert not kept or dataset.keep_decoded(torch.device("cpu"))
    return dataset


def inputs(dataset, *keys):
    """The model's inputs."""
    return dataset.batch_transform(dataset.__getitems__(keys))


def test_batch_holds_bytes_of_decoded_images_and_their_keys(image_processor, photographs, kept):
    dataset = make_dataset(image_processor, photographs, Augmentation((16, 24)), kept=kept)

    batch = dataset.__getitems__([Sample(2, 0, 7), Sample(2, 0, 4)])

    assert (batch["pixel_values"].shape, batch["pixel_values"].dtype) == ((2, 3, 16, 24), torch.uint8)
    assert batch["labels"].tolist() == [1, 0]
    assert batch["keys"].tolist() == [[2, 7], [2, 4]]
    assert batch["stage"] == 0
    assert dataset[4]["keys"].tolist() == [[0, 4]]


def test_rows_are_counted_from_the_end_as_in_any_sequence(image_processor, photographs, kept):
    dataset = make_dataset(image_processor, photographs, kept=kept)

    assert dataset[-1]["keys"].tolist() == [[0, len(dataset) - 1]]
    with pytest.raises(IndexError, match="out of range"):
        dataset[len(dataset)]


def test_evaluation_images_are_those_of_the_image_processor(image_processor, photographs, kept):
    batch = inputs(make_dataset(image_processor, photographs, kept=kept), 3, 5)

    crops = [photographs[0].crop((9 * i, 5 * i, 9 * i + 40, 5 * i + 30)) for i in (3, 5)]
    expected = image_processor(crops, return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"], expected)
    assert batch["labels"].tolist() == [1, 1]


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_pixels_are_those_of_any_image_processor(rescale, normalize, photographs):
    options = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "rescale_factor": 1 / 128}
    processor = ViTImageProcessor(
        size={"height": 16, "width": 24}, do_rescale=rescale, do_normalize=normalize, **options
    )

    batch = inputs(make_dataset(processor, photographs), 0)

    expected = processor([photographs[0].crop((0, 0, 40, 30))], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(batch["pixel_values"], expected.float(), rtol=1e-6, atol=1e-6)


def test_plain_index_gives_an_image_as_in_evaluation(image_processor, photographs):
    dataset = make_dataset(image_processor, photographs, Augmentation((16, 24), horizontal_flip_prob=1.0))
    plain = make_dataset(image_processor, photographs)

    assert torch.equal(inputs(dataset, 4)["pixel_values"], inputs(plain, 4)["pixel_values"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_center_crop": True, "crop_size": 16}, "this image processor has do_center_crop True"),
        ({"do_resize": False}, "this image processor has size "),
        ({"size": {"shortest_edge": 16}}, "this image processor has size "),
    ],
)
def test_image_processor_that_does_more_than_resize_is_refused(options, message, photographs):
    with pytest.raises(UserError, match=message):
        make_dataset(ViTImageProcessor(**{"size": {"height": 16, "width": 24}} | options), photographs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.rename_column("image", "img"), "there is no image"),
        (lambda rows: rows.cast_column("label", Value("float32")), r"must hold ClassLabel.*got Value\('float32'\)"),
        (lambda rows: rows.cast_column("label", Value("int64")), r"rows\.class_encode_column\('label'\)"),
    ],
)
def test_rows_of_ones_own_that_cannot_be_read_are_refused(change, message, image_processor, photographs):
    rows = make_dataset(image_processor, photographs).rows

    with pytest.raises(UserError, match=message):
        ImageClassificationDataset(change(rows), BatchTransform(image_processor))


def test_mixing_without_stages_is_refused(image_processor):
    with pytest.raises(UserError, match="mixing needs the stages of training"):
        BatchTransform(image_processor, mixing=Mixup(2, mixup_alpha=1.0))


def test_training_images_are_normalised_like_evaluation_images(image_processor, photographs, kept):
    plain = make_dataset(image_processor, photographs, Augmentation((16, 24)), kept=kept)  # nothing random

    evaluation = make_dataset(image_processor, photographs)
    assert torch.equal(inputs(plain, Sample(0, 0, 0))["pixel_values"], inputs(evaluation, 0)["pixel_values"])


@pytest.fixture
def augmented(image_processor, photographs, kept):
    augment = Augmentation((16, 24), random_resized_crop_scale=0.5, horizontal_flip_prob=0.5, rotation_degrees=9)
    return lambda **arguments: make_dataset(image_processor, photographs, augment, kept=kept, **arguments)


def test_augmentation_depends_on_seed_epoch_and_index_alone(augmented):
    first = [Sample(0, 0, row) for row in range(8)]
    alone = inputs(augmented(), first[5])["pixel_values"][0]

    torch.rand(3)  # another state of the global generator
    dataset = augmented()
    inputs(dataset, first[0], first[1])
    assert torch.equal(inputs(dataset, first[2], first[5], first[7])["pixel_values"][1], alone)
    assert not torch.equal(inputs(augmented(seed=1), first[5])["pixel_values"][0], alone)
    assert not torch.equal(inputs(dataset, Sample(1, 0, 5))["pixel_values"][0], alone)
    assert torch.equal(inputs(dataset, first[5])["pixel_values"][0], alone)


def test_crops_depend_on_the_epoch_and_not_on_other_changes(image_processor):
    gradient = Image.fromarray(np.arange(200, dtype=np.uint8)[None, :, None].repeat(200, 0).repeat(3, 2))
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a"])})
    rows = Dataset.from_dict({"image": [gradient], "label": [0]}, features=features)
    augment = Augmentation((16, 24), random_resized_crop_scale=0.25, horizontal_flip_prob=0.5)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor, [augment]))

    images = torch.cat([inputs(dataset, Sample(epoch, 0, 0))["pixel_values"] for epoch in range(300)])

    slope = images[:, 0, 0, -1] - images[:, 0, 0, 0]  # its size is the width of the crop, its sign shows a flip
    assert len(slope.abs().unique()) > 50
    assert abs(np.corrcoef(slope.abs(), slope > 0)[0, 1]) < 0.2


def test_augmentation_of_small_images_does_not_depend_on_keeping(photographs):
    image_processor = ViTImageProcessor(size={"height": 30, "width": 40}, do_convert_rgb=True)  # as large as they are
    augment = Augmentation((30, 40), random_resized_crop_scale=0.5, rotation_degrees=9)
    mixing = Mixup(2, mixup_alpha=0.8, cutmix_alpha=1.0)
    samples = [Sample(0, 0, row) for row in (1, 4, 7)]

    one, other = (
        inputs(make_dataset(image_processor, photographs, augment, mixing=mixing, kept=kept), *samples)
        for kept in (True, False)
    )

    assert all(torch.equal(one[name], other[name]) for name in ("pixel_values", "labels"))


def test_images_are_cropped_or_resized_to_the_size_of_the_stage(image_processor, photographs, kept):
    stages = [Augmentation((4, 6)), Augmentation((16, 24), random_resized_crop_scale=0.5), None]
    dataset = make_dataset(image_processor, photographs, *stages, kept=kept)

    shapes = [dataset.__getitems__([Sample(0, stage, 0)])["pixel_values"].shape for stage in range(3)]

    assert shapes == [(1, 3, 4, 6), (1, 3, 16, 24), (1, 3, 16, 24)]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_worker_processes_decode_what_the_main_process_does(augmented, persistent_workers):
    dataset, sampler = augmented(), EpochSampler(12, seed=3)
    loader = DataLoader(
        dataset,
        batch_size=5,
        sampler=sampler,
        num_workers=2,
        persistent_workers=persistent_workers,
        collate_fn=collate,
    )

    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches, samples = list(loader), list(sampler)
        for number, batch in enumerate(batches):
            expected = dataset.__getitems__(samples[5 * number : 5 * number + 5])
            assert all(torch.equal(batch[name], expected[name]) for name in ("pixel_values", "labels"))
            assert np.array_equal(batch["keys"], expected["keys"])


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_worker_processes_end_by_the_main_process_alone(start_method, image_processor, photographs):
    """SIGTERM of a scheduler and Ctrl-C reach the workers too, and the main process still needs their batches."""
    dataset = make_dataset(image_processor, photographs)
    loader = DataLoader(
        dataset,
        batch_size=1,
        num_workers=1,
        prefetch_factor=1,
        collate_fn=collate,
        multiprocessing_context=start_method,
    )
    if start_method == "fork":
        batches = iter(loader)
        next(batches)
        (worker,) = multiprocessing.active_children()
        subprocess.run([sys.executable, "-c", f"import os; [os.kill({worker.pid}, n) for n in (2, 15)]"], check=True)
        assert len(list(batches)) == len(dataset) - 1

    batches = iter(loader)  # left unfinished, as by an exception: then multiprocessing ends it by SIGTERM, and waits
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(timeout=30)
    assert worker.exitcode == 0


def test_worker_processes_keep_the_memory_that_a_batch_has_freed(image_processor, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "keep_freed_memory", lambda: (tmp_path / str(os.getpid())).touch())
    data.set_up_worker_process.cache_clear()
    dataset = make_dataset(image_processor, photographs)

    list(DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=collate, multiprocessing_context="fork"))

    kept_by = {path.name for path in tmp_path.iterdir()}
    assert len(kept_by) == 2
    assert str(os.getpid()) not in kept_by


def test_augmentation_leaves_the_global_generator_alone(augmented):
    dataset = augmented(mixing=Mixup(2, mixup_alpha=0.8, cutmix_alpha=1.0))
    torch.manual_seed(7)
    expected = torch.rand(4)

    torch.manual_seed(7)
    inputs(dataset, Sample(0, 0, 3), Sample(0, 0, 4))

    assert torch.equal(torch.rand(4), expected)


# Mixing


@pytest.fixture
def plain():
    return Augmentation((16, 24))  # nothing random: only the resize


def mixture(mixed, own, other):
    """The share of the first image, and what is left where a mixture of the two is taken away."""
    share = ((mixed - other) * (own - other)).sum() / (own - other).square().sum()
    return share.item(), (mixed - (share * own + (1 - share) * other)).abs().max().item()


def test_mixup_is_the_mixture_of_two_neighbours_in_the_batch_and_of_their_labels(
    image_processor, photographs, plain, kept
):
    dataset = make_dataset(image_processor, photographs, plain, mixing=Mixup(2, mixup_alpha=1.0), kept=kept)
    images = inputs(make_dataset(image_processor, photographs, kept=kept), *range(12))["pixel_values"]
    order = [3, 8, 0, 5, 1, 2, 11, 4, 7, 10, 9]
    shares = []

    mixed = inputs(dataset, *(Sample(5, 0, row) for row in order))

    for position, row in enumerate(order[:-1]):
        partner = order[position + 1 if position % 2 == 0 else position - 1]
        share, rest = mixture(mixed["pixel_values"][position], images[row], images[partner])
        assert rest < 1e-5
        expected = torch.zeros(2)
        expected[row % 2] += share
        expected[partner % 2] += 1 - share
        torch.testing.assert_close(mixed["labels"][position], expected, rtol=0, atol=1e-4)
        shares.append(share)
    assert 0 <= min(shares) < 0.4 < 0.6 < max(shares) <= 1
    # The last one of an odd batch has no partner.
    assert torch.equal(mixed["pixel_values"][-1], images[9])
    assert mixed["labels"][-1].tolist() == [0, 1]


def test_cutmix_takes_a_rectangle_of_another_image_and_its_share_of_the_label(image_processor, plain):
    noise = [Image.fromarray(np.random.randint(0, 256, (16, 24, 3), dtype=np.uint8)) for _ in range(12)]
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": noise, "label": [0, 1] * 6}, features=features)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor, [plain], Mixup(2, cutmix_alpha=1.0)))
    images = inputs(ImageClassificationDataset(rows, BatchTransform(image_processor)), *range(12))["pixel_values"]

    mixed = inputs(dataset, *(Sample(1, 0, row) for row in range(12)))

    for row, (pixels, label) in enumerate(zip(mixed["pixel_values"], mixed["labels"], strict=True)):
        partner = row ^ 1
        foreign = (pixels != images[row]).any(0)  # (height, width)
        height, width = foreign.any(1).sum(), foreign.any(0).sum()
        assert foreign.sum() == height * width  # a rectangle
        assert torch.equal(pixels[:, foreign], images[partner][:, foreign])
        foreign_share = height * width / (16 * 24)
        expected = torch.eye(2)[row % 2] * (1 - foreign_share) + torch.eye(2)[partner % 2] * foreign_share
        torch.testing.assert_close(label, expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_targets_sum_to_one_and_are_smoothed(stage, image_processor, photographs, plain):
    mixing = Mixup(2, mixup_alpha=0.4, cutmix_alpha=1.0, mixup_prob=0.5, label_smoothing=0.2)
    stages = plain, Augmentation((16, 24), mixes=False), None
    dataset = make_dataset(image_processor, photographs, *stages, mixing=mixing)

    labels = inputs(dataset, *(Sample(0, stage, row) for row in range(12)))["labels"]

    assert torch.allclose(labels.sum(1), torch.ones(12))
    assert labels.min() >= 0.1 - 1e-6
    unmixed = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).repeat(6, 1)
    equal = torch.isclose(labels, unmixed).all(1)
    assert equal.all() if stage else 2 <= equal.sum() <= 10


@pytest.mark.parametrize("mixed", [False, True])
def test_class_weights_enter_the_loss_as_in_torch(mixed, photographs):
    counts = np.array([6, 3, 1])
    rows = np.repeat(np.arange(3), counts)
    weights = torch.tensor(compute_class_weight("balanced", classes=np.arange(3), y=rows)).float()
    options = {"mixup_alpha": float(mixed), "class_counts": counts}
    plain, weighted = (Mixup(3, class_weighting=chosen, **options) for chosen in ("none", "balanced"))
    images, labels = torch.zeros(6, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 2, 2, 0, 1])
    logits = torch.randn(6, 3)
    keys = [(0, number) for number in range(6)]

    targets, actual = (mixup(images, labels, SampleRNG(keys) if mixed else None)[1] for mixup in (plain, weighted))

    if mixed:
        expected = torch.nn.CrossEntropyLoss(weights)(logits, targets)
    else:  # for class ids torch divides by the weights of the batch, which differ from batch to batch
        expected = torch.nn.CrossEntropyLoss(weights, reduction="sum")(logits, labels) / 6
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, actual), expected)


def test_smoothing_spreads_the_weight_of_the_images_own_class():
    mixup = Mixup(2, label_smoothing=0.2, class_weighting="balanced", class_counts=np.array([9, 1]))

    _, targets = mixup(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]), None)

    torch.testing.assert_close(targets, torch.tensor([[0.9, 0.1], [0.1, 0.9]]) * torch.tensor([[10 / 18], [10 / 2]]))


def test_several_labels_are_mixed_and_smoothed_each_for_itself():
    labels = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.int8)
    smoothed = Mixup(3, label_smoothing=0.2)(torch.zeros(2, 3, 4, 4), labels, None)[1]
    images = torch.tensor([0, 100], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 4, 4)

    mixed, targets = Mixup(3, mixup_alpha=1.0)(images, labels, SampleRNG([(0, 1), (0, 2)]))

    torch.testing.assert_close(smoothed, torch.tensor([[0.9, 0.1, 0.9], [0.1, 0.1, 0.9]]))
    share = mixed[:, 0, 0, 0] / 100  # of the second image
    torch.testing.assert_close(targets, torch.stack((1 - share, torch.zeros(2), torch.ones(2)), dim=1))


def test_numbers_are_mixed_like_their_images():
    images = torch.tensor([0, 100], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 4, 4)
    labels = torch.tensor([[-5.0], [15.0]])

    mixed, targets = Mixup(1, mixup_alpha=1.0)(images, labels, SampleRNG([(0, 1), (0, 2)]))

    torch.testing.assert_close(targets, mixed[:, 0, 0, :1] / 100 * 20 - 5)


def test_pair_is_the_same_in_any_batch(augmented):
    mixing = Mixup(2, mixup_alpha=0.4, cutmix_alpha=1.0)
    samples = [Sample(2, 0, row) for row in (4, 7, 1, 9, 3)]

    together = inputs(augmented(mixing=mixing), *samples)

    for places in ([0, 1], [2, 3], [4]):
        alone = inputs(augmented(mixing=mixing), *(samples[place] for place in places))
        assert torch.equal(alone["pixel_values"], together["pixel_values"][places])
        assert torch.equal(alone["labels"], together["labels"][places])


@pytest.mark.parametrize(
    ("sizes", "most", "message"),
    [
        (
            [(8, 8)] * 4,
            4 * 3 * 8 * 8,
            r"of 8x8 pixels \(0.000768 MB\) are kept on cpu, so that worker processes are not",
        ),
        ([(8, 8)] * 4, 4 * 3 * 8 * 8 - 1, r"of 8x8 pixels \(0.000768 MB\) are decoded again for each batch"),
        ([(8, 8)] * 3 + [(8, 9)], 2**20, r"of 24x16 pixels .* are kept on cpu"),
        ([(30, 8)] * 4, 2**20, r"of 24x16 pixels .* are kept on cpu"),
    ],
)
def test_images_are_kept_where_they_fit(sizes, most, message, image_processor, monkeypatch, caplog):
    monkeypatch.setattr("hf_vit_scratch.data.dataset.DECODED_BYTES_KEPT", most)
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a"])})
    rows = Dataset.from_dict({"image": [Image.new("L", size) for size in sizes], "label": [0] * 4}, features=features)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor, [Augmentation((16, 24))]))

    with caplog.at_level("INFO"):
        kept = dataset.keep_decoded(torch.device("cpu"))

    assert kept == ("kept" in message)
    assert re.search(message, caplog.text)
    assert inputs(dataset, 1)["pixel_values"].shape == (1, 3, 16, 24)


def photographs_in_files(folder, photographs):
    """Rows with JPEG files of the two photographs, 1280 and 960 pixels wide."""
    files = []
    for number, photograph in enumerate(photographs):
        files.append(str(folder / f"{number}.jpg"))
        photograph.resize((1280 - 320 * number, 853)).save(files[-1], quality=95)
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    return Dataset.from_dict({"image": files, "label": [0, 1]}, features=features)


def test_large_photographs_are_decoded_once_and_kept_small(image_processor, photographs, tmp_path, monkeypatch):
    rows = photographs_in_files(tmp_path, photographs)
    dataset = ImageClassificationDataset(
        rows, BatchTransform(image_processor, [Augmentation((16, 24), random_resized_crop_scale=0.5)])
    )
    decoded = []
    decode = data.decode_image

    def remember(*arguments, **options):
        decoded.append(decode(*arguments, **options))
        return decoded[-1]

    monkeypatch.setattr(data, "decode_image", remember)

    assert dataset.keep_decoded(torch.device("cpu"))
    for epoch in range(3):
        dataset.__getitems__([Sample(epoch, 0, 0), Sample(epoch, 0, 1)])

    assert sorted(image.width for image in decoded) == [120, 160]  # an eighth: the least above twice what is kept
    assert dataset._kept.shape == (2, 24, 36, 3)  # 1.5 times the model's, as parts are cut from them
    assert dataset.sample(2, seed=0, stage=0)["pixel_values"].shape == (2, 3, 16, 24)


def test_images_are_kept_as_large_as_the_largest_stage(image_processor, photographs, tmp_path):
    rows = photographs_in_files(tmp_path, photographs)
    transform = BatchTransform(image_processor, [Augmentation((32, 48)), None])  # the model's images are 16x24
    kept, decoded = (ImageClassificationDataset(rows, transform) for _ in range(2))

    kept.keep_decoded(torch.device("cpu"))

    assert torch.equal(kept[Sample(0, 0, 1)]["pixel_values"], decoded[Sample(0, 0, 1)]["pixel_values"])


def test_images_decoded_at_reduced_size_are_cached_apart(image_processor, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    rows = photographs_in_files(tmp_path, photographs)
    reduced, whole = (
        ImageClassificationDataset(rows, BatchTransform(image_processor, [stage]), cache_images=True)
        for stage in (Augmentation((16, 24)), None)
    )

    for dataset in (reduced, whole):
        dataset.keep_decoded(torch.device("cpu"))

    assert reduced._kept != whole._kept


def test_broken_image_is_named_by_each_attempt_to_keep_all(image_processor, photographs, tmp_path):
    rows = photographs_in_files(tmp_path, photographs)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor))
    (tmp_path / "1.jpg").write_bytes(b"no image")
    for _ in range(2):  # as in a notebook
        with pytest.raises(UserError, match="cannot be decoded as an image"):
            dataset.keep_decoded(torch.device("cpu"))


def test_images_are_cached_in_a_file_until_they_change(image_processor, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    rows = photographs_in_files(tmp_path, photographs)
    stages, key = [Augmentation((16, 24), random_resized_crop_scale=0.5)], Sample(3, 0, 1)
    decoded = []
    monkeypatch.setattr(
        data, "decode_image", lambda *args, **options: decoded.append(1) or decode_image(*args, **options)
    )

    def cached():
        dataset = ImageClassificationDataset(rows, BatchTransform(image_processor, stages), cache_images=True)
        assert not dataset.keep_decoded(torch.device("cpu"))  # in memory
        return dataset[key]["pixel_values"]

    first, again = cached(), cached()

    assert len(decoded) == 2
    assert torch.equal(first, again)
    photographs[0].resize((900, 800)).save(tmp_path / "1.jpg")
    assert not torch.equal(cached(), first)
    assert len(decoded) == 4
    image_processor.resample = Image.Resampling.BICUBIC
    cached()
    assert len(decoded) == 6


def test_cache_of_an_attempt_that_was_killed_is_made_anew(image_processor, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = photographs_in_files(tmp_path, photographs)

    def cached():
        dataset = ImageClassificationDataset(rows, BatchTransform(image_processor), cache_images=True)
        dataset.keep_decoded(torch.device("cpu"))
        return dataset[0]["pixel_values"]

    whole, (file,) = cached(), tmp_path.glob("cache/*/*.npy")
    file.rename(file.with_suffix(".part"))

    assert torch.equal(cached(), whole)
    assert file.is_file()
    assert not file.with_suffix(".part").exists()


def test_images_in_rows_have_a_cache_of_their_own(image_processor, photographs, monkeypatch):
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    features, kept = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])}), []
    for image in photographs[:2]:
        rows = Dataset.from_dict({"image": [image.resize((40, 30))] * 2, "label": [0, 1]}, features=features)
        dataset = ImageClassificationDataset(rows, BatchTransform(image_processor), cache_images=True)
        dataset.keep_decoded(torch.device("cpu"))
        kept.append(dataset._kept)

    assert kept[0] != kept[1]


def test_missing_image_is_named_when_a_cache_is_filled(image_processor, photographs, monkeypatch):
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": [photographs[0], None], "label": [0, 1]}, features=features)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor), cache_images=True)

    with pytest.raises(UserError, match=r"^image 1 is missing: its row holds no image"):
        dataset.keep_decoded(torch.device("cpu"))


def test_file_that_is_missing_is_named_when_a_cache_is_filled(image_processor, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    rows = photographs_in_files(tmp_path, photographs)
    (tmp_path / "1.jpg").unlink()
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor), cache_images=True)

    with pytest.raises(UserError, match=r"1\.jpg cannot be decoded as an image"):
        dataset.keep_decoded(torch.device("cpu"))


def test_cache_that_the_disk_cannot_hold_is_refused(image_processor, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    rows = photographs_in_files(tmp_path, photographs)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor), cache_images=True)

    with pytest.raises(UserError, match=r"--cache_images needs 0.0 GB in .*, where 0.0 GB are free"):
        dataset.keep_decoded(torch.device("cpu"))


def test_training_images_of_reduced_size_are_close_to_the_whole_files(image_processor, photographs, tmp_path):
    rows = photographs_in_files(tmp_path, photographs)

    reduced, whole = (
        inputs(ImageClassificationDataset(rows, BatchTransform(image_processor, stages)), 0, 1)["pixel_values"]
        for stages in ([Augmentation((16, 24))], ())
    )

    assert (reduced - whole).abs().mean() < 0.01  # of a range from -1 to 1
    assert (reduced - whole).abs().max() < 0.1


def test_kept_evaluation_images_of_any_size_are_exactly_those_of_a_pipeline(image_processor, photographs, tmp_path):
    rows = photographs_in_files(tmp_path, photographs)
    dataset = ImageClassificationDataset(rows, BatchTransform(image_processor))

    assert dataset.keep_decoded(torch.device("cpu"))

    expected = image_processor([Image.open(tmp_path / f"{n}.jpg") for n in (0, 1)], return_tensors="pt")
    assert torch.equal(inputs(dataset, 0, 1)["pixel_values"], expected["pixel_values"])


def test_filters_of_warnings_are_restored_after_decoding(image_processor, photographs, tmp_path, monkeypatch):
    decode = data.decode_image

    def decode_and_leave_a_filter(*arguments, **options):  # as two threads do, of which the first ends last
        warnings.simplefilter("ignore", ResourceWarning)
        return decode(*arguments, **options)

    monkeypatch.setattr(data, "decode_image", decode_and_leave_a_filter)
    dataset = ImageClassificationDataset(photographs_in_files(tmp_path, photographs), BatchTransform(image_processor))
    before = list(warnings.filters)

    assert dataset.keep_decoded(torch.device("cpu"))

    assert list(warnings.filters) == before


# Order and stages


def test_sampler_draws_every_row_once_in_an_order_of_the_epoch():
    sampler, again = EpochSampler(50, seed=4), EpochSampler(50, seed=4)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append([sample.row for sample in sampler])
        assert {sample.epoch for sample in sampler} == {epoch}
    again.set_epoch(2)

    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != list(range(50))
    assert [sample.row for sample in again] == orders[2]
    assert [sample.row for sample in EpochSampler(50, seed=5)] != orders[0]


def test_stage_changes_between_two_steps_only():
    sampler = EpochSampler(20, seed=0, batch_size=8, stage=lambda epochs: int(epochs >= 1.3))

    first = [sample.stage for sample in sampler]
    sampler.set_epoch(1)
    second = [sample.stage for sample in sampler]

    assert first == [0] * 20
    assert second == [0] * 8 + [1] * 12  # 1.3 epochs are 26 rows; the step that begins at row 28 is the first beyond


def test_label_out_of_range_is_named(tmp_path, photographs):
    features = Features({"image": ImageFeature(), "label": Value("int64")})
    rows = Dataset.from_dict({"image": [photographs[0].resize((9, 9))] * 5, "label": [0, 1, 1, 2, 0]}, features)
    table = rows.data.table.replace_schema_metadata(None)
    names = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    Dataset(table, info=DatasetInfo(features=names)).to_parquet(tmp_path / "train.parquet")

    with pytest.raises(UserError, match=r"1 rows of train have no label, .*; the first is row 3 with 2"):
        load_splits(str(tmp_path))


def test_balanced_sampling_visits_classes_equally_and_their_images_in_turn():
    classes = np.array([0] * 20 + [1] * 3 + [2] * 7)
    sampler = EpochSampler(30, seed=4, classes=classes)
    epochs = []
    for epoch in range(40):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))

    for samples in epochs:
        counts = np.bincount([sample.row for sample in samples], minlength=30)
        assert np.bincount(classes, weights=counts).tolist() == [10, 10, 10]
        assert np.ptp(counts[20:23]) == 1  # ten visits to three images
        assert set(counts[:20]) == {0, 1}
        assert len({(sample.epoch, sample.row) for sample in samples}) == 30  # so no two visits are changed alike
    assert len({tuple(sample.row for sample in samples) for samples in epochs}) == 40
    assert len({sample.row for samples in epochs for sample in samples}) == 30
    again = EpochSampler(30, seed=4, classes=classes)
    again.set_epoch(7)
    assert list(again) == epochs[7]


# Images that cannot be decoded


def test_corrupt_images_are_skipped_and_named(class_folders, caplog):
    truncated = class_folders / "temple" / "03.jpg"
    truncated.write_bytes(truncated.read_bytes()[:500])
    (class_folders / "flower" / "05.jpg").write_text("no image")
    caplog.set_level("WARNING")

    splits = load_splits(str(class_folders), corrupt_images="skip")

    assert sum(map(len, splits.values())) == 22
    assert "images skipped: 2 of 24" in caplog.text
    assert "temple/03.jpg cannot be decoded as an image" in caplog.text
    assert "flower/05.jpg cannot be decoded as an image" in caplog.text


def test_fingerprint_is_of_the_images_that_are_used(class_folders):
    before = fingerprint(load_splits(str(class_folders)))
    broken = class_folders / "temple" / "05-broken.jpg"
    broken.write_bytes(b"no image")
    with_skipped = fingerprint(load_splits(str(class_folders), corrupt_images="skip"))
    broken.unlink()
    (class_folders / "temple" / "03.jpg").rename(class_folders / "temple" / "30.jpg")

    assert with_skipped == before
    assert fingerprint(load_splits(str(class_folders))) != before


def test_nothing_left_to_train_on_is_refused(class_folders):
    for file in class_folders.rglob("*.jpg"):
        file.write_text("no image")

    with pytest.raises(UserError, match=r"no image of train can be decoded; the first: .*flower/00\.jpg"):
        load_splits(str(class_folders), corrupt_images="skip")


def test_unknown_policy_for_corrupt_images_is_refused():
    with pytest.raises(UserError, match=r"corrupt_images must be one of raise, skip, got 'ignore'"):
        load_splits("digits", corrupt_images="ignore")


def test_configuration_of_a_hub_dataset_is_refused_beside_local_images(class_folders):
    with pytest.raises(UserError, match=r"--streaming is for parquet files and the Hub, --data_config for the Hub"):
        load_splits(str(class_folders), data_config="plain_text")
