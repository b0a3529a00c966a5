"""Images and labels from anywhere, as three named splits; knows nothing of models.

Sources: the digits that ship inside scikit-learn, a folder of class folders, local parquet files, or a dataset on the
Hub. Whatever the source, the splits have the columns `image` (encoded, see `decode_image`) and `label` (`ClassLabel`).
"""

import functools
import hashlib
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import joblib
import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, load_dataset
from datasets.config import HF_CACHE_HOME, HF_DATASETS_CACHE
from huggingface_hub.constants import HF_HUB_CACHE
from PIL import Image
from pyarrow import compute, types
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import ViTImageProcessor, default_data_collator

from .augmentation import Augmentation, Mixing
from .batch_transforms import Draws
from .errors import UserError
from .image_files import check_header, decode_image, find_image_files, size_and_mode, warn_of_others
from .machine import keep_freed_memory

logger = logging.getLogger(__name__)

# Decoded images are kept up to this many bytes per split: Tiny ImageNet (1.2 GB), but not ImageNet.
DECODED_BYTES_KEPT = 2 * 2**30
# Images from which random parts are cut are kept larger than the model's by this factor, so that parts stay sharp.
KEPT_FOR_CROPS = 1.5
CORRUPT_POLICIES = ("raise", "skip")
# Folder names by which image collections mark their splits.
SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}


def load_splits(
    data: str,
    *,
    data_config: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_split: str = "train",
    validation_split: str | None = None,
    test_split: str | None = None,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
    corrupt_images: str = "raise",
    follow_links: bool = False,
    seed: int = 0,
    labelled: bool = True,
) -> DatasetDict:
    """Load a dataset as the splits `train`, `validation` and `test`, with the columns `image` and `label`.

    A split that the source does not have is cut from train, with the same share of every class and always the same
    rows for one seed.

    Args:
        data: `"digits"`, a folder, a parquet file, or the name of a dataset on the Hub, in this order of trying.
        data_config: Which configuration of a dataset on the Hub, where it has several.
        image_column: Column of the images; `None` finds it by its type.
        label_column: Column of the labels; `None` finds it by its type, or by the name `label` or `labels`.
        train_split: The source's split to train on.
        validation_split: The source's split to choose by; `None` for the one of that name, else cut from train.
        test_split: The source's split to report on; `None` for the one of that name, else cut from train.
        validation_fraction: Share of train to cut for validation where the source has none.
        test_fraction: Share of train to cut for testing where the source has none.
        corrupt_images: What to do with images that cannot be decoded: `"raise"` names the first one when it is met;
            `"skip"` decodes every image once at the start, leaves those out, and names them all.
        follow_links: Whether links in a folder, or paths in parquet files, may lead out of it; those of a stranger
            could take in your own images.
        seed: Chooses the rows that are cut.
        labelled: Without, labels are not read, a folder may hold images anywhere, and all have the label 0.

    Raises:
        UserError: The data cannot be used; the message says why and what to do.
    """
    for name, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise UserError(f"{name} must lie between 0 and 1, got {fraction}.")
    if corrupt_images not in CORRUPT_POLICIES:
        raise UserError(f"corrupt_images must be one of {', '.join(CORRUPT_POLICIES)}; got {corrupt_images!r}.")
    source = load_source(
        data, data_config, check_files=corrupt_images == "raise", labelled=labelled, follow_links=follow_links
    )
    wanted = {"train": train_split, "validation": validation_split, "test": test_split}
    check_split_names(data, source, wanted)
    if labelled:
        source = _rename_columns(data, source, image_column, label_column, train_split)
    else:
        source = _without_labels(data, source, image_column, train_split)

    if corrupt_images == "skip":
        source = DatasetDict({split: without_corrupt(data, split, rows) for split, rows in source.items()})

    chosen = [split for split in wanted.values() if split is not None]
    train = source[train_split]
    refuse_unknown_labels(data, train_split, train)
    counts = np.bincount(train["label"][:], minlength=train.features["label"].num_classes)
    splits = {}
    for name, fraction in (("validation", validation_fraction), ("test", test_fraction)):
        split = wanted[name]
        if split is None:  # the source's own, unless the user has given it another part
            split = next((alias for alias in SPLIT_FOLDERS[name] if alias in source and alias not in chosen), None)
        if split is not None and has_unlabelled(source[split]):
            logger.warning("%s: the split %r has rows without a label and is not used.", data, split)
            split = None
        if split is not None:
            refuse_unknown_labels(data, split, source[split])
            splits[name] = source[split]
        else:
            train, splits[name] = _cut(data, train, np.maximum(1, np.rint(fraction * counts).astype(int)), seed)
            logger.info(
                "%s: %d of the training images (%g%%) cut for %s", data, len(splits[name]), 100 * fraction, name
            )
    return DatasetDict(train=train, **splits)


