"""What training a Vision Transformer from scratch needs beyond the stock Trainer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer


class ViTTrainer(Trainer):
    """The stock `Trainer` with decay groups for images, strict checkpoints, and throughput in the log."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._logged_step = 0
        self._logged_time: float | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as the stock Trainer does."""
        self._logged_time = None
        return super().train(*args, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay applies to: the weights of linear layers and convolutions, nothing else.

        So biases, norms, the class token and the positions stay undecayed (Beyer et al. 2022,
        https://arxiv.org/abs/2205.01580, and its code); the stock Trainer decays the last two.
        """
        return [
            f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
        ]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One forward and backward pass; the first one starts the clock of the throughput."""
        if self._logged_time is None:
            self._logged_step, self._logged_time = self.state.global_step, time.perf_counter()
        return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `images_per_second`, since the last such line and without evaluation and saving, to the training log."""
        if "loss" in logs and self._logged_time is not None:
            now = time.perf_counter()
            images = (self.state.global_step - self._logged_step) * self.get_total_train_batch_size(self.args)
            logs["images_per_second"] = round(images / (now - self._logged_time), 1)
            self._logged_step, self._logged_time = self.state.global_step, now
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, as the stock Trainer does."""
        with self._clock_stopped():
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._clock_stopped():
            super()._save_checkpoint(*args, **kwargs)

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._logged_time is not None:
            self._logged_time += time.perf_counter() - start

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that does not hold exactly this model's tensors; the stock Trainer only warns.

        Called after resuming and after the best model is loaded. With a warning alone a run goes on from a mixture of
        loaded and fresh weights (https://github.com/huggingface/transformers/issues/43701).

        Raises:
            ValueError: Names the tensors that are missing or too many.
        """
        if load_result.missing_keys or load_result.unexpected_keys:
            raise ValueError(
                "A checkpoint must hold exactly the model's tensors. "
                f"Missing: {load_result.missing_keys or 'none'}; unexpected: {load_result.unexpected_keys or 'none'}. "
                "Resume with the configuration that the checkpoint was made with."
            )
