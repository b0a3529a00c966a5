"""Training images that are read while training, for data that is too large to keep: from the Hub, or parquet files."""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset
from datasets.distributed import split_dataset_by_node
from datasets.fingerprint import Hasher
from huggingface_hub import HfApi
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import ViTImageProcessor

from ..errors import UserError
from .augmentation import Augmentation
from .dataset import BatchTransform, set_up_worker_process
from .images import decode_image
from .mixup import Mixup
from .splits import (
    check_split_names,
    find_columns,
    image_paths,
    load_source,
    refuse_unknown_labels,
    split_in_half,
    without_corrupt,
)

logger = logging.getLogger(__name__)

_Row = tuple[int, dict[str, Any]]  # how often the split was read before, and the row

SPLITS = ("validation", "test")
# A path could be that of any file of this machine.
NOT_IN_ROWS = "to stream, the images must be in the rows themselves, as usual in parquet files."


def stream_splits(
    data: str,
    *,
    data_config: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_split: str = "train",
    validation_split: str | None = None,
    test_split: str | None = None,
    corrupt_images: str = "raise",
    seed: int = 0,
) -> tuple[IterableDataset, DatasetDict]:
    """The training split as a stream, and `validation` and `test`, which alone are downloaded.

    Where there is only one of the two, with labels, a half of it serves as the other, with the same share of every
    class.

    Args:
        data: The name of a dataset on the Hub, or a parquet file, or a folder of them.
        data_config: Argument of `load_splits`, like all others.
        image_column: Column of the images; `None` finds it by its type.
        label_column: Column of the labels, which must be of the type `ClassLabel`; `None` finds it by its type.
        train_split: The source's split to train on.
        validation_split: The source's split to choose by; `None` for the one of that name.
        test_split: The source's split to report on; `None` for the one of that name.
        corrupt_images: Whether to `"raise"`, when it is met, or to `"skip"` an image of `validation` or `test` that
            cannot be decoded. `ImageClassificationStream` has its own `skip_corrupt`.
        seed: Chooses the half.

    Raises:
        UserError: The data cannot be streamed; the message says why and what to do.
    """
    source = load_source(data, data_config, streaming=True)
    wanted = {"train": train_split, "validation": validation_split, "test": test_split}
    check_split_names(data, source, wanted)
    features = source[train_split].features
    if features is None:
        raise UserError(
            f"{data}: the columns of this kind of data are not known before it is read. Use parquet files."
        )
    image, label = find_columns(data, features, image_column, label_column)
    if not isinstance(features[label], ClassLabel) or features[label].num_classes < 2:
        raise UserError(
            f"{data}: to stream, the column {label!r} must be of the type ClassLabel, which names two or more "
            f"classes; it is {features[label]}. Leave --streaming out."
        )
    # A name that stays would be refused.
    names = {old: new for old, new in ((image, "image"), (label, "label")) if old != new}
    streams = {
        # Renaming reads the rows: decoded images would be compressed again, with loss.
        split: rows.cast_column(image, datasets.Image(decode=False))
        .select_columns([image, label])
        .rename_columns(names)
        for split, rows in source.items()
    }
    if (first := next(iter(streams[train_split]))["image"]) is None or first["bytes"] is None:
        raise UserError(f"{data}: {NOT_IN_ROWS}")

    kept = {}
    for name in SPLITS:
        split = wanted[name]
        if split is None and name in streams and name not in wanted.values():
            first_label = next(iter(streams[name]))["label"]
            split = None if first_label in (None, -1) else name  # not the test split of a contest
        if split is not None:
            version = Hasher.hash(["as in the files", data, data_config, split, image, label, _version(data)])
            kept[name] = Dataset.from_generator(
                _rows, features=streams[split].features, gen_kwargs={"stream": streams[split]}, fingerprint=version
            )
            refuse_unknown_labels(data, split, kept[name])
            if any(image_paths(kept[name])):
                raise UserError(f"{data}: {NOT_IN_ROWS}")
            if corrupt_images == "skip":
                kept[name] = without_corrupt(data, split, kept[name])
    if not kept:
        raise UserError(
            f"{data}: a stream cannot be cut, so it needs a validation split; there are {sorted(source)}. Choose one "
            "with --validation_split."
        )
    if len(kept) == 1:
        ((name, rows),) = kept.items()
        logger.info("%s: there is only one of validation and test, %s; a half of it serves as the other", data, name)
        kept = dict(zip(SPLITS, split_in_half(data, rows, seed), strict=True))
    return streams[train_split], DatasetDict(kept)


def _rows(stream: IterableDataset) -> Iterator[dict[str, Any]]:
    yield from stream


def _version(data: str) -> Any:
    """What changes when the data does; a stream has no name of its own by which a copy of it could be found again."""
    path = Path(data).expanduser()
    if not path.exists():
        return HfApi().dataset_info(data).sha
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