def fingerprint(splits: DatasetDict) -> str:
    """What tells these splits from others: their sizes, and a hash of the order of labels and of the files' names."""
    digest = hashlib.sha256()
    for split, rows in splits.items():
        paths = compute.struct_field(rows.data.column("image"), "path")  # of the whole source; no bytes are read
        if rows._indices is not None:
            paths = paths.take(rows._indices.column(0))
        names = [os.path.basename(path or "") for path in paths.to_pylist()]
        digest.update("\n".join([split, *names]).encode(errors="replace"))
        digest.update(np.asarray(rows["label"][:], dtype=np.int64).tobytes())
    return f"{', '.join(f'{len(rows)} {split}' for split, rows in splits.items())} ({digest.hexdigest()[:16]})"


def load_digits() -> DatasetDict:
    """The 1,797 handwritten digits, 8x8 pixels, that ship inside scikit-learn, as grey images; no network needed.

    A fifth is the test split, the same for every seed, so that results can be compared.
    Source: E. Alpaydin, C. Kaynak 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository.
    """
    from sklearn.datasets import load_digits as load_sklearn_digits

    digits = load_sklearn_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # 17 levels of ink, 0 to 16
    label = ClassLabel(names=[str(name) for name in digits.target_names])
    rows = Dataset.from_dict(
        {"image": [Image.fromarray(image) for image in pixels], "label": digits.target.tolist()},
        features=Features({"image": datasets.Image(), "label": label}),
    )
    return rows.train_test_split(test_size=0.2, stratify_by_column="label", seed=0)


class Sample(NamedTuple):
    """Which image a training batch wants, and all that its random changes may depend on."""

    epoch: int
    stage: int
    row: int
    partner: int  # the row that it is mixed with, if it is


class EpochSampler(torch.utils.data.Sampler):
    """Every row once per epoch, in an order that depends on nothing but (seed, epoch), with the stage of training.

    Drawn in the main process, so that worker processes and resumed runs get the same. Partners in mixing are the first
    and second row of that order, the third and fourth, and so on: both are in one batch if its size is even, and none
    has to be prepared for its partner's sake. The last of an odd number is its own partner, and so stays unmixed.

    Args:
        size: Number of rows.
        seed: Seed of the order.
        batch_size: Rows per optimizer step, over all devices; a stage changes between two steps only.
        stage: From the epochs passed, a fraction, to the number of the stage.
    """

    def __init__(self, size: int, seed: int, batch_size: int = 1, stage: Callable[[float], int] = lambda _: 0):
        self.size = size
        self.seed = seed
        self.batch_size = batch_size
        self.stage = stage
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; `ViTTrainer` calls this before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sample]:
        epoch = self.epoch
        seeds = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(int(seeds[0]) >> 1)).tolist()
        stage = 0
        for position, row in enumerate(order):
            if position % self.batch_size == 0:
                stage = self.stage(epoch + position / self.size)
            yield Sample(epoch, stage, row, order[min(position ^ 1, self.size - 1)])


