"""The flags of `train.py`: dataclasses, filled from a recipe in YAML and from the command line."""

import difflib
import json
import logging
import math
import re
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import yaml
from filelock import FileLock, Timeout
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SchedulerType

from ..errors import UserError, blame_the_user
from ..model.configuration_vit_scratch import POOLINGS, POSITION_EMBEDDING_TYPES, VARIANTS, ViTScratchConfig
from .checkpointing import damaged_files

logger = logging.getLogger(__name__)

MUON_DTYPES = ("bfloat16", "float32")
TASKS = ("image-classification", "masked-image-modeling")


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class ModelArguments:
    """Fields of `ViTScratchConfig`, and where to start. What is not given keeps the configuration's default."""

    model: str | None = _flag(
        None,
        "A size and a patch size to start afresh, such as S/16 (sizes Ti, S, B, L, H), or a saved model to start "
        "from, a folder or a name on the Hub. The flags below change single fields.",
    )
    image_size: list[int] | None = _flag(None, "Pixels: one number, or height and width.")
    patch_size: list[int] | None = _flag(None, "Pixels: one number, or height and width.")
    hidden_size: int | None = _flag(None, "Width of a token.")
    num_hidden_layers: int | None = _flag(None, "Number of encoder layers.")
    num_attention_heads: int | None = _flag(None, "Number of attention heads.")
    intermediate_size: int | None = _flag(None, "Width of the MLP's hidden layer.")
    hidden_act: str | None = _flag(None, "Activation of the MLP.")
    qkv_bias: bool | None = _flag(None, "Biases in the query, key and value projections.")
    layer_norm_eps: float | None = _flag(None, "Added to the variance by every norm.")
    initializer_range: float | None = _flag(None, "Standard deviation of the initial weights.")
    patch_initializer_range: float | None = _flag(None, "The same for the patch embedding alone.")
    norm_first: bool | None = _flag(None, "True: ViT style, pre-LN. False: BERT style, post-LN.")
    hidden_dropout_prob: float | None = _flag(None, "Dropout of embeddings and residual branches.")
    attention_probs_dropout_prob: float | None = _flag(None, "Dropout of attention probabilities.")
    drop_path_rate: float | None = _flag(None, "Stochastic depth of the last layer.")
    position_embedding_type: str | None = _flag(None, f"One of {', '.join(POSITION_EMBEDDING_TYPES)}.")
    qk_norm: bool | None = _flag(None, "RMS-normalise queries and keys.")
    pooling: str | None = _flag(None, f"One of {', '.join(POOLINGS)}.")
    use_cls_token: bool | None = _flag(None, "A class token, also where mean pooling does not read it.")
    fc_norm: bool | None = _flag(None, "The final LayerNorm after the pooling instead of before it.")
    classifier_hidden_size: int | None = _flag(None, "Hidden layer before the classifier.")
    classifier_act: str | None = _flag(None, "Activation of that hidden layer.")
    attn_implementation: str | None = _flag(
        None, "eager, sdpa, flex_attention or flash_attention_2; transformers chooses by default."
    )


