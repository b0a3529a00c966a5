"""The figures of a run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PANELS = (
    ("loss", ("loss", "eval_loss")),
    ("metrics", ("eval_accuracy", "eval_balanced_accuracy", "eval_macro_f1", "eval_average_precision", "eval_r2")),
    ("learning rate", ("learning_rate",)),
    ("images per second", ("images_per_second",)),
)
# With Chinese, Japanese and Korean characters, which matplotlib's own font lacks: on Linux, macOS and Windows.
EASTERN_FONTS = ("Noto Sans CJK JP", "WenQuanYi Zen Hei", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic")
LINES = ("-", "--", ":", "-.", "-")  # metrics may be equal, and then hide each other


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches; matplotlib is imported only when something is drawn.

    From then on, the process shows what is between two `$` in new texts as it is, not as a formula.
    """
    from matplotlib import font_manager, rcParams
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    missing = [font for font in EASTERN_FONTS if font not in rcParams["font.family"]]
    installed = [font for font in missing if font in font_manager.get_font_names()]
    rcParams["font.family"] = [*rcParams["font.family"], *installed]
    rcParams["text.parse_math"] = False  # the name of a class may have two
    return Figure(figsize=(width, height), layout="constrained")


def plot_curves(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot loss, accuracy, learning rate and throughput over the steps of a Trainer's log into a PNG file."""
    figure = new_figure(10, 6.5)
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name, style in zip(names, LINES, strict=False):
            points = [(logs["step"], float(logs[name])) for logs in log_history if name in logs]
            if points:
                axes.plot(*zip(*points, strict=True), style, marker=".", label=name)
        if axes.lines:
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
            axes.legend()
        else:  # for example in a run without evaluation
            axes.set_axis_off()
    figure.savefig(path, dpi=110)


def plot_confusion(matrix: Sequence[Sequence[int]], labels: Sequence[str], path: Path) -> None:
    """Plot a confusion matrix, with a row for each true class, as percentages of the rows into a PNG file.

    A class of fewer than ten images has their number beside its name.
    """
    counts = np.asarray(matrix, dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = min(max(4.5, 0.55 * len(labels) + 2), 20)
    figure = new_figure(side, side)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true", title="% of each true class")
    if len(labels) <= 30:  # more would be unreadable
        axes.set_xticks(range(len(labels)), labels, rotation=90)
        few = [f" ({number:.0f})" if number < 10 else "" for number in counts.sum(axis=1)]
        axes.set_yticks(range(len(labels)), map(str.__add__, labels, few))
        for row, column in np.argwhere(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            text = f"{100 * shares[row, column]:.0f}"
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    figure.savefig(path, dpi=90)


def plot_reliability(bins: Sequence[dict[str, Any]], error: float, path: Path) -> None:
    """Plot accuracy over confidence into a PNG file, with a dot for each bin whose area is its number of images.

    Guo et al. 2017, https://arxiv.org/abs/1706.04599, figure 1. The bins and the expected calibration error are those
    of `metrics.detailed_report`.
    """
    figure = new_figure(5, 5)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="black", linestyle="--", label="perfectly calibrated")
    confidence, accuracy, images = (
        np.array([bin[name] for bin in bins]) for name in ("mean_confidence", "accuracy", "images")
    )
    axes.plot(confidence, accuracy, color="tab:blue", linewidth=1)
    areas = 20 + 500 * images / images.sum()
    axes.scatter(confidence, accuracy, s=areas, color="tab:blue", alpha=0.6, label="larger: more images")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(0, 1.03), aspect="equal")
    axes.set_title(f"expected calibration error {error:.3f} on these images")
    axes.grid(alpha=0.3)
    axes.legend(markerscale=0.5)
    figure.savefig(path, dpi=110)


def plot_numbers(labels: Any, predictions: Any, names: Sequence[str], path: Path) -> None:
    """Plot predicted over true numbers, (N, L) each, into a PNG file, with a panel for each of the first six names."""
    names = names[:6]
    figure = new_figure(4 * len(names), 4)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name, true, predicted in zip(panels, names, labels.T, predictions.T, strict=False):
        axes.scatter(true, predicted, s=8, alpha=0.5)
        axes.axline((true[0], true[0]), slope=1, color="black", linestyle="--")
        axes.set(title=name, xlabel="true", ylabel="predicted")
    figure.savefig(path, dpi=110)


def plot_images(images: Iterable[Image.Image], captions: Sequence[str], path: Path, columns: int = 6) -> None:
    """Plot one image or more, each under its caption of one or two short lines, into a PNG file."""
    columns = min(columns, len(captions))
    lines = -(-len(captions) // columns)
    figure = new_figure(max(3.0, 1.6 * columns), 2.05 * lines + 0.3)
    axes = figure.subplots()  # one for all images, as each takes as long to draw as twenty images
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        shown = image.convert("RGB")
        shown.thumbnail((256, 256))  # no larger than it is drawn
        width, height = (0.92 * side / max(shown.size) for side in shown.size)
        bottom, left = 1.28 * (place // columns + 1), place % columns + (1 - width) / 2
        axes.imshow(np.asarray(shown), extent=(left, left + width, bottom, bottom - height))
        axes.text(left + width / 2, bottom - height - 0.02, caption, ha="center", va="bottom", fontsize=8)
    axes.set(xlim=(0, columns), ylim=(1.28 * lines, 0))
    axes.axis("off")
    figure.savefig(path, dpi=110)
