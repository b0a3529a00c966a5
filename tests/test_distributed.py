"""Training with the parameters split over two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from test_train_script import ROOT, train
from transformers import AutoModelForImageClassification

CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
# Without --use_cpu: the processes must find each other by themselves.
ARGV = ["--hidden_size", "32", "--num_hidden_layers", "2", "--intermediate_size", "64", "--disable_tqdm", "true",
        "--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3", "--eval_strategy", "steps",
        "--eval_steps", "3", "--logging_steps", "1"]  # fmt: skip


@pytest.mark.skipif(torch.accelerator.is_available(), reason="accelerate would take the accelerator")
def test_fsdp2_trains_evaluates_and_saves_as_one_process_does(tmp_path):
    # As `accelerate launch` hands the shipped configuration to the processes.
    config = yaml.safe_load((ROOT / "recipes" / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"]
    settings = {name.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS"): str(x) for name, x in config.items()}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
              Path(__file__).with_name("fsdp_on_cpu.py")]  # fmt: skip
    where = ["--output_dir", tmp_path / "two", "--per_device_train_batch_size", "64"]

    done = subprocess.run(
        [*launch, *ARGV, *where], capture_output=True, text=True, timeout=120, env=os.environ | settings
    )
    assert done.returncode == 0, done.stderr
    one = train.main([*ARGV, "--output_dir", str(tmp_path / "one"), "--per_device_train_batch_size", "128"])

    losses = [float(text) for text in re.findall(r"'loss': '([\d.]+)'", done.stdout)]
    assert len(losses) == 6
    assert (tmp_path / "two" / "last" / "pytorch_model_fsdp.bin").is_file()
    whole, split = (AutoModelForImageClassification.from_pretrained(tmp_path / name) for name in ("one", "two"))
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], tensor, rtol=0, atol=1e-4)
    assert one["epoch"] == pytest.approx(6 / 11)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_takes_the_shipped_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes >= 2
