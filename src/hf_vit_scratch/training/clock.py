"""The time spent on training, and the end of training after `max_train_minutes`."""

import time

import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from .arguments import ViTTrainingArguments


class Clock:
    """Measures training time over all resumed parts of a run."""

    def __init__(self, args: ViTTrainingArguments):
        self.args = args
        self.start()

    def start(self) -> None:
        """Start at zero."""
        self.progress = 0.0  # share of the training that is done, if `max_train_minutes` limits it
        self.seconds_before = 0.0  # of the parts that are resumed
        self._begin: tuple[float, float] | None = None  # share of the time, and progress, after the first step
        self._start_time = time.perf_counter()

    def resume(self, state: TrainerState) -> None:
        """Add the time that the log of a resumed run ends with; its share of the limit is the progress."""
        self.seconds_before = 60 * max((line.get("minutes", 0.0) for line in state.log_history), default=0.0)
        if self.args.max_train_minutes is not None:  # the first batch and the first rates ask for it
            self.progress = self._progress(self.seconds_before / 60 / self.args.max_train_minutes, state)

    @property
    def minutes(self) -> float:
        """Minutes spent on training."""
        return (self.seconds_before + time.perf_counter() - self._start_time) / 60

    def update(self, state: TrainerState, control: TrainerControl) -> None:
        """Measure the progress after a step, and end the training when the time is over."""
        if self.args.max_train_minutes is None:
            return
        share = self.minutes / self.args.max_train_minutes
        if self.args.world_size > 1:  # all processes must follow one clock
            shared = torch.tensor([share], device=self.args.device)
            torch.distributed.broadcast(shared, src=0)
            share = shared.item()
        if self._begin is None:  # the first step, which compiles, is no progress
            self._begin = min(share, (1 + self.progress) / 2), self.progress
        self.progress = self._progress(share, state)
        if self.progress >= 1:  # as the stock Trainer does at the last step
            control.should_training_stop = True
            control.should_evaluate |= self.args.eval_strategy == IntervalStrategy.STEPS
            control.should_save |= self.args.save_strategy == SaveStrategy.STEPS

    def _progress(self, share_of_time: float, state: TrainerState) -> float:
        share, done = self._begin or (0.0, 0.0)
        by_time = done + (1 - done) * (share_of_time - share) / (1 - share)
        return min(1.0, max(by_time, state.global_step / state.max_steps))
