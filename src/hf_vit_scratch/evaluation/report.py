"""The files of a finished run: metrics, log, figures and the model card."""

import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from huggingface_hub import dataset_info
from PIL import Image
from scipy.special import expit, softmax
from transformers import EvalPrediction, PreTrainedModel
from transformers.trainer_utils import PredictionOutput

from ..data.dataset import ImageClassificationDataset
from ..data.groups import LISTING, paths_of
from ..data.images import denormalize, images_of, local_path
from ..data.masking import MaskedImageDataset
from ..data.splits import SPLITS
from ..data.targets import label_names
from .figures import plot_confusion, plot_curves, plot_images, plot_numbers, plot_reliability
from .metrics import compute_metrics, detailed_report, problem_type_of
from .model_card import MISTAKES, describe_machine, results_of
from .trust import Trust

NUM_MISTAKES = 24  # images in the figure
ANSWERS = "_answers.csv"
FEW_CLASSES = 10  # whose scores fit into the log


def report_on_test_split(
    trainer: Any, test_dataset: ImageClassificationDataset, data: str, command: str
) -> dict[str, Any]:
    """Evaluate a `ViTTrainer` after training, write the report into the folder of the run, and return the metrics.

    The source of the images is `data`, as given to `--data`. The command repeats the run.
    """
    is_masked = isinstance(test_dataset, MaskedImageDataset)
    trainer.args.prediction_loss_only = is_masked  # the reconstructions of all images would fill the memory
    outputs = predict_split(trainer, test_dataset)
    if hasattr(trainer.train_dataset, "__len__"):  # a stream has no passes
        outputs.metrics["epoch"] = trainer.state.epoch
    if not trainer.is_world_process_zero():
        return outputs.metrics
    output_dir, history = Path(trainer.args.output_dir), trainer.state.log_history
    (output_dir / "log.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    plot_curves(history, output_dir / "curves.png")
    report = write_report(outputs, None if is_masked else test_dataset.rows, data, command, output_dir)
    if isinstance(test_dataset, MaskedImageDataset) and not trainer.is_fsdp_enabled:  # which splits each weight
        with trainer.uncompiled_if(True):  # compiling for six images would take longer
            draw_reconstructions(trainer.model, test_dataset, output_dir / "_reconstructions.png")
    trainer.create_model_card()
    minutes = max(line.get("minutes", 0.0) for line in history)
    table = summary(report, len(test_dataset), minutes)
    print(f"\n{table}\nFiles      {output_dir}: the model, and README.md with all results")
    return outputs.metrics


def predict_split(trainer: Any, dataset: ImageClassificationDataset) -> Any:
    """Return what `Trainer.predict` returns, with the metrics of the mirrored views if `eval_tta` asks for them."""
    outputs = trainer.predict(dataset)
    if trainer.args.eval_tta == "flip":

        def flip(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"pixel_values": kwargs["pixel_values"].flip(-1)}

        with trainer.model.register_forward_pre_hook(flip, with_kwargs=True):
            mirrored = trainer.predict(dataset).predictions
        metrics = compute_metrics(EvalPrediction((outputs.predictions + mirrored) / 2, outputs.label_ids))
        outputs.metrics.update({f"test_flip_{name}": value for name, value in metrics.items()})
    return outputs


def write_report(
    outputs: PredictionOutput, rows: Dataset | None, data: str, command: str, output_dir: Path
) -> dict[str, Any]:
    """Write what was found on labelled rows into a folder, with all answers and figures, and return it."""
    # The data may have been moved since: then the run's list of its files says that they are private.
    is_local = local_path(data).exists() or (output_dir / SPLITS).is_file()
    on_the_hub = data != "digits" and not is_local
    report: dict[str, Any] = {**(outputs.metrics or {}), "command": command, "data_is_on_the_hub": on_the_hub}
    report |= describe_machine()
    if (listing := output_dir / LISTING).is_file():
        report["near_duplicates"] = len(listing.read_bytes().splitlines()) - 1  # without the header
    if trust := Trust.load(str(output_dir)):
        report["trust"] = trust.facts()
    if rows is not None:
        names = label_names(rows.features["label"])
        report |= {"labels": names, **detailed_report(outputs.predictions, outputs.label_ids, names)}
        if report["problem_type"] == "regression":
            plot_numbers(outputs.label_ids, outputs.predictions, names, output_dir / "predictions.png")
        if "confusion_matrix" in report:
            plot_confusion(report["confusion_matrix"], names, output_dir / "confusion_matrix.png")
        if calibration := report.get("calibration"):
            error = calibration["expected_calibration_error"]
            plot_reliability(calibration["bins"], error, output_dir / "reliability.png")
    # A row of the confusion matrix is in one line: of a thousand classes, it has a thousand numbers.
    text = re.sub(r"(?<=\d,)\n *(?=\d)", " ", json.dumps(report, indent=2))
    (output_dir / "metrics.json").write_text(text + "\n", encoding="utf-8")
    if rows is not None:
        # Files that begin with "_" are never uploaded: the images of a local folder are private.
        public = data == "digits" or (on_the_hub and _is_public(data))
        list_answers(outputs, rows, names, output_dir / (MISTAKES if public else f"_{MISTAKES}"))
    return report


def _is_public(data: str) -> bool:
    """Return whether anybody may see a dataset of the Hub: not a private or gated one, nor without an answer."""
    try:
        info = dataset_info(data, token=False)
    except Exception:  # of httpx or of the Hub
        return False
    return not (info.private or info.gated)


def summary(report: dict[str, Any], num_images: int, minutes: float | None = None) -> str:
    """Return a report as a table of a few lines, with the minutes of training if there was one."""
    rows = {"test images": str(num_images)}
    if "test_loss" in report:  # an exported model of numbers has none
        rows["test loss"] = f"{report['test_loss']:.3f}"
    if "problem_type" in report:
        rows |= results_of([report])
    if minutes is not None:
        rows["training"] = f"{minutes:.1f} minutes" + (f", {report['epoch']:.4g} passes" if "epoch" in report else "")
    width = max(map(len, rows)) + 2
    lines = [f"{title[0].upper() + title[1:]:{width}}{text}" for title, text in rows.items()]
    classes = {name: row for name, row in report.get("per_class", {}).items() if row["support"]}
    if 0 < len(classes) <= FEW_CLASSES:
        width = max(10, *map(len, classes))
        lines.append(f"{'Class':{width}} precision recall  images")
        for name, row in classes.items():
            lines.append(f"{name:{width}} {row['precision']:9.0%} {row['recall']:6.0%} {row['support']:7.0f}")
    return "\n".join(lines)


def list_answers(outputs: PredictionOutput, rows: Dataset, names: list[str], path: Path) -> None:
    """Plot the worst mistakes on the test split into a PNG file, and list all answers beside it, the worst first."""
    path.unlink(missing_ok=True)  # a resumed run may have left it
    logits, labels = cast(Any, outputs.predictions), cast(Any, outputs.label_ids)
    kind, all_names = problem_type_of(labels), np.array(names, object)
    if kind == "single_label_classification":
        best, scores = logits.argmax(axis=1), softmax(logits, axis=1).max(axis=1)
        severity = np.where(best != labels, scores, 0)
        answers, truth = all_names[best], all_names[labels]
        caption = "taken for {answer:.12} ({score:.0%})\nis {truth:.20}"
    else:
        numbers = logits if kind == "regression" else expit(logits)
        errors = np.abs(numbers - labels)
        errors = errors / (labels.std(axis=0) + 1e-9) if kind == "regression" else errors * (errors > 0.5)
        at = np.arange(len(labels)), errors.argmax(axis=1)
        severity, answers, scores, truth = errors[at], all_names[at[1]], numbers[at], labels[at]
        caption = "{answer:.12}: {score:.3g}\nis {truth:g}"
    order = np.argsort(-severity, kind="stable")
    files = [file or f"image {number}" for number, file in enumerate(paths_of(rows))]
    table = pd.DataFrame({"image": files, "answer": answers, "score": scores, "truth": truth}).iloc[order]
    # Of several labels or numbers, a row has the one that is wrong by most.
    listed = table if kind == "single_label_classification" else table.rename(columns={"answer": "label"})
    listed.to_csv(path.with_name(ANSWERS), index=False, float_format="%.7g")
    shown = min(NUM_MISTAKES, np.count_nonzero(severity))
    if shown:
        captions = [caption.format(**mistake) for mistake in table[:shown].to_dict("records")]
        plot_images(images_of(rows.select(order[:shown])), captions, path)


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
