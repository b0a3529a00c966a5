"""Train a Vision Transformer image classifier from scratch.

    python train.py                                                   the digits of scikit-learn, no network needed
    python train.py recipes/cifar10_cpu.yaml --learning_rate 1e-3     a recipe, and a flag that overrides it
    accelerate launch train.py recipes/cifar10_cpu.yaml               many devices

Every flag is a field of `ModelArguments`, `DataArguments`, `AugmentationArguments` or transformers'
`TrainingArguments`; `python train.py --help` lists them.
"""

import json
import logging
import shlex
import sys
from pathlib import Path

from transformers import ViTImageProcessor, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_vit_scratch import ViTScratchForImageClassification
from hf_vit_scratch.arguments import model_config, parse_recipe, resolve_checkpoint
from hf_vit_scratch.augmentation import build_augmentation
from hf_vit_scratch.data import ImageClassificationDataset, load_splits
from hf_vit_scratch.errors import UserError, blame_the_user
from hf_vit_scratch.metrics import METRIC_NAMES, compute_metrics, rank_top5
from hf_vit_scratch.trainer import ViTTrainer

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "digits.yaml"

logger = logging.getLogger("train")


def main(argv: list[str]) -> dict[str, float]:
    """Train as the command line says; return the metrics of the test split."""
    # 1. Arguments, logging, seed
    (model_args, data_args, augmentation_args, training_args), recipe = parse_recipe(argv, DEFAULT_RECIPE)
    logging.basicConfig(format="%(message)s", level=logging.INFO if training_args.should_log else logging.WARNING)
    disable_progress_bar()  # the bars of saving and loading one file; training keeps its own
    checkpoint = resolve_checkpoint(training_args)
    if (metric := training_args.metric_for_best_model) and metric.removeprefix("eval_") not in METRIC_NAMES:
        raise UserError(f"metric_for_best_model must be one of {', '.join(METRIC_NAMES)}; got {metric!r}.")
    with blame_the_user():
        set_seed(training_args.seed)  # before the model exists: its first weights are part of the run

    # 2. Data
    splits = load_splits(**vars(data_args), seed=training_args.seed)
    label_names = splits["train"].features["label"].names

    # 3. Model
    config = model_config(model_args, label_names)
    height, width = config.image_height_width
    augment = build_augmentation((height, width), **vars(augmentation_args))
    image_processor = ViTImageProcessor(size={"height": height, "width": width}, do_convert_rgb=True)
    with blame_the_user():
        model = ViTScratchForImageClassification(config)

    # 4. Trainer
    data_seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
    with blame_the_user():
        trainer = ViTTrainer(
            model=model,
            args=training_args,
            train_dataset=ImageClassificationDataset(splits["train"], image_processor, augment, data_seed),
            eval_dataset=ImageClassificationDataset(splits["validation"], image_processor),
            processing_class=image_processor,  # saved beside the weights: pipelines prepare images as we did
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=rank_top5,
        )
    logger.info(
        "%.2fM parameters; %s; %d classes; training on %s",
        model.num_parameters() / 1e6,
        ", ".join(f"{len(rows)} {name}" for name, rows in splits.items()),
        len(label_names),
        training_args.device,
    )

    # 5. Train; a run is resumed when the user says so, never by a guess
    with blame_the_user(until=lambda: trainer.has_started):
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()  # before the test split is read, so that nothing there can lose the run

    # 6. Report, once, on the test split
    metrics = trainer.evaluate(ImageClassificationDataset(splits["test"], image_processor), metric_key_prefix="test")
    trainer.log_metrics("test", metrics)
    if trainer.is_world_process_zero():
        output_dir = Path(training_args.output_dir)
        command = shlex.join(["python", "train.py", *argv])
        (output_dir / "recipe.yaml").write_text(f"# {command}\n{recipe}", encoding="utf-8")
        (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        logger.info("The model, its recipe and metrics.json are in %s", output_dir)
    trainer.accelerator.end_training()  # a process that leaves gloo's threads running is aborted now and then
    return metrics


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
