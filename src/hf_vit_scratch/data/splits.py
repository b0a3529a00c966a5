"""Images and labels from anywhere, as three named splits; knows nothing of models.

Sources: the digits that ship inside scikit-learn, a folder of class folders, local parquet files, or a dataset on the
Hub. Whatever the source, the splits have the columns `image` (encoded, see `decode_image`) and `label` (`ClassLabel`).
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, load_dataset
from datasets.config import HF_CACHE_HOME, HF_DATASETS_CACHE
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image
from pyarrow import compute, types

from ..errors import UserError
from .images import check_header, decode_image, find_image_files, warn_of_others

logger = logging.getLogger(__name__)

CORRUPT_POLICIES = ("raise", "skip")
# Folder names by which image collections mark their splits.
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}


def load_splits(
    data: str,
    *,
    data_config: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_split: str = "train",
    validation_split: str | None = None,
    test_split: str | None = None,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
    corrupt_images: str = "raise",
    follow_links: bool = False,
    seed: int = 0,
    labelled: bool = True,
) -> DatasetDict:
    """Load a dataset as the splits `train`, `validation` and `test`, with the columns `image` and `label`.

    A split that the source does not have is cut from train, with the same share of every class and always the same
    rows for one seed.

    Args:
        data: `"digits"`, a folder, a parquet file, or the name of a dataset on the Hub, in this order of trying.
        data_config: Configuration of a dataset on the Hub that has several.
        image_column: Column of the images; `None` finds it by its type.
        label_column: Column of the labels; `None` finds it by its type, or by the name `label` or `labels`.
        train_split: The source's split to train on.
        validation_split: The source's split to choose by; `None` for the one of that name, else cut from train.
        test_split: The source's split to report on; `None` for the one of that name, else cut from train.
        validation_fraction: Share of train to cut for validation where the source has none.
        test_fraction: Share of train to cut for testing where the source has none.
        corrupt_images: Policy for images that cannot be decoded: `"raise"` names the first one when it is met;
            `"skip"` decodes every image once at the start, leaves those out, and names them all.
        follow_links: Whether links in a folder, or paths in parquet files, may lead out of it; those of a stranger
            could take in your own images.
        seed: Chooses the rows that are cut.
        labelled: Without, labels are not read, a folder may hold images anywhere, and all have the label 0.

    Raises:
        UserError: The data cannot be used; the message says why and what to do.
    """
    for name, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise UserError(f"{name} must lie between 0 and 1, got {fraction}.")
    if corrupt_images not in CORRUPT_POLICIES:
        raise UserError(f"corrupt_images must be one of {', '.join(CORRUPT_POLICIES)}; got {corrupt_images!r}.")
    source = load_source(
        data, data_config, check_files=corrupt_images == "raise", labelled=labelled, follow_links=follow_links
    )
    wanted = {"train": train_split, "validation": validation_split, "test": test_split}
    check_split_names(data, source, wanted)
    if labelled:
        source = _rename_columns(data, source, image_column, label_column, train_split)
    else:
        source = _without_labels(data, source, image_column, train_split)

    if corrupt_images == "skip":
        source = DatasetDict({split: without_corrupt(data, split, rows) for split, rows in source.items()})

    chosen = [split for split in wanted.values() if split is not None]
    train = source[train_split]
    refuse_unknown_labels(data, train_split, train)
    counts = np.bincount(train["label"][:], minlength=train.features["label"].num_classes)
    splits = {}
    for name, fraction in (("validation", validation_fraction), ("test", test_fraction)):
        split = wanted[name]
        if split is None:  # the source's own, unless the user has given it another part
            split = next((alias for alias in SPLIT_FOLDERS[name] if alias in source and alias not in chosen), None)
        if split is not None and has_unlabelled(source[split]):
            logger.warning("%s: the split %r has rows without a label and is not used.", data, split)
            split = None
        if split is not None:
            refuse_unknown_labels(data, split, source[split])
            splits[name] = source[split]
        else:
            train, splits[name] = _cut(data, train, np.maximum(1, np.rint(fraction * counts).astype(int)), seed)
            logger.info(
                "%s: %d of the training images (%g%%) cut for %s", data, len(splits[name]), 100 * fraction, name
            )
    return DatasetDict(train=train, **splits)


def fingerprint(splits: DatasetDict) -> str:
    """What tells these splits from others: their sizes, and a hash of the order of labels and of the files' names."""
    digest = hashlib.sha256()
    for split, rows in splits.items():
        paths = compute.struct_field(rows.data.column("image"), "path")  # of the whole source; no bytes are read
        if rows._indices is not None:
            paths = paths.take(rows._indices.column(0))
        names = [os.path.basename(path or "") for path in paths.to_pylist()]
        digest.update("\n".join([split, *names]).encode(errors="replace"))
        digest.update(np.asarray(rows["label"][:], dtype=np.int64).tobytes())
    return f"{', '.join(f'{len(rows)} {split}' for split, rows in splits.items())} ({digest.hexdigest()[:16]})"


