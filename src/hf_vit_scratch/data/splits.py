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
from datasets import ClassLabel, Dataset, DatasetDict, Features, IterableDataset, load_dataset
from datasets.config import HF_CACHE_HOME, HF_DATASETS_CACHE
from datasets.fingerprint import Hasher
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image
from pyarrow import compute, types

from ..errors import UserError
from .images import check_header, decode_image, find_image_files, warn_of_others

logger = logging.getLogger(__name__)

CORRUPT_POLICIES = ("raise", "skip")
# Names by which image collections mark their splits.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
# A path could be that of any file of this machine.
NOT_IN_ROWS = "to stream, the images must be in the rows themselves, as usual in parquet files."


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
    streaming: bool = False,
) -> DatasetDict:
    """Load a dataset as the splits `train`, `validation` and `test`, with the columns `image` and `label`.

    A split that the source does not have is cut from train, with the same share of every class and always the same
    rows for one seed. From a stream nothing can be cut: a half of validation serves as test, or the other way round.

    Args:
        data: `"digits"`, a folder, a parquet file, or the name of a dataset on the Hub, in this order of trying.
        data_config: Configuration of a dataset on the Hub that has several.
        image_column: Column of the images; `None` finds it by its type.
        label_column: Column of the labels; `None` finds it by its type, or by the name `label` or `labels`.
        train_split: The source's split to train on.
        validation_split: The source's split to choose by; `None` for the one of that name, if there is one.
        test_split: The source's split to report on; `None` for the one of that name, if there is one.
        validation_fraction: Share of train to cut for validation.
        test_fraction: Share of train to cut for testing.
        corrupt_images: Policy for images that cannot be decoded: `"raise"` names the first one when it is met;
            `"skip"` decodes every image once at the start, leaves those out, and names them all.
        follow_links: Whether links in a folder, or paths in parquet files, may lead out of it; those of a stranger
            could take in your own images.
        seed: Chooses the rows that are cut.
        labelled: If false, labels are not read, a folder may hold images anywhere, and all have the label 0.
        streaming: Whether `train` is an `IterableDataset` that is read while training. Only the other splits are
            downloaded then.

    Raises:
        UserError: The data cannot be used; the message says why and what to do.
    """
    fractions = {"validation": validation_fraction, "test": test_fraction}
    for name, fraction in fractions.items():
        if not 0 < fraction < 1:
            raise UserError(f"{name}_fraction must lie between 0 and 1, got {fraction}.")
    if corrupt_images not in CORRUPT_POLICIES:
        raise UserError(f"corrupt_images must be one of {', '.join(CORRUPT_POLICIES)}; got {corrupt_images!r}.")
    source = _load_source(data, data_config, corrupt_images == "raise", labelled, streaming, follow_links)
    chosen = _choose_splits(data, source, train=train_split, validation=validation_split, test=test_split)
    if labelled:
        source = _name_columns(data, source, image_column, label_column, train_split, streaming)
    else:
        source = _without_labels(data, source, image_column, train_split)

    splits = {}
    for name, split in chosen.items():
        rows = source[split]
        if has_unlabelled(rows):
            if name == "train":
                raise UserError(
                    f"{data}: the split {split!r} has rows without a label. Choose another with --train_split."
                )
            logger.warning("%s: the split %r has rows without a label and is not used.", data, split)
            continue
        if streaming and name != "train":
            rows = _download(data, split, rows, (data_config, image_column, label_column))
        if isinstance(rows, Dataset):
            refuse_unknown_labels(data, split, rows)
            rows = without_corrupt(data, split, rows) if corrupt_images == "skip" else rows
        splits[name] = rows
    if streaming:
        _halve_for_the_missing(data, splits, seed)
    else:
        _cut_the_missing(data, splits, fractions, seed)
    return DatasetDict({name: splits[name] for name in SPLIT_NAMES})


def fingerprint(splits: DatasetDict) -> str:
    """Return what tells splits from others: their sizes, and a hash of the labels and file names in their order."""
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
    """Return the 1,797 handwritten digits of 8x8 pixels that ship inside scikit-learn, as grey images.

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
    """Refuse class ids out of range, which would end in a nameless fault on the device, much later.

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
    """Return the images of a split that can be decoded, and name the others in the log."""
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


def _load_source(
    data: str, data_config: str | None, check_files: bool, labelled: bool, streaming: bool, follow_links: bool
) -> Any:
    """Load all splits of a source as it is: a `DatasetDict`, or an `IterableDatasetDict` for streaming."""
    path = Path(data).expanduser()
    if data == "digits" or (path.is_dir() and not any(path.rglob("*.parquet"))):
        if streaming:
            raise UserError(
                f"{data}: only datasets on the Hub and parquet files can be streamed. Leave --streaming out."
            )
        if data == "digits":
            return load_digits()
        source = _load_folder(path, labelled, check_files, "follow" if follow_links else "refuse")
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


