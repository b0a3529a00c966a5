"""`train.py` on two processes: the model on each of them (DDP), or split over them (FSDP2)."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from test_train_script import ROOT, train
from transformers import AutoModelForImageClassification

from hf_vit_scratch.model.configuration_vit_scratch import AUTO_MAP

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
# Into the second epoch, in batches of equal sizes: accelerate fills the last ones up with images that it repeats.
# Without --use_cpu: the processes must find each other by themselves.
ARGV = ["--hidden_size", "32", "--num_hidden_layers", "2", "--intermediate_size", "64", "--disable_tqdm", "true",
        "--max_steps", "14", "--save_strategy", "steps", "--save_steps", "7", "--eval_strategy", "steps",
        "--eval_steps", "7", "--logging_steps", "1", "--load_best_model_at_end", "false",
        "--dataloader_drop_last", "true", "--per_device_eval_batch_size", "60"]  # fmt: skip


def train_on_two_processes(script, environment, output_dir, *more):
    """Run, and return what was printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    done = subprocess.run(
        [*launch, *ARGV, "--per_device_train_batch_size", "64", "--output_dir", output_dir, *more],
        capture_output=True, text=True, timeout=120, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.accelerator.is_available(), reason="accelerate would take the accelerator")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_evaluate_save_and_resume_as_one_does(tmp_path, kind):
    script, environment, one, two, resumed = (
        ROOT / "train.py",
        {},
        *(tmp_path / name for name in ("1", "2", "resumed")),
    )
    if kind == "fsdp2":  # as `accelerate launch` hands the shipped configuration to the processes
        script = Path(__file__).parents[1] / "fsdp_on_cpu.py"
        config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())["fsdp_config"]
        environment = {
            name.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS"): str(value)
            for name, value in config.items()
        }

    printed = train_on_two_processes(script, environment, two)
    expected = train.main([*ARGV, "--per_device_train_batch_size", "128", "--output_dir", str(one)])

    assert len(re.findall(r"'loss'", printed)) == 14  # one process speaks
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

    resumed.mkdir()
    shutil.copy(two / "_run.json", resumed)
    shutil.copytree(two / "checkpoint-7", resumed / "checkpoint-7")
    printed = train_on_two_processes(script, environment, resumed, "--resume_from_checkpoint", "true")
    assert len(re.findall(r"'loss'", printed)) == 7
    assert (resumed / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_takes_the_shipped_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes >= 2
