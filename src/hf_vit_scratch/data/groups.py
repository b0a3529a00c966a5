"""Images that belong together, near duplicates and the groups of `--group_by`, and splits that do not part them."""

import logging
import math
import os
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset
from numpy.typing import NDArray
from pyarrow import compute
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..errors import UserError, blame_the_files
from .images import local_path
from .near_duplicates import find_near_duplicates
from .options import DataArguments
from .tables import SPLIT_NAMES
from .targets import label_names, targets_of

logger = logging.getLogger(__name__)

LISTING = "_near_duplicates.csv"  # in the folder of a run; what begins with "_" is never uploaded
GROUP = "_group"  # name of the column


def keep_together(
    args: DataArguments, splits: dict[str, Dataset], listing: Path | None
) -> tuple[dict[str, Dataset], NDArray[Any]]:
    """Return splits of which no two have images of one group, and the group of each row of train.

    A group that is in several stays in the last one of train, validation and test. Near duplicates are one group;
    they are listed in a file, if there are any.
    """
    splits = {name: splits[name] for name in SPLIT_NAMES if name in splits}  # in this order
    places = np.repeat([*splits], [len(split) for split in splits.values()])
    kept, pairs = np.ones(len(places), bool), np.empty((0, 2), np.int64)
    if args.near_duplicates != "ignore":
        pairs = find_near_duplicates(splits.values())
        if args.near_duplicates == "drop":
            kept[pairs[:, 0]] = False
        if not len(pairs):
            logger.info("%s: no near duplicates were found.", args.data)
        else:
            _list_near_duplicates(args, splits, places, pairs, listing)
    if args.group_by is not None:
        named = [name for rows in splits.values() for name in _group_names(args, rows)]
        _, first, names = np.unique(named, return_index=True, return_inverse=True)
        pairs = np.concatenate((pairs, np.column_stack((np.arange(len(names)), first[names]))))
    graph = coo_array((np.ones(len(pairs), bool), pairs.T), shape=(len(places), len(places)))
    groups = connected_components(graph, directed=False)[1]
    for earlier, later in combinations(splits, 2):
        shared = kept & (places == earlier) & np.isin(groups, groups[kept & (places == later)])
        if shared.any():
            kept &= ~shared
            why = f"because {later} has images of the same groups, or near duplicates of them"
            logger.warning("%s: %d images of %s are not used, %s.", args.data, shared.sum(), earlier, why)
    for name, split in splits.items():
        kept_rows = np.flatnonzero(kept[places == name])
        if not len(kept_rows):
            raise UserError(
                f"{args.data}: all images of {name} are also in other splits, or in their groups. Give other splits, "
                "or --near_duplicates ignore."
            )
        splits[name] = split if len(kept_rows) == len(split) else split.select(kept_rows)
    return splits, groups[kept & (places == "train")]


def _group_names(args: DataArguments, rows: Dataset) -> list[str]:
    """Return the name of the group of each row."""
    by = str(args.group_by)
    if GROUP in rows.column_names:
        cells = pd.Series(rows[GROUP][:])
        names = cells.astype(str).str.strip()
        if missing := np.flatnonzero(cells.isna() | (names == "")).tolist():
            raise UserError(
                f"{args.data}: every image needs a group, but column {by!r} is empty in {len(missing)} rows, first "
                f"{paths_of(rows)[missing[0]] or f'row {missing[0]}'}. Fill it."
            )
        return [*names]
    with blame_the_files(f"group_by must be a column, a number or a regular expression, got {by!r}"):
        pattern = re.compile(rf"([^/]+)(/[^/]+){{{by}}}$" if by.isdecimal() and int(by) else by)
    names, root = list[str](), local_path(args.data)
    root = root.parent if root.is_file() else root
    for path in paths_of(rows):
        for above in (root, os.path.abspath(root)):  # as in tables
            path = path.removeprefix(f"{above}{os.sep}")
        match = pattern.search(path.replace(os.sep, "/"))
        group = match and (match[1] if pattern.groups else match[0])
        if group is None:
            raise UserError(
                f"{args.data}: every image needs a group, but group_by {by!r} is not a column, and finds none in "
                f"the path {path!r}. Choose another column, folder or expression."
            )
        names.append(group)
    return names


def paths_of(rows: Dataset) -> list[str]:
    """Return the path of each image, empty if it has none."""
    paths = compute.struct_field(rows.data.column("image"), "path")  # of the whole source; no bytes are read
    if rows._indices is not None:
        paths = paths.take(rows._indices.column(0))
    return [path or "" for path in paths.to_pylist()]


def _list_near_duplicates(
    args: DataArguments,
    splits: dict[str, Dataset],
    places: NDArray[Any],
    pairs: NDArray[np.int64],
    listing: Path | None,
) -> None:
    """Log how many near duplicates there are, and write them into a file."""
    one, other = pairs.T
    targets = np.concatenate([targets_of(rows) for rows in splits.values()])
    same = (targets[one] == targets[other]).reshape(len(pairs), -1).all(axis=1)
    across = places[one] != places[other]
    use = "One of each is used" if args.near_duplicates == "drop" else "They are kept on one side of a split"
    logger.warning(
        "%s: pairs of near duplicates: %d (%d in two splits, %d with different labels). %s%s.",
        args.data, len(pairs), across.sum(), (~same).sum(), use, f"; {listing} lists them" if listing else "",
    )  # fmt: skip
    if listing is not None:
        paths = [(row, path) for rows in splits.values() for row, path in enumerate(paths_of(rows))]
        names = np.array([path or f"image {row}" for row, path in paths], object)
        columns = {"image_1": names[one], "split_1": places[one], "image_2": names[other], "split_2": places[other]}
        table = pd.DataFrame(columns | {"same_label": same})
        listing.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(listing, index=False)


