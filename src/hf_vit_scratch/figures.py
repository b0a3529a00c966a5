"""Pictures of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("loss", ("loss", "eval_loss")),
    ("accuracy", ("eval_accuracy", "eval_top5_accuracy")),
    ("learning rate", ("learning_rate",)),
    ("images per second", ("images_per_second",)),
)


def plot_curves(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw loss, accuracy, learning rate and throughput over the steps of a run into a PNG file.

    Args:
        log_history: Of the Trainer's state.
        path: The file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for name in names:
            points = [(logs["step"], float(logs[name])) for logs in log_history if name in logs]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=110)
