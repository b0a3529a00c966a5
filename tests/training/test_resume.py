"""Runs that are killed, stopped, or resumed with something else than they began with."""

import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train_script import ROOT, SMALL, train
from test_trainer import EarlierIsBetter, make_trainer, run_out_of_memory_above

from hf_vit_scratch.data import dataset
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.speed import optimize
from hf_vit_scratch.training.checkpointing import finish_checkpoint
from hf_vit_scratch.training.ema import EMA
from hf_vit_scratch.training.recipe import parse_recipe
from hf_vit_scratch.training.run_directory import resolve_checkpoint
from hf_vit_scratch.training.trainer import ViTTrainer


@pytest.mark.slow
def test_sigterm_saves_and_the_run_can_go_on(tmp_path):
    argv = [*SMALL, "--max_steps", "60", "--save_strategy", "no", "--eval_strategy", "no", "--logging_steps", "1",
            "--load_best_model_at_end", "false", "--dataloader_num_workers", "2", "--ema_decay", "0.9",
            "--output_dir", str(tmp_path / "run")]  # fmt: skip
    # Kept images would leave nothing to do for the worker processes.
    program = "import sys, train; from hf_vit_scratch.data import dataset; dataset.DECODED_BYTES_KEPT = 0"
    program += "; train.main(sys.argv[1:])"
    command = [sys.executable, "-c", program, *argv]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    for line in process.stdout:
        if "'loss'" in line:
            os.killpg(process.pid, signal.SIGTERM)  # as job schedulers do: the worker processes get it too
            break

    output, _ = process.communicate(timeout=120)

    assert process.returncode == 128 + signal.SIGTERM
    assert re.search(r"Stopped by SIGTERM\. The last .*checkpoint-\d+\. Continue with: python train\.py", output)
    assert "Traceback" not in output
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    assert 0 < step < 60
    resumed = train.main([*argv, "--resume_from_checkpoint", "true"])
    assert resumed["epoch"] == pytest.approx(60 / 11)


def test_run_stopped_by_ctrl_c_goes_on_with_the_same_bits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dataset, "DECODED_BYTES_KEPT", 0)  # or a worker process would have nothing to do
    caplog.set_level(logging.INFO)
    argv = [*SMALL, "--max_steps", "6", "--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end",
            "false", "--dataloader_num_workers", "1", "--output_dir"]  # fmt: skip
    train.main([*argv, str(tmp_path / "whole")])
    training_step = ViTTrainer.training_step

    def press_ctrl_c(self, *args):
        if self.state.global_step == 2:  # a terminal sends it to the worker processes, too
            for pid in (*(child.pid for child in multiprocessing.active_children()), os.getpid()):
                os.kill(pid, signal.SIGINT)
        return training_step(self, *args)

    monkeypatch.setattr(ViTTrainer, "training_step", press_ctrl_c)
    with pytest.raises(SystemExit, match="130"):
        train.main([*argv, str(tmp_path / "stopped")])

    checkpoint = tmp_path / "stopped" / "checkpoint-3"
    said = f"Stopped by Ctrl-C. The last complete checkpoint is {checkpoint}. Continue with: python train.py --hidden"
    assert said in caplog.text
    assert caplog.messages[-1].endswith(" --resume_from_checkpoint true")
    monkeypatch.setattr(ViTTrainer, "training_step", training_step)
    train.main([*argv, str(tmp_path / "stopped"), "--resume_from_checkpoint", "true"])
    assert re.search(rf"Continues from {checkpoint}, after 0\.\d minutes of training\.", caplog.text)
    assert "That run is finished" not in caplog.text
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert resumed == whole