class Preparation:
    """From decoded images to a batch for the model: augmented, mixed, normalised.

    In two steps: the second, for a whole batch at once, can be taken where the model is, as the bytes that are sent
    there are a fourth of what becomes of them. All draws depend on nothing but the seed and an image's key.

    Args:
        image_processor: Rescales and normalises; without augmentation it also resizes.
        mixing: Makes the targets of training.
        seed: Seed of augmentation and mixing.
    """

    def __init__(self, image_processor: ViTImageProcessor, mixing: Mixing | None = None, seed: int = 0):
        self.image_processor = image_processor
        self.mixing = mixing
        self.seed = seed

    @property
    def mixing_prob(self) -> float:
        """Probability that an image is mixed with another."""
        return 0.0 if self.mixing is None else self.mixing.mixing_prob

    def draws(self, keys: Sequence[tuple[int, int]], purpose: str) -> Draws:
        """Draws for images by their keys: the epoch, and what tells an image from the others."""
        number = ("augmentation", "partner", "mixing", "masking").index(purpose)
        return Draws([(self.seed, *key, number) for key in keys])

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
            keys: Of each image.
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
            batch: Of `begin`, on any device, with other entries or not; or one that is finished, which stays as it is.

        Returns:
            The same with `pixel_values`, float (B, 3, height, width), in the place of what they are made of.
        """
        if "images" not in batch:
            return batch
        batch = dict(batch)
        images = batch.pop("images")
        if "partners" in batch:
            images = Mixing.mix(images, batch.pop("partners"), batch.pop("mixture"))
        pixels = self.image_processor(list(images), do_resize=False, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, **batch}


class ImageClassificationDataset(torch.utils.data.Dataset):
    """Rows of a dataset in batches of `pixel_values` (B, C, height, width) and `labels`; for `collate`.

    With `stages`, images are augmented and mixed, each by draws that depend on nothing but (seed, epoch, row): not on
    the order, the batch, the number of worker processes, or what was drawn before. The partner that an image is mixed
    with is any other image of the split, as it is augmented in the same epoch. Images that are kept (`keep_on`) are
    augmented by the same distributions, with other draws.

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
        mixing: Mixing | None = None,
        seed: int = 0,
    ):
        self.rows = rows.cast_column("image", datasets.Image(decode=False))
        self.image_processor = image_processor
        self.stages = stages
        self.preparation = Preparation(image_processor, mixing, seed)
        self.finish_later = False  # whether worker processes leave `preparation.finish` to who takes their batches
        self._images: Tensor | None = None  # all of them, where they are kept
        self._labels: Tensor | None = None
        self._tried_to_keep = False

    def __len__(self) -> int:
        return len(self.rows)

    def keep_on(self, device: torch.device) -> bool:
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
        return batch if in_worker and self.finish_later else self.preparation.finish(batch)

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
        """A whole batch, for `Preparation.finish`."""
        samples = self._samples(keys)
        augment = self.stages[samples[0].stage]
        partners = self._partners(samples) if augment is not None else {}
        wanted = list(dict.fromkeys([*samples, *partners.values()]))  # none is prepared twice
        place = {sample: number for number, sample in enumerate(wanted)}
        images, labels = self._read([sample.row for sample in wanted])
        return self.preparation.begin(
            images, labels, [(sample.epoch, sample.row) for sample in wanted], augment,
            own=[place[sample] for sample in samples],
            partners={number: place[other] for number, other in partners.items()},
        )  # fmt: skip

    def _samples(self, keys: Sequence[int | Sample]) -> list[Sample]:
        return [key if isinstance(key, Sample) else Sample(0, 0, key, (key + 1) % len(self)) for key in keys]

    def _partners(self, samples: list[Sample]) -> dict[int, Sample]:
        """By the number of a sample that is mixed, the sample that it is mixed with."""
        draws = self.preparation.draws([(sample.epoch, sample.row) for sample in samples], "partner")
        return {
            number: sample._replace(row=sample.partner, partner=sample.row)
            for number, (sample, draw) in enumerate(zip(samples, draws.uniform(), strict=True))
            if draw < self.preparation.mixing_prob
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


def refuse_unknown_labels(data: str, split: str, rows: Dataset) -> None:
    """Refuse a class id out of range, which would end in a fault on the device, much later and without a name.

    Raises:
        UserError: Names the first.
    """
    names = rows.features["label"].names
    labels = np.asarray([-1 if label is None else label for label in rows["label"][:]])
    unknown = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(unknown):
        raise UserError(
            f"{data}: {len(unknown)} rows of {split} have a label outside 0 to {len(names) - 1}; the first is row "
            f"{unknown[0]} with {labels[unknown[0]]}. Correct or delete them."
        )


def without_corrupt(data: str, split: str, rows: Dataset) -> Dataset:
    """The images of a split that can be decoded; the others are named in the log."""
    encoded = rows.cast_column("image", datasets.Image(decode=False))
    good, bad = [], []
    for number, row in enumerate(encoded):
        try:
            decode_image(row["image"], name=f"image {number}")
            good.append(number)
        except UserError as error:
            bad.append(str(error).removesuffix(" Delete or replace it."))
    if not good:
        raise UserError(f"{data}: no image of {split} can be decoded; the first: {bad[0]}")
    if bad:
        logger.warning("%s: %d of the %d images of %s are skipped:", data, len(bad), len(rows), split)
        for reason in bad:
            logger.warning("  %s", reason)
    return rows.select(good)


def load_source(
    data: str,
    data_config: str | None,
    check_files: bool = True,
    streaming: bool = False,
    labelled: bool = True,
    follow_links: bool = False,
) -> Any:
    """All splits of a source as it is, a `DatasetDict`, or to be streamed an `IterableDatasetDict`.

    Raises:
        UserError: The data cannot be loaded.
    """
    path = Path(data).expanduser()
    local = data == "digits" or (path.is_dir() and not any(path.rglob("*.parquet")))
    if local and streaming:
        raise UserError(f"{data}: only datasets on the Hub and parquet files can be streamed. Leave --streaming out.")
    if data == "digits":
        return load_digits()
    if local:
        load = _load_class_folders if labelled else _load_images
        source = load(path, check_files, "follow" if follow_links else "refuse")
        if not follow_links:
            _refuse_files_outside(path, source)
        return source
    if not path.exists() and (data.startswith((".", "/", "~")) or data.count("/") > 1):
        raise UserError(
            f"{data}: there is no such file or folder. Give --data a folder of class folders, for example."
        )
    try:
        if path.is_file():
            source = load_dataset("parquet", data_files=str(path), streaming=streaming)
        else:
            source = load_dataset(str(path) if path.is_dir() else data, data_config, streaming=streaming)
    except Exception as error:  # datasets raises many types, down to a bare Exception, for what it cannot load
        if path.exists():
            hint = "The folder or file must hold parquet files that datasets.load_dataset can read."
        else:
            hint = "It is no local folder; is it the name of a dataset on the Hub, and is the Hub within reach?"
        reason = " ".join(str(error).split())
        raise UserError(f"{data}: the data cannot be loaded ({type(error).__name__}: {reason}). {hint}") from error
    if not streaming and not path.exists():
        _refuse_own_files(data, source)
    elif not streaming and not follow_links:
        _refuse_files_outside(path if path.is_dir() else path.parent, source)
    return source


def _load_class_folders(root: Path, check_files: bool, folder_links: str) -> DatasetDict:
    """A folder with one folder of images per class, or with such folders inside `train`, `val`, `test`."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    splits = {}
    for name, aliases in SPLIT_FOLDERS.items():
        found = [folders[alias] for alias in aliases if alias in folders]
        if found:
            splits[name] = found[0]
    if "train" not in splits or not any(path.is_dir() for path in splits["train"].iterdir()):
        if splits and len(splits) == len(folders):
            raise UserError(f"{root}: there is no folder train beside {', '.join(sorted(folders))}. Add or rename it.")
        splits = {"train": root}

    # The class names of train hold for all the splits.
    names = sorted(path.name for path in splits["train"].iterdir() if path.is_dir() and not path.name.startswith("."))
    label = ClassLabel(names=names)
    source = {}
    for split, folder in splits.items():
        of_class = {name: find_image_files(folder / name, folder_links) for name in names}
        files = [(file, name) for name, (images, _) in of_class.items() for file in images]
        warn_of_others(folder, sum((others for _, others in of_class.values()), Counter()))
        if files and all(file.parent.name not in names for file, _ in files):
            raise UserError(
                f"{folder}: the folders {names} hold folders, not images. If they are splits, name them train, val "
                "and test; if they are classes, put their images right into them."
            )
        if not files:
            raise UserError(
                f"{folder}: there are no images. The folder must hold one folder per class with images in it, such as "
                f"{folder}/cat/1.jpg and {folder}/dog/2.png."
            )
        filled = {name for _, name in files}
        if split == "train" and len(names) < 2:
            raise UserError(
                f"{folder}: there is one class, {names[0]!r}; a classifier needs at least two class folders."
            )
        if split == "train" and len(filled) < len(names):
            empty = ", ".join(repr(name) for name in names if name not in filled)
            raise UserError(f"{folder}: no images in the class folders {empty}. Delete these folders, or fill them.")
        inside = (path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if unknown := sorted(set(inside) - set(names)):
            raise UserError(f"{folder}: the classes {unknown} are not in {splits['train']}. Delete or add them there.")
        for file, _ in files if check_files else ():  # the headers only, to find what is no image before training
            check_header(file)
        source[split] = Dataset.from_dict(
            {"image": [str(file) for file, _ in files], "label": [names.index(name) for _, name in files]},
            features=Features({"image": datasets.Image(), "label": label}),
        )
    return DatasetDict(source)


def _load_images(root: Path, check_files: bool, folder_links: str) -> DatasetDict:
    """All images in a folder, however deep, or in such folders named `train`, `val`, `test`."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}
    splits = {name: folders[alias] for name, aliases in SPLIT_FOLDERS.items() for alias in aliases if alias in folders}
    if "train" in splits:
        beside = [folder for folder in folders.values() if folder not in splits.values() and folder.name[0] != "."]
        if unused := [folder.name for folder in beside if find_image_files(folder)[0]]:
            raise UserError(
                f"{root}: {splits['train'].name} is the training split, and the images in {', '.join(unused)} beside"
                " it would not be used. Move them into it, or elsewhere; or rename it, and all images are used."
            )
    source = {}
    for split, folder in (splits if "train" in splits else {"train": root}).items():
        files, others = find_image_files(folder, folder_links)
        warn_of_others(folder, others)
        if not files:
            raise UserError(f"{folder}: there are no images.")
        for file in files if check_files else ():
            check_header(file)
        source[split] = Dataset.from_dict(
            {"image": [str(file) for file in files]}, features=Features({"image": datasets.Image()})
        )
    return DatasetDict(source)


def _without_labels(data: str, source: DatasetDict, image_column: str | None, train_split: str) -> DatasetDict:
    image = find_image_column(data, source[train_split].features, image_column)
    label = ClassLabel(names=["image"])
    return DatasetDict(
        {
            split: rows.select_columns([image])
            .rename_columns({image: "image"} if image != "image" else {})
            .add_column("label", [0] * len(rows))
            .cast_column("label", label)
            for split, rows in source.items()
        }
    )


def _refuse_files_outside(root: Path, source: DatasetDict) -> None:
    """Refuse links, and paths in parquet files, that lead out of a folder, which somebody else may have made."""
    files = [Path(path) for rows in source.values() for path in image_paths(rows)]
    inside, folders = root.resolve(), {file.parent for file in files}
    # Few files are links, and to ask each where it is takes a minute for a million.
    for path in [*sorted(folders), *(file for file in files if file.is_symlink())]:
        if not (found := path.resolve()).is_relative_to(inside):
            raise UserError(f"{path} leads to {found}, outside of {root}. If that is meant, give --follow_links true.")


def _refuse_own_files(data: str, source: DatasetDict) -> None:
    """Refuse rows of a dataset on the Hub that name files of this machine as their images."""
    roots = tuple(os.path.normpath(root) + os.sep for root in (HF_CACHE_HOME, HF_DATASETS_CACHE, HF_HUB_CACHE))
    for split, rows in source.items():
        for path in image_paths(rows):
            if not os.path.normpath(path).startswith(roots):
                raise UserError(
                    f"{data}: an image of {split} is the file {path} of this machine, which is none of the dataset's. "
                    "Do not use this dataset."
                )


def image_paths(rows: Dataset) -> Iterator[str]:
    """The paths of the images that are not in the rows themselves, which are not read."""
    for column in (name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)):
        for chunk in rows.data.column(column).chunks:
            yield from chunk.field("path").filter(chunk.field("bytes").is_null()).drop_null().to_pylist()


