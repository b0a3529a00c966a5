"""Runs that are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_train_script import ROOT, SMALL
from test_trainer import At, make_trainer

from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training import checkpointing, run_directory, trainer
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.run_directory import lock_run_directory

pytestmark = pytest.mark.slow


def test_killed_runs_that_are_resumed_end_as_the_one_left_alone(tmp_path, times, figure):
    number = times(3, 50)  # at least one of each kind
    script = Path(__file__).with_name("kill_and_resume.py")

    done = subprocess.run([sys.executable, script, tmp_path, str(number)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("'model': True, 'trained weights': True, 'optimizer': True") == number
    figure(f"{number} kills: no checkpoint damaged, no commit torn, all final weights equal to the last bit")


def test_files_of_a_checkpoint_are_on_the_disk_before_it_is_complete(tmp_path, monkeypatch):
    order = []
    write_through, replace = checkpointing.write_through, checkpointing.os.replace

    def note(path):
        order.append(Path(path).name)
        write_through(path)

    def note_and_replace(source, target):
        order.append(f"-> {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(checkpointing, "write_through", note)
    monkeypatch.setattr(checkpointing.os, "replace", note_and_replace)
    make_trainer(tmp_path, save_strategy="steps", save_steps=6).train()

    completed = order.index(f"-> {checkpointing.CHECKSUMS}")
    files = {path.name for path in (tmp_path / "checkpoint-6").iterdir()} - {checkpointing.CHECKSUMS}
    assert files | {f".{checkpointing.CHECKSUMS}"} < set(order[:completed])
    assert order[completed + 1 : completed + 3] == ["checkpoint-6", tmp_path.name]  # the names themselves


def test_checkpoint_loses_its_checksums_before_its_files(tmp_path, monkeypatch):
    deleted = []
    rmtree = checkpointing.shutil.rmtree

    def note(path, *args, **kwargs):
        deleted.append((Path(path).name, (Path(path) / checkpointing.CHECKSUMS).exists()))
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(checkpointing.shutil, "rmtree", note)
    make_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=1).train()

    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert deleted == [("checkpoint-2", False)]


def test_two_runs_started_into_one_folder_do_not_destroy_each_other(tmp_path, times, figure):
    number = times(2, 3)
    argv = [*SMALL, "--max_steps", "20", "--save_strategy", "steps", "--save_steps", "20", "--eval_strategy", "no",
            "--load_best_model_at_end", "false", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    command = [sys.executable, ROOT / "train.py", *argv]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(number)
    ]

    outputs = [run.communicate(timeout=300)[0] for run in runs]

    assert sorted(run.returncode for run in runs) == [0, *[2] * (number - 1)], outputs
    for run, output in zip(runs, outputs, strict=True):
        if run.returncode:
            assert "another run is writing into" in output or "is not empty" in output
    assert (tmp_path / "run" / "checkpoint-20" / "trainer_state.json").is_file()
    figure(f"{number} runs started at once into one folder: one trains, the others are refused")


def test_folder_is_free_after_a_run_has_failed(tmp_path):
    args = ViTTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(RuntimeError, match="a fault"), lock_run_directory(args):
        raise RuntimeError("a fault")
    with (
        lock_run_directory(args),
        pytest.raises(UserError, match="another run is writing into .*run"),
        lock_run_directory(args),
    ):
        pass


def test_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    def refuse(self, timeout):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_directory.FileLock, "acquire", refuse)
    args = ViTTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(UserError, match=r"run cannot be written to: .*Permission denied"), lock_run_directory(args):
        pass


def test_process_that_does_not_write_claims_nothing(tmp_path, monkeypatch):
    args = ViTTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with lock_run_directory(args):
        monkeypatch.setattr(type(args), "should_save", False)
        with lock_run_directory(args):
            pass


def test_run_that_stops_at_the_end_of_an_epoch_always_has_a_complete_checkpoint(tmp_path, monkeypatch):
    complete = []
    delete = trainer.delete_checkpoint

    def note(folder):
        delete(folder)
        complete.append(len(checkpointing.complete_checkpoints(tmp_path)))

    monkeypatch.setattr(trainer, "delete_checkpoint", note)  # of this module: before a checkpoint is written
    run = make_trainer(tmp_path, max_steps=30, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1)
    run.add_callback(At(5, lambda control: os.kill(os.getpid(), signal.SIGTERM)))
    run.train()  # three steps in an epoch; the signal of step 5 is heeded at 6, which is saved twice

    assert complete == [0, 1, 1]


def test_disk_holds_no_more_checkpoints_than_asked_for(tmp_path, monkeypatch):
    most = 0
    finish = trainer.finish_checkpoint

    def count(*args):
        nonlocal most
        finish(*args)
        most = max(most, len(list(tmp_path.glob("checkpoint-*"))))

    monkeypatch.setattr(trainer, "finish_checkpoint", count)
    make_trainer(tmp_path, max_steps=30, save_strategy="steps", save_steps=2, save_total_limit=2).train()

    assert most == 2