def test_second_ctrl_c_before_the_checkpoint_is_complete_advises_nothing(tmp_path, monkeypatch, caplog):
    def press_ctrl_c(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return torch.zeros(())

    def press_again(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(ViTTrainer, "training_step", press_ctrl_c)
    monkeypatch.setattr(ViTTrainer, "close_checkpoint", press_again)
    argv = [*SMALL, "--eval_strategy", "no", "--load_best_model_at_end", "false", "--save_strategy", "no"]
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt, match="^$"):
        train.main([*argv, "--output_dir", str(tmp_path / "run")])
    assert "Continue with" not in caplog.text


def test_stop_of_a_run_that_saves_the_model_alone_advises_a_new_one(tmp_path, monkeypatch, caplog):
    def press_ctrl_c(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return torch.zeros(())

    monkeypatch.setattr(ViTTrainer, "training_step", press_ctrl_c)
    argv = [*SMALL, "--save_only_model", "true", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    with caplog.at_level("INFO"), pytest.raises(SystemExit, match="130"):
        train.main([*argv, "--save_strategy", "no", "--output_dir", str(tmp_path / "run")])
    assert caplog.messages[-1].endswith("a run cannot be resumed from it, but --model can start a new one")


def test_run_stopped_at_the_end_of_an_epoch_keeps_its_evaluation(tmp_path, monkeypatch):
    argv = [*SMALL, "--num_train_epochs", "2", "--eval_strategy", "epoch", "--save_strategy", "epoch", "--output_dir"]
    expected = train.main([*argv, str(tmp_path / "whole")])
    training_step = ViTTrainer.training_step

    def press_ctrl_c(self, *args):
        if self.state.global_step == 10:  # of the 11 of an epoch
            os.kill(os.getpid(), signal.SIGINT)
        return training_step(self, *args)

    monkeypatch.setattr(ViTTrainer, "training_step", press_ctrl_c)
    with pytest.raises(SystemExit, match="130"):
        train.main([*argv, str(tmp_path / "stopped")])
    monkeypatch.setattr(ViTTrainer, "training_step", training_step)
    resumed = train.main([*argv, str(tmp_path / "stopped"), "--resume_from_checkpoint", "true"])

    whole, stopped = (json.loads((tmp_path / name / "log.json").read_text()) for name in ("whole", "stopped"))
    assert resumed["test_loss"] == expected["test_loss"]
    losses = [[line["eval_loss"] for line in log if "eval_loss" in line] for log in (whole, stopped)]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def _fill_the_disk_of_a_file():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "write",
    [
        _fill_the_disk_of_a_file,
        lambda: torch.save(torch.zeros(9), "/dev/full"),  # torch's errors do not name the reason
        lambda: torch.save(torch.zeros(10**6), "/dev/full"),
    ],
    ids=["file", "small tensor", "large tensor"],
)
def test_half_written_checkpoint_is_deleted(write, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    save_optimizer = type(trainer)._save_optimizer_and_scheduler

    def fail_at_the_second(self, output_dir):
        save_optimizer(self, output_dir)
        if self.state.global_step == 4:
            write()

    monkeypatch.setattr(type(trainer), "_save_optimizer_and_scheduler", fail_at_the_second)
    with pytest.raises(
        UserError,
        match=r"has no space left \(.+\)\. Free some\. The last complete checkpoint is .*checkpoint-2\.",
    ):
        trainer.train()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "last"]
    assert (tmp_path / "last" / "trainer_state.json").is_file()


def test_best_and_last_lead_to_their_checkpoints(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="earliness", greater_is_better=True,
    )  # fmt: skip
    trainer.add_callback(EarlierIsBetter)

    trainer.train()

    assert (tmp_path / "last").resolve().name == "checkpoint-6"
    assert (tmp_path / "best").resolve().name == "checkpoint-1"
    assert Path(trainer.state.best_model_checkpoint).resolve() == (tmp_path / "best").resolve()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    for path in tmp_path.glob("checkpoint-*"):
        saved = json.loads((path / "trainer_state.json").read_text())["best_model_checkpoint"]
        assert Path(saved).parent == tmp_path


def test_run_killed_before_its_first_checkpoint_can_start_again(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# python train.py\n")
    (tmp_path / "_run.json").write_text("{}")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "runs").mkdir()  # TensorBoard's
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"half")
    argv = [*SMALL, "--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no"]

    assert train.main([*argv, "--output_dir", str(tmp_path)])["epoch"] == pytest.approx(2 / 11)


def test_resuming_with_another_recipe_names_what_differs(tmp_path):
    argv = [*SMALL, "--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "steps", "--save_steps", "2",
            "--load_best_model_at_end", "false", "--output_dir", str(tmp_path)]  # fmt: skip
    train.main(argv)
    resume = ["--resume_from_checkpoint", "true"]

    with pytest.raises(
        UserError, match=r"with another recipe: learning_rate 0\.5 \(was 0\.002\), ema_decay 0\.9 \(was uns"
    ):
        train.main([*argv, *resume, "--learning_rate", "0.5", "--ema_decay", "0.9"])
    assert train.main([*argv, *resume, "--logging_steps", "3"])["epoch"] == pytest.approx(2 / 11)


BEST, PATIENCE = ["--load_best_model_at_end", "true"], ["--early_stopping_patience", "3"]


@pytest.mark.parametrize(
    ("flags", "changed", "message"),
    [
        (["--eval_steps", "2", *PATIENCE], ["--eval_steps", "1"], r"eval_steps 1\.0 \(was 2\.0\)"),
        (["--eval_steps", "2", *PATIENCE], ["--logging_steps", "1"], None),
        (
            BEST,
            ["--eval_strategy", "no", "--save_strategy", "no"],
            r"eval_strategy no \(was steps\), save_strategy no",
        ),
        (
            ["--eval_steps", "null", "--logging_steps", "2", *PATIENCE],  # they come with log lines
            ["--logging_steps", "1"],
            r"logging_steps 1\.0 \(was 2\.0\)",
        ),
    ],
)
def test_evaluations_that_decide_the_result_stay_as_they_were(flags, changed, message, tmp_path):
    argv = ["--eval_strategy", "steps", "--save_strategy", "steps", *flags, "--output_dir", str(tmp_path)]
    parse_recipe(argv)[1].save(tmp_path, "the command")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "scheduler.pt").touch()
    finish_checkpoint(tmp_path / "checkpoint-2", None, None)
    args, recipe = parse_recipe([*argv, *changed, "--resume_from_checkpoint", "true"])

    with nullcontext() if message is None else pytest.raises(UserError, match=rf"with another recipe: {message}"):
        assert resolve_checkpoint(args.training, recipe) == tmp_path / "checkpoint-2"


