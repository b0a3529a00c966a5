"""Images and labels from anywhere, as three named splits; knows nothing of models.

Sources: the digits that ship inside scikit-learn, a folder of class folders, a table of paths, local parquet files, or
a dataset on the Hub. Whatever the source, the splits have the columns `image` (encoded, see `decode_image`) and
`label` (see `targets.py`).
"""

import glob
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from datasets import ClassLabel, Dataset, DatasetDict, Features, IterableDataset, List, load_dataset
from datasets.config import HF_CACHE_HOME, HF_DATASETS_CACHE
from datasets.fingerprint import Hasher
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image

from ..errors import UserError, blame_the_files
from .groups import GROUP, cut_the_missing, keep_together, paths_of
from .images import ADVICE, decode_image, find_image_files, local_path, map_images, warn_of_others
from .options import DataArguments
from .tables import SPLIT_NAMES, find_columns, find_tables, holds_images, load_tables, parquet_holds_images
from .targets import encode_labels, is_valid, label_names, problem_type, targets_of

logger = logging.getLogger(__name__)

FOLLOW = "If this is intended, add --follow_links true."
SPLITS = "_splits.csv"  # names images, so it is never pushed

# A path could be that of any file of this machine.
NOT_IN_ROWS = "to stream, the images must be in the rows themselves, as usual in parquet files."


def load_splits(
    data: str, *, seed: int = 42, labelled: bool = True, listing: Path | None = None, **choices: Any
) -> DatasetDict:
    """Load a dataset as the splits `train`, `validation` and `test`, with the columns `image` and `label`.

    A split that the source does not have is cut from train, with the same share of every class and always the same
    rows for one seed. Near duplicates and groups stay together (`groups.py`). From a stream nothing can be cut: a half
    of validation serves as test, or the other way round.
    Of a stream, `train` is an `IterableDataset` that is read while training, and the other splits are downloaded.

    Args:
        data: Source, as in `DataArguments`.
        seed: Chooses the rows that are cut. `vit-scratch train` never changes it, so that all its seeds have one test.
        labelled: If false, labels are not read, a folder may hold images anywhere, and all have the label 0.
        listing: File for a list of near duplicates, if there are any.
        choices: The flags of the same names, such as `label_column=["kind"]`.

    Raises:
        UserError: The data cannot be used; the message says why and what to do.
    """
    args = DataArguments(data=data, **choices)
    source = _load_source(args, labelled)
    chosen = _choose_splits(args, source)
    source = type(source)({split: source[split] for split in chosen.values()})
    source = _name_columns(args, source, labelled)
    feature = source[args.train_split].features["label"]
    if labelled and isinstance(feature, ClassLabel) and feature.num_classes < 2:
        raise UserError(f"{data}: there is only one class, {feature.names}, but a classifier needs two.")

    splits = {}
    for name, split in chosen.items():
        if split not in source:
            continue
        rows = source[split]
        labels = rows.select_columns("label")  # of a stream, the first row must do
        labels = labels if isinstance(rows, Dataset) else labels.take(1)
        if name != "train" and not any(is_valid(feature, row["label"]) for row in labels):
            logger.warning("%s: the split %r has no labels and is not used.", data, split)
            continue
        if args.streaming and name != "train":
            rows = _download(args, split, rows)
        if isinstance(rows, Dataset):
            refuse_unknown_labels(data, split, rows)
            rows = without_corrupt(data, split, rows) if args.corrupt_images == "skip" else rows
        splits[name] = rows
    splits, groups = (splits, None) if args.streaming else keep_together(args, splits, listing)
    cut_the_missing(args, splits, groups, seed)
    return DatasetDict({name: splits[name].select_columns(["image", "label"]) for name in SPLIT_NAMES})


def load_split(args: DataArguments, split: str | None) -> Dataset:
    """Load one split of a source as it is, with the columns `image` and `label`. `None` is test, or the only split.

    Raises:
        UserError: The data cannot be used, or has no such split.
    """
    source = _load_source(args, labelled=True)
    name = find_split(args.data, split or (next(iter(source)) if len(source) == 1 else "test"), source)
    own = replace(args, train_split=name, group_by=None)
    rows = _name_columns(own, DatasetDict({name: source[name]}), labelled=True, complete=False)[name]
    refuse_unknown_labels(args.data, name, rows)
    return without_corrupt(args.data, name, rows) if args.corrupt_images == "skip" else rows


def find_split(data: str, split: str, source: DatasetDict) -> str:
    """Return the name of a split in a source, which may call it `val` instead of `validation`, for example."""
    names = (split, *next((names for names in SPLIT_NAMES.values() if split in names), ()))
    if not (found := [name for name in names if name in source]):
        raise UserError(f"{data}: there is no split {split!r}, only {list(source)}. Choose one with --split.")
    return found[0]


