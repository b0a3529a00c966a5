"""The steps of a training run, in the order in which `run.py` takes them.

Each raises a `UserError` if something that the user gave cannot be used.
"""

import logging
import math
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset, DatasetDict
from transformers import ViTImageProcessor, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..conversion.names import LoadedModel
from ..data.augmentation import Augmentation, training_stages
from ..data.dataset import BatchTransform, ImageClassificationDataset
from ..data.masking import MaskedImageDataset
from ..data.mixup import Mixup
from ..data.splits import absolute, count_learnt, fingerprint, load_splits
from ..data.streaming import ImageClassificationStream
from ..data.targets import class_counts, contents, describe, label_names, label_problems, problem_type, targets_of
from ..errors import UserError, blame_the_user
from ..evaluation.metrics import METRIC_NAMES, compute_metrics
from ..evaluation.trust import UNKNOWN
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchPreTrainedModel,
)
from ..speed import hardware
from . import auto_config
from .arguments import DEFAULTS, Arguments, ViTTrainingArguments, is_starting_model, refuse_beside, set_fields
from .calibration import calibrate
from .checkpointing import describe_last_checkpoint
from .initial_weights import NUM_PATCHES, start_local_attention, whiten_patches
from .optimizers import freeze
from .recipe import FACTS, Recipe, model_config
from .starting_point import build_from, load_starting_model
from .trainer import ViTTrainer

logger = logging.getLogger(__name__)


def is_masked(args: Arguments) -> bool:
    """Return whether the run learns without labels."""
    return args.training.task == "masked-image-modeling"


def check_and_seed(args: Arguments, recipe: Recipe) -> None:
    """Check what no other step checks, and seed all random numbers: the first weights are part of the run."""
    model, training = args.model.model, args.training
    if training.fit_to_images and "data" not in recipe.settings:
        raise UserError("This recipe is for images of your own: add --data FOLDER.")
    if (training.freeze_layers is not None or training.layer_decay != 1) and not is_starting_model(model):
        raise UserError(
            "The recipe finetune and the flags freeze_layers and layer_decay need a trained model, but --model is "
            f"{model or 'not given'}. Give its folder, its weights file, or its name on the Hub or in timm."
        )
    if is_masked(args):
        names = ("streaming", "check", "eval_tta", "mixup_alpha", "cutmix_alpha", "label_smoothing_factor")
        others = ("class_weighting", "balanced_sampling", "target_accuracy")
        refuse_beside(args, "--task masked-image-modeling", *names, *others)
    if args.model.attn_implementation is not None and training.speed_choice != "plain":
        refuse_beside(args, "--attn_implementation", "speed_choice")
    if training.balanced_sampling:
        refuse_beside(args, "--balanced_sampling", "class_weighting")
    _refuse_idle_flags(args, recipe)
    with blame_the_user():
        set_seed(training.seed)


def _refuse_idle_flags(args: Arguments, recipe: Recipe) -> None:
    """Refuse flags of the command line that do nothing without another one, which is missing."""
    training, given = args.training, recipe.values("flag")
    mixes = training.fit_to_images or args.mixing.mixup_alpha > 0 or args.mixing.cutmix_alpha > 0
    changes = training.fit_to_images or args.augmentation.auto_augment != "none"
    needed = {
        "mixup_alpha or --cutmix_alpha": (mixes, ("mixup_prob", "mixing_start_fraction")),
        "auto_augment or --random_erasing_prob": (
            changes or args.augmentation.random_erasing_prob > 0, ("policy_start_fraction",),
        ),
        "muon true": (training.muon, ("muon_learning_rate", "muon_beta2")),
        "task masked-image-modeling": (is_masked(args), ("mask_ratio", "mask_patch_size")),
        "auto_augment randaugment": (
            args.augmentation.auto_augment == "randaugment", ("randaugment_num_ops", "randaugment_magnitude"),
        ),
        "whiten_patches false": (not training.whiten_patches, ("patch_initializer_range",)),
        "classifier_hidden_size": (args.model.classifier_hidden_size is not None, ("classifier_act",)),
    }  # fmt: skip
    for other, (is_there, names) in needed.items():
        if idle := [name for name in names if given.get(name, DEFAULTS[name]) != DEFAULTS[name] and not is_there]:
            raise UserError(f"--{idle[0]} does nothing without --{other}. Add that, or leave it out.")