def load_digits() -> DatasetDict:
    """The 1,797 handwritten digits, 8x8 pixels, that ship inside scikit-learn, as grey images; no network needed.

    A fifth is the test split, the same for every seed, so that results can be compared.
    Source: E. Alpaydin, C. Kaynak 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository.
    """
    from sklearn.datasets import load_digits as load_sklearn_digits

    digits = load_sklearn_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # 17 levels of ink, 0 to 16
    label = ClassLabel(names=[str(name) for name in digits.target_names])
    rows = Dataset.from_dict(
        {"image": [Image.fromarray(image) for image in pixels], "label": digits.target.tolist()},
        features=Features({"image": datasets.Image(), "label": label}),
    )
    return rows.train_test_split(test_size=0.2, stratify_by_column="label", seed=0)


def refuse_unknown_labels(data: str, split: str, rows: Dataset) -> None:
    """Refuse a class id out of range, which would end in a fault on the device, much later and without a name.

    Raises:
        UserError: Names the first.
    """
    names = rows.features["label"].names
    labels = np.asarray([-1 if label is None else label for label in rows["label"][:]])
    unknown = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(unknown):
        raise UserError(
            f"{data}: {len(unknown)} rows of {split} have a label outside 0 to {len(names) - 1}; the first is row "
            f"{unknown[0]} with {labels[unknown[0]]}. Correct or delete them."
        )


def without_corrupt(data: str, split: str, rows: Dataset) -> Dataset:
    """The images of a split that can be decoded; the others are named in the log."""
    encoded = rows.cast_column("image", datasets.Image(decode=False))
    good, bad = [], []
    for number, row in enumerate(encoded):
        try:
            decode_image(row["image"], name=f"image {number}")
            good.append(number)
        except UserError as error:
            bad.append(str(error).removesuffix(" Delete or replace it."))
    if not good:
        raise UserError(f"{data}: no image of {split} can be decoded; the first: {bad[0]}")
    if bad:
        logger.warning("%s: %d of the %d images of %s are skipped:", data, len(bad), len(rows), split)
        for reason in bad:
            logger.warning("  %s", reason)
    return rows.select(good)


