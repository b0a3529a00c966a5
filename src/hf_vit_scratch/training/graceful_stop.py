"""A stop at SIGTERM that lets the current step end and saves first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .arguments import ViTTrainingArguments

# Processes agree on stopping every so many steps; on an accelerator this waits for the device.
STEPS_BETWEEN_AGREEMENTS = 10


class GracefulStop:
    """Remembers that SIGTERM arrived, and lets all processes agree on the step at which they stop."""

    def __init__(self, args: ViTTrainingArguments):
        self.args = args
        self.requested = False  # in this process

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM as a request to stop, as long as the context lasts."""

        def request(*_: Any) -> None:
            self.requested = True

        try:
            before = signal.signal(signal.SIGTERM, request)
        except ValueError:  # not in the main thread, where no signal arrives
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def agreed(self, step: int) -> bool:
        """Return whether all processes stop after this step, because one of them was asked to."""
        if self.args.world_size == 1:
            return self.requested
        if self.args.device.type != "cpu" and step % STEPS_BETWEEN_AGREEMENTS:
            return False
        asked = torch.tensor([float(self.requested)], device=self.args.device)
        torch.distributed.all_reduce(asked)
        return bool(asked.item())
