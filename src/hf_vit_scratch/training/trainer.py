"""What training a Vision Transformer from scratch needs beyond the stock Trainer."""

import json
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DynamoBackend
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TrainerState
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    HubStrategy,
    IntervalStrategy,
    SaveStrategy,
    get_last_checkpoint,
)
from transformers.training_args import OptimizerNames

from ..data.dataset import BatchTransform, ImageClassificationDataset, collate
from ..data.sampler import EpochSampler
from ..data.streaming import ImageClassificationStream
from ..errors import UserError
from ..evaluation.model_card import make_card, make_short_card
from ..model.modeling_vit_scratch import ViTScratchLayer, ViTScratchPreTrainedModel
from ..speed.hardware import can_compile, choose_muon_dtype, keep_freed_memory
from ..speed.linear import use_faster_linear
from .arguments import ViTTrainingArguments
from .checkpointing import publish, refuse_damage
from .ema import EMA
from .graceful_stop import GracefulStop
from .loss_watch import LossWatch
from .optimizers import MuonWithAdamW, decayed_parameters, parameter_groups, schedule_by_progress
from .progress_bar import ProgressByTime
from .run_directory import STAGING

logger = logging.getLogger(__name__)

# Beside the Trainer's own files in a checkpoint.
TRAINED_WEIGHTS = "trained_weights.safetensors"  # where model.safetensors holds their average
PROGRESS_NAME = "progress.json"


