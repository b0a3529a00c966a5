"""Image files: which of a folder's files they are, and how one is opened and decoded."""

import io
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import datasets
import joblib
import numpy as np
import torch
from datasets import Dataset
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.Image import Resampling
from torch import Tensor

from ..errors import UserError
from .exported import to_rgb

logger = logging.getLogger(__name__)

ADVICE = " Correct, replace or delete it, or leave such images out by --corrupt_images skip."
Result = TypeVar("Result")
SUFFIXES = frozenset([*ImageFolder.EXTENSIONS, ".avif"])  # which datasets' list, older than Pillow's reader, lacks
MAX_PIXELS = 64_000_000  # of an image, which takes 0.9 GB while it is decoded and resized
# Smaller images are decoded one after the other, because threads would spend the time on waiting for Python's lock
# (benchmarks/2026-11-25_data_path.md).
PIXELS_FOR_THREADS = 250**2
BLOCK = 100  # encoded images that are in memory at once; a photograph may have 10 MB


def local_path(name: str) -> Path:
    """Return the path that a user means: `~` alone or before a user's name is a home directory."""
    return Path(os.path.expanduser(name))  # `Path.expanduser` fails for other names that begin with ~


def is_local(name: str) -> bool:
    """Return whether a name is that of a local file or folder, even if there is none, and not one on the Hub.

    `runs/digits` may be either; beside a folder `runs` it is local.
    """
    path, could_be_on_the_hub = local_path(name), re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
    return path.exists() or not could_be_on_the_hub or (path.parent != Path() and path.parent.is_dir())


def find_image_files(folder: Path, folder_links: str = "skip", warn: bool = False) -> tuple[list[Path], list[str]]:
    """Return the images in a folder, however deep, by their suffixes, and the paths of other files.

    Files and folders whose name begins with a dot are in neither. Links to folders are left out (`"skip"`), followed
    to each folder once (`"follow"`), or a `UserError` (`"refuse"`). The last two refuse a folder that cannot be read,
    which is otherwise left out, on demand with a warning.
    """

    def blame(error: OSError) -> None:
        problem = f"{error.filename} cannot be read: {error.strerror}. Its images"
        if folder_links != "skip" and not isinstance(error, FileNotFoundError):  # a split may lack a class
            raise UserError(f"{problem} would be left out.") from error
        if warn:
            logger.warning("%s are left out.", problem)

    found, others, seen = list[str](), list[str](), {os.path.realpath(folder)}
    for parent, folders, names in os.walk(folder, onerror=blame, followlinks=folder_links == "follow"):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if folder_links == "follow":  # a link may lead upwards
            real = {os.path.realpath(Path(parent, name)): name for name in folders}
            folders[:] = [name for path, name in real.items() if path not in seen]
            seen |= real.keys()
        elif folder_links == "refuse" and (links := [name for name in folders if Path(parent, name).is_symlink()]):
            path = Path(parent, links[0])
            raise UserError(f"{path} leads to {path.resolve()}. If this is intended, add --follow_links true.")
        for name in names:
            if not name.startswith("."):
                is_image = os.path.splitext(name)[1].lower() in SUFFIXES
                (found if is_image else others).append(os.path.join(parent, name))
    # In the order of paths, but as strings, for there may be a million.
    return [Path(path) for path in sorted(found, key=lambda path: path.split(os.sep))], others


def warn_of_others(folder: Path, others: list[str]) -> None:
    """Log which files of a folder are not used, by the second result of `find_image_files`, with one of each kind."""
    kinds: dict[str, list[str]] = {}
    for file in sorted(others):
        kinds.setdefault(os.path.splitext(file)[1].lower() or "without a suffix", []).append(file)
    if commonest := sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:5]:
        listed = (f"{len(files)} {suffix} ({os.path.relpath(files[0], folder)})" for suffix, files in commonest)
        logger.warning(
            "%s: files left out: %s. If they are images, save them as JPEG or PNG.", folder, ", ".join(listed)
        )


@contextmanager
def open_image(row: dict[str, Any] | None, name: str) -> Iterator[Image.Image]:
    """Open an encoded image, a row of `datasets.Image(decode=False)`. Its pixels are read when they are needed.

    Raises:
        UserError: It cannot be opened, or what is done with it fails. An image without a path is called by its name.
    """
    path, content = (None, None) if row is None else (row["path"], row["bytes"])
    if path is None and content is None:
        raise UserError(f"{name} is missing: its row holds no image. Delete or fill the row.")
    try:
        with warnings.catch_warnings():
            # A palette with transparency, or slightly damaged EXIF data: the image is fine.
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # ours comes before it
            source: Any = path if content is None else io.BytesIO(content)
            with Image.open(source) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise UserError(f"{image.width}x{image.height} are more than {MAX_PIXELS / 1e6:g} million pixels")
                yield image
    except Exception as error:  # Pillow's decoders raise many types on damaged data, even NotImplementedError
        reason = " ".join(str(error).split())
        raise UserError(f"{path or name} cannot be decoded as an image ({reason}).{ADVICE}") from error


