"""Run by torchrun in `test_distributed.py`: `train.py` with FSDP2 over gloo.

accelerate takes FSDP's settings on accelerators only; torch's FSDP2 itself works on a CPU. There, though, the state
that is gathered for saving stays in parts.
"""

import os
import sys
from pathlib import Path

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # noqa: E402

init = AcceleratorState.__init__
get_state_dict = Accelerator.get_state_dict


def init_with_fsdp(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if not getattr(self, "fsdp_plugin", None):
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin()  # from the environment, as a config of accelerate sets it


def get_whole_state_dict(self, model, *args, **kwargs):
    state = get_state_dict(self, model, *args, **kwargs)
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


AcceleratorState.__init__ = init_with_fsdp
Accelerator.get_state_dict = get_whole_state_dict
os.environ["ACCELERATE_USE_FSDP"] = "true"
train.main(sys.argv[1:])
