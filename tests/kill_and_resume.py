"""Run by `test_resume.py` or by hand: kill a run at random moments, resume it, and compare with one left alone.

    python tests/kill_and_resume.py FOLDER NUMBER_OF_KILLS

The run has worker processes, a moving average, MixUp, CutMix, Muon, dropout and several epochs. Processes are forked
from one that has imported everything, as importing takes longer than the run.
"""

import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # noqa: E402

ARGV = [
    "--hidden_size", "32", "--num_hidden_layers", "2", "--intermediate_size", "64", "--use_cpu", "true",
    "--max_steps", "40", "--per_device_train_batch_size", "96", "--save_strategy", "steps", "--save_steps", "4",
    "--eval_strategy", "steps", "--eval_steps", "8", "--load_best_model_at_end", "false", "--disable_tqdm", "true",
    "--muon", "true", "--ema_decay", "0.9", "--mixup_alpha", "0.4", "--cutmix_alpha", "1",
    "--label_smoothing_factor", "0.1", "--drop_path_rate", "0.1", "--hidden_dropout_prob", "0.1",
    "--augmentation_off_fraction", "0.2", "--dataloader_num_workers", "2", "--logging_steps", "4",
]  # fmt: skip


def run(output_dir: Path, *more: str) -> None:
    os.setsid()  # a group of its own, so that its worker processes are killed with it
    sys.stdout = sys.stderr = open(output_dir.with_suffix(".log"), "a")  # noqa: SIM115
    logging.disable()
    train.main([*ARGV, "--output_dir", str(output_dir), *more])


def start(output_dir: Path, *more: str) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=run, args=(output_dir, *more))
    process.start()
    return process


def checkpoints(output_dir: Path) -> list[Path]:
    return sorted(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def final_state(output_dir: Path) -> dict[str, object]:
    """All that a run ends with: the averaged weights, the trained ones, and the optimizer."""
    last = checkpoints(output_dir)[-1]
    return {
        "step": last.name,
        "model": (output_dir / "model.safetensors").read_bytes(),
        "trained weights": (last / "trained_weights.safetensors").read_bytes(),
        "optimizer": torch.load(last / "optimizer.pt", weights_only=True),
    }


def equal(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def main(folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    process = start(folder / "whole")
    process.join()
    assert process.exitcode == 0, (folder / "whole.log").read_text()
    seconds = time.monotonic() - began
    expected = final_state(folder / "whole")
    moments = random.Random(number)
    for kill in range(number):
        output_dir = folder / f"killed-{kill}"
        process = start(output_dir)
        wait = moments.uniform(0.1, 0.95) * seconds
        process.join(wait)
        assert process.exitcode is None, "it was to be killed before its end"
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        found = checkpoints(output_dir)
        resumed = start(output_dir, *(["--resume_from_checkpoint", "true"] if found else []))
        resumed.join()
        assert resumed.exitcode == 0, output_dir.with_suffix(".log").read_text()
        actual = final_state(output_dir)
        same = {name: equal(actual[name], expected[name]) for name in expected}
        print(f"killed after {wait:.1f} s at {found[-1].name if found else 'no checkpoint'}: {same}", flush=True)
        assert all(same.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
