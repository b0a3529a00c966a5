"""Near duplicates and groups stay on one side of every split."""

import csv
import io
import json
import re
from itertools import combinations

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from hf_vit_scratch.data import near_duplicates
from hf_vit_scratch.data.groups import cut_the_missing, keep_together
from hf_vit_scratch.data.near_duplicates import find_near_duplicates
from hf_vit_scratch.data.options import DataArguments
from hf_vit_scratch.data.splits import load_split, load_splits
from hf_vit_scratch.errors import UserError

LABELS = ClassLabel(names=["a", "b", "c"])


def rows_of(pictures, labels=None, **columns):
    features = {"image": ImageFeature(), "label": LABELS} | {name: Value("string") for name in columns}
    labels = [0] * len(pictures) if labels is None else labels
    return Dataset.from_dict({"image": pictures, "label": labels, **columns}, features=Features(features))


def pictures_of(number, seed=0):
    """Smooth patterns of random colors, of different sizes."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, (number, 6, 6, 3), np.uint8)
    return [Image.fromarray(pattern).resize(rng.integers(60, 120, 2).tolist(), 3) for pattern in patterns]


def compressed(picture):
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=50)
    return Image.open(file)


COPIES = {
    "exact": lambda picture: picture,
    "compressed": compressed,
    "smaller": lambda picture: picture.resize((40, 40)),
    "stretched": lambda picture: picture.resize((90, 60)),
    "mirrored": ImageOps.mirror,
}


def save(folder, pictures, names):
    for picture, name in zip(pictures, names, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(folder / name)


@pytest.mark.parametrize("kind", COPIES)
def test_copies_are_found_and_nothing_else(kind):
    pictures = pictures_of(200)
    copies = [COPIES[kind](picture) for picture in pictures[:50]]

    pairs = find_near_duplicates([rows_of(pictures), rows_of(copies)])

    found = set(map(tuple, pairs.tolist()))
    assert len(found & {(number, 200 + number) for number in range(50)}) >= 49
    assert len(found) <= 50


@pytest.mark.parametrize("color", ["white", "bisque"])
def test_blank_pages_are_nobodys_duplicates(color):
    blank = Image.new("RGB", (50, 50), color)

    assert find_near_duplicates([rows_of([blank, blank, *pictures_of(5)])]).tolist() == []


def test_images_are_numbered_through_all_splits():
    pictures = pictures_of(6)

    assert find_near_duplicates([rows_of(pictures), rows_of([pictures[2]])]).tolist() == [[2, 6]]


def test_blocks_do_not_change_what_is_found(monkeypatch):
    pictures = pictures_of(60)
    rows = rows_of([*pictures, *map(ImageOps.mirror, pictures[:20])])
    whole = find_near_duplicates([rows]).tolist()
    monkeypatch.setattr(near_duplicates, "BLOCK", 7)

    assert find_near_duplicates([rows]).tolist() == whole
    assert len(whole) >= 20


def test_train_loses_what_the_test_split_has_and_a_file_lists_it(tmp_path):
    pictures = pictures_of(40)
    names = [f"train/{'ab'[number % 2]}/{number}.png" for number in range(40)]
    save(tmp_path / "photos", pictures, names)
    save(tmp_path / "photos", pictures_of(6, seed=1), [f"test/{'ab'[n % 2]}/{n}.png" for n in range(6)])
    save(tmp_path / "photos", [compressed(pictures[3])], ["test/a/copy.png"])  # with another label

    splits = load_splits(str(tmp_path / "photos"), listing=tmp_path / "list.csv", validation_fraction=0.1)

    paths = [image.filename for image in (*splits["train"]["image"], *splits["validation"]["image"])]
    assert len(paths) == 39
    assert str(tmp_path / "photos" / names[3]) not in paths
    assert len(splits["test"]) == 7
    (row,) = csv.DictReader((tmp_path / "list.csv").read_text().splitlines())
    assert row["image_1"].endswith(names[3])
    assert row["image_2"].endswith("test/a/copy.png")
    assert (row["split_1"], row["split_2"], row["same_label"]) == ("train", "test", "False")


def test_near_duplicates_are_counted_in_the_log(caplog):
    pictures = pictures_of(20)
    splits = {"train": rows_of(pictures), "test": rows_of([pictures[0], pictures[1]], [0, 1])}

    keep_together(DataArguments(data="here"), splits, None)

    assert "here: pairs of near duplicates: 2 (2 in two splits, 1 with different labels)." in caplog.text


def test_log_says_that_there_are_no_near_duplicates(caplog):
    caplog.set_level("INFO")
    keep_together(DataArguments(data="here"), {"train": rows_of(pictures_of(8))}, None)
    assert "here: no near duplicates were found." in caplog.text


def test_test_split_keeps_the_copy():
    pictures = pictures_of(12)
    splits = {"train": rows_of(pictures[:6]), "validation": rows_of(pictures[6:10]), "test": rows_of(pictures[9:])}

    kept, _ = keep_together(DataArguments(), splits, None)

    assert {name: len(rows) for name, rows in kept.items()} == {"train": 6, "validation": 3, "test": 3}


def test_all_images_of_a_split_that_are_elsewhere_are_refused():
    pictures = pictures_of(8)
    splits = {"train": rows_of(pictures), "test": rows_of(pictures)}

    with pytest.raises(UserError, match=r"all images of train are also in other splits"):
        keep_together(DataArguments(), splits, None)


def test_one_of_each_near_duplicate_is_left_where_asked():
    pictures = pictures_of(30)
    splits = {"train": rows_of([*pictures, *pictures[:5]]), "test": rows_of(pictures[:2])}

    result, _ = keep_together(DataArguments(near_duplicates="drop"), splits, None)

    assert {name: len(rows) for name, rows in result.items()} == {"train": 28, "test": 2}
    assert find_near_duplicates(result.values()).tolist() == []


def test_near_duplicates_are_ignored_where_asked():
    pictures = pictures_of(8)
    splits = {"train": rows_of(pictures), "test": rows_of(pictures)}

    result, groups = keep_together(DataArguments(near_duplicates="ignore"), splits, None)

    assert {name: len(rows) for name, rows in result.items()} == {"train": 8, "test": 8}
    assert sorted(groups) == list(range(8))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 15)), min_size=30, max_size=120),
    st.floats(0.05, 0.4),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_groups_never_cross_and_every_class_stays_in_train(table, fraction, seed):
    labels, groups = np.array(table).T
    if np.bincount(labels, minlength=3)[np.unique(labels)].min() < 2:
        return
    pixels = Image.new("L", (2, 2))
    splits = {"train": rows_of([pixels] * len(table), labels, group=[str(group) for group in groups])}

    try:
        cut_the_missing(DataArguments(validation_fraction=fraction, test_fraction=fraction), splits, groups, seed)
    except UserError as error:  # few large groups
        assert "small enough to be cut" in str(error) or "too few to cut" in str(error)  # noqa: PT017
        return

    for one, other in combinations(splits.values(), 2):
        assert not {*one["group"]} & {*other["group"]}
    assert {*splits["train"]["label"]} == {*labels.tolist()}
    assert sum(map(len, splits.values())) == len(table)


def test_cut_in_groups_has_the_share_of_every_class():
    labels = np.repeat([0, 1], [900, 300])
    groups = np.concatenate([np.arange(900) // 3, 300 + np.arange(300) // 3])
    splits = {"train": rows_of([Image.new("L", (2, 2))] * 1200, labels)}

    cut_the_missing(DataArguments(validation_fraction=0.1, test_fraction=0.2), splits, groups, 0)

    assert np.bincount(splits["validation"]["label"]).tolist() == [90, 30]
    assert np.bincount(splits["test"]["label"]).tolist() == [180, 60]


@pytest.mark.parametrize("by", ["1", r"/(x\d+)p/", r"x\d+", "patient"])
def test_groups_come_from_a_folder_an_expression_or_a_column(tmp_path, by):
    names = [f"{'ab'[number % 2]}/x{number // 6}p/{number}.png" for number in range(60)]
    save(tmp_path, pictures_of(60), names)
    lines = [f"{name},{name[0]},{name.split('/')[1]}" for name in names]
    if by == "patient":
        (tmp_path / "metadata.csv").write_text("\n".join(["file_name,label,patient", *lines]))

    splits = load_splits(str(tmp_path), group_by=by, test_fraction=0.2)

    patients = [{image.filename.split("/")[-2] for image in rows["image"]} for rows in splits.values()]
    assert [len(of_split) for of_split in patients] == [7, 1, 2]
    assert len(set.union(*patients)) == 10


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("([", r"group_by must be a column, a number or a regular expression, got '\(\['"),
        (
            "99",
            r"every image needs a group, but group_by '99' is not a column, and finds none in the path '.*00\.jpg'",
        ),
        ("patient", r"every image needs a group, but group_by 'patient' is not a column"),
    ],
)
def test_groups_that_cannot_be_found_are_refused(class_folders, by, message):
    with pytest.raises(UserError, match=message):
        load_splits(str(class_folders), group_by=by)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_empty_cells_are_no_group(suffix, tmp_path):
    save(tmp_path, pictures_of(4), [f"{number}.png" for number in range(4)])
    rows = [(f"{number}.png", "ab"[number % 2], "" if number == 2 else f"p{number}") for number in range(4)]
    names = ("file_name", "label", "patient")
    lines = [",".join(row) for row in (names, *rows)]
    if suffix == ".jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (tmp_path / f"metadata{suffix}").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"column 'patient' is empty in 1 rows, first .*2\.png\. Fill it"):
        load_splits(str(tmp_path), group_by="patient")


def test_expression_may_name_groups_by_alternatives(tmp_path):
    kinds = [("video", "clip")[number % 3 == 0] for number in range(60)]
    names = [f"{'ab'[number % 2]}/{kind}_{number // 6}_{number}.png" for number, kind in enumerate(kinds)]
    save(tmp_path, pictures_of(60), names)

    with pytest.raises(UserError, match=r"every image needs a group, but group_by .* finds none in the path"):
        load_splits(str(tmp_path), group_by=r"video_(\d+)|clip")
    splits = load_splits(str(tmp_path), group_by=r"(?:video|clip)_(\d+)", test_fraction=0.2)
    assert sum(map(len, splits.values())) == 60


@pytest.mark.parametrize("seed", range(10))
def test_rare_class_of_several_groups_is_in_every_split(seed):
    labels = np.repeat([0, 1, 2], [400, 400, 28])
    groups = np.concatenate([np.arange(800) // 6 % 66, [60, 61, 62, 63, 64] * 5, [60, 61, 62]])  # beside the others
    splits = {"train": rows_of([Image.new("L", (2, 2))] * 828, labels)}

    cut_the_missing(DataArguments(), splits, groups, seed)

    assert {name for name, rows in splits.items() if 2 in rows["label"]} == {"train", "validation", "test"}


def test_group_that_is_chosen_for_a_rare_class_is_its_smallest():
    labels = np.repeat([0, 1], [300, 30])
    groups = np.concatenate([np.arange(300), 300 + np.repeat([0, 1, 2, 3], [10, 8, 5, 7])])
    splits = {"train": rows_of([Image.new("L", (2, 2))] * 330, labels), "test": rows_of([Image.new("L", (2, 2))])}

    cut_the_missing(DataArguments(validation_fraction=0.05), splits, groups, 0)

    assert np.bincount(splits["validation"]["label"]).tolist() == [15, 5]  # two were wanted


def test_group_that_was_chosen_for_one_class_serves_the_next():
    labels, groups = np.repeat([0, 1, 0, 1, 1], [4, 4, 4, 4, 3]), np.repeat([0, 1, 2], [8, 8, 3])
    splits = {"train": rows_of([Image.new("L", (2, 2))] * 19, labels), "test": rows_of([Image.new("L", (2, 2))])}

    cut_the_missing(DataArguments(validation_fraction=0.1), splits, groups, 0)

    assert np.bincount(splits["validation"]["label"]).tolist() == [4, 4]


def test_class_without_a_test_image_is_named(tmp_path, caplog):
    names = [f"{name}/{name}{place}/{number}.png" for name in "ab" for place in range(8) for number in range(2)]
    names += [f"c/c0/{number}.png" for number in range(8)]
    save(tmp_path, pictures_of(len(names)), names)

    with caplog.at_level("INFO"):
        load_splits(str(tmp_path), group_by="1")

    assert "test has no image of 'c'." in caplog.text
    assert "4 of 40 images (10%) cut for test" in caplog.text


def test_one_group_cannot_be_cut(class_folders):
    with pytest.raises(UserError, match=r"none of the 1 groups of images is small enough to be cut"):
        load_splits(str(class_folders), group_by="/")


def test_groups_do_not_depend_on_the_folders_above_the_data(tmp_path, monkeypatch):
    names = [f"{'ab'[number % 2]}/p{number // 4}_{number}.png" for number in range(40)]
    save(tmp_path / "disk7" / "photos", pictures_of(40), names)
    monkeypatch.chdir(tmp_path / "disk7")

    below, absolute = (load_splits(data, group_by=r"(\d+)") for data in ("photos", str(tmp_path / "disk7" / "photos")))

    assert [rows["label"][:] for rows in below.values()] == [rows["label"][:] for rows in absolute.values()]
    assert [len(rows) for rows in below.values()] == [32, 4, 4]


def test_groups_of_a_table_are_found_below_it_however_its_path_is_written(tmp_path, monkeypatch):
    names = [f"{'ab'[number % 2]}/p{number // 4}_{number}.png" for number in range(40)]
    save(tmp_path / "photos", pictures_of(40), names)
    lines = ["file_name,label", *(f"{name},{name[0]}" for name in names)]
    (tmp_path / "photos" / "labels.csv").write_text("\n".join(lines))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    splits = load_splits("../photos/labels.csv", group_by=r"^[ab]/p(\d+)")

    assert [len(rows) for rows in splits.values()] == [32, 4, 4]


def test_column_of_groups_is_not_needed_to_evaluate(tmp_path):
    save(tmp_path, pictures_of(4), [f"{number}.png" for number in range(4)])
    lines = [f"{number}.png,{'ab'[number % 2]},{number}" for number in range(4)]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,label,patient", *lines]))

    rows = load_split(DataArguments(data=str(tmp_path), group_by="patient"), None)

    assert rows.column_names == ["image", "label"]


def test_test_split_may_have_a_class_that_train_has_not():
    image = Image.new("L", (2, 2))
    splits = {"train": rows_of([image] * 40, [0, 1] * 20), "test": rows_of([image] * 3, [0, 1, 2])}

    cut_the_missing(DataArguments(), splits, None, 0)

    assert np.bincount(splits["validation"]["label"]).tolist() == [2, 2]


def test_class_without_an_image_in_a_test_split_that_was_given_is_named(caplog):
    image, labels = Image.new("L", (2, 2)), [0, 1] * 20
    splits = {"train": rows_of([image] * 40, labels), "test": rows_of([image] * 3, [0] * 3)}

    cut_the_missing(DataArguments(), splits, None, 0)

    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert re.fullmatch(r"digits: test has no image of '\w+'\.", warning)
