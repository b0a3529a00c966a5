"""Where images come from: the digits inside scikit-learn, folders, tables of paths, parquet files, or the Hub."""

import glob
import logging
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, IterableDatasetDict, load_dataset
from datasets.config import HF_CACHE_HOME, HF_DATASETS_CACHE
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image
from pyarrow import parquet

from ..errors import UserError, blame_the_files
from .images import find_image_files, is_local, local_path, warn_of_others
from .options import DataArguments
from .tables import READERS, SPLIT_NAMES, SPLITS_BY_NAME, divide, find_tables, holds_images, is_image, load_tables
from .targets import refuse_other_classes

logger = logging.getLogger(__name__)

# Beginnings of the names of folders that hold no class: .git, @eaDir, and what is at the root of a disk.
OF_SYSTEMS = (".", "@", "$RECYCLE.BIN", "__MACOSX", "lost+found", "System Volume Information")
FOLLOW = "If this is intended, add --follow_links true."


def load_source(args: DataArguments, labelled: bool) -> Any:
    """Load all splits of a source as it is: a `DatasetDict`, or an `IterableDatasetDict` for streaming."""
    data, path = args.data, local_path(args.data)
    root = path if path.is_dir() else path.parent
    tables = find_tables(path, [root, *_folders_of_splits(root).values()] if labelled and path.is_dir() else [])
    holds_rows = data != "digits" and not tables and (not path.is_dir() or _holds_rows(path))
    if (args.streaming and not holds_rows) or (args.data_config is not None and (data == "digits" or path.exists())):
        raise UserError(
            f"{data}: --streaming is for parquet files and the Hub, --data_config for the Hub. Leave them out."
        )
    if not holds_rows:
        if data == "digits":
            return load_digits()
        source = load_tables(tables, root, args) if tables else _load_folder(path, labelled, args)
        if path.is_dir():
            _warn_of_unused(path, source, args.follow_links)
    else:
        source = _load_rows(args, path, labelled)
    if args.streaming:
        return source
    if not path.exists():
        caches = (HF_CACHE_HOME, HF_DATASETS_CACHE, HF_HUB_CACHE)
        _refuse_files_outside(caches, source, f"{data} refers to a file that does not belong to it. Do not use it.")
    elif not args.follow_links:
        _refuse_files_outside([root], source, FOLLOW)
    return source


def _load_rows(args: DataArguments, path: Path, labelled: bool) -> Any:
    """Load parquet files that hold the images themselves, or a dataset on the Hub."""
    data, streaming = args.data, args.streaming
    if not path.exists() and is_local(data):
        raise UserError(
            f"{data}: there is no such file or folder. Give --data a folder of class folders, for example."
        )
    files = {"train": [path]} if path.is_file() else _parquet_files_of_splits(path)
    if path.is_dir() and labelled:
        _check_class_names(data, files, args)
    try:
        if path.exists():
            source = IterableDatasetDict() if streaming else DatasetDict()
            for split, of_split in files.items():  # whose columns may differ
                names = [glob.escape(str(file)) for file in of_split]
                source[split] = load_dataset("parquet", data_files=names, split="train", streaming=streaming)
        else:
            source = load_dataset(data, args.data_config, streaming=streaming)
    except Exception as error:  # datasets raises many types, down to a bare Exception, for what it cannot load
        hint = "there is no such file or folder, and no dataset of this name could be loaded from the Hub."
        if path.exists():
            hint = "it must be a folder of class folders or parquet files, or a file .csv, .tsv, .jsonl or .parquet."
        reason = " ".join(str(error).split())
        raise UserError(f"{data}: {hint} {type(error).__name__}: {reason}") from error
    info = next(iter(source.values())).info
    if path.exists() and not streaming and {*source} == {"train"}:
        source = DatasetDict(divide(data, source["train"]) or source)
    features = info.features or {}
    if not any(isinstance(feature, datasets.Image) for feature in features.values()):
        for name in (name for name, feature in features.items() if is_image(feature)):
            source = source.cast_column(name, datasets.Image())
    return source


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