class ImageClassificationStream(torch.utils.data.IterableDataset):
    """Endless batches of `pixel_values` (B, C, height, width) and `labels` of a split that is read while training.

    Each process reads its own files where their number is a multiple of the number of processes, else all of them for
    its share of the rows; each worker process reads its own part of that. What an image's augmentation depends on is
    the seed, how often the split was read, and the image's bytes; it is mixed with the next one of its batch. After
    each pass, `datasets` pauses for five seconds.

    Args:
        rows: The stream of `stream_splits`.
        image_processor: Argument of `ImageClassificationDataset`, like stages, mixing and seed.
        stages: The augmentation of each stage of training.
        mixing: Makes the targets of training.
        seed: Seed of the order, augmentation and mixing.
        batch_size: Rows per batch, B.
        stage_of_batch: The stage of training of each batch of this process.
        process: The number of this process, and how many there are.
        buffer_size: Rows among which the next one is drawn, in each worker process.
        skip_corrupt: Whether to leave out, with a warning, an image that cannot be decoded.

    Raises:
        UserError: In iterating: there is nothing to read for a worker process, or an image or label is wrong.
    """

    def __init__(
        self,
        rows: IterableDataset,
        image_processor: ViTImageProcessor,
        stages: Sequence[Augmentation | None],
        mixing: Mixup | None = None,
        seed: int = 0,
        *,
        batch_size: int,
        stage_of_batch: Sequence[int],
        process: tuple[int, int] = (0, 1),
        buffer_size: int = 2000,
        skip_corrupt: bool = False,
    ):
        if process[0] == 0 and rows.num_shards % process[1]:
            logger.warning(
                "%d processes share %d files: each reads all of them for its share of the rows. A number of processes "
                "that divides the number of files is faster.", process[1], rows.num_shards,
            )  # fmt: skip
        self.rows = rows
        self.seed = seed
        self.process = process
        self.buffer_size = buffer_size
        self.skip_corrupt = skip_corrupt
        self.stages = stages
        self.batch_size = batch_size
        self.stage_of_batch = stage_of_batch
        self.first_batch = 0  # of a run that is resumed; those before are read, but not prepared
        self.batch_transform = BatchTransform(image_processor, mixing, seed)
        self.finish_later = False  # as of `ImageClassificationDataset`

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            set_up_worker_process()
        rows = self._endless_rows()
        for number in itertools.count(first, step):
            batch = list(itertools.islice(rows, self.batch_size))
            if self.skip_corrupt:  # here, so that a resumed run, which does not prepare it, does the same
                batch = self._with_an_image(batch, rows)
            stage = self.stage_of_batch[min(number, len(self.stage_of_batch) - 1)]
            yield {} if number < self.first_batch else self._prepare(batch, self.stages[stage])

    def _with_an_image(self, batch: list[_Row], rows: Iterator[_Row]) -> list[_Row]:
        """This batch, or the next one of which an image can be decoded."""
        first_pass = batch[0][0]
        while not any(_can_be_decoded(row) for _, row in batch):
            batch = list(itertools.islice(rows, self.batch_size))
            if batch[0][0] > first_pass + 1:
                raise UserError("No training image can be decoded.")
        return batch

    def _endless_rows(self) -> Iterator[_Row]:
        classes = self.rows.features["label"].num_classes
        for epoch in itertools.count():
            # Not `set_epoch`, whose number all worker processes share: they do not end a pass at the same time.
            seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
            shuffled = self.rows.shuffle(seed=seed, buffer_size=self.buffer_size)
            count = 0
            for row in split_dataset_by_node(shuffled, *self.process):
                count += 1
                if row["image"] is not None and row["image"]["bytes"] is None:
                    raise UserError(f"{_name(row)}: {NOT_IN_ROWS}")
                if row["label"] is None or not 0 <= row["label"] < classes:
                    raise UserError(f"{_name(row)} has the label {row['label']}, which is none of 0 to {classes - 1}.")
                yield epoch, row
            if count == 0:
                raise UserError(
                    f"A process has nothing to read: the training split has {self.rows.num_shards} files for all "
                    "processes and their --dataloader_num_workers. Use fewer of them."
                )

    def _prepare(self, batch: list[_Row], augment: Augmentation | None) -> dict[str, Tensor]:
        images, readable = [], []
        for epoch, row in batch:
            try:
                images.append(decode_image(row["image"], name=_name(row)))
                readable.append((epoch, row))
            except UserError as error:
                if not self.skip_corrupt:
                    raise
                logger.warning("Left out: %s", error)
        batch = readable
        labels = torch.tensor([row["label"] for _, row in batch])
        keys = [(epoch, _digest(row["image"])) for epoch, row in batch]
        partners = {}
        if augment is not None and self.batch_transform.mixup_prob:
            mixed = self.batch_transform.draws(keys, "partner").uniform() < self.batch_transform.mixup_prob
            partners = {place: (place + 1) % len(batch) for place in mixed.nonzero()[0].tolist()}
        prepared = self.batch_transform.begin(images, labels, keys, augment, range(len(batch)), partners)
        later = self.finish_later and get_worker_info() is not None
        return prepared if later else self.batch_transform.finish(prepared)


def _can_be_decoded(row: dict[str, Any]) -> bool:
    try:
        decode_image(row["image"], name="")
    except UserError:
        return False
    return True


def _name(row: dict[str, Any]) -> str:
    """A name for an image whose number nobody knows."""
    path = (row["image"] or {}).get("path")
    return f"The training image {path}" if path else f"A training image with the label {row['label']}"


def _digest(image: dict[str, Any]) -> int:
    """64 bits that tell an image from others, wherever in the stream it comes."""
    return int.from_bytes(hashlib.blake2b(image["bytes"], digest_size=8).digest())
