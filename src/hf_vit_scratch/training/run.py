"""A training run from its command line to its report: an image classifier, or without labels an encoder.

    vit-scratch train                                   the digits of scikit-learn, no network needed
    vit-scratch train cifar10_cpu --learning_rate 1e-3  a recipe, and a flag that overrides it

Every flag is a field of a dataclass of `arguments.py` or `data/options.py`, or of transformers' `TrainingArguments`.
"""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from ..data.groups import LISTING
from ..data.images import local_path
from ..data.splits import SPLITS, list_splits
from ..evaluation.report import report_on_test_split
from . import sanity_check, steps
from .recipe import parse_recipe
from .run_directory import lock_run_directory, refuse_place_among_images, resolve_checkpoint, without_resuming


def main(argv: Sequence[str], program: str = "vit-scratch train") -> dict[str, Any]:
    """Train as the command line says; return the metrics of the test split, or what `--check` or `--data_report` find.

    `program` is what precedes the flags. The steps share `args` and `recipe`, which they change, and files of the
    run's folder: `load_data` writes the list of near duplicates and `train` the file of `Trust`, both of which the
    report reads; the model card reads the report.
    """
    args, recipe = parse_recipe(argv, program)
    training_args = args.training
    logging.basicConfig(format="%(message)s", level=logging.INFO if training_args.should_log else logging.WARNING)
    disable_progress_bar()  # the bars of saving and loading one file; training keeps its own
    disable_progress_bars()  # of each step of `datasets`
    command = f"{program} {shlex.join(without_resuming(argv))}".rstrip()
    refuse_place_among_images(Path(training_args.output_dir), args.data.data)
    with lock_run_directory(training_args), steps.advise_on_memory(training_args):
        checkpoint = resolve_checkpoint(training_args, recipe)
        steps.check_and_seed(args, recipe)
        splits = steps.load_data(args, Path(training_args.output_dir) / LISTING if training_args.should_save else None)
        config, start = steps.make_choices(args, recipe, splits)
        image_processor = steps.build_image_processor(config, start)
        model = steps.build_model(args, config, start)
        trainer, test_dataset = steps.build_trainer(args, splits, model, image_processor)

        if training_args.data_report:
            return {"bound": sanity_check.data_report(trainer)}
        if training_args.check:
            return {"check": sanity_check.check(trainer, splits)}

        if training_args.should_save and local_path(args.data.data).exists():
            list_splits(splits, Path(training_args.output_dir) / SPLITS)
        steps.train(trainer, recipe, checkpoint, command)
        metrics = report_on_test_split(trainer, test_dataset, args.data.data, command)
        steps.push(trainer)
        trainer.accelerator.end_training()  # a process that leaves gloo's threads running is aborted now and then
        return metrics