def cut_the_missing(args: DataArguments, splits: dict[str, Any], groups: NDArray[Any] | None, seed: int) -> None:
    """Cut validation and test from train if there are none, in whole groups, with the same share of every class."""
    source, fractions = "train", {"validation": args.validation_fraction, "test": args.test_fraction}
    if args.streaming:  # it cannot be cut: a half of validation serves as test, or the other way round
        source, fractions = "validation", {"test": 0.5}
        if source not in splits and "test" in splits:
            splits[source] = splits.pop("test")
        if source not in splits:
            raise UserError(
                f"{args.data}: a stream cannot be cut, so it needs a validation split. Choose one with "
                "--validation_split."
            )
    if (cut := sum(fraction for name, fraction in fractions.items() if name not in splits)) >= 1:
        what = "--validation_fraction and --test_fraction must add up to less than 1"
        raise UserError(f"{args.data}: {what}, got {cut:g}: no training image would be left. Give smaller ones.")
    rows = splits[source]
    counts, groups = np.bincount(_strata(rows)), np.arange(len(rows)) if groups is None else groups
    for name, fraction in fractions.items():
        if name not in splits:
            wanted = np.maximum(1, np.rint(fraction * counts).astype(int))
            is_cut = _choose(f"{args.data}: {source}", splits[source], groups, wanted, seed)
            splits[name] = splits[source].select(np.flatnonzero(is_cut))
            splits[source], groups = splits[source].select(np.flatnonzero(~is_cut)), groups[~is_cut]
            number, how = len(splits[name]), ", in whole groups" if args.group_by else ""
            share = 100 * number / len(rows)
            logger.info("%s: %d of %d images (%.0f%%) cut for %s%s", args.data, number, len(rows), share, name, how)
        # Classes after the last one of train have no training image either.
        number_of = np.bincount(_strata(splits[name]), minlength=len(counts))[: len(counts)]
        without = np.flatnonzero((number_of == 0) & (counts > 0))
        if without.size:
            names = [label_names(rows.features["label"])[place] for place in without]
            logger.warning(
                "%s: %s has no image of %s%s.",
                args.data, name, ", ".join(map(repr, names[:5])), ", ..." * (len(names) > 5),
            )  # fmt: skip


def _strata(rows: Dataset) -> NDArray[Any]:
    """Return the classes of the rows; 0 for all where a row has no single class."""
    targets = targets_of(rows)
    return targets if targets.ndim == 1 else np.zeros(len(targets), int)


def _choose(source: str, rows: Dataset, groups: NDArray[Any], wanted: NDArray[Any], seed: int) -> NDArray[np.bool_]:
    """Choose about `wanted[c]` rows of each class c, in whole groups, but leave one of each class.

    Groups come in random order. One is chosen if that brings the counts closer to those wanted. For a class that has
    no image then, the group is chosen that brings the counts least far from those wanted.
    """
    labels = _strata(rows)
    left = np.bincount(labels, minlength=len(wanted))
    if (alone := np.flatnonzero(left == 1)).size:
        names = label_names(rows.features["label"])
        are_numbers = all(name.lstrip("-").isdigit() for name in names)
        advice = " If they are quantities, write them with a decimal point, such as 3.0." if are_numbers else ""
        raise UserError(
            f"{source} has one image of {names[alone[0]]!r}, too few to cut another split from it. Add images, or "
            f"give splits of your own (folders train, val and test).{advice}"
        )
    _, group_of = np.unique(groups, return_inverse=True)
    order = group_of.argsort(kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(group_of[order])) + 1)
    wanted, chosen = np.minimum(wanted, left - 1), np.zeros(len(rows), bool)

    def choose(number: int) -> None:
        nonlocal wanted, left
        chosen[members[number]] = True
        counts = np.bincount(labels[members[number]], minlength=len(wanted))
        wanted, left = wanted - counts, left - counts

    def distance(number: int) -> float:
        """Return how much farther the counts come from those wanted; infinite if none of a class would be left."""
        classes, sizes = np.unique(labels[members[number]], return_counts=True)
        farther = (abs(wanted[classes] - sizes) - abs(wanted[classes])).sum()
        return float(farther) if (sizes < left[classes]).all() else math.inf

    for number in np.random.default_rng(seed).permutation(len(members)):
        if (wanted <= 0).all():
            break
        if distance(number) < 0:
            choose(number)
    for label in np.setdiff1d(np.flatnonzero(wanted > 0), labels[chosen]):
        if (labels[chosen] == label).any():  # by a group that was chosen for another class
            continue
        nearest = min(np.unique(group_of[labels == label]), key=distance)
        if distance(nearest) < math.inf:
            choose(nearest)
    if not chosen.any():
        raise UserError(
            f"{source}: none of the {len(members)} groups of images is small enough to be cut. Use larger fractions, "
            "other groups, --near_duplicates ignore, or splits of your own (folders train, val and test)."
        )
    return chosen
