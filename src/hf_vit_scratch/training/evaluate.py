"""Report on labelled images, as a run reports on its test split at its end.

    vit-scratch evaluate runs/my_photos --output_dir report                    its own test split, once more
    vit-scratch evaluate runs/my_photos --data new_photos --output_dir report  other images

The report is metrics.json, confusion_matrix.png, reliability.png and mistakes.png. Classes are matched by their names;
the data may lack some of the model's classes.

Other flags are those of `vit-scratch train`, such as --per_device_eval_batch_size 64, --corrupt_images skip,
--label_column NAME and --use_cpu true. Without them, the model computes as in the run.
"""

import argparse
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.utils.logging import disable_progress_bar

from ..data.dataset import ImageClassificationDataset
from ..data.options import DataArguments
from ..data.splits import find_split, load_split, with_names
from ..errors import UserError
from ..evaluation.figures import plot_report
from ..evaluation.metrics import compute_metrics, summarize_logits
from ..evaluation.predict import load_classifier, refuse_other_models
from ..evaluation.report import summary, write_report
from ..speed import hardware
from . import steps
from .arguments import Arguments
from .recipe import RECIPE, Recipe, parse_recipe
from .trainer import ViTTrainer

logger = logging.getLogger(__name__)

# What a run may have asked for, but is for training only. The Trainer's own label smoothing would also look at labels.
OFF = ["--push_to_hub", "false", "--torch_compile", "false", "--report_to", "none", "--label_smoothing_factor", "0"]


def main(argv: Sequence[str]) -> None:
    """Run `vit-scratch evaluate`."""
    parser = argparse.ArgumentParser(
        prog="vit-scratch evaluate",
        usage="vit-scratch evaluate RUN --output_dir DIR [--data DATA] [--split SPLIT] [--flag value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of another saved model of this package")
    parser.add_argument("--data", help="images with labels, as for `vit-scratch train` (default: those of the run)")
    parser.add_argument("--split", help="split of the data (default: test, or all images if there are no splits)")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="new folder for the report")
    given, flags = parser.parse_known_args(argv)
    output_dir = given.output_dir
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"{output_dir} is not empty. Choose another --output_dir, or delete it.")
    run = Path(given.run).expanduser()
    run = run if (run / RECIPE).is_file() else run.resolve().parent  # a checkpoint is in the folder of its run
    is_run = (run / RECIPE).is_file()
    if not is_run and given.data is None:
        raise UserError(f"{given.run} holds no {RECIPE}, so its own images are not known. Give --data.")
    args, recipe = parse_recipe(
        [str(run / RECIPE) if is_run else "your_images", *flags, *OFF, "--output_dir", str(output_dir)]
    )
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    disable_progress_bar()  # those of loading
    classifier: Any = load_classifier(given.run)
    refuse_other_models(classifier.model)
    data, rows = load_rows(args, recipe, run, given.data, given.split)
    config = classifier.model.config
    names = [config.id2label[number] for number in range(config.num_labels)]
    rows = with_names(data, rows, names, config.problem_type or "single_label_classification")
    dataset = ImageClassificationDataset(rows, classifier.image_processor)
    hardware.choose(args.training, recipe.settings.keys())
    trainer = ViTTrainer(
        model=classifier.model,
        args=args.training,
        eval_dataset=dataset,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=summarize_logits,
    )
    command = shlex.join(["vit-scratch", "evaluate", *argv])
    report = write_report(trainer.predict(dataset), dataset, data, command, output_dir)
    plot_report(report, *(output_dir / f"{name}.png" for name in ("confusion_matrix", "reliability")))
    logger.info("\n%s\nFiles      %s: metrics.json and figures", summary(report, len(dataset)), output_dir)


def load_rows(args: Arguments, recipe: Recipe, run: Path, data: str | None, split: str | None) -> tuple[str, Dataset]:
    """Return the source of the images to evaluate, and the images: of a split of the run itself, or of other data.

    The splits of the run's own data are cut as the run cut them, so that no training image is in the test split.
    """
    own = args.data.data
    if data is not None and Path(data).expanduser().resolve() != Path(own).expanduser().resolve():
        # Its columns need not be those of the run.
        flags = {name: value for name, value in recipe.values("flag").items() if hasattr(args.data, name)}
        return data, load_split(DataArguments(**flags | {"data": data}), split)
    splits = steps.load_data(args)
    steps.check_images(run, Recipe.load(run) or Recipe(), splits)
    return own, splits[find_split(own, split or "test", splits)]
