"""`train.py` on two processes: the model on each of them (DDP), or split over them (FSDP2)."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from test_train_script import ROOT, train
from test_trainer import KINDS, train_and_report
from transformers import AutoModelForImageClassification

from hf_vit_scratch.model.configuration_vit_scratch import AUTO_MAP
from hf_vit_scratch.training.clock import Clock
from hf_vit_scratch.training.graceful_stop import GracefulStop

pytestmark = pytest.mark.slow

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
# Into the second epoch, in batches of equal sizes: accelerate fills the last ones up with images that it repeats.
# Without --use_cpu: the processes must find each other by themselves.
ARGV = ["--hidden_size", "32", "--num_hidden_layers", "2", "--intermediate_size", "64", "--disable_tqdm", "true",
        "--max_steps", "14", "--save_strategy", "steps", "--save_steps", "7", "--eval_strategy", "steps",
        "--eval_steps", "7", "--logging_steps", "1", "--load_best_model_at_end", "false",
        "--dataloader_drop_last", "true", "--per_device_eval_batch_size", "60"]  # fmt: skip


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def two_processes(request, tmp_path_factory):
    """The kind, the folder and the output of two processes that train, and resume from half of the way."""
    if torch.accelerator.is_available():
        pytest.skip("accelerate would take the accelerator")
    folder, environment = tmp_path_factory.mktemp("runs"), {}
    if request.param == "fsdp2":  # as `accelerate launch` hands the shipped configuration to the processes
        config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())["fsdp_config"]
        environment = {
            name.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS"): str(value)
            for name, value in config.items()
        }
    script = Path(__file__).parents[1] / "two_processes.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    done = subprocess.run(
        [*launch, request.param, folder, *ARGV, "--per_device_train_batch_size", "64"],
        capture_output=True, text=True, timeout=240, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return request.param, folder, done.stdout


def test_two_processes_train_and_save_as_one_does(tmp_path, two_processes):
    kind, folder, printed = two_processes
    one, two = tmp_path / "one", folder / "two"

    calibrate = ["--calibrate", str(kind != "fsdp2")]  # which is not calibrated
    expected = train.main([*ARGV, *calibrate, "--per_device_train_batch_size", "128", "--output_dir", str(one)])

    reported = 6 * len(KINDS) if kind == "ddp" else 0
    assert len(re.findall(r"'loss'", printed)) == 14 + 7 + reported  # one process speaks
    assert (two / "last" / "pytorch_model_fsdp.bin").is_file() == (kind == "fsdp2")
    metrics = json.loads((two / "metrics.json").read_text())
    assert metrics["test_loss"] == pytest.approx(expected["test_loss"], abs=1e-4)
    assert metrics["epoch"] == expected["epoch"]
    # transformers would take FSDP's wrapper for the model's class, and torch's files for its code.
    assert json.loads((two / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert {file.name for file in two.glob("*.py")} == {"configuration_vit_scratch.py", "modeling_vit_scratch.py"}
    whole, split = (AutoModelForImageClassification.from_pretrained(folder) for folder in (one, two))
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], tensor, rtol=0, atol=1e-4)


def test_two_processes_resume_with_the_same_bits(two_processes):
    _, folder, _ = two_processes
    two, resumed = ((folder / name / "model.safetensors").read_bytes() for name in ("two", "resumed"))
    assert resumed == two


@pytest.mark.parametrize("two_processes", ["ddp"], indirect=True)
def test_two_processes_log_and_evaluate_as_one_does(tmp_path, two_processes):
    _, folder, _ = two_processes
    for name, two in json.loads((folder / "reports.json").read_text()).items():
        one = train_and_report(tmp_path / name, name, batch_size=8)

        assert (one["world_size"], two["world_size"]) == (1, 2)
        assert len(one["history"]) == len(two["history"]) == 6
        for ours, theirs in zip(two["history"], one["history"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-4)
        assert two["eval_samples"] == one["eval_samples"] == 15
        if name != "multi_label":  # which has no metrics of ours, so the stock loss counts a filled-up image twice
            assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-5)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_takes_the_shipped_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))

    assert config.num_processes >= 2
    assert config.distributed_type == ("FSDP" if path.stem == "fsdp2" else "MULTI_GPU")
    assert config.mixed_precision == "no"  # the run chooses it for the machine
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"],
    "accelerate": ["accelerate.commands.launch", "--cpu", "-m", "vit_scratch", "train"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_command_is_launched(launcher, tmp_path):
    flags = ["--use_cpu", "true", "--max_steps", "2", "--output_dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", *LAUNCHERS[launcher], *ARGV, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["epoch"] > 0


def agree(rank, folder):
    """Ask for the time and for a stop in one of two processes, of which the second is late and got a SIGTERM."""
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    args = SimpleNamespace(world_size=2, device=torch.device("cpu"), process_index=rank, max_train_minutes=60)
    clock, stop = Clock(args), GracefulStop(args)
    clock.seconds_before, stop.signal = rank * 1800.0, rank * signal.SIGTERM
    state, control = SimpleNamespace(global_step=1, max_steps=100), SimpleNamespace()
    clock.update(state, control)
    result = {"progress": clock.progress, "stops": stop.agreed(1), "signal": int(stop.signal)}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def test_two_processes_agree_on_the_time_and_on_a_stop(tmp_path):
    torch.multiprocessing.spawn(agree, (tmp_path,), nprocs=2)

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["progress"] < 0.5  # the time of the first process
    assert (first["stops"], first["signal"]) == (True, signal.SIGTERM)
