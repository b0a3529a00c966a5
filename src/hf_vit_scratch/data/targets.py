"""What is learnt of an image: one class, any of several labels, or numbers. The type of the column `label` tells it.

ClassLabel                     single_label_classification  class ids, int64 (N,)
List(ClassLabel)               multi_label_classification   zeros and ones, int8 (N, L)
{name: Value("float64"), ...}  regression                   numbers, float32 (N, L)
"""

import math
import re
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any, Literal

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, List, Value
from numpy.typing import NDArray
from pyarrow import types

from ..errors import UserError

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
NAMES = (types.is_integer, types.is_boolean, types.is_string, types.is_large_string)
NUMBERS = (types.is_floating, types.is_integer)


def problem_type(feature: Any) -> ProblemType:
    """Return the `problem_type` of a model by the feature of its labels."""
    if isinstance(feature, dict):
        return "regression"
    return "multi_label_classification" if hasattr(feature, "feature") else "single_label_classification"


def label_names(feature: Any) -> list[str]:
    """Return the names of the classes, of the labels or of the numbers."""
    return list(feature) if isinstance(feature, dict) else getattr(feature, "feature", feature).names


def describe(feature: Any) -> str:
    """Return in a few words what is learnt."""
    names = label_names(feature)
    if isinstance(feature, dict):
        return f"{'one number' if len(names) == 1 else f'{len(names)} numbers'} per image ({', '.join(names)})"
    return f"any of {len(names)} labels per image" if hasattr(feature, "feature") else f"{len(names)} classes"


def to_array(feature: Any, labels: Sequence[Any]) -> NDArray[Any]:
    """Return labels as the targets of a model; see the top of this module."""
    if isinstance(feature, dict):
        return np.array([[label[name] for name in feature] for label in labels], np.float32).reshape(-1, len(feature))
    if not hasattr(feature, "feature"):
        return np.array(labels, np.int64)
    targets = np.zeros((len(labels), len(feature.feature.names)), np.int8)
    for target, ids in zip(targets, labels, strict=True):
        target[ids] = 1
    return targets


def targets_of(rows: Dataset) -> NDArray[Any]:
    """Return the targets of all rows of a split."""
    return to_array(rows.features["label"], rows["label"][:])


def class_counts(rows: Dataset) -> NDArray[np.int64]:
    """Return how many images each class or label has."""
    targets = targets_of(rows)
    return (
        targets.sum(axis=0) if targets.ndim > 1 else np.bincount(targets, minlength=rows.features["label"].num_classes)
    )


def imbalance(rows: Dataset) -> str | None:
    """Return what to try if the rarest of single classes has less than a tenth of the images of the commonest."""
    names, counts = label_names(rows.features["label"]), class_counts(rows)
    rarest, commonest = int(counts.argmin()), int(counts.argmax())
    if (
        problem_type(rows.features["label"]) != "single_label_classification"
        or counts[rarest] * 10 >= counts[commonest]
    ):
        return None
    return (
        f"{names[rarest]!r} has {counts[rarest]} training images, {names[commonest]!r} {counts[commonest]}: accuracy "
        "will hardly show the rare class. Try --balanced_sampling true, and compare the balanced accuracy."
    )


def is_missing(label: Any) -> bool:
    """Return whether a row has no label."""
    if isinstance(label, dict):
        return any(value is None or math.isnan(value) for value in label.values())
    return label is None or (not isinstance(label, list) and label < 0)


def is_valid(feature: Any, label: Any) -> bool:
    """Return whether a label is a known class, a list of such, or finite numbers."""
    if isinstance(label, dict):
        return not is_missing(label) and all(map(math.isfinite, label.values()))
    ids, number = label if isinstance(label, list) else [label], len(label_names(feature))
    return all(id is not None and 0 <= id < number for id in ids)