def test_resumed_run_logs_evaluates_and_saves_when_its_own_flags_say(tmp_path):
    options = {"save_strategy": "steps", "eval_strategy": "steps", "load_best_model_at_end": False, "max_steps": 8}
    every_four = {"save_steps": 4, "eval_steps": 4, "logging_steps": 4}
    make_trainer(tmp_path, **options, **every_four).train()
    shutil.rmtree(tmp_path / "checkpoint-8")

    resumed = make_trainer(tmp_path, **options, save_steps=3, eval_steps=3, logging_steps=7, save_total_limit=9)
    resumed.train(resume_from_checkpoint=True)

    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
        "checkpoint-8",
    ]
    evaluated = [line["step"] for line in resumed.state.log_history if "eval_loss" in line]
    logged = [line["step"] for line in resumed.state.log_history if "loss" in line]
    assert (evaluated, logged) == ([4, 6, 8], [4, 6, 7, 8])


def test_resuming_with_other_images_is_refused(class_folders, tmp_path, caplog):
    recipe = "digits"
    argv = [recipe, *SMALL, "--data", str(class_folders), "--max_steps", "1", "--eval_strategy", "no",
            "--save_strategy", "steps", "--save_steps", "1", "--load_best_model_at_end", "false",
            "--output_dir", str(tmp_path / "run")]  # fmt: skip
    train.main(argv)
    resume = [*argv, "--resume_from_checkpoint", "true"]
    shutil.copy(class_folders / "temple" / "00.jpg", class_folders / "temple" / "another.jpg")

    with pytest.raises(UserError, match=r"with other images: 20 train, .*, now 21 train, .* The splits would"):
        train.main(resume)
    (class_folders / "temple" / "another.jpg").unlink()
    (class_folders / "temple").rename(class_folders / "palace")
    with pytest.raises(UserError, match=r"with other images: "):
        train.main(resume)
    (class_folders / "palace").rename(class_folders / "temple")
    assert train.main([f"{part}/" if part == str(class_folders) else part for part in resume])["epoch"] == 1


