"""The stop at SIGTERM, on its own; whole runs are stopped in test_resume.py."""

import os
import signal
import threading
from types import SimpleNamespace

import torch

from hf_vit_scratch.training.graceful_stop import GracefulStop

ARGS = SimpleNamespace(world_size=1, device=torch.device("cpu"))


def test_sigterm_is_a_request_within_the_context_alone():
    before = signal.getsignal(signal.SIGTERM)
    stop = GracefulStop(ARGS)

    with stop.listening():
        assert not stop.agreed(step=1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(step=2)

    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_can_train_without_a_signal():
    stop, errors = GracefulStop(ARGS), []

    def train():
        try:
            with stop.listening():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()

    assert not errors
