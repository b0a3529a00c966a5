"""The flags of `vit-scratch train`, as dataclasses."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from transformers import TrainingArguments
from transformers.utils import is_in_notebook

from ..data.options import AugmentationArguments, DataArguments, MixingArguments, Options, check_ranges, flag
from ..errors import UserError
from ..model.configuration_vit_scratch import POOLINGS, POSITION_EMBEDDING_TYPES, VARIANT_NAME

# Options of transformers that must keep their value, and why.
FIXED: dict[str, tuple[Any, str]] = {
    "remove_unused_columns": (False, "it would look for columns in batches"),
    "train_sampling_strategy": ("random", "the order of the images follows from the seed"),
    "prediction_loss_only": (False, "the report needs the answers"),
    "ignore_data_skip": (False, "a resumed run goes on with the images that are left"),
    "eval_do_concat_batches": (True, "the metrics are of all images together"),
    "batch_eval_metrics": (False, "the metrics are of all images together"),
    "restore_callback_states_from_checkpoint": (False, "a resumed run goes on counting for early_stopping_patience"),
    "enable_jit_checkpoint": (False, "SIGTERM saves a checkpoint anyway"),
    "debug": ("", "it cannot be written into a recipe"),
    "hub_token": (None, "it would be published with the run's command; use `hf auth login` or HF_TOKEN"),
    "bf16_full_eval": (False, "it would round the model itself, which is saved afterwards; use bf16"),
    "fp16_full_eval": (False, "it would round the model itself, which is saved afterwards; use fp16"),
}
# What the Trainer takes for the sign that there is a loss. It would not find it in the signature of a compiled model.
LABEL_NAMES = {"image-classification": ["labels"], "masked-image-modeling": ["bool_masked_pos"]}
TASKS = tuple(LABEL_NAMES)


@dataclass
class ModelArguments(Options):
    """Fields of `ViTScratchConfig`, and where to start. What is not given keeps the configuration's default."""

    model: str | None = flag(
        None,
        "A size and a patch size to start afresh, such as S/16 (sizes Ti, S, B, L, H). Or a trained model to start "
        "from: a folder or a name on the Hub of ours, transformers or timm, a name of timm, or a weights file of "
        "torchvision.",
    )
    image_size: list[int] | None = flag(None, "Pixels: one number, or height and width.")
    patch_size: list[int] | None = flag(None, "Pixels: one number, or height and width.")
    hidden_size: int | None = flag(None, "Width of a token.")
    num_hidden_layers: int | None = flag(None, "Number of encoder layers.")
    num_attention_heads: int | None = flag(None, "Number of attention heads.")
    intermediate_size: int | None = flag(None, "Width of the MLP's hidden layer.")
    hidden_act: str | None = flag(None, "Activation of the MLP.")
    qkv_bias: bool | None = flag(None, "Biases in the query, key and value projections.")
    layer_norm_eps: float | None = flag(None, "Added to the variance by every norm.")
    initializer_range: float | None = flag(None, "Standard deviation of the initial weights.")
    patch_initializer_range: float | None = flag(None, "The same for the patch embedding alone.")
    norm_first: bool | None = flag(None, "True: ViT style, pre-LN. False: BERT style, post-LN.")
    hidden_dropout_prob: float | None = flag(None, "Dropout of embeddings and residual branches.")
    attention_probs_dropout_prob: float | None = flag(None, "Dropout of attention probabilities.")
    drop_path_rate: float | None = flag(None, "Stochastic depth of the last layer.")
    position_embedding_type: str | None = flag(None, f"One of {', '.join(POSITION_EMBEDDING_TYPES)}.")
    qk_norm: bool | None = flag(None, "RMS-normalize queries and keys.")
    pooling: str | None = flag(None, f"One of {', '.join(POOLINGS)}.")
    use_cls_token: bool | None = flag(None, "A class token, also where mean pooling does not read it.")
    fc_norm: bool | None = flag(None, "The final LayerNorm after the pooling instead of before it.")
    classifier_hidden_size: int | None = flag(None, "Hidden layer before the classifier.")
    classifier_act: str | None = flag(None, "Activation of that hidden layer.")
    attn_implementation: str | None = flag(
        None, "eager, sdpa, flex_attention or flash_attention_2; by default what --speed_choice measures."
    )

    def __post_init__(self) -> None:
        self.model = self.model and os.path.expanduser(self.model)
        super().__post_init__()


