"""Tables of image paths and labels, and what the labels make of a run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from hf_vit_scratch.data.splits import SPLITS, count_learnt, list_splits, load_splits, with_names
from hf_vit_scratch.data.targets import describe, label_names, problem_type, targets_of
from hf_vit_scratch.errors import UserError

SMALL = [Image.new("L", (4, 4))] * 20  # what is in them plays no part
NAMES = [f"{kind}/{number:02}.png" for kind in ("cat", "dog") for number in range(10)]


@pytest.fixture
def folder(tmp_path):
    """Twenty images in two class folders, which differ in their brightness."""
    root = tmp_path / "photos"
    for shade, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), 10 * shade).save(root / name)
    return root


def write_table(path, names=NAMES, **columns):
    """Write a table of image paths and labels in the format that its suffix names."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    rows = [{"file_name": name, **row} for name, row in zip(names, rows, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Tables


@pytest.mark.parametrize(("train", "val"), [("12x", "12"), ("12", "12x")])
def test_types_of_labels_may_differ_between_the_tables_of_splits(tmp_path, train, val):
    for split, labels in (("train", train), ("val", val)):
        names = [f"{label}_{number}.png" for label in labels for number in range(3)]
        for shade, name in enumerate(names):
            (tmp_path / split).mkdir(exist_ok=True)
            Image.new("L", (4, 4), 10 * shade).save(tmp_path / split / name)
        write_table(tmp_path / split / "metadata.csv", names, label=[name[0] for name in names])

    if len(val) > len(train):
        with pytest.raises(UserError, match="no image of train has the label 'x'"):
            load_splits(str(tmp_path), near_duplicates="ignore")
    else:
        splits = load_splits(str(tmp_path), near_duplicates="ignore")
        assert splits["train"].features["label"].names == ["1", "2", "x"]
        assert splits["validation"]["label"][:] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("cell", ["cat;{}", "cat; {} ;", '["cat";"{}"]'])
def test_cell_of_a_table_holds_several_labels(folder, cell):
    table = write_table(folder / "tags.csv", tags=[cell.format(("day", "night")[n % 2]) for n in range(20)])

    rows = load_splits(str(table), label_column=["tags"], label_separator=";")["train"]

    assert rows.features["label"] == List(ClassLabel(names=["cat", "day", "night"]))
    assert (targets_of(rows).sum(axis=1) == 2).all()


def test_labels_with_a_separator_are_no_decimal_commas(folder):
    lines = [f"{name};{n % 2},2" for n, name in enumerate(NAMES)]
    (folder / "tags.csv").write_text("\n".join(["file_name;tags", *lines]))

    rows = load_splits(str(folder / "tags.csv"), label_column=["tags"], label_separator=",")["train"]

    assert rows.features["label"] == List(ClassLabel(names=["0", "1", "2"]))


def test_separator_beside_numbers_is_refused(folder):
    table = write_table(folder / "ages.csv", age=[n + 0.5 for n in range(20)])

    with pytest.raises(
        UserError, match=r"label_separator is for one column of texts, but 'age' holds Value\('float64'\)"
    ):
        load_splits(str(table), label_column=["age"], label_separator=";")


def test_columns_of_two_classes_each_are_several_labels(tmp_path):
    names = ClassLabel(names=["no", "yes"])
    Dataset.from_dict(
        {"image": SMALL, "a": [0, 1] * 10, "b": [1, 0] * 10},
        features=Features({"image": ImageFeature(), "a": names, "b": names}),
    ).to_parquet(tmp_path / "a.parquet")

    rows = load_splits(str(tmp_path), label_column=["a", "b"], near_duplicates="ignore")["train"]

    assert rows.features["label"] == List(ClassLabel(names=["a", "b"]))


def test_class_that_is_called_minus_one_is_a_class(tmp_path):
    features = Features({"image": ImageFeature(), "label": Value("int64")})
    for split, labels in (("train", [-1, 1] * 10), ("validation", [-1] * 4)):
        rows = {"image": SMALL[: len(labels)], "label": labels}
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{split}-0.parquet")

    assert load_splits(str(tmp_path), near_duplicates="ignore")["validation"]["label"][:] == [0] * 4


@pytest.mark.parametrize(("is_list", "labels"), [(True, [[0], [0, 1]]), (False, [0, 1])])
def test_separator_beside_classes_is_refused(is_list, labels, tmp_path):
    feature = ClassLabel(names=["a", "b"])
    features = Features({"image": ImageFeature(), "label": List(feature) if is_list else feature})
    rows = {"image": SMALL[:12], "label": labels * 6}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")

    message = rf"label_separator is for one column of texts, but 'label' holds {'List' if is_list else 'ClassLabel'}"
    with pytest.raises(UserError, match=message):
        load_splits(str(tmp_path), label_separator=";", near_duplicates="ignore")