@dataclass
class DataArguments:
    """Where the images come from."""

    data: str = _flag("digits", "digits, a folder of class folders, parquet files, or a dataset's name on the Hub.")
    streaming: bool = _flag(False, "Read training images while training; for data too large to download.")
    data_config: str | None = _flag(None, "Configuration of a dataset on the Hub that has several.")
    image_column: str | None = _flag(None, "Column of the images; found by its type.")
    label_column: str | None = _flag(None, "Column of the labels; found by its type or name.")
    train_split: str = _flag("train", "Split to train on.")
    validation_split: str | None = _flag(None, "Split to choose by; 'validation', or cut from train.")
    test_split: str | None = _flag(None, "Split to report on, once; 'test', or cut from train.")
    validation_fraction: float = _flag(0.1, "Share of train that is cut for validation.")
    test_fraction: float = _flag(0.1, "Share of train that is cut for testing.")
    corrupt_images: str = _flag(
        "raise", "What to do with images that cannot be decoded: raise, or skip and name them."
    )
    follow_links: bool = _flag(False, "Let links in a folder, and paths in parquet files, lead out of it.")

    def for_streaming(self, training_args: "ViTTrainingArguments") -> dict[str, Any]:
        """The arguments of `hf_vit_scratch.data.streaming.stream_splits`.

        Raises:
            UserError: Something that was asked for needs all of the data.
        """
        for asked, flag in (
            (training_args.check, "--check"),
            (training_args.fit_to_images, "--fit_to_images"),
            (training_args.max_train_minutes is not None, "--max_train_minutes"),
            (self.validation_fraction != DataArguments.validation_fraction, "--validation_fraction"),
            (self.test_fraction != DataArguments.test_fraction, "--test_fraction"),
        ):
            if asked:
                raise UserError(f"{flag} does not go together with --streaming. Leave one of them out.")
        if training_args.max_steps <= 0:
            raise UserError("--streaming needs --max_steps: nobody knows how long a stream is.")
        for name in ("eval", "save"):
            if getattr(training_args, f"{name}_strategy") == "epoch":
                raise UserError(
                    f"a stream has no epochs: --streaming needs --{name}_strategy steps, with --{name}_steps, or no."
                )
        cutting = ("streaming", "validation_fraction", "test_fraction", "follow_links")
        return {name: value for name, value in vars(self).items() if name not in cutting}

    def for_loading(self) -> dict[str, Any]:
        """The arguments of `hf_vit_scratch.data.splits.load_splits`."""
        return {name: value for name, value in vars(self).items() if name != "streaming"}


@dataclass
class AugmentationArguments:
    """The arguments of `hf_vit_scratch.data.augmentation.training_stages`."""

    initial_image_size: list[int] | None = _flag(None, "Pixels in the first part of training: one number or two.")
    initial_image_size_fraction: float = _flag(0.0, "Share of training that the first part lasts.")
    augmentation_off_fraction: float = _flag(0.0, "Share of training, at its end, without augmentation and mixing.")
    random_resized_crop_scale: float | None = _flag(None, "Least share of the area that a random resized crop keeps.")
    crop_padding: int = _flag(0, "Padding in pixels before a random crop.")
    horizontal_flip_prob: float = _flag(0.0, "Probability of a mirror image.")
    rotation_degrees: float = _flag(0.0, "Largest rotation to either side.")
    translation: float = _flag(0.0, "Largest shift, as a share of height and width.")
    scaling: float = _flag(0.0, "Largest relative change of size.")
    auto_augment: str | None = _flag(None, "A policy: randaugment or trivialaugment.")
    randaugment_num_ops: int = _flag(2, "Operations that RandAugment draws per image.")
    randaugment_magnitude: int = _flag(9, "Strength of RandAugment, 0 to 30.")
    random_erasing_prob: float = _flag(0.0, "Probability that a random rectangle turns grey.")


@dataclass
class MixingArguments:
    """The arguments of `hf_vit_scratch.data.mixup.Mixing`."""

    mixup_alpha: float = _flag(0.0, "MixUp with shares from Beta(alpha, alpha); 0 for none.")
    cutmix_alpha: float = _flag(0.0, "CutMix with areas from Beta(alpha, alpha); 0 for none.")
    mixing_prob: float = _flag(1.0, "Probability that an image is mixed, where one of the two is chosen.")