def is_starting_model(model: str | None) -> bool:
    """Return whether `--model` names a trained model, and not a size such as S/16."""
    return model is not None and not VARIANT_NAME.fullmatch(model)


@dataclass
class ViTTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` with the defaults that training from scratch on images needs."""

    output_dir: str = flag("runs/train", "Where the run is written. A folder that holds a run is never overwritten.")
    # The stock default drops the column of images before they are read.
    remove_unused_columns: bool = flag(False, "Remove columns that the model does not take.")
    # The stock default hides a loss that is not finite, and waits for the device at every step to find it.
    logging_nan_inf_filter: bool = flag(False, "Hide losses that are not finite from the log.")
    # The stock default searches the whole graph at every step, for parameters that our models do not have.
    ddp_find_unused_parameters: bool | None = flag(False, "Let DDP look for parameters without a gradient.")
    eval_strategy: str = flag("epoch", "When to evaluate: no, steps, epoch.")
    save_strategy: str = flag("epoch", "When to save a checkpoint: no, steps, epoch, best.")
    save_total_limit: int | None = flag(2, "Number of checkpoints to keep; the best one always is.")
    load_best_model_at_end: bool = flag(True, "Report and save the best model rather than the last.")
    metric_for_best_model: str | None = flag("accuracy", "Validation metric that says which model is best.")
    optim: str = flag("adamw_torch_fused", "Optimizer.")
    lr_scheduler_type: str = flag("cosine", "Learning rate schedule.")
    seed: int = flag(42, "Seed of the weights, the order and the augmentation; the splits are the same for all.")
    # Ours.
    task: str = flag(TASKS[0], f"What is learnt: {' or '.join(TASKS)}, which needs no labels.")
    mask_ratio: float = flag(0.6, "Masked image modelling: share of an image that is masked.")
    mask_patch_size: int | None = flag(None, "Masked image modelling: pixels per side of a masked square (a patch's).")
    check: bool = flag(False, "Look at the data and try the model for a minute and a half instead of training.")
    data_report: bool = flag(False, "Measure what bounds the speed, loading or computing, instead of training.")
    fit_to_images: bool = flag(
        False, "Choose by the images what is not set: sizes, batch, epochs, augmentation. The log says what and why."
    )
    whiten_patches: bool = flag(False, "Start the patch embedding with random filters of whitened training patches.")
    local_attention: bool = flag(False, "Start half of the heads of a rope2d model with attention to near patches.")
    muon: bool = flag(False, "Muon for the matrices of the layers, AdamW for the rest.")
    muon_learning_rate: float | None = flag(
        None, "Learning rate of Muon; by default learning_rate, as its steps have AdamW's size."
    )
    muon_beta2: float | None = flag(
        None, "NorMuon: decay per step of the squared updates of each neuron, such as 0.95; plain Muon without it."
    )
    speed_choice: str = flag(
        "auto",
        "auto measures which implementation of the layers is the fastest; plain changes nothing; or repeat the choice "
        "of a run, such as sdpa+joined.",
    )
    cache_images: bool = flag(
        False, "Keep decoded training images in a file, if they take more than 2 GB, so that each is decoded once."
    )
    balanced_sampling: bool = flag(False, "Show images of all classes equally often, those of rare ones repeatedly.")
    layer_decay: float = flag(1.0, "Learning rate of each layer as a share of the next layer's; with --model.")
    freeze_layers: str | None = flag(
        None,
        "Keep the weights of the embeddings and the first N layers of a trained --model; all: train the head alone.",
    )
    ema_decay: float | None = flag(None, "Decay per step of a moving average of the weights, which is then the model.")
    max_train_minutes: float | None = flag(
        None,
        "Longest training time in minutes; inf for no limit. The learning rate follows the time, and its numbers "
        "of steps, such as warmup_steps, are parts of 10,000.",
    )
    eval_tta: str | None = flag(None, "flip: report also the mean logits of each test image and its mirror image.")
    early_stopping_patience: int | None = flag(
        None,
        "End after so many evaluations in which metric_for_best_model does not improve. The best model is the result "
        "if load_best_model_at_end is true.",
    )
    calibrate: bool = flag(
        True,
        "Calibrate the scores on the validation split after training, if each image has one class. Not for streams, "
        "nor with FSDP or DeepSpeed.",
    )
    target_accuracy: float | None = flag(
        None, "Accuracy that answers of `predict` should have: images with low scores are unknown. Needs calibrate."
    )
    license: str | None = flag(None, "Licence of the model, for its card: an identifier of the Hub like apache-2.0.")

    def __post_init__(self) -> None:
        for name, (value, reason) in FIXED.items():
            if getattr(self, name) not in (value, []):  # which `dataclasses.replace` finds in `debug`
                raise UserError(f"{name} must stay {str(value).lower() or 'unset'}: {reason}. Leave it out.")
        if self.task not in TASKS:
            raise UserError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}.")
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith("mae"):
            self.greater_is_better = False
        if self.task == "masked-image-modeling":
            self.metric_for_best_model = "loss"  # the only one
        self.label_names = LABEL_NAMES[self.task]
        check_ranges(self)
        if self.target_accuracy is not None and not self.calibrate:
            raise UserError("target_accuracy needs calibrate, which is false. Leave one of them out.")
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise UserError("early_stopping_patience needs evaluations: give --eval_strategy steps or epoch.")
        if self.early_stopping_patience is not None and self.eval_on_start:
            raise UserError("early_stopping_patience would count eval_on_start at each resumption. Leave one out.")
        if not self.dataloader_num_workers:  # of a recipe for several
            self.dataloader_persistent_workers, self.dataloader_prefetch_factor = False, None
        if self.disable_tqdm is None and not sys.stderr.isatty() and not is_in_notebook():
            self.disable_tqdm = True  # in a file, each step of a bar would be a line
        if not torch.accelerator.is_available():
            # Without this, processes that torchrun starts do not find each other, and each would train alone.
            self.use_cpu = True
        super().__post_init__()
        if self.load_best_model_at_end and self.save_strategy == "steps" and self.save_steps != self.eval_steps:
            raise UserError(
                f"load_best_model_at_end needs save_steps equal to eval_steps, {self.eval_steps:g}, or the best "
                f"model may not be saved; got {self.save_steps:g}. Or give --save_strategy best."
            )
        accelerator_config: Any = self.accelerator_config
        if accelerator_config.split_batches or accelerator_config.dispatch_batches:
            raise UserError("accelerator_config must not split or dispatch batches: each process loads its own.")
        # Otherwise each copy waits for all that the GPU has to do.
        accelerator_config.non_blocking |= self.dataloader_pin_memory and self.device.type == "cuda"

    @property
    def n_gpu(self) -> int:
        """GPUs of this process, at most one: torch's slow `DataParallel` would mix up what hooks see."""
        return min(1, super().n_gpu)

    @property
    def device(self) -> torch.device:
        """The device of this process; for a CPU without the number of the process, which torch 2.11 cannot load to."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


class Arguments(NamedTuple):
    """All flags of a run."""

    model: ModelArguments
    data: DataArguments
    augmentation: AugmentationArguments
    mixing: MixingArguments
    training: ViTTrainingArguments


ARGUMENT_TYPES: tuple[Any, ...] = tuple(Arguments.__annotations__.values())
DEFAULTS = {flag.name: flag.default for argument_type in ARGUMENT_TYPES for flag in fields(argument_type)}


def set_fields(args: Arguments, values: Mapping[str, Any]) -> None:
    """Set fields of the arguments by name, whichever dataclass they belong to."""
    for name, value in values.items():
        setattr(next(part for part in args if hasattr(part, name)), name, value)


def refuse_beside(args: Arguments, what: str, *names: str) -> None:
    """Refuse flags that are not at their defaults, beside another one."""
    for name in names:
        if next(getattr(part, name) for part in args if hasattr(part, name)) != DEFAULTS[name]:
            raise UserError(
                f"--{name} does not go together with {what}. Leave one of them out. If the recipe sets --{name}, add "
                f"--{name} null."
            )


def refuse_with_fsdp(args: ViTTrainingArguments, plugin: Any) -> None:
    """Refuse what does not work while FSDP spreads a model, by the settings of accelerate's plugin."""
    for name in ("ema_decay", "target_accuracy"):
        if getattr(args, name) is not None:
            raise UserError(f"{name} does not work with FSDP yet. Leave it out, or train with DDP.")
    for name, value, got, reason in (
        ("fsdp_version", "2", plugin.fsdp_version, "the first version flattens the parameters"),
        ("fsdp_state_dict_type", "FULL_STATE_DICT", plugin.state_dict_type, "otherwise no model is saved"),
    ):
        if str(got).rpartition(".")[2] != value:  # the second is an enumeration
            raise UserError(
                f"{name} must be {value}, got {got}: {reason}. Set it in the configuration of accelerate, as "
                "accelerate_configs/fsdp2.yaml does."
            )
