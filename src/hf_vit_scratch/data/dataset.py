"""Images and labels in batches: decoded, augmented, mixed and normalised."""

import functools
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import datasets
import joblib
import numpy as np
import torch
from datasets import Dataset
from PIL import Image
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


class BatchTransform:
    """From decoded images to a batch for the model: augmented, mixed, normalised.

    In two steps: the second, for a whole batch at once, can be taken where the model is, as the bytes that are sent
    there are a fourth of what becomes of them. All draws depend on nothing but the seed and an image's key.

    Args:
        image_processor: Rescales and normalises; without augmentation it also resizes.
        mixing: Makes the targets of training.
        seed: Seed of augmentation and mixing.
    """

    def __init__(self, image_processor: ViTImageProcessor, mixing: Mixup | None = None, seed: int = 0):
        self.image_processor = image_processor
        self.mixing = mixing
        self.seed = seed

    @property
    def mixup_prob(self) -> float:
        """Probability that an image is mixed with another."""
        return 0.0 if self.mixing is None else self.mixing.mixup_prob

    def draws(self, keys: Sequence[tuple[int, int]], purpose: str) -> SampleRNG:
        """SampleRNG for images by their keys: the epoch, and what tells an image from the others."""
        number = ("augmentation", "partner", "mixing", "masking").index(purpose)
        return SampleRNG([(self.seed, *key, number) for key in keys])

    def begin(
        self,
        images: list[Image.Image] | Tensor,
        labels: Tensor,
        keys: Sequence[tuple[int, int]],
        augment: Augmentation | None,
        own: Sequence[int],
        partners: dict[int, int],
    ) -> dict[str, Tensor]:
        """What is done to each image alone, and all that is random.

        Args:
            images: N of any sizes, or uint8 (N, 3, height, width) on any device.
            labels: Class ids (N,).
            keys: Key of each image: the epoch, and what tells it from the others.
            augment: `None` for nothing random.
            own: Places of the B images that make up the batch.
            partners: By its number in the batch, for each image that is mixed, the place of the other.

        Returns:
            For `finish`: `images`, uint8 (B, 3, height, width), and where any are mixed also `partners`, of the same
            shape, and `mixture`, (B, 5). And `labels`: class ids (B,) or probabilities (B, L).
        """
        if augment is None:
            resized = self.image_processor(images, do_rescale=False, do_normalize=False, return_tensors="pt")
            tensors: Tensor = resized["pixel_values"]
        elif isinstance(images, Tensor):
            tensors = augment.batch(images, self.draws(keys, "augmentation"))
        else:
            augmented = []
            with _restored_rng_state():
                for image, seed in zip(images, self.draws(keys, "augmentation").integers(2**53), strict=True):
                    torch.default_generator.manual_seed(int(seed))
                    augmented.append(augment(image))
            tensors = torch.stack(augmented)
        places = torch.tensor(own, device=tensors.device)
        batch = {"images": tensors if list(own) == list(range(len(tensors))) else tensors[places]}
        if self.mixing is None or not self.mixing.changes_targets:
            return batch | {"labels": labels[places]}
        targets = self.mixing.one_hot(labels[places])
        if partners:
            mixed = torch.tensor(list(partners), device=tensors.device)
            others = places.clone()  # of an image that is not mixed, itself
            others[mixed] = torch.tensor(list(partners.values()), device=tensors.device)
            mixture, kept = self.mixing.draw(
                tensors.shape[-2:], self.draws([keys[own[number]] for number in partners], "mixing")
            )
            batch |= {"partners": tensors[others], "mixture": mixture.new_zeros(len(own), 5).to(tensors.device)}
            batch["mixture"][mixed] = mixture.to(tensors.device)
            kept = kept.to(tensors.device)[:, None]
            targets[mixed] = kept * targets[mixed] + (1 - kept) * self.mixing.one_hot(labels[others[mixed]])
        return batch | {"labels": self.mixing.smooth(targets)}

    def finish(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is done to a whole batch: mix and normalise.

        Args:
            batch: Result of `begin`, on any device, with or without other entries. A finished batch stays as it is.

        Returns:
            The same with `pixel_values`, float (B, 3, height, width), in the place of what they are made of.
        """
        if "images" not in batch:
            return batch
        batch = dict(batch)
        images = batch.pop("images")
        if "partners" in batch:
            images = Mixup.mix(images, batch.pop("partners"), batch.pop("mixture"))
        pixels = self.image_processor(list(images), do_resize=False, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, **batch}


class ImageClassificationDataset(torch.utils.data.Dataset):
    """Rows of a dataset in batches of `pixel_values` (B, C, height, width) and `labels`; for `collate`.

    With `stages`, images are augmented and mixed. The draws of an image depend on (seed, epoch, row) alone: not on the
    order, the batch, the number of worker processes, or earlier draws. An image is mixed with another image of the
    split, as that is augmented in the same epoch. Cached images (`cache_on_device`) are augmented by the same
    distributions, with other draws.

    Args:
        rows: A split of `load_splits`.
        image_processor: Rescales and normalises; without augmentation it also resizes. It is saved with the model, so
            that a pipeline sees what the model was evaluated on.
        stages: The augmentation of each stage of training; `None` for a stage without augmentation and mixing. For
            evaluation, nothing.
        mixing: Makes the targets of training; in stages without augmentation it smooths only.
        seed: Seed of augmentation and mixing.
    """

    def __init__(
        self,
        rows: Dataset,
        image_processor: ViTImageProcessor,
        stages: Sequence[Augmentation | None] = (None,),
        mixing: Mixup | None = None,
        seed: int = 0,
    ):
        self.rows = rows.cast_column("image", datasets.Image(decode=False))
        self.image_processor = image_processor
        self.stages = stages
        self.batch_transform = BatchTransform(image_processor, mixing, seed)
        self.finish_later = False  # whether worker processes leave `batch_transform.finish` to who takes their batches
        self._images: Tensor | None = None  # all of them, where they are kept
        self._labels: Tensor | None = None
        self._tried_to_keep = False

    def __len__(self) -> int:
        return len(self.rows)

    def cache_on_device(self, device: torch.device) -> bool:
        """Decode all images once and keep them on a device, no larger than needed, if they fit.

        Training images are then augmented there in whole batches. They fit if they take up at most
        `DECODED_BYTES_KEPT`.

        Args:
            device: A CPU or a CUDA device.

        Returns:
            Whether they are kept.

        Raises:
            UserError: An image cannot be decoded.
        """
        if not self._tried_to_keep:
            self._tried_to_keep = True
            obstacle = self._decode_all(device)
            if self._is_for_training:  # one line for the training images is enough
                logger.info(
                    "Training images are %s",
                    f"decoded and augmented one at a time: {obstacle}."
                    if self._images is None
                    else f"kept on {device} at {self._images.shape[3]}x{self._images.shape[2]} pixels and augmented "
                    f"there in batches ({self._images.nbytes / 1e6:.3g} MB).",
                )
        return self._images is not None

    @property
    def _is_for_training(self) -> bool:
        return any(stage is not None for stage in self.stages)

    def _decode_all(self, device: torch.device) -> str:
        """Fill `_images` and return nothing, or say what stands in the way."""
        if device.type not in ("cpu", "cuda"):
            return f"this was not tried on {device.type}"
        height, width = self._kept_size()
        if len(self) * 3 * height * width > DECODED_BYTES_KEPT:
            return f"together they would take {len(self) * 3 * height * width / 1e9:.3g} GB"
        images = torch.empty((len(self), 3, height, width), dtype=torch.uint8)
        size = {"height": height, "width": width}
        # Evaluation sees the pixels of a pipeline. Training may take the smaller versions that a JPEG file holds.
        enough = 2 * max(height, width) if self._is_for_training else None

        def decode(index: int, row: dict[str, Any]) -> None:
            image = decode_image(row, name=f"image {index}", enough=enough)
            resized = self.image_processor(image, size=size, do_rescale=False, do_normalize=False, return_tensors="pt")
            images[index] = resized["pixel_values"][0]

        # `decode_image` changes the filters of warnings, which threads share: they are restored at the end.
        with warnings.catch_warnings(), ThreadPoolExecutor(joblib.cpu_count()) as pool:
            for start in range(0, len(self), 1000):
                indices = range(start, min(start + 1000, len(self)))
                for _ in pool.map(decode, indices, self.rows[indices]["image"]):  # raises what a thread raised
                    pass
        try:
            self._images = images.to(device)
        except torch.OutOfMemoryError:
            return f"they do not fit on {device}"
        self._labels = torch.tensor(self.rows["label"][:], device=device)
        return ""

    def _kept_size(self) -> tuple[int, int]:
        """Height and width of kept images: their own if all are alike and small, else what the model needs of them."""
        size = self.image_processor.size
        height, width = size["height"], size["width"]
        margin = KEPT_FOR_CROPS if any(stage and stage.random_resized_crop_scale for stage in self.stages) else 1.0
        height, width = round(margin * height), round(margin * width)
        own: tuple[int, int] | None = None
        for start in range(0, len(self), 1000):
            for index, row in enumerate(self.rows[start : start + 1000]["image"], start):
                (w, h), _ = size_and_mode(row, name=f"image {index}")
                own = own or (h, w)
                if (h, w) != own or h > height or w > width:
                    return height, width
        return own or (height, width)

    def __getitem__(self, key: int | Sample) -> dict[str, Tensor]:
        return {name: batch[0] for name, batch in self.__getitems__([key]).items()}

    def __getitems__(self, keys: Sequence[int | Sample]) -> dict[str, Tensor]:
        """A whole batch at once, which the data loader asks for where it can."""
        in_worker = get_worker_info() is not None
        if in_worker:
            set_up_worker_process()
        batch = self.begin(keys)
        return batch if in_worker and self.finish_later else self.batch_transform.finish(batch)

    def sample(self, size: int, seed: int, stage: int = -1) -> dict[str, Tensor]:
        """Return up to `size` random images as one batch, by default without augmentation.

        Args:
            size: Largest number of images.
            seed: Chooses the images.
            stage: Index into `stages`; the last one of training has no augmentation.
        """
        rows = np.random.default_rng(seed).permutation(len(self))[:size].tolist()
        return self.__getitems__([Sample(0, stage, *pair) for pair in zip(rows, rows[1:] + rows[:1], strict=True)])

    def begin(self, keys: Sequence[int | Sample]) -> dict[str, Tensor]:
        """A whole batch, for `BatchTransform.finish`."""
        samples = self._samples(keys)
        augment = self.stages[samples[0].stage]
        partners = self._partners(samples) if augment is not None else {}
        wanted = list(dict.fromkeys([*samples, *partners.values()]))  # none is prepared twice
        place = {sample: number for number, sample in enumerate(wanted)}
        images, labels = self._read([sample.row for sample in wanted])
        return self.batch_transform.begin(
            images, labels, [(sample.epoch, sample.row) for sample in wanted], augment,
            own=[place[sample] for sample in samples],
            partners={number: place[other] for number, other in partners.items()},
        )  # fmt: skip

    def _samples(self, keys: Sequence[int | Sample]) -> list[Sample]:
        return [key if isinstance(key, Sample) else Sample(0, 0, key, (key + 1) % len(self)) for key in keys]

    def _partners(self, samples: list[Sample]) -> dict[int, Sample]:
        """By the number of a sample that is mixed, the sample that it is mixed with."""
        draws = self.batch_transform.draws([(sample.epoch, sample.row) for sample in samples], "partner")
        return {
            number: sample._replace(row=sample.partner, partner=sample.row)
            for number, (sample, draw) in enumerate(zip(samples, draws.uniform(), strict=True))
            if draw < self.batch_transform.mixup_prob
        }

    def _read(self, indices: list[int]) -> tuple[list[Image.Image] | Tensor, Tensor]:
        if self._images is not None:
            assert self._labels is not None
            places = torch.tensor(indices).to(self._images.device)
            return self._images[places], self._labels[places]
        rows = self.rows[indices]
        images = [decode_image(row, name=f"image {index}") for index, row in zip(indices, rows["image"], strict=True)]
        return images, torch.tensor(rows["label"])


def collate(batch: Any) -> Any:
    """For data loaders: a batch of `ImageClassificationDataset` as it is, else what the Trainer makes of rows."""
    return batch if isinstance(batch, dict) else default_data_collator(batch)


@functools.cache  # once in each worker process
def set_up_worker_process() -> None:
    """What a worker process of a data loader does before its first batch."""
    keep_freed_memory()  # a batch takes what the one before has freed: 0.88 to 0.92 of the time, for photographs
    _end_by_the_main_process_alone()


def _end_by_the_main_process_alone() -> None:
    """Let a worker process heed SIGTERM only from its main process.

    Schedulers send SIGTERM to the whole job, and the main process needs its last batches to stop at a step's end; yet
    SIGTERM is also how multiprocessing ends, and then waits for, workers that an exception left behind. For workers
    that are forked from the main process; others may have threads already, which the signal ends.
    """
    main = multiprocessing.parent_process()  # not os.getppid(), which may be the server that forked this process
    if main is None or not hasattr(signal, "sigwaitinfo"):  # macOS does not tell the sender
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _restored_rng_state() -> Iterator[None]:
    """Leave torch's generator as it was; once per batch, as this costs ten times as much as seeding."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
