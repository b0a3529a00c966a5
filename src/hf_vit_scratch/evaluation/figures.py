"""Pictures of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PANELS = (
    ("loss", ("loss", "eval_loss")),
    ("accuracy", ("eval_accuracy", "eval_top5_accuracy")),
    ("learning rate", ("learning_rate",)),
    ("images per second", ("images_per_second",)),
)


def plot_curves(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw loss, accuracy, learning rate and throughput over the steps of a run into a PNG file.

    Args:
        log_history: Log of the Trainer's state.
        path: The file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name in names:
            points = [(logs["step"], float(logs[name])) for logs in log_history if name in logs]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=name)
        if axes.lines:
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
            axes.legend()
        else:  # of a run that was not evaluated, for example
            axes.set_axis_off()
    figure.savefig(path, dpi=110)


def plot_confusion(matrix: Sequence[Sequence[int]], labels: Sequence[str], path: Path) -> None:
    """Draw which classes are taken for which into a PNG file, as shares of each true class.

    Args:
        matrix: L rows of L counts; row the true class, column the predicted one.
        labels: Names of the L classes.
        path: The file to write.
    """
    from matplotlib.figure import Figure

    counts = np.asarray(matrix, dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(max(4.5, 0.55 * len(labels) + 2), 20)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true")
    if len(labels) <= 40:  # more would be unreadable
        axes.set_xticks(range(len(labels)), labels, rotation=90)
        axes.set_yticks(range(len(labels)), labels)
    if len(labels) <= 20:
        for row, column in np.ndindex(*shares.shape):
            if counts[row, column]:
                color = "white" if shares[row, column] > 0.5 else "black"
                text = f"{100 * shares[row, column]:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        axes.set_title("% of each true class")
    figure.savefig(path, dpi=90)


def plot_reliability(bins: Sequence[dict[str, Any]], error: float, path: Path) -> None:
    """Draw how often the model is right when it is so sure into a PNG file.

    Guo et al. 2017, https://arxiv.org/abs/1706.04599, figure 1; but with a dot for each bin of confidence, its
    area the number of images in it.

    Args:
        bins: Calibration bins of `metrics.detailed_report`.
        error: The expected calibration error.
        path: The file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="black", linestyle="--", label="as often right as it is sure")
    images = np.array([bin["images"] for bin in bins])
    confidence, accuracy = ([bin[name] for bin in bins] for name in ("mean_confidence", "accuracy"))
    axes.plot(confidence, accuracy, color="tab:blue", linewidth=1)
    axes.scatter(
        confidence,
        accuracy,
        s=20 + 500 * images / images.sum(),
        color="tab:blue",
        alpha=0.6,
        label="larger: more images",
    )
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(0, 1.03), aspect="equal")
    axes.set_title(f"expected calibration error {error:.3f}")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", markerscale=0.5)
    figure.savefig(path, dpi=110)


def plot_mistakes(images: Sequence[Image.Image], captions: Sequence[str], path: Path) -> None:
    """Draw images with a caption above each into a PNG file.

    Args:
        images: At least one.
        captions: One for each, of one or two short lines.
        path: The file to write.
    """
    from matplotlib.figure import Figure

    columns = min(6, len(images))
    lines = -(-len(images) // columns)
    figure = Figure(figsize=(max(3.0, 1.6 * columns), 2.05 * lines + 0.3), layout="constrained")
    for number, axes in enumerate(figure.subplots(lines, columns, squeeze=False).flat):
        axes.axis("off")
        if number < len(images):
            shown = images[number].convert("RGB")
            shown.thumbnail((256, 256))  # no larger than it is drawn
            axes.imshow(np.asarray(shown))
            axes.set_title(captions[number], fontsize=8)
    figure.savefig(path, dpi=110)
