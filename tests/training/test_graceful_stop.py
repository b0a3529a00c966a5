"""The stop at SIGTERM or Ctrl-C, on its own; whole runs are stopped in test_resume.py."""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from test_trainer import make_trainer

from hf_vit_scratch.training import graceful_stop
from hf_vit_scratch.training.checkpointing import find_checkpoint
from hf_vit_scratch.training.graceful_stop import GracefulStop

ARGS = SimpleNamespace(world_size=1, process_index=0, device=torch.device("cpu"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_a_request_within_the_context_alone(number):
    before = signal.getsignal(number)
    stop = GracefulStop(ARGS)

    with stop.listening():
        assert not stop.agreed(step=1)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a launcher hands on what the terminal has sent already
        assert stop.agreed(step=2)
        assert stop.signal == number

    assert signal.getsignal(number) is before


def test_second_ctrl_c_ends_at_once(monkeypatch, capfd):
    monkeypatch.setattr(graceful_stop, "SECONDS_BETWEEN_PRESSES", 0.0)
    with GracefulStop(ARGS).listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert "Press Ctrl-C again to stop at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt, match="^$"):
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_that_has_ended_the_reader_of_the_output_is_a_request_all_the_same(monkeypatch):
    def refuse(*args):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(graceful_stop.os, "write", refuse)
    stop = GracefulStop(ARGS)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed(step=1)


def test_run_goes_on_without_a_reader_of_its_output(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, logging_steps=1, save_strategy="steps", save_steps=6, disable_tqdm=True)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        trainer.train()
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            broken.close()

    assert find_checkpoint(True, tmp_path) == tmp_path / "checkpoint-6"


def test_ctrl_c_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a command in the background of a script
    try:
        stop = GracefulStop(ARGS)
        with stop.listening():
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.agreed(step=1)
    finally:
        signal.signal(signal.SIGINT, before)


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
