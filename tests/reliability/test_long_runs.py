"""What a long run must not do: grow, leave something open, or depend on anything but its seed."""

import ctypes
import gc

import numpy as np
import psutil
import pytest
import torch
from test_train_script import SMALL, train
from test_trainer import make_trainer
from transformers import TrainerCallback

from hf_vit_scratch.data import dataset
from hf_vit_scratch.speed.hardware import can_compile

pytestmark = pytest.mark.slow

ALLOWED = 400  # bytes per step: the log takes some


class Memory(TrainerCallback):
    """Resident memory, in bytes, and open files and child processes, every so many steps."""

    def __init__(self, every):
        self.every, self.process, self.rows = every, psutil.Process(), []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            if self.every > 1:
                gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what is free is not a leak
            open_files, children = self.process.num_fds(), len(self.process.children(recursive=True))
            self.rows.append((state.global_step, self.process.memory_info().rss, open_files, children))


def test_memory_of_a_long_run_is_flat_and_nothing_stays_open(tmp_path, times, figure):
    number = times(900, 3000)
    trainer = make_trainer(
        tmp_path, max_steps=number, per_device_train_batch_size=4, logging_steps=100, save_strategy="steps",
        save_steps=150, save_total_limit=2, eval_strategy="no", ema_decay=0.9,
    )  # fmt: skip
    memory = Memory(50)
    trainer.add_callback(memory)
    open_before, children_before = memory.process.num_fds(), len(memory.process.children(recursive=True))

    trainer.train()

    steps, resident, open_files, children = np.array(memory.rows[len(memory.rows) // 3 :]).T
    slope = np.polyfit(steps, resident, 1)[0]
    assert slope < ALLOWED, slope
    # Some are open for a moment, and one may be another library's; what leaks with each checkpoint is 3 more.
    assert min(open_files[-3:]) <= min(open_files[:3]) + 1, open_files
    assert memory.process.num_fds() < open_before + 10
    assert set(children) == {children_before}
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    figure(
        f"{number:,} steps: memory grows by {slope:.0f} bytes per step; no file or process stays open; 2 checkpoints"
    )


@pytest.mark.parametrize("persistent", [False, True], ids=["new_workers", "persistent_workers"])
def test_worker_processes_end_with_the_epoch_or_the_run(persistent, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "DECODED_BYTES_KEPT", 0)
    trainer = make_trainer(tmp_path, mixed=True, max_steps=12, per_device_train_batch_size=8, dataloader_num_workers=2,
                           dataloader_persistent_workers=persistent)  # fmt: skip
    memory = Memory(1)
    trainer.add_callback(memory)
    before = memory.process.children(recursive=True)

    trainer.train()
    most = max(children for *_, children in memory.rows)
    del trainer, memory.rows
    gc.collect()

    assert most - len(before) in (2, 4)  # those of an epoch that ends may still be there
    workers = set(memory.process.children(recursive=True)) - set(before)
    assert psutil.wait_procs(workers, timeout=30)[1] == []  # with torch 2.11 they take a moment to end


def trained(folder, *flags):
    """The bytes of the weights that a run ends with."""
    train.main([*SMALL, "--max_steps", "8", "--save_strategy", "no", "--eval_strategy", "no",
                "--load_best_model_at_end", "false", "--mixup_alpha", "0.2", "--hidden_dropout_prob", "0.1",
                "--output_dir", str(folder), *flags])  # fmt: skip
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        ["--torch_compile", "true"],
        ["--muon", "true", "--ema_decay", "0.9"],
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch, of itself
def test_same_seed_gives_the_same_weights(flags, tmp_path):
    if "--torch_compile" in flags and not can_compile("cpu"):
        pytest.skip("there is no C++ compiler")
    torch._dynamo.reset()
    first = trained(tmp_path / "first", *flags)
    torch._dynamo.reset()
    assert trained(tmp_path / "second", *flags) == first


def test_another_seed_gives_other_weights(tmp_path):
    assert trained(tmp_path / "first") != trained(tmp_path / "second", "--seed", "7")