def check_split_names(data: str, source: Any, wanted: dict[str, str | None]) -> None:
    """Refuse splits that the source does not have, or that are to serve two purposes.

    Raises:
        UserError: Names them.
    """
    for name, split in wanted.items():
        if split is not None and split not in source:
            raise UserError(f"{data}: there is no split {split!r}, only {sorted(source)}. Choose with --{name}_split.")
    chosen = [split for split in wanted.values() if split is not None]
    if len(set(chosen)) < len(chosen):
        raise UserError(f"{data}: train, validation and test must be different splits, got {wanted}.")


def find_image_column(data: str, features: Features, image_column: str | None) -> str:
    """The column of the images, where not named the only one of its type.

    Raises:
        UserError: There is none, or there are several.
    """
    if image_column is None:
        images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(images) != 1:
            raise UserError(
                f"{data}: there must be one column of images, found {images} among {sorted(features)}. Name it with "
                "--image_column."
            )
        image_column = images[0]
    _refuse_missing_column(data, features, image_column, "--image_column")
    if not isinstance(features[image_column], datasets.Image):
        raise UserError(f"{data}: the column {image_column!r} holds {features[image_column]}, not images.")
    return image_column


def find_columns(data: str, features: Features, image_column: str | None, label_column: str | None) -> tuple[str, str]:
    """The columns of the images and of the labels, where not named the only ones of their type.

    Raises:
        UserError: There are none, or several.
    """
    image_column = find_image_column(data, features, image_column)
    if label_column is None:
        labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
        labels = labels or [name for name in ("label", "labels") if name in features]
        if len(labels) != 1:
            raise UserError(
                f"{data}: there must be one column of labels, found {labels} among {sorted(features)}. Name it with "
                "--label_column."
            )
        label_column = labels[0]
    _refuse_missing_column(data, features, label_column, "--label_column")
    return image_column, label_column


