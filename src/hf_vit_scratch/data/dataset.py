"""Images and labels in batches: decoded, augmented, mixed and normalized."""

import functools
import hashlib
import logging
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms.v2 import functional as TF
from transformers import ViTImageProcessor, default_data_collator
from transformers.image_utils import SizeDict

from ..errors import UserError
from ..speed.hardware import keep_freed_memory
from .augmentation import Augmentation
from .images import decode_image, map_images, mean_and_std, refuse_other_preprocessing, size_and_mode
from .mixup import Mixup
from .sampler import Sample
from .targets import targets_of
from .transforms import SampleRNG, random_resized_crop

logger = logging.getLogger(__name__)

# Decoded images are kept up to this many bytes per split: Tiny ImageNet (1.2 GB), but not ImageNet.
DECODED_BYTES_KEPT = 2 * 2**30
# Images from which random parts are cut are kept larger than model inputs by this factor, so that parts stay sharp.
CROP_MARGIN = 1.5
# Other devices lack some of the operations, so their batches are transformed on the CPU.
TRANSFORM_DEVICES = ("cpu", "cuda")


@dataclass
class BatchTransform:
    """Turn images into the model's inputs.

    Datasets call `decode` and `to_stage_size`, perhaps in worker processes. Calling it does the rest to a whole batch,
    on its device: augment, mix and normalize. Random numbers depend on (seed, epoch, image) only.

    Args:
        image_processor: Resizes and normalizes.
        stages: Augmentation of each stage of training; `None` if its images are neither changed nor mixed.
        mixing: Makes the targets of training in all stages. `Augmentation.mixes` says whether a stage mixes images.
        seed: Seed of augmentation and mixing.

    Raises:
        UserError: The image processor does something else, such as cropping; or there is mixing without stages.
    """

    image_processor: ViTImageProcessor
    stages: Sequence[Augmentation | None] = ()
    mixing: Mixup | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_other_preprocessing(self.image_processor)
        if self.mixing is not None and not self.stages:
            raise UserError("mixing needs the stages of training: those of training_stages, for example.")

    def image_size(self, stage: int | None) -> tuple[int, int]:
        """Return the height and width of the model's inputs in a stage, in pixels."""
        size = self.image_processor.size
        augmentation = None if stage is None else self.stages[stage]
        return (size["height"], size["width"]) if augmentation is None else augmentation.image_size

    def kept_size(self) -> tuple[int, int]:
        """Return the height and width of images that are kept: the largest, or more if parts are cut from them."""
        crops = any(augmentation.random_resized_crop_scale for augmentation in filter(None, self.stages))
        sizes = [self.image_size(stage) for stage in (None, *range(len(self.stages)))]
        height, width = (max(lengths) for lengths in zip(*sizes, strict=True))
        return (round(CROP_MARGIN * height), round(CROP_MARGIN * width)) if crops else (height, width)

    @property
    def enough(self) -> int | None:
        """Pixels per side to which `decode_image` may reduce a large image."""
        # Without augmentation the pixels must be exactly those of transformers' pipeline, which reduces nothing first.
        return 2 * max(self.kept_size()) if any(self.stages) else None

    def decode(self, encoded: dict[str, Any] | None, name: str) -> Tensor:
        """Decode an image by `decode_image`: uint8 (3, height, width)."""
        return TF.pil_to_tensor(decode_image(encoded, name, enough=self.enough))

    def resize(self, images: Tensor, size: tuple[int, int]) -> Tensor:
        """Resize images to a height and width, as the image processor does: uint8 (B, 3, height, width)."""
        new = SizeDict(height=size[0], width=size[1])
        return self.image_processor.resize(images, new, resample=self.image_processor.resample)

    def to_stage_size(self, images: Tensor, keys: NDArray[np.uint64], stage: int | None) -> Tensor:
        """Bring decoded images to the size of a stage, by a random resized crop or whole: uint8 (B, 3, ...)."""
        augmentation = None if stage is None else self.stages[stage]
        scale = None if augmentation is None else augmentation.random_resized_crop_scale
        if scale is None:
            return self.resize(images, self.image_size(stage))
        return random_resized_crop(images, self.rng(keys, "cropping"), self.image_size(stage), scale)

    def rng(self, keys: NDArray[np.uint64], purpose: str) -> SampleRNG:
        """Return one generator per image. Its seed is made of `seed`, the image's row of `keys`, and the purpose."""
        number = ("augmentation", "mixing", "masking", "cropping").index(purpose)
        return SampleRNG([(self.seed, *key, number) for key in keys.tolist()])

    def normalize(self, images: Tensor) -> Tensor:
        """Rescale and normalize pixels as the image processor does, but a whole batch on its device."""
        mean, std = (x.to(images.device, non_blocking=True) for x in mean_and_std(self.image_processor))
        return (images.float() - mean).div_(std)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Turn a batch of `ImageClassificationDataset` into the model's inputs, without `keys` and `stage`.

        `pixel_values` are float (B, 3, height, width). `labels` are targets of `targets.py`; in training, `Mixup` may
        make class probabilities of them.
        """
        batch = dict(batch)
        keys, stage = batch.pop("keys"), batch.pop("stage")
        device = batch["pixel_values"].device
        images = batch["pixel_values"].to(device if device.type in TRANSFORM_DEVICES else "cpu")
        # In evaluation there is no stage. A stage without augmentation is still training, which smooths labels.
        augmentation = None if stage is None else self.stages[stage]
        if augmentation is not None:
            images = augmentation(images, self.rng(keys, "augmentation"))
        if stage is not None and self.mixing is not None and "labels" in batch:
            rng = self.rng(keys, "mixing") if augmentation is not None and augmentation.mixes else None
            images, labels = self.mixing(images, batch["labels"].to(images.device), rng)
            batch["labels"] = labels.to(device)
        return batch | {"pixel_values": self.normalize(images).to(device)}


class ImageClassificationDataset(torch.utils.data.Dataset):
    """Rows of a dataset in batches of decoded images, which `batch_transform` then turns into the model's inputs.

    A batch holds `pixel_values`, uint8 (B, 3, height, width) of the size of the stage; `labels`, targets of
    `targets.py`; `keys`, NumPy integers (B, 2) of (`Sample.epoch`, row); and `stage`, the number of the training
    stage, `None` in evaluation. Its data loader needs `collate`. Pixels do not depend on the worker. For a subset,
    select rows first: `torch.utils.data.Subset` hides `batch_transform`.

    Args:
        rows: A split of `load_splits`, or other rows with a column `image` and a column `label` as in `targets.py`.
        batch_transform: Makes the model's inputs; for evaluation, without stages. Its image processor is saved with
            the model, so that a pipeline sees what the model was evaluated on.
        cache_images: Whether `keep_decoded` keeps images in a file if they are too many for memory.
    """

    def __init__(self, rows: Dataset, batch_transform: BatchTransform, cache_images: bool = False):
        if missing := {"image", "label"} - {*rows.column_names}:
            raise UserError(f"rows must have the columns image and label, but there is no {' and no '.join(missing)}.")
        self.rows = rows.cast_column("image", datasets.Image(decode=False))
        self.batch_transform = batch_transform
        self.image_processor = batch_transform.image_processor
        self.cache_images = cache_images
        self.labels = torch.from_numpy(targets_of(rows))
        self._kept: Tensor | Path | None = None  # uint8 images (N, height, width, 3), or their file
        self._is_in_memory: bool | None = None  # unknown yet

    def __len__(self) -> int:
        return len(self.rows)

    def _size_to_keep(self) -> tuple[int, int]:
        """Return the height and width of kept images: that of `BatchTransform`, or a smaller one that all have."""
        height, width = self.batch_transform.kept_size()
        own: tuple[int, int] | None = None
        for (w, h), _ in map_images(lambda index, encoded: size_and_mode(encoded, f"image {index}"), self.rows):
            own = own or (h, w)
            if (h, w) != own or h >= height or w >= width:
                return height, width
        return own or (height, width)

    def keep_decoded(self, device: torch.device) -> bool:
        """Decode all images once and keep them, in memory or in a file; return whether they are in memory.

        Up to `DECODED_BYTES_KEPT`, they are in memory: on the device of the first call, or on the CPU if that has no
        room or is not one of `TRANSFORM_DEVICES`. More are kept in a file if `cache_images` is set, or not at all.

        Raises:
            UserError: An image cannot be decoded.
        """
        if self._is_in_memory is None:
            height, width = self._size_to_keep()
            shape = (len(self), height, width, 3)
            fits = math.prod(shape) <= DECODED_BYTES_KEPT
            how = "decoded again for each batch"
            if fits:
                images = torch.empty(shape, dtype=torch.uint8)
                self._decode_into(images)
                if device.type in TRANSFORM_DEVICES:
                    with suppress(torch.OutOfMemoryError):
                        images = images.to(device)
                self._kept = images
                how = f"kept on {images.device}, so that worker processes are not needed"
            elif self.cache_images:
                self._kept = self._keep_in_file(shape)
                how = f"kept in {self._kept}"
            if self.batch_transform.stages:  # log the training images only
                megabytes = math.prod(shape) / 1e6
                logger.info("Training images of %dx%d pixels (%.4g MB) are %s.", width, height, megabytes, how)
            self._is_in_memory = fits  # last, so that a call after an error tries again
        return self._is_in_memory

    def _keep_in_file(self, shape: tuple[int, int, int, int]) -> Path:
        """Decode all images into a file, unless an earlier run did.

        The file is in the cache of `datasets`. Its name follows from the shape, the filter of resizing, how far
        large images are reduced, and the encoded images of the rows, or the paths, sizes and times of their files.
        """
        digest = hashlib.sha256(repr((shape, self.image_processor.resample, self.batch_transform.enough)).encode())
        for identity in map_images(lambda index, encoded: _identity(encoded), self.rows.select_columns("image")):
            digest.update(identity)
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_vit_scratch"
        file = folder / f"{digest.hexdigest()[:16]}.npy"
        if not file.exists():  # if it does, the folder may be shared and read-only
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_suffix(".lock")):  # one process decodes, and the others wait
                if not file.exists():
                    self._decode_into_file(file, shape)
        return file

    def _decode_into_file(self, file: Path, shape: tuple[int, int, int, int]) -> None:
        unfinished = file.with_suffix(".part")
        unfinished.unlink(missing_ok=True)  # of an attempt that was killed
        needed, free = math.prod(shape), shutil.disk_usage(file.parent).free
        if needed > free:
            raise UserError(
                f"--cache_images needs {needed / 1e9:.1f} GB in {file.parent}, where {free / 1e9:.1f} GB are free. "
                "Set HF_DATASETS_CACHE to a folder on a larger disk, or leave --cache_images out."
            )
        logger.info("Decoding %d images into %s (%.1f GB), once.", len(self), file, needed / 1e9)
        try:
            images = np.lib.format.open_memmap(unfinished, "w+", np.uint8, shape)
            self._decode_into(torch.from_numpy(images))
            images.flush()  # or a power cut could leave the file's name without its pixels
            del images  # Windows renames no open file
            unfinished.rename(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def _decode_into(self, images: Tensor) -> None:
        """Decode and resize all images into a tensor (N, height, width, 3)."""
        size = (images.shape[1], images.shape[2])

        def decode(index: int, encoded: dict[str, Any]) -> None:
            image = self.batch_transform.decode(encoded, f"image {index}")
            images[index] = self.batch_transform.resize(image[None], size)[0].permute(1, 2, 0)

        for _ in map_images(decode, self.rows):
            pass

    def __getitem__(self, key: int | Sample) -> dict[str, Any]:
        """Return a batch of one image: as in evaluation, or as a `Sample` of `EpochSampler` says."""
        return self.__getitems__([key])

    def __getitems__(self, items: Sequence[int | Sample]) -> dict[str, Any]:
        """Return the batch of these rows, as a data loader asks for it."""
        if get_worker_info() is not None:  # not by `worker_init_fn`, which the stock Trainer sets
            set_up_worker_process()
        places = range(len(self))  # negative numbers count from the end; one out of range raises an IndexError
        samples = [item if isinstance(item, Sample) else Sample(0, stage=None, row=places[item]) for item in items]
        indices = [sample.row for sample in samples]
        keys = np.array([(sample.epoch, sample.row) for sample in samples], np.uint64)
        stage = samples[0].stage if self.batch_transform.stages else None  # one for the whole batch
        if self._kept is not None:
            images = self.batch_transform.to_stage_size(_read(self._kept, indices), keys, stage).contiguous()
        else:
            rows = zip(self.rows[indices]["image"], indices, strict=True)
            decoded = (self.batch_transform.decode(encoded, f"image {row}")[None] for encoded, row in rows)
            pairs = zip(decoded, keys, strict=True)
            images = torch.cat([self.batch_transform.to_stage_size(image, key[None], stage) for image, key in pairs])
        labels = self.labels[indices].to(images.device, non_blocking=True)
        return {"pixel_values": images, "labels": labels, "keys": keys, "stage": stage}

    def sample(self, size: int, seed: int, stage: int | None = -1) -> dict[str, Any]:
        """Return up to `size` random images as the model's inputs, in a stage or, for `None`, in evaluation.

        The default is the last stage, which has no augmentation if `training_stages` has made it.
        """
        rows = np.random.default_rng(seed).permutation(len(self))[:size].tolist()
        return self.batch_transform(self.__getitems__([Sample(0, stage, row) for row in rows]))


def _read(kept: Tensor | Path, indices: list[int]) -> Tensor:
    """Return kept images (B, 3, height, width), on their device."""
    # "c" is copy-on-write: torch sees an array that it may write to, and the file stays as it is.
    images = torch.from_numpy(np.load(kept, mmap_mode="c")) if isinstance(kept, Path) else kept
    places = torch.tensor(indices).to(images.device, non_blocking=True)
    return images.index_select(0, places).permute(0, 3, 1, 2)


def _identity(encoded: dict[str, Any] | None) -> bytes:
    """Return bytes that tell an encoded image from others: of its content, or the path, size and time of its file."""
    content, path = (None, None) if encoded is None else (encoded["bytes"], encoded["path"])
    if content is not None:
        return hashlib.sha256(content).digest()
    if path is None or not os.path.isfile(path):
        return b""  # decoding raises the error
    stat = os.stat(path)
    return f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape")


def collate(batch: Any) -> Any:
    """Return a batch of `ImageClassificationDataset` as it is, and rows as the Trainer collates them."""
    return batch if isinstance(batch, dict) else default_data_collator(batch)


@functools.cache  # once in each worker process
def set_up_worker_process() -> None:
    """Prepare a worker process of a data loader before its first batch.

    It ignores Ctrl-C, and any SIGTERM that its main process did not send. Terminals and schedulers send signals to the
    whole job, but the main process still needs batches to finish its step. The SIGTERM of the main process must work,
    because multiprocessing ends leftover workers by it after an exception. In a worker that is spawned instead of
    forked, an earlier thread may take a SIGTERM of others, which then ends the worker.
    """
    keep_freed_memory()  # so that a batch reuses the memory of the one before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = multiprocessing.parent_process()  # os.getppid() may be the server that forked this process
    if main is None or not hasattr(signal, "sigwaitinfo"):  # macOS does not tell the sender
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()