def load_source(
    data: str,
    data_config: str | None,
    check_files: bool = True,
    streaming: bool = False,
    labelled: bool = True,
    follow_links: bool = False,
) -> Any:
    """All splits of a source as it is, a `DatasetDict`, or to be streamed an `IterableDatasetDict`.

    Raises:
        UserError: The data cannot be loaded.
    """
    path = Path(data).expanduser()
    local = data == "digits" or (path.is_dir() and not any(path.rglob("*.parquet")))
    if local and streaming:
        raise UserError(f"{data}: only datasets on the Hub and parquet files can be streamed. Leave --streaming out.")
    if data == "digits":
        return load_digits()
    if local:
        load = _load_class_folders if labelled else _load_images
        source = load(path, check_files, "follow" if follow_links else "refuse")
        if not follow_links:
            _refuse_files_outside(path, source)
        return source
    if not path.exists() and (data.startswith((".", "/", "~")) or data.count("/") > 1):
        raise UserError(
            f"{data}: there is no such file or folder. Give --data a folder of class folders, for example."
        )
    try:
        if path.is_file():
            source = load_dataset("parquet", data_files=str(path), streaming=streaming)
        else:
            source = load_dataset(str(path) if path.is_dir() else data, data_config, streaming=streaming)
    except Exception as error:  # datasets raises many types, down to a bare Exception, for what it cannot load
        if path.exists():
            hint = "The folder or file must hold parquet files that datasets.load_dataset can read."
        else:
            hint = "It is no local folder; is it the name of a dataset on the Hub, and is the Hub within reach?"
        reason = " ".join(str(error).split())
        raise UserError(f"{data}: the data cannot be loaded ({type(error).__name__}: {reason}). {hint}") from error
    if not streaming and not path.exists():
        _refuse_own_files(data, source)
    elif not streaming and not follow_links:
        _refuse_files_outside(path if path.is_dir() else path.parent, source)
    return source


def _load_class_folders(root: Path, check_files: bool, folder_links: str) -> DatasetDict:
    """A folder with one folder of images per class, or with such folders inside `train`, `val`, `test`."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    splits = {}
    for name, aliases in SPLIT_FOLDERS.items():
        found = [folders[alias] for alias in aliases if alias in folders]
        if found:
            splits[name] = found[0]
    if "train" not in splits or not any(path.is_dir() for path in splits["train"].iterdir()):
        if splits and len(splits) == len(folders):
            raise UserError(f"{root}: there is no folder train beside {', '.join(sorted(folders))}. Add or rename it.")
        splits = {"train": root}

    # The class names of train hold for all the splits.
    names = sorted(path.name for path in splits["train"].iterdir() if path.is_dir() and not path.name.startswith("."))
    label = ClassLabel(names=names)
    source = {}
    for split, folder in splits.items():
        of_class = {name: find_image_files(folder / name, folder_links) for name in names}
        files = [(file, name) for name, (images, _) in of_class.items() for file in images]
        warn_of_others(folder, sum((others for _, others in of_class.values()), Counter()))
        if files and all(file.parent.name not in names for file, _ in files):
            raise UserError(
                f"{folder}: the folders {names} hold folders, not images. If they are splits, name them train, val "
                "and test; if they are classes, put their images right into them."
            )
        if not files:
            raise UserError(
                f"{folder}: there are no images. The folder must hold one folder per class with images in it, such as "
                f"{folder}/cat/1.jpg and {folder}/dog/2.png."
            )
        filled = {name for _, name in files}
        if split == "train" and len(names) < 2:
            raise UserError(
                f"{folder}: there is one class, {names[0]!r}; a classifier needs at least two class folders."
            )
        if split == "train" and len(filled) < len(names):
            empty = ", ".join(repr(name) for name in names if name not in filled)
            raise UserError(f"{folder}: no images in the class folders {empty}. Delete these folders, or fill them.")
        inside = (path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if unknown := sorted(set(inside) - set(names)):
            raise UserError(f"{folder}: the classes {unknown} are not in {splits['train']}. Delete or add them there.")
        for file, _ in files if check_files else ():  # the headers only, to find what is no image before training
            check_header(file)
        source[split] = Dataset.from_dict(
            {"image": [str(file) for file, _ in files], "label": [names.index(name) for _, name in files]},
            features=Features({"image": datasets.Image(), "label": label}),
        )
    return DatasetDict(source)


def _load_images(root: Path, check_files: bool, folder_links: str) -> DatasetDict:
    """All images in a folder, however deep, or in such folders named `train`, `val`, `test`."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    splits = {name: folders[alias] for name, aliases in SPLIT_FOLDERS.items() for alias in aliases if alias in folders}
    if "train" in splits:
        beside = [folder for folder in folders.values() if folder not in splits.values() and folder.name[0] != "."]
        if unused := [folder.name for folder in beside if find_image_files(folder)[0]]:
            raise UserError(
                f"{root}: {splits['train'].name} is the training split, and the images in {', '.join(unused)} beside"
                " it would not be used. Move them into it, or elsewhere; or rename it, and all images are used."
            )
    source = {}
    for split, folder in (splits if "train" in splits else {"train": root}).items():
        files, others = find_image_files(folder, folder_links)
        warn_of_others(folder, others)
        if not files:
            raise UserError(f"{folder}: there are no images.")
        for file in files if check_files else ():
            check_header(file)
        source[split] = Dataset.from_dict(
            {"image": [str(file) for file in files]}, features=Features({"image": datasets.Image()})
        )
    return DatasetDict(source)