def load_data(args: Arguments, listing: Path | None = None) -> DatasetDict:
    """Load the splits that the arguments name; `train` may be a stream. List near duplicates in a file."""
    training = args.training
    if listing is not None:  # an old one, of an earlier check
        listing.unlink(missing_ok=True)
    if args.data.streaming:
        names = ("class_weighting", "balanced_sampling", "check", "fit_to_images", "cache_images", "target_accuracy")
        others = ("max_train_minutes", "validation_fraction", "test_fraction", "whiten_patches")
        refuse_beside(args, "--streaming", *names, *others)
        if args.data.near_duplicates == "drop":
            raise UserError("A stream is not searched for near duplicates: leave out --near_duplicates drop.")
        if training.max_steps <= 0:
            raise UserError("--streaming needs --max_steps: nobody knows how long a stream is.")
        for name in ("eval", "save"):
            if getattr(training, f"{name}_strategy") == "epoch":
                raise UserError(f"A stream has no epochs. Give --{name}_strategy no, or steps with --{name}_steps.")
    # For a stream, the main process downloads first; the others then find the files.
    with training.main_process_first(desc="data") if args.data.streaming else nullcontext():
        return load_splits(**vars(args.data), labelled=not is_masked(args), listing=listing)


def make_choices(args: Arguments, recipe: Recipe, splits: DatasetDict) -> tuple[ViTScratchConfig, LoadedModel | None]:
    """Choose what nobody has set, by the images and by the machine, and log each choice with its reason.

    The choices are set in the arguments, and added to the recipe. Each leaves alone what is chosen already, so the
    order matters: those of the run that is resumed, sizes and length among them; the starting model, which has sizes;
    the sizes; the configuration; its loss; the precision; and last the length, for which the speed is measured.
    Returns the configuration, and the trained model to start from, or `None`.
    """
    training, recipe.data = args.training, absolute(args.data.data)
    recipe.processes = training.world_size
    set_fields(args, recipe.values("images", "machine"))  # of the run that is resumed
    if not args.data.streaming:
        recipe.fingerprint = check_images(Path(training.output_dir), recipe, splits)
    start = load_starting_model(args)
    if start is not None:
        _warn_of_other_splits(Path(str(args.model.model)), recipe, splits["test"])
    if recipe.left_out:
        logger.info("Left out of the recipe, because a flag replaces it: %s", ", ".join(recipe.left_out))
    chooses = training.fit_to_images and not training.resume_from_checkpoint
    if chooses:
        auto_config.fit_sizes(args, splits["train"], recipe)
    names = label_names(splits["validation"].features["label"])
    config = model_config(args.model, names, None if start is None else start.model.config)
    if not is_masked(args):
        fit_to_labels(args, config, splits["train"], recipe, None if start is None else start.model.config)
    rows, least = splits["train"], training.train_batch_size * training.world_size
    if training.dataloader_drop_last and isinstance(rows, Dataset) and len(rows) < least:
        raise UserError(
            f"dataloader_drop_last leaves no batch: the {len(rows)} training images must be at least {least}. Leave "
            "it out, or use smaller batches."
        )
    recipe.machine_choices = hardware.choose(training, recipe.settings.keys())
    if args.model.attn_implementation is not None and training.device.type == "cpu":  # others keep it anyway
        training.speed_choice = "plain"
    if chooses:
        with blame_the_user(), advise_on_memory(training):  # the advice first, as in `train`
            auto_config.fit_length(args, config, len(splits["train"]), recipe)
    for what, choices in (("machine", recipe.machine_choices), ("images", recipe.choices())):
        if choices and not training.resume_from_checkpoint:  # which repeats those of the run
            logger.info("Chosen for the %s (a flag overrides it):\n  %s", what, "\n  ".join(choices))
    if training.check:
        training.torch_compile = False  # it takes longer than the check
    if training.check or training.data_report:
        training.push_to_hub = False  # which would make a repository
    return config, start