@pytest.mark.parametrize("column", ["image", "photo"])
def test_column_of_the_images_is_none_of_labels(column, tmp_path):
    features = Features({"photo": ImageFeature(), "image": Value("string"), "label": Value("string")})
    rows = {"photo": SMALL, "image": ["a", "b"] * 10, "label": ["a", "b"] * 10}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")

    with pytest.raises(UserError, match=rf"there is no label column '{column}', only \['label'\]"):
        load_splits(str(tmp_path), label_column=[column])


def test_separator_beside_several_columns_is_refused(folder):
    table = write_table(folder / "two.csv", a=[0, 1] * 10, b=[1, 0] * 10)
    with pytest.raises(UserError, match=r"label_separator is for one column of texts, but 'a' holds Value"):
        load_splits(str(table), label_column=["a", "b"], label_separator=";")


@pytest.mark.parametrize("as_file", [True, False])
def test_images_that_another_program_wrote_into_parquet_are_found(as_file, photographs, tmp_path):
    images = []
    for number in range(20):
        photographs[number % 2].crop((number, 0, 40 + number, 40)).save(tmp_path / "one.png")
        images.append({"bytes": (tmp_path / "one.png").read_bytes(), "path": None})
    (tmp_path / "one.png").unlink()
    pq.write_table(pa.table({"image": images, "label": ["a", "b"] * 10}), tmp_path / "bare.parquet")

    rows = load_splits(str(tmp_path / "bare.parquet" if as_file else tmp_path), near_duplicates="ignore")["train"]

    assert rows.features["image"] == ImageFeature()
    assert rows[0]["image"].size == (40, 40)


def test_parquet_without_images_is_refused(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column holds images or paths .*\. Add a column of images\.$"):
        load_splits(str(tmp_path))


def test_parquet_file_with_an_unknown_type_is_refused(tmp_path):
    column = pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"image": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: it must be a folder of class folders or parquet files"):
        load_splits(str(tmp_path / "a.parquet"))


def test_empty_separator_is_refused():
    with pytest.raises(UserError, match=r"label_separator must not be empty, got ''"):
        load_splits("digits", label_separator="")


@pytest.mark.parametrize(
    "name", ["metadata.csv", "metadata.jsonl", "metadata.parquet", "labels.csv", "labels.parquet"]
)
def test_table_gives_the_splits_of_class_folders_whatever_the_order_of_its_lines(folder, name):
    from_folders = load_splits(str(folder))
    order = np.random.permutation(20)
    names = [NAMES[place] for place in order]
    table = write_table(folder / name, names, label=[name[:3] for name in names])

    splits = load_splits(str(folder if name.startswith("metadata") else table))

    assert splits["train"].features == from_folders["train"].features
    images = {name: [image.filename for image in rows["image"]] for name, rows in splits.items()}
    assert images == {name: [image.filename for image in rows["image"]] for name, rows in from_folders.items()}
    assert {name: rows["label"][:] for name, rows in splits.items()} == {
        name: rows["label"][:] for name, rows in from_folders.items()
    }


def test_folders_outside_of_the_data_name_no_split(folder, tmp_path):
    root = tmp_path / "val"
    root.mkdir()
    folder.rename(root / "photos")
    table = write_table(tmp_path / "project" / "labels.csv", [f"../val/photos/{name}" for name in NAMES], label=LABELS)
    assert len(load_splits(str(table), follow_links=True)["train"]) == 16


def test_folders_above_an_image_name_its_split_however_deep(tmp_path):
    names = [f"images/{split}/{kind}/{number}.png" for split in ("Train", "val", "test") for kind in "ab"
             for number in range(2)]  # fmt: skip
    for shade, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), 10 * shade).save(tmp_path / name)
    table = write_table(tmp_path / "labels.csv", names, label=["a", "a", "b", "b"] * 3)

    splits = load_splits(str(table), near_duplicates="ignore")

    for split, rows in splits.items():
        above = {Path(image.filename).parts[-3].lower() for image in rows["image"]}
        assert above == {"val" if split == "validation" else split}


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_blanks_around_a_label_say_nothing(folder, suffix):
    labels = [f" {name[:3]}" if number % 2 else name[:3] for number, name in enumerate(NAMES)]
    table = write_table(folder / f"labels.{suffix}", label=labels)
    assert load_splits(str(table))["train"].features["label"].names == ["cat", "dog"]
    write_table(table, label=[*labels[:-1], " "])
    with pytest.raises(UserError, match=r"1 rows of train have no label, .*; the first is .*dog/09.png"):
        load_splits(str(table))


