"""Training images that are read while training, for data that is too large to keep: from the Hub, or parquet files."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import torch
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import ViTImageProcessor

from .augmentation import Augmentation, Mixing
from .data import Preparation, decode_image, end_by_the_main_process_alone, find_columns, load_source, split_in_half
from .errors import UserError

SPLITS = ("validation", "test")


def stream_splits(
    data: str,
    *,
    data_config: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_split: str = "train",
    validation_split: str | None = None,
    test_split: str | None = None,
    seed: int = 0,
) -> tuple[IterableDataset, DatasetDict]:
    """The training split as a stream, and `validation` and `test`, which alone are downloaded.

    Where there is no labelled test split, a half of validation serves as it, with the same share of every class.

    Args:
        data: The name of a dataset on the Hub, or a parquet file, or a folder of them.
        data_config: As of `load_splits`, like the other arguments.
        image_column: Column of the images; `None` finds it by its type.
        label_column: Column of the labels, which must be of the type `ClassLabel`; `None` finds it by its type.
        train_split: The source's split to train on.
        validation_split: The source's split to choose by; `None` for the one of that name.
        test_split: The source's split to report on; `None` for the one of that name.
        seed: Chooses the half.

    Raises:
        UserError: The data cannot be streamed; the message says why and what to do.
    """
    source = load_source(data, data_config, streaming=True)
    wanted = {"train": train_split, "validation": validation_split, "test": test_split}
    for name, split in wanted.items():
        if split is not None and split not in source:
            raise UserError(f"{data}: there is no split {split!r}, only {sorted(source)}. Choose with --{name}_split.")
    image, label = find_columns(data, source[train_split].features, image_column, label_column)
    feature = source[train_split].features[label]
    if not isinstance(feature, ClassLabel):
        raise UserError(
            f"{data}: to stream, the column {label!r} must be of the type ClassLabel, which names the classes; it is "
            f"{feature}. Leave --streaming out."
        )
    streams = {
        split: rows.select_columns([image, label])
        .rename_columns({image: "image", label: "label"})
        .cast_column("image", datasets.Image(decode=False))
        for split, rows in source.items()
    }
    kept = {}
    for name in SPLITS:
        split = wanted[name] or (name if name in streams and name != train_split else None)
        if split is not None:
            rows = streams[split]
            kept[name] = Dataset.from_generator(_rows, features=rows.features, gen_kwargs={"stream": rows})
            if -1 in kept[name]["label"] and wanted[name] is None:
                del kept[name]  # a test split of a contest
    if not kept:
        raise UserError(
            f"{data}: a stream cannot be cut, so it needs a validation split; there are {sorted(source)}. Choose one "
            "with --validation_split."
        )
    if len(kept) == 1:
        (rows,) = kept.values()
        kept = dict(zip(SPLITS, split_in_half(data, rows, seed), strict=True))
    return streams[train_split], DatasetDict(kept)


def _rows(stream: IterableDataset) -> Iterator[dict[str, Any]]:
    yield from stream


class ImageClassificationStream(torch.utils.data.IterableDataset):
    """Endless batches of `pixel_values` (B, C, height, width) and `labels` of a split that is read while training.

    Each process reads its own part of the split, and each worker process its own part of that. What an image's
    augmentation depends on is the seed, how often the split was read, and the image's bytes; it is mixed with the next
    one of its batch.

    Args:
        rows: The stream of `stream_splits`.
        image_processor: As of `ImageClassificationDataset`, like stages, mixing and seed.
        stages: The augmentation of each stage of training.
        mixing: Makes the targets of training.
        seed: Seed of the order, augmentation and mixing.
        batch_size: Rows per batch, B.
        stage_of_batch: The stage of training of each batch of this process.
        process: The number of this process, and how many there are.
        buffer_size: Rows among which the next one is drawn, in each worker process.

    Raises:
        UserError: In iterating: there is nothing to read for a worker process.
    """

    def __init__(
        self,
        rows: IterableDataset,
        image_processor: ViTImageProcessor,
        stages: Sequence[Augmentation | None],
        mixing: Mixing | None = None,
        seed: int = 0,
        *,
        batch_size: int,
        stage_of_batch: Sequence[int],
        process: tuple[int, int] = (0, 1),
        buffer_size: int = 2000,
    ):
        self.num_files = rows.num_shards
        self.rows = split_dataset_by_node(rows.shuffle(seed=seed, buffer_size=buffer_size), *process)
        self.stages = stages
        self.batch_size = batch_size
        self.stage_of_batch = stage_of_batch
        self.first_batch = 0  # of a run that is resumed; those before are read, but not prepared
        self._preparation = Preparation(image_processor, mixing, seed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            end_by_the_main_process_alone()
        rows = self._endless_rows()
        for number in itertools.count(first, step):
            batch = list(itertools.islice(rows, self.batch_size))
            stage = self.stage_of_batch[min(number, len(self.stage_of_batch) - 1)]
            yield {} if number < self.first_batch else self._prepare(batch, self.stages[stage])

    def _endless_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for epoch in itertools.count():
            self.rows.set_epoch(epoch)
            count = 0
            for row in self.rows:
                count += 1
                yield epoch, row
            if count == 0:
                raise UserError(
                    f"A process has nothing to read: the training split has {self.num_files} files for all processes "
                    "and their --dataloader_num_workers. Use fewer of them."
                )

    def _prepare(self, batch: list[tuple[int, dict[str, Any]]], augment: Augmentation | None) -> dict[str, Tensor]:
        images = [decode_image(row["image"], name="a training image") for _, row in batch]
        labels = torch.tensor([row["label"] for _, row in batch])
        keys = [(epoch, _digest(row["image"])) for epoch, row in batch]
        pairs = []
        if augment is not None and self._preparation.mixing_prob:
            mixed = self._preparation.draws(keys, "partner").uniform() < self._preparation.mixing_prob
            pairs = [(place, (place + 1) % len(batch)) for place in mixed.nonzero()[0].tolist()]
        return self._preparation(images, labels, keys, augment, pairs)


def _digest(image: dict[str, Any]) -> int:
    """64 bits that tell an image from others, wherever in the stream it comes."""
    content = image["bytes"] if image["bytes"] is not None else image["path"].encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
