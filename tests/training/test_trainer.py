"""The Trainer's promises: what decays, what a resumed run restores, and what a loss counts for."""

import dataclasses
import inspect
import itertools
import math
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from helpers import TINY
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.data import dataset as data
from hf_vit_scratch.data.augmentation import training_stages
from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.data.sources import load_digits
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.metrics import compute_metrics
from hf_vit_scratch.model.modeling_vit_scratch import ViTScratchLayer
from hf_vit_scratch.training import optimizers, steps
from hf_vit_scratch.training import trainer as trainer_module
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.checkpointing import find_checkpoint, finish_checkpoint
from hf_vit_scratch.training.loss_watch import LossWatch
from hf_vit_scratch.training.optimizers import decayed_parameters
from hf_vit_scratch.training.recipe import Recipe
from hf_vit_scratch.training.trainer import ViTTrainer

KINDS = {"single_label": {}, "multi_label": {"multi_label": True}, "mixed": {"mixed": True}}
STYLES = pytest.mark.parametrize("norm_first", [False, True], ids=["post_ln", "pre_ln"])


class RandomImages(torch.utils.data.Dataset):
    """Noise with labels: single ones, or several where `multi_label`."""

    def __init__(self, size=24, multi_label=False, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.pixel_values = torch.randn(size, 3, 16, 24, generator=generator)
        self.labels = torch.randint(0, 5, (size,), generator=generator)
        if multi_label:
            self.labels = torch.randint(0, 2, (size, 5), generator=generator).float()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixel_values[index], "labels": self.labels[index]}


def mixed_digits():
    """Real images, augmented and mixed as in training; the sampler and the dataset are those of `train.py`."""
    stages, stage = training_stages((16, 24), translate=0.1, augmentation_off_fraction=0.3)
    mixing = Mixup(5, mixup_alpha=0.4, cutmix_alpha=1.0, mixup_prob=0.8, label_smoothing=0.1)
    rows = load_digits()["train"].filter(lambda row: row["label"] < 5).select(range(24))
    processor = ViTImageProcessor(size={"height": 16, "width": 24}, do_convert_rgb=True)
    return ImageClassificationDataset(rows, BatchTransform(processor, stages, mixing)), stage


def make_trainer(output_dir, fields=None, multi_label=False, mixed=False, **arguments):
    torch.manual_seed(1)
    problem = {"problem_type": "multi_label_classification"} if multi_label else {}
    model = ViTScratchForImageClassification(ViTScratchConfig(**TINY | (fields or {}) | problem))
    defaults = {"max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "weight_decay": 0.1,
                "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "logging_steps": 1,
                "disable_tqdm": True, "use_cpu": True, "save_total_limit": None}  # fmt: skip
    return ViTTrainer(
        model=model,
        args=ViTTrainingArguments(output_dir=str(output_dir), **defaults | arguments),
        **(
            {"train_dataset": RandomImages(multi_label=multi_label)}
            if not mixed
            else dict(zip(("train_dataset", "stage"), mixed_digits(), strict=True))
        ),
        eval_dataset=RandomImages(15, multi_label, seed=1),
        compute_metrics=None if multi_label else compute_metrics,
    )


def test_trainer_that_only_evaluates_measures_no_training(tmp_path):
    args = ViTTrainingArguments(output_dir=str(tmp_path), max_steps=10**6, use_cpu=True)
    trainer = ViTTrainer(
        ViTScratchForImageClassification(ViTScratchConfig(**TINY)), args, eval_dataset=RandomImages(15, seed=1)
    )
    assert trainer.optimization.ratios == {}


class At(TrainerCallback):
    """Does something at a step, to which it gives the control of the run."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.do(control)


class EarlierIsBetter(TrainerCallback):
    """Adds a metric by which the first model is the best, whatever the numbers do on a machine."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_earliness"] = -state.global_step


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_get_dataloader", "dataset description batch_size sampler_fn is_training dataloader_key"),
        ("_get_train_sampler", "train_dataset"),
        ("_issue_warnings_after_load", "load_result"),
        ("_load_best_model", ""),
        ("_prepare_inputs", "inputs"),
        ("_push_from_checkpoint", "checkpoint_folder"),
    ],
)
def test_private_methods_that_are_overridden_are_those_of_the_stock_trainer(name, parameters):
    assert name in vars(ViTTrainer)
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == ["self", *parameters.split()]


def test_no_other_private_method_of_the_stock_trainer_is_overridden():
    private = {name for name in vars(ViTTrainer).keys() & vars(Trainer).keys() if name[0] == "_" and name[1] != "_"}
    assert len(private) <= 6


def test_users_learning_rate_is_that_of_the_users_optimizer(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 0.25})

    assert {group["lr"] for group in trainer.create_optimizer().param_groups} == {0.25}


def test_two_early_stoppings_are_refused(tmp_path):
    args = ViTTrainingArguments(output_dir=str(tmp_path), early_stopping_patience=2)
    given = {"train_dataset": RandomImages(), "eval_dataset": RandomImages(), "callbacks": [EarlyStoppingCallback(3)]}

    with pytest.raises(UserError, match=r"^early_stopping_patience adds an EarlyStoppingCallback\. Leave one"):
        ViTTrainer(make_trainer(tmp_path).model, args, **given)


@pytest.mark.parametrize("option", ["split_batches", "dispatch_batches"])
def test_batches_that_accelerate_would_divide_are_refused(option, tmp_path):
    with pytest.raises(UserError, match=r"^accelerator_config must not split or dispatch batches"):
        ViTTrainingArguments(output_dir=str(tmp_path), accelerator_config={option: True})


def test_model_without_a_configuration_is_trained(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3 * 16 * 24, 5)

        def forward(self, pixel_values, labels):
            logits = self.linear(pixel_values.flatten(1))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    args = make_trainer(tmp_path, max_steps=20, learning_rate=0.0).args  # the loss is watched after a tenth of them
    trainer = ViTTrainer(Net(), args, train_dataset=RandomImages(), eval_dataset=RandomImages())

    assert trainer.train().global_step == 20


