"""Run by torchrun in `test_distributed.py`: `train.py` with FSDP2 over gloo.

accelerate takes FSDP's settings on accelerators only; torch's FSDP2 itself works on a CPU.
"""

import os
import sys
from pathlib import Path

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState

sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # noqa: E402

init = AcceleratorState.__init__


def init_with_fsdp(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if not getattr(self, "fsdp_plugin", None):
        self.fsdp_plugin = FullyShardedDataParallelPlugin()  # from the environment, as a config of accelerate sets it
        # Both of accelerate's shared states: each later instance copies the second one into the first.
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = init_with_fsdp
os.environ["ACCELERATE_USE_FSDP"] = "true"
train.main(sys.argv[1:])
