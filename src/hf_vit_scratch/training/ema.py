"""An exponential moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_model
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerState

from ..errors import UserError

# The weights that training goes on with, in a checkpoint beside model.safetensors, which holds the average.
TRAINED_WEIGHTS = "trained_weights.safetensors"


class EMA:
    """An average of a model's weights over its training steps; it changes places with them on request.

    It is on their device; `steps` is the number n of training steps in it already. Each further one multiplies it by d
    and adds 1 - d times the new weights. d is `decay`, but at first min(decay, (1 + n) / (10 + n)), as in TensorFlow's
    `ExponentialMovingAverage`: a slow average of a short training would stay near the first weights.
    """

    def __init__(self, model: nn.Module, decay: float, steps: int = 0):
        self._averages, self.n_averaged = [parameter.detach().clone() for parameter in model.parameters()], steps
        self._decay, self._is_swapped = decay, False

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the weights after a step; torch's `AveragedModel` would wait for the device."""
        weights = [parameter.data for parameter in model.parameters()]
        decay = min(self._decay, (1 + self.n_averaged) / (10 + self.n_averaged))
        get_ema_multi_avg_fn(decay)(self._averages, weights, self.n_averaged)
        self.n_averaged += 1

    @classmethod
    def start(cls, model: nn.Module, decay: float | None, state: TrainerState, checkpoint: Path | None) -> Self | None:
        """Begin an average, or go on with that of a checkpoint; return `None` without a decay.

        From a checkpoint, the model holds the average. It gets the weights that were trained.
        """
        if checkpoint is not None and (checkpoint / TRAINED_WEIGHTS).exists() != (decay is not None):
            out = "" if decay is None else "out"
            raise UserError(
                f"{checkpoint} was saved with{out} a moving average of the weights. Resume with{out} --ema_decay, as "
                "that run was."
            )
        if decay is None:
            return None
        if any(parameter.requires_grad and parameter.dtype.itemsize < 4 for parameter in model.parameters()):
            raise UserError(
                "ema_decay needs weights in float32: 16 bits round the steps of an average away. Load the model with "
                "dtype=torch.float32; bf16=True computes in bfloat16 all the same."
            )
        ema = cls(model, decay, state.global_step)
        if checkpoint is not None:
            load_model(model, checkpoint / TRAINED_WEIGHTS)
        return ema

    def swap(self, model: nn.Module) -> None:
        """Exchange the weights of a model and their average."""
        for place, parameter in enumerate(model.parameters()):
            parameter.data, self._averages[place] = self._averages[place], parameter.data

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Give a model the average, if there is one, as long as the context lasts. Contexts can be nested."""
        if self.n_averaged == 0 or self._is_swapped:
            yield
            return
        self.swap(model)
        self._is_swapped = True
        try:
            yield
        finally:
            self.swap(model)
            self._is_swapped = False