def test_checkpoint_that_another_machine_keeps_is_missed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "finish_checkpoint", lambda *given: None)
    trainer = make_trainer(
        tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
    )

    with pytest.raises(
        UserError, match=r"^Process 0 does not see .*checkpoint-2, which may be the best model\. Share"
    ):
        trainer.train()


def test_stop_in_the_last_step_of_a_part_of_an_epoch_keeps_its_evaluation(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4, save_strategy="epoch", eval_strategy="epoch")
    trainer.add_callback(At(3, lambda control: os.kill(os.getpid(), signal.SIGTERM)))  # heeded after the last step

    trainer.train()  # three steps in an epoch

    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [3, 4]


@STYLES
def test_only_the_weights_of_matrices_decay(norm_first, tmp_path):
    trainer = make_trainer(tmp_path, {"norm_first": norm_first, "qk_norm": True, "classifier_hidden_size": 20})

    decayed = set(decayed_parameters(trainer.model))

    undecayed = {name for name, _ in trainer.model.named_parameters()} - decayed
    last = set() if not norm_first else {"vit.layernorm.weight", "vit.layernorm.bias"}
    first = set() if norm_first else {"vit.embeddings.layernorm.weight", "vit.embeddings.layernorm.bias"}
    biases = ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2",
              "layernorm_before", "layernorm_after"]  # fmt: skip
    weights = ["layernorm_before", "layernorm_after", "attention.q_norm", "attention.k_norm"]
    assert undecayed == first | last | {
        "vit.embeddings.cls_token", "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection.bias", "pre_logits.0.bias", "classifier.bias",
        *(f"vit.layers.{i}.{name}.bias" for i in range(2) for name in biases),
        *(f"vit.layers.{i}.{name}.weight" for i in range(2) for name in weights),
    }  # fmt: skip


@pytest.mark.parametrize(
    "chosen", [None, (torch.optim.SGD, {"momentum": 0.9})], ids=["by the arguments", "by the user"]
)
def test_optimizer_decays_the_weights_of_matrices(chosen, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.optimizer_cls_and_kwargs = chosen
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}

    optimizer = trainer.create_optimizer()
    groups = optimizer.param_groups

    assert isinstance(optimizer, torch.optim.AdamW if chosen is None else torch.optim.SGD)
    decayed = {names[id(parameter)] for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decayed == set(decayed_parameters(trainer.model))
    assert sum(len(group["params"]) for group in groups) == len(names)


@STYLES
@pytest.mark.parametrize("minutes", [None, 1000.0], ids=["by steps", "by the clock"])
def test_resumed_run_ends_as_the_uninterrupted_one(minutes, norm_first, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "max_train_minutes": minutes}
    whole = make_trainer(tmp_path / "whole", {"norm_first": norm_first, "drop_path_rate": 0.2}, **options)
    whole.train()

    resumed = make_trainer(tmp_path / "resumed", {"norm_first": norm_first, "drop_path_rate": 0.2}, **options)
    torch.nn.init.ones_(resumed.model.vit.layers[0].mlp.fc1.weight)  # whatever it was, the checkpoint decides
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))

    expected, actual = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    for ours, theirs in zip(
        resumed.optimizer.state_dict()["state"].values(), whole.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("loader", ["in this process", "stays"])
def test_evaluations_and_workers_change_no_weight(loader, tmp_path, monkeypatch):
    # Each iterator of a data loader draws a number, which must not be one of those that stochastic depth draws.
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True} if loader == "stays" else {}
    if workers:
        monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)

    def train(eval_strategy, **options):
        trainer = make_trainer(
            tmp_path, {"drop_path_rate": 0.5}, mixed=True, eval_strategy=eval_strategy, eval_steps=2, **options
        )
        trainer.train()
        return trainer.model.state_dict()

    expected, actual = train("no"), train("steps", **workers)

    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [None, "checkpoint-3"])
def test_run_is_resumed_whole_from_true_or_a_path(name, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "ema_decay": 0.9}
    whole = make_trainer(tmp_path / "whole", **options)
    whole.train()
    half = make_trainer(tmp_path / "half", **options)
    half.add_callback(At(3, lambda control: setattr(control, "should_training_stop", True)))  # early in its schedule
    half.train()
    resumed = make_trainer(tmp_path / "half", **options)

    resumed.train(resume_from_checkpoint=True if name is None else tmp_path / "half" / name)

    expected, actual = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert resumed.clock.seconds_before > 0


def test_checkpoint_of_the_model_alone_cannot_be_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    make_trainer(tmp_path, **options).train()
    with pytest.raises(UserError, match=r"checkpoint-6 holds only the model, .* Start a new one: --model"):
        make_trainer(tmp_path, **options).train(resume_from_checkpoint=True)