def _holds_rows(folder: Path) -> bool:
    """Return whether a folder has parquet files with images in them, or parquet files alone."""
    tables = _parquet_files(folder)
    return any(map(holds_images, tables)) or bool(tables and not find_image_files(folder)[0])


def _parquet_files(folder: Path) -> list[Path]:
    """Return the parquet files of a folder that are no tables of its images."""
    others = [Path(file) for file in sorted(find_image_files(folder)[1])]
    return [file for file in others if file.suffix == ".parquet" and file.name != "metadata.parquet"]


def _parquet_files_of_splits(folder: Path) -> dict[str, list[Path]]:
    """Return the parquet files of a folder by the split that a word of their paths names; if none does, as train."""
    found: dict[str, list[Path]] = {}
    for file in _parquet_files(folder):
        words = re.split("[^a-z]+", file.relative_to(folder).as_posix().lower())
        named = [SPLITS_BY_NAME[word] for word in words if word in SPLITS_BY_NAME]
        found.setdefault(named[-1] if named else "", []).append(file)
    others = found.pop("", [])
    if others and found:
        logger.warning(
            "%s: %d parquet files are not used; the first is %s. Where names of files hold train, validation or test, "
            "all must.", folder, len(others), others[0],
        )  # fmt: skip
    return found or {"train": others}


def _check_class_names(data: str, files: Mapping[str, list[Path]], args: DataArguments) -> None:
    """Refuse parquet files in which a label is another class: `datasets` takes the names of the first for all."""
    with blame_the_files(f"{data} cannot be read as parquet files"):
        features = {file: Features.from_arrow_schema(parquet.read_schema(file)) for file in chain(*files.values())}
    columns = {name for own in features.values() for name in own}
    chosen = [args.label_column] if isinstance(args.label_column, str) else args.label_column
    refuse_other_classes(data, features, chosen or sorted(columns & {"label", "labels"} or columns))


def _load_folder(root: Path, labelled: bool, args: DataArguments) -> DatasetDict:
    """Load a folder with a folder of images per class, or without labels with images anywhere, or splits of such."""
    splits = _folders_of_splits(root)
    if "train" not in splits or (labelled and not _subfolders(splits["train"])):  # a class may be called train
        splits = {"train": root}
    names = _subfolders(splits["train"]) if labelled else [""]  # the class names of train hold for all the splits
    ids = {name: number for number, name in enumerate(names)}
    source = {}
    for split, folder in splits.items():
        if labelled and split != "train" and not _subfolders(folder):
            logger.warning("%s: the split %r has no labels and is not used.", root, split)
            continue
        if links := [] if args.follow_links else [name for name in names if name and (folder / name).is_symlink()]:
            raise UserError(f"{folder / links[0]} leads to {(folder / links[0]).resolve()}. {FOLLOW}")
        found = {name: find_image_files(folder / name, "follow" if args.follow_links else "refuse") for name in names}
        files = [(file, name) for name, (images, _) in found.items() for file in images]
        warn_of_others(folder, sum((others for _, others in found.values()), []))
        if labelled:
            _check_class_folders(folder, files, names, splits["train"], nested=args.group_by is not None)
        elif not files:
            raise UserError(f"{folder}: there are no images.")
        with blame_the_files(f"{folder}: the names of files and classes must be UTF-8"):
            classes = ClassLabel(names=[unicodedata.normalize("NFC", name) for name in names])  # é may be two
            source[split] = Dataset.from_dict(
                {"image": [str(file) for file, _ in files], "label": [ids[name] for _, name in files]},
                features=Features({"image": datasets.Image(), "label": classes}),
            )
    return DatasetDict(source)


