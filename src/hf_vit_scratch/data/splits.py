"""Images and labels from anywhere, as three named splits; knows nothing of models.

Whatever the source (`sources.py`), the splits have the columns `image` (encoded, see `decode_image`) and `label` (see
`targets.py`).
"""

import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from huggingface_hub import HfApi

from ..errors import UserError
from .groups import GROUP, cut_the_missing, keep_together, paths_of
from .images import ADVICE, decode_image, local_path, map_images
from .options import DataArguments
from .sources import image_paths, load_source
from .tables import SPLIT_NAMES, find_columns
from .targets import encode_labels, is_valid, label_names, problem_type, refuse_other_classes, targets_of

logger = logging.getLogger(__name__)

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
    if args.streaming and (args.group_by is not None or not labelled):
        raise UserError("A stream has no groups, and needs labels. Leave --group_by out, and train with labels.")
    source = load_source(args, labelled)
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
    source = load_source(args, labelled=True)
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
    """Return what tells splits from others: their sizes, and a hash of labels, their names and the files' names."""
    digest = hashlib.sha256()
    for split, rows in splits.items():
        names = [*label_names(rows.features["label"]), *(os.path.basename(path) for path in paths_of(rows))]
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


def refuse_unknown_labels(data: str, split: str, rows: Dataset) -> None:
    """Refuse class ids out of range, which would end in a nameless fault on the device, much later."""
    feature, labels = rows.features["label"], rows["label"][:]
    if wrong := [row for row, label in enumerate(labels) if not is_valid(feature, label)]:
        raise UserError(
            f"{data}: {len(wrong)} rows of {split} have no label, or one that is out of range; the first is "
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
    data, features = args.data, source[args.train_split].features or {}  # unknown for some kinds of streams
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    (image,) = find_columns(args, "image", images, images)
    labels: list[str] = []
    if labelled:
        possible = {
            name: getattr(one, "feature", one) for name, one in features.items() if name not in (image, "image")
        }
        classes = [name for name, one in possible.items() if isinstance(one, ClassLabel)]
        named = [name for name in ("label", "labels") if name in possible]
        found = classes if {*classes} & {*named} else [*classes, *named]
        labels = find_columns(args, "label", found, possible)
    if args.streaming:
        if (source[args.train_split].info.builder_name or "").endswith("folder"):
            raise UserError(f"{data}: {NOT_IN_ROWS}")
        # Reading an image, `datasets` would take a file of its name in the working directory instead, and renaming,
        # decode and compress it again.
        source = source.cast_column(image, {"bytes": Value("binary"), "path": Value("string")})
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
    refuse_other_classes(data, {split: rows.features for split, rows in source.items()}, labels)
    return encode_labels(data, source, args.train_split, labels, complete, args.label_separator)


def _download(args: DataArguments, split: str, stream: IterableDataset) -> Dataset:
    """Read a whole split of a stream, or find the copy of it that was made before with the same choices."""
    # A stream has no name of its own by which a copy of it could be found again.
    data, choices = args.data, (args.data_config, args.image_column, args.label_column)
    version = Hasher.hash([data, split, choices, _version(data)])
    rows = Dataset.from_generator(lambda: stream, features=stream.features, fingerprint=version)
    rows = rows.cast_column("image", datasets.Image(decode=False))
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
