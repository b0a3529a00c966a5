"""Training images that are read while training, for data that is too large to keep: from the Hub, or parquet files."""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import get_worker_info

from ..errors import UserError
from .dataset import BatchTransform, set_up_worker_process
from .splits import NOT_IN_ROWS
from .targets import is_valid, label_names, to_array

logger = logging.getLogger(__name__)

_Row = tuple[int, dict[str, Any]]  # how often the split was read before, and the row


@dataclass(eq=False, repr=False)
class ImageClassificationStream(torch.utils.data.IterableDataset):
    """Endless batches as those of `ImageClassificationDataset`, of a split that is read while training.

    Each process reads its own files where their number is a multiple of the number of processes, else all of them for
    its share of the rows; each worker process reads its own part of that. The keys of an image are how often the split
    was read before, and a digest of the image's bytes. After each pass, `datasets` pauses for five seconds.
    Iterating raises a `UserError` if there is nothing to read for a worker process, or an image or label is wrong.
    """

    rows: IterableDataset  # the training split of `load_splits` with `streaming`
    batch_transform: BatchTransform  # its seed is that of the order, too
    _: KW_ONLY
    batch_size: int  # images
    stage_of_batch: Sequence[int]  # the stage of training of each batch of this process
    process: tuple[int, int] = (0, 1)  # its number, and how many there are
    buffer_size: int = 2000  # rows among which the next one is drawn, in each worker process
    skip_corrupt: bool = False  # leave out, with a warning, what cannot be decoded; each image is decoded twice
    first_batch: int = field(default=0, init=False)  # of a resumed run; those before are read, but not prepared

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            set_up_worker_process()
        rows = self._endless_rows()
        for number in itertools.count(first, step):
            batch = list(itertools.islice(rows, self.batch_size))
            stage = self.stage_of_batch[min(number, len(self.stage_of_batch) - 1)]
            yield self._prepare(batch, stage) if number >= self.first_batch else {}

    def _prepare(self, batch: list[_Row], stage: int) -> dict[str, Any]:
        pixels, keys = [], []
        for epoch, row in batch:
            image = self.batch_transform.decode(row["image"], _name(row))
            # 64 bits tell an image from others, wherever in the stream it comes.
            digest = hashlib.blake2b(row["image"]["bytes"], digest_size=8).digest()
            keys.append((epoch, int.from_bytes(digest)))
            pixels.append(self.batch_transform.to_stage_size(image[None], np.array(keys[-1:], np.uint64), stage))
        labels = torch.from_numpy(to_array(self.rows.features["label"], [row["label"] for _, row in batch]))
        all_keys = np.array(keys, np.uint64)
        return {"pixel_values": torch.cat(pixels), "labels": labels, "keys": all_keys, "stage": stage}

    def _endless_rows(self) -> Iterator[_Row]:
        feature = self.rows.features["label"]
        for epoch in itertools.count():
            # Not `set_epoch`, whose number all worker processes share: they do not end a pass at the same time.
            seed = int(np.random.SeedSequence([self.batch_transform.seed, epoch]).generate_state(1)[0])
            shuffled = self.rows.shuffle(seed=seed, buffer_size=self.buffer_size)
            count = 0
            for row in split_dataset_by_node(shuffled, *self.process):
                if row["image"] is not None and row["image"]["bytes"] is None:  # before anything opens its file
                    raise UserError(f"{_name(row)}: {NOT_IN_ROWS}")
                if self.skip_corrupt:
                    try:
                        self.batch_transform.decode(row["image"], _name(row))
                    except UserError as error:
                        logger.warning("Left out: %s", error)
                        continue
                count += 1
                if not is_valid(feature, row["label"]):
                    last = len(label_names(feature)) - 1
                    raise UserError(f"{_name(row)} has the label {row['label']}, which is none of 0 to {last}.")
                yield epoch, row
            if count == 0:
                raise UserError(
                    "A process has nothing to read. Either none of its images can be decoded, or the training split "
                    f"has too few files, {self.rows.num_shards}: use fewer processes or --dataloader_num_workers."
                )


def _name(row: dict[str, Any]) -> str:
    path = (row["image"] or {}).get("path")
    return f"The training image {path}" if path else f"A training image with the label {row['label']}"
