"""The tools that people use next, each as docs/guides/tools.md shows it."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import trackio
from helpers import TINY, randomize_
from huggingface_hub import ModelCard
from optuna.samplers import GridSampler
from peft import LoraConfig, PeftModel, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from trackio.sqlite_storage import SQLiteStorage
from transformers import (
    AutoModelForImageClassification,
    TrainerCallback,
    ViTImageProcessor,
    modeling_utils,
)
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

import vit_scratch
from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation.metrics import compute_metrics
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.calibration import calibrate
from hf_vit_scratch.training.checkpointing import damaged_files
from hf_vit_scratch.training.trainer import ViTTrainer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import train  # noqa: E402

STYLES = {
    "post-LN": {},
    "pre-LN": {"norm_first": True, "pooling": "mean", "position_embedding_type": "rope2d", "qk_norm": True},
}
ONE_LAYER = TINY | {"num_hidden_layers": 1}  # compiling and exporting take their time by layer
SIZES = {"image_size": 8, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48}  # fmt: skip


@pytest.fixture(params=STYLES)
def model(request):
    config = ViTScratchConfig(**ONE_LAYER, **STYLES[request.param])
    return randomize_(ViTScratchForImageClassification(config).eval(), std=0.2)


@pytest.fixture
def digits():
    """The training and validation images of the digits."""
    splits = load_splits("digits")
    processor = ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)
    return tuple(
        ImageClassificationDataset(splits[name], BatchTransform(processor)) for name in ("train", "validation")
    )


def arguments(folder, **more):
    return ViTTrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=32, save_strategy="no",
        load_best_model_at_end=False, disable_tqdm=True, **{"eval_strategy": "no"} | more,
    )  # fmt: skip


def test_lora_trains_saves_and_merges(digits, tmp_path):
    base = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    targets = ["q_proj", "v_proj", "projection"]  # the last is the patch embedding
    model = get_peft_model(base, LoraConfig(target_modules=targets, modules_to_save=["classifier"]))

    args = arguments(tmp_path / "run", max_steps=40, logging_steps=10, learning_rate=1e-2)
    trainer = ViTTrainer(model=model, args=args, train_dataset=digits[0], compute_metrics=compute_metrics)
    trainer.train()
    model.save_pretrained(tmp_path / "adapter")

    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    trained = {name.split(".")[-3] for name, parameter in model.named_parameters() if parameter.requires_grad}
    pixel_values = torch.randn(2, 3, 8, 8)
    expected = model.eval()(pixel_values).logits
    fresh = ViTScratchForImageClassification(base.config)
    fresh.load_state_dict(before)
    merged = PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().eval()
    assert losses[-1] < losses[0]
    assert trained == {"lora_A", "lora_B", "modules_to_save"}
    assert isinstance(merged, ViTScratchForImageClassification)
    torch.testing.assert_close(merged(pixel_values).logits, expected, rtol=0, atol=1e-5)
    assert not torch.equal(
        merged.vit.layers[0].attention.q_proj.weight, before["vit.layers.0.attention.q_proj.weight"]
    )
    assert torch.equal(merged.vit.layers[0].attention.k_proj.weight, before["vit.layers.0.attention.k_proj.weight"])


def test_adapter_loads_at_another_image_size(tmp_path):
    base = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    base.save_pretrained(tmp_path / "base")
    loaded = ViTScratchForImageClassification.from_pretrained(tmp_path / "base")
    get_peft_model(loaded, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")

    resized = ViTScratchForImageClassification.from_pretrained(tmp_path / "adapter", image_size=[24, 16])

    base.set_image_size([24, 16])
    assert resized.config.image_height_width == (24, 16)
    assert torch.equal(resized.vit.embeddings.position_embeddings, base.vit.embeddings.position_embeddings)


def test_model_with_an_adapter_beside_it_loads_as_in_transformers(tmp_path):
    base = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    base.save_pretrained(tmp_path)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)

    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, image_size=16)

    assert loaded.config.image_size == 16
    assert any("lora_A" in name for name, _ in loaded.named_parameters())


def test_space_of_an_adapter_is_refused(tmp_path, capsys):
    base = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    base.save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "model")
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "model")

    assert vit_scratch.main(["explore", str(tmp_path / "model"), "--write_space", str(tmp_path / "space")]) == 2

    assert "--write_space needs a model without an adapter" in capsys.readouterr().err


def test_card_of_an_adapter_is_not_that_of_a_model(digits, tmp_path):
    base = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    trainer = ViTTrainer(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=digits[0])
    trainer.train()
    trainer.save_model()

    trainer.create_model_card()

    assert ModelCard.load(tmp_path / "README.md").data.library_name == "peft"


def test_tags_that_are_given_to_the_trainer_are_in_the_card(digits, tmp_path):
    model = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    trainer = ViTTrainer(model=model, args=arguments(tmp_path), train_dataset=digits[0])

    trainer.create_model_card(tags="birds")

    assert ModelCard.load(tmp_path / "README.md").data.tags == ["vision", "vit", "birds"]


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compiled_model_is_one_graph_for_every_batch_and_equals_the_model(model, training):
    model.train(training)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)  # a graph break would raise

    counts = []
    for batch in (2, 3, 5):
        pixel_values, labels = torch.randn(batch, 3, 16, 24), torch.arange(batch)
        with torch.set_grad_enabled(training):
            outputs, expected = compiled(pixel_values, labels=labels), model(pixel_values, labels=labels)
        counts.append(counter.frame_count)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=1e-5)
        if training:
            gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
            for gradient, other in zip(
                gradients, torch.autograd.grad(expected.loss, list(model.parameters())), strict=True
            ):
                torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)

    assert counts[0] > 0
    assert len(set(counts)) == 1  # another batch compiles nothing


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Models and the files of their graphs, exported at one batch and image size."""
    torch.manual_seed(0)
    exported = {}
    for name, style in STYLES.items():
        config = ViTScratchConfig(**ONE_LAYER, **style)
        model = randomize_(ViTScratchForImageClassification(config).eval(), std=0.2)
        size = (16, 24) if name == "post-LN" else (20, 32)  # the model's own, as in docs/guides/tools.md, and another
        inputs = {"pixel_values": torch.randn(2, 3, *size)}
        shapes = {"pixel_values": {axis: torch.export.Dim.DYNAMIC for axis in (0, 2, 3)}}
        graph = OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True, dynamic_shapes=shapes))
        path = tmp_path_factory.mktemp("exported") / "model.onnx"
        # Before transformers 5.23 the program itself was returned.
        graph.save_pretrained(path.parent) if hasattr(graph, "save_pretrained") else graph.save(path)
        exported[name] = model, path
    return exported


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [(1, 3, 16, 24), (3, 3, 20, 32), (5, 3, 4, 8)], ids=str)
def test_onnx_runtime_equals_the_model_at_other_batches_and_sizes(exported, style, shape):
    model, path = exported[style]
    pixel_values = torch.randn(shape)

    (logits,) = onnxruntime.InferenceSession(path).run(None, {"pixel_values": pixel_values.numpy()})

    with torch.no_grad():
        expected = model(pixel_values).logits.numpy()
    assert np.abs(logits - expected).max() < 1e-4 < np.abs(expected).max()


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device_map": "auto"}], ids=str)
def test_device_map_places_the_whole_model(model, tmp_path, options):
    model.save_pretrained(tmp_path)

    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, **options)

    pixel_values = torch.randn(2, 3, 16, 24)
    assert torch.equal(loaded(pixel_values.to(loaded.device)).logits.cpu(), model(pixel_values).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_loaded_as_asked_and_as_saved(model, tmp_path, dtype):
    pixel_values = torch.randn(2, 3, 16, 24)
    model.save_pretrained(tmp_path / "full")
    half = AutoModelForImageClassification.from_pretrained(tmp_path / "full", dtype=dtype)
    half.save_pretrained(tmp_path / "half")

    as_saved = AutoModelForImageClassification.from_pretrained(tmp_path / "half", dtype="auto")

    assert {parameter.dtype for parameter in as_saved.parameters()} == {dtype}
    assert torch.equal(as_saved(pixel_values).logits, half(pixel_values).logits)
    expected = model(pixel_values).logits
    atol = 0.02 * expected.abs().max().item()
    torch.testing.assert_close(half(pixel_values).logits.float(), expected, rtol=0, atol=atol)


def logged_losses(folder, *flags):
    """Train for four steps; the losses of the run's own log."""
    argv = ["--hidden_size", "16", "--num_hidden_layers", "1", "--use_cpu", "true", "--disable_tqdm", "true"]
    train.main([*argv, "--max_steps", "4", "--logging_steps", "2", "--eval_strategy", "no", "--save_strategy", "no",
                "--load_best_model_at_end", "false", "--project", "digits", *flags,
                "--output_dir", str(folder)])  # fmt: skip
    return [logs["loss"] for logs in json.loads((folder / "log.json").read_text()) if "loss" in logs]


def test_checkpointed_layers_change_no_loss(tmp_path, monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return checkpoint(*args, **options)

    monkeypatch.setattr(modeling_utils, "checkpoint", counted)

    losses = logged_losses(tmp_path / "a", "--gradient_checkpointing", "true")

    assert len(calls) == 4
    assert losses == pytest.approx(logged_losses(tmp_path / "b"), abs=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch, of itself
def test_compiled_layers_change_no_loss(tmp_path):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    losses = logged_losses(tmp_path / "a", "--torch_compile", "true", "--torch_compile_backend", "aot_eager")

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert losses == pytest.approx(logged_losses(tmp_path / "b"), abs=1e-4)


def test_tensorboard_gets_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))

    losses = logged_losses(tmp_path / "run", "--report_to", "tensorboard")

    (events,) = (tmp_path / "board").rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events)).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [2, 4]
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(losses)
    assert "train/images_per_second" in board.Tags()["scalars"]


