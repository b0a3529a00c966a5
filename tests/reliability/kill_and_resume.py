"""Run by `test_crashes.py` or by hand: kill a run again and again, resume it, and compare with one left alone.

    python tests/reliability/kill_and_resume.py FOLDER NUMBER_OF_KILLS

A third of the kills come at a random moment, a third just before a random change to a file (most of which belong to a
checkpoint), and a third in the middle of a random request of a push. The run has worker processes, a moving average,
MixUp, CutMix, Muon, dropout and several epochs. Processes are forked from one that has imported everything, as
importing takes longer than the run.
"""

import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from hub_server import Hub, running_hub  # noqa: E402

os.environ["OMP_NUM_THREADS"] = "1"

STEPS = "28" if os.environ.get("RELIABILITY") == "long" else "16"
ARGV = [
    "--hidden_size", "32", "--num_hidden_layers", "2", "--intermediate_size", "64", "--use_cpu", "true",
    "--max_steps", STEPS, "--per_device_train_batch_size", "96", "--save_strategy", "steps", "--save_steps", "4",
    "--eval_strategy", "steps", "--eval_steps", "8", "--load_best_model_at_end", "false", "--disable_tqdm", "true",
    "--muon", "true", "--ema_decay", "0.9", "--mixup_alpha", "0.4", "--cutmix_alpha", "1",
    "--label_smoothing_factor", "0.1", "--drop_path_rate", "0.1", "--hidden_dropout_prob", "0.1",
    "--augmentation_off_fraction", "0.2", "--dataloader_num_workers", "2", "--logging_steps", "4",
]  # fmt: skip
PUSHING = ["--push_to_hub", "true", "--hub_always_push", "true"]
Deadly = Callable[[], None]


def counting(deadly_call: int | None) -> tuple[Deadly, Callable[[], int]]:
    """A function that kills this process group at its n-th call, and one that says how often it was called."""
    calls = 0

    def called() -> None:
        nonlocal calls
        calls += 1
        if calls == deadly_call:
            os.killpg(0, signal.SIGKILL)

    return called, lambda: calls


def before(owner: Any, name: str, called: Deadly) -> None:
    """Call `called` before each call of a function."""
    function = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        called()
        return function(*args, **kwargs)

    setattr(owner, name, watched)


def run(output_dir: Path, flags: list[str], kind: str, deadly_call: int | None) -> None:
    """Train; die at a change to a file or at a request, if wanted; say how many there were."""
    import safetensors.torch
    import torch
    from huggingface_hub.utils import get_session

    from hf_vit_scratch.data import dataset
    from hf_vit_scratch.model import modeling_vit_scratch
    from hf_vit_scratch.speed import optimize

    # What is measured differs between runs. A resumed run must not choose anew: its choice would change the bits.
    choice = "eager" if "--resume_from_checkpoint" in flags else "sdpa+joined"
    optimize._choose = lambda *args: (choice, {})
    dataset.DECODED_BYTES_KEPT = 0  # kept images would leave nothing to do for worker processes
    os.setsid()  # a group of its own, so that its worker processes are killed with it
    sys.stdout = sys.stderr = open(output_dir.with_suffix(".log"), "a")  # noqa: SIM115
    logging.disable()
    changed, changes = counting(deadly_call if kind == "change" else None)
    for owner, names in {
        os: ("replace", "fsync", "unlink"),
        shutil: ("rmtree", "copyfile"),
        Path: ("write_text", "mkdir", "symlink_to"),
        torch: ("save",),
        safetensors.torch: ("save_model",),
        modeling_vit_scratch.PreTrainedModel: ("save_pretrained",),
    }.items():
        for name in names:
            before(owner, name, changed)
    sent, requests = counting(deadly_call if kind == "request" else None)
    before(type(get_session()), "send", sent)
    import train

    train.main([*ARGV, *flags, "--output_dir", str(output_dir)])
    output_dir.with_suffix(".counts").write_text(f"{changes()} {requests()}")


def start(output_dir: Path, *flags: str, kind: str = "", deadly_call: int | None = None) -> Any:
    arguments = (output_dir, list(flags), kind, deadly_call)
    process = multiprocessing.get_context("fork").Process(target=run, args=arguments)
    process.start()
    return process