def test_last_weights_are_evaluated_and_saved_when_the_time_is_over(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=100_000, max_train_minutes=0.01, eval_strategy="steps",
                           eval_steps=50_000, save_strategy="steps", save_steps=50_000)  # fmt: skip
    trainer.train()
    step = trainer.state.global_step
    assert step < 50_000
    assert [logs["step"] for logs in trainer.state.log_history if "eval_loss" in logs] == [step]
    assert (tmp_path / "last").resolve().name == f"checkpoint-{step}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_train_epochs": 10, "max_steps": -1}, [16, 4]),
        ({"max_steps": 20}, [16, 4]),
        ({"max_steps": 20, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, [16, 4]),
        ({"max_steps": 20, "dataloader_drop_last": True}, [16, 4]),
    ],
    ids=str,
)
def test_stages_of_training_follow_the_steps(arguments, expected, tmp_path):
    # 24 images in batches of 16: a pass takes two steps, of which the second is smaller, or is dropped.
    trainer = make_trainer(tmp_path, mixed=True, **{"per_device_train_batch_size": 16} | arguments)
    trainer.stage = lambda progress: int(progress >= 0.8)
    sampler = trainer._get_train_sampler()
    stages = []
    for epoch in range(20):
        sampler.set_epoch(epoch)
        of_images = [sample.stage for sample in sampler]
        stages += of_images[: 16 if "dataloader_drop_last" in arguments else None : 16]
    assert [stages[:20].count(stage) for stage in (0, 1)] == expected


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("minutes", [None, 60.0])
def test_least_rate_of_a_schedule_is_a_rate(minutes, muon, tmp_path):
    trainer = make_trainer(
        tmp_path, muon=muon, max_train_minutes=minutes, lr_scheduler_type="cosine_with_min_lr", learning_rate=1e-2,
        lr_scheduler_kwargs={"min_lr": 1e-3},
    )  # fmt: skip
    trainer.train()
    passed = 1 if minutes is None else 5 / 6  # the clock is read after the rate is set
    expected = 1e-3 + 9e-3 * (1 + math.cos(math.pi * passed)) / 2
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(expected, rel=1e-3)


def test_schedule_that_follows_a_metric_does_not_follow_the_clock(tmp_path):
    trainer = make_trainer(tmp_path, max_train_minutes=1.0, lr_scheduler_type="reduce_lr_on_plateau",
                           eval_strategy="epoch")  # fmt: skip
    with pytest.raises(UserError, match=r"ReduceLROnPlateau follows a metric, not max_train_minutes\."):
        trainer.train()


@pytest.mark.parametrize("task", ["image-classification", "masked-image-modeling"])
def test_arguments_can_be_copied_with_a_change(task, tmp_path):
    arguments = ViTTrainingArguments(str(tmp_path), learning_rate=0.5, task=task)
    copy = dataclasses.replace(arguments, seed=7)
    assert (copy.seed, copy.learning_rate, copy.debug) == (7, 0.5, [])
    assert dataclasses.replace(copy, task="image-classification").label_names == ["labels"]


def test_compiled_model_is_evaluated_with_its_labels(tmp_path):
    trainer = make_trainer(tmp_path)
    compiled = ViTTrainer(
        torch.compile(trainer.model, backend="eager"), trainer.args, eval_dataset=trainer.eval_dataset
    )

    assert compiled.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)


def test_run_without_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"max_steps must be at least 1, or -1 for none, got 0"):
        ViTTrainingArguments(str(tmp_path), max_steps=0)


@pytest.fixture
def with_fsdp(monkeypatch):
    """Let the stock Trainer believe that accelerate spreads the model, with these settings."""
    create = Trainer.create_accelerator_and_postprocess

    def with_fsdp(state_dict_type="StateDictType.FULL_STATE_DICT", fsdp_version=2):
        def create_with_fsdp(self):
            create(self)
            self.is_fsdp_enabled = True
            plugin = SimpleNamespace(state_dict_type=state_dict_type, fsdp_version=fsdp_version)
            monkeypatch.setattr(type(self.accelerator.state), "fsdp_plugin", plugin, raising=False)

        monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create_with_fsdp)

    return with_fsdp


def test_fsdp_that_saves_parts_of_a_model_is_refused(with_fsdp, tmp_path):
    with_fsdp("StateDictType.SHARDED_STATE_DICT")
    with pytest.raises(UserError, match=r"fsdp_state_dict_type must be FULL_STATE_DICT, got .*SHARDED_STATE_DICT"):
        make_trainer(tmp_path)


def test_first_version_of_fsdp_is_refused(with_fsdp, tmp_path):
    with_fsdp(fsdp_version=1)
    with pytest.raises(UserError, match=r"^fsdp_version must be 2, got 1: the first version flattens the parameters"):
        make_trainer(tmp_path)


@pytest.mark.parametrize("name", ["ema_decay", "target_accuracy"])
def test_what_fsdp_cannot_do_is_refused(name, with_fsdp, tmp_path):
    with_fsdp()
    with pytest.raises(UserError, match=rf"{name} does not work with FSDP yet"):
        make_trainer(tmp_path, **{name: 0.9})


def test_card_is_ours_whatever_the_stock_trainer_has_to_say(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.create_model_card(finetuned_from="x", tasks="image-classification", dataset="birds")
    text = (tmp_path / "README.md").read_text()
    assert "This card has no test results." in text
    assert "birds" not in text


def test_card_does_not_take_a_file_of_the_user_for_a_report(tmp_path):
    trainer = make_trainer(tmp_path)
    (tmp_path / "metrics.json").write_text('{"accuracy": 0.9}')
    trainer.create_model_card()
    assert "This card has no test results." in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("process", [0, 1])
def test_processes_draw_different_random_numbers(process, tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(ViTTrainingArguments, "process_index", process)
    trainer = make_trainer(tmp_path, seed=5)
    trainer.add_callback(At(1, lambda control: seeds.append(torch.initial_seed())))

    trainer.train()

    assert seeds == [5 + process]


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("cuda", False)])
def test_copies_of_pinned_memory_do_not_wait(device, waits, tmp_path, monkeypatch):
    monkeypatch.setattr(ViTTrainingArguments, "device", torch.device(device))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device != "cpu")
    assert ViTTrainingArguments(str(tmp_path)).accelerator_config.non_blocking != waits


@STYLES
@pytest.mark.parametrize("ema_decay", [None, 0.5], ids=["trained", "averaged"])
def test_best_model_is_reloaded_whole(ema_decay, norm_first, tmp_path):
    trainer = make_trainer(
        tmp_path, {"norm_first": norm_first}, eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="earliness", greater_is_better=True, ema_decay=ema_decay,
    )  # fmt: skip
    trainer.add_callback(EarlierIsBetter)

    trainer.train()

    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-1"
    saved, state = load_file(best / "model.safetensors"), trainer.model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    losses = [logs["eval_loss"] for logs in trainer.state.log_history if "eval_loss" in logs]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("fault", ["missing", "unexpected"])
