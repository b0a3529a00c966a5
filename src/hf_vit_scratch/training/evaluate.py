"""Report on labelled images, as a run reports on its test split at its end.

    vit-scratch evaluate runs/my_photos --output_dir report                    its own test split, once more
    vit-scratch evaluate runs/my_photos --data new_photos --output_dir report  other images

The report is metrics.json, confusion_matrix.png, reliability.png and mistakes.png.

--data takes what `vit-scratch train` takes. All images of a folder of class folders are evaluated, and the test split
of data that has splits. Classes are matched by their names, and some of the model's classes are enough.
"""

import argparse
import logging
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from transformers.hf_argparser import string_to_bool
from transformers.utils.logging import disable_progress_bar

from ..data.dataset import ImageClassificationDataset
from ..data.options import DataArguments
from ..data.splits import find_split, fingerprint, load_split, load_splits, with_names
from ..errors import UserError
from ..evaluation.figures import plot_report
from ..evaluation.metrics import compute_metrics, summarize_logits
from ..evaluation.predict import load_classifier, refuse_other_models
from ..evaluation.report import summary, write_report
from ..speed import hardware
from .arguments import ViTTrainingArguments
from .recipe import FACTS, Recipe
from .trainer import ViTTrainer

logger = logging.getLogger(__name__)

DATA_FLAGS = ("data_config", "image_column", "label_column", "corrupt_images", "follow_links")
# What the numbers of a report depend on.
RUN_FLAGS = ("per_device_eval_batch_size", "bf16", "fp16", "speed_choice", "use_cpu", "dataloader_num_workers")


def main(argv: Sequence[str]) -> None:
    """Run `vit-scratch evaluate`."""
    parser = argparse.ArgumentParser(
        prog="vit-scratch evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of another saved model of this package")
    parser.add_argument("--data", help="images with labels (default: those of the run)")
    parser.add_argument("--split", help="split of the data (default: test, or all images where there are no splits)")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="new folder for the report")
    parser.add_argument("--batch_size", type=int, help="images computed at once (default: as in the run)")
    for field in fields(DataArguments):
        if field.name in DATA_FLAGS:
            options: dict[str, Any] = {"type": string_to_bool if field.type is bool else str}
            if field.name == "label_column":
                options["nargs"] = "+"
            parser.add_argument(f"--{field.name}", **options, default=argparse.SUPPRESS, help=field.metadata["help"])
    args = parser.parse_args(argv)
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch_size must be at least 1, got {args.batch_size}.")
    if args.output_dir.exists() and (not args.output_dir.is_dir() or any(args.output_dir.iterdir())):
        raise UserError(f"{args.output_dir} is not empty. Choose another --output_dir, or delete it.")
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    disable_progress_bar()  # those of loading
    classifier = load_classifier(args.run)
    refuse_other_models(classifier.model)
    run, config = Path(args.run).expanduser(), cast(Any, classifier.model.config)
    recipe = Recipe.load(run) or Recipe.load(run.resolve().parent)  # a checkpoint is in the folder of its run
    data, rows = load_rows(args, recipe)
    names = [config.id2label[number] for number in range(config.num_labels)]
    rows = with_names(data, rows, names, config.problem_type or "single_label_classification")
    dataset = ImageClassificationDataset(rows, cast(Any, classifier.image_processor))
    trainer = build_trainer(args, {} if recipe is None else recipe.values(), classifier)
    command = shlex.join(["vit-scratch", "evaluate", *argv])
    report = write_report(trainer.predict(dataset), dataset, data, command, args.output_dir)
    plot_report(report, *(args.output_dir / f"{name}.png" for name in ("confusion_matrix", "reliability")))
    logger.info("\n%s\nFiles      %s: metrics.json and figures", summary(report, len(dataset)), args.output_dir)


def load_rows(args: argparse.Namespace, recipe: Recipe | None) -> tuple[str, Dataset]:
    """Return the source of the images, and the images that are evaluated.

    The splits of the run's own data are cut as the run cut them, so that no training image is in the test split.

    Raises:
        UserError: The data cannot be used, or the images of the run have changed.
    """
    settings = {} if recipe is None else recipe.values()
    own = settings.get("data", DataArguments.data)
    choices = {name: value for name, value in vars(args).items() if name in DATA_FLAGS}
    if args.data is not None and (recipe is None or _place(args.data) != _place(own)):
        return args.data, load_split(args.data, args.split, **choices)
    if recipe is None:
        raise UserError(f"{args.run} holds no {FACTS}, so its own images are not known. Give --data.")
    choices = {flag.name: settings[flag.name] for flag in fields(DataArguments) if flag.name in settings} | choices
    splits = load_splits(**choices | {"data": own}, seed=settings.get("seed", ViTTrainingArguments.seed))
    if recipe.images not in ("", fingerprint(splits)):
        raise UserError(
            f"{own} has changed since the run: {recipe.images}, now {fingerprint(splits)}. Its splits would be cut "
            "anew, so training images could come into the test split. Restore the images, or give others by --data."
        )
    return own, splits[find_split(own, args.split, splits)]


def _place(data: str) -> Path:
    return Path(data).expanduser().resolve()


def build_trainer(args: argparse.Namespace, settings: dict[str, Any], classifier: Any) -> ViTTrainer:
    """Build a trainer that computes as the run did, from the settings of the run."""
    chosen = {"speed_choice": "plain"} | {name: settings[name] for name in RUN_FLAGS if name in settings}
    if args.batch_size is not None:
        chosen["per_device_eval_batch_size"] = args.batch_size
    training = ViTTrainingArguments(
        output_dir=str(args.output_dir), eval_strategy="no", save_strategy="no", load_best_model_at_end=False,
        report_to="none", **chosen,
    )  # fmt: skip
    hardware.choose(training, settings.keys())
    return ViTTrainer(
        model=classifier.model,
        args=training,
        processing_class=classifier.image_processor,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=summarize_logits,
    )