def _without_labels(data: str, source: DatasetDict, image_column: str | None, train_split: str) -> DatasetDict:
    image = find_image_column(data, source[train_split].features, image_column)
    label = ClassLabel(names=["image"])
    return DatasetDict(
        {
            split: rows.select_columns([image])
            .rename_columns({image: "image"} if image != "image" else {})
            .add_column("label", [0] * len(rows))
            .cast_column("label", label)
            for split, rows in source.items()
        }
    )


def _refuse_files_outside(root: Path, source: DatasetDict) -> None:
    """Refuse links, and paths in parquet files, that lead out of a folder, which somebody else may have made."""
    files = [Path(path) for rows in source.values() for path in image_paths(rows)]
    inside, folders = root.resolve(), {file.parent for file in files}
    # Few files are links, and to ask each where it is takes a minute for a million.
    for path in [*sorted(folders), *(file for file in files if file.is_symlink())]:
        if not (found := path.resolve()).is_relative_to(inside):
            raise UserError(f"{path} leads to {found}, outside of {root}. If that is meant, give --follow_links true.")


def _refuse_own_files(data: str, source: DatasetDict) -> None:
    """Refuse rows of a dataset on the Hub that name files of this machine as their images."""
    roots = tuple(os.path.normpath(root) + os.sep for root in (HF_CACHE_HOME, HF_DATASETS_CACHE, HF_HUB_CACHE))
    for split, rows in source.items():
        for path in image_paths(rows):
            if not os.path.normpath(path).startswith(roots):
                raise UserError(
                    f"{data}: an image of {split} is the file {path} of this machine, which is none of the dataset's. "
                    "Do not use this dataset."
                )


def image_paths(rows: Dataset) -> Iterator[str]:
    """The paths of the images that are not in the rows themselves, which are not read."""
    for column in (name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)):
        for chunk in rows.data.column(column).chunks:
            yield from chunk.field("path").filter(chunk.field("bytes").is_null()).drop_null().to_pylist()


def check_split_names(data: str, source: Any, wanted: dict[str, str | None]) -> None:
    """Refuse splits that the source does not have, or that are to serve two purposes.

    Raises:
        UserError: Names them.
    """
    for name, split in wanted.items():
        if split is not None and split not in source:
            raise UserError(f"{data}: there is no split {split!r}, only {sorted(source)}. Choose with --{name}_split.")
    chosen = [split for split in wanted.values() if split is not None]
    if len(set(chosen)) < len(chosen):
        raise UserError(f"{data}: train, validation and test must be different splits, got {wanted}.")