def test_trackio_gets_the_log(tmp_path):
    losses = logged_losses(tmp_path / "run", "--report_to", "trackio")

    runs = [SQLiteStorage.get_logs("digits", run.name) for run in trackio.Api().runs("digits")]
    assert losses in [[row["train/loss"] for row in rows if "train/loss" in row] for rows in runs]


@pytest.mark.parametrize("several", [True, False], ids=["several", "none"])
def test_model_without_one_dataset_of_validation_is_not_calibrated(several, digits, tmp_path):
    model = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    evaluated = {"a": digits[1], "b": digits[1]} if several else None

    calibrate(ViTTrainer(model, arguments(tmp_path), train_dataset=digits[0], eval_dataset=evaluated))

    assert model.config.temperature is None
    assert not list(tmp_path.iterdir())


class WithLabels(TensorDataset):
    labels = torch.zeros(2)


@pytest.mark.parametrize("kind", [TensorDataset, WithLabels])
def test_balanced_sampling_needs_classes(kind, tmp_path):
    model = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10))
    pixels = kind(torch.zeros(2, 3, 8, 8))

    with pytest.raises(UserError, match=r"^balanced_sampling needs an ImageClassificationDataset with one class"):
        ViTTrainer(model, arguments(tmp_path, balanced_sampling=True), train_dataset=pixels)