def test_checkpoint_with_other_tensors_is_refused(fault, tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3)
    trainer.train()
    file = tmp_path / "checkpoint-3" / "model.safetensors"
    tensors = load_file(file)
    if fault == "missing":
        del tensors["vit.layers.1.mlp.fc2.bias"]
    else:
        tensors["vit.encoder.layer.1.output.dense.bias"] = torch.zeros(32)
    save_file(tensors, file, metadata={"format": "pt"})
    finish_checkpoint(file.parent, best=None, limit=None)  # or the file is refused for being another

    message = r"Missing: .*layers\.1\.mlp\.fc2\.bias" if fault == "missing" else r"unexpected: .*encoder\.layer\.1"
    with pytest.raises(UserError, match=message):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [8, 20], ids=["even", "uneven"])  # 20: an epoch is 10 + 10, then 4 images
def test_accumulated_batches_train_as_one_large_batch_does(kind, batch_size, tmp_path):
    steps = {8: 4, 20: 2}[batch_size]
    whole = make_trainer(tmp_path / "whole", **KINDS[kind], per_device_train_batch_size=batch_size)
    parts = make_trainer(
        tmp_path / "parts", **KINDS[kind], per_device_train_batch_size=batch_size // steps,
        gradient_accumulation_steps=steps,
    )  # fmt: skip

    whole.train()
    parts.train()

    assert len(whole.state.log_history) == len(parts.state.log_history) == 7
    for ours, theirs in zip(parts.state.log_history[:6], whole.state.log_history[:6], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-4)