class _Hooks(TrainerCallback):
    """The Trainer's events, handed to `ViTTrainer`."""

    def __init__(self, trainer: "ViTTrainer"):
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_push_before_forking("train")
        if self.trainer.sampler is not None:
            self.trainer.sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.after_step(control)
        self._log_first(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log_first(control)

    @staticmethod
    def _log_first(control: Any) -> None:
        # The log comes before an evaluation and a checkpoint, and refuses a loss that is not finite.
        control.should_log |= control.should_evaluate or control.should_save


class ViTTrainer(Trainer):
    """The stock `Trainer` with what the best recipes need, and with exact losses and exact resumption.

    Added: the optimizer of `optimizers.py`, a moving average of the weights, training for a given time,
    the stages of `ImageClassificationDataset`, batches weighted by their images, whole checkpoints or none, the links
    `best` and `last` to them, a stop at SIGTERM and at a loss that is not finite, and throughput in the log.

    Args:
        args: Arguments of the stock Trainer.
        stage: The stage of training from the share of it that is done.
        kwargs: Options of the stock Trainer; `args` must be `ViTTrainingArguments`.
    """

    args: ViTTrainingArguments
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    # For `call_model_init`, which the stock constructor calls.
    _layers_are_compiled = False
    _ema: EMA | None = None

    def __init__(self, *args: Any, stage: Callable[[float], int] = lambda progress: 0, **kwargs: Any):
        training_args = kwargs.get("args", args[1] if len(args) > 1 else None)
        if not isinstance(training_args, ViTTrainingArguments):
            raise UserError(f"args must be ViTTrainingArguments, got {type(training_args).__name__}.")
        if len(args) < 3 and kwargs.get("data_collator") is None:  # the third argument of the stock Trainer
            kwargs["data_collator"] = collate
        super().__init__(*args, **kwargs)
        use_faster_linear(self.model)
        self.add_callback(_Hooks(self))
        if self.args.task == "image-classification":
            self.add_callback(LossWatch())
        if self.args.max_train_minutes is not None and self.pop_callback(ProgressCallback):
            self.add_callback(ProgressByTime(lambda: self._progress))
        self.stage = stage
        self.sampler: EpochSampler | None = None
        self.batch_transform: BatchTransform | None = None
        self.stopped = False  # by SIGTERM
        self._stop = GracefulStop(self.args)
        self._images_in_step = self._batches_in_step = 0
        self._images = 0  # trained on in this process since the last log
        self._logged_time: float | None = None
        self._seconds_before = 0.0  # of training, in the runs that this one resumes
        self._start_time = 0.0
        self._progress = 0.0
        self._first_bad_step = torch.tensor(torch.inf)
        self._staging = False
        self._workers_started: set[str] = set()
        self._layers_are_compiled = self.args.torch_compile and self._compile_layers(self.model)
        if self.is_fsdp_enabled:
            # At every step, of the patch embedding, whose output we do not change in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        if self.args.ema_decay is not None and self.is_fsdp_enabled:
            raise UserError("ema_decay does not work with FSDP yet. Leave it out, or train with DDP.")

    @property
    def has_started(self) -> bool:
        """Whether training has come to its first step."""
        return self._logged_time is not None

    def _compile_layers(self, model: nn.Module) -> bool:
        """Compile one layer for all of them, which takes a fraction of the time that the whole model takes.

        Only full training batches then run compiled; each other size would be compiled for itself. Layers that differ,
        by their stochastic depth, stay with the stock Trainer, which compiles the model whole.

        Returns:
            Whether they were compiled.
        """
        layers = [module for module in model.modules() if isinstance(module, ViTScratchLayer)]
        if len({layer.drop_path.drop_prob for layer in layers}) != 1:
            return False
        self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # or accelerate compiles the model as well
        backend = cast(str, self.args.torch_compile_backend)
        if backend == "inductor" and not can_compile(self.args.device.type):
            logger.warning(
                "torch_compile needs a C++ compiler and Python's header files, which were not found (Debian: "
                "apt install g++ python3-dev): training goes on without it, and takes longer."
            )
            return False
        for layer in layers:
            layer.compile(backend=backend, mode=self.args.torch_compile_mode, dynamic=False)
        return True

    def _uncompiled_if(self, condition: bool) -> AbstractContextManager[Any]:
        eager = self._layers_are_compiled and condition
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()

    # Training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as the stock Trainer does; at the end the model holds the averaged weights if there are any.

        Raises:
            UserError: The loss is not finite, or a checkpoint does not fit.
        """
        if resume_from_checkpoint is True:  # the stock Trainer looks for it later, and says if there is none
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        checkpoint = None if isinstance(resume_from_checkpoint, bool | None) else Path(resume_from_checkpoint)
        if checkpoint is not None and checkpoint.is_dir() and not (checkpoint / SCHEDULER_NAME).is_file():
            raise UserError(
                f"{checkpoint} holds the model alone, as of --save_only_model. A run cannot be resumed from it; "
                f"a new one can start from it: --model {checkpoint}."
            )
        self._logged_time = None
        self.stopped = self._stop.requested = False
        self._start_time = time.perf_counter()
        if keep_freed_memory():
            logger.info("Memory that a step frees is kept for the next one (any MALLOC_ variable prevents it).")
        self._progress, self._seconds_before, self._ema = 0.0, 0.0, None
        self._first_bad_step = torch.tensor(torch.inf)
        if isinstance(self.train_dataset, ImageClassificationStream):
            self.train_dataset.first_batch = 0
        if self.args.should_save:
            shutil.rmtree(Path(self.args.output_dir) / STAGING, ignore_errors=True)
        if self.args.ema_decay is not None:
            self._ema = EMA(self.model, self.args.ema_decay)
        if checkpoint is not None:
            resume_from_checkpoint = str(checkpoint)
            self._load_progress(checkpoint)
            if isinstance(self.train_dataset, ImageClassificationStream) and not self.args.ignore_data_skip:
                state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
                self.train_dataset.first_batch = state.global_step * self.args.gradient_accumulation_steps
        best_was_loaded = False
        try:
            with self._stop.listening():
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            # It is an averaged one already.
            best_was_loaded = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
        finally:  # also where it was interrupted
            if self._ema is not None and self._ema.steps and not best_was_loaded:
                self._ema.swap(self.model)
            self._ema, self._images_in_step = None, 0
        return output

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`, compiled and averaged as the one that it takes the place of."""
        model = use_faster_linear(super().call_model_init(trial))
        if self._layers_are_compiled:
            self._compile_layers(model)
        if self._ema is not None:
            steps = self._ema.steps
            self._ema = EMA(model.to(self.args.device), cast(float, self.args.ema_decay))
            self._ema.steps = steps
        return model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay applies to."""
        return decayed_parameters(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW as the arguments say, or Muon with it; with layer-wise learning rates."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            groups = parameter_groups(
                self.model,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                layer_decay=self.args.layer_decay,
                muon=self.args.muon,
                muon_learning_rate=self.args.muon_learning_rate,
            )
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if self.args.muon:
                if optimizer_class is not torch.optim.AdamW:
                    raise UserError(
                        f"muon goes together with AdamW only, got optim {OptimizerNames(self.args.optim).value}."
                    )
                dtype = self.args.muon_dtype or choose_muon_dtype(self.args.device.type)
                self.optimizer = MuonWithAdamW(groups, muon_dtype=getattr(torch, dtype), **options)
            else:
                self.optimizer = optimizer_class(groups, **options)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The stock schedule; with `max_train_minutes` it follows the clock where that is ahead of the steps."""
        if self.args.max_train_minutes is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = schedule_by_progress(
            self.args.lr_scheduler_type,
            optimizer or self.optimizer,
            lambda: self._progress,
            self.args.get_warmup_steps(num_training_steps) / num_training_steps,
            cast(dict[str, Any] | None, self.args.lr_scheduler_kwargs),
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(dataset, ImageClassificationDataset | ImageClassificationStream):  # that of training serves all
            self.batch_transform = getattr(self.train_dataset, "batch_transform", dataset.batch_transform)
        if isinstance(dataset, ImageClassificationStream):
            # It makes batches, for this process alone; accelerate would share them out once more.
            dataset.batch_size = self._train_batch_size  # `auto_find_batch_size` may have changed it
            names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")
            options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
            return DataLoader(dataset, batch_size=None, collate_fn=collate, **options)
        if isinstance(dataset, ImageClassificationDataset) and dataset.cache_on_device(self.args.device):
            # Worker processes would have nothing to do, and what is on the device cannot be pinned.
            sampler, drop_last = sampler_fn and sampler_fn(dataset), self.args.dataloader_drop_last
            loader: Any = DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, drop_last=drop_last)
            return self.accelerator.prepare(loader)
        return super()._get_dataloader(dataset, description, batch_size, sampler_fn, *args, **kwargs)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to the device, and make the model's inputs of decoded images there."""
        inputs = super()._prepare_inputs(inputs)
        if self.batch_transform is not None and inputs["pixel_values"].dtype == torch.uint8:
            inputs = self.batch_transform(inputs)
        return inputs

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows = self.train_dataset if train_dataset is None else train_dataset
        if not isinstance(rows, ImageClassificationDataset):
            return super()._get_train_sampler(train_dataset)
        args = self.args
        batch_size = max(1, self._train_batch_size * args.world_size)  # what is less, torch refuses
        batches = len(rows) // batch_size if args.dataloader_drop_last else math.ceil(len(rows) / batch_size)
        steps_per_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
        epochs = args.max_steps / steps_per_epoch if args.max_steps > 0 else args.num_train_epochs
        seed = args.seed if args.data_seed is None else args.data_seed
        self.sampler = EpochSampler(
            len(rows),
            seed,
            batch_size * args.gradient_accumulation_steps,
            lambda passed: self.stage(max(passed / epochs, self._progress)),
        )
        return self.sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        # The stock loop would train one step more when a run that has ended is resumed.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of one optimizer step; remember how many images they hold together."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._images_in_step = sum(find_batch_size(batch) for batch in batches)
        self._batches_in_step = len(batches)
        return batches, num_items

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss, in training weighted so that every image of an optimizer step counts the same.

        The Trainer takes the mean of the means of the batches that it accumulates, of which the last may be smaller;
        but for a loss that takes the number of images of the step itself.
        """
        output = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        takes_number = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not model.training or not self._images_in_step or (takes_number and num_items_in_batch is not None):
            return output
        weight = len(inputs["pixel_values"]) * self._batches_in_step / self._images_in_step
        return (output[0] * weight, *output[1:]) if isinstance(output, tuple) else output * weight

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One forward and backward pass; remember the first step whose loss is not finite, without waiting for it."""
        if self._logged_time is None:
            self._images, self._logged_time = 0, time.perf_counter()
        self._images += len(inputs["pixel_values"])
        with self._uncompiled_if(len(inputs["pixel_values"]) < self._train_batch_size):
            loss = super().training_step(model, inputs, *args, **kwargs)
        step = torch.where(torch.isfinite(loss), torch.inf, self.state.global_step + 1)
        self._first_bad_step = torch.minimum(step, self._first_bad_step.to(step.device))
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Nothing: the stock estimate is made for text, and walks the whole model at every step."""
        return 0

    def after_step(self, control: Any) -> None:
        """What follows an optimizer step: the average, the clock, and a stop that was asked for."""
        if self._ema is not None:
            self._ema.update(self.model)
        if self.args.max_train_minutes is not None:
            share = torch.tensor([self._minutes_trained() / self.args.max_train_minutes], device=self.args.device)
            if self.args.world_size > 1:
                torch.distributed.broadcast(share, src=0)  # all must follow one clock
            self._progress = min(1.0, max(share.item(), self.state.global_step / self.state.max_steps))
            if self._progress >= 1:  # what the stock Trainer does at the last step
                control.should_training_stop = True
                control.should_evaluate |= self.args.eval_strategy == IntervalStrategy.STEPS
                control.should_save |= self.args.save_strategy == SaveStrategy.STEPS
        if self._stop.agreed(self.state.global_step):
            self.stopped = control.should_save = control.should_training_stop = True

    def _minutes_trained(self, now: float | None = None) -> float:
        return (self._seconds_before + (now or time.perf_counter()) - self._start_time) / 60

    def _with_average(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ema is None else self._ema.swapped(self.model)

    # Evaluation and log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the throughput since the last line, without evaluation and saving, and the minutes that all took.

        Raises:
            UserError: The loss is not finite.
        """
        if self.is_in_train and not math.isfinite(logs.get("loss", 0.0)):
            self._refuse_loss(logs["loss"])
        now = time.perf_counter()
        if "loss" in logs and self._logged_time is not None:
            logs["images_per_second"] = round(self._images * self.args.world_size / (now - self._logged_time), 1)
            self._images, self._logged_time = 0, now
        if self.is_in_train:
            logs["minutes"] = round(self._minutes_trained(now), 2)
        super().log(logs, start_time)
        logs.pop("minutes", None)  # a search for hyperparameters would add it to the metrics that it is for

    def _refuse_loss(self, loss: float) -> None:
        last = Path(self.args.output_dir) / "last"
        good = f"The last good checkpoint is {last.resolve()}" if last.exists() else "No checkpoint was saved yet"
        raise UserError(
            f"The loss is {loss} since step {int(self._first_bad_step)}. {good}. The likely cause is a learning rate "
            f"that is too high (now {self._get_learning_rate():.3g}), too short a warm-up, or 16-bit precision: try a "
            "lower --learning_rate, a longer --warmup_steps, --qk_norm true, or a lower --max_grad_norm."
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the averaged weights if there are any; every image counts once in the loss."""
        with self._clock_stopped(), self._with_average(), self._uncompiled_if(True):
            self.finish_push_before_forking("evaluation")
            output = super().evaluation_loop(*args, **kwargs)
        metrics = cast(dict[str, float], output.metrics)
        for name in list(metrics):
            # The stock mean counts the images twice with which a last batch is filled up for many devices.
            if name.endswith("_exact_loss"):
                metrics[name.replace("_exact_loss", "_loss")] = metrics.pop(name)
        return output

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside and then give it its name, so that one with a name is whole."""
        run_dir = Path(super()._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staged, final = run_dir / STAGING / name, run_dir / name
        try:
            with self._clock_stopped():
                if self.args.should_save:
                    staged.mkdir(parents=True, exist_ok=True)
                    self._save_progress(staged)
                self._staging = True
                with self._with_average():
                    super()._save_checkpoint(model, trial)
                self._staging = False
                self.accelerator.wait_for_everyone()
                best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
                if self.state.best_global_step and (best == final or best.is_dir()):
                    self.state.best_model_checkpoint = str(best)  # the stock Trainer has looked beside `staged`
                if self.args.should_save:
                    self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
                    publish(staged, final, Path(self.state.best_model_checkpoint or ""), self.args.save_total_limit)
                self.accelerator.wait_for_everyone()
                if self.args.push_to_hub:
                    self._push_from_checkpoint(str(final))
        except (OSError, RuntimeError) as error:
            self._staging = False
            if not isinstance(error, OSError) and "No space left" not in str(error):
                raise
            shutil.rmtree(run_dir / STAGING, ignore_errors=True)
            last = run_dir / "last"
            kept = f"{last.resolve()} is whole" if last.exists() else "there is none yet"
            raise UserError(f"{final} cannot be written: {error}. The last checkpoint: {kept}.") from error

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = super()._get_output_dir(trial)
        return os.path.join(run_dir, STAGING) if self._staging else run_dir

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository on the Hub.

        Raises:
            UserError: The Hub cannot be reached, or refuses.
        """
        try:
            super().init_hf_repo(*args, **kwargs)
        except Exception as error:  # the client has many kinds
            reason = " ".join(str(error).split())
            raise UserError(f"The Hub cannot be reached, or refuses: {reason} ({type(error).__name__}).") from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint, once it has its name; with the model's code, which the stock Trainer leaves out."""
        # While staging this was asked by `super()._save_checkpoint`; at the end everything is pushed.
        if self._staging or self.args.hub_strategy == HubStrategy.END:
            return
        if self.is_world_process_zero():
            if self.args.hub_always_push:
                self._finish_current_push()  # it still reads the files that this one replaces
            elif self.push_in_progress is not None and not self.push_in_progress.is_done():
                return  # as the stock one, which must not decide otherwise a moment later
            output_dir = Path(self.args.output_dir)
            for code in Path(checkpoint_folder).glob("*.py"):
                shutil.copyfile(code, output_dir / code.name)
            if not (output_dir / "README.md").exists():  # an earlier push may still be reading it
                self.create_model_card()
        super()._push_from_checkpoint(checkpoint_folder)

    def finish_push_before_forking(self, purpose: str) -> None:
        """Wait for a push before worker processes start, which could else hang for ever.

        huggingface_hub closes its connections in every forked process, by a lock that the thread of the push may have
        held at that moment. Workers that persist start once.
        """
        started = self.args.dataloader_persistent_workers and purpose in self._workers_started
        if self.args.dataloader_num_workers and not started:
            self._workers_started.add(purpose)
            self._finish_current_push()

    def create_model_card(  # type: ignore[override]  # by keywords only, as the Trainer itself calls it
        self, *, license: str | None = None, model_name: str | None = None, **kwargs: Any
    ) -> None:
        """Write the card of `hf_vit_scratch.evaluation.model_card` where the stock Trainer would write its own.

        Args:
            license: An identifier of the Hub; by default that of the arguments.
            model_name: By default the name of the run's folder.
            kwargs: Options of the stock Trainer, used for models of other classes only.
        """
        if not isinstance(self.model, ViTScratchPreTrainedModel):  # an adapter, whose card names its base
            super().create_model_card(license=license, model_name=model_name, **kwargs)
            return
        if not self.is_world_process_zero():
            return
        output_dir, license = Path(self.args.output_dir), license or self.args.license
        name = model_name or output_dir.resolve().name
        if self.args.task == "image-classification" and (output_dir / "metrics.json").is_file():
            make_card([output_dir], output_dir / "README.md", name=name, license=license)
            return
        status = "It was not tested."
        if self.is_in_train:
            status = "Its training goes on: these weights are not the last ones."
        elif self.args.task == "masked-image-modeling":
            status = "It was trained without labels, to paint what was masked; it is a start for other training."
        make_short_card(self.model, output_dir / "README.md", name=name, status=status, license=license)

    def _save_progress(self, folder: Path) -> None:
        """What the Trainer does not keep: the time spent, and the trained weights where the average is the model."""
        seconds = 60 * self._minutes_trained()
        averaged = 0 if self._ema is None else self._ema.steps
        if averaged:
            state = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
            save_file(state, folder / TRAINED_WEIGHTS, metadata={"format": "pt"})
        (folder / PROGRESS_NAME).write_text(json.dumps({"seconds": seconds, "averaged_steps": averaged}))

    def _load_progress(self, folder: Path) -> None:
        try:
            progress = json.loads((folder / PROGRESS_NAME).read_text())
        except FileNotFoundError:  # a checkpoint of the stock Trainer
            progress = {"seconds": 0.0, "averaged_steps": 0}
        self._seconds_before = progress["seconds"]
        if bool(progress["averaged_steps"]) != (self._ema is not None):
            raise UserError(
                f"{folder} was saved {'with' if progress['averaged_steps'] else 'without'} a moving average of the "
                "weights. Resume with the same --ema_decay."
            )
        if self._ema is not None:
            self._ema.steps = progress["averaged_steps"]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        refuse_damage(Path(resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._ema is not None:  # the file of the model holds the average
            self._ema.average.module.load_state_dict(self.model.state_dict())
            trained = load_file(Path(resume_from_checkpoint) / TRAINED_WEIGHTS)
            self._issue_warnings_after_load(self.model.load_state_dict(trained, strict=False))

    def _load_best_model(self) -> None:
        refuse_damage(Path(cast(str, self.state.best_model_checkpoint)))
        super()._load_best_model()

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._logged_time is not None:
            self._logged_time += time.perf_counter() - start

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that does not hold exactly this model's tensors; the stock Trainer only warns.

        Called after resuming and after the best model is loaded. With a warning alone a run goes on from a mixture of
        loaded and fresh weights (https://github.com/huggingface/transformers/issues/43701).

        Raises:
            UserError: Names the tensors that are missing or too many.
        """
        if load_result.missing_keys or load_result.unexpected_keys:
            raise UserError(
                "A checkpoint must hold exactly the model's tensors. "
                f"Missing: {load_result.missing_keys or 'none'}; unexpected: {load_result.unexpected_keys or 'none'}. "
                "Resume with the configuration that the checkpoint was made with; a model that transformers saves "
                "under other names than its own, as it does its ViT, cannot be loaded back: --save_strategy no."
            )


@contextmanager
def advising_on_memory(args: ViTTrainingArguments) -> Iterator[None]:
    """Say what to change when memory runs out.

    Raises:
        UserError: In the place of torch's `OutOfMemoryError`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        raise UserError(
            f"The device ran out of memory with {batch} images per batch. The same result comes from smaller batches: "
            f"--per_device_train_batch_size {max(1, batch // 2)} --gradient_accumulation_steps {2 * steps}. Or use "
            "--gradient_checkpointing true, --bf16 true, a smaller --image_size, or --auto_find_batch_size true."
        ) from error