def checkpoints(output_dir: Path) -> list[Path]:
    complete = [path.parent for path in output_dir.glob("checkpoint-*/SHA256SUMS")]
    return sorted(complete, key=lambda path: int(path.name.partition("-")[2]))


def final_state(output_dir: Path) -> dict[str, object]:
    """All that a run ends with: the averaged weights, the trained ones, and the optimizer."""
    import torch

    last = checkpoints(output_dir)[-1]
    return {
        "step": last.name,
        "model": (output_dir / "model.safetensors").read_bytes(),
        "trained weights": (last / "trained_weights.safetensors").read_bytes(),
        "optimizer": torch.load(last / "optimizer.pt", weights_only=True),
    }


def equal(one: object, other: object) -> bool:
    import torch

    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def refuse_damage(folder: Path) -> None:
    """Every checkpoint with checksums must be complete; written without the package's own check of that."""
    for checkpoint in checkpoints(folder):
        listed = dict(reversed(line.split("  ")) for line in (checkpoint / "SHA256SUMS").read_text().splitlines())
        found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}
        del found["SHA256SUMS"]
        assert found == listed, (checkpoint, found, listed)
        assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} < found.keys(), checkpoint


def refuse_torn_commits(hub: Hub, repo: str) -> None:
    """In each commit that has weights, their file must be whole."""
    from safetensors.torch import load

    for _, message, files in hub.commits.get(repo, ()):
        if "model.safetensors" in files:
            assert load(files["model.safetensors"]), (repo, message)  # raises if the file was cut off


def main(folder: Path, number: int, hub: Hub) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    seconds, counts = {}, {}
    for name, flags in {"whole": [], "pushed": [*PUSHING, "--hub_model_id", "tester/pushed"]}.items():
        began = time.monotonic()
        process = start(folder / name, *flags)
        process.join()
        assert process.exitcode == 0, (folder / f"{name}.log").read_text()
        seconds[name] = time.monotonic() - began
        counts[name] = [int(count) for count in (folder / f"{name}.counts").read_text().split()]
    expected = final_state(folder / "whole")
    refuse_torn_commits(hub, "tester/pushed")
    assert len(hub.commits["tester/pushed"]) > 3
    draws = random.Random(number)
    for kill in range(number):
        output_dir, kind = folder / f"killed-{kill}", ("moment", "change", "request")[kill % 3]
        flags = [*PUSHING, "--hub_model_id", f"tester/killed-{kill}"] if kind == "request" else []
        if kind == "moment":
            process = None
            while process is None or process.exitcode is not None:  # it was faster than the first one, and ended
                shutil.rmtree(output_dir, ignore_errors=True)
                wait = draws.uniform(0.1, 0.95) * seconds["whole"]
                process = start(output_dir)
                process.join(wait)
            os.killpg(process.pid, signal.SIGKILL)
            what = f"after {wait:.1f} s"
        else:
            most = counts["whole"][0] if kind == "change" else counts["pushed"][1]
            # Pushes are skipped while another is under way, so that their number varies.
            deadly_call = draws.randint(1, most if kind == "change" else max(1, most // 2))
            process = start(output_dir, *flags, kind=kind, deadly_call=deadly_call)
            what = f"at {kind} {deadly_call} of {most}"
        process.join()
        assert process.exitcode == -signal.SIGKILL, (what, output_dir.with_suffix(".log").read_text())
        refuse_damage(output_dir)
        found = checkpoints(output_dir)
        resumed = start(output_dir, *flags, *(["--resume_from_checkpoint", "true"] if found else []))
        resumed.join()
        assert resumed.exitcode == 0, (what, output_dir.with_suffix(".log").read_text())
        refuse_damage(output_dir)
        refuse_torn_commits(hub, f"tester/killed-{kill}")
        actual = final_state(output_dir)
        same = {name: equal(actual[name], expected[name]) for name in expected}
        print(f"killed {what} with {found[-1].name if found else 'no checkpoint'}: {same}", flush=True)
        assert all(same.values())


if __name__ == "__main__":
    with running_hub() as hub:
        os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1",
                       "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}  # fmt: skip
        os.environ.pop("HF_HUB_OFFLINE", None)
        import torch

        torch.set_num_threads(1)
        import train  # noqa: F401  # for the processes that are forked

        main(Path(sys.argv[1]), int(sys.argv[2]), hub)