def encode_labels(data: str, source: Any, train: str, columns: list[str]) -> Any:
    """Replace columns of labels by one column `label` of the types above. The training rows choose the type.

    Raises:
        UserError: The columns do not tell what is to be learnt, or no training image has one of the labels.
    """
    features = [source[train].features[name] for name in columns]
    first = getattr(features[0], "feature", features[0])
    if len(columns) == 1 and isinstance(first, ClassLabel):
        return source if columns == ["label"] else source.rename_column(columns[0], "label")
    if not isinstance(source, DatasetDict):
        raise UserError(
            f"{data}: to stream, the column {columns[0]!r} must be of the type ClassLabel, which names the classes; "
            f"it is {features[0]}. Leave --streaming out."
        )
    table = {split: list(zip(*(rows[name][:] for name in columns), strict=True)) for split, rows in source.items()}
    feature: Any = {name: Value("float64") for name in columns}
    if len(columns) == 1 and _holds(first, *NAMES):
        values = {split: [value for (value,) in rows] for split, rows in table.items()}
        feature, labels = _number_names(data, columns[0], values, train)
    elif len(columns) > 1 and all(value in (0, 1, None) for row in chain(*table.values()) for value in row):
        flags = {split: [None if None in row else [*compress(columns, row)] for row in rows]
                 for split, rows in table.items()}  # fmt: skip
        feature, labels = _number_names(data, columns[0], flags, train, columns)
    elif any(_holds(one, types.is_floating) for one in features) and all(_holds(one, *NUMBERS) for one in features):
        labels = {split: [dict(zip(columns, row, strict=True)) for row in rows] for split, rows in table.items()}
    else:
        held = ", ".join(f"{name!r} holds {one}" for name, one in zip(columns, features, strict=True))
        raise UserError(
            f"{data}: a label must be a name, a whole number, true or false, a list of these, or a decimal number. "
            f"Several columns must all hold 0 and 1, or decimal numbers. But {held}. Correct mixed types, or choose "
            "with --label_column."
        )
    return DatasetDict({
        split: rows.remove_columns(columns).add_column("label", labels[split], feature=feature)
        for split, rows in source.items()
    })  # fmt: skip


def _number_names(
    data: str, column: str, values: dict[str, list[Any]], train: str, names: list[str] | None = None
) -> tuple[Any, dict[str, list[Any]]]:
    """Return the feature of names, or of lists of names, and their numbers; -1 or `None` for missing ones.

    By default the names are those of the training rows.
    """
    is_list = any(isinstance(value, list) for value in values[train])
    lists: dict[str, list[list[Any] | None]] = {}
    for split, rows in values.items():
        whole = [value if is_list else [value] for value in rows]
        lists[split] = [None if value is None or None in value else value for value in whole]
    used = {split: {name for value in rows for name in value or ()} for split, rows in lists.items()}
    names = sorted(used[train]) if names is None else names
    if unseen := set(names).union(*used.values()) - used[train]:
        raise UserError(
            f"{data}: no image of {train} has the label {min(unseen, key=str)!r}. Add such images, or leave it out."
        )
    decimals = [name for name in names if re.fullmatch(r"[+-]?\d*\.\d+", str(name))]
    words = [name for name in names if not re.fullmatch(r"[+-]?\d*\.?\d+", str(name))]
    if decimals and words:
        raise UserError(
            f"{data}: the column {column!r} must hold numbers or names, but it holds {decimals[0]!r} and "
            f"{words[0]!r}. Correct or delete these rows."
        )
    if twice := [name for value in lists[train] if value for name in value if value.count(name) > 1]:
        raise UserError(
            f"{data}: a list of the column {column!r} must name each label once, but one names {twice[0]!r} twice. "
            "Correct it; or for zeros and ones, give each label a column."
        )
    ids = {name: number for number, name in enumerate(names)}
    feature = ClassLabel(names=list(map(str, names)))
    numbers = {split: [value and [ids[name] for name in value] for value in rows] for split, rows in lists.items()}
    if is_list:
        return List(feature), numbers
    return feature, {split: [-1 if value is None else value[0] for value in rows] for split, rows in numbers.items()}


def _holds(feature: Any, *kinds: Any) -> bool:
    return isinstance(feature, Value) and any(is_kind(feature.pa_type) for is_kind in kinds)