def _warn_of_other_splits(model: Path, recipe: Recipe, test: Dataset) -> None:
    """Warn if the starting model, which may be a checkpoint of a run, has learnt from other splits."""
    run = model if (model / FACTS).is_file() else model.parent
    begun = Recipe.load(run)
    if begun is None or begun.fingerprint == recipe.fingerprint:
        return
    number = count_learnt(run, test)
    if number != 0:
        some = "Some" if number is None else f"By their names and sizes, {number} of the {len(test)}"
        what = f"{some} test images may be among its training images: test accuracy would be too high."
        logger.warning("%s was trained on other splits, of %s. %s", model, begun.data, what)


def check_images(run: Path, recipe: Recipe, splits: DatasetDict) -> str:
    """Return the fingerprint of the images of a run. If it is another than in its recipe, raise a `UserError`."""
    images = fingerprint(splits)
    if recipe.fingerprint not in ("", images):
        raise UserError(
            f"{run} holds a run with other images: {recipe.fingerprint}, now {images}. The splits would be cut anew, "
            "so training images could come into the test split. Restore the images that the run began with, each "
            "under its old name, or start a new run. To evaluate or export, give --data with images to test on."
        )
    return images


def fit_to_labels(
    args: Arguments, config: ViTScratchConfig, rows: Any, recipe: Recipe, start: ViTScratchConfig | None
) -> None:
    """Choose the loss, the metric and the units by the labels of the training rows, and refuse what does not fit.

    A model that starts from one of the same numbers (`start`) keeps their units, as it keeps its classifier.
    """
    training, feature = args.training, rows.features["label"]
    kind, data = problem_type(feature), args.data.data
    single = kind == "single_label_classification"
    config.problem_type = None if single else kind
    config.label_mean = config.label_scale = config.temperature = None
    if "metric_for_best_model" not in recipe.settings and not single:
        training.metric_for_best_model = METRIC_NAMES[kind][0]
        recipe.add({"metric_for_best_model": METRIC_NAMES[kind][0]}, "images", describe(feature))
    metric = training.metric_for_best_model
    metrics = [name for name in METRIC_NAMES[kind] if name != "top5_accuracy" or (config.num_labels or 0) > 5]
    if metric is not None and metric.removeprefix("eval_") not in metrics:
        raise UserError(f"metric_for_best_model must be one of {', '.join(metrics)}; got {metric!r}.")
    weighted = training.balanced_sampling or args.mixing.class_weighting != "none"
    if not single and (weighted or training.target_accuracy is not None):
        raise UserError(
            f"{data}: --balanced_sampling, --class_weighting and --target_accuracy need one class per image, but the "
            f"labels are {describe(feature)}. Leave them out."
        )
    if single and UNKNOWN in (config.label2id or ()):
        logger.warning(
            "A class is called %r, which is also the answer of `predict` to other images. Rename it.", UNKNOWN
        )
    if kind == "regression":
        numbers = targets_of(rows).astype(np.float64)
        config.label_mean = numbers.mean(axis=0).tolist()
        config.label_scale = np.where(np.ptp(numbers, axis=0) > 0, numbers.std(axis=0), 1.0).tolist()
        if start is not None and (start.problem_type, start.id2label) == (kind, config.id2label):
            config.label_mean, config.label_scale = start.label_mean, start.label_scale
        if recipe.values("flag").get("label_smoothing_factor"):
            raise UserError("--label_smoothing_factor is for classes, but the labels are numbers. Leave it out.")
        training.label_smoothing_factor = 0.0  # of a recipe that suits classes, too
    elif isinstance(rows, Dataset) and not training.check:  # which says it among its problems
        for problem in label_problems(rows, weighted=weighted, is_trained=start is not None):
            logger.warning(problem)


