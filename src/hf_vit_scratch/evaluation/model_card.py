"""Model cards from finished runs, with metadata that the Hub reads.

vit-scratch card RUN [RUN of another seed ...] --output model_cards/NAME.md
"""

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..errors import UserError
from ..model.configuration_vit_scratch import VARIANTS
from ..model.modeling_vit_scratch import ViTScratchForImageClassification
from .figures import plot_confusion, plot_curves, plot_reliability

TEMPLATE = Path(__file__).with_name("model_card_template.md")
SHORT_TEMPLATE = Path(__file__).with_name("short_card_template.md")  # of a run without results
LOGGED = ("epoch", "minutes", "loss", "eval_loss", "eval_accuracy", "learning_rate", "images_per_second")
LOG_ROWS = 20
MISTAKES = "mistakes.png"  # drawn by a run that may show its images
PACKAGES = ("torch", "torchvision", "transformers", "accelerate", "datasets")


def describe_machine() -> dict[str, str]:
    """The processor, the accelerators and the versions of what computes, as text."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].strip() if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware = f"{cores} cores of {cpu}"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {hardware}"
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)]
    return {"hardware": hardware, "versions": ", ".join(versions)}


def make_card(
    runs: Sequence[Path],
    output: Path,
    *,
    name: str | None = None,
    data: str | None = None,
    license: str | None = None,
) -> ModelCard:
    """Write the card of a run, or of several that differ in their seed only, and its pictures beside it.

    Args:
        runs: Folders that `train.py` has left; details are those of the first.
        output: The Markdown file to write.
        name: Name of the model; by default that of the first folder.
        data: Description of the images, for a recipe that names a local folder.
        license: An identifier of the Hub, such as `"apache-2.0"`; it is yours to choose.

    Raises:
        UserError: A folder holds no finished run of a classifier.
    """
    reports = [_read(run / "metrics.json") for run in runs]
    for run, report in zip(runs, reports, strict=True):
        if "per_class" not in report:
            raise UserError(f"{run} holds no run of a classifier.")
    report, config, log = reports[0], _read(runs[0] / "config.json"), _read(runs[0] / "log.json")
    recipe = yaml.safe_load((runs[0] / "recipe.yaml").read_text(encoding="utf-8"))
    name, source = name or runs[0].resolve().name, recipe.get("data", "digits")
    on_the_hub = report["data_is_on_the_hub"]
    if data is None:
        data = source if on_the_hub else "the digits of scikit-learn" if source == "digits" else "a folder of images"
    start = recipe.get("model", "")
    if start and not re.fullmatch(rf"({'|'.join(VARIANTS)})/\d+", start):
        origin, tags = f"fine-tuned from `{Path(start).name}`", ["vision", "vit"]
    else:
        origin, tags = "trained from random weights", ["vision", "vit", "trained-from-scratch"]
    accuracies = [100 * report["test_accuracy"] for report in reports]
    accuracy = f"{np.mean(accuracies):.1f}%"
    if len(runs) > 1:
        accuracy += f" ({', '.join(f'{value:.1f}' for value in accuracies)} in {len(runs)} runs)"

    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = "" if output.name == "README.md" else f"{output.stem}_"
    names = ("curves", "confusion_matrix", "reliability", "mistakes")
    curves, confusion, reliability, mistakes = (output.with_name(f"{prefix}{what}.png") for what in names)
    plot_curves(log, curves)
    plot_confusion(report["confusion_matrix"], report["labels"], confusion)
    calibration = report["calibration"]
    plot_reliability(calibration["bins"], calibration["expected_calibration_error"], reliability)
    drawn = runs[0] / MISTAKES  # by the run, which had the images
    if drawn.is_file() and drawn.resolve() != mistakes.resolve():
        shutil.copyfile(drawn, mistakes)
    columns = [column for column in LOGGED if any(column in logs for logs in log)]
    lines = [logs for logs in log if "loss" in logs or "eval_loss" in logs]
    lines = [lines[int(place)] for place in np.unique(np.linspace(0, len(lines) - 1, LOG_ROWS).round()) if lines]
    # The last call's alone, where a run was resumed; minutes count on.
    seconds = max(logs.get("train_runtime", 60 * logs.get("minutes", 0)) for logs in log)
    card = ModelCard.from_template(
        ModelCardData(
            license=license,
            library_name="transformers",
            pipeline_tag="image-classification",
            tags=tags,
            datasets=[source] if on_the_hub else None,
            metrics=["accuracy"],
            model_name=name,
            eval_results=[
                EvalResult(
                    task_type="image-classification",
                    dataset_type=source if on_the_hub else "imagefolder",
                    dataset_name=data,
                    dataset_split="test",
                    metric_type="accuracy",
                    metric_value=round(float(np.mean(accuracies)) / 100, 6),
                )
            ],
        ),
        template_path=str(TEMPLATE),
        model_name=name,
        origin=origin,
        architecture=_architecture(config),
        data=data,
        num_test=sum(map(sum, report["confusion_matrix"])),
        num_classes=len(report["labels"]),
        accuracy=accuracy,
        top5=f"{100 * report['test_top5_accuracy']:.1f}%" if len(report["labels"]) > 5 else None,
        loss=f"{report['test_loss']:.3f}",
        calibration=f"{calibration['expected_calibration_error']:.3f}",
        cost=f"{report['epoch']:.1f} passes over the training images in {seconds:.0f} seconds",
        hardware=report["hardware"],
        versions=report["versions"],
        per_class=[
            (label, {name: f"{value:.{0 if name == 'support' else 3}f}" for name, value in row.items()})
            for label, row in report["per_class"].items()
        ],
        command="\n".join(f"    {_without_folders(report['command'])}" for report in reports),
        recipe=_without_folders(yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None).strip()),
        curves_picture=curves.name,
        confusion_picture=confusion.name,
        reliability_picture=reliability.name,
        mistakes_picture=mistakes.name if drawn.is_file() else None,
        log_columns=columns,
        log_rows=[[logs["step"], *(_short(logs.get(column)) for column in columns)] for logs in lines],
        one_run=len(runs) == 1,
    )
    output.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return card


def make_short_card(
    model: PreTrainedModel, output: Path, *, name: str, status: str, license: str | None = None
) -> ModelCard:
    """Write the card of a model that has no results on a test split: while it is trained, or of an encoder.

    Args:
        model: A model of ours.
        output: The Markdown file to write.
        name: Name of the model.
        status: One sentence on its training.
        license: An identifier of the Hub.
    """
    config, classifies = model.config, isinstance(model, ViTScratchForImageClassification)
    card = ModelCard.from_template(
        ModelCardData(
            license=license,
            library_name="transformers",
            pipeline_tag="image-classification" if classifies else "image-feature-extraction",
            tags=["vision", "vit"],
            model_name=name,
        ),
        template_path=str(SHORT_TEMPLATE),
        model_name=name,
        architecture=_architecture(config.to_dict()),
        status=status,
        auto_class="AutoModelForImageClassification" if classifies else "AutoModel",
    )
    output.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return card


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is missing: {path.parent} holds no finished run.")
    return json.loads(path.read_text(encoding="utf-8"))


def _without_folders(text: str) -> str:
    """The text with of each absolute path its last name only: a card is for others, who have other folders."""
    return re.sub(r"(?<![^\s='\"])/(?:[^\s/'\"]+/)*([^\s/'\"]+)", r"\1", text)


def _architecture(config: dict[str, Any]) -> str:
    size, patch = (
        "x".join(map(str, value)) if isinstance(value, list) else f"{value}x{value}"
        for value in (config["image_size"], config["patch_size"])
    )
    order = "pre-LN" if config["norm_first"] else "post-LN"
    return (
        f"{config['num_hidden_layers']} {order} layers of width {config['hidden_size']} with "
        f"{config['num_attention_heads']} heads, on images of {size} pixels in patches of {patch}"
    )


def _short(value: Any) -> str:
    return "" if value is None else f"{float(value):.4g}"


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="vit-scratch card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", help="of the model; that of the first folder")
    parser.add_argument("--data", help="what the images are, where they came from a local folder")
    parser.add_argument("--license", help="identifier of the Hub, such as apache-2.0")
    args = parser.parse_args(argv)
    try:
        make_card(args.runs, args.output, name=args.name, data=args.data, license=args.license)
    except UserError as error:
        parser.error(str(error))
    print(f"{args.output} and its pictures are written.")


if __name__ == "__main__":
    main(sys.argv[1:])
