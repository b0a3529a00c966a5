"""Decoded images that are kept, in memory or in a file, so that each is decoded once."""

import hashlib
import logging
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor

from ..errors import UserError
from .images import BLOCK

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int, int]  # images, height, width, 3: the order in which crops are fast
KeptImages = Tensor | Path  # uint8 images of a shape, or the .npy file that holds them


def read(kept: KeptImages, indices: list[int]) -> Tensor:
    """Return images (B, 3, height, width), on their device. Each process, and each worker, maps a file anew."""
    images = torch.from_numpy(np.load(kept, mmap_mode="c")) if isinstance(kept, Path) else kept
    places = torch.tensor(indices).to(images.device, non_blocking=True)
    return images.index_select(0, places).permute(0, 3, 1, 2)


def keep_in_memory(shape: Shape, decode_into: Callable[[Tensor], None], device: torch.device) -> Tensor:
    """Let a function decode all images into a tensor, and move it to the device if that has enough memory."""
    images = torch.empty(shape, dtype=torch.uint8)
    decode_into(images)
    with suppress(torch.OutOfMemoryError):
        images = images.to(device)
    return images


def keep_in_file(shape: Shape, decode_into: Callable[[Tensor], None], rows: Dataset, resample: Any) -> Path:
    """Let a function decode all images into a file, unless an earlier run did.

    The file is in the cache of `datasets`. Its name follows from the shape, the filter of resizing, and the encoded
    images of the rows, or the paths, sizes and times of their files.

    Raises:
        UserError: The disk has not enough space.
    """
    digest = hashlib.sha256(repr((shape, resample)).encode())
    for start in range(0, len(rows), BLOCK):
        for row in rows.select_columns("image")[start : start + BLOCK]["image"]:
            digest.update(_identity(row))
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_vit_scratch"
    file = folder / f"{digest.hexdigest()[:16]}.npy"
    with PartialState().local_main_process_first():
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            needed, free = math.prod(shape), shutil.disk_usage(folder).free
            if needed > free:
                raise UserError(
                    f"--cache_images needs {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free. Set "
                    "HF_DATASETS_CACHE to a folder on a larger disk, or leave --cache_images out."
                )
            logger.info("Decoding %d images into %s (%.1f GB), once.", len(rows), file, needed / 1e9)
            aside = file.with_suffix(f".{os.getpid()}")
            try:
                decode_into(torch.from_numpy(np.lib.format.open_memmap(aside, "w+", np.uint8, shape)))
                aside.rename(file)
            finally:
                aside.unlink(missing_ok=True)
    return file


def _identity(row: dict[str, Any] | None) -> bytes:
    """Return what changes when an encoded image changes."""
    if row is None:
        return b""  # decoding will name it
    if row["bytes"] is not None:
        return hashlib.sha256(row["bytes"]).digest()
    stat = os.stat(row["path"])
    return f"{row['path']} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape")
