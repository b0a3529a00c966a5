"""An error if the loss is not finite, and a warning if it does not move."""

import logging
import math
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TrainerState

from ..errors import UserError
from .checkpointing import describe_last_checkpoint

logger = logging.getLogger(__name__)

WATCHED_PART = 0.1  # of training, after which the loss should have moved
LEAST_STEPS = 50  # before which it often has not
NOT_MOVED = 0.98  # share of the first loss above which it has not


class LossWatch(TrainerCallback):
    """Stop at a loss that is not finite. Say once, after a tenth of the training, if that of a classifier stays."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Look at the loss of this line."""
        logs = logs or {}
        loss = float(logs.get("loss", logs.get("train_loss", 0.0)))  # the last line has the mean of all
        if not math.isfinite(loss):
            rate = logs.get("learning_rate", args.learning_rate)
            raise UserError(
                f"The loss is {loss} at step {state.global_step}. {describe_last_checkpoint(args.output_dir)}. The "
                f"likely cause is a learning rate that is too high (now {rate:.3g}), too short a warm-up, or 16-bit "
                "precision. Start a new run, in another --output_dir, with a lower --learning_rate, a longer "
                "--warmup_steps, --max_grad_norm 1, --bf16 false --fp16 false or, for a new model, --qk_norm true."
            )
        if "loss" not in logs or args.task != "image-classification" or not state.is_world_process_zero:
            return
        lines = [line for line in state.log_history if "loss" in line]  # also those of before the run was resumed
        first_loss = lines[0]["loss"]
        steps, minutes = WATCHED_PART * state.max_steps, WATCHED_PART * (args.max_train_minutes or math.inf)
        later = [line for line in lines[1:] if line["step"] >= LEAST_STEPS]
        watched = [line for line in later if line["step"] >= steps or line.get("minutes", 0.0) >= minutes]
        if len(watched) != 1:  # not yet, or said before
            return
        config = getattr(kwargs["model"], "config", None)
        several = getattr(config, "problem_type", None) == "multi_label_classification"  # each is a yes or no
        chance = math.log(2 if several else max(getattr(config, "num_labels", 0), 2))  # of equal probabilities
        if loss > NOT_MOVED * first_loss and loss > 0.9 * chance:
            logger.warning(
                "The loss has not moved: %.3f at first, %.3f now. Stop, and run "
                "with --check true and another --output_dir to see whether the labels belong to the images. Else try "
                "a lower --learning_rate, fewer augmentations, or more time.",
                first_loss,
                loss,
            )