def with_names(data: str, rows: Dataset, names: list[str], kind: str) -> Dataset:
    """Return rows with the class ids of a model of a problem type, whose classes or numbers are matched by name."""
    feature, labels = rows.features["label"], rows["label"][:]
    own = label_names(feature)
    if (given := problem_type(feature)) != kind:
        advice = "Write them with a decimal point, such as 3.0" if kind == "regression" else "Give labels of its kind"
        raise UserError(f"{data}: the model was trained for {kind}, but these labels are for {given}. {advice}.")
    if own == names:
        return rows
    if isinstance(feature, dict):
        raise UserError(
            f"{data}: the model predicts the numbers {names}, but the data has {own}. Choose columns of these names "
            "with --label_column."
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"{data}: the model calls two classes {twice[0]!r}, so they cannot be told apart by name. Rename one "
            "in its config.json."
        )
    used = {own[id] for label in labels for id in np.atleast_1d(label)}
    if unknown := sorted(used - {*names}):
        raise UserError(
            f"{data}: the classes must be among those of the model, {names}, got {unknown}. Rename or remove them."
        )
    ids = np.array([names.index(name) if name in names else -1 for name in own])
    classes = ClassLabel(names=names)
    new = List(classes) if kind == "multi_label_classification" else classes
    labels = [ids[label].tolist() for label in labels]  # each an id, or a list of ids
    return rows.remove_columns("label").add_column("label", labels, feature=new)


def absolute(data: str) -> str:
    """Return the absolute path of local data; a name as it is."""
    path = local_path(data)
    return data if data == "digits" or not path.exists() else str(path.resolve())


def fingerprint(splits: DatasetDict) -> str:
    """Return what tells splits from others: their sizes, and a hash of the labels and file names in their order."""
    digest = hashlib.sha256()
    for split, rows in splits.items():
        names = [os.path.basename(path) for path in paths_of(rows)]
        digest.update("\n".join([split, *names]).encode(errors="replace"))
        digest.update(targets_of(rows).tobytes())
    return f"{', '.join(f'{len(rows)} {split}' for split, rows in splits.items())} ({digest.hexdigest()[:16]})"


def _files(rows: Dataset) -> list[tuple[str, int]]:
    """Return the absolute path and the size in bytes of each image that is a local file."""
    return [(absolute(path), os.path.getsize(path)) for path in paths_of(rows) if os.path.isfile(path)]


def list_splits(splits: DatasetDict, path: Path) -> None:
    """Write which local file is in which split, and its size in bytes; nothing of a stream."""
    files = [(*file, split) for split, rows in splits.items() if isinstance(rows, Dataset) for file in _files(rows)]
    pd.DataFrame(files, columns=["image", "bytes", "split"]).to_csv(path, index=False)


def count_learnt(run: Path, rows: Dataset) -> int | None:
    """Return how many images have the name and size of one that a run was trained on; `None` if no files tell."""
    if not (run / SPLITS).is_file():
        return None
    trained = pd.read_csv(run / SPLITS).query("split == 'train'")
    known = {*zip(map(os.path.basename, trained["image"]), trained["bytes"], strict=True)}
    files = _files(rows)
    return sum((os.path.basename(path), size) in known for path, size in files) if known and files else None


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
    """Refuse class ids out of range, which would end in a nameless fault on the device, much later."""
    feature, labels = rows.features["label"], rows["label"][:]
    if wrong := [row for row, label in enumerate(labels) if not is_valid(feature, label)]:
        kind = f"a label outside 0 to {len(label_names(feature)) - 1}"
        if problem_type(feature) == "regression":
            kind = "a label that is not a finite number"
        elif labels[wrong[0]] is None:
            kind = "no label"
        raise UserError(
            f"{data}: {len(wrong)} rows of {split} have {kind}; the first is "
            f"{paths_of(rows)[wrong[0]] or f'row {wrong[0]}'} with {labels[wrong[0]]}. Correct or delete them."
        )


def without_corrupt(data: str, split: str, rows: Dataset) -> Dataset:
    """Return the images of a split that can be decoded, and name the others in the log."""

    def fault_of(number: int, image: dict[str, Any]) -> str:
        try:
            decode_image(image, name=f"image {number}")
        except UserError as error:
            return str(error).removesuffix(ADVICE)
        return ""

    faults = [*map_images(fault_of, rows)]
    good, bad = [number for number, fault in enumerate(faults) if not fault], [*filter(None, faults)]
    if not good:
        raise UserError(f"{data}: no image of {split} can be decoded; the first: {bad[0]}")
    if bad:
        logger.warning("%s: images skipped: %d of %d", data, len(bad), len(rows))
        for reason in bad:
            logger.warning("  %s", reason)
    return rows.select(good)