def test_best_model_of_another_folder_gets_no_link(tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 3, "save_steps": 3,
               "load_best_model_at_end": True, "metric_for_best_model": "earliness"}  # fmt: skip
    for folder, checkpoint in ((tmp_path / "a", None), (tmp_path / "b", str(tmp_path / "a" / "checkpoint-3"))):
        trainer = make_trainer(folder, **options)
        trainer.add_callback(EarlierIsBetter)
        trainer.train(resume_from_checkpoint=checkpoint)

    assert (tmp_path / "a" / "best").is_dir()
    assert not (tmp_path / "b" / "best").is_symlink()


@pytest.mark.parametrize("decays", [(0.9, None), (None, 0.9)])
def test_average_cannot_be_switched_within_a_run(decays, tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, ema_decay=decays[0]).train()

    with pytest.raises(UserError, match=r"was saved with(out)? a moving average of the weights"):
        make_trainer(tmp_path, ema_decay=decays[1]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_checkpoint_holds_the_average_as_the_model_and_the_trained_weights_beside_it(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3, ema_decay=0.9)

    trainer.train()

    average, trained = (
        load_file(tmp_path / "last" / name) for name in ("model.safetensors", "trained_weights.safetensors")
    )
    final = trainer.model.state_dict()
    assert all(torch.equal(final[name], average[name]) for name in final)
    assert not torch.equal(average["classifier.weight"], trained["classifier.weight"])


def test_average_of_a_resumed_run_survives_a_smaller_batch_size(tmp_path, monkeypatch):
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, ema_decay=0.9).train()
    resumed, averages = make_trainer(tmp_path, auto_find_batch_size=True, ema_decay=0.9), []
    run_out_of_memory_above(4, resumed, monkeypatch)
    monkeypatch.setattr(EMA, "update_parameters", lambda self, model: averages.append(list(self._averages)))

    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    names = [name for name, _ in resumed.model.named_parameters()]
    assert all(torch.equal(saved[name], average) for name, average in zip(names, averages[0], strict=True))


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_best_model_of_a_finished_run_that_lies_elsewhere_stays_the_result(how, tmp_path, caplog):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 6,
               "load_best_model_at_end": True, "metric_for_best_model": "earliness"}  # fmt: skip
    trainer, resumed = (make_trainer(tmp_path / name, **options) for name in "ab")
    trainer.add_callback(EarlierIsBetter)
    resumed.add_callback(EarlierIsBetter)
    trainer.train()
    shutil.rmtree(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    if how == "renamed":
        shutil.rmtree(tmp_path / "a")
    else:
        (tmp_path / "a" / "checkpoint-2" / "model.safetensors").write_bytes(b"damaged")

    with caplog.at_level("INFO"):
        resumed.train(resume_from_checkpoint=True)

    assert "That run is finished: nothing is left to train. To train longer, start a new run." in caplog.messages
    best = load_file(tmp_path / "b" / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(tensor, best[name]) for name, tensor in resumed.model.state_dict().items())


def test_time_spent_counts_on_in_a_resumed_run(tmp_path):
    options = {"max_train_minutes": 0.02, "max_steps": 100_000, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, **options)
    start = time.perf_counter()
    trainer.train()
    assert trainer.state.global_step < 100_000
    assert time.perf_counter() - start >= 1.2
    spent = 60 * max(logs["minutes"] for logs in trainer.state.log_history if "loss" in logs)
    assert 0 < spent <= time.perf_counter() - start

    resumed = make_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str((tmp_path / "last").resolve()))

    assert resumed.clock.seconds_before == spent


def test_resumed_run_repeats_the_choice_of_speed(tmp_path, monkeypatch):
    argv = [*SMALL, "--output_dir", str(tmp_path), "--eval_strategy", "no", "--load_best_model_at_end", "false",
            "--save_strategy", "steps", "--save_steps", "2", "--max_steps", "4"]  # fmt: skip
    monkeypatch.setattr(optimize, "_choose", lambda *args: ("sdpa+joined", {"sdpa": 1.0, "sdpa+joined": 0.5}))
    train.main(argv)
    shutil.rmtree(tmp_path / "checkpoint-4")
    monkeypatch.setattr(optimize, "_choose", lambda *args: pytest.fail("the choice was made anew"))

    train.main([*argv, "--resume_from_checkpoint", "true"])

    assert "sdpa+joined 0.50\nspeed_choice: sdpa+joined\n" in (tmp_path / "recipe.yaml").read_text()
