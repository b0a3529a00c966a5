"""Train a Vision Transformer from scratch: an image classifier, or without labels an encoder.

    python train.py                                                   the digits of scikit-learn, no network needed
    python train.py recipes/cifar10_cpu.yaml --learning_rate 1e-3     a recipe, and a flag that overrides it
    accelerate launch train.py recipes/cifar10_cpu.yaml               many devices

Every flag is a field of a dataclass of `hf_vit_scratch.training.arguments` or of transformers' `TrainingArguments`;
`python train.py --help` lists them.
"""

import json
import logging
import math
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml
from datasets import Dataset
from transformers import ViTImageProcessor, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, PredictionOutput
from transformers.utils import IMAGE_PROCESSOR_NAME
from transformers.utils.logging import disable_progress_bar

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchForMaskedImageModeling
from hf_vit_scratch.data.augmentation import training_stages
from hf_vit_scratch.data.dataset import ImageClassificationDataset
from hf_vit_scratch.data.images import decode_image
from hf_vit_scratch.data.masking import MaskedImageDataset, plot_reconstructions
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.data.splits import fingerprint, load_splits
from hf_vit_scratch.data.streaming import ImageClassificationStream, stream_splits
from hf_vit_scratch.errors import UserError, blame_the_user
from hf_vit_scratch.evaluation.figures import plot_curves, plot_mistakes
from hf_vit_scratch.evaluation.metrics import (
    METRIC_NAMES,
    compute_metrics,
    detailed_report,
    most_confident_mistakes,
    summarize_logits,
)
from hf_vit_scratch.evaluation.model_card import MISTAKES, describe_machine
from hf_vit_scratch.model.modeling_vit_scratch import ViTScratchPreTrainedModel
from hf_vit_scratch.speed import hardware
from hf_vit_scratch.speed.linear import onednn_is_faster
from hf_vit_scratch.training import auto_config, sanity_check
from hf_vit_scratch.training.arguments import Arguments, ModelArguments, refuse_labels
from hf_vit_scratch.training.recipe import model_config, parse_recipe, stage_arguments
from hf_vit_scratch.training.run_directory import (
    IMAGES_LINE,
    chosen_before,
    claimed,
    refuse_other_images,
    resolve_checkpoint,
    without_resuming,
)
from hf_vit_scratch.training.trainer import ViTTrainer, advising_on_memory
from hf_vit_scratch.training.whitening import NUM_PATCHES, whiten_patches

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "digits.yaml"
NUM_MISTAKES = 24  # in the picture of the most confident ones

logger = logging.getLogger("train")


def main(argv: list[str]) -> dict[str, Any]:
    """Train as the command line says; return the metrics of the test split."""
    # 1. Arguments, logging, and the folder of the run
    args, recipe = parse_recipe(argv, DEFAULT_RECIPE)
    training_args = args[-1]
    logging.basicConfig(format="%(message)s", level=logging.INFO if training_args.should_log else logging.WARNING)
    disable_progress_bar()  # the bars of saving and loading one file; training keeps its own
    with claimed(training_args):
        return run(args, recipe, resolve_checkpoint(training_args, recipe), argv)