def test_loss_that_takes_the_number_of_images_is_not_weighted_again(tmp_path):
    def loss_of(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    images = RandomImages(22)
    whole, parts = (
        make_trainer(tmp_path / name, max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        for name, size, steps in (("whole", 22, 1), ("parts", 8, 3))
    )
    for trainer in (whole, parts):
        trainer.train_dataset, trainer.compute_loss_func = images, loss_of
        trainer.train()

    assert parts.state.log_history[0]["loss"] == pytest.approx(whole.state.log_history[0]["loss"], abs=1e-5)
    assert parts.state.log_history[0]["grad_norm"] == pytest.approx(whole.state.log_history[0]["grad_norm"], abs=1e-5)


class Notes(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "notes.json").write_text("{}")


def test_file_that_a_callback_adds_to_a_checkpoint_is_no_damage(tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 3, "save_steps": 3,
               "load_best_model_at_end": True, "metric_for_best_model": "loss"}  # fmt: skip
    trainer = make_trainer(tmp_path, **options)
    trainer.add_callback(Notes)
    trainer.train()
    make_trainer(tmp_path, **options | {"max_steps": 9}).train(resume_from_checkpoint=True)


def test_trainer_that_was_stopped_can_go_on(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(At(2, lambda control: os.kill(os.getpid(), signal.SIGTERM)))
    trainer.train()
    assert (trainer.stopped, trainer.state.global_step) == (True, 3)
    trainer.train(resume_from_checkpoint=True)
    assert (trainer.stopped, trainer.state.global_step) == (False, 6)


def test_ctrl_c_reaches_the_caller_once_the_checkpoint_is_saved(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(At(2, lambda control: os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt, match="^$"):  # or a search over hyperparameters would go on
        trainer.train()
    assert find_checkpoint(True, tmp_path) == tmp_path / "checkpoint-3"


def test_stop_within_an_epoch_saves_once_and_does_not_evaluate(tmp_path):
    saved = []
    trainer = make_trainer(tmp_path, save_strategy="epoch", eval_strategy="epoch")
    finish = trainer.close_checkpoint
    trainer.close_checkpoint = lambda: (saved.append(trainer.state.global_step), finish())
    trainer.add_callback(At(1, lambda control: os.kill(os.getpid(), signal.SIGTERM)))

    trainer.train()  # three steps in an epoch; the signal is heeded at the next one

    assert saved == [2]
    assert not any("eval_loss" in logs for logs in trainer.state.log_history)


def test_stop_at_an_evaluation_saves_also_where_only_the_best_model_is_saved(tmp_path):
    trainer = make_trainer(
        tmp_path, save_strategy="best", metric_for_best_model="earliness", eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=False,
    )  # fmt: skip
    trainer.add_callback(EarlierIsBetter())
    trainer.add_callback(At(3, lambda control: os.kill(os.getpid(), signal.SIGTERM)))

    trainer.train()

    assert find_checkpoint(True, tmp_path) == tmp_path / "checkpoint-4"
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [2, 4]
    assert trainer.args.save_strategy == "best"


def test_files_of_an_earlier_attempt_do_not_get_into_a_checkpoint(tmp_path):
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "trained_weights.safetensors").write_bytes(b"of a run with an average")

    make_trainer(tmp_path, save_strategy="steps", save_steps=6).train()

    assert not (tmp_path / "checkpoint-6" / "trained_weights.safetensors").exists()
    make_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_each_dataset_is_evaluated_with_its_own_size(tmp_path):
    trainer = make_trainer(tmp_path, mixed=True, max_steps=1)
    rows = trainer.train_dataset.rows
    processor = ViTImageProcessor(size={"height": 32, "width": 48}, do_convert_rgb=True)
    shapes = set()
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.add(kwargs["pixel_values"].shape[2:]), with_kwargs=True
    )

    trainer.evaluate(ImageClassificationDataset(rows, BatchTransform(processor)))
    assert shapes == {(32, 48)}
    shapes.clear()
    trainer.train()
    assert shapes == {(16, 24)}


def test_model_that_is_saved_after_an_interruption_is_the_one_that_is_evaluated(tmp_path):
    def interrupt(control):
        raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, ema_decay=0.9)
    trainer.add_callback(At(5, interrupt))
    with pytest.raises(KeyboardInterrupt, match="^$"):
        trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.create_model_card()
    assert "This card has no test results." in (tmp_path / "README.md").read_text()
    saved = make_trainer(tmp_path / "again")
    saved.model = ViTScratchForImageClassification.from_pretrained(tmp_path)
    assert saved.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-6)


def test_arguments_of_another_trainer_stay_as_they_are(tmp_path):
    args = ViTTrainingArguments(str(tmp_path), eval_strategy="no", load_best_model_at_end=False)
    args.lr_scheduler_type = "reduce_lr_on_plateau"
    before = args.to_dict()

    ViTTrainer(model=ViTScratchForImageClassification(ViTScratchConfig(**TINY)), args=args)

    assert args.to_dict() == before


def test_folder_of_another_run_is_warned_of(tmp_path, caplog):
    for _ in range(2):
        make_trainer(tmp_path, save_strategy="steps", save_steps=6).train()

    assert "checkpoint-6 is of another run, and may be resumed by mistake." in caplog.text


@pytest.mark.parametrize("args", [None, TrainingArguments("unused", use_cpu=True)])
def test_other_arguments_than_ours_are_refused(args):
    with pytest.raises(UserError, match=r"args must be ViTTrainingArguments, got (NoneType|TrainingArguments)\."):
        ViTTrainer(model=ViTScratchForImageClassification(ViTScratchConfig(**TINY)), args=args)


def test_mixed_images_are_refused_for_models_of_other_libraries(tmp_path):
    dataset, stage = mixed_digits()
    vit = ViTForImageClassification(
        ViTConfig(image_size=[16, 24], patch_size=8, hidden_size=32, num_attention_heads=2)
    )
    args = ViTTrainingArguments(str(tmp_path), eval_strategy="no", load_best_model_at_end=False, use_cpu=True)

    with pytest.raises(UserError, match=r"mixing needs a model of this package: others would take its targets for"):
        ViTTrainer(vit, args, train_dataset=dataset, stage=stage)


def test_datasets_whose_classes_differ_are_refused(tmp_path):
    dataset, stage = mixed_digits()
    names = dataset.rows.features["label"].names[::-1]
    rows = dataset.rows.cast_column("label", datasets.ClassLabel(names=names))
    other = ImageClassificationDataset(rows, BatchTransform(dataset.image_processor))
    model = ViTScratchForImageClassification(ViTScratchConfig(**TINY))
    args = ViTTrainingArguments(str(tmp_path), use_cpu=True)

    with pytest.raises(UserError, match=r"the classes of other are .*, but those of train_dataset are "):
        ViTTrainer(model, args, train_dataset=dataset, eval_dataset={"other": other}, stage=stage)


def test_images_of_several_stages_need_a_function_that_says_when_they_begin(tmp_path):
    model = ViTScratchForImageClassification(ViTScratchConfig(**TINY))
    args = ViTTrainingArguments(str(tmp_path), eval_strategy="no", load_best_model_at_end=False)

    with pytest.raises(UserError, match="several training stages: give stage, the second result of training_stages"):
        ViTTrainer(model=model, args=args, train_dataset=mixed_digits()[0])


def test_layers_of_a_new_model_are_compiled_too(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(ViTScratchLayer, "compile", lambda self, **kwargs: compiled.append(self))

    def model_init():
        return ViTScratchForImageClassification(ViTScratchConfig(**TINY))

    args = ViTTrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, torch_compile=True, torch_compile_backend="eager",
        eval_strategy="no", save_strategy="no", load_best_model_at_end=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = ViTTrainer(model_init=model_init, args=args, train_dataset=RandomImages())
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert set(trainer.model.vit.layers) <= set(compiled)


def test_last_step_of_an_epoch_weighs_every_image_the_same(tmp_path):
    # 7 images in batches of 2, all in one step: 2 + 2 + 2 + 1.
    images = RandomImages(7)
    whole, parts = (
        make_trainer(tmp_path / name, max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        for name, size, steps in (("whole", 7, 1), ("parts", 2, 4))
    )
    for trainer in (whole, parts):
        trainer.train_dataset = images
        trainer.train()

    assert parts.state.log_history[0]["loss"] == pytest.approx(whole.state.log_history[0]["loss"], abs=1e-6)
    assert parts.state.log_history[0]["grad_norm"] == pytest.approx(whole.state.log_history[0]["grad_norm"], abs=1e-5)


def train_and_report(output_dir, kind, batch_size, **arguments):
    """Train six steps in each of the processes that run this; return what the Trainer logged."""
    trainer = make_trainer(
        output_dir, **KINDS[kind], per_device_train_batch_size=batch_size, per_device_eval_batch_size=4, **arguments,
    )  # fmt: skip
    trainer.train()
    predictions = trainer.predict(trainer.eval_dataset)
    return {
        "world_size": trainer.args.world_size,
        "history": [logs for logs in trainer.state.log_history if "loss" in logs],
        "eval_samples": len(predictions.label_ids),
        "eval_loss": predictions.metrics["test_loss"],
    }


def test_eight_real_images_are_memorised(tmp_path, photographs):
    crops = torch.stack([
        torch.tensor(list(photograph.crop((90 * i, 40 * i, 90 * i + 240, 40 * i + 160)).resize((24, 16)).tobytes()))
        .view(16, 24, 3).permute(2, 0, 1) / 127.5 - 1
        for photograph in photographs for i in range(4)
    ])  # fmt: skip
    trainer = make_trainer(tmp_path, {"num_labels": 8}, max_steps=150, learning_rate=3e-3, weight_decay=0.0)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train_dataset = [{"pixel_values": crop, "labels": label} for label, crop in enumerate(crops)]

    trainer.train()

    logits = trainer.model.eval()(crops).logits
    assert logits.argmax(1).tolist() == list(range(8))
    for name, tensor in trainer.model.state_dict().items():
        if not name.endswith("k_proj.bias"):  # it cancels in the softmax, so it has no gradient
            assert not torch.equal(tensor, before[name]), name


def test_log_has_the_throughput_of_training_alone(tmp_path, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(
        "hf_vit_scratch.training.trainer.time.perf_counter", lambda: next(clock)
    )  # a second at every look
    trainer = make_trainer(tmp_path, max_steps=2, per_device_train_batch_size=18, eval_strategy="steps", eval_steps=1)

    trainer.train()

    # Looks at the clock: start 0, first step 1, log 2 (then 3 and its line 4), after the evaluation 5 and its line 6,
    # log 7. So 18 images in 1 second, then the other 6 of the 24 in 2 seconds.
    rates = [logs["images_per_second"] for logs in trainer.state.log_history if "loss" in logs]
    assert rates == [18.0, 3.0]
    minutes = [logs["minutes"] for logs in trainer.state.log_history]
    assert minutes == sorted(minutes)
    assert minutes[0] == round(4 / 60, 4)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"remove_unused_columns": True}, "remove_unused_columns must stay false: it would look for columns"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy must stay random: the order"),
        (
            {"restore_callback_states_from_checkpoint": True},
            "restore_callback_states_from_checkpoint must stay false: a resumed run goes on counting",
        ),
        ({"bf16_full_eval": True}, "bf16_full_eval must stay false: it would round the model itself"),
        ({"prediction_loss_only": True}, "prediction_loss_only must stay false: the report needs the answers"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics must stay false: the metrics are of all images"),
        (
            {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 10},
            "needs save_steps equal to eval_steps, 5, or the best model may not be saved; got 10",
        ),
        ({"debug": "underflow_overflow"}, "debug must stay unset: it cannot be written into a recipe"),
        ({"ignore_data_skip": True}, "ignore_data_skip must stay false: a resumed run goes on with the images"),
    ],
)
def test_option_that_would_not_do_what_it_says_is_refused(option, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ViTTrainingArguments(output_dir=str(tmp_path), **option)


@pytest.mark.parametrize("kept", [True, False], ids=["kept in memory", "decoded for each batch"])
def test_dropping_the_last_batch_drops_no_image_of_an_evaluation(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageClassificationDataset, "keep_decoded", lambda *args: kept)
    trainer = make_trainer(tmp_path, mixed=True, max_steps=1, dataloader_drop_last=True, per_device_eval_batch_size=64)
    images = len(trainer.train_dataset)

    assert len(trainer.predict(trainer.train_dataset).label_ids) == images
    assert images % 64
    assert trainer.args.dataloader_drop_last


@pytest.mark.parametrize("kept", [True, False], ids=["kept in memory", "decoded for each batch"])
def test_ones_own_collator_gets_each_batch(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageClassificationDataset, "keep_decoded", lambda *args: kept)
    trainer, batches = make_trainer(tmp_path, mixed=True, max_steps=2), []
    collate = trainer.data_collator
    trainer.data_collator = lambda batch: batches.append(batch) or collate(batch)

    trainer.train()

    assert len(batches) >= 2
    assert batches[0]["pixel_values"].shape == (8, 3, 16, 24)


def test_loss_chooses_the_best_model_where_there_are_no_metrics(tmp_path):
    other = make_trainer(tmp_path, eval_strategy="steps", eval_steps=3)
    images = RandomImages()
    trainer = ViTTrainer(model=other.model, args=other.args, train_dataset=images, eval_dataset=images)

    trainer.train()

    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert trainer.state.best_metric == min(losses)


def test_clock_starts_when_the_images_are_decoded(tmp_path, monkeypatch):
    fields = {"max_steps": 1, "eval_strategy": "steps", "metric_for_best_model": "one_accuracy"}
    trainer, calls = make_trainer(tmp_path, mixed=True, **fields), []
    trainer.eval_dataset = {"one": trainer.train_dataset}
    keep, start = ImageClassificationDataset.keep_decoded, trainer.clock.start
    monkeypatch.setattr(
        ImageClassificationDataset, "keep_decoded", lambda *args: calls.append("decoded") or keep(*args)
    )
    monkeypatch.setattr(trainer.clock, "start", lambda: calls.append("started") or start())

    trainer.train()

    assert calls[:3] == ["decoded", "decoded", "started"]


# The moving average


def record_weights(trainer):
    """The weights after each step, from the moment that the optimizer has changed them."""
    history = []
    update = trainer.clock.update

    def recording(*args):
        history.append(trainer.model.classifier.weight.detach().clone())
        update(*args)

    trainer.clock.update = recording
    return history


def test_average_equals_the_closed_form(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0.25)
    expected = trainer.model.classifier.weight.detach().double().clone()
    history = record_weights(trainer)

    trainer.train()

    assert len(history) == 6
    for step, weights in enumerate(history):
        decay = min(0.25, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weights.double()
    torch.testing.assert_close(trainer.model.classifier.weight.double(), expected, rtol=0, atol=1e-6)


def test_average_is_what_is_evaluated_and_training_goes_on_with_the_weights(tmp_path):
    plain = make_trainer(tmp_path / "plain", eval_strategy="steps", eval_steps=3)
    averaged = make_trainer(tmp_path / "averaged", eval_strategy="steps", eval_steps=3, ema_decay=0.9)

    plain.train()
    averaged.train()

    for ours, theirs in zip(averaged.state.log_history, plain.state.log_history, strict=True):
        if "loss" in ours:
            assert ours["loss"] == theirs["loss"]
        elif "eval_loss" in ours:
            assert ours["eval_loss"] != theirs["eval_loss"]
    final = averaged.state.log_history[-2]["eval_loss"]
    assert averaged.evaluate()["eval_loss"] == pytest.approx(final, abs=1e-6)


# What goes wrong


def test_loss_that_is_not_finite_is_found_where_nothing_is_logged(tmp_path):
    trainer = make_trainer(tmp_path, logging_strategy="no")
    trainer.add_callback(At(4, lambda control: trainer.model.classifier.bias.data.fill_(float("nan"))))
    with pytest.raises(UserError, match=r"The loss is nan at step"):
        trainer.train()


def test_loss_that_is_not_finite_is_found_without_a_reader_of_the_log(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(PrinterCallback, "on_log", refuse)
    trainer = make_trainer(tmp_path, disable_tqdm=True)
    trainer.add_callback(At(4, lambda control: trainer.model.classifier.bias.data.fill_(float("nan"))))
    with pytest.raises(UserError, match=r"The loss is nan at step"):
        trainer.train()


def test_loss_that_is_not_finite_stops_the_run_and_names_the_last_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3, logging_steps=1000)
    trainer.add_callback(At(4, lambda control: trainer.model.classifier.bias.data.fill_(float("nan"))))
    with pytest.raises(UserError, match=r"The loss is nan at step 6\. .*checkpoint-3\. The likely cause"):
        trainer.train()

    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "last" / "model.safetensors").values())


def run_out_of_memory_above(batch_size, trainer, monkeypatch):
    step = type(trainer).training_step

    def limited(self, model, inputs, *args, **kwargs):
        if len(inputs["pixel_values"]) > batch_size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(type(trainer), "training_step", limited)


def test_one_process_uses_one_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)  # the stock Trainer would wrap the model in `DataParallel`

    assert ViTTrainingArguments(output_dir=str(tmp_path), use_cpu=True).n_gpu == 1


def test_running_out_of_memory_says_what_to_change(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    run_out_of_memory_above(4, trainer, monkeypatch)

    with pytest.raises(
        UserError, match=r"with 8 images per batch\. .*_batch_size 4 --gradient_accumulation_steps 2\. Or"
    ):
        steps.train(trainer, Recipe(), None, "python train.py")


def test_batch_size_that_fits_is_found(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, mixed=True, auto_find_batch_size=True, ema_decay=0.5)
    run_out_of_memory_above(4, trainer, monkeypatch)

    trainer.train()

    assert trainer.state.global_step == 6
    assert trainer._train_batch_size <= 4


def test_muon_with_another_optimizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"muon needs AdamW beside it, got optim sgd\."):
        make_trainer(tmp_path, muon=True, optim="sgd").train()


@pytest.mark.parametrize(("fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_muon_multiplies_as_is_fastest(fast, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "bf16_is_fast", lambda device: fast)
    dtypes = set()
    orthogonalize = optimizers.orthogonalize
    monkeypatch.setattr(optimizers, "orthogonalize", lambda x, *args: dtypes.add(x.dtype) or orthogonalize(x, *args))

    make_trainer(tmp_path, muon=True, max_steps=1).train()

    assert dtypes == {expected}


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"ema_decay": 1.0}, "lie between 0 and 1"),
        ({"muon_beta2": 1.0}, "lie between 0 and 1"),
        ({"layer_decay": 0.0}, r"lie in \(0, 1\]"),
        ({"target_accuracy": 1.5}, r"lie in \(0, 1\]"),
        ({"max_train_minutes": -1.0}, "be above 0"),
    ],
    ids=str,
)
def test_impossible_argument_is_refused(arguments, rule, tmp_path):
    (name,) = arguments
    with pytest.raises(UserError, match=rf"^{name} must {rule}, got"):
        make_trainer(tmp_path, **arguments)


