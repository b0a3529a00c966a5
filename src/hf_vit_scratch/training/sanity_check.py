"""A look at the data before a long run, and a short trial of the model."""

import itertools
import math
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..data.dataset import ImageClassificationDataset
from .auto_config import sizes_and_modes
from .trainer import ViTTrainer

OVERFITTED = 64  # images that the model must be able to learn by heart
MAX_STEPS = 200
SECONDS = 5.0  # for each measurement of speed
TRIAL_SECONDS = 45.0  # of real training
LEAST_GAIN = 0.02  # share of the first loss that a trial must take off


def check(trainer: ViTTrainer, splits: DatasetDict, output_dir: Path) -> bool:
    """Print what was found, write a sheet of training images as the model sees them, and end in a verdict.

    Looked at: the balance of classes, modes and sizes of images, parameters without a gradient, whether the model can
    learn 64 images by heart, whether loading or computing bounds the speed, the expected minutes, and whether the loss
    moves in the first seconds of real training.

    Args:
        trainer: Trainer before training; its model is used up.
        splits: Result of `load_splits`.
        output_dir: Where `samples.png` is written.

    Returns:
        Whether nothing was found that should be changed before training.
    """
    problems = [*_classes(splits), *_images(splits["train"], trainer)]
    problems += _unused_parameters(trainer)
    untrained = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    problems += _overfit(trainer)
    trainer.model.load_state_dict(untrained)
    data_report(trainer)
    problems += _trial(trainer)
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / "samples.png"
    _sheet(trainer, splits["train"].features["label"].names).save(path)
    print(f"Samples    {path}: images as the model gets them, with their labels")
    if problems:
        print("Verdict    Look at this before training:")
        for problem in problems:
            print(f"           - {problem}")
    else:
        print("Verdict    Nothing stands in the way of training.")
    return not problems


def _classes(splits: DatasetDict) -> list[str]:
    problems = []
    names = splits["train"].features["label"].names
    for split, rows in splits.items():
        counts = np.bincount(rows["label"][:], minlength=len(names))
        rarest, commonest = int(counts.argmin()), int(counts.argmax())
        print(
            f"Classes    {split}: {len(rows)} images of {len(names)} classes, from {counts[rarest]} "
            f"({names[rarest]}) to {counts[commonest]} ({names[commonest]})"
        )
        if split == "train" and counts[rarest] * 10 < counts[commonest]:
            problems.append(
                f"{names[rarest]!r} has {counts[rarest]} training images, {names[commonest]!r} {counts[commonest]}: "
                "accuracy will hardly show the rare class. Add images of it, or read the report per class."
            )
        elif split == "train" and counts[rarest] < 10:
            problems.append(f"{names[rarest]!r} has only {counts[rarest]} training images.")
    return problems


def _images(rows: Dataset, trainer: ViTTrainer) -> list[str]:
    sides, modes = sizes_and_modes(rows)
    size = trainer.model.config.image_height_width
    counted = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
    (width, height), (widest, highest) = sides.min(axis=0), sides.max(axis=0)
    sizes = f"width {width} to {widest}, height {height} to {highest}; the model gets {size[1]}x{size[0]}"
    print(f"Images     {counted}; {sizes}")
    smaller = float((sides[:, ::-1] < np.array(size)).all(axis=1).mean())
    if smaller > 0.5:
        return [f"{smaller:.0%} of the images are smaller than what the model gets: a smaller --image_size is faster."]
    return []


def _batch(trainer: ViTTrainer, size: int, stage: int) -> tuple[Tensor, Tensor]:
    batch = cast(ImageClassificationDataset, trainer.train_dataset).sample(size, seed=1, stage=stage)
    return batch["pixel_values"], batch["labels"]


def _unused_parameters(trainer: ViTTrainer) -> list[str]:
    pixel_values, labels = (x.to(trainer.args.device) for x in _batch(trainer, 2, stage=-1))
    trainer.model.train()
    trainer.model(pixel_values, labels=labels).loss.backward()
    unused = [name for name, p in trainer.model.named_parameters() if p.requires_grad and p.grad is None]
    trainer.model.zero_grad()
    print(f"Gradients  {len(unused)} parameters are without one")
    return [f"These parameters get no gradient: {', '.join(unused)}."] if unused else []


def _overfit(trainer: ViTTrainer) -> list[str]:
    pixel_values, labels = (x.to(trainer.args.device) for x in _batch(trainer, OVERFITTED, stage=-1))
    ids = labels.argmax(-1) if labels.is_floating_point() else labels
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):  # noqa: B007
        logits = trainer.model(pixel_values).logits
        accuracy = (logits.argmax(-1) == ids).float().mean().item()
        if accuracy >= 0.99:
            break
        loss = F.cross_entropy(logits, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"By heart   {accuracy:.0%} of {len(ids)} training images after {step} steps of AdamW at 1e-3")
    if accuracy < 0.9:
        return [f"The model has learnt only {accuracy:.0%} of {len(ids)} images by heart. Are labels and images those "
                "that belong together (see the samples)? Is the model too small, or dropout high?"]  # fmt: skip
    return []


