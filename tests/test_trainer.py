"""The Trainer's promises: what decays, what a resumed run restores, and what a loss counts for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY
from safetensors.torch import load_file, save_file

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.arguments import ViTTrainingArguments
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.metrics import compute_metrics, summarise_logits
from hf_vit_scratch.trainer import ViTTrainer

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


def make_trainer(output_dir, fields=None, multi_label=False, **arguments):
    torch.manual_seed(1)
    problem = {"problem_type": "multi_label_classification"} if multi_label else {}
    model = ViTScratchForImageClassification(ViTScratchConfig(**TINY | (fields or {}) | problem))
    defaults = {"max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "weight_decay": 0.1,
                "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "logging_steps": 1,
                "disable_tqdm": True, "use_cpu": True, "save_total_limit": None}  # fmt: skip
    return ViTTrainer(
        model=model,
        args=ViTTrainingArguments(output_dir=str(output_dir), **defaults | arguments),
        train_dataset=RandomImages(multi_label=multi_label),
        eval_dataset=RandomImages(16, multi_label, seed=1),
        compute_metrics=None if multi_label else compute_metrics,
        preprocess_logits_for_metrics=None if multi_label else summarise_logits,
    )


@STYLES
def test_only_the_weights_of_matrices_decay(norm_first, tmp_path):
    trainer = make_trainer(tmp_path, {"norm_first": norm_first, "qk_norm": True, "classifier_hidden_size": 20})

    decayed = set(trainer.get_decay_parameter_names(trainer.model))

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


def test_optimizer_decays_what_the_trainer_names(tmp_path):
    trainer = make_trainer(tmp_path)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}

    groups = trainer.create_optimizer().param_groups

    decayed = {names[id(parameter)] for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decayed == set(trainer.get_decay_parameter_names(trainer.model))
    assert sum(len(group["params"]) for group in groups) == len(names)


@STYLES
def test_resumed_run_ends_as_the_uninterrupted_one(norm_first, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3}
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


@STYLES
def test_best_model_is_reloaded_whole(norm_first, tmp_path):
    trainer = make_trainer(
        tmp_path, {"norm_first": norm_first}, eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip

    trainer.train()

    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-6"  # the highest loss comes early, so the last model is not the one
    saved, state = load_file(best / "model.safetensors"), trainer.model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, abs=1e-6)


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

    message = r"Missing: .*layers\.1\.mlp\.fc2\.bias" if fault == "missing" else r"unexpected: .*encoder\.layer\.1"
    with pytest.raises(UserError, match=message):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("multi_label", [False, True], ids=["single_label", "multi_label"])
def test_accumulated_batches_train_as_one_large_batch_does(multi_label, tmp_path):
    whole = make_trainer(tmp_path / "8x1", multi_label=multi_label)
    parts = make_trainer(
        tmp_path / "2x4", multi_label=multi_label, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )

    whole.train()
    parts.train()

    for ours, theirs in zip(parts.state.log_history[:6], whole.state.log_history[:6], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-4)


def test_two_processes_train_as_one_does(tmp_path):
    # Batches of equal sizes: accelerate fills the last ones up with images that it repeats.
    script, output = Path(__file__).with_name("two_processes.py"), tmp_path / "two.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    two_processes = json.loads(output.read_text())

    for multi_label, two in zip((False, True), two_processes, strict=True):
        one = train_and_report(tmp_path / str(multi_label), multi_label, batch_size=8)

        assert (one["world_size"], two["world_size"]) == (1, 2)
        assert len(one["history"]) == len(two["history"]) == 6
        for ours, theirs in zip(two["history"], one["history"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-4)
        assert two["eval_samples"] == one["eval_samples"] == 16
        assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-5)


def train_and_report(output_dir, multi_label, batch_size, **arguments):
    """Train six steps in each of the processes that run this; return what the Trainer logged."""
    trainer = make_trainer(
        output_dir, multi_label=multi_label, per_device_train_batch_size=batch_size, per_device_eval_batch_size=4,
        **arguments,
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
    monkeypatch.setattr("hf_vit_scratch.trainer.time.perf_counter", lambda: next(clock))  # a second at every look
    trainer = make_trainer(tmp_path, max_steps=2, per_device_train_batch_size=18, eval_strategy="steps", eval_steps=1)

    trainer.train()

    # Looks at the clock: start 0, log 1, evaluation 2 to 3, log 4. So 18 images in 1 second, then the other 6 of the
    # 24 in 3 less 1.
    rates = [logs["images_per_second"] for logs in trainer.state.log_history if "loss" in logs]
    assert rates == [18.0, 3.0]


def test_images_are_not_dropped_as_unused_columns(tmp_path):
    assert ViTTrainingArguments(output_dir=str(tmp_path)).remove_unused_columns is False