def _load_source(args: DataArguments, labelled: bool) -> Any:
    """Load all splits of a source as it is: a `DatasetDict`, or an `IterableDatasetDict` for streaming."""
    data, streaming = args.data, args.streaming
    path = local_path(data)
    root = path if path.is_dir() else path.parent
    folders = _folders_of_splits(root) if path.exists() else {}
    tables = find_tables(path, [root, *folders.values()] if labelled and path.is_dir() else [])
    if data == "digits" or tables or (path.is_dir() and not _holds_rows(path)):
        if streaming:
            raise UserError(
                f"{data}: only datasets on the Hub and parquet files can be streamed. Leave --streaming out."
            )
        if args.data_config is not None:
            raise UserError(f"{data}: --data_config is for a dataset on the Hub that has several. Leave it out.")
        if data == "digits":
            return load_digits()
        source = load_tables(tables, folders, args) if tables else _load_folder(path, labelled, args)
        if not args.follow_links:
            _refuse_files_outside([root], source, FOLLOW)
        if args.corrupt_images == "raise":
            _refuse_missing_files(data, source)
        return source
    if not path.exists() and (data.startswith((".", "/", "~")) or data.count("/") > 1):
        raise UserError(
            f"{data}: there is no such file or folder. Give --data a folder of class folders, for example."
        )
    if path.is_dir() and glob.has_magic(str(path.resolve())):  # which datasets would take for a pattern
        raise UserError(f"{data}: the path of a folder of parquet files must hold none of *?[. Rename it.")
    try:
        if path.is_file():
            source = load_dataset("parquet", data_files=glob.escape(str(path)), streaming=streaming)
        else:
            source = load_dataset(str(path) if path.is_dir() else data, args.data_config, streaming=streaming)
    except Exception as error:  # datasets raises many types, down to a bare Exception, for what it cannot load
        hint = "there is no such file or folder, and no dataset of this name could be loaded from the Hub."
        if path.exists():
            hint = "it must be a folder of class folders or of parquet files, or a file .csv, .jsonl or .parquet."
        reason = " ".join(str(error).split())
        raise UserError(f"{data}: {hint} {type(error).__name__}: {reason}") from error
    features = next(iter(source.values())).features or {}
    if not any(isinstance(feature, datasets.Image) for feature in features.values()):
        for name in (name for name, feature in features.items() if holds_images(feature)):
            source = source.cast_column(name, datasets.Image())
    if not streaming and not path.exists():
        caches = (HF_CACHE_HOME, HF_DATASETS_CACHE, HF_HUB_CACHE)
        _refuse_files_outside(caches, source, f"{data} refers to a file that does not belong to it. Do not use it.")
    elif not streaming and not args.follow_links:
        _refuse_files_outside([root], source, FOLLOW)
    return source


def _holds_rows(folder: Path) -> bool:
    """Return whether a folder has parquet files with images in them, or parquet files alone."""
    images, others = find_image_files(folder)
    tables = [file for file in others if file.endswith(".parquet") and os.path.basename(file) != "metadata.parquet"]
    return any(parquet_holds_images(Path(file)) for file in tables) or bool(tables and not images)


def _load_folder(root: Path, labelled: bool, args: DataArguments) -> DatasetDict:
    """Load a folder with a folder of images per class, or without labels with images anywhere, or splits of such."""
    splits = _split_folders(root, labelled)
    names = _subfolders(splits["train"]) if labelled else [""]  # the class names of train hold for all the splits
    source = {}
    for split, folder in splits.items():
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
            source[split] = Dataset.from_dict(
                {"image": [str(file) for file, _ in files], "label": [names.index(name) for _, name in files]},
                features=Features({"image": datasets.Image(), "label": ClassLabel(names=names)}),
            )
    everything = find_image_files(root, "follow" if args.follow_links else "skip")[0]
    if len(everything) > sum(map(len, source.values())):
        used = {path for rows in source.values() for path in image_paths(rows)}
        unused = [file for file in everything if str(file) not in used]
        logger.warning(
            "%s: %d images are in no class folder and are not used; the first is %s.", root, len(unused), unused[0]
        )
    return DatasetDict(source)


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _folders_of_splits(root: Path) -> dict[str, Path]:
    """Return the folders inside a folder that have the names of splits; of several, that of the first name."""
    found = {name.lower(): root / name for name in _subfolders(root)}
    return {split: found[name] for split, names in SPLIT_NAMES.items() for name in reversed(names) if name in found}