def _trial(trainer: ViTTrainer) -> list[str]:
    """Train as the run would, for some seconds, with a rate that warms up over the first half of them."""
    optimizer = trainer.create_optimizer()
    rates = [group["lr"] for group in optimizer.param_groups]
    loader = itertools.chain.from_iterable(itertools.repeat(trainer.get_train_dataloader()))
    losses: list[float] = []
    trainer.model.train()
    start = time.perf_counter()
    while (progress := (time.perf_counter() - start) / TRIAL_SECONDS) < 1:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, 2 * progress)
        batch = trainer._prepare_inputs(next(loader))
        with trainer.compute_loss_context_manager():
            loss = trainer.model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    part = math.ceil(len(losses) / 10)
    first, last = np.mean(losses[:part]), np.mean(losses[-part:])
    moves = last < (1 - LEAST_GAIN) * first
    print(
        f"Trial      loss {first:.3f} at first, {last:.3f} after {len(losses)} steps ({TRIAL_SECONDS:g} s): it "
        f"{'falls' if moves else 'has hardly moved'}"
    )
    if not moves:
        return ["The loss has hardly moved in a short trial. Do the labels belong to the images (see the samples)? "
                "Else try a lower --learning_rate, or fewer augmentations."]  # fmt: skip
    return []


def data_report(trainer: ViTTrainer) -> str:
    """Measure loading alone and the model alone, and print which of the two bounds the speed of training.

    Returns:
        `"loading"` or `"computing"`.
    """
    dataset: Any = trainer.train_dataset
    loader = itertools.chain.from_iterable(itertools.repeat(trainer.get_train_dataloader()))

    def load() -> int:
        pixel_values = trainer._prepare_inputs(next(loader))["pixel_values"]
        pixel_values[-1, -1, -1, -1].item()  # reading it waits for the device
        return len(pixel_values)

    loading = _images_per_second(load)
    batch = trainer._prepare_inputs(next(loader))
    trainer.model.train()

    def compute() -> int:
        with trainer.compute_loss_context_manager():
            loss = trainer.model(**batch).loss
        loss.backward()
        trainer.model.zero_grad()
        return len(batch["pixel_values"]) if loss.item() == loss.item() else 0  # reading it waits for the device

    computing = _images_per_second(compute)
    bound = "computing" if computing < loading else "loading"
    print(f"Speed      loading alone {loading:.0f} images/s, the model alone {computing:.0f}: the bound is {bound}")
    if bound == "loading":
        kept = isinstance(dataset, ImageClassificationDataset) and dataset.cache_on_device(trainer.args.device)
        print(f"           {'Fewer' if kept else 'More --dataloader_num_workers or fewer'} augmentations would help.")
    if isinstance(dataset, ImageClassificationDataset):  # the length of a stream is unknown
        print(f"Time       {_expected_time(trainer, min(loading, computing))}")
    return bound


def _expected_time(trainer: ViTTrainer, speed: float) -> str:
    """Return what training will take at so many images per second and process, in words."""
    args, number = trainer.args, len(cast(ImageClassificationDataset, trainer.train_dataset))
    speed *= args.world_size
    passes = args.num_train_epochs
    if args.max_steps > 0:
        images_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        passes = args.max_steps * images_per_step / number
    minutes = passes * number / speed / 60
    if args.max_train_minutes is not None and args.max_train_minutes < minutes:
        passes, minutes = passes * args.max_train_minutes / minutes, args.max_train_minutes
    return f"about {minutes:.1f} minutes of training, {passes:.0f} passes over the images"


def _images_per_second(step: Any) -> float:
    step()
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        images += step()
    return images / (time.perf_counter() - start)


def _sheet(trainer: ViTTrainer, names: list[str]) -> Image.Image:
    """Up to 32 augmented training images, each with the label that it has most of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dataset: Any = trainer.train_dataset
    assert isinstance(dataset, ImageClassificationDataset)
    pixel_values, labels = _batch(trainer, 32, stage=min(1, len(dataset.stages) - 1))
    processor = dataset.image_processor
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (processor.image_mean, processor.image_std))
    figure = Figure(figsize=(12, 7), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for axes in figure.subplots(4, 8).flat:
        axes.axis("off")
    for axes, pixels, label in zip(figure.axes, pixel_values, labels, strict=False):
        axes.imshow((pixels.cpu() * std + mean).clamp(0, 1).permute(1, 2, 0).numpy())
        best = int(label.argmax()) if label.is_floating_point() else int(label)
        share = f" {label.max():.0%}" if label.is_floating_point() else ""
        axes.set_title(f"{names[best]}{share}", fontsize=8)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
