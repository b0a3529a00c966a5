"""Which image comes when in training."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch


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
