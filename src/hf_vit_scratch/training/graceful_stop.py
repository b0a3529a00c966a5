"""A stop at SIGTERM or Ctrl-C that lets the current step end and saves first."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .arguments import ViTTrainingArguments

# Processes agree on stopping every so many steps; on an accelerator this waits for the device.
STEPS_BETWEEN_AGREEMENTS = 10
# One Ctrl-C can arrive twice: from the terminal, and from a launcher. Only one that comes later was pressed again.
SECONDS_BETWEEN_PRESSES = 1.0
SAVING = "\nSaving a checkpoint after this step or evaluation. Press Ctrl-C again to stop at once.\n"


class GracefulStop:
    """Remembers that SIGTERM or Ctrl-C arrived, and lets all processes agree on the step at which they stop."""

    def __init__(self, args: ViTTrainingArguments):
        self.args = args
        self.signal = 0  # that asks for a stop

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM and Ctrl-C as requests to stop, as long as the context lasts. A second Ctrl-C ends at once."""
        pressed = 0.0  # when Ctrl-C came first

        def request(number: int, _: Any) -> None:
            nonlocal pressed
            self.signal = number
            if number == signal.SIGINT and not pressed:
                pressed = time.monotonic()
                if self.args.process_index == 0 and multiprocessing.parent_process() is None:  # workers inherit this
                    with suppress(BrokenPipeError):  # of a `tee` that has stopped at once
                        os.write(2, SAVING.encode())  # a `print` may be what the signal has interrupted
            elif number == signal.SIGINT and time.monotonic() - pressed > SECONDS_BETWEEN_PRESSES:
                raise KeyboardInterrupt

        before: dict[signal.Signals, Any] = {}
        with suppress(ValueError):  # not in the main thread, where no signal arrives
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # it is where a script starts a background command
                    before[number] = signal.signal(number, request)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, step: int) -> bool:
        """Return whether all processes stop after this step, because one of them was asked to."""
        if self.args.world_size > 1:
            if self.args.device.type != "cpu" and step % STEPS_BETWEEN_AGREEMENTS:
                return False
            asked = torch.tensor([float(self.signal)], device=self.args.device)
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
            self.signal = int(asked.item())
        return self.signal > 0
