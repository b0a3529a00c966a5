"""Tables of image paths and labels, CSV, JSON lines or parquet, as rows with an image column."""

import glob
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
from datasets import Dataset, DatasetDict, Features
from pyarrow import ArrowException, parquet

from ..errors import UserError, blame_the_files
from .images import SUFFIXES
from .options import DataArguments

# Names by which image collections mark their splits.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
SPLITS_BY_NAME = {name: split for split, names in SPLIT_NAMES.items() for name in names}


def _read_csv(file: Path, separator: str | None) -> Dataset:
    """Read a CSV file. Only blanks are missing, and leave whole numbers whole.

    Cells such as None, 007 and 1E1 stay texts, and so do lists with this separator, such as 1,2.
    """
    header = file.read_text(encoding="utf-8-sig").partition("\n")[0]
    options: Any = {"keep_default_na": False, "na_values": [""], "low_memory": False, "index_col": False}
    options["sep"] = max(",;\t", key=header.count)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # of cells that no column has, which would be lost
        text = pd.read_csv(file, dtype=str, **options)
    points = any(text[name].str.fullmatch(r"\s*[+-]?\d*\.\d+([eE][+-]?\d+)?\s*").any() for name in text)
    options["decimal"] = "," if options["sep"] != "," and not points else "."  # as some spreadsheets write it
    table = pd.read_csv(file, dtype_backend="numpy_nullable", **options)
    for name in table.select_dtypes("number"):
        several = separator is not None and text[name].str.contains(separator, regex=False).any()
        if several or text[name].str.match(r"\s*-?(0\d+\s*$|\d+[eE]\d)").any():
            table[name] = text[name]
    return Dataset.from_pandas(table.dropna(how="all").rename(columns=str.strip), preserve_index=False)


READERS: dict[str, Callable[[Path, str | None], Dataset]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": lambda file, separator: Dataset.from_json(glob.escape(str(file))),
    ".parquet": lambda file, separator: Dataset.from_parquet(glob.escape(str(file))),
}


def is_image(feature: Any) -> bool:
    """Return whether a column holds encoded images: of this type, or as other programs write them into parquet."""
    if isinstance(feature, dict) and {*feature} == {"bytes", "path"}:
        feature = feature["bytes"]
    return isinstance(feature, datasets.Image) or "binary" in getattr(feature, "dtype", "")


def holds_images(file: Path) -> bool:
    """Return whether a parquet file holds encoded images, or cannot be read: loading it says what is wrong."""
    with suppress(ArrowException, ValueError):
        return any(map(is_image, Features.from_arrow_schema(parquet.read_schema(file)).values()))
    return True


def find_tables(path: Path, folders: Iterable[Path]) -> list[Path]:
    """Return the table that a path is, or the files `metadata.*` in folders, as in image folders of the Hub.

    A parquet file that holds the images themselves is no table of paths.
    """
    if not path.is_file():
        files = [folder / f"metadata{suffix}" for folder in dict.fromkeys(folders) for suffix in READERS]
        return [file for file in files if file.is_file()]
    suffix = path.suffix.lower()
    is_table = suffix in READERS and not (suffix == ".parquet" and holds_images(path))
    return [path] if is_table else []


def load_tables(tables: Iterable[Path], root: Path, args: DataArguments) -> DatasetDict:
    """Load tables whose paths are relative to their own folders, as rows in the order of the paths.

    A row belongs to the split that its column `split` names, else to that of the first folder below the root, on the
    way to its image, that has the name of a split, else to train.
    """
    splits: dict[str, Dataset] = {}
    for table in tables:
        with blame_the_files(
            f"{table} cannot be read as a table in UTF-8, with one type in each column, as many cells in a row as in "
            "the header, and quotes around texts with commas"
        ):
            rows = READERS[table.suffix.lower()](table, args.label_separator)
        if not len(rows):
            raise UserError(f"{table} has no rows. Add one for each image.")
        # The Hub's name, or the only column that begins with an image's path.
        with_paths = ["file_name"] if "file_name" in rows.column_names else [
            name for name, value in rows[0].items() if os.path.splitext(str(value))[1].lower() in SUFFIXES
        ]  # fmt: skip
        (column,) = find_columns(replace(args, data=str(table)), "image", with_paths, rows.column_names)
        if missing := [row for row, name in enumerate(rows[column][:]) if name is None]:
            raise UserError(
                f"{table}: {len(missing)} rows have no path in the column {column!r}, the first is row "
                f"{missing[0] + 1}. Fill or delete them."
            )
        paths = [os.path.abspath(table.parent / str(name)) for name in rows[column][:]]
        order = sorted(range(len(paths)), key=lambda row: paths[row].split(os.sep))
        paths = [paths[row] for row in order]
        if twice := [path for path, following in pairwise(paths) if path == following]:
            raise UserError(
                f"{table}: {twice[0]} has two rows, but an image must have one. Give several labels in columns of "
                "0 and 1, in one cell with --label_separator, or as a list in JSON lines."
            )
        features = Features({**rows.features, column: datasets.Image()})
        rows = Dataset.from_dict({**rows[order], column: paths}, features=features)
        inside = os.path.join(os.path.abspath(root), "")
        folders = [path[len(inside) :].lower().split(os.sep)[:-1] * path.startswith(inside) for path in paths]
        names = [next((name for name in above if name in SPLITS_BY_NAME), "train") for above in folders]
        found = divide(str(table), rows) or _divide(rows, names)
        if twice := sorted(found.keys() & splits.keys()):
            raise UserError(f"{table} lists images of {twice[0]}, and so does another metadata file. Delete one.")
        splits |= found
    return DatasetDict(splits)


def divide(data: str, rows: Dataset) -> dict[str, Dataset]:
    """Return the splits that the column `split` names; none if there is no such column, in whatever case."""
    column = next((name for name in rows.column_names if name.lower() == "split"), None)
    if column is None:
        return {}
    names = ["" if name is None else str(name).strip().lower() for name in rows[column][:]]
    if unknown := {*names} - SPLITS_BY_NAME.keys():
        raise UserError(
            f"{data}: the column split must hold train, validation or test, got {min(unknown)!r}. Correct or "
            "rename it."
        )
    return _divide(rows.remove_columns(column), names)


def _divide(rows: Dataset, names: list[str]) -> dict[str, Dataset]:
    splits = pd.Series(names).map(SPLITS_BY_NAME)
    return {str(split): rows.select(places) for split, places in splits.groupby(splits).indices.items()}


def find_columns(args: DataArguments, what: str, found: list[str], possible: Iterable[str]) -> list[str]:
    """Return the chosen columns of images or labels, or the only one that was found."""
    chosen = getattr(args, f"{what}_column")
    chosen = [chosen] if isinstance(chosen, str) else [*dict.fromkeys(chosen or ())]
    if not chosen and len(found) != 1:
        known = f"no column holds {what}s" + " or paths such as cat/1.jpg" * (what == "image")
        problem = f"{' and '.join(found)} may hold the {what}s" if found else f"{known}, or has a known name"
        columns = sorted(possible)
        advice = f"Choose one of {columns} with --{what}_column." if columns else f"Add a column of {what}s."
        raise UserError(f"{args.data}: {problem}. {advice}")
    if unknown := [name for name in chosen if name not in possible]:
        raise UserError(
            f"{args.data}: there is no {what} column {unknown[0]!r}, only {sorted(possible)}. Choose with "
            f"--{what}_column."
        )
    return chosen or found
