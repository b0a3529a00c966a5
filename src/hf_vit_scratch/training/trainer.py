"""The stock Trainer, with what training a Vision Transformer from scratch needs beyond it."""

import copy
import logging
import math
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from accelerate.utils import DynamoBackend
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..data.dataset import ImageClassificationDataset, collate
from ..data.sampler import EpochSampler
from ..data.streaming import ImageClassificationStream
from ..data.targets import refuse_other_classes
from ..errors import UserError
from ..evaluation.model_card import make_run_card
from ..model.modeling_vit_scratch import ViTScratchPreTrainedModel
from ..speed.hardware import keep_freed_memory
from ..speed.optimize import Optimization, example_batch_for, optimize
from .arguments import ViTTrainingArguments, refuse_with_fsdp
from .checkpointing import (
    CHECKSUMS,
    complete_checkpoints,
    delete_checkpoint,
    describe_last_checkpoint,
    find_checkpoint,
    finish_checkpoint,
    refuse_damage,
)
from .clock import Clock
from .ema import EMA, TRAINED_WEIGHTS
from .graceful_stop import GracefulStop
from .loss_watch import LossWatch
from .optimizers import SCHEDULE_STEPS, build_optimizer, follow_progress

logger = logging.getLogger(__name__)

SIGNS_OF_A_FULL_DISK = ("No space left", "unexpected pos", "iostream error")  # the last two are torch.save's