def _split_folders(root: Path, labelled: bool) -> dict[str, Path]:
    """Return the folders inside a folder that are its splits, by their names, else the whole folder as train."""
    folders, splits = [root / name for name in _subfolders(root)], _folders_of_splits(root)
    if "train" in splits and (not labelled or _subfolders(splits["train"])):  # a class may be called train
        beside = [] if labelled else [folder for folder in folders if folder not in splits.values()]
        if unused := [folder.name for folder in beside if find_image_files(folder)[0]]:
            raise UserError(
                f"{root}: {splits['train'].name} is the training split, and the images in {', '.join(unused)} beside"
                " it would not be used. Move them into it, or elsewhere; or rename it, and all images are used."
            )
        return splits
    return {"train": root}


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
    splits = {name for _, name in files if any(name.lower() in others for others in SPLIT_NAMES.values())}
    if wrong := [name for name in splits if {*_subfolders(folder / name)} & {*names}]:
        raise UserError(
            f"{folder}: {wrong[0]} holds folders of classes, but there is no folder train. If it is a split, move "
            "the classes beside it into a folder train; if it is a class, put its images right into it."
        )
    if not files:
        found = "there are no images."
        if loose := len(find_image_files(folder)[0]):
            found = f"none of its {loose} images is in a class folder. If {folder.name} is one, give the folder above."
        if tables := [path for suffix in (".csv", ".jsonl", ".parquet") for path in sorted(folder.glob(f"*{suffix}"))]:
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


def _refuse_missing_files(data: str, source: DatasetDict) -> None:
    files = dict.fromkeys(path for rows in source.values() for path in image_paths(rows))  # splits share their table
    if missing := [path for path in files if not os.path.isfile(path)]:
        raise UserError(
            f"{data}: {len(missing)} of its {len(files)} image files are missing; the first is {missing[0]}. Correct "
            "the paths, or leave such images out with --corrupt_images skip."
        )


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


def _choose_splits(args: DataArguments, source: Any) -> dict[str, str]:
    """Return which split of a source serves as train, validation and test, as far as it has them."""
    data = args.data
    wanted = {name: getattr(args, f"{name}_split") for name in SPLIT_NAMES}
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


def _name_columns(args: DataArguments, source: Any, labelled: bool, complete: bool = True) -> Any:
    """Reduce a source to the columns `image` and `label`, and to the splits that have both.

    If it is not `labelled`, all images have the label 0. If it is `complete`, each label that the columns name must
    have an image.
    """
    data, features = args.data, source[args.train_split].features
    if features is None:
        raise UserError(
            f"{data}: the columns of this kind of data are not known before it is read. Use parquet files."
        )
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    (image,) = find_columns(args, "image", images, images)
    labels: list[str] = []
    if labelled:
        classes = [name for name, one in features.items() if isinstance(getattr(one, "feature", one), ClassLabel)]
        named = [name for name in ("label", "labels") if name in features]
        found = classes if {*classes} & {*named} else [*classes, *named]
        labels = find_columns(args, "label", found, features)
    if image in labels or len({*labels}) < len(labels) or ("image" in labels and image != "image"):
        raise UserError(
            f"{data}: the columns of labels must differ from each other and from that of the images, and none may be "
            f"called image; got {labels} beside {image!r}. Choose or rename them."
        )
    if args.streaming:  # renaming reads the rows: decoded images would be compressed again, with loss
        source = source.cast_column(image, datasets.Image(decode=False))
    group = [] if args.group_by in (image, *labels) or args.group_by not in features else [args.group_by]
    without = [split for split, rows in source.items() if not {*labels} <= {*(rows.features or labels)}]
    for split in without:
        logger.warning("%s: the split %r has no labels and is not used.", data, split)
    source = type(source)({split: rows for split, rows in source.items() if split not in without})
    wanted = [image, *labels, *group]
    for split, rows in source.items():
        if missing := [name for name in wanted if name not in (rows.features or wanted)]:
            raise UserError(f"{data}: {split} has no column {missing[0]!r}, which {args.train_split} has. Add it.")
    source = source.select_columns(wanted)
    for old, new in (*((name, GROUP) for name in group), (image, "image")):
        source = source if old == new else source.rename_column(old, new)  # a name that stays would be refused
    if not labelled:
        one = ClassLabel(names=["image"])
        return DatasetDict(
            {name: rows.add_column("label", [0] * len(rows), feature=one) for name, rows in source.items()}
        )
    return encode_labels(data, source, args.train_split, labels, complete, args.label_separator)


def _download(args: DataArguments, split: str, stream: IterableDataset) -> Dataset:
    """Read a whole split of a stream, or find the copy of it that was made before with the same choices."""
    # A stream has no name of its own by which a copy of it could be found again.
    data, choices = args.data, (args.data_config, args.image_column, args.label_column)
    version = Hasher.hash([data, split, choices, _version(data)])
    rows = Dataset.from_generator(lambda: stream, features=stream.features, fingerprint=version)
    if any(image_paths(rows)):
        raise UserError(f"{data}: {NOT_IN_ROWS}")
    return rows


def _version(data: str) -> Any:
    """Return what changes when the data does."""
    path = local_path(data)
    if not path.exists():
        return HfApi().dataset_info(data).sha
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
