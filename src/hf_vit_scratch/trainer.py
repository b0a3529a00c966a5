"""What training a Vision Transformer from scratch needs beyond the stock Trainer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from .data import ImageClassificationDataset
from .errors import UserError


class _SetEpoch(TrainerCallback):
    """Tell the dataset its epoch; accelerate does so for one process that starts afresh, and for no other."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if isinstance(train_dataloader.dataset, ImageClassificationDataset):
            train_dataloader.dataset.set_epoch(int(state.epoch or 0))


class ViTTrainer(Trainer):
    """The stock `Trainer` with decay groups for images, strict checkpoints, and throughput in the log."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.add_callback(_SetEpoch())
        self._images = 0  # trained on in this process since the last log
        self._logged_time: float | None = None

    @property
    def has_started(self) -> bool:
        """Whether training has come to its first step."""
        return self._logged_time is not None

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

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One forward and backward pass; the first one starts the clock of the throughput."""
        if self._logged_time is None:
            self._images, self._logged_time = 0, time.perf_counter()
        self._images += len(inputs["pixel_values"])
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `images_per_second`, since the last such line and without evaluation and saving, to the training log."""
        if "loss" in logs and self._logged_time is not None:
            now = time.perf_counter()
            logs["images_per_second"] = round(self._images * self.args.world_size / (now - self._logged_time), 1)
            self._images, self._logged_time = 0, now
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
            UserError: Names the tensors that are missing or too many.
        """
        if load_result.missing_keys or load_result.unexpected_keys:
            raise UserError(
                "A checkpoint must hold exactly the model's tensors. "
                f"Missing: {load_result.missing_keys or 'none'}; unexpected: {load_result.unexpected_keys or 'none'}. "
                "Resume with the configuration that the checkpoint was made with."
            )