def _load_folder(root: Path, labelled: bool, check_files: bool, folder_links: str) -> DatasetDict:
    """Load a folder with a folder of images per class, or without labels with images anywhere, or splits of such."""
    splits = _split_folders(root, labelled)
    names = _subfolders(splits["train"]) if labelled else [""]  # the class names of train hold for all the splits
    source = {}
    for split, folder in splits.items():
        found = {name: find_image_files(folder / name, folder_links) for name in names}
        files = [(file, name) for name, (images, _) in found.items() for file in images]
        warn_of_others(folder, sum((others for _, others in found.values()), Counter()))
        if labelled:
            _check_class_folders(folder, files, names, splits["train"])
        elif not files:
            raise UserError(f"{folder}: there are no images.")
        for file, _ in files if check_files else ():  # the headers only, to find what is no image before training
            check_header(file)
        source[split] = Dataset.from_dict(
            {"image": [str(file) for file, _ in files], "label": [names.index(name) for _, name in files]},
            features=Features({"image": datasets.Image(), "label": ClassLabel(names=names)}),
        )
    return DatasetDict(source)


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _split_folders(root: Path, labelled: bool) -> dict[str, Path]:
    """Return the folders inside a folder that are its splits, by their names, else the whole folder as train."""
    folders = {name.lower(): root / name for name in _subfolders(root)}
    splits = {
        split: next(folders[name] for name in names if name in folders)
        for split, names in SPLIT_NAMES.items()
        if not folders.keys().isdisjoint(names)
    }
    if "train" in splits and (not labelled or _subfolders(splits["train"])):  # a class may be called train
        beside = [] if labelled else [folder for folder in folders.values() if folder not in splits.values()]
        if unused := [folder.name for folder in beside if find_image_files(folder)[0]]:
            raise UserError(
                f"{root}: {splits['train'].name} is the training split, and the images in {', '.join(unused)} beside"
                " it would not be used. Move them into it, or elsewhere; or rename it, and all images are used."
            )
        return splits
    if labelled and splits and len(splits) == len(folders):
        raise UserError(
            f"{root}: one of the folders {', '.join(sorted(folders))} must be train, with class folders in it. Add or "
            "rename it."
        )
    return {"train": root}


def _check_class_folders(folder: Path, files: list[tuple[Path, str]], names: list[str], train: Path) -> None:
    """Refuse class folders that are likely to be something else than meant."""
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
    empty = [name for name in names if name not in {name for _, name in files}]
    if folder == train and empty:
        raise UserError(f"{folder}: no images in the class folders {empty}. Delete these folders, or fill them.")
    if unknown := sorted(set(_subfolders(folder)) - set(names)):
        raise UserError(f"{folder}: the classes {unknown} are not in {train}. Delete or add them there.")


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
    """Yield the paths of the images that are not in the rows themselves, without reading any image."""
    for column in (name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)):
        for chunk in rows.data.column(column).chunks:
            yield from chunk.field("path").filter(chunk.field("bytes").is_null()).drop_null().to_pylist()


def _choose_splits(data: str, source: Any, **wanted: str | None) -> dict[str, str]:
    """Return which split of a source serves as train, validation and test, as far as it has them."""
    chosen = {name: split for name, split in wanted.items() if split is not None}
    for name, split in chosen.items():
        if split not in source:
            raise UserError(f"{data}: there is no split {split!r}, only {sorted(source)}. Choose with --{name}_split.")
    if len(set(chosen.values())) < len(chosen):
        raise UserError(f"{data}: train, validation and test must be different splits, got {wanted}.")
    for name, names in SPLIT_NAMES.items():
        own = [split for split in names if split in source and split not in chosen.values()]
        if name not in chosen and own:
            chosen[name] = own[0]
    return chosen


def _find_column(data: str, features: Features, what: str, chosen: str | None, found: list[str]) -> str:
    """Return the chosen column, or the only one that was found."""
    if chosen is None and len(found) != 1:
        raise UserError(
            f"{data}: there must be one column of {what}s, found {found} among {sorted(features)}. Name it with "
            f"--{what}_column."
        )
    column = found[0] if chosen is None else chosen
    if column not in features:
        raise UserError(
            f"{data}: there is no column {column!r}, only {sorted(features)}. Choose with --{what}_column."
        )
    return column


def _find_image_column(data: str, features: Features, chosen: str | None) -> str:
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    column = _find_column(data, features, "image", chosen, images)
    if column not in images:
        raise UserError(f"{data}: the column {column!r} holds {features[column]}, not images.")
    return column


def _without_labels(data: str, source: DatasetDict, image_column: str | None, train_split: str) -> DatasetDict:
    """Reduce a source to the column `image`, and give all images the label 0."""
    image = _find_image_column(data, source[train_split].features, image_column)
    source = source.select_columns([image]).rename_columns({image: "image"} if image != "image" else {})
    return DatasetDict({split: _with_labels(rows, [0] * len(rows), ["image"]) for split, rows in source.items()})


