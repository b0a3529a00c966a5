"""What is learnt of an image: one class, any of several labels, or numbers. The type of the column `label` tells it.

ClassLabel                     single_label_classification  class ids, int64 (N,)
List(ClassLabel)               multi_label_classification   zeros and ones, int8 (N, L)
{name: Value("float64"), ...}  regression                   numbers, float32 (N, L)
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any, Literal

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, List, Value
from numpy.typing import NDArray

from ..errors import UserError

FEW_IMAGES = 8  # of a class, up to which a new model cannot learn it

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


def problem_type(feature: Any) -> ProblemType:
    """Return the `problem_type` of a model by the feature of its labels."""
    if isinstance(feature, dict):
        return "regression"
    return "multi_label_classification" if hasattr(feature, "feature") else "single_label_classification"


def label_names(feature: Any) -> Any:
    """Return the names of the classes, labels or numbers of a column; `None` if it has none."""
    return list(feature) if isinstance(feature, dict) else getattr(getattr(feature, "feature", feature), "names", None)


def describe(feature: Any) -> str:
    """Return in a few words what is learnt."""
    names = label_names(feature)
    if isinstance(feature, dict):
        return f"numbers for each image ({', '.join(names)})"
    return f"any of {len(names)} labels for each image" if hasattr(feature, "feature") else f"{len(names)} classes"


def contents(rows: Dataset) -> str:
    """Return the names of the first five classes or labels, or the range of each number."""
    names = label_names(rows.features["label"])
    if isinstance(rows.features["label"], dict):
        ranges = zip(names, targets_of(rows).min(axis=0), targets_of(rows).max(axis=0), strict=True)
        return "; ".join(f"{name} from {low:g} to {high:g}" for name, low, high in ranges)
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


def to_array(feature: Any, labels: Sequence[Any]) -> NDArray[Any]:
    """Return labels as the targets of a model; see the top of this module."""
    if isinstance(feature, dict):
        return np.array([[label[name] for name in feature] for label in labels], np.float32).reshape(-1, len(feature))
    if not isinstance(getattr(feature, "feature", feature), ClassLabel):
        raise UserError(
            f"the column label must hold ClassLabel, lists of it, or named numbers, got {feature}. For classes: "
            "rows.class_encode_column('label'); for a number: rows.map(lambda row: {'label': {'age': row['label']}})."
        )
    if not hasattr(feature, "feature"):
        return np.array(labels, np.int64)
    targets = np.zeros((len(labels), len(feature.feature.names)), np.int8)
    for row, (target, ids) in enumerate(zip(targets, labels, strict=True)):
        if ids is None:
            raise UserError(f"row {row} has no list of labels. Without any, it needs an empty one.")
        target[ids] = 1
    return targets


def targets_of(rows: Dataset) -> NDArray[Any]:
    """Return the targets of all rows of a split."""
    return to_array(rows.features["label"], rows["label"][:])


def class_counts(rows: Dataset) -> NDArray[np.int64]:
    """Return how many images each class or label has."""
    targets, number = targets_of(rows), len(label_names(rows.features["label"]))
    return targets.sum(axis=0) if targets.ndim > 1 else np.bincount(targets, minlength=number)


def label_problems(rows: Dataset, *, weighted: bool, is_trained: bool) -> Iterator[str]:
    """Yield what to try if classes have few images.

    Rare classes are no problem if they are `weighted`, and few images none for a model that is trained already.
    """
    feature, counts = rows.features["label"], class_counts(rows)
    names = label_names(feature)
    rare, common = int(counts.argmin()), int(counts.argmax())
    if isinstance(feature, ClassLabel) and not weighted and counts[rare] * 10 < counts[common]:
        yield (
            f"{names[rare]!r} has {counts[rare]} training images, {names[common]!r} {counts[common]}: accuracy will "
            "hardly show the rare class. Try --class_weighting balanced, and compare the balanced accuracy on ten "
            "test images or more of each class."
        )
    if not is_trained and counts.mean() <= FEW_IMAGES:
        yield (
            f"There are {counts.mean():.0f} training images per class or label on average, too few for a new model. "
            "Start from a trained one: vit-scratch train finetune --data FOLDER --model MODEL."
        )


def split_names(text: str, separator: str) -> list[str]:
    """Return the labels that a cell of a table holds, also one such as `["cat", "night"]`."""
    return [name for part in text.split(separator) if (name := part.strip(" []\"'"))]


def is_valid(feature: Any, label: Any) -> bool:
    """Return whether a label is a known class, a list of such, or finite numbers."""
    if isinstance(label, dict):
        return all(value is not None and math.isfinite(value) for value in label.values())
    ids, number = label if isinstance(label, list) else [label], len(label_names(feature))
    return all(id is not None and 0 <= id < number for id in ids)


def encode_labels(
    data: str, source: Any, train: str, columns: list[str], complete: bool = True, separator: str | None = None
) -> Any:
    """Replace columns of labels by one column `label` of the types above, which the training rows choose.

    If they are `complete`, each label must have a training image. With a `separator`, a text is a list of labels.
    """
    features = [source[train].features[name] for name in columns]
    first = getattr(features[0], "feature", features[0])
    if len(columns) == 1 and isinstance(first, ClassLabel) and separator is None:
        return source if columns == ["label"] else source.rename_column(columns[0], "label")
    if not isinstance(source, DatasetDict):
        raise UserError(
            f"{data}: to stream, the column {columns[0]!r} must be of the type ClassLabel, which names the classes, "
            f"without --label_separator; it is {features[0]}. Leave --streaming out."
        )
    table = {split: _cells(rows, columns) for split, rows in source.items()}
    if all(value is None for row in table[train] for value in row):
        raise UserError(f"{data}: no row of {train} has a label. Fill the column, or choose another: --label_column.")
    for split, rows in table.items():
        if split != train and _holds(features[0], "int") and {*rows} == {(-1,)} and (-1,) not in table[train]:
            table[split] = [(None,)] * len(rows)  # it has no labels, as on the Hub
    is_list = len(columns) > 1 or hasattr(features[0], "feature")
    if not is_list and isinstance(first, Value) and any(isinstance(row[0], str) for row in chain(*table.values())):
        # In the table of one split, all names may look like numbers, or be true and false.
        table = {split: [(None if row[0] is None else str(row[0]),) for row in rows] for split, rows in table.items()}
        first = Value("string")
    held = ", ".join(f"{name!r} holds {one}" for name, one in zip(columns, features, strict=True))
    if separator is not None:
        if is_list or not _holds(first, "string"):
            raise UserError(f"{data}: label_separator is for one column of texts, but {held}. Leave it out.")
        for split, rows in table.items():  # an empty cell has none of the labels, but an empty column is not labelled
            empty: Any = [] if split == train or {*rows} != {(None,)} else None
            table[split] = [(split_names(row[0], separator) if row[0] else empty,) for row in rows]
        is_list = True
    if len(columns) > 1 and all(value in (0, 1, None) for row in chain(*table.values()) for value in row):
        lists: dict[str, list[Any]] = {
            split: [None if None in row else [*compress(columns, row)] for row in rows]
            for split, rows in table.items()
        }
        feature, labels = _number_names(data, train, lists, columns, complete)
    elif len(columns) == 1 and _holds(first, "string", "int", "bool"):
        lists = {split: [row[0] if is_list else row for row in rows] for split, rows in table.items()}
        feature, labels = _number_names(data, train, lists)
    elif any(_holds(one, "float") for one in features) and all(_holds(one, "float", "int") for one in features):
        feature = {name: Value("float64") for name in columns}
        labels = {split: [dict(zip(columns, row, strict=True)) for row in rows] for split, rows in table.items()}
    else:
        raise UserError(
            f"{data}: a label must be a name, a whole number, true or false, a list of these, or a decimal number. "
            f"Several columns must all hold 0 and 1, or decimal numbers such as 3.0. But {held}. Correct mixed types, "
            "or choose with --label_column."
        )
    if not is_list and not isinstance(feature, dict):
        feature, labels = feature.feature, {split: [row[0] for row in rows] for split, rows in labels.items()}
    return DatasetDict({
        split: rows.remove_columns(columns).add_column("label", labels[split], feature=feature)
        for split, rows in source.items()
    })  # fmt: skip


def refuse_other_classes(data: str, parts: dict[Any, Any], columns: Iterable[str]) -> None:
    """Refuse class ids that have other names in another split or file, by the features of each, if they are known."""
    for column in columns:
        names = {part: label_names(own[column]) for part, own in parts.items() if own and column in own}
        for part, found in names.items():
            first = next(iter(names))
            if found != names[first]:
                raise UserError(
                    f"{data}: in the column {column!r}, the classes of {part} are {found or 'not named'}, but those "
                    f"of {first} are {names[first] or 'not named'}. Write all with the same names, in the same order."
                )


def _number_names(
    data: str, train: str, lists: dict[str, list[Any]], names: list[Any] | None = None, complete: bool = True
) -> tuple[Any, dict[str, list[Any]]]:
    """Return the feature of lists of names, by default those of the training rows, and the lists of their numbers."""
    used = {split: {*chain(*(row or () for row in rows))} - {None} for split, rows in lists.items()}
    names = names or sorted(used[train])
    if complete and (unseen := {*names}.union(*used.values()) - used[train]):
        raise UserError(
            f"{data}: no image of {train} has the label {min(unseen, key=str)!r}. Add such images, or leave it out."
        )
    if decimals := [name for name in names if re.fullmatch(r"[+-]?\d*[.,]\d+", str(name))]:
        raise UserError(
            f"{data}: labels such as {decimals[0]!r} are decimal numbers in a column of texts. Write all with a "
            "point, and correct or delete other rows. If they are several labels, give --label_separator ','."
        )
    if any(len({*row}) < len(row) for row in lists[train] if row):
        raise UserError(
            f"{data}: a list of labels must name each once. For zeros and ones, use a column for each label instead."
        )
    ids = {name: number for number, name in enumerate(names)}
    numbers = {split: [row and [ids.get(name) for name in row] for row in rows] for split, rows in lists.items()}
    return List(ClassLabel(names=list(map(str, names)))), numbers


def _cells(rows: Dataset, columns: list[str]) -> list[tuple[Any, ...]]:
    """Return the rows of columns. Texts are composed (NFC), without blanks around them; blanks alone are missing."""
    return list(zip(*(map(_stripped, rows[name][:]) for name in columns), strict=True))


def _stripped(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_stripped, value)]
    return unicodedata.normalize("NFC", value.strip()) or None if isinstance(value, str) else value


def _holds(feature: Any, *kinds: str) -> bool:
    return isinstance(feature, Value) and any(kind in feature.dtype for kind in kinds)