def run(args: Arguments, recipe: str, checkpoint: str | None, argv: list[str]) -> dict[str, Any]:
    """Train in a folder that no other run uses."""
    model_args, data_args, augmentation_args, mixing_args, training_args = args
    if (metric := training_args.metric_for_best_model) and metric.removeprefix("eval_") not in METRIC_NAMES:
        raise UserError(f"metric_for_best_model must be one of {', '.join(METRIC_NAMES)}; got {metric!r}.")
    with blame_the_user():
        set_seed(training_args.seed)  # before the model exists: its first weights are part of the run

    # 2. Seed and data
    seed, masked = training_args.seed, training_args.task == "masked-image-modeling"
    if masked:
        refuse_labels(args)
    if data_args.streaming:
        with training_args.main_process_first(desc="data"):  # it downloads what the others then find
            train_rows, splits = stream_splits(**data_args.for_streaming(training_args), seed=seed)
    else:
        splits = load_splits(**data_args.for_loading(), seed=seed, labelled=not masked)
    label_names = splits["validation"].features["label"].names
    for name, rows in splits.items():
        if len(rows) < training_args.world_size:
            raise UserError(
                f"{training_args.world_size} processes are too many for the {len(rows)} images of {name}: use fewer."
            )

    given = set(yaml.safe_load(recipe))
    if not data_args.streaming:
        refuse_other_images(checkpoint, images := fingerprint(splits))
        recipe += f"{IMAGES_LINE}{images}\n"
    chosen: list[auto_config.Choice] = []
    if training_args.fit_to_images:
        adopted = chosen_before(checkpoint, given)
        auto_config.set_fields(args, adopted)
        given |= adopted.keys()
        recipe += yaml.safe_dump(adopted, sort_keys=False) if adopted else ""
        chosen = auto_config.fit_sizes(args, splits["train"], given)

    # 3. Model
    config, start = model_config(model_args, label_names)
    choices = hardware.choose(training_args, config, given)
    if training_args.device.type == "cpu" and onednn_is_faster():
        choices.append(
            "oneDNN for linear layers: faster here than MKL; torch.backends.mkldnn.enabled = False forbids it"
        )
    if choices:
        logger.info("Chosen for this machine (a flag overrides it):\n  %s", "\n  ".join(choices))
        recipe += "".join(f"# chosen: {choice}\n" for choice in choices)
    if training_args.fit_to_images:
        chosen += auto_config.fit_length(args, config, len(splits["train"]), given)
        logger.info("Chosen for these images (a flag overrides it):\n  %s", "\n  ".join(map(str, chosen)))
        recipe += "".join(f"# {choice.reason}\n{yaml.safe_dump(choice.values, sort_keys=False)}" for choice in chosen)
    size = dict(zip(("height", "width"), config.image_height_width, strict=True))
    if start is None:
        image_processor = ViTImageProcessor(size=size, do_convert_rgb=True)
    else:  # pixels as the saved model knows them
        try:
            # What it would crop to is another size.
            image_processor = ViTImageProcessor.from_pretrained(start, size=size, do_center_crop=False)
        except OSError as error:
            raise UserError(
                f"--model {start} holds no {IMAGE_PROCESSOR_NAME}, which says how its images were normalised. Save an "
                f'image processor there, such as ViTImageProcessor(do_convert_rgb=True).save_pretrained("{start}").'
            ) from error
    if training_args.whiten_patches and (start is not None or data_args.streaming):
        with_what = "--streaming, which has no images at hand" if data_args.streaming else "the saved model of --model"
        raise UserError(f"whiten_patches is for new models, and does not go together with {with_what}.")
    stages, stage = training_stages(config.image_height_width, **stage_arguments(augmentation_args, config))
    # Our own smoothing: the Trainer's would take the labels from the model, in evaluation too.
    mixing = Mixup(len(label_names), **vars(mixing_args), label_smoothing=training_args.label_smoothing_factor)
    training_args.label_smoothing_factor = 0.0
    with blame_the_user():
        model_class = ViTScratchForMaskedImageModeling if masked else ViTScratchForImageClassification
        model = model_class(config) if start is None else load_model(model_class, start, config)
    # 4. Trainer
    if training_args.check:
        training_args.torch_compile = False  # it takes longer than the check
    data_seed = seed if training_args.data_seed is None else training_args.data_seed
    dataset_class: Callable[..., ImageClassificationDataset] = ImageClassificationDataset
    if masked:
        dataset_class = partial(
            MaskedImageDataset,
            patch_size=config.patch_height_width,
            mask_ratio=training_args.mask_ratio,
            mask_patch_size=training_args.mask_patch_size,
        )
    train_dataset: ImageClassificationDataset | ImageClassificationStream
    if data_args.streaming:
        steps, batches_per_step = training_args.max_steps, training_args.gradient_accumulation_steps
        train_dataset = ImageClassificationStream(
            train_rows, image_processor, stages, mixing, data_seed,
            batch_size=training_args.per_device_train_batch_size,
            stage_of_batch=[stage(step / steps) for step in range(steps) for _ in range(batches_per_step)],
            process=(training_args.process_index, training_args.world_size),
            skip_corrupt=data_args.corrupt_images == "skip",
        )  # fmt: skip
    else:
        train_dataset = dataset_class(splits["train"], image_processor, stages, mixing, data_seed)
        if training_args.whiten_patches:
            if training_args.dataloader_num_workers == 0:
                train_dataset.cache_on_device(training_args.device)
            sample = train_dataset.sample(math.ceil(NUM_PATCHES / math.prod(config.grid_size)), seed)
            whiten_patches(model, sample["pixel_values"].to(model.device))
    with blame_the_user():
        trainer = ViTTrainer(
            model=model,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=dataset_class(splits["validation"], image_processor),
            processing_class=image_processor,  # saved beside the weights: pipelines prepare images as we did
            compute_metrics=None if masked else compute_metrics,
            preprocess_logits_for_metrics=None if masked else summarize_logits,
            stage=stage,
        )
    logger.info(
        "%.2fM parameters; %s; %d classes; training on %s",
        model.num_parameters() / 1e6,
        ", ".join(f"{len(rows)} {name}" for name, rows in splits.items()),
        len(label_names),
        training_args.device,
    )

    if training_args.data_report:
        return {"bound": sanity_check.data_report(trainer)}
    if training_args.check:
        return {"check": sanity_check.check(trainer, splits, Path(training_args.output_dir))}

    # 5. Train; a run is resumed when the user says so, never by a guess
    output_dir, command = Path(training_args.output_dir), shlex.join(["python", "train.py", *without_resuming(argv)])
    if training_args.should_save:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "recipe.yaml").write_text(f"# {command}\n{recipe}", encoding="utf-8")
    with blame_the_user(until=lambda: trainer.has_started), advising_on_memory(training_args):
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.stopped:
        trainer.accelerator.end_training()
        logger.info("Stopped by SIGTERM. Continue with: %s --resume_from_checkpoint true", command)
        sys.exit(128 + signal.SIGTERM)
    # Before the test split is read, so that nothing there can lose the run; pushed after that, for the same reason.
    trainer.save_model(_internal_call=True)

    # 6. Report, once, on the test split
    test_dataset = dataset_class(splits["test"], image_processor)
    outputs = trainer.predict(test_dataset)
    trainer.log_metrics("test", outputs.metrics)
    metrics = {**(outputs.metrics or {}), "epoch": trainer.state.epoch}
    if trainer.is_world_process_zero():
        on_the_hub = data_args.data != "digits" and not Path(data_args.data).expanduser().exists()
        report = {**metrics, "command": command, "data_is_on_the_hub": on_the_hub, **describe_machine()}
        if isinstance(test_dataset, MaskedImageDataset):
            plot_reconstructions(trainer.model, test_dataset, output_dir / "reconstructions.png")
        else:
            details = detailed_report(outputs.predictions, outputs.label_ids, label_names)
            report |= {"labels": label_names, **details}
            # What begins with "_" is not pushed: the images of a folder stay where they are.
            public = on_the_hub or data_args.data == "digits"
            mistakes = output_dir / (MISTAKES if public else f"_{MISTAKES}")
            draw_mistakes(outputs, test_dataset.rows, label_names, mistakes)
        (output_dir / "metrics.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (output_dir / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1) + "\n", encoding="utf-8")
        if masked:
            plot_curves(trainer.state.log_history, output_dir / "curves.png")
        trainer.create_model_card()
        logger.info("The model, its recipe, metrics, log and pictures are in %s", output_dir)
    if training_args.push_to_hub:
        try:
            trainer.push_to_hub()
        except Exception as error:
            exclude = ["--exclude", f"{PREFIX_CHECKPOINT_DIR}-*/*", "--exclude", "_*"]
            again = shlex.join(["hf", "upload", str(trainer.hub_model_id), str(output_dir), *exclude])
            reason = " ".join(str(error).split())
            raise UserError(f"The run is whole in {output_dir}, but not on the Hub: {reason}. Try: {again}") from error
    trainer.accelerator.end_training()  # a process that leaves gloo's threads running is aborted now and then
    return metrics


def draw_mistakes(outputs: PredictionOutput, rows: Dataset, label_names: list[str], path: Path) -> None:
    """Draw the test images that the model is surest about and wrong, if there are any, into a PNG file."""
    path.unlink(missing_ok=True)  # of before a resumption
    labels = cast(Any, outputs.label_ids)
    places = most_confident_mistakes(outputs.predictions, labels, NUM_MISTAKES)
    ranked, confidence, _ = cast(tuple[Any, ...], outputs.predictions)
    captions = [
        f"taken for {label_names[ranked[place, 0]]:.12} ({100 * confidence[place]:.0f}%)\n"
        f"is {label_names[labels[place]]:.20}"
        for place in places
    ]
    if places:
        encoded = rows[places]["image"]
        images = [decode_image(row, name=f"image {place}") for place, row in zip(places, encoded, strict=True)]
        plot_mistakes(images, captions, path)


def load_model(
    model_class: type[ViTScratchPreTrainedModel], path: str, config: ViTScratchConfig
) -> ViTScratchPreTrainedModel:
    """A model with the encoder of a saved one; its head is new where the saved one is missing or of other classes.

    Raises:
        UserError: The saved model is not one for this configuration.
    """
    loaded: Any = model_class.from_pretrained(
        path, config=config, ignore_mismatched_sizes=True, output_loading_info=True
    )
    model, found = loaded
    mismatched = {entry[0] for entry in found["mismatched_keys"]}
    wrong = {*found["missing_keys"], *found["unexpected_keys"], *mismatched}
    heads = ("classifier.", "pre_logits.", "decoder.", "vit.embeddings.mask_token")
    wrong = {name for name in wrong if not name.startswith(heads)}
    saved = ViTScratchConfig.from_pretrained(path)
    if wrong:
        fields = [name for name in vars(ModelArguments()) if getattr(config, name, 0) != getattr(saved, name, 0)]
        changed = ", ".join(f"{name} {getattr(config, name)} (saved: {getattr(saved, name)})" for name in fields)
        raise UserError(
            f"--model {path} does not fit: {changed or ', '.join(sorted(wrong))}. Leave that to the saved model."
        )
    if hasattr(model, "classifier") and saved.id2label != config.id2label:
        for parameter in model.classifier.parameters():  # loaded, where there are as many classes
            parameter._is_hf_initialized = False
        model._init_weights(model.classifier)
        logger.info("The classes are not those of %s: the classifier begins anew.", path)
    return model


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