@pytest.mark.parametrize("schedule", ["greedy", "reduce_lr_on_plateau"])
@pytest.mark.parametrize(("multi_label", "mode"), [(False, "max"), (True, "min")], ids=["accuracy", "loss alone"])
def test_schedule_that_waits_for_progress_knows_what_is_better(multi_label, mode, schedule, tmp_path):
    trainer = make_trainer(tmp_path, multi_label=multi_label, lr_scheduler_type=schedule, eval_strategy="epoch")
    assert trainer.args.lr_scheduler_kwargs["mode"] == mode


def test_schedule_that_waits_for_progress_takes_what_is_given(tmp_path):
    given = {"mode": "max", "patience": 3}
    trainer = make_trainer(
        tmp_path, lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="loss", lr_scheduler_kwargs=given,
        eval_strategy="epoch",
    )  # fmt: skip
    assert trainer.args.lr_scheduler_kwargs == given


def test_learning_rate_is_nearly_zero_when_the_time_is_over(tmp_path, monkeypatch):
    seconds = itertools.count()  # a clock that goes on by one whenever it is read
    monkeypatch.setattr("hf_vit_scratch.training.clock.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    trainer = make_trainer(tmp_path, max_steps=100_000, max_train_minutes=2, lr_scheduler_type="linear")

    trainer.train()

    rates = [logs["learning_rate"] for logs in trainer.state.log_history if "loss" in logs]
    assert 10 < len(rates) < 100_000
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.95 * 1e-2
    assert rates[-1] < 0.1 * 1e-2


def test_bar_of_a_run_by_the_clock_ends_where_the_clock_ends_it(tmp_path, capsys):
    make_trainer(tmp_path, max_steps=100_000, max_train_minutes=0.01, disable_tqdm=False, logging_steps=10).train()

    step, last = re.findall(r"100%\|.*?(\d+)/(\d+) \[", capsys.readouterr().err)[-1]
    assert int(step) == int(last) < 100_000


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch, of itself
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("drop_path_rate", [0.0, 0.2])  # which differs from layer to layer
def test_layers_are_compiled_once_for_all_and_for_every_size_of_batch(drop_path_rate, tmp_path):
    fields = {"num_hidden_layers": 3, "drop_path_rate": drop_path_rate}
    trainer = make_trainer(
        tmp_path, fields=fields, torch_compile=True, torch_compile_backend="aot_eager",
        per_device_train_batch_size=9,
    )  # fmt: skip

    trainer.train()  # 24 images: 9, 9, 6
    trainer.evaluate(RandomImages(5))

    assert counters["stats"]["unique_graphs"] == 1
    assert counters["frames"]["ok"] == 1
    assert not isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)  # not the model as well
    assert not any("_orig_mod" in name for name in trainer.model.state_dict())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["inductor", None], ids=["given", "chosen"])
