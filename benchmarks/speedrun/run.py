"""Run an entry of the speedrun: the accuracy on CIFAR-10 that a whole command reaches within some minutes.

    python benchmarks/speedrun/run.py 15 --data FOLDER
    python benchmarks/speedrun/run.py 5 --data FOLDER -- --max_train_minutes 4.5

The command is `python train.py cifar10_cpu`, once for each seed, with what follows `--`. Its seconds go from its start
to its end, with imports, reading, compiling and the report. Afterwards `evaluate` adds the mirrored view. The entry is
refused if one run takes longer than the limit, or if the test split is not the whole one. Nothing else may run at the
same time. The last line is a row for README.md.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEST_IMAGES = 10_000


def run(arguments: list[str], output_dir: Path) -> tuple[float, dict[str, Any]]:
    """Run a command of the package; return its seconds, and the metrics that it writes."""
    command = ["python", *arguments, "--output_dir", str(output_dir)]
    print(shlex.join(command), flush=True)
    start = time.perf_counter()
    with output_dir.with_suffix(".log").open("w") as log:
        subprocess.run([sys.executable, *command[1:]], cwd=ROOT, stdout=log, stderr=log, check=True)
    return time.perf_counter() - start, json.loads((output_dir / "metrics.json").read_text(encoding="utf-8"))


def main() -> None:
    """Run the seeds of an entry, check them, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float, help="limit of the whole command")
    parser.add_argument("--data", required=True, help="folder of CIFAR-10 as parquet, or its name on the Hub")
    parser.add_argument("--seeds", nargs="+", default=["42", "1", "2"])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/speedrun"))
    argv, options = sys.argv[1:], list[str]()
    if "--" in argv:
        argv, options = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args = parser.parse_args(argv)

    commit = subprocess.check_output(["git", "-C", ROOT, "describe", "--always", "--dirty"], text=True).strip()
    folder = args.output_dir.resolve() / f"{commit}_{args.minutes:g}"
    folder.mkdir(parents=True)
    seconds, accuracies, mirrored = [], [], []
    for seed in args.seeds:
        took, metrics = run(["train.py", "cifar10_cpu", "--data", args.data, "--seed", seed, *options], folder / seed)
        tested = sum(scores["support"] for scores in metrics["per_class"].values())
        if took > 60 * args.minutes or tested != TEST_IMAGES:
            sys.exit(f"no entry: seed {seed} took {took:.0f} seconds and was tested on {tested:g} images")
        evaluate = ["-m", "vit_scratch", "evaluate", str(folder / seed), "--eval_tta", "flip"]
        _, both_views = run(evaluate, folder / f"{seed}_mirrored")
        seconds.append(took)
        accuracies.append(100 * metrics["test_accuracy"])
        mirrored.append(100 * both_views["test_flip_accuracy"])
        print(f"seed {seed}: {accuracies[-1]:.2f}, mirrored view {mirrored[-1]:.2f}, {took:.0f} s", flush=True)
    flags = f" `{shlex.join(options)}`" if options else ""
    each = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
    print(f"{metrics['hardware']}. {metrics['versions']}.")
    print(
        f"| CPU | {args.minutes:g} | {date.today()} | `{commit}` |{flags} "
        f"| {statistics.mean(accuracies):.1f} ({each}) | {statistics.mean(mirrored):.1f} "
        f"| {min(seconds):.0f} to {max(seconds):.0f} |"
    )


if __name__ == "__main__":
    main()
