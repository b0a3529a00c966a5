"""Train a Vision Transformer from scratch: an image classifier, or without labels an encoder.

    python train.py                                   the digits of scikit-learn, no network needed
    python train.py cifar10_cpu --learning_rate 1e-3  a recipe, and a flag that overrides it
    accelerate launch train.py cifar10_cpu            many devices

Every flag is a field of a dataclass of `hf_vit_scratch.training.arguments` or of transformers' `TrainingArguments`;
`python train.py --help` lists them.
"""

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.report import report_on_test_split
from hf_vit_scratch.training import sanity_check, steps
from hf_vit_scratch.training.arguments import Arguments
from hf_vit_scratch.training.recipe import Recipe, parse_recipe
from hf_vit_scratch.training.run_directory import lock_run_directory, resolve_checkpoint, without_resuming


def main(argv: list[str]) -> dict[str, Any]:
    """Train as the command line says; return the metrics of the test split."""
    args, recipe = parse_recipe(argv)
    training_args = args.training
    logging.basicConfig(format="%(message)s", level=logging.INFO if training_args.should_log else logging.WARNING)
    disable_progress_bar()  # the bars of saving and loading one file; training keeps its own
    command = shlex.join(["python", "train.py", *without_resuming(argv)])
    with lock_run_directory(training_args):
        return run(args, recipe, resolve_checkpoint(training_args, recipe), command)


def run(args: Arguments, recipe: Recipe, checkpoint: Path | None, command: str) -> dict[str, Any]:
    """Train in a folder that no other run uses."""
    training_args = args.training
    steps.check_and_seed(args)
    splits = steps.load_data(args)
    config, start = steps.make_choices(args, recipe, splits)
    image_processor = steps.build_image_processor(config, start)
    model = steps.build_model(args, config, start)
    trainer, test_dataset = steps.build_trainer(args, splits, model, image_processor)

    if training_args.data_report:
        return {"bound": sanity_check.data_report(trainer)}
    if training_args.check:
        return {"check": sanity_check.check(trainer, splits)}

    steps.train(trainer, recipe, checkpoint, command)
    metrics = report_on_test_split(trainer, test_dataset, args.data.data, command)
    steps.push(trainer)
    trainer.accelerator.end_training()  # a process that leaves gloo's threads running is aborted now and then
    return metrics


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