class _Hooks(TrainerCallback):
    """What `ViTTrainer` does at the Trainer's events, after the callbacks given to its constructor."""

    def __init__(self, trainer: "ViTTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer.clock.resume(state)
        if args.process_index:  # or stochastic depth would drop the same branches in all; resuming restores each state
            torch.manual_seed(args.seed + args.process_index)
        if trainer.resumed_checkpoint is not None:
            checkpoint, minutes = trainer.resumed_checkpoint, f"{trainer.clock.minutes:.1f}"
            minutes += f" of {args.max_train_minutes:g}" if args.max_train_minutes else ""
            logger.info("Continues from %s, after %s minutes of training.", checkpoint, minutes)
        state.compute_steps(args, state.max_steps)  # the intervals of this call, not the checkpoint's
        optimized = trainer.optimization
        if optimized is not None and optimized.model is not trainer.model:  # `model_init` made another
            trainer.optimization = trainer.optimize_model(optimized.choice)
        if isinstance(trainer.train_dataset, ImageClassificationStream):  # the loop skips those before undecoded
            trainer.train_dataset.first_batch = state.global_step * args.gradient_accumulation_steps
        best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if (best / CHECKSUMS).is_file():  # the folder of a resumed run may have had another name
            state.best_model_checkpoint = str(best)
        if trainer.ema is None:  # else a batch was too large, and training begins again with a smaller one
            trainer.ema = EMA.start(trainer.model, args.ema_decay, state, trainer.resumed_checkpoint)
        if args.early_stopping_patience is not None:
            # Not `restore_callback_states_from_checkpoint`: it would restore the checkpoint's patience, too.
            name, new = EarlyStoppingCallback.__name__, trainer.early_stopping.state()
            saved = state.stateful_callbacks.setdefault(name, new)["attributes"]  # saving needs one
            vars(trainer.early_stopping).update(saved)
            control.should_training_stop |= saved["early_stopping_patience_counter"] >= args.early_stopping_patience
        control.should_training_stop |= state.global_step >= state.max_steps or trainer.clock.progress >= 1
        if trainer.resumed_checkpoint is not None and control.should_training_stop:
            logger.info("That run is finished: nothing is left to train. To train longer, start a new run.")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.wait_for_push_before_forking()
        if self.trainer.sampler is not None:  # the stock Trainer omits this if several processes resume
            self.trainer.sampler.set_epoch(int(state.epoch))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer.ema is not None:
            trainer.ema.update_parameters(trainer.model)
        trainer.clock.update(state, control)
        for callback in trainer.callback_handler.callbacks if trainer.clock.progress > 0 else ():
            if getattr(callback, "training_bar", None) is not None:
                callback.training_bar.total = round(state.global_step / trainer.clock.progress)  # the end by the clock
        if trainer.graceful_stop.agreed(state.global_step):
            trainer.stopped = control.should_save = control.should_training_stop = True
            args.save_strategy = SaveStrategy.STEPS  # under "best", an evaluation takes `should_save` back
        # Log first, so that `LossWatch` sees a loss that is not finite before it is evaluated or saved.
        control.should_log |= control.should_evaluate or control.should_save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A stop fires this event even within an epoch, but has saved already. So evaluate, and save again with the
        # result, only at the end of an epoch or of the training. A finished run that was resumed does neither.
        if self.trainer.stopped or not self.trainer.has_seen_batch:
            is_whole = state.epoch % 1 == 0 or state.global_step >= state.max_steps or self.trainer.clock.progress >= 1
            control.should_evaluate &= self.trainer.has_seen_batch and is_whole
            control.should_save = control.should_evaluate
        control.should_log |= control.should_evaluate or control.should_save

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.close_checkpoint()
        self.trainer.restart_throughput()

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The stock Trainer pushes a checkpoint without the model's code and our card.
        trainer, output_dir = self.trainer, Path(args.output_dir)
        if trainer.is_in_train and trainer.pushed_checkpoint is not None and state.is_world_process_zero:
            trainer._finish_current_push()  # the push before may still read the files that are replaced here
            for code in trainer.pushed_checkpoint.glob("*.py"):
                shutil.copyfile(code, output_dir / code.name)
            trainer.create_model_card()


class ViTTrainer(Trainer):
    """The stock `Trainer` with what the best recipes need, losses weighted by images, and exact resumption.

    Added: the optimizers of `optimizers.py`, a moving average of the weights (`EMA`), training for a given time
    (`Clock`), a stop at SIGTERM or Ctrl-C (`GracefulStop`), complete checkpoints (`checkpointing.py`), the training
    stages of `ImageClassificationDataset`, batches weighted by their images, and throughput in the log.

    Args:
        model, args, others, kwargs: As for the stock Trainer, but `args` must be `ViTTrainingArguments`.
        data_collator: Gets a whole batch of `ImageClassificationDataset`, not rows.
        stage: Function from the progress of training, 0 to 1, to the index of the stage: the second result of
            `training_stages`. Not needed for one stage, or for a stream, which has its own.
    """

    args: ViTTrainingArguments
    model: PreTrainedModel

    def __init__(
        self,
        model: Any = None,
        args: ViTTrainingArguments | None = None,
        data_collator: Any = None,
        *others: Any,
        stage: Callable[[float], int] | None = None,
        **kwargs: Any,
    ):
        if not isinstance(args, ViTTrainingArguments):
            raise UserError(f"args must be ViTTrainingArguments, got {type(args).__name__}.")
        args = copy.copy(args)  # which is changed below, and may be that of another trainer
        super().__init__(model, args, data_collator or collate, *others, **kwargs)
        # The default metric needs `compute_metrics`.
        if self.compute_metrics is None and self.args.metric_for_best_model == type(self.args).metric_for_best_model:
            self.args.metric_for_best_model, self.args.greater_is_better = "loss", False
        if self.args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):  # their default is that lower is better
            mode = "max" if self.args.greater_is_better else "min"
            self.args.lr_scheduler_kwargs = {"mode": mode, **cast(Any, self.args.lr_scheduler_kwargs or {})}
        if self.is_fsdp_enabled:
            refuse_with_fsdp(self.args, cast(Any, self.accelerator.state).fsdp_plugin)
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of in-place changes; we make none
        train = self.train_dataset
        ours = train if isinstance(train, ImageClassificationDataset) else None
        if self.args.balanced_sampling and train is not None and (ours is None or ours.labels.ndim > 1):
            raise UserError("balanced_sampling needs an ImageClassificationDataset with one class for each image.")
        mixes = ours is not None and ours.batch_transform.mixing is not None
        if mixes and not hasattr(getattr(self.model, "config", None), "image_height_width"):
            raise UserError("mixing needs a model of this package: others would take its targets for several labels.")
        features = {name: dataset.rows.features for name, dataset in self._image_datasets().items()}
        refuse_other_classes("The classes differ", features, ["label"])
        if stage is None and ours is not None and len(ours.batch_transform.stages) > 1:
            raise UserError("There are several training stages: give stage, the second result of training_stages.")
        self.stage = stage or (lambda progress: 0)
        self.sampler: EpochSampler | None = None
        self.ema: EMA | None = None
        self.clock = Clock(self.args)  # its progress stays 0 without max_train_minutes
        self.graceful_stop = GracefulStop(self.args)
        self.stopped = False  # a signal has ended the training
        self.has_seen_batch = False  # in this call of `train`
        self.resumed_checkpoint: Path | None = None
        self.pushed_checkpoint: Path | None = None
        self._unfinished_checkpoint: Path | None = None
        self._save_total_limit: int | None = None
        self._images_in_step = 0  # see `compute_loss`
        self.restart_throughput()
        self.optimization = self.optimize_model(self.args.speed_choice)
        self.add_callback(_Hooks(self))  # after those that ask for a save or an evaluation: it adds the log line
        self.callback_handler.callbacks.insert(0, LossWatch())  # before a printer, whose pipe may be broken
        self.early_stopping = EarlyStoppingCallback(self.args.early_stopping_patience or 0)
        if self.args.early_stopping_patience is not None:
            if self.pop_callback(EarlyStoppingCallback):
                raise UserError("early_stopping_patience adds an EarlyStoppingCallback. Leave one of them out.")
            self.add_callback(self.early_stopping)

    # Training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the stock Trainer does. Afterwards the model holds the averaged weights, if there are any.

        SIGTERM before the last step saves a checkpoint and ends the training without an error: look at `stopped` then.

        Raises:
            UserError: The loss is not finite, a checkpoint does not fit, or the disk is full.
            KeyboardInterrupt: Ctrl-C was pressed, or a signal stopped a search. If `stopped`, a checkpoint was saved.
        """
        self.resumed_checkpoint = checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is None and (old := complete_checkpoints(Path(self.args.output_dir))):
            logger.warning("%s is of another run, and may be resumed by mistake. Use an empty output_dir.", old[0])
        self.has_seen_batch = self.stopped = False
        self.graceful_stop.signal = 0
        self.early_stopping.early_stopping_patience_counter = 0
        self._unfinished_checkpoint = None
        for dataset in self._image_datasets().values():
            if dataset is self.train_dataset or self.args.eval_strategy != "no":
                dataset.keep_decoded(self.args.device)  # before the clock starts
        self._train_batch_size = self.args.train_batch_size  # a search or a smaller batch may have left another
        self.clock.start()
        keep_freed_memory()  # so that a step reuses the memory of the one before
        # The stock Trainer would delete old checkpoints before the new one is complete. `close_checkpoint` waits.
        self._save_total_limit, self.args.save_total_limit = self.args.save_total_limit, None
        save_strategy = self.args.save_strategy
        try:
            with self.graceful_stop.listening():
                output = super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)
        except KeyboardInterrupt:  # a second Ctrl-C: the checkpoint may be incomplete
            self.stopped = False
            raise
        except (OSError, RuntimeError, SafetensorError) as error:
            if self._unfinished_checkpoint is None or not any(sign in str(error) for sign in SIGNS_OF_A_FULL_DISK):
                raise
            if self.args.should_save:
                delete_checkpoint(self._unfinished_checkpoint)
            last = describe_last_checkpoint(self.args.output_dir)
            raise UserError(f"{self.args.output_dir} has no space left ({error}). Free some. {last}.") from error
        finally:
            self.args.save_total_limit, self.args.save_strategy = self._save_total_limit, save_strategy
            if self.ema is not None:
                self.ema.swap(self.model)
            self.ema, self._images_in_step, self.is_in_train = None, 0, False
        ends_search = self.hp_search_backend is not None and self.graceful_stop.agreed(step=0)
        if ends_search or (self.stopped and self.graceful_stop.signal == signal.SIGINT):
            raise KeyboardInterrupt  # a search begins no later trial
        return output

    def _image_datasets(self) -> dict[str, ImageClassificationDataset]:
        evaluated: Any = self.eval_dataset
        named = evaluated if isinstance(evaluated, dict) else {"eval_dataset": evaluated}
        named = {"train_dataset": self.train_dataset, **named}
        return {name: each for name, each in named.items() if isinstance(each, ImageClassificationDataset)}

    def optimize_model(self, choice: str) -> Optimization | None:
        """Make the model fast for training on this machine; models of other libraries stay as they are."""
        model, args = self.model, self.args
        if not hasattr(getattr(model, "config", None), "image_height_width"):  # not of this package
            return None
        compile_options: dict[str, Any] = {}
        if args.torch_compile:
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # or accelerate compiles the whole model
            compile_options = {"backend": args.torch_compile_backend or "inductor", "mode": args.torch_compile_mode}
        num_images: float = args.max_steps * args.train_batch_size * args.gradient_accumulation_steps
        if args.max_steps <= 0 or self.train_dataset is None:  # those of this process; none, if it only evaluates
            num_images = args.num_train_epochs * len(cast(Any, self.train_dataset or ())) / args.world_size
        pixels = example_batch_for(model, args.train_batch_size).to(args.device)
        with self.accelerator.autocast():
            speed = optimize(model, pixels, training=True, compile=compile_options, choice=choice, images=num_images)
        if compile_options and not speed.compiled:
            logger.warning(
                "torch_compile needs a C++ compiler, Python's header files and, on a GPU, Triton, which were not all "
                "found (Debian: apt install g++ python3-dev). Training continues without it, and takes longer."
            )
        return speed

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer that `optim` names, or Muon with AdamW, with layer-wise learning rates.

        It is always for `self.model`. The argument `model` is the same model in a wrapper, and is ignored.
        """
        if self.optimizer is None:
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = build_optimizer(self.model, self.args, *chosen)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the stock schedule, unless one was given.

        With `max_train_minutes` it follows the time or the steps, whichever is ahead.
        """
        if self.args.max_train_minutes is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        return follow_progress(super().create_scheduler(SCHEDULE_STEPS, optimizer), lambda: self.clock.progress)

    def _get_dataloader(self, *, dataset: Any, batch_size: int, sampler_fn: Any, **others: Any) -> Any:  # type: ignore[override]
        if isinstance(dataset, ImageClassificationStream):
            dataset.batch_size = batch_size  # `auto_find_batch_size` may have changed it
            # A stream makes the batches of this process alone; accelerate would divide them among all processes.
            names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")
            options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
            return DataLoader(dataset, batch_size=None, collate_fn=self.data_collator, **options)
        drop_last, is_training = self.args.dataloader_drop_last, others.get("is_training", False)
        self.args.dataloader_drop_last = drop_last and is_training  # the stock Trainer drops test images as well
        try:
            if isinstance(dataset, ImageClassificationDataset) and dataset.keep_decoded(self.args.device):
                # Worker processes would have nothing to do, and what is on the device cannot be pinned.
                rest = {"sampler": sampler_fn(dataset), "drop_last": self.args.dataloader_drop_last}
                loader = DataLoader(dataset, batch_size, collate_fn=self.data_collator, **rest)
                loader = self.accelerator.prepare(loader)
            else:
                others |= {"dataset": dataset, "batch_size": batch_size, "sampler_fn": sampler_fn}
                loader = super()._get_dataloader(**others)
        finally:
            self.args.dataloader_drop_last = drop_last
        if isinstance(dataset, ImageClassificationDataset) or not is_training:
            # Each iterator draws a seed for its workers. Drawn from torch's global generator, it would change dropout
            # and stochastic depth. Other training datasets keep that generator: their random numbers follow from it.
            getattr(loader, "base_dataloader", loader).generator = torch.Generator()
        return loader

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # Decoded images become inputs by the transform of their dataset. `training` tells which dataset that is; the
        # `stage` in the batch tells whether to augment.
        inputs = super()._prepare_inputs(inputs)
        eval_dataset = getattr(self.callback_handler.eval_dataloader, "dataset", None)
        dataset: Any = self.train_dataset if self.model.training else eval_dataset
        is_decoded = hasattr(dataset, "batch_transform") and inputs["pixel_values"].dtype == torch.uint8
        return dataset.batch_transform(inputs) if is_decoded else inputs

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        args, dataset = self.args, cast(Any, self.train_dataset if train_dataset is None else train_dataset)
        if not isinstance(dataset, ImageClassificationDataset):
            return super()._get_train_sampler(train_dataset)
        batch_size = self._train_batch_size * args.world_size
        batches = len(dataset) // batch_size if args.dataloader_drop_last else math.ceil(len(dataset) / batch_size)
        steps_per_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
        epochs = args.max_steps / steps_per_epoch if args.max_steps > 0 else args.num_train_epochs
        self.sampler = EpochSampler(
            len(dataset),
            args.seed if args.data_seed is None else args.data_seed,
            batch_size * args.gradient_accumulation_steps,
            lambda epochs_done: self.stage(max(epochs_done / epochs, self.clock.progress)),
            dataset.labels.numpy() if args.balanced_sampling else None,
        )
        return self.sampler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the batches of one optimizer step, and remember how many images they hold together."""
        if self.control.should_training_stop:  # since `on_train_begin`; the stock loop would make a step
            return [], None
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._images_in_step = sum(len(batch["pixel_values"]) for batch in batches)
        return batches, num_items

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, in training weighted so that every image of an optimizer step counts the same.

        The stock Trainer divides it by the number of accumulated batches, although the last may be smaller. A loss
        that divides by `num_items_in_batch` itself is left alone.
        """
        output = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        divides_itself = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not model.training or not self._images_in_step or (divides_itself and num_items_in_batch is not None):
            return output
        weight = len(inputs["pixel_values"]) * self.current_gradient_accumulation_steps / self._images_in_step
        return (output[0] * weight, *output[1:]) if isinstance(output, tuple) else output * weight

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Make one forward and backward pass; uncompiled for a smaller batch, which would be compiled anew."""
        if not self.has_seen_batch:
            self.has_seen_batch = True
            self.restart_throughput()
        self._images_since_log += len(inputs["pixel_values"])
        with self.uncompiled_if(len(inputs["pixel_values"]) < self._train_batch_size):
            return super().training_step(model, inputs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: the stock estimate is made for text, and walks the whole model at every step."""
        return 0

    # Evaluation and log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the throughput of training since the last line, and the minutes of the whole run."""
        if "loss" in logs and self.has_seen_batch:
            seconds = time.perf_counter() - self._counted_since
            logs["images_per_second"] = round(self._images_since_log * self.args.world_size / seconds, 1)
            self.restart_throughput()
        if self.is_in_train:
            logs["minutes"] = round(self.clock.minutes, 4)
        with suppress(BrokenPipeError):  # Ctrl-C also ends `tee`, before the last checkpoint
            super().log(logs, start_time)
        logs.pop("minutes", None)  # or a hyperparameter search would add them to the metrics

    def restart_throughput(self) -> None:
        """Count images and time anew: those of an evaluation or a save do not count."""
        self._images_since_log, self._counted_since = 0, time.perf_counter()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the averaged weights if there are any, uncompiled: each batch size would be compiled anew."""
        self.wait_for_push_before_forking()
        with self._averaged(), self.uncompiled_if(True):
            # With several devices, repeated images fill up the last batch, and the stock loss counts them twice. The
            # loss of `compute_metrics` replaces it, but there is none for regression and masked images.
            output = super().evaluation_loop(*args, **kwargs)
        self.restart_throughput()
        return output

    # Checkpoints. `train` sets `save_total_limit` to None, so the stock Trainer deletes none. The stock Trainer calls
    # `save_model` first, so ours opens the checkpoint; then it writes the rest. `close_checkpoint` writes checksums
    # and deletes old checkpoints: before a push, if there is one, otherwise at `on_save`. After an exception, an
    # open checkpoint stays incomplete, or is deleted if the disk is full.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the averaged weights if there are any; in a checkpoint, the trained weights beside them."""
        if _internal_call and output_dir is not None:  # the stock Trainer begins a checkpoint
            self._unfinished_checkpoint = Path(output_dir)
            if self.args.should_save:  # remove an earlier save of this step, even a complete one
                delete_checkpoint(Path(output_dir))
            self.accelerator.wait_for_everyone()
        with self._averaged():
            super().save_model(output_dir, _internal_call)
        if self._unfinished_checkpoint is not None and self.ema is not None and self.args.should_save:
            safetensors.torch.save_model(self.model, str(self._unfinished_checkpoint / TRAINED_WEIGHTS))

    def close_checkpoint(self) -> None:
        """Make the open checkpoint complete, once all processes have written their parts of it."""
        if self._unfinished_checkpoint is None:
            return
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            # After a stop, this step may be saved once more, so older checkpoints stay until the run is resumed.
            limit = None if self.stopped else self._save_total_limit
            finish_checkpoint(self._unfinished_checkpoint, None if best is None else Path(best), limit)
        self.accelerator.wait_for_everyone()
        if self.args.load_best_model_at_end and not (self._unfinished_checkpoint / CHECKSUMS).is_file():
            raise UserError(
                f"Process {self.args.process_index} does not see {self._unfinished_checkpoint}, which may be the best "
                "model. Share --output_dir between the machines, or give --load_best_model_at_end false."
            )
        self._unfinished_checkpoint = None

    def _load_best_model(self) -> None:
        # The stock Trainer would load a damaged file without a word.
        refuse_damage(Path(cast(str, self.state.best_model_checkpoint)))
        super()._load_best_model()
        self.ema = None  # the best model is an average already

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # With a warning alone a run goes on from a mixture of loaded and new weights (transformers issue 43701).
        if load_result.missing_keys or load_result.unexpected_keys:
            raise UserError(
                "A checkpoint must hold exactly the model's tensors. "
                f"Missing: {load_result.missing_keys or 'none'}; unexpected: {load_result.unexpected_keys or 'none'}. "
                "Resume with the configuration that the checkpoint was made with. A model whose saved names differ "
                "from its own, such as transformers' ViT, needs --save_strategy no."
            )

    # The Hub

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The stock Trainer would push a checkpoint that is not complete. All processes come here, as it waits for all.
        self.close_checkpoint()
        self.pushed_checkpoint = Path(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)

    def wait_for_push_before_forking(self) -> None:
        """Wait for a push before worker processes start: they would inherit a lock that it may hold, and hang."""
        if self.args.dataloader_num_workers:
            self._finish_current_push()

    def create_model_card(self, **given: Any) -> None:  # type: ignore[override]  # as the Trainer itself calls it
        """Write our card, with `license`, `model_name` and `tags`; models of other classes get the stock one."""
        if not isinstance(self.model, ViTScratchPreTrainedModel):  # such as an adapter, whose card names its base
            super().create_model_card(**given)
        elif self.is_world_process_zero():
            make_run_card(self, **given)

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ema is None else self.ema.swapped(self.model)

    def uncompiled_if(self, condition: bool) -> AbstractContextManager[Any]:
        """Return a context in which compiled layers are not used if the condition holds."""
        eager = self.optimization is not None and self.optimization.compiled and condition
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()