def test_training_goes_on_without_a_compiler(backend, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    trainer = make_trainer(tmp_path, torch_compile=True)
    trainer.args.torch_compile_backend = backend  # none where compiling was chosen after the flags were read
    trainer.optimization = trainer.optimize_model("plain")

    trainer.train()

    assert "torch_compile needs a C++ compiler" in caplog.text
    assert counters["stats"]["unique_graphs"] == 0


def test_decoded_images_become_inputs_where_the_model_is(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, mixed=True, max_steps=3)
    prepare, received, trained_on = Trainer._prepare_inputs, [], []
    monkeypatch.setattr(Trainer, "_prepare_inputs", lambda self, batch: received.append(batch) or prepare(self, batch))
    trainer.model.register_forward_pre_hook(lambda _, args, kwargs: trained_on.append(kwargs), with_kwargs=True)

    trainer.train()

    assert [batch["pixel_values"].dtype for batch in received] == [torch.uint8] * 3
    for batch, inputs in zip(received, trained_on, strict=True):
        expected = trainer.train_dataset.batch_transform(batch)
        assert all(torch.equal(inputs[name], expected[name]) for name in ("pixel_values", "labels"))


def test_images_of_an_evaluation_are_neither_augmented_nor_mixed(tmp_path):
    trainer = make_trainer(tmp_path, mixed=True, max_steps=2)
    trainer.train()
    rows, processor = trainer.train_dataset.rows, trainer.train_dataset.image_processor

    predictions = trainer.predict(ImageClassificationDataset(rows, BatchTransform(processor)))

    pixels = processor(rows.cast_column("image", datasets.Image())["image"][:], return_tensors="pt")
    with torch.no_grad():
        logits = trainer.model.eval()(**pixels).logits
    assert np.array_equal(predictions.predictions, logits)
    assert predictions.label_ids.tolist() == rows["label"][:]


def test_push_is_over_before_worker_processes_are_forked(tmp_path, monkeypatch):
    # huggingface_hub takes a lock in every forked process, which the thread of a push may have held.
    monkeypatch.setattr(data, "DECODED_BYTES_KEPT", 0)  # else there is nothing to do for worker processes
    events = []
    start = torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__
    trainer = make_trainer(tmp_path, mixed=True, max_steps=6, dataloader_num_workers=1)

    def note(*args, **kwargs):
        events.append("fork")
        start(*args, **kwargs)

    monkeypatch.setattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "__init__", note)
    trainer.push_in_progress = SimpleNamespace(
        is_done=lambda: False, wait_until_done=lambda: events.append("wait"), _jobs=[]
    )
    trainer.train()  # two epochs
    trainer.evaluate(RandomImages(8))

    # The third wait is the stock Trainer's, at the end of training.
    assert events == ["wait", "fork", "wait", "fork", "wait", "wait", "fork"]


