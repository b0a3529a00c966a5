"""People's own images: accuracy on seven small data sets, at equal time for the whole command, beside other methods.

    python benchmarks/own_images.py run --cifar10 uoft-cs/cifar10 --minutes 5 --seeds 42
    python benchmarks/own_images.py table

`run` makes the data sets of `own_images_data.py` and runs what is missing: each method on each data set, one process
after the other, on the cores of `--cores`. A finished run is a JSON file in `--output_dir` and is not repeated, so the
benchmark can be stopped and continued. Delete results of an older commit. `table` prints what is there as Markdown.

- `ours`: `python train.py your_images --data FOLDER --max_train_minutes ...`, as a newcomer types it.
- `timm_vit`: timm's `VisionTransformer` of the size that `ours` has chosen; AdamW at 1e-3, warm-up of 5%, cosine.
- `timm_resnet18`: timm's `resnet18` at 64x64 pixels; the same optimizer.
- `transformers_vit`: transformers' `ViTForImageClassification` of the same size and the stock `Trainer`, with the
  defaults of transformers' example script for image classification: AdamW at 5e-5, linear decay, batches of 8, random
  resized crops and flips.

The two of timm get our data path, bf16 where it is fast, label smoothing, and exactly the augmentation and mixing that
`ours` chose for the data set, in the same parts of the training. Every method gets the same splits.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

START = time.perf_counter()  # a budget includes the imports
ROOT = Path(__file__).parents[1]
METHODS = ("ours", "timm_vit", "timm_resnet18", "transformers_vit")
RESERVE = {"ours": 30.0, "timm_vit": 8.0, "timm_resnet18": 12.0, "transformers_vit": 15.0}  # seconds but for training
RESERVE_PER_IMAGE = 1.5e-3  # seconds, for `ours`: its clock starts when the images are decoded
MEAN = STD = [0.5, 0.5, 0.5]


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table", "one"))
    parser.add_argument("--cifar10", default="uoft-cs/cifar10", help="Folder of parquet files, or a name on the Hub.")
    parser.add_argument("--data_sets", nargs="+", help="Those to run; all of them by default.")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--minutes", nargs="+", type=float, default=[5.0], help="For the whole command.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--cores", default="0,1", help="Cores of a run, as of taskset.")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "own_images")
    args = parser.parse_args()
    if args.action == "table":
        print(table(args.output_dir))
        return
    if args.action == "one":
        report = train_other(args.methods[0], args.output_dir, 60 * args.minutes[0], args.seeds[0])
        print(json.dumps(report))
        return
    from own_images_data import DATA_SETS, make

    for minutes in args.minutes:
        for seed in args.seeds:
            for name in args.data_sets or DATA_SETS:
                folder = make(name, args.cifar10, args.output_dir / "data")
                for method in args.methods:  # the sizes of `ours` come first
                    run_one(method, folder, minutes, seed, args.cores, args.output_dir)


def run_one(method: str, folder: Path, minutes: float, seed: int, cores: str, output_dir: Path) -> None:
    """Run one method on one data set in a process of its own, and write its result."""
    name = f"{folder.name}-{method}-{minutes:g}min-seed{seed}"
    result, run_dir = output_dir / f"{name}.json", output_dir / "runs" / name
    if result.exists():
        return
    like = output_dir / f"{folder.name}-ours-{minutes:g}min-seed{seed}.json"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cores.split(","))), "TOKENIZERS_PARALLELISM": "false"}
    pinned = ["taskset", "--cpu-list", cores, sys.executable]
    seconds = 60 * minutes - RESERVE[method]
    if method == "ours":
        seconds -= RESERVE_PER_IMAGE * len(list(folder.glob("train/*/*")))
        command = [*pinned, "train.py", "your_images", "--data", str(folder), "--output_dir",
                   str(run_dir / "run"), "--max_train_minutes", f"{seconds / 60:.3f}", "--seed", str(seed),
                   "--disable_tqdm", "true"]  # fmt: skip
    else:
        ours = json.loads(like.read_text())
        settings = {"data": str(folder), **{name: ours[name] for name in ("config", "augmentation", "mixing")}}
        (run_dir / "settings.json").write_text(json.dumps(settings))
        command = [*pinned, __file__, "one", "--methods", method, "--minutes", f"{seconds / 60:.3f}", "--seeds",
                   str(seed), "--output_dir", str(run_dir)]  # fmt: skip
    start = time.perf_counter()
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    (run_dir / "log.txt").write_text(finished.stdout + finished.stderr)
    if finished.returncode:
        print(f"{name}: failed, see {run_dir / 'log.txt'}", flush=True)
        return
    report = read_ours(run_dir / "run") if method == "ours" else json.loads(finished.stdout.splitlines()[-1])
    report |= {"data_set": folder.name, "method": method, "minutes": minutes, "seed": seed, "seconds": elapsed}
    report |= {"cores": cores, **describe()}
    result.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{name}: {100 * report['accuracy']:.1f}% after {report['passes']:.0f} passes, {elapsed:.0f} s", flush=True)


def read_ours(run: Path) -> dict[str, Any]:
    """Return the result of a finished run of `train.py`."""
    metrics = json.loads((run / "metrics.json").read_text())
    losses = [line["loss"] for line in json.loads((run / "log.json").read_text()) if "loss" in line]
    config = json.loads((run / "config.json").read_text())
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    names = [
        "image_size", "patch_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    ]  # fmt: skip
    augmentation = (
        "random_resized_crop_scale", "crop_padding", "auto_augment", "horizontal_flip_prob",
        "mixing_start_fraction", "policy_start_fraction", "augmentation_off_fraction",
    )  # fmt: skip
    return {
        "accuracy": metrics["test_accuracy"],
        "passes": metrics["epoch"],
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "config": {name: config[name] for name in names},
        "augmentation": {name: recipe[name] for name in augmentation if name in recipe},
        "mixing": {name: recipe[name] for name in ("mixup_alpha", "cutmix_alpha", "mixup_prob") if name in recipe},
    }


def describe() -> dict[str, str]:
    """Return the processor and the versions that a figure needs."""
    from importlib.metadata import version

    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "timm"))
    flags = Path("/proc/cpuinfo").read_text()
    known = [flag for flag in ("avx512_bf16", "amx_bf16", "avx512f", "avx2") if f" {flag} " in flags]
    return {"cpu": f"{cpu.partition(':')[2].strip()} ({', '.join(known)})", "versions": f"{libraries}, Python "
            f"{platform.python_version()}"}  # fmt: skip


def train_other(method: str, run_dir: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Train and test one of the other methods within so many seconds of this process, and return its result."""
    import torch
    from transformers import ViTImageProcessor

    from hf_vit_scratch.data.augmentation import training_stages
    from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset
    from hf_vit_scratch.data.mixup import Mixup
    from hf_vit_scratch.data.splits import load_splits
    from hf_vit_scratch.speed.hardware import keep_freed_memory

    keep_freed_memory()
    torch.manual_seed(seed)
    settings = json.loads((run_dir / "settings.json").read_text())
    config = settings["config"]
    splits = load_splits(settings["data"])
    classes = len(splits["train"].features["label"].names)
    if method == "transformers_vit":
        return train_stock(config, splits, seconds, seed, run_dir)
    side = 64 if method == "timm_resnet18" else pair(config["image_size"])[0]
    processor = ViTImageProcessor(size={"height": side, "width": side}, do_convert_rgb=True)
    stages, stage = training_stages((side, side), **settings["augmentation"])
    mixing = Mixup(classes, **settings["mixing"], label_smoothing=0.1)
    train = ImageClassificationDataset(splits["train"], BatchTransform(processor, stages, mixing, seed))
    test = ImageClassificationDataset(splits["test"], BatchTransform(processor))
    model = build_timm(method, config, side, classes)
    for dataset in (train, test):
        dataset.keep_decoded(torch.device("cpu"))
    passes, losses = train_by_the_clock(model, train, stage, seconds, seed)
    accuracy = test_accuracy(model, test)
    return {"accuracy": accuracy, "passes": passes, "first_loss": losses[0], "last_loss": losses[-1]}


