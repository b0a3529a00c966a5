"""The clock, on its own; whole runs by the clock are in test_trainer.py and test_resume.py."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from hf_vit_scratch.training import clock as clock_module
from hf_vit_scratch.training.clock import Clock


@pytest.fixture
def at(monkeypatch):
    """Set the time in seconds."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return lambda seconds: setattr(now, "seconds", seconds)


def make_clock(minutes):
    args = SimpleNamespace(max_train_minutes=minutes, world_size=1, device=torch.device("cpu"), eval_strategy="steps",
                           save_strategy="no")  # fmt: skip
    clock = Clock(args)
    clock.start()
    return clock


@pytest.mark.parametrize(
    ("seconds", "step", "expected"),
    [(15, 10, 0.25), (15, 60, 0.6), (90, 10, 1.0)],
    ids=["time is ahead", "steps are ahead", "over"],
)
def test_progress_is_the_larger_share_of_time_and_steps(seconds, step, expected, at):
    clock = make_clock(minutes=1)
    clock.update(TrainerState(global_step=1, max_steps=100), TrainerControl())
    at(100.0 + seconds)

    clock.update(TrainerState(global_step=step, max_steps=100), TrainerControl())

    assert clock.progress == pytest.approx(expected)


@pytest.mark.parametrize(
    ("log", "compiled", "later", "before", "expected"),
    [([], 124.0, 142.0, 0.0, 0.5), ([{"loss": 1.0, "minutes": 0.5}], 115.0, 122.5, 0.5, 0.75)],
    ids=["new run", "resumed run"],
)
def test_first_step_which_compiles_is_no_progress(log, compiled, later, before, expected, at):
    clock = make_clock(minutes=1)
    clock.resume(TrainerState(log_history=log, global_step=0, max_steps=10**6))
    at(compiled)
    clock.update(TrainerState(global_step=1, max_steps=10**6), TrainerControl())
    assert clock.progress == pytest.approx(before, abs=1e-5)
    at(later)

    clock.update(TrainerState(global_step=2, max_steps=10**6), TrainerControl())

    assert clock.progress == pytest.approx(expected)


def test_training_ends_with_an_evaluation_when_the_time_is_over(at):
    clock, control = make_clock(minutes=1), TrainerControl()
    at(161.0)

    clock.update(TrainerState(global_step=1, max_steps=100), control)

    assert (control.should_training_stop, control.should_evaluate, control.should_save) == (True, True, False)


@pytest.mark.parametrize(("step", "progress"), [(10, 0.5), (60, 0.6)], ids=["time is ahead", "steps are ahead"])
def test_time_and_steps_of_the_resumed_run_count(step, progress, at):
    clock = make_clock(minutes=1)
    log = [{"loss": 1.0, "minutes": 0.25}, {"eval_loss": 1.0, "minutes": 0.5}, {"train_loss": 1.0}]

    clock.resume(TrainerState(log_history=log, global_step=step, max_steps=100))
    assert clock.progress == pytest.approx(progress)  # before the first step asks for its learning rate
    at(115.0)

    assert clock.minutes == pytest.approx(0.75)


def test_run_without_a_limit_is_not_ended(at):
    clock, control = make_clock(minutes=None), TrainerControl()
    at(1e9)

    clock.update(TrainerState(global_step=1, max_steps=100), control)

    assert (clock.progress, control.should_training_stop) == (0.0, False)