def build_image_processor(config: ViTScratchConfig, start: LoadedModel | None) -> ViTImageProcessor:
    """Build the image processor, with the normalization of the trained model if training starts from one."""
    size = dict(zip(("height", "width"), config.image_height_width, strict=True))
    saved = {} if start is None or start.image_processor is None else start.image_processor.to_dict()
    # What the saved one would crop to is another size.
    return ViTImageProcessor.from_dict(saved, size=size, do_resize=True, do_center_crop=False, do_convert_rgb=True)


def build_model(args: Arguments, config: ViTScratchConfig, start: LoadedModel | None) -> ViTScratchPreTrainedModel:
    """Build the model, with random weights or those of the trained model, and freeze what is not to be trained."""
    training = args.training
    if start is not None:
        refuse_beside(args, "the trained model of --model", "whiten_patches", "local_attention")
    with blame_the_user():
        model_class = ViTScratchForMaskedImageModeling if is_masked(args) else ViTScratchForImageClassification
        model = model_class(config) if start is None else build_from(start, str(args.model.model), model_class, config)
        if training.local_attention:
            start_local_attention(model)
        freeze(model, training.freeze_layers)
        return model


def build_trainer(
    args: Arguments, splits: DatasetDict, model: ViTScratchPreTrainedModel, image_processor: ViTImageProcessor
) -> tuple[ViTTrainer, ImageClassificationDataset]:
    """Build the trainer and the test split, and whiten the patch embedding if that is asked for.

    Label smoothing moves from the arguments into the training split, so call this once.
    """
    _, data_args, augmentation, mixing, training = args
    config, seed, masked = model.config, training.seed, is_masked(args)
    stages, stage = training_stages(config.image_height_width, **vars(augmentation))
    patch_size = config.patch_height_width
    _refuse_cut_patches(stages, patch_size)
    feature = splits["train"].features["label"]
    counts = None if data_args.streaming else class_counts(splits["train"])
    # The Trainer's own smoothing would take the labels from the model, in evaluation too.
    smoothing, training.label_smoothing_factor = training.label_smoothing_factor, 0.0
    mixup = Mixup(len(label_names(feature)), **vars(mixing), label_smoothing=smoothing, class_counts=counts)
    data_seed = seed if training.data_seed is None else training.data_seed
    transform = BatchTransform(image_processor)
    train_transform = BatchTransform(image_processor, stages, mixup, data_seed)
    dataset_class: Callable[..., ImageClassificationDataset] = ImageClassificationDataset
    if masked:
        dataset_class = partial(
            MaskedImageDataset,
            patch_size=patch_size,
            mask_ratio=training.mask_ratio,
            mask_patch_size=training.mask_patch_size,
        )
    train_dataset: ImageClassificationDataset | ImageClassificationStream
    if data_args.streaming:
        steps, batches_per_step = training.max_steps, training.gradient_accumulation_steps
        train_dataset = ImageClassificationStream(
            splits["train"], train_transform,
            batch_size=training.per_device_train_batch_size,
            stage_of_batch=[stage(step / steps) for step in range(steps) for _ in range(batches_per_step)],
            process=(training.process_index, training.world_size),
            skip_corrupt=data_args.corrupt_images == "skip",
        )  # fmt: skip
    else:
        train_dataset = dataset_class(splits["train"], train_transform, cache_images=training.cache_images)
        if training.whiten_patches:
            train_dataset.keep_decoded(training.device)
            sample = train_dataset.sample(math.ceil(NUM_PATCHES / math.prod(config.grid_size)), seed)
            whiten_patches(model, sample["pixel_values"].to(model.device))
    with blame_the_user():
        trainer = ViTTrainer(
            model=model,
            args=training,
            train_dataset=train_dataset,
            eval_dataset=dataset_class(splits["validation"], transform),
            processing_class=image_processor,  # saved beside the weights: pipelines prepare images as we did
            compute_metrics=None if masked else compute_metrics,
            stage=stage,
        )
    auto_config.checkpoint_activations(model, training)
    logger.info(
        "%.2fM parameters; %s; %s: %s; training on %s",
        model.num_parameters() / 1e6,
        ", ".join(f"{len(rows)} {name}" for name, rows in splits.items() if isinstance(rows, Dataset)),
        describe(feature),
        contents(splits["validation"] if data_args.streaming else splits["train"]),
        training.device,
    )
    return trainer, dataset_class(splits["test"], transform)


