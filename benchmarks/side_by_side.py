"""Draw the validation accuracy over time of several runs in one picture.

    python benchmarks/side_by_side.py "ours=runs/cifar10_cpu" "BertModel=runs/bert_tutorial" --output curves.png

The folder of each run holds a `log.json`, as written by `train.py` and `bert_tutorial.py`.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, _, folder), marker in zip((run.partition("=") for run in args.runs), "osD^v", strict=False):
        log = json.loads((Path(folder) / "log.json").read_text(encoding="utf-8"))
        points = [(logs["minutes"], 100 * logs["eval_accuracy"]) for logs in log if "eval_accuracy" in logs]
        axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.set(xlabel="minutes of training, evaluations included", ylabel="validation accuracy, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