class Losses(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.found.append(metrics["eval_loss"])


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_search_is_for_the_loss_by_default_and_leaves_whole_checkpoints(ema_decay, digits, tmp_path):
    args = ViTTrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=32, max_steps=4, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, metric_for_best_model="loss", disable_tqdm=True, ema_decay=ema_decay,
    )  # fmt: skip

    def model_init(trial):  # of another width than the first one
        width = {} if trial is None else {"hidden_size": 16}
        return ViTScratchForImageClassification(ViTScratchConfig(**SIZES | width, num_labels=10))

    trainer = ViTTrainer(model_init=model_init, args=args, train_dataset=digits[0], eval_dataset=digits[1])
    losses = Losses()
    trainer.add_callback(losses)

    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-9, 3e-3])},
        n_trials=2, backend="optuna", sampler=GridSampler({"learning_rate": [1e-9, 3e-3]}), direction="minimize",
    )  # fmt: skip

    assert best.objective == pytest.approx(min(losses.found[1::2]))
    assert {path.name for path in tmp_path.iterdir()} == {"run-0", "run-1"}
    for folder in ("run-0", "run-1"):
        assert damaged_files(tmp_path / folder / "checkpoint-4") == []
        saved = ViTScratchForImageClassification.from_pretrained(tmp_path / folder / "checkpoint-4")
        assert saved.config.hidden_size == 16


def test_search_goes_on_after_a_rate_that_is_too_high(digits, tmp_path):
    trainer = ViTTrainer(
        model_init=lambda trial: ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10)),
        args=arguments(tmp_path, max_steps=5, logging_steps=1), train_dataset=digits[0], eval_dataset=digits[1],
    )  # fmt: skip

    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e30, 3e-3])},
        compute_objective=lambda metrics: metrics["eval_loss"], n_trials=2, backend="optuna",
        sampler=GridSampler({"learning_rate": [1e30, 3e-3]}), catch=(UserError,),
    )  # fmt: skip

    assert best.hyperparameters == {"learning_rate": 3e-3}


def test_training_after_a_search_has_the_batches_of_its_arguments(digits, tmp_path):
    trainer = ViTTrainer(
        model_init=lambda trial: ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10)),
        args=arguments(tmp_path, max_steps=1), train_dataset=digits[0], eval_dataset=digits[1],
    )  # fmt: skip
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"per_device_train_batch_size": trial.suggest_categorical("batch", [8])},
        compute_objective=lambda metrics: metrics["eval_loss"], n_trials=1, backend="optuna",
    )  # fmt: skip

    trainer.args.per_device_train_batch_size = 16
    trainer.train()

    assert len(next(iter(trainer.get_train_dataloader()))["labels"]) == 16


@pytest.mark.parametrize("event", ["on_step_begin", "on_evaluate"])
def test_sigterm_ends_a_search(event, digits, tmp_path):
    rates = []

    def stop(args, *others, **kwargs):
        rates.append(args.learning_rate)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = TrainerCallback()
    setattr(stopper, event, stop)
    trainer = ViTTrainer(
        model_init=lambda trial: ViTScratchForImageClassification(ViTScratchConfig(**SIZES, num_labels=10)),
        args=arguments(tmp_path, max_steps=2, eval_strategy="epoch"), train_dataset=digits[0], eval_dataset=digits[1],
        callbacks=[stopper],
    )  # fmt: skip

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-9, 3e-3])},
            compute_objective=lambda metrics: metrics["eval_loss"], n_trials=2, backend="optuna",
        )  # fmt: skip

    assert len(rates) == 1