def _refuse_cut_patches(stages: Sequence[Augmentation | None], patch_size: tuple[int, int]) -> None:
    for size in (augmentation.image_size for augmentation in stages if augmentation is not None):
        if any(pixels % patch for pixels, patch in zip(size, patch_size, strict=True)):
            raise UserError(f"initial_image_size must be divisible by patch_size {patch_size}, got {size}.")


@contextmanager
def advise_on_memory(training: ViTTrainingArguments) -> Iterator[None]:
    """Turn a device without enough memory into a `UserError` that names the flags which save some."""
    try:
        yield
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        batch, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
        halves = (
            "Start a new run with smaller batches, which give the same result: --per_device_train_batch_size "
            f"{batch // 2} --gradient_accumulation_steps {2 * steps}. Or use"
        )
        raise UserError(
            f"The device ran out of memory with {batch} images per batch. "
            f"{'Use' if batch % 2 else halves} --gradient_checkpointing true, --bf16 true, a smaller --image_size, or "
            "--auto_find_batch_size true. In an evaluation, a smaller --per_device_eval_batch_size helps."
        ) from error


def train(trainer: ViTTrainer, recipe: Recipe, checkpoint: Path | None, command: str) -> None:
    """Save the recipe with the command that repeats the run, train, save the model, and calibrate it.

    If SIGTERM or Ctrl-C stopped the training, the process ends.
    """
    training = trainer.args
    if trainer.optimization is not None and training.speed_choice == "auto":
        speed = trainer.optimization
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in speed.ratios.items())
        reason = f"the fastest here; relative times: {ratios}" if ratios else "not measured"
        when = "by an earlier measurement" if ratios and speed.seconds < 0.1 else f"in {speed.seconds:.1f} s"
        logger.info("Chosen for the machine %s: speed_choice %s, %s", when, speed.choice, reason)
        recipe.add({"speed_choice": speed.choice}, "machine", reason)
    if training.should_save:
        recipe.save(Path(training.output_dir), command)
    # The advice comes first, or a device without memory would be the user's mistake.
    with blame_the_user(until=lambda: trainer.has_seen_batch), advise_on_memory(training):
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except KeyboardInterrupt:
            if not trainer.stopped:
                raise
    if trainer.stopped:
        trainer.accelerator.end_training()
        number = trainer.graceful_stop.signal
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        last = describe_last_checkpoint(training.output_dir)
        how = " (by the same launcher)" if training.world_size > 1 else ""
        further = f"Continue with{how}: {command} --resume_from_checkpoint true"
        if training.save_only_model:
            further = "It holds only the model: a run cannot be resumed from it, but --model can start a new one"
        logger.info("Stopped by %s. %s. %s", name, last, further)
        sys.exit(128 + number)
    # Before the test split is read, so that nothing there can lose the run; pushed after that, for the same reason.
    trainer.save_model(_internal_call=True)
    calibrate(trainer)


def push(trainer: ViTTrainer) -> None:
    """Push the finished run to the Hub, if that is asked for."""
    if not trainer.args.push_to_hub:
        return
    output_dir = Path(trainer.args.output_dir)
    try:
        trainer.push_to_hub()
    except Exception as error:
        again = shlex.join(["hf", "upload", str(trainer.hub_model_id), str(output_dir)])
        again += (
            f' --exclude "{PREFIX_CHECKPOINT_DIR}-*/*" --exclude "runs/*" --exclude "_*" --exclude training_args.bin'
        )
        reason = " ".join(str(error).split())
        raise UserError(f"The run is complete in {output_dir}, but not on the Hub: {reason}. Try: {again}") from error
