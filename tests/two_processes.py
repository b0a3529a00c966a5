"""Run by torchrun in `test_distributed.py`: train twice and resume, by DDP or by FSDP2 over gloo.

    two_processes.py ddp|fsdp2 FOLDER FLAGS_OF_TRAIN...

accelerate takes FSDP's settings on accelerators only; torch's FSDP2 itself works on a CPU.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch.distributed
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "training")]
from test_trainer import KINDS, train_and_report  # noqa: E402

import train  # noqa: E402

init = AcceleratorState.__init__


def init_with_fsdp(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if not getattr(self, "fsdp_plugin", None):
        self.fsdp_plugin = FullyShardedDataParallelPlugin()  # from the environment, as a config of accelerate sets it
        # Both of accelerate's shared states: each later instance copies the second one into the first.
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


kind, folder, argv = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
first_process = os.environ["RANK"] == "0"
if kind == "fsdp2":
    AcceleratorState.__init__ = init_with_fsdp
    os.environ["ACCELERATE_USE_FSDP"] = "true"

# Each run ends with it, and a process can form its group once.
torch.distributed.destroy_process_group = lambda group=None: None

train.main([*argv, "--output_dir", str(folder / "two")])
if first_process:
    (folder / "resumed").mkdir()
    shutil.copy(folder / "two" / "_run.json", folder / "resumed")
    shutil.copytree(folder / "two" / "checkpoint-7", folder / "resumed" / "checkpoint-7")
torch.distributed.barrier()
train.main([*argv, "--output_dir", str(folder / "resumed"), "--resume_from_checkpoint", "true"])

if kind == "ddp":
    reports = {
        name: train_and_report(folder / name, name, batch_size=4, ddp_find_unused_parameters=False) for name in KINDS
    }
    if first_process:
        (folder / "reports.json").write_text(json.dumps(reports))
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)  # at a usual exit, and while it leaves the group, gloo's threads abort a process now and then
