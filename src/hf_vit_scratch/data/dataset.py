"""Images and labels in batches: decoded, augmented, mixed and normalised."""

import functools
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import datasets
import joblib
import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import ViTImageProcessor, default_data_collator

from ..speed.hardware import keep_freed_memory
from .augmentation import Augmentation
from .images import decode_image, size_and_mode
from .mixup import Mixup
from .sampler import Sample
from .transforms import SampleRNG

logger = logging.getLogger(__name__)

# Decoded images are kept up to this many bytes per split: Tiny ImageNet (1.2 GB), but not ImageNet.
DECODED_BYTES_KEPT = 2 * 2**30
# Images from which random parts are cut are kept larger than the model's by this factor, so that parts stay sharp.
KEPT_FOR_CROPS = 1.5
# Other devices lack some of the operations, so their batches are transformed on the CPU.
TRANSFORM_DEVICES = ("cpu", "cuda")


@dataclass
class BatchTransform:
    """Turn decoded images into the model's inputs: augment, mix, resize and normalise whole batches.

    This happens on the device of the images. Random numbers depend on (seed, epoch, image) only.

    Args:
        image_processor: Normalises, and resizes images that are not augmented.
        stages: Augmentation of each stage of training; `None` for a stage without augmentation and mixing.
        mixing: Makes the targets of training. In stages without augmentation it smooths them only.
        seed: Seed of augmentation and mixing.
    """

    image_processor: ViTImageProcessor
    stages: Sequence[Augmentation | None] = ()
    mixing: Mixup | None = None
    seed: int = 0

    @property
    def is_random(self) -> bool:
        """Whether a stage augments images."""
        return any(stage is not None for stage in self.stages)

    def image_size(self, stage: int | None) -> tuple[int, int]:
        """Return the height and width of the model's inputs in a stage, in pixels."""
        augmentation = None if stage is None else self.stages[stage]
        size = self.image_processor.size
        return (size["height"], size["width"]) if augmentation is None else augmentation.image_size

    def decoded_size(self) -> tuple[int, int]:
        """Return the height and width to decode images to: the model's, or larger if parts are cut from them."""
        crops = any(stage is not None and stage.random_resized_crop_scale for stage in self.stages)
        height, width = self.image_size(None)
        return (round(KEPT_FOR_CROPS * height), round(KEPT_FOR_CROPS * width)) if crops else (height, width)

    def decode(self, row: dict[str, Any] | None, name: str, size: tuple[int, int]) -> Tensor:
        """Decode an image as in `decode_image` and resize it to a height and width: uint8 (3, height, width)."""
        # Evaluation sees the pixels of a pipeline. Training may take the smaller versions that a JPEG file holds.
        image = decode_image(row, name, enough=2 * max(size) if self.is_random else None)
        height_and_width = dict(zip(("height", "width"), size, strict=True))
        resized = self.image_processor(
            image, size=height_and_width, do_rescale=False, do_normalize=False, return_tensors="pt"
        )
        return resized["pixel_values"][0]

    def rng(self, keys: NDArray[np.uint64], purpose: str) -> SampleRNG:
        """Return a generator per image, seeded by the seed, its keys (B, 2) of epoch and image, and the purpose."""
        number = ("augmentation", "mixing", "masking").index(purpose)
        return SampleRNG([(self.seed, *key, number) for key in keys.tolist()])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs of a batch of `ImageClassificationDataset`, with its other entries.

        `pixel_values` are float (B, 3, height, width). `labels` are class ids (B,), or in training also probabilities
        (B, L).
        """
        batch = dict(batch)
        keys, stage = batch.pop("keys"), batch.pop("stage")
        device = batch["pixel_values"].device
        images = batch["pixel_values"].to(device if device.type in TRANSFORM_DEVICES else "cpu")
        augmentation = None if stage is None else self.stages[stage]
        if augmentation is not None:
            images = augmentation(images, self.rng(keys, "augmentation"))
        if stage is not None and self.mixing is not None and "labels" in batch:
            rng = None if augmentation is None else self.rng(keys, "mixing")
            images, labels = self.mixing(images, batch["labels"].to(images.device), rng)
            batch["labels"] = labels.to(device)
        inputs = self.image_processor(list(images), do_resize=augmentation is None, return_tensors="pt")
        return batch | {"pixel_values": inputs["pixel_values"].to(device)}


class ImageClassificationDataset(torch.utils.data.Dataset):
    """Rows of a dataset in batches of decoded images, which `batch_transform` makes the model's inputs.

    A batch holds `pixel_values`, uint8 (B, 3, height, width); `labels`, class ids (B,); `keys`, NumPy integers (B, 2)
    of (epoch, row); and `stage`, the number of the stage of training, `None` in evaluation. Its data loader needs
    `collate`. Within a dataset, decoded pixels do not depend on the process, nor on whether they are kept.

    Args:
        rows: A split of `load_splits`.
        image_processor: As in `BatchTransform`. It is saved with the model, so that a pipeline sees what the model was
            evaluated on.
        options: Other arguments of `BatchTransform`; for evaluation, none.
    """

    def __init__(self, rows: Dataset, image_processor: ViTImageProcessor, *options: Any, **named_options: Any):
        self.rows = rows.cast_column("image", datasets.Image(decode=False))
        self.batch_transform = BatchTransform(image_processor, *options, **named_options)
        self.image_processor = image_processor
        self.stages = self.batch_transform.stages
        self._is_kept: bool | None = None  # unknown yet
        self._images: Tensor | None = None  # all of them, if they are kept
        self._labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def decoded_size(self) -> tuple[int, int]:
        """Height and width of decoded images: their own if all are alike and small, else `BatchTransform`'s."""
        height, width = self.batch_transform.decoded_size()
        own: tuple[int, int] | None = None
        for start in range(0, len(self), 1000):
            for index, row in enumerate(self.rows[start : start + 1000]["image"], start):
                (w, h), _ = size_and_mode(row, name=f"image {index}")
                own = own or (h, w)
                if (h, w) != own or h > height or w > width:
                    return height, width
        return own or (height, width)

    def cache_on_device(self, device: torch.device) -> bool:
        """Decode all images once and keep them, if they take up at most `DECODED_BYTES_KEPT`; return whether they are.

        They stay on the CPU if the device has not enough memory. An image that cannot be decoded is a `UserError`.
        """
        if self._is_kept is None:
            height, width = self.decoded_size
            num_bytes = len(self) * 3 * height * width
            self._is_kept = num_bytes <= DECODED_BYTES_KEPT
            place = "decoded again for each batch"
            if self._is_kept:
                self._images = self._decode_all(device)
                self._labels = torch.tensor(self.rows["label"][:], device=self._images.device)
                place = f"kept on {self._images.device}, so that worker processes are not needed"
            if self.batch_transform.is_random:  # one line for the training images is enough
                logger.info("Training images of %dx%d pixels (%.3g MB) are %s.", width, height, num_bytes / 1e6, place)
        return self._is_kept

    def _decode_all(self, device: torch.device) -> Tensor:
        images = torch.empty((len(self), 3, *self.decoded_size), dtype=torch.uint8)

        def decode(index: int, row: dict[str, Any]) -> None:
            images[index] = self.batch_transform.decode(row, f"image {index}", self.decoded_size)

        # `decode_image` changes the filters of warnings, which threads share: they are restored at the end.
        with warnings.catch_warnings(), ThreadPoolExecutor(joblib.cpu_count()) as pool:
            for start in range(0, len(self), 1000):
                indices = range(start, min(start + 1000, len(self)))
                for _ in pool.map(decode, indices, self.rows[indices]["image"]):  # raises what a thread raised
                    pass
        try:
            return images.to(device if device.type in TRANSFORM_DEVICES else "cpu")
        except torch.OutOfMemoryError:
            return images

    def __getitem__(self, key: int | Sample) -> dict[str, Any]:
        """Return a batch of one image."""
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[int | Sample]) -> dict[str, Any]:
        """Return a whole batch, for which the data loader asks if it can."""
        if get_worker_info() is not None:
            set_up_worker_process()
        samples = [key if isinstance(key, Sample) else Sample(epoch=0, stage=0, row=key) for key in keys]
        indices = [sample.row for sample in samples]
        if self._images is not None and self._labels is not None:
            places = torch.tensor(indices, device=self._images.device)
            images, labels = self._images[places], self._labels[places]
        else:
            rows = self.rows[indices]
            named = zip(indices, rows["image"], strict=True)
            images = torch.stack(
                [self.batch_transform.decode(row, f"image {index}", self.decoded_size) for index, row in named]
            )
            labels = torch.tensor(rows["label"])
        numbers = np.array([(sample.epoch, sample.row) for sample in samples], np.uint64)
        stage = samples[0].stage if self.stages else None  # the sampler mixes no stages in a batch
        return {"pixel_values": images, "labels": labels, "keys": numbers, "stage": stage}

    def sample(self, size: int, seed: int, stage: int = -1) -> dict[str, Any]:
        """Return up to `size` random images as the model's inputs.

        By default they are not augmented: the last of the stages of `training_stages` has no augmentation.
        """
        rows = np.random.default_rng(seed).permutation(len(self))[:size].tolist()
        return self.batch_transform(self.__getitems__([Sample(0, stage, row) for row in rows]))


def collate(batch: Any) -> Any:
    """Return a batch of `ImageClassificationDataset` as it is, and rows as the Trainer collates them."""
    return batch if isinstance(batch, dict) else default_data_collator(batch)


@functools.cache  # once in each worker process
def set_up_worker_process() -> None:
    """Prepare a worker process of a data loader before its first batch.

    It exits on SIGTERM only if its main process sent it. Schedulers send SIGTERM to the whole job, but the main
    process still needs batches to finish its step. Its own SIGTERM must work: after an exception, multiprocessing
    ends leftover workers by it. This covers workers that are forked. A spawned one may have started threads that do
    not block the signal.
    """
    keep_freed_memory()  # a batch takes what the one before has freed
    main = multiprocessing.parent_process()  # not os.getppid(), which may be the server that forked this process
    if main is None or not hasattr(signal, "sigwaitinfo"):  # macOS does not tell the sender
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()
