"""An exponential moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# In a checkpoint, beside model.safetensors, which holds the average.
TRAINED_WEIGHTS = "trained_weights.safetensors"


class EMA:
    """The average of a model's weights over its training steps; it changes places with them on request.

    Args:
        model: The model that is trained, on its device. Its weights are the start of the average.
        decay: Share of the average that each step keeps.
        steps: Number of steps that the average holds already.
    """

    def __init__(self, model: nn.Module, decay: float, steps: int = 0):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.average.n_averaged.fill_(steps)
        self._is_swapped = False

    @property
    def steps(self) -> int:
        """Number of steps that the average holds."""
        return int(self.average.n_averaged)

    def update(self, model: nn.Module) -> None:
        """Add the weights of a model to the average."""
        self.average.update_parameters(model)

    def swap(self, model: nn.Module) -> None:
        """Exchange the weights of a model and their average."""
        averages = dict(self.average.module.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.data, averages[name].data = averages[name].data, parameter.data

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Give a model the average, if there is one, as long as the context lasts. Contexts can be nested."""
        if self.steps == 0 or self._is_swapped:
            yield
            return
        self.swap(model)
        self._is_swapped = True
        try:
            yield
        finally:
            self.swap(model)
            self._is_swapped = False


def save_trained_weights(model: nn.Module, checkpoint: Path) -> None:
    """Save the weights that training goes on with, in a checkpoint whose model is the average."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, checkpoint / TRAINED_WEIGHTS, metadata={"format": "pt"})


def load_trained_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load what `save_trained_weights` has saved."""
    model.load_state_dict(load_file(checkpoint / TRAINED_WEIGHTS))