def _warn_of_unused(root: Path, source: DatasetDict, follow_links: bool) -> None:
    """Log how many images of a folder are in none of its splits."""
    images = find_image_files(root, "follow" if follow_links else "skip")[0]
    if len(images) > sum(map(len, source.values())):
        used = {os.path.abspath(path) for rows in source.values() for path in image_paths(rows)}
        unused = [file for file in images if os.path.abspath(file) not in used]
        where = "no class folder, split or table"
        logger.warning(
            "%s: %d images are in %s and are not used; the first is %s.", root, len(unused), where, unused[0]
        )


def _subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, without those that systems make."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(OF_SYSTEMS))


def _folders_of_splits(root: Path) -> dict[str, Path]:
    """Return the folders inside a folder that have the names of splits; of several, that of the first name."""
    found = {name.lower(): root / name for name in _subfolders(root)}
    return {split: found[name] for split, names in SPLIT_NAMES.items() for name in reversed(names) if name in found}


def _check_class_folders(
    folder: Path, files: list[tuple[Path, str]], names: list[str], train: Path, nested: bool
) -> None:
    """Refuse class folders that are likely to be something else than meant; `nested` allows folders in all of them."""
    if files and not nested and all(file.parent.name not in names for file, _ in files):
        raise UserError(
            f"{folder}: the folders {names} hold folders, not images. If they are splits, name them train, val "
            "and test; if they are classes, put their images right into them, or give --group_by 1 if each folder "
            "inside them holds the images of one thing. To evaluate, give the folder of one split."
            + (f" If the folders in {names[0]} are the classes, give {folder / names[0]}." if len(names) == 1 else "")
        )
    splits = {name for _, name in files if name.lower() in SPLITS_BY_NAME}
    if wrong := [name for name in splits if {*_subfolders(folder / name)} & {*names}]:
        raise UserError(
            f"{folder}: {wrong[0]} holds folders of classes, but there is no folder train. If it is a split, move "
            "the classes beside it into a folder train; if it is a class, put its images right into it."
        )
    are_splits = all(name.lower() in SPLITS_BY_NAME for name in names)
    if not files or are_splits:
        found = f"the folders {names} are splits, not classes." if files else "there are no images."
        if not files and (loose := len(find_image_files(folder)[0])):
            found = f"none of its {loose} images is in a class folder. If {folder.name} is one, give the folder above."
        if tables := [path for suffix in READERS for path in sorted(folder.glob(f"*{suffix}"))]:
            found += f" If {tables[0].name} lists them, give {tables[0]}."
        raise UserError(
            f"{folder}: {found} The folder must hold one folder per class with images in it, such as cat/1.jpg and "
            "dog/2.png."
        )
    empty = sorted({*names} - {name for _, name in files})
    if folder == train and empty:
        raise UserError(f"{folder}: no images in the class folders {empty}. Delete these folders, or fill them.")
    if unknown := sorted(set(_subfolders(folder)) - set(names)):
        raise UserError(f"{folder}: the classes {unknown} are not in {train}. Delete or add them there.")


def _refuse_files_outside(folders: Sequence[str | Path], source: DatasetDict, advice: str) -> None:
    """Refuse links, and paths in rows, that lead out of these folders: somebody else may have made them."""
    files = [Path(path) for rows in source.values() for path in image_paths(rows)]
    inside, parents = [Path(folder).resolve() for folder in folders], {file.parent for file in files}
    # Of a folder, few files are links, and to ask each where it is takes a minute for a million.
    for path in [*sorted(parents), *(file for file in files if file.is_symlink())]:
        found = path.resolve()
        if not any(map(found.is_relative_to, inside)):
            leads = "lies" if path == found else f"leads to {found},"
            raise UserError(f"{path} {leads} outside of {inside[0]}. {advice}")


def image_paths(rows: Dataset) -> Iterator[str]:
    """Yield the paths of the images that are not in the rows themselves, without reading any image."""
    for column in (name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)):
        for chunk in rows.data.column(column).chunks:
            yield from chunk.field("path").filter(chunk.field("bytes").is_null()).drop_null().to_pylist()