def _with_labels(rows: Dataset, labels: list[int], names: list[str]) -> Dataset:
    return rows.add_column("label", labels, feature=ClassLabel(names=names))


def _name_columns(
    data: str, source: Any, image_column: str | None, label_column: str | None, train_split: str, streaming: bool
) -> Any:
    """Find the columns of the images and labels, and reduce a source to these two, named `image` and `label`."""
    features = source[train_split].features
    if features is None:
        raise UserError(
            f"{data}: the columns of this kind of data are not known before it is read. Use parquet files."
        )
    image = _find_image_column(data, features, image_column)
    labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    labels = labels or [name for name in ("label", "labels") if name in features]
    label = _find_column(data, features, "label", label_column, labels)
    if streaming:  # renaming reads the rows: decoded images would be compressed again, with loss
        source = source.cast_column(image, datasets.Image(decode=False))
    # A name that stays would be refused.
    names = {old: new for old, new in ((image, "image"), (label, "label")) if old != new}
    source = source.select_columns([image, label]).rename_columns(names)
    feature = features[label]
    if not isinstance(feature, ClassLabel):
        if streaming:
            raise UserError(
                f"{data}: to stream, the column {label!r} must be of the type ClassLabel, which names the classes; it "
                f"is {feature}. Leave --streaming out."
            )
        source = _number_classes(data, source, label, feature)
        feature = source[train_split].features["label"]
    if feature.num_classes < 2:
        raise UserError(f"{data}: there is one class, {feature.names}; a classifier needs at least two.")
    return source


def _number_classes(data: str, source: DatasetDict, column: str, feature: Any) -> DatasetDict:
    """Replace labels of another type, the same for all splits, by class ids, and missing ones by -1."""
    kinds = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean)
    if not isinstance(feature, datasets.Value) or not any(is_kind(feature.pa_type) for is_kind in kinds):
        raise UserError(f"{data}: the column {column!r} must hold one class per image, but it holds {feature}.")
    values = {split: rows["label"][:] for split, rows in source.items()}
    names = sorted({value for column in values.values() for value in column if value is not None})
    ids = {name: number for number, name in enumerate(names)}
    return DatasetDict(
        {
            split: _with_labels(
                rows.remove_columns("label"), [ids.get(value, -1) for value in values[split]], list(map(str, names))
            )
            for split, rows in source.items()
        }
    )


def has_unlabelled(rows: Dataset | IterableDataset) -> bool:
    """Return whether a label is missing; in a stream, the first one stands for all."""
    labels = rows["label"][:] if isinstance(rows, Dataset) else [row["label"] for row in rows.take(1)]
    return any(label is None or label < 0 for label in labels)


def _download(data: str, split: str, stream: IterableDataset, choices: tuple[str | None, ...]) -> Dataset:
    """Read a whole split of a stream, or find the copy of it that was made before with the same choices."""
    # A stream has no name of its own by which a copy of it could be found again.
    version = Hasher.hash([data, split, choices, _version(data)])
    rows = Dataset.from_generator(_rows, features=stream.features, gen_kwargs={"stream": stream}, fingerprint=version)
    if any(image_paths(rows)):
        raise UserError(f"{data}: {NOT_IN_ROWS}")
    return rows


def _rows(stream: IterableDataset) -> Iterator[dict[str, Any]]:
    yield from stream


def _version(data: str) -> Any:
    """Return what changes when the data does."""
    path = Path(data).expanduser()
    if not path.exists():
        return HfApi().dataset_info(data).sha
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _halve_for_the_missing(data: str, splits: dict[str, Any], seed: int) -> None:
    """Cut the only one of validation and test into both, with the same share of every class."""
    found = [name for name in ("validation", "test") if name in splits]
    if not found:
        raise UserError(
            f"{data}: a stream cannot be cut, so it needs a validation split. Choose one with --validation_split."
        )
    if len(found) == 1:
        rows = splits[found[0]]
        logger.info("%s: there is only one of validation and test, %s; a half of it serves as the other", data, *found)
        counts = np.bincount(rows["label"][:], minlength=rows.features["label"].num_classes)
        splits["validation"], splits["test"] = _cut(data, rows, np.rint(counts / 2).astype(int), seed)


def _cut_the_missing(data: str, splits: dict[str, Any], fractions: dict[str, float], seed: int) -> None:
    """Cut validation and test from train if there are none, with the same share of every class."""
    train = splits["train"]
    counts = np.bincount(train["label"][:], minlength=train.features["label"].num_classes)
    for name, fraction in fractions.items():
        if name not in splits:
            number = np.maximum(1, np.rint(fraction * counts).astype(int))
            splits["train"], splits[name] = _cut(data, splits["train"], number, seed)
            logger.info(
                "%s: %d of the training images (%g%%) cut for %s", data, len(splits[name]), 100 * fraction, name
            )


def _cut(data: str, train: Dataset, counts: np.ndarray, seed: int) -> tuple[Dataset, Dataset]:
    """Cut `counts[c]` images of each class c from train, but leave one.

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
