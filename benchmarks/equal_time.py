"""Compare architectures, and pretraining without labels, at equal computing time on CIFAR-10.

    python benchmarks/equal_time.py architecture --data uoft-cs/cifar10 --seeds 0 1 2 --output_dir runs/architecture
    python benchmarks/equal_time.py pretraining --data uoft-cs/cifar10 --seeds 0 1 2 --output_dir runs/pretraining

Each trial is a run of `train.py` with the model and rates of `cifar10_cpu.yaml`. The script first measures the time of
a step, for all choices in turn, round by round. A choice whose step costs more gets fewer steps. So trials stay
comparable on a machine that is not idle. Seeds can also run as several processes with one output folder, once it holds
`costs.json` and the data.

- architecture: changes one thing in the recipe's model. Accuracy is measured on the validation split.
- pretraining: compares random weights with pretrained ones, with 1%, 10% and 100% of the labels. Pretraining spends
  half of the steps on masked images of the complete training split, and the rest on the labelled images. Nothing is
  chosen by this comparison, so accuracy is measured on the test split.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import yaml
from datasets import Dataset, concatenate_datasets
from torch import nn

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.data.splits import load_splits
from hf_vit_scratch.model.modeling_vit_scratch import ViTScratchLayer
from hf_vit_scratch.speed.hardware import bf16_is_fast
from hf_vit_scratch.speed.optimize import example_batch_for, optimize
from hf_vit_scratch.training import steps as training_steps
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.optimizers import build_optimizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402  # a script beside the package

RECIPE = yaml.safe_load((ROOT / "src/hf_vit_scratch/recipes/cifar10_cpu.yaml").read_text(encoding="utf-8"))
BF16 = bf16_is_fast("cpu")  # as `train.py` chooses
BATCH, SIZES = RECIPE["per_device_train_batch_size"], (RECIPE["initial_image_size"], RECIPE["image_size"])


def add_layer_scale(model: ViTScratchForImageClassification) -> None:
    """Scale each branch by channel, starting at 0.1 (Touvron et al. 2021, https://arxiv.org/abs/2103.17239, eq. 4)."""
    for layer in cast(Iterable[ViTScratchLayer], model.vit.layers):
        for linear in (layer.attention.o_proj, layer.mlp.fc2):
            linear.layer_scale = nn.Parameter(torch.full((model.config.hidden_size,), 0.1))
            linear.register_forward_hook(lambda module, _, branch: branch * module.layer_scale)


def zero_residual_outputs(model: ViTScratchForImageClassification) -> None:
    """Initialize each residual branch to zero (Zhang et al. 2019, https://arxiv.org/abs/1901.09321)."""
    for layer in cast(Iterable[ViTScratchLayer], model.vit.layers):
        nn.init.zeros_(layer.attention.o_proj.weight)
        nn.init.zeros_(layer.mlp.fc2.weight)


class FourPrefixTokens(ViTScratchConfig):
    """Configuration of a model with four tokens before the patches."""

    num_prefix_tokens = 4


def add_registers(model: ViTScratchForImageClassification) -> None:
    """Add four tokens that take part in attention only (Darcet et al. 2023, https://arxiv.org/abs/2309.16588)."""
    embeddings, hidden_size = model.vit.embeddings, model.config.hidden_size
    model.config.__class__ = FourPrefixTokens
    embeddings.cls_token = nn.Parameter(torch.randn(1, 4, hidden_size) * 0.02)
    embeddings.position_embeddings = nn.Parameter(
        torch.cat((torch.zeros(1, 4, hidden_size), embeddings.position_embeddings.data), dim=1)
    )


Change = Callable[[ViTScratchForImageClassification], None]
ARCHITECTURES: dict[str, tuple[dict[str, Any], Change | None]] = {
    "the recipe": ({}, None),
    "learned positions alone": ({"position_embedding_type": "learned", "local_attention": False}, None),
    "QK-norm": ({"qk_norm": True, "local_attention": False}, None),
    "patches not whitened": ({"whiten_patches": False, "patch_initializer_range": 0.4}, None),
    "width 96": ({"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 192}, None),
    "width 192": ({"hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 384}, None),
    "class token instead of the mean": ({"pooling": "cls"}, None),
    "zero-initialised residual outputs": ({}, zero_residual_outputs),
    "LayerScale": ({}, add_layer_scale),
    "four register tokens": ({}, add_registers),
}


@contextlib.contextmanager
def changed(change: Change | None) -> Iterator[None]:
    """Apply a change to every classifier that a run builds."""

    class Changed(ViTScratchForImageClassification):
        def __init__(self, config: ViTScratchConfig):
            super().__init__(config)
            if change is not None:
                change(self)

    with mock.patch.object(training_steps, "ViTScratchForImageClassification", Changed):
        yield


def build(fields: dict[str, Any]) -> ViTScratchForImageClassification:
    """Return the model that `train.py` builds from the recipe and these fields. Other fields do not change a step."""
    chosen = {name: value for name, value in (RECIPE | fields).items() if hasattr(ViTScratchConfig, name)}
    config = ViTScratchConfig(**chosen | {"num_labels": 10})
    model = training_steps.ViTScratchForImageClassification(config)
    with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
        optimize(model, example_batch_for(model, BATCH), training=True)
    return model


def stepper(model: ViTScratchForImageClassification) -> Callable[[int], float]:
    """Return a function that takes one step on random images of a size and returns its seconds."""
    args = ViTTrainingArguments("unused", use_cpu=True, muon=True, learning_rate=1e-3, weight_decay=0.05)
    optimizer = build_optimizer(model, args, torch.optim.AdamW, {"fused": True})

    def step(size: int) -> float:
        images = torch.randn(BATCH, 3, size, size)
        labels = torch.zeros(BATCH, dtype=torch.long)
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            loss = model(images, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def relative_costs(steppers: dict[str, Callable[[int], float]], first: float, rounds: int = 15) -> dict[str, float]:
    """Return the mean time of a step relative to the first choice. A share `first` of the steps has smaller images."""
    seconds: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in steppers}
    for _ in range(rounds):
        for name, step in steppers.items():
            for size in SIZES:
                seconds[name][size].append(step(size))
    small, large = SIZES
    costs = {
        name: first * statistics.median(of[small][2:]) + (1 - first) * statistics.median(of[large][2:])
        for name, of in seconds.items()
    }
    return {name: cost / next(iter(costs.values())) for name, cost in costs.items()}


def trial(output_dir: Path, data: str, steps: int, **flags: Any) -> dict[str, float]:
    """Run `train.py` once, and return its accuracies. A flag with the value None is removed from the recipe."""
    decay = {"num_decay_steps": round(0.7 * steps), "decay_type": "linear"}
    recipe = RECIPE | {
        "max_train_minutes": None, "max_steps": steps, "lr_scheduler_kwargs": decay, "data": data,
        "validation_fraction": 0.1, "eval_strategy": "steps", "eval_steps": steps, "save_strategy": "no",
        "output_dir": str(output_dir), **flags,
    }  # fmt: skip
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    path = output_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({name: value for name, value in recipe.items() if value is not None}))
    metrics = train.main([str(path)])
    log = json.loads((output_dir / "log.json").read_text())
    return {
        "test": metrics.get("test_accuracy"),
        "validation": [logs.get("eval_accuracy") for logs in log if "eval_loss" in logs][-1],
    }


def write_data(args: argparse.Namespace, name: str, choose: Callable[[Dataset], Dataset], test: int = 10_000) -> str:
    """Write chosen training images and the first test images as parquet, unless done before; return the folder."""
    folder: Path = args.output_dir / name
    if not folder.exists():
        splits = load_splits(args.data)
        folder.mkdir()
        choose(concatenate_datasets([splits["train"], splits["validation"]])).to_parquet(folder / "train.parquet")
        splits["test"].select(range(test)).to_parquet(folder / "test.parquet")
    return str(folder)


def share_of_rows(rows: Dataset, percent: int, seed: int) -> Dataset:
    """Return a random share of each class."""
    if percent == 100:
        return rows
    return rows.train_test_split(train_size=percent / 100, stratify_by_column="label", seed=seed)["train"]


def compare_architectures(args: argparse.Namespace, record: Callable[..., None]) -> None:
    """Run each choice with each seed."""
    costs = args.output_dir / "costs.json"
    if not costs.exists():
        steppers = {}
        for name, (fields, change) in ARCHITECTURES.items():
            with changed(change):
                steppers[name] = stepper(build(fields))
        costs.write_text(json.dumps(relative_costs(steppers, RECIPE["initial_image_size_fraction"]), indent=1))
    relative = json.loads(costs.read_text())
    data = write_data(args, "data", lambda rows: rows, test=500)  # not used
    for seed in args.seeds:
        for name in args.choices or ARCHITECTURES:
            fields, change = ARCHITECTURES[name]
            steps = round(args.steps / relative[name])
            with changed(change):
                folder = args.output_dir / f"{name.replace(' ', '-')}-{seed}"
                record(choice=name, seed=seed, steps=steps, **trial(folder, data, steps, seed=seed, **fields))


def compare_pretraining(args: argparse.Namespace, record: Callable[..., None]) -> None:
    """Run each share of the labels with each seed."""
    size = {"initial_image_size": None, "initial_image_size_fraction": None, "image_size": SIZES[0]}
    for seed in args.seeds:
        pretrained = args.output_dir / f"pretrained-{seed}"
        trial(
            pretrained, args.data, args.steps // 2, seed=seed, task="masked-image-modeling", mask_ratio=0.6,
            label_smoothing_factor=None, **size,
        )  # fmt: skip
        for percent in args.percents:
            data = write_data(args, f"data-{percent}-{seed}", partial(share_of_rows, percent=percent, seed=seed))
            for start, steps in ((None, args.steps), (str(pretrained), args.steps - args.steps // 2)):
                folder = args.output_dir / f"{'pretrained' if start else 'random'}-{percent}-{seed}"
                first = (
                    dict.fromkeys(("whiten_patches", "local_attention")) if start else {}
                )  # for random weights alone
                results = trial(folder, data, steps, seed=seed, model=start, **first, **size)
                record(choice="pretrained" if start else "random", percent=percent, seed=seed, steps=steps, **results)


def table(trials: list[dict[str, Any]]) -> str:
    """Return the trials as a Markdown table: the accuracy of each seed, and the mean."""
    split = "test" if "percent" in trials[0] else "validation"
    kinds: dict[tuple[Any, ...], dict[int, tuple[float, int]]] = {}
    for trial in trials:
        kinds.setdefault((trial["choice"], trial.get("percent")), {})[trial["seed"]] = (trial[split], trial["steps"])
    lines = [f"| choice | steps | {split} accuracy, % (seeds) | mean |", "| --- | --- | --- | --- |"]
    for (choice, percent), found in sorted(kinds.items(), key=lambda kind: kind[0][1] or 0):
        accuracies = [100 * accuracy for _, (accuracy, _) in sorted(found.items())]
        name = choice if percent is None else f"{percent}% of the labels, {choice} weights"
        seeds = ", ".join(f"{accuracy:.1f} ({seed})" for seed, accuracy in zip(sorted(found), accuracies, strict=True))
        (steps,) = {steps for _, steps in found.values()}
        lines.append(f"| {name} | {steps} | {seeds} | {statistics.mean(accuracies):.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the trials, append their results to `trials.jsonl`, and print all results in that file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["architecture", "pretraining"])
    parser.add_argument("--data", default=RECIPE["data"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--choices", nargs="+", choices=ARCHITECTURES, help="architectures (all)")
    parser.add_argument("--percents", type=int, nargs="+", default=[1, 10, 100], help="shares of the labels")
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)

    def record(**result: Any) -> None:
        with (args.output_dir / "trials.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")

    (compare_architectures if args.what == "architecture" else compare_pretraining)(args, record)
    print(table([json.loads(line) for line in (args.output_dir / "trials.jsonl").read_text().splitlines()]))


if __name__ == "__main__":
    main()