@pytest.mark.parametrize("strategy", ["every_save", "end"])
def test_push_that_is_skipped_leaves_the_files_of_the_one_before_alone(strategy, tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=6, hub_strategy=strategy)
    trainer.train()
    trainer.push_in_progress = SimpleNamespace(is_done=lambda: strategy == "end")
    before = sorted(path.name for path in tmp_path.iterdir())

    trainer._push_from_checkpoint(str(tmp_path / "checkpoint-6"))

    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("losses", "warned"),
    [
        ([1.65, 1.66, 1.64], True),  # the loss of equal probabilities for five classes is 1.61
        ([1.65, 1.55, 1.50], False),  # it falls
        ([0.30, 0.30, 0.30], False),  # it has fallen before the first line
    ],
)
@pytest.mark.parametrize("by_time", [True, False], ids=["by time", "by steps"])
def test_loss_that_has_not_moved_after_a_tenth_is_said_once(losses, warned, by_time, caplog):
    model = SimpleNamespace(config=SimpleNamespace(num_labels=5))
    args = SimpleNamespace(max_train_minutes=10.0 if by_time else None, task="image-classification")
    history = []

    for number, (loss, share) in enumerate(zip([*losses, *losses], [0.02, 0.05, 0.1, 0.2, 0.3, 0.4], strict=True)):
        history.append({"loss": loss, "minutes": 10 * share, "step": 50 if by_time else 1000 * share})
        state = SimpleNamespace(max_steps=1000, is_world_process_zero=True, log_history=history)
        LossWatch().on_log(args, state, None, logs=history[-1], model=model)  # anew, as in a resumed run
        assert ("has not moved" in caplog.text) == (warned and number >= 2)

    assert caplog.text.count("has not moved") == warned


def test_loss_of_a_few_steps_is_not_watched(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=40, learning_rate=1e-12, per_device_train_batch_size=64).train()

    assert "has not moved" not in caplog.text


def test_one_process_alone_says_that_the_loss_has_not_moved(caplog):
    watch, model = LossWatch(), SimpleNamespace(config=SimpleNamespace(num_labels=5))
    args = SimpleNamespace(max_train_minutes=None, task="image-classification")
    for step in (1, 500):
        history = [{"loss": 2.0, "minutes": 1.0, "step": step} for step in (1, step)]
        state = SimpleNamespace(max_steps=1000, is_world_process_zero=False, log_history=history)
        watch.on_log(args, state, None, logs=history[-1], model=model)
    assert caplog.text == ""


def test_run_whose_rate_is_too_small_says_that_its_loss_does_not_move(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=60, learning_rate=1e-12, per_device_train_batch_size=64).train()  # all images

    assert "The loss has not moved: " in caplog.text