@dataclass
class ViTTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` with the defaults that training from scratch on images needs."""

    output_dir: str = _flag(
        "runs/train", "Where the run is written; train.py never overwrites a folder that holds one."
    )
    # The stock default drops the column of images before they are read.
    remove_unused_columns: bool = _flag(False, "Remove columns that the model does not take.")
    # The stock default hides a loss that is not finite, and waits for the device at every step to find it.
    logging_nan_inf_filter: bool = _flag(False, "Hide losses that are not finite from the log.")
    # The stock default searches the whole graph at every step, for parameters that our models do not have.
    ddp_find_unused_parameters: bool | None = _flag(False, "Let DDP look for parameters without a gradient.")
    eval_strategy: str = _flag("epoch", "When to evaluate: no, steps, epoch.")
    save_strategy: str = _flag("epoch", "When to save a checkpoint: no, steps, epoch, best.")
    save_total_limit: int | None = _flag(2, "Number of checkpoints to keep; the best one always is.")
    load_best_model_at_end: bool = _flag(True, "Report and save the best model rather than the last.")
    metric_for_best_model: str | None = _flag("accuracy", "Validation metric that says which model is best.")
    optim: str = _flag("adamw_torch_fused", "Optimizer.")
    lr_scheduler_type: str = _flag("cosine", "Learning rate schedule.")
    # Ours.
    task: str = _flag(TASKS[0], f"What is learnt: {' or '.join(TASKS)}, which needs no labels.")
    mask_ratio: float = _flag(0.6, "Masked image modelling: share of an image that is masked.")
    mask_patch_size: int | None = _flag(None, "Masked image modelling: side of a masked square, pixels; a patch's.")
    check: bool = _flag(False, "Look at the data and try the model for a minute instead of training.")
    data_report: bool = _flag(False, "Measure what bounds the speed, loading or computing, instead of training.")
    fit_to_images: bool = _flag(
        False, "Choose by the images what is not set: sizes, batch, epochs, augmentation. The log says what and why."
    )
    whiten_patches: bool = _flag(
        False, "Start the patch embedding with random filters of whitened patches of the training images."
    )
    muon: bool = _flag(False, "Muon for the matrices of the layers, AdamW for the rest.")
    muon_learning_rate: float | None = _flag(None, "Learning rate of Muon; that of AdamW, to whose size it is scaled.")
    muon_dtype: str | None = _flag(
        None, f"Precision of Muon's products, {' or '.join(MUON_DTYPES)}; what is faster on the machine."
    )
    layer_decay: float = _flag(1.0, "Learning rate of each layer as a share of the next layer's.")
    ema_decay: float | None = _flag(
        None, "Decay per step of a moving average of the weights, which is then the model."
    )
    max_train_minutes: float | None = _flag(
        None, "Minutes to train, if the epochs do not end before; the schedule follows."
    )
    license: str | None = _flag(None, "Licence of the model, for its card: an identifier of the Hub like apache-2.0.")

    def __post_init__(self) -> None:
        if self.remove_unused_columns:
            raise UserError("remove_unused_columns must stay false: it would look for columns in batches.")
        if self.hub_token is not None:
            raise UserError("hub_token would be published with the run's command: use `hf auth login` or HF_TOKEN.")
        if self.task not in TASKS:
            raise UserError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}.")
        if self.muon_dtype not in (None, *MUON_DTYPES):
            raise UserError(f"muon_dtype must be one of {', '.join(MUON_DTYPES)}; got {self.muon_dtype!r}.")
        if self.task == "masked-image-modeling":
            self.metric_for_best_model = "loss"  # the only one
            self.label_names = ["bool_masked_pos"]  # what the Trainer takes for the sign that there is a loss
            self.prediction_loss_only = True
        for name, low, high in (("ema_decay", 0, 1), ("layer_decay", 0, 1), ("max_train_minutes", 0, math.inf)):
            value = getattr(self, name)
            if value is not None and not low < value <= high:
                raise UserError(f"{name} must lie above {low} and be at most {high}, got {value}.")
        if not torch.accelerator.is_available():
            # Without this, processes that torchrun starts do not find each other, and each would train alone.
            self.use_cpu = True
            self.dataloader_pin_memory = False  # it would only warn
        super().__post_init__()
        if self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU:  # torch takes less for better
            mode = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": mode, **cast(dict[str, Any], self.lr_scheduler_kwargs or {})}

    @property
    def device(self) -> torch.device:
        """The device of this process; for a CPU without the number of the process, which torch 2.11 cannot load to."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


ARGUMENT_TYPES: tuple[Any, ...] = (
    ModelArguments,
    DataArguments,
    AugmentationArguments,
    MixingArguments,
    ViTTrainingArguments,
)
Arguments = tuple[ModelArguments, DataArguments, AugmentationArguments, MixingArguments, ViTTrainingArguments]


def refuse_labels(args: Arguments) -> None:
    """Refuse what needs labels where none are read.

    Raises:
        UserError: Names it.
    """
    _, data, _, mixing, training = args
    for asked, flag in (
        (data.streaming, "--streaming"),
        (training.check, "--check"),
        (mixing.mixup_alpha or mixing.cutmix_alpha, "mixing (--mixup_alpha, --cutmix_alpha)"),
        (training.label_smoothing_factor, "--label_smoothing_factor"),
    ):
        if asked:
            raise UserError(f"{flag} does not go together with --task masked-image-modeling. Leave it out.")


class RecipeParser(HfArgumentParser):
    """transformers' parser, with errors of one line that guess what was meant."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage of 140 flags."""
        raise UserError(f"{message[:1].lower()}{message[1:]}. Run train.py --help for the flags.")


def parse_recipe(argv: Sequence[str], default_recipe: Path) -> tuple[Arguments, str]:
    """Build the arguments from a recipe and flags: `[recipe.yaml] [--flag value ...]`.

    Precedence, lowest first: the dataclasses' defaults, the recipe, the flags. A recipe is a flat YAML mapping from
    names of flags to values.

    Args:
        argv: The command line, without the program's name.
        default_recipe: The recipe if the command line names none.

    Returns:
        The arguments, and the resolved recipe as YAML: all that the recipe and the flags have set.

    Raises:
        UserError: A file, a key, a flag or a value is wrong.
    """
    argv = list(argv)
    if argv and not argv[0].startswith("-"):
        recipe_path = Path(argv.pop(0))
    elif any(argument.split("=")[0] == "--data" for argument in argv):
        raise UserError(
            "--data needs a recipe before it, such as: train.py recipes/cifar10_cpu.yaml --data FOLDER. The default "
            "recipe fits the digits only."
        )
    else:
        recipe_path = default_recipe
    recipe = _read_recipe(recipe_path)

    parser = RecipeParser(
        ARGUMENT_TYPES,
        prog="train.py",
        usage="train.py [recipe.yaml] [--flag value ...]",
        description="Train a Vision Transformer from scratch. A flag overrides the recipe's value.",
        allow_abbrev=False,
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    known = [flag.name for argument_type in ARGUMENT_TYPES for flag in fields(argument_type)]
    for key in recipe:
        if key not in known:
            raise UserError(f"{recipe_path}: unknown key {key!r}.{_guess(key, known)}")
    for argument in argv:
        name = argument.removeprefix("--").split("=")[0].replace("-", "_")
        if (
            argument.startswith("--")
            and name not in known
            and name.removeprefix("no_") not in known
            and name != "help"
        ):
            raise UserError(f"unknown flag {argument.split('=')[0]}.{_guess(name, known, prefix='--')}")

    # A recipe is the beginning of the command line: the same types, the same checks, and what comes later wins.
    recipe_argv = [argument for key, value in recipe.items() for argument in _as_arguments(key, value)]
    given = _explicit(parser, recipe_argv) | _explicit(parser, argv)
    with blame_the_user():  # TrainingArguments checks its values itself
        parsed = parser.parse_args_into_dataclasses([*recipe_argv, *argv], look_for_args_file=False)
    given.pop("resume_from_checkpoint", None)  # the resolved recipe starts a run afresh
    return cast(Arguments, parsed), yaml.safe_dump(
        {name: given[name] for name in known if name in given}, sort_keys=False
    )


def model_config(args: ModelArguments, label_names: Sequence[str]) -> tuple[ViTScratchConfig, str | None]:
    """The configuration that the flags describe, for these classes, and the saved model to start from, if any.

    Raises:
        UserError: A field is impossible, or there is no such model.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    model = given.pop("model", None)
    for name in ("image_size", "patch_size"):
        if name in given and len(given[name]) == 1:
            given[name] = given[name][0]
    given["id2label"] = dict(enumerate(label_names))
    given["label2id"] = {name: index for index, name in enumerate(label_names)}
    try:
        if model is None:
            return ViTScratchConfig(**given), None
        if re.fullmatch(rf"({'|'.join(VARIANTS)})/\d+", model):
            return ViTScratchConfig.from_variant(model, **given), None
        config = ViTScratchConfig.from_pretrained(model, **given)
        config.validate()
        return config, model
    except OSError as error:
        raise UserError(
            f"--model {model} is neither a size such as S/16 (sizes {', '.join(VARIANTS)}, then the patch size), "
            "nor a folder of a saved model of ours, nor the name of one on the Hub that is within reach."
        ) from error
    except (ValueError, TypeError) as error:  # already in our own words
        raise UserError(str(error)) from error


def stage_arguments(args: AugmentationArguments, config: ViTScratchConfig) -> dict[str, Any]:
    """The arguments of `training_stages`, for a model.

    Raises:
        UserError: The model cannot take the initial image size.
    """
    given = dict(vars(args))
    size = given["initial_image_size"]
    if size is not None:
        pair = (*size, *size)[:2]
        for axis, pixels, patch in zip(("height", "width"), pair, config.patch_height_width, strict=True):
            if pixels < patch or pixels % patch != 0:
                raise UserError(
                    f"initial_image_size ({axis} {pixels}) must be divisible by patch_size ({axis} {patch})."
                )
        given["initial_image_size"] = pair
    return given


# Folder, within that of the run, of a checkpoint that is being written. The Trainer pushes nothing with such a name.
STAGING = "_incomplete"

# File, there, that a run holds locked. What begins with "_" is not pushed.
LOCK = "_lock"

# Before the fingerprint of the images, in a run's `recipe.yaml`.
IMAGES_LINE = "# images: "

# What a resumed run may change: none of it moves a weight.
RESUMABLE = {
    "output_dir", "resume_from_checkpoint", "logging_steps", "logging_strategy", "report_to", "run_name",
    "disable_tqdm", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_pin_memory", "save_steps", "save_strategy", "save_total_limit", "eval_steps", "eval_strategy",
    "per_device_eval_batch_size", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo",
    "hub_always_push", "hub_revision", "license", "use_cpu",
}  # fmt: skip


@contextmanager
def claimed(args: ViTTrainingArguments) -> Iterator[None]:
    """Keep other runs out of `output_dir`. The system ends the claim with the process, however that ends.

    Raises:
        UserError: Another run is at work there.
    """
    output_dir = Path(args.output_dir)
    if not args.should_save or output_dir.is_file():  # another process has claimed it; `resolve_checkpoint` refuses it
        yield
        return
    with blame_the_user():
        output_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output_dir / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"another run is writing into {output_dir}. Choose another --output_dir, or wait for its end."
        ) from error
    except OSError as error:
        raise UserError(f"{output_dir} cannot be written to: {error}.") from error
    try:
        yield
    finally:
        if [path.name for path in output_dir.iterdir()] == [LOCK]:  # a mistake was found before anything was written
            with suppress(OSError):
                (output_dir / LOCK).unlink()
                output_dir.rmdir()
        lock.release()


def resolve_checkpoint(args: ViTTrainingArguments, recipe: str = "") -> str | None:
    """The checkpoint to continue from, after making sure that no other run is overwritten.

    `--resume_from_checkpoint` takes a folder, or `true` for the newest checkpoint in `output_dir`.

    Args:
        args: The arguments.
        recipe: The resolved recipe, to be compared with that of the run.

    Raises:
        UserError: `output_dir` holds a run that is not to be continued, there is no checkpoint to continue from, or
            the run was begun with another recipe.
    """
    checkpoint = _find_checkpoint(args)
    begun = Path(checkpoint).parent / "recipe.yaml" if checkpoint else None
    if begun is not None and begun.is_file():
        was, now = (yaml.safe_load(text) or {} for text in (begun.read_text(encoding="utf-8"), recipe))
        free = set(RESUMABLE)
        if not now.get("streaming") and all(recipe.get("dataloader_num_workers") for recipe in (was, now)):
            free.add("dataloader_num_workers")  # without any, images may be augmented in batches, with other draws
        if now.get("fit_to_images"):  # what the run has chosen for itself is taken over: `chosen_before`
            free |= was.keys() - now.keys()
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name) and name not in free]
        if changed:
            listed = ", ".join(f"{name} {now.get(name, 'unset')} (was {was.get(name, 'unset')})" for name in changed)
            raise UserError(
                f"{checkpoint} belongs to a run with another recipe: {listed}. Repeat the run's own command, which "
                f"{begun} begins with, and add --resume_from_checkpoint true."
            )
    return checkpoint


def chosen_before(checkpoint: str | None, given: Set[str]) -> dict[str, Any]:
    """Return the values that the run of a checkpoint chose by its images; none without a checkpoint.

    Args:
        checkpoint: The result of `resolve_checkpoint`.
        given: Names of the fields set by a recipe or a flag.
    """
    begun = Path(checkpoint).parent / "recipe.yaml" if checkpoint else None
    if begun is None or not begun.is_file():
        return {}
    was = yaml.safe_load(begun.read_text(encoding="utf-8")) or {}
    return {name: value for name, value in was.items() if name not in given}


def without_resuming(argv: Sequence[str]) -> list[str]:
    """The command line by which a run begins, also where it is resumed."""
    kept, arguments = [], iter(argv)
    for argument in arguments:
        if argument.split("=")[0].replace("-", "_") != "__resume_from_checkpoint":
            kept.append(argument)
        elif "=" not in argument:
            next(arguments, None)  # its value
    return kept


def refuse_other_images(checkpoint: str | None, images: str) -> None:
    """Refuse to resume where images were added or taken away: the splits would be cut anew.

    Args:
        checkpoint: From `resolve_checkpoint`.
        images: The `fingerprint` of the splits.

    Raises:
        UserError: The run began with other images.
    """
    begun = Path(checkpoint).parent / "recipe.yaml" if checkpoint else None
    if begun is None or not begun.is_file():
        return
    was = re.search(rf"^{IMAGES_LINE}(.+)$", begun.read_text(encoding="utf-8"), re.MULTILINE)
    if was is not None and was[1] != images:
        raise UserError(
            f"{checkpoint} belongs to a run with other images: {was[1]}, now {images}. The splits would be cut anew, "
            "so that images of training could come into the test split. Give the images back that the run began with, "
            "each under its old name, or start a new run."
        )


def _find_checkpoint(args: ViTTrainingArguments) -> str | None:
    output_dir = Path(args.output_dir)
    wanted = str(args.resume_from_checkpoint or "false")
    if wanted.lower() == "true":
        # The Trainer writes this file last, so a folder without it was cut off while it was being saved.
        complete = [state.parent for state in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")]
        if not complete:
            raise UserError(
                f"{output_dir} holds no checkpoint to resume from. Start without --resume_from_checkpoint."
            )
        for folder in sorted(complete, key=lambda folder: int(folder.name.rpartition("-")[2]), reverse=True):
            damaged = damaged_files(folder)
            if not damaged:
                return str(folder)
            logger.warning("%s is damaged (%s) and not used.", folder, ", ".join(damaged))
        raise UserError(f"{output_dir} holds no checkpoint that is not damaged. Start anew in another --output_dir.")

    checkpoint = None if wanted.lower() == "false" else Path(wanted)
    if checkpoint is not None and not (checkpoint / "trainer_state.json").is_file():
        raise UserError(f"--resume_from_checkpoint: {wanted} is no checkpoint (it holds no trainer_state.json).")
    if checkpoint is not None and (damaged := damaged_files(checkpoint)):
        raise UserError(
            f"--resume_from_checkpoint: {wanted} is damaged ({', '.join(damaged)}). With `true` the newest checkpoint "
            "that is not damaged is taken."
        )
    if checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve():
        return str(checkpoint)
    # What a check, or a run that was killed before its first checkpoint, leaves can be overwritten.
    remains = {"recipe.yaml", "samples.png", STAGING, LOCK}
    if output_dir.exists() and (not output_dir.is_dir() or {path.name for path in output_dir.iterdir()} - remains):
        raise UserError(
            f"{output_dir} is not empty, and a run is never overwritten. Continue it with "
            "--resume_from_checkpoint true, choose another --output_dir, or delete it."
        )
    return None if checkpoint is None else str(checkpoint)


def _read_recipe(path: Path) -> dict[str, Any]:
    """A recipe as text: the flags' own types read the values, so that `1e-3` is a number and `no` is a word."""
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{path}: the recipe cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the recipe is no YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: a recipe must be lines of `key: value`, got {type(recipe).__name__}.")
    return recipe


def _as_arguments(key: str, value: Any) -> list[str]:
    if value in ("", "~", "null"):
        return []  # the default
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]


def _explicit(parser: RecipeParser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags that `argv` sets, with their values, and no defaults."""
    given = {re.sub("^no_", "", a.removeprefix("--").split("=")[0].replace("-", "_")) for a in argv if a[:2] == "--"}
    return {name: value for name, value in vars(parser.parse_args(argv)).items() if name in given}


def _guess(name: str, known: Sequence[str], prefix: str = "") -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {prefix}{match[0]}?" if match else " Run train.py --help for the known ones."
