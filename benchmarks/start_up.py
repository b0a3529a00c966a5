"""Measure what a user waits for before anything happens: imports, `--help`, and loading a saved model.

    python benchmarks/start_up.py --model runs/digits
    python benchmarks/start_up.py --python plain/bin/python    in another environment

If peft is installed, transformers loads it with its training arguments. The `test` extra installs peft, and `pip
install .` does not. Each measurement is a fresh process. Every round runs all of them in turn, after one round that is
not counted. The results are medians and quartiles of the seconds of the complete process.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from peers import quartiles, write_results

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure all commands, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a run of train.py")
    parser.add_argument("--python", default=sys.executable, help="Python of the environment to measure")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="result file; by default a dated file beside this script")
    args = parser.parse_args()

    commands = {
        name: ["-c", name]
        for name in (
            "import transformers",
            "import transformers, hf_vit_scratch",
            "import torch",
            "from transformers import PreTrainedModel",
            "from hf_vit_scratch import ViTScratchModel",
            "from transformers import TrainingArguments",
        )
    }
    commands["train.py --help"] = [str(ROOT / "train.py"), "--help"]
    if args.model:
        load = "from transformers import AutoModelForImageClassification as A\nA.from_pretrained"
        commands[f"load {args.model}"] = ["-c", f"import hf_vit_scratch\n{load}({args.model!r})"]

    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.rounds + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run([args.python, *command], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - start)

    lines = ["| process | seconds |", "| --- | --- |"]
    for name, times in seconds.items():
        low, median, high = quartiles(times[1:])
        lines.append(f"| `{name}` | {median:.2f} ({low:.2f} to {high:.2f}) |")
    write_results(__file__, "Start-up", lines, args)


if __name__ == "__main__":
    main()
