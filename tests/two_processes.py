"""Run by torchrun in `test_trainer.py`: train with single and with multiple labels, and write what was logged."""

import json
import os
import sys
from pathlib import Path

import torch.distributed

sys.path.insert(0, str(Path(__file__).with_name("training")))
from test_trainer import KINDS, train_and_report

output = Path(sys.argv[1])
reports = [
    train_and_report(output.with_suffix(f".{kind}"), kind, 4, ddp_find_unused_parameters=False) for kind in KINDS
]
if os.environ["RANK"] == "0":
    output.write_text(json.dumps(reports))
torch.distributed.destroy_process_group()  # a process that leaves its threads running is aborted now and then