def decode_image(row: dict[str, Any] | None, name: str, enough: int | None = None) -> Image.Image:
    """Decode an encoded image by `to_rgb`.

    Where `enough` pixels on each side are sufficient, a larger image is reduced by a whole factor. A JPEG file is then
    decoded in a fraction of the time.

    Raises:
        UserError: It cannot be decoded, or `to_rgb` refuses it.
    """
    with open_image(row, name) as image:
        if enough is not None:
            image.draft(None, (enough, enough))  # without effect on other formats
        image = to_rgb(image)
        factor = 1 if enough is None else min(image.size) // (2 * enough)
        return image.reduce(factor) if factor > 1 else image


def size_and_mode(row: dict[str, Any] | None, name: str) -> tuple[tuple[int, int], str]:
    """Return the width and height of an image in pixels, upright, and its mode; arguments as in `open_image`."""
    with open_image(row, name) as image:
        # Pillow turns the size of a TIFF file itself.
        lies_on_its_side = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        return (image.size[::-1] if lies_on_its_side else image.size), image.mode


def map_images(function: Callable[[int, dict[str, Any]], Result], rows: Dataset) -> Iterator[Result]:
    """Yield what a function returns for the number and the encoded image of each row, by several threads."""
    rows, is_large = rows.cast_column("image", datasets.Image(decode=False)), False
    with suppress(UserError):  # which the function raises, if it needs that image
        is_large = math.prod(size_and_mode(rows[0]["image"], name="image 0")[0]) >= PIXELS_FOR_THREADS
    # `open_image` changes the filters of warnings, which threads share: they are restored at the end.
    with warnings.catch_warnings(), ThreadPoolExecutor(joblib.cpu_count()) as pool:
        in_turn: Any = pool.map if is_large else map
        for start in range(0, len(rows), BLOCK):
            numbers = range(start, min(start + BLOCK, len(rows)))
            yield from in_turn(function, numbers, rows[numbers]["image"])  # raises what a thread raised


def images_of(rows: Dataset) -> Iterator[Image.Image]:
    """Yield the decoded images of a dataset, one after the other."""
    encoded = rows.cast_column("image", datasets.Image(decode=False))
    for number in range(len(rows)):
        yield decode_image(encoded[number]["image"], f"image {number}")


def mean_and_std(image_processor: Any) -> tuple[Tensor, Tensor]:
    """Return what normalizing takes off pixels from 0 to 255, and what it divides them by, (C, 1, 1) or (1, 1, 1)."""
    numbers = (image_processor.image_mean, image_processor.image_std) if image_processor.do_normalize else (0.0, 1.0)
    scale = 1 / image_processor.rescale_factor if image_processor.do_rescale else 1.0
    mean, std = (torch.tensor(one).reshape(-1, 1, 1) * scale for one in numbers)
    return mean, std


def denormalize(pixel_values: Tensor, image_processor: Any) -> NDArray[np.uint8]:
    """Return what an image processor has prepared as pixels.  (..., C, height, width) -> (..., height, width, C)."""
    mean, std = mean_and_std(image_processor)
    pixels = pixel_values.detach().float().cpu() * std + mean
    return pixels.round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()


def refuse_other_preprocessing(image_processor: Any) -> None:
    """Refuse an image processor that does more than resize, by bilinear or bicubic interpolation, and normalize."""
    options = image_processor.to_dict()
    wrong = [name for name in ("do_center_crop", "do_pad") if options.get(name)]
    resizes = options.get("do_resize") and {*(options.get("size") or ())} == {"height", "width"}
    wrong += [] if resizes else ["size"]
    wrong += [] if options.get("resample") in (Resampling.BILINEAR, Resampling.BICUBIC) else ["resample"]
    if wrong:
        listed = ", ".join(f"{name} {options.get(name)}" for name in wrong)
        raise UserError(
            "Training, `evaluate` and `export` only resize and normalize images, but this image processor has "
            f"{listed}. Use `vit-scratch predict`, or export the model alone (docs/guides/tools.md)."
        )
