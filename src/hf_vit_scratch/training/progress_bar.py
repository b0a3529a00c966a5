"""A progress bar for a run that ends by the clock."""

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback


class ProgressByTime(ProgressCallback):
    """The stock progress bar, but of the share of training done: minutes passed and left instead of steps.

    Args:
        progress: Returns the share of training done, 0 to 1.
    """

    training_bar: Any

    def __init__(self, progress: Callable[[], float]):
        super().__init__()
        self.progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar."""
        if state.is_world_process_zero:
            bar_format = "{percentage:3.0f}%|{bar}| {elapsed} passed, {remaining} left"
            self.training_bar = tqdm(total=1.0, dynamic_ncols=True, bar_format=bar_format)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if state.is_world_process_zero:
            self.training_bar.update(self.progress() - self.training_bar.n)