def _refuse_missing_column(data: str, features: Features, column: str, flag: str) -> None:
    if column not in features:
        raise UserError(f"{data}: there is no column {column!r}, only {sorted(features)}. Choose with {flag}.")


def _rename_columns(
    data: str, source: DatasetDict, image_column: str | None, label_column: str | None, train_split: str
) -> DatasetDict:
    """Find the columns of the images and labels, and reduce the source to these two, named `image` and `label`."""
    image_column, label_column = find_columns(data, source[train_split].features, image_column, label_column)
    source = source.select_columns([image_column, label_column])
    source = source.rename_columns({image_column: "image", label_column: "label"})
    feature = source[train_split].features["label"]
    if not isinstance(feature, ClassLabel):
        kinds = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean)
        if not isinstance(feature, datasets.Value) or not any(is_kind(feature.pa_type) for is_kind in kinds):
            raise UserError(
                f"{data}: the column {label_column!r} must hold one class per image, but it holds {feature}."
            )
        names = sorted({value for split in source.values() for value in split["label"][:] if value is not None})
        label = ClassLabel(names=[str(name) for name in names])
        to_id = {name: index for index, name in enumerate(names)}
        source = source.map(
            lambda row: {"label": to_id.get(row["label"], -1)},
            features=Features({"image": source[train_split].features["image"], "label": label}),
        )
        feature = label
    if has_unlabelled(source[train_split]):
        raise UserError(
            f"{data}: the split {train_split!r} has rows without a label. Choose another with --train_split."
        )
    if feature.num_classes < 2:
        raise UserError(f"{data}: there is one class, {feature.names}; a classifier needs at least two.")
    return source


def has_unlabelled(rows: Dataset) -> bool:
    """Whether a label is missing."""
    return any(label is None or label < 0 for label in rows["label"][:])


def split_in_half(data: str, rows: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Two halves, with the same share of every class."""
    counts = np.bincount(rows["label"][:], minlength=rows.features["label"].num_classes)
    return _cut(data, rows, np.rint(counts / 2).astype(int), seed)


def _cut(data: str, train: Dataset, counts: np.ndarray, seed: int) -> tuple[Dataset, Dataset]:
    """Cut `counts[c]` images of each class c from train, but leave it one.

    `Dataset.train_test_split` stratifies too, but leaves small classes out of the cut, or refuses them.
    """
    generator = np.random.default_rng(seed)
    labels = np.asarray(train["label"][:])
    cut = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        if len(rows) == 1:
            raise UserError(
                f"{data}: the class {train.features['label'].names[label]!r} has too few images to cut a validation "
                "and a test split from the training images: one is left. Add images, or give splits of your own "
                "(folders train, val and test)."
            )
        cut[rows[: min(counts[label], len(rows) - 1)]] = True
    return train.select(np.flatnonzero(~cut)), train.select(np.flatnonzero(cut))
