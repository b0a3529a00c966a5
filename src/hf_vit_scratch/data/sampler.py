"""Which image comes when in training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Sample(NamedTuple):
    """An image of a batch, by all that its random changes depend on besides the seed."""

    epoch: int  # in the lower 32 bits; the upper ones count the earlier visits to this image in the epoch
    stage: int | None  # None in evaluation
    row: int


@dataclass(eq=False)
class EpochSampler(torch.utils.data.Sampler):
    """Every row once per epoch, in an order that depends on (seed, epoch) only, with the stage of training.

    The order is drawn in the main process, so worker processes and resumed runs get the same. With classes, an epoch
    visits each class equally often instead: the rows of a class come in a random order, again and again.
    """

    size: int  # number of rows
    seed: int  # of the order
    batch_size: int = 1  # rows per optimizer step, over all devices; a stage changes between two steps only
    stage: Callable[[float], int] = lambda _: 0  # from the epochs passed, a fraction, to the number of the stage
    classes: NDArray[np.int64] | None = None  # of each row, to balance
    epoch: int = field(default=0, init=False)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; `ViTTrainer` calls this before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Sample]:
        epoch = self.epoch
        seeds = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0]) >> 1)
        order = torch.randperm(self.size, generator=generator)
        visits = torch.zeros_like(order)
        if self.classes is not None:
            ids = torch.from_numpy(self.classes)
            groups = [order[ids[order] == label] for label in ids.unique()]
            places = [torch.arange(len(share)) for share in visits.tensor_split(len(groups))]
            mixed = torch.randperm(self.size, generator=generator)
            pairs = list(zip(groups, places, strict=True))
            order = torch.cat([group[place % len(group)] for group, place in pairs])[mixed]
            visits = torch.cat([place // len(group) for group, place in pairs])[mixed]
        stage = 0
        for position, (row, visit) in enumerate(zip(order.tolist(), visits.tolist(), strict=True)):
            if position % self.batch_size == 0:
                stage = self.stage(epoch + position / self.size)
            yield Sample(epoch + (visit << 32), stage, row)