def test_class_names_of_metadata_must_be_alike_in_all_splits(tmp_path):
    for split, classes in (("train", ["cat", "dog"]), ("val", ["dog", "cat"])):
        for number in range(4):
            (tmp_path / split).mkdir(exist_ok=True)
            Image.new("L", (4, 4), 50 * number).save(tmp_path / split / f"{number}.png")
        rows = Dataset.from_dict(
            {"file_name": [f"{number}.png" for number in range(4)], "label": [0, 1, 0, 1]},
            features=Features({"file_name": Value("string"), "label": ClassLabel(names=classes)}),
        )
        rows.to_parquet(tmp_path / split / "metadata.parquet")

    with pytest.raises(
        UserError, match=r"'label', the classes of validation are \['dog', 'cat'\], but those of train"
    ):
        load_splits(str(tmp_path))


def test_images_that_no_metadata_lists_are_counted(folder, caplog):
    write_table(folder / "metadata.csv", NAMES[:14], label=LABELS[:14])
    load_splits(str(folder), near_duplicates="ignore")
    assert f"6 images are in no class folder, split or table and are not used; the first is {folder}" in caplog.text


@pytest.mark.parametrize("place", ["in the folder", "in its split folders"])
def test_rows_belong_to_the_split_whose_folder_holds_their_image(tmp_path, place):
    for split, count in (("train", 8), ("val", 2), ("test", 4)):
        (tmp_path / split).mkdir()
        for number in range(count):
            Image.new("L", (4, 4), number).save(tmp_path / split / f"{number}.png")
    counts = {"train": 8, "val": 2, "test": 4}
    if place == "in the folder":
        names = [f"{split}/{number}.png" for split, count in counts.items() for number in range(count)]
        write_table(tmp_path / "metadata.csv", names, label=["a", "b"] * 7)
    else:
        for split, count in counts.items():
            names = [f"{number}.png" for number in range(count)]
            write_table(tmp_path / split / "metadata.csv", names, label=["a", "b"] * (count // 2))

    splits = load_splits(str(tmp_path))

    assert {name: len(rows) for name, rows in splits.items()} == {"train": 8, "validation": 2, "test": 4}


def test_column_of_paths_is_found_by_its_values(folder):
    write_table(folder / "labels.csv", label=[name[:3] for name in NAMES])
    text = (folder / "labels.csv").read_text().replace("file_name", "picture")
    (folder / "labels.csv").write_text(text)

    assert len(load_splits(str(folder / "labels.csv"))["train"]) == 16


def test_codes_that_look_like_powers_of_ten_are_classes(folder):
    table = write_table(folder / "labels.csv", label=["1E1" if name[:3] == "cat" else "2E1" for name in NAMES])

    assert load_splits(str(table))["train"].features["label"].names == ["1E1", "2E1"]


def test_comma_at_the_end_of_each_row_moves_no_column(folder):
    lines = [f"{name},{name[:3]}," for name in NAMES]
    (folder / "labels.csv").write_text("\n".join(["file_name,label", *lines]))

    assert load_splits(str(folder / "labels.csv"))["train"].features["label"].names == ["cat", "dog"]


def test_column_called_image_can_be_the_group(folder):
    table = write_table(folder / "labels.csv", label=[name[:3] for name in NAMES], image=[n // 2 for n in range(20)])

    assert len(load_splits(str(table), group_by="image", near_duplicates="ignore")["train"]) == 12  # whole pairs


def test_whole_numbers_for_a_model_of_numbers_need_a_decimal_point(folder):
    rows = load_splits(str(write_table(folder / "ages.csv", age=[n % 2 for n in range(20)])), label_column=["age"])

    with pytest.raises(
        UserError, match=r"was trained for regression, .* Write them with a decimal point, such as 3\.0\."
    ):
        with_names("ages", rows["train"], ["age"], "regression")


def test_class_called_none_stays_a_class(folder):
    table = write_table(folder / "labels.csv", label=["None" if name[:3] == "cat" else "NA" for name in NAMES])

    assert load_splits(str(table))["train"].features["label"].names == ["NA", "None"]


def test_names_that_begin_with_zeros_stay_names(folder):
    table = write_table(folder / "labels.csv", label=["007" if name[:3] == "cat" else "12" for name in NAMES])

    assert load_splits(str(table))["train"].features["label"].names == ["007", "12"]


@pytest.mark.parametrize("cells", ["0{}.5", "{}.5"])
def test_zeros_before_a_decimal_number_change_nothing(folder, cells):
    table = write_table(folder / "labels.csv", label=[cells.format(number) for number in range(20)])

    rows = load_splits(str(table))["train"]

    assert problem_type(rows.features["label"]) == "regression"


@pytest.mark.parametrize("header", ["split", "Split", " split"])
def test_column_of_splits_may_be_written_in_other_ways(folder, header):
    splits = ["train"] * 8 + ["val", "test"]
    table = write_table(folder / "labels.csv", label=LABELS, **{header: splits * 2})

    assert [len(rows) for rows in load_splits(str(table), near_duplicates="ignore").values()] == [16, 2, 2]


def test_name_that_is_written_in_two_ways_is_one_class(folder):
    table = write_table(folder / "labels.csv", label=["caf\u00e9", "cafe\u0301", "bar", "bar"] * 5)

    assert label_names(load_splits(str(table))["train"].features["label"]) == ["bar", "caf\u00e9"]


def test_labels_in_lists_have_no_blanks_around_them(folder):
    table = write_table(folder / "labels.jsonl", label=[["cat ", "night"], ["cat"]] * 10)

    assert label_names(load_splits(str(table))["train"].features["label"]) == ["cat", "night"]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_characters_may_separate_the_columns(folder, separator):
    table = write_table(folder / "labels.csv", label=[name[:3] for name in NAMES])
    table.write_text(table.read_text().replace(",", separator))

    assert load_splits(str(table))["train"].features["label"].names == ["cat", "dog"]


def test_semicolons_go_with_decimal_commas(folder):
    table = write_table(folder / "labels.csv", label=[f"{number},5" for number in range(20)])
    table.write_text(table.read_text().replace(",", ";", 1).replace("png,", "png;"))

    rows = load_splits(str(table))["train"]

    assert problem_type(rows.features["label"]) == "regression"
    assert set(targets_of(rows)[:, 0] % 1) == {0.5}


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_table_in_another_encoding_is_refused(folder, encoding):
    table = write_table(folder / "labels.csv", label=[f"{name[:3]}é" for name in NAMES])
    table.write_text(table.read_text(encoding="utf-8"), encoding=encoding)

    with pytest.raises(UserError, match=r"labels\.csv cannot be read as a table in UTF-8, .*: 'utf-8' codec can't"):
        load_splits(str(table))


@pytest.mark.parametrize("written", [" {}.5", "+{}.5", "{}.5e+00"])
def test_numbers_beside_semicolons_are_numbers_however_they_are_written(folder, written):
    table = write_table(folder / "labels.csv", label=[written.format(number) for number in range(20)])
    table.write_text(table.read_text().replace(",", ";"))

    rows = load_splits(str(table))["train"]

    assert problem_type(rows.features["label"]) == "regression"
    assert set(targets_of(rows)[:, 0] % 1) == {0.5}


def test_rows_of_nothing_but_separators_are_left_out(folder):
    table = write_table(folder / "labels.csv", label=[name[:3] for name in NAMES])
    table.write_text(table.read_text() + ",\n,\n")

    assert sum(map(len, load_splits(str(table)).values())) == 20


def test_column_of_splits_with_another_name_is_refused(folder):
    splits = ["train", "val", "tset", "test"] * 5
    table = write_table(folder / "labels.csv", label=[name[:3] for name in NAMES], split=splits)

    with pytest.raises(UserError, match=r"the column split must hold train, validation or test, got 'tset'\."):
        load_splits(str(table))


def test_column_of_splits_decides(folder):
    splits = ["Train", "val", "test", "training"] * 5
    table = write_table(folder / "labels.csv", label=[name[:3] for name in NAMES], split=splits)

    loaded = load_splits(str(table), near_duplicates="ignore")

    shades = {name: sorted(image.getpixel((0, 0)) // 10 for image in rows["image"]) for name, rows in loaded.items()}
    places = {"train": (0, 3), "validation": (1,), "test": (2,)}
    assert shades == {name: [n for n in range(20) if n % 4 in own] for name, own in places.items()}


def test_missing_files_are_skipped_where_asked(folder):
    table = write_table(folder / "labels.csv", label=[name[:3] for name in NAMES])
    (folder / NAMES[3]).unlink()

    assert sum(map(len, load_splits(str(table), corrupt_images="skip").values())) == 19


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_images_without_labels_are_taken_from_the_folder_although_it_has_a_table(suffix, folder):
    write_table(folder / f"metadata.{suffix}", NAMES[:4], label=["a", "b", "a", "b"])

    assert sum(map(len, load_splits(str(folder), labelled=False).values())) == 20


# Kinds of labels


def label_rows(folder, **columns):
    """Return the rows of a table that are left to train on, with the columns as its labels."""
    table = write_table(folder / "labels.jsonl", **columns)
    return load_splits(str(table), label_column=list(columns))["train"]


def test_lists_are_several_labels_per_image(folder):
    rows = label_rows(folder, tags=[["b"], ["a", "b"], [], ["c"]] * 5)

    feature = rows.features["label"]
    assert problem_type(feature) == "multi_label_classification"
    assert label_names(feature) == ["a", "b", "c"]
    assert describe(feature) == "any of 3 labels for each image"
    numbers = [image.getpixel((0, 0)) // 10 for image in rows["image"]]
    expected = np.array([[0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]])[np.array(numbers) % 4]
    np.testing.assert_array_equal(targets_of(rows), expected)


@pytest.mark.parametrize("kind", [int, bool])
def test_columns_of_zeros_and_ones_are_several_labels_per_image(folder, kind):
    rows = label_rows(folder, small=[kind(1), kind(0)] * 10, grey=[kind(0)] * 10 + [kind(1)] * 10)

    assert problem_type(rows.features["label"]) == "multi_label_classification"
    assert label_names(rows.features["label"]) == ["small", "grey"]
    numbers = np.array([image.getpixel((0, 0)) // 10 for image in rows["image"]])
    np.testing.assert_array_equal(targets_of(rows), np.stack((numbers % 2 == 0, numbers >= 10), axis=1))


def test_lists_of_named_classes_in_parquet_are_several_labels_per_image(tmp_path):
    features = Features({"image": ImageFeature(), "labels": List(ClassLabel(names=["a", "b", "c"]))})
    columns = {"image": SMALL[:10], "labels": [[0, 2], [1]] * 5}
    Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "train.parquet")

    rows = load_splits(str(tmp_path), near_duplicates="ignore")["train"]

    assert label_names(rows.features["label"]) == ["a", "b", "c"]
    assert {tuple(row) for row in targets_of(rows).tolist()} == {(1, 0, 1), (0, 1, 0)}


def test_row_without_a_list_of_labels_is_refused():
    features = Features({"image": ImageFeature(), "label": List(ClassLabel(names=["a", "b", "c"]))})
    rows = Dataset.from_dict({"image": SMALL[:2], "label": [[0, 2], None]}, features=features)

    with pytest.raises(UserError, match=r"^row 1 has no list of labels\. Without any, it needs an empty one\."):
        targets_of(rows)


def test_decimal_numbers_are_regression(folder):
    rows = label_rows(folder, angle=[number / 2 for number in range(20)])

    assert problem_type(rows.features["label"]) == "regression"
    assert describe(rows.features["label"]) == "numbers for each image (angle)"
    shades = [image.getpixel((0, 0)) for image in rows["image"]]
    np.testing.assert_array_equal(targets_of(rows), np.array(shades)[:, None] / 20)
    assert targets_of(rows).dtype == np.float32


def test_several_columns_of_numbers_are_several_outputs(folder):
    rows = label_rows(folder, angle=[number / 2 for number in range(20)], size=list(range(20)))

    assert label_names(rows.features["label"]) == ["angle", "size"]
    np.testing.assert_array_equal(targets_of(rows)[:, 1], 2 * targets_of(rows)[:, 0])


@pytest.mark.parametrize(
    "labels",
    [["x", "y"], [1, 0], [True, False]],
    ids=["strings", "integers", "booleans"],
)
def test_names_whole_numbers_and_booleans_are_classes(folder, labels):
    rows = label_rows(folder, label=labels * 10)

    assert problem_type(rows.features["label"]) == "single_label_classification"
    assert label_names(rows.features["label"]) == sorted(map(str, labels))
    assert sorted(np.bincount(targets_of(rows))) == [8, 8]


# What cannot be used


def refused(folder, match, names=NAMES, suffix=".csv", label_column=None, **columns):
    table = write_table(folder / f"labels{suffix}", names, **columns)
    with pytest.raises(UserError, match=match) as error:
        load_splits(str(table), label_column=label_column)
    assert "\n" not in str(error.value)


LABELS = ["cat", "dog"] * 10


def test_file_that_is_missing_is_named(folder):
    (folder / NAMES[3]).unlink()
    refused(folder, r"cat/03\.png cannot be decoded as an image \(\[Errno 2\] No such file", label=LABELS)


@pytest.mark.filterwarnings("ignore::pandas.errors.ParserWarning")  # as outside of tests
def test_cells_without_a_column_are_refused(folder):
    refused(
        folder,
        r"labels\.csv cannot be read as a table .* as many cells in a row as in the header, .*: Length of header",
        label=[f"{name},night" for name in LABELS],
    )
    one = ["cat,night" if row == 7 else name for row, name in enumerate(LABELS)]
    refused(
        folder, r"labels\.csv cannot be read as a table .*: C error: Expected 2 fields in line 9, saw 3", label=one
    )


def test_table_of_paths_alone_may_have_any_order(folder):
    table = write_table(folder / "paths.csv", NAMES[::-1], nothing=[""] * 20)
    table.write_text("\n".join(["file_name", *NAMES[::-1]]))

    splits = load_splits(str(table), labelled=False)

    assert sum(map(len, splits.values())) == 20
    with pytest.raises(UserError, match=r"no column holds labels, or has a known name"):
        load_splits(str(table))


def test_column_of_classes_beside_a_column_called_label_is_a_question(folder):
    rows = [{"image": str(folder / name), "label": name[:3], "fold": n % 2} for n, name in enumerate(NAMES)]
    features = Features({"image": ImageFeature(), "label": Value("string"), "fold": ClassLabel(names=["a", "b"])})
    Dataset.from_list(rows, features=features).to_parquet(folder.parent / "rows.parquet")

    with pytest.raises(UserError, match=r"fold and label may hold the labels\. Choose one of"):
        load_splits(str(folder.parent / "rows.parquet"))
    splits = load_splits(str(folder.parent / "rows.parquet"), label_column=["label"])
    assert label_names(splits["train"].features["label"]) == ["cat", "dog"]


def test_column_of_labels_that_is_empty_is_refused(folder):
    table = write_table(folder / "labels.csv", kind=[""] * 20, name=LABELS)
    for choices in ({}, {"label_separator": ";"}):
        with pytest.raises(UserError, match=r"no row of train has a label\. Fill the column, or choose another"):
            load_splits(str(table), label_column=["kind"], **choices)


def test_row_without_a_label_is_named(folder):
    labels = ["", *LABELS[1:]]
    refused(folder, r"1 rows of train have no label, .*; the first is .*cat/00\.png with None", label=labels)


def test_split_without_tags_is_not_labelled(folder, caplog):
    split = ["test" if n % 5 == 4 else "train" for n in range(20)]
    tags = ["" if split[n] == "test" else "cat;night" if n % 2 else "dog" for n in range(20)]
    table = write_table(folder / "tags.csv", tags=tags, split=split)

    load_splits(str(table), label_column=["tags"], label_separator=";")

    assert "the split 'test' has no labels and is not used." in caplog.text


@pytest.mark.parametrize("typo", ["trian", "lables.csv"])
def test_table_beside_a_path_that_is_not_there_is_not_taken_for_it(folder, typo):
    write_table(folder / "metadata.csv", label=LABELS)
    with pytest.raises(UserError, match=rf"{typo}: there is no such file or folder"):
        load_splits(str(folder / typo))


def test_row_without_a_path_is_named(folder):
    message = r"1 rows have no path in the column 'file_name', the first is row 3\. Fill or delete them\."
    refused(folder, message, [*NAMES[:2], "", *NAMES[3:]], label=LABELS)


def test_image_with_two_rows_is_refused(folder):
    names = [*NAMES[:-1], "./cat/00.png"]
    refused(folder, r"cat/00\.png has two rows, but an image must have one\. Give several labels", names, label=LABELS)


@pytest.mark.parametrize("how", ["dots", "absolute", "link"])
def test_path_that_leads_out_of_the_folder_is_refused_unless_asked(folder, how):
    secret = folder.parent / "secret.png"
    Image.new("L", (4, 4)).save(secret)
    (folder / "link.png").symlink_to(secret)
    name = {"dots": "cat/../../secret.png", "absolute": str(secret), "link": "link.png"}[how]
    names = [*NAMES[:-1], name]

    refused(folder, r"(lies|secret\.png,) outside of .*photos\. .*--follow_links true", names, label=LABELS)
    splits = load_splits(str(folder / "labels.csv"), follow_links=True)
    assert sum(map(len, splits.values())) == 20


@pytest.mark.parametrize(
    ("label_column", "message"),
    [
        (["breed"], r"there is no label column 'breed', only \['kind'\]\. Choose with --label_column"),
        (["kind", "breed"], r"there is no label column 'breed'"),
        (
            None,
            r"no column holds labels, or has a known name\. Choose one of \['kind'\] with --label_column\.",
        ),
    ],
)
def test_unknown_column_is_named(folder, label_column, message):
    refused(folder, message, label_column=label_column, kind=LABELS)


def test_table_without_paths_is_refused(folder):
    (folder / "labels.csv").write_text("image,label\na,cat\nb,dog\n")

    message = r"no column holds images or paths .*Choose one of \['image', 'label'\] with --image_column\."
    with pytest.raises(UserError, match=message):
        load_splits(str(folder / "labels.csv"))


def test_table_without_rows_is_refused(folder):
    (folder / "labels.csv").write_text("file_name,label\n")

    with pytest.raises(UserError, match=r"labels\.csv has no rows\."):
        load_splits(str(folder / "labels.csv"))


@pytest.mark.parametrize("cells", [["2,5", "3,5"], ["2,5", "3"], ["0.5", "n/a"]])
def test_decimal_numbers_in_a_column_of_texts_are_refused(folder, cells):
    message = r"labels such as '\d[.,]5' are decimal numbers in a column of texts\. Write all with a point"
    refused(folder, message, label=[f'"{cell}"' for cell in cells * 10])


@pytest.mark.parametrize("labels", [[1, "cat"] * 10, [["cat"], "cat"] * 10], ids=["numbers", "lists"])
def test_labels_of_several_types_are_refused(folder, labels):
    refused(
        folder, r"a label must be a name, .*'label' holds Json.*Correct mixed types", suffix=".jsonl", label=labels
    )


def test_characters_and_digits_are_classes(folder):
    table = write_table(folder / "labels.csv", label=["7", "B"] * 10)

    assert load_splits(str(table))["train"].features["label"].names == ["7", "B"]


def test_columns_that_are_neither_zeros_and_ones_nor_decimal_are_refused(folder):
    message = (
        r"Several columns must all hold 0 and 1, or decimal numbers such as 3\.0\. But .*'b' holds Value\('string'\)"
    )
    columns = {"a": [0, 1] * 10, "b": ["x", "y"] * 10}
    refused(folder, message, suffix=".jsonl", label_column=["a", "b"], **columns)
    refused(folder, r"'b' holds Value\('int64'\)", label_column=["a", "b"], a=[0, 1] * 10, b=[1, 2] * 10)


def test_label_that_no_training_image_has_is_refused(folder):
    columns = {"a": [0, 1] * 10, "b": [0] * 20}
    refused(
        folder,
        r"no image of train has the label 'b'\. Add such images, or leave it out",
        label_column=["a", "b"],
        **columns,
    )


def test_class_that_no_training_image_has_is_refused(tmp_path):
    for split, labels in (("train", ["a", "b"]), ("test", ["a", "c"])):
        for number in range(2):
            (tmp_path / split).mkdir(exist_ok=True)
            Image.new("L", (4, 4)).save(tmp_path / split / f"{number}.png")
        write_table(tmp_path / split / "metadata.csv", ["0.png", "1.png"], label=labels)

    with pytest.raises(UserError, match=r"no image of train has the label 'c'\. Add such images"):
        load_splits(str(tmp_path))


def write_splits(root, **labels):
    """Write a split of as many grey images as it has labels into a folder of its own, with a table."""
    for split, column in labels.items():
        names = [f"{number}.png" for number in range(len(column))]
        write_table(root / split / "metadata.csv", names, label=column)
        for shade, name in enumerate(names):
            Image.new("L", (4, 4), 10 * shade).save(root / split / name)
    return str(root)


def test_names_of_one_split_may_look_like_true_and_false(tmp_path):
    root = write_splits(tmp_path, train=["True", "False", "unsure"] * 4, val=["True", "False"], test=["False", "True"])

    splits = load_splits(root, near_duplicates="ignore")

    assert label_names(splits["train"].features["label"]) == ["False", "True", "unsure"]
    assert splits["validation"]["label"][:] == [1, 0]


def test_text_among_the_numbers_of_another_split_is_named(tmp_path):
    root = write_splits(tmp_path, train=["0.5", "1.5"] * 6, val=["1.5", "0.5"], test=["0.5", "NA"])

    with pytest.raises(UserError, match=r"no image of train has the label 'NA'\."):
        load_splits(root, near_duplicates="ignore")


@pytest.mark.parametrize("labels", [[0.5, None] * 10, [["a"], None] * 10], ids=["numbers", "lists"])
def test_rows_without_a_label_are_refused(folder, labels):
    refused(
        folder,
        r"10 rows of train have no label, .*; the first is .*\.png with ",
        suffix=".jsonl",
        label=labels,
    )


def test_number_that_is_not_finite_is_named(folder):
    refused(folder, r"1 rows of train have no label, .*; the first is .*\.png with ", label=[
        "inf" if number == 4 else f"{number}.5" for number in range(20)
    ])  # fmt: skip


def test_list_that_names_a_label_twice_is_refused(folder):
    message = r"a list of labels must name each once\. For zeros and ones, use a column"
    refused(folder, message, suffix=".jsonl", label=[["a", "b"], ["a", "a"]] * 10)


def test_image_of_two_tables_is_refused(folder):
    write_table(folder / "metadata.csv", label=LABELS)
    write_table(folder / "metadata.jsonl", label=LABELS)

    with pytest.raises(UserError, match=r"metadata\.jsonl lists images of train, and so does another metadata file"):
        load_splits(str(folder))


def test_table_that_cannot_be_read_is_named(folder):
    (folder / "labels.jsonl").write_text("no table\n")

    with pytest.raises(
        UserError, match=r"labels\.jsonl cannot be read as a table in UTF-8, with one type in each column"
    ):
        load_splits(str(folder / "labels.jsonl"))


def test_table_of_a_folder_is_named(folder):
    (folder / "metadata.csv").write_text("id,age\n1,2\n")

    with pytest.raises(UserError, match=r"metadata\.csv: .* Choose one of .* with --image_column"):
        load_splits(str(folder))


def test_tables_are_not_streamed(folder):
    table = write_table(folder / "labels.csv", label=LABELS)

    with pytest.raises(UserError, match=r"--streaming is for parquet files and the Hub, --data_config for the Hub"):
        load_splits(str(table), streaming=True)


def test_absolute_paths_keep_their_split_where_the_data_are_given_by_a_relative_path(tmp_path, monkeypatch):
    names = [f"{split}/{number}.png" for split in ("train", "val", "test") for number in range(4)]
    for shade, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4), 20 * shade).save(tmp_path / name)
    write_table(tmp_path / "labels.csv", [tmp_path / name for name in names], label=["a", "b"] * 6)
    monkeypatch.chdir(tmp_path)

    splits = load_splits("labels.csv", near_duplicates="ignore")

    places = {split: {image.filename.split("/")[-2] for image in rows["image"]} for split, rows in splits.items()}
    assert places == {"train": {"train"}, "validation": {"val"}, "test": {"test"}}


@pytest.mark.parametrize(("label", "kind"), [("3", "single_label_classification"), ("3.0", "regression")])
def test_blank_labels_of_a_test_split_leave_whole_numbers_whole(tmp_path, label, kind):
    names = [f"{split}/{number}.png" for split in ("train", "test") for number in range(12)]
    for shade, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4), 10 * shade).save(tmp_path / name)
    write_table(tmp_path / "metadata.csv", names, label=[label, label.replace("3", "4")] * 6 + [""] * 12)

    splits = load_splits(str(tmp_path), near_duplicates="ignore")

    assert problem_type(splits["train"].features["label"]) == kind


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_path_of_a_table_may_hold_characters_of_patterns(folder, suffix):
    folder = folder.rename(folder.with_name("photos [2024]"))
    table = write_table(folder / f"labels{suffix}", label=LABELS)

    assert sum(map(len, load_splits(str(table), near_duplicates="ignore").values())) == 20


@pytest.fixture
def unlabelled_test(tmp_path):
    """Twelve images of two places to train with, and eight without a label."""
    train = {"label": ["a", "b"] * 6, "place": [number // 2 for number in range(12)]}
    for split, columns in (("train", train), ("test", {"name": ["x"] * 8})):
        names = [f"{number}.png" for number, _ in enumerate(next(iter(columns.values())))]
        write_table(tmp_path / split / "metadata.csv", names, **columns)
        for shade, name in enumerate(names):
            Image.new("L", (4, 4), 10 * shade).save(tmp_path / split / name)
    return str(tmp_path)


def test_split_without_a_column_of_labels_is_not_used(unlabelled_test, caplog):
    splits = load_splits(unlabelled_test, label_column="label", near_duplicates="ignore")

    assert sum(map(len, splits.values())) == 12
    assert "the split 'test' has no labels and is not used" in caplog.text


def test_column_that_a_split_lacks_is_named(unlabelled_test):
    labels = Path(unlabelled_test) / "test" / "metadata.csv"
    labels.write_text("\n".join(["file_name,label", *(f"{number}.png,a" for number in range(8))]))

    with pytest.raises(UserError, match=r"test has no column 'place', which train has\. Add it\."):
        load_splits(unlabelled_test, label_column="label", group_by="place")


@pytest.mark.parametrize("inside", ["listed", "compared"])
def test_images_that_are_no_files_tell_nothing_of_what_was_learnt(folder, tmp_path, inside):
    files = load_splits(str(folder))
    bytes_alone = files.cast_column("image", ImageFeature(decode=False)).map(
        lambda row: {"image": {"path": None, "bytes": Path(row["image"]["path"]).read_bytes()}},
    )
    listed, compared = (bytes_alone, files) if inside == "listed" else (files, bytes_alone)

    list_splits(listed, tmp_path / SPLITS)

    assert count_learnt(tmp_path, compared["test"]) is None


def test_copies_of_images_that_were_learnt_are_counted(folder, tmp_path):
    splits = load_splits(str(folder))
    list_splits(splits, tmp_path / SPLITS)
    copies = shutil.copytree(folder, tmp_path / "copies")
    edited = copies / Path(splits["train"][0]["image"].filename).relative_to(folder)
    edited.write_bytes(edited.read_bytes() + b"no copy any more")

    copied = load_splits(str(copies))

    assert count_learnt(tmp_path, copied["train"]) == len(splits["train"]) - 1
    assert count_learnt(tmp_path, copied["test"]) == 0