def find_image_column(data: str, features: Features, image_column: str | None) -> str:
    """The column of the images, where not named the only one of its type.

    Raises:
        UserError: There is none, or there are several.
    """
    if image_column is None:
        images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(images) != 1:
            raise UserError(
                f"{data}: there must be one column of images, found {images} among {sorted(features)}. Name it with "
                "--image_column."
            )
        image_column = images[0]
    _refuse_missing_column(data, features, image_column, "--image_column")
    if not isinstance(features[image_column], datasets.Image):
        raise UserError(f"{data}: the column {image_column!r} holds {features[image_column]}, not images.")
    return image_column


def find_columns(data: str, features: Features, image_column: str | None, label_column: str | None) -> tuple[str, str]:
    """The columns of the images and of the labels, where not named the only ones of their type.

    Raises:
        UserError: There are none, or several.
    """
    image_column = find_image_column(data, features, image_column)
    if label_column is None:
        labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
        labels = labels or [name for name in ("label", "labels") if name in features]
        if len(labels) != 1:
            raise UserError(
                f"{data}: there must be one column of labels, found {labels} among {sorted(features)}. Name it with "
                "--label_column."
            )
        label_column = labels[0]
    _refuse_missing_column(data, features, label_column, "--label_column")
    return image_column, label_column


def _refuse_missing_column(data: str, features: Features, column: str, flag: str) -> None:
    if column not in features:
        raise UserError(f"{data}: there is no column {column!r}, only {sorted(features)}. Choose with {flag}.")


def _rename_columns(
    data: str, source: DatasetDict, image_column: str | None, label_column: str | None, train_split: str
) -> DatasetDict:
    """Find the columns of the images and labels, and reduce the source to these two, named `image` and `label`."""
    image_column, label_column = find_columns(data, source[train_split].features, image_column, label_column)
    source = source.select_columns([image_column, label_column])
    source = source.rename_columns({image_column: "image", label_column: "label"})
    feature = source[train_split].features["label"]
    if not isinstance(feature, ClassLabel):
        kinds = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean)
        if not isinstance(feature, datasets.Value) or not any(is_kind(feature.pa_type) for is_kind in kinds):
            raise UserError(
                f"{data}: the column {label_column!r} must hold one class per image, but it holds {feature}."
            )
        names = sorted({value for split in source.values() for value in split["label"][:] if value is not None})
        label = ClassLabel(names=[str(name) for name in names])
        to_id = {name: index for index, name in enumerate(names)}
        source = source.map(
            lambda row: {"label": to_id.get(row["label"], -1)},
            features=Features({"image": source[train_split].features["image"], "label": label}),
        )
        feature = label
    if has_unlabelled(source[train_split]):
        raise UserError(
            f"{data}: the split {train_split!r} has rows without a label. Choose another with --train_split."
        )
    if feature.num_classes < 2:
        raise UserError(f"{data}: there is one class, {feature.names}; a classifier needs at least two.")
    return source


def has_unlabelled(rows: Dataset) -> bool:
    """Whether a label is missing."""
    return any(label is None or label < 0 for label in rows["label"][:])


def split_in_half(data: str, rows: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Two halves, with the same share of every class."""
    counts = np.bincount(rows["label"][:], minlength=rows.features["label"].num_classes)
    return _cut(data, rows, np.rint(counts / 2).astype(int), seed)


def _cut(data: str, train: Dataset, counts: np.ndarray, seed: int) -> tuple[Dataset, Dataset]:
    """Cut `counts[c]` images of each class c from train, but leave it one.

    `Dataset.train_test_split` stratifies too, but leaves small classes out of the cut, or refuses them.
    """
    generator = np.random.default_rng(seed)
    labels = np.asarray(train["label"][:])
    cut = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        if len(rows) == 1:
            raise UserError(
                f"{data}: the class {train.features['label'].names[label]!r} has too few images to cut a validation "
                "and a test split from the training images: one is left. Add images, or give splits of your own "
                "(folders train, val and test)."
            )
        cut[rows[: min(counts[label], len(rows) - 1)]] = True
    return train.select(np.flatnonzero(~cut)), train.select(np.flatnonzero(cut))
