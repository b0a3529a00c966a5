"""How good are calibration, "unknown" and the stated coverage? On the digits, eight of ten classes known.

python benchmarks/trust.py --pairs 8
"""

import argparse
import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import softmax
from sklearn.metrics import roc_auc_score

from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.evaluation.metrics import calibration
from hf_vit_scratch.evaluation.predict import forward, load_classifier
from hf_vit_scratch.evaluation.trust import Trust
from hf_vit_scratch.training import run

OUTPUTS = ("logits", "pooler_output")


def outputs_of(classifier: Any, paths: list[Path]) -> tuple[np.ndarray, torch.Tensor]:
    """Return the logits and the pooled vectors of image files."""
    results = list(forward(classifier, OUTPUTS, [str(path) for path in paths], 256, 0))
    logits, vectors = (torch.stack([result[name] for result in results]) for name in OUTPUTS)
    return logits.double().numpy(), vectors


def main() -> None:
    """Print a row for each pair of classes that are left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="of the recipe digits")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of classes that are left out, one after the other")
    parser.add_argument("--held_out", type=float, default=0.1, help="share of the images for validation, and for test")
    parser.add_argument("--splits", type=int, default=20, help="of the known images into validation and unseen ones")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    digits = [row for rows in load_digits().values() for row in rows]
    for number, row in enumerate(digits):
        (root / "digits" / str(row["label"])).mkdir(parents=True, exist_ok=True)
        row["image"].save(root / "digits" / str(row["label"]) / f"{number}.png")
    print(
        "| left out | AUROC of the distance | calibration error of unseen images, before and after | answered of "
        "those left out | splits with the stated coverage |\n| --- | --- | --- | --- | --- |"
    )
    for pair in random.Random(0).sample(list(itertools.combinations(range(10), 2)), args.pairs):
        known, output = root / f"known_{pair}", root / f"run_{pair}"
        for label in set(range(10)) - set(pair):
            (known / str(label)).parent.mkdir(exist_ok=True)
            (known / str(label)).symlink_to(root / "digits" / str(label))
        held_out = str(args.held_out)
        flags = ["--follow_links", "true", "--validation_fraction", held_out, "--test_fraction", held_out]
        flags += ["--num_train_epochs", str(args.epochs), "--near_duplicates", "ignore", "--disable_tqdm", "true"]
        run.main(["digits", "--data", str(known), "--output_dir", str(output), *flags])
        print(
            row_of(pair, output, [path for label in pair for path in (root / "digits" / str(label)).iterdir()], args)
        )


def row_of(pair: tuple[int, int], output: Path, unknown: list[Path], args: argparse.Namespace) -> str:
    """Return the row of a run."""
    classifier, trust = load_classifier(str(output)), Trust.load(str(output))
    assert trust is not None
    data = output.with_name(output.name.replace("run", "known"))
    held_out: Any = dict.fromkeys(("validation_fraction", "test_fraction"), args.held_out)
    splits = load_splits(str(data), seed=42, near_duplicates="ignore", follow_links=True, **held_out)
    images = {name: [Path(image.filename) for image in rows["image"]] for name, rows in splits.items()}
    found = {name: outputs_of(classifier, paths) for name, paths in images.items()}
    labels = {name: np.array(rows["label"]) for name, rows in splits.items()}
    logits, vectors = found["test"]
    _, far = outputs_of(classifier, unknown)
    distances = torch.cat([trust.distances(vectors), trust.distances(far)]).numpy()
    auroc = roc_auc_score(np.repeat([0, 1], [len(vectors), len(far)]), distances)
    right = logits.argmax(axis=1) == labels["test"]
    errors = [
        calibration(softmax(scale * logits, axis=1).max(axis=1), right)["expected_calibration_error"]
        for scale in (trust.temperature, 1.0)
    ]
    answered = (trust.distances(far) <= trust.largest_distance).double().mean().item()
    seen = [np.concatenate([found[name][part] for name in ("validation", "test")]) for part in (0, 1)]
    true, inside = np.concatenate([labels["validation"], labels["test"]]), 0
    of_train = (found["train"][1].numpy(), labels["train"])
    for seed in range(args.splits):
        order = np.random.default_rng(seed).permutation(len(true))
        first, second = np.array_split(order, 2)
        half = Trust.fit(*of_train, (seen[1][first], seen[0][first], true[first]), 0.99)
        scores = softmax(seen[0][second] / half.temperature, axis=1).max(axis=1)
        is_known = half.distances(torch.from_numpy(seen[1][second])).numpy() <= half.largest_distance
        inside += half.coverage_low <= float((is_known & (scores >= half.least_score)).mean()) <= half.coverage_high
    return (
        f"| {pair[0]} and {pair[1]} | {auroc:.3f} | {errors[1]:.3f}, {errors[0]:.3f} | {answered:.0%} | "
        f"{inside} of {args.splits} |"
    )


if __name__ == "__main__":
    main()