def autocast() -> Any:
    """Return the precision that `ours` would choose on this machine."""
    import torch

    from hf_vit_scratch.speed.hardware import bf16_is_fast

    return torch.autocast("cpu", torch.bfloat16, enabled=bf16_is_fast("cpu"))


def test_accuracy(model: Any, test: Any) -> float:
    """Return the accuracy of a model on a dataset, 0 to 1."""
    import torch

    correct = 0
    model.eval()
    with torch.no_grad(), autocast():
        for start in range(0, len(test), 250):
            batch = test.batch_transform(test.__getitems__(range(start, min(start + 250, len(test)))))
            correct += int((model(batch["pixel_values"]).argmax(-1) == batch["labels"]).sum())
    return correct / len(test)


def pair(size: Any) -> tuple[int, int]:
    """Return height and width."""
    return (size, size) if isinstance(size, int) else tuple(size)


def build_timm(method: str, config: dict[str, Any], side: int, classes: int) -> Any:
    """Return timm's model, with random weights."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if method == "timm_resnet18":
        return timm.create_model("resnet18", num_classes=classes)
    return VisionTransformer(
        img_size=side,
        patch_size=pair(config["patch_size"]),
        embed_dim=config["hidden_size"],
        depth=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        mlp_ratio=config["intermediate_size"] / config["hidden_size"],
        num_classes=classes,
    )


def train_by_the_clock(model: Any, train: Any, stage: Any, seconds: float, seed: int) -> tuple[float, list[float]]:
    """Train with AdamW and a cosine that ends with the time; return the passes made and the loss of each pass."""
    import math

    import torch
    from torch.nn import functional as F

    from hf_vit_scratch.data.sampler import EpochSampler

    batch_size = 2 ** round(math.log2(min(max(len(train) / 4, 16), 128)))  # the recipe's rule
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    begin, epoch, seen = time.perf_counter(), 0, 0
    losses: list[float] = []
    end = START + seconds

    def share_done() -> float:
        return (time.perf_counter() - begin) / (end - begin)

    sampler = EpochSampler(len(train), seed, batch_size, stage=lambda _: stage(share_done()))
    model.train()
    while True:
        sampler.set_epoch(epoch)
        keys, total, steps = iter(sampler), 0.0, 0
        while len(batch_keys := list(islice(keys, batch_size))) == batch_size:
            progress = share_done()
            if progress >= 1:
                return seen / len(train), losses or [total / max(steps, 1)]
            rate = min(progress / 0.05, 1.0) * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate
            batch = train.batch_transform(train.__getitems__(batch_keys))
            with autocast():
                loss = F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total, steps, seen = total + loss.item(), steps + 1, seen + batch_size
        losses.append(total / steps)
        epoch += 1


def train_stock(config: dict[str, Any], splits: Any, seconds: float, seed: int, run_dir: Path) -> dict[str, Any]:
    """Train transformers' ViT with the stock Trainer, with as many steps as the time allows at a measured speed."""
    import numpy as np
    import torch
    from torchvision.transforms import v2
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    side = pair(config["image_size"])[0]
    names = splits["train"].features["label"].names
    sizes: dict[str, Any] = config | {"num_labels": len(names)}
    vit = ViTForImageClassification(ViTConfig(**sizes))
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    training = v2.Compose([v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), *end])
    testing = v2.Compose([v2.Resize((side, side)), *end])

    def transformed(split: str, transforms: Any) -> Any:
        def transform(rows: dict[str, Any]) -> dict[str, Any]:
            pixels = [transforms(image.convert("RGB")) for image in rows["image"]]
            return {"pixel_values": pixels, "labels": rows["label"]}

        return splits[split].with_transform(transform)

    train, test = transformed("train", training), transformed("test", testing)

    def accuracy(outputs: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(outputs.predictions.argmax(-1) == outputs.label_ids))}

    def trainer(steps: int) -> Any:
        arguments = TrainingArguments(
            str(run_dir / "stock"), max_steps=steps, per_device_train_batch_size=8, per_device_eval_batch_size=100,
            remove_unused_columns=False, seed=seed, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=True, logging_steps=max(steps // 20, 1), dataloader_pin_memory=False,
        )  # fmt: skip
        return Trainer(
            model=vit, args=arguments, train_dataset=train,
            compute_metrics=accuracy,
        )  # fmt: skip

    state = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    trainer(5).train()
    times = [time.perf_counter()]
    for steps in (20, 120):  # a start takes as long as many steps
        trainer(steps).train()
        times.append(time.perf_counter())
    per_step = ((times[2] - times[1]) - (times[1] - times[0])) / 100
    vit.load_state_dict(state)
    stock = trainer(max(int((START + seconds - time.perf_counter()) / per_step), 1))
    stock.train()
    losses = [line["loss"] for line in stock.state.log_history if "loss" in line]
    metrics = stock.evaluate(test)
    return {"accuracy": metrics["eval_accuracy"], "passes": stock.state.epoch, "first_loss": losses[0],
            "last_loss": losses[-1]}  # fmt: skip


def table(output_dir: Path) -> str:
    """Return the results as Markdown: a row per data set and time, a column per method."""
    results = [json.loads(path.read_text()) for path in sorted(output_dir.glob("*.json"))]
    lines = [f"| data set | minutes | {' | '.join(METHODS)} |", "| --- " * (len(METHODS) + 2) + "|"]
    for minutes, data_set in sorted({(r["minutes"], r["data_set"]) for r in results}):
        cells = []
        for method in METHODS:
            found = [r for r in results if (r["minutes"], r["data_set"], r["method"]) == (minutes, data_set, method)]
            accuracies = [f"{100 * r['accuracy']:.1f}" for r in sorted(found, key=lambda r: r["seed"])]
            passes = sum(r["passes"] for r in found) / max(len(found), 1)
            cells.append(f"{', '.join(accuracies)} ({passes:.0f})" if found else "not run")
        lines.append(f"| {data_set} | {minutes:g} | {' | '.join(cells)} |")
    machines = sorted({f"{r['cpu']}, {in_words(r['cores'])} for each run; {r['versions']}" for r in results})
    return "\n".join([*lines, "", *machines])


def in_words(cores: str) -> str:
    """Return how many cores a list such as `0,1` names."""
    number = len(cores.split(","))
    return "one core" if number == 1 else f"{number} cores"


if __name__ == "__main__":
    main()
