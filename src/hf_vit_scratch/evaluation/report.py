"""The files of a finished run: metrics, log, figures and the model card."""

import json
import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import PreTrainedModel
from transformers.trainer_utils import PredictionOutput

from ..data.dataset import ImageClassificationDataset
from ..data.images import decode_image, denormalize
from ..data.masking import MaskedImageDataset
from .figures import plot_curves, plot_images
from .metrics import detailed_report
from .model_card import MISTAKES, describe_machine

NUM_MISTAKES = 24  # in the figure
FEW_CLASSES = 10  # whose scores fit into the log

logger = logging.getLogger(__name__)


def report_on_test_split(
    trainer: Any, test_dataset: ImageClassificationDataset, data: str, command: str
) -> dict[str, Any]:
    """Evaluate a `ViTTrainer` after training, write the report into the folder of the run, and return the metrics.

    The source of the images is `data`, as given to `--data`. The command repeats the run.
    """
    outputs = trainer.predict(test_dataset)
    outputs.metrics["epoch"] = trainer.state.epoch
    if not trainer.is_world_process_zero():
        return outputs.metrics
    output_dir, history = Path(trainer.args.output_dir), trainer.state.log_history
    (output_dir / "log.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    report = write_report(outputs, test_dataset, data, command, output_dir)
    if isinstance(test_dataset, MaskedImageDataset):
        draw_reconstructions(trainer.model, test_dataset, output_dir / "reconstructions.png")
        plot_curves(history, output_dir / "curves.png")
    trainer.create_model_card()
    minutes = max(line.get("minutes", 0.0) for line in history)
    table = summary(report, len(test_dataset), minutes)
    logger.info("\n%s\nFiles      %s: the model, and README.md with all results", table, output_dir)
    return outputs.metrics


def write_report(
    outputs: PredictionOutput, dataset: ImageClassificationDataset, data: str, command: str, output_dir: Path
) -> dict[str, Any]:
    """Write what was found on a split into a folder, with the most confident mistakes, and return it."""
    on_the_hub = data != "digits" and not Path(data).expanduser().exists()
    report = {**(outputs.metrics or {}), "command": command, "data_is_on_the_hub": on_the_hub, **describe_machine()}
    if not isinstance(dataset, MaskedImageDataset):
        names = dataset.rows.features["label"].names
        report |= {"labels": names, **detailed_report(outputs.predictions, outputs.label_ids, names)}
        # Files that begin with "_" are never uploaded: the images of a local folder are private.
        public = on_the_hub or data == "digits"
        draw_mistakes(outputs, dataset.rows, names, output_dir / (MISTAKES if public else f"_{MISTAKES}"))
    (output_dir / "metrics.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def summary(report: dict[str, Any], num_images: int, minutes: float | None = None) -> str:
    """Return a report as a table of a few lines, with the minutes of training if there was one."""
    classes, text = report.get("per_class", {}), f"loss {report['test_loss']:.3f}, {num_images} images"
    if classes:
        top5 = f", top-5 accuracy {report['test_top5_accuracy']:.1%}" if len(classes) > 5 else ""
        text = f"accuracy {report['test_accuracy']:.1%}{top5}, {text}"
    lines = [f"Test       {text}"]
    if 0 < len(classes) <= FEW_CLASSES:
        width = max(10, *map(len, classes))
        lines.append(f"{'Class':{width}} precision recall  images")
        for name, row in classes.items():
            lines.append(f"{name:{width}} {row['precision']:9.0%} {row['recall']:6.0%} {row['support']:7.0f}")
    if minutes is not None:
        lines.append(f"Training   {minutes:.1f} minutes")
    return "\n".join(lines)


def draw_mistakes(outputs: PredictionOutput, rows: Dataset, label_names: list[str], path: Path) -> None:
    """Plot the most confident mistakes on the test split into a PNG file, if there are any."""
    path.unlink(missing_ok=True)  # a resumed run may have left one
    labels = cast(Any, outputs.label_ids)
    ranked, confidence, _ = cast(tuple[Any, ...], outputs.predictions)
    wrong = np.flatnonzero(ranked[:, 0] != labels)
    places = wrong[np.argsort(-confidence[wrong], kind="stable")][:NUM_MISTAKES].tolist()
    captions = [
        f"taken for {label_names[ranked[place, 0]]:.12} ({100 * confidence[place]:.0f}%)\n"
        f"is {label_names[labels[place]]:.20}"
        for place in places
    ]
    if places:
        encoded = rows[places]["image"]
        images = [decode_image(row, name=f"image {place}") for place, row in zip(places, encoded, strict=True)]
        plot_images(images, captions, path)


@torch.no_grad()
def draw_reconstructions(model: PreTrainedModel, dataset: MaskedImageDataset, path: Path) -> None:
    """Plot the first images of a split, what the model was shown of them, and its reconstructions."""
    batch = dataset.batch_transform(dataset.__getitems__(range(min(6, len(dataset)))))
    pixels, hidden = (batch[name].to(model.device) for name in ("pixel_values", "bool_masked_pos"))
    model.eval()
    reconstruction = model(pixels, hidden).reconstruction.float()
    height, width = dataset.patch_size
    hidden = hidden.view(len(pixels), 1, pixels.shape[2] // height, pixels.shape[3] // width)
    hidden = hidden.repeat_interleave(height, 2).repeat_interleave(width, 3)
    rows = torch.cat((pixels, pixels.masked_fill(hidden, 0), torch.where(hidden, reconstruction, pixels)))
    images = [Image.fromarray(image) for image in denormalize(rows, dataset.image_processor)]
    captions = [caption for caption in ("image", "shown", "reconstructed") for _ in pixels]
    plot_images(images, captions, path, columns=len(pixels))
