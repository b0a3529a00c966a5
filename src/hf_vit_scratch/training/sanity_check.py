"""Check the data and try the model for a minute and a half, before a long run."""

import itertools
import math
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from torch import Tensor

from ..data.dataset import ImageClassificationDataset
from ..data.groups import LISTING
from ..data.images import denormalize
from ..data.targets import class_counts, contents, label_names, label_problems, problem_type
from ..evaluation.figures import plot_images
from ..evaluation.metrics import problem_type_of
from .auto_config import images_in_pass, images_per_second, planned_passes, sizes_and_modes
from .trainer import ViTTrainer

OVERFIT_IMAGES = 64  # images that the model must be able to learn by heart
SHOWN_IMAGES = 18  # twice
MAX_STEPS = 200
SECONDS = 5.0  # for each measurement of speed
TRIAL_SECONDS = 45.0  # of real training
MIN_RELATIVE_GAIN = 0.02  # share of the first loss that a trial must take off


def check(trainer: ViTTrainer, splits: DatasetDict) -> bool:
    """Print what was found, write `_samples.png` with images as the model sees them, and return whether all is well.

    It looks at the balance of classes, the modes and sizes of images, whether the model can learn 64 images by heart,
    whether loading or computing bounds the speed, the expected minutes, and whether the loss moves in the first
    seconds of real training. It uses up the model of the trainer.
    """
    listing = Path(trainer.args.output_dir) / LISTING
    problems = [*_labels(splits, trainer), *_near_duplicates(listing), *_images(splits["train"], trainer)]
    untrained = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    problems += _overfit(trainer)
    trainer.model.load_state_dict(untrained)
    data_report(trainer)
    problems += _trial(trainer)
    path = Path(trainer.args.output_dir) / "_samples.png"
    _plot_samples(trainer, label_names(splits["train"].features["label"]), path)
    print(f"Samples    {path}: images as the model gets them, and below that as it gets them in training")
    verdict = "Look at this before training:" if problems else "Nothing stands in the way of training."
    print("\n           - ".join([f"Verdict    {verdict}", *problems]))
    return not problems


def _labels(splits: DatasetDict, trainer: ViTTrainer) -> list[str]:
    problems, mixing = list[str](), cast(Any, trainer.train_dataset).batch_transform.mixing
    feature = splits["train"].features["label"]
    names = label_names(feature)
    for split, rows in splits.items():
        if problem_type(feature) == "regression":
            print(f"Numbers    {split}: {len(rows)} images, {contents(rows)}")
            continue
        counts = class_counts(rows)
        rarest, commonest = int(counts.argmin()), int(counts.argmax())
        spread = f"from {counts[rarest]} ({names[rarest]}) to {counts[commonest]} ({names[commonest]})"
        spread = f"{counts[rarest]} of each" if counts[rarest] == counts[commonest] else spread
        print(f"Classes    {split}: {len(rows)} images of {len(names)} classes, {spread}")
        if split != "train":
            continue
        weighted = trainer.args.balanced_sampling or (mixing and mixing.class_weights is not None)
        problems += label_problems(rows, weighted=weighted, is_trained=True)  # of few images, the next line tells
        if not problems and counts[rarest] < 10:
            problems.append(f"{names[rarest]!r} has only {counts[rarest]} training images.")
    return problems


def _near_duplicates(listing: Path) -> list[str]:
    differ = int((~pd.read_csv(listing)["same_label"]).sum()) if listing.is_file() else 0
    if not differ:
        return []
    return [f"Pairs of near duplicates with different labels: {differ}. Is one of each wrong? See {listing}."]


def _images(rows: Dataset, trainer: ViTTrainer) -> list[str]:
    sides, modes = sizes_and_modes(rows)
    size = trainer.model.config.image_height_width
    counted = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
    counted = counted if len(sides) == len(rows) else f"{len(sides)} of {len(rows)} looked at: {counted}"
    (width, height), (widest, highest) = sides.min(axis=0), sides.max(axis=0)
    sizes = f"width {width} to {widest}, height {height} to {highest}; the model gets {size[1]}x{size[0]}"
    print(f"Images     {counted}; {sizes}")
    smaller = float((sides[:, ::-1] < np.array(size)).all(axis=1).mean())
    if smaller > 0.5:
        return [f"{smaller:.0%} of the images are smaller than what the model gets: a smaller --image_size is faster."]
    return []


def _overfit(trainer: ViTTrainer) -> list[str]:
    batch = cast(ImageClassificationDataset, trainer.train_dataset).sample(OVERFIT_IMAGES, seed=1, stage=None)
    pixel_values, labels = (batch[name].to(trainer.args.device) for name in ("pixel_values", "labels"))
    optimizer = trainer.accelerator.prepare_optimizer(torch.optim.AdamW(trainer.model.parameters(), lr=1e-3))
    accuracy, size = 0.0, trainer.args.train_batch_size  # for which there is memory
    for step in range(MAX_STEPS):  # noqa: B007
        logits = []
        for images, targets in zip(pixel_values.split(size), labels.split(size), strict=True):
            with trainer.accelerator.autocast():
                output = trainer.model(images, labels=targets)
            trainer.accelerator.backward(output.loss * len(targets) / len(labels))
            logits.append(output.logits.detach())
        accuracy = _is_right(torch.cat(logits), labels).float().mean().item()
        if accuracy >= 0.99:
            break
        optimizer.step()
        optimizer.zero_grad()
    print(f"By heart   {accuracy:.0%} of {len(labels)} training images after {step} steps of AdamW at 1e-3")
    if accuracy < 0.9:
        return [f"The model has learnt only {accuracy:.0%} of {len(labels)} images by heart. Are labels and images "
                "those that belong together (see the samples)? Is the model too small, or dropout high?"]  # fmt: skip
    return []


def _is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each image whether its class is, or all its labels are, right; or each number to a quarter of std.

    A number that is the same in all images counts as right.
    """
    match problem_type_of(labels):
        case "single_label_classification":
            return logits.argmax(-1) == labels
        case "regression":
            spread = labels.std(dim=0)
            return ((logits - labels).abs() < torch.where(spread > 0, spread / 4, torch.inf)).all(dim=-1)
    return ((logits > 0) == (labels > 0)).all(dim=-1)


def _trial(trainer: ViTTrainer) -> list[str]:
    """Train as the run would, for some seconds, with a rate that warms up over the first half of them."""
    optimizer, images = trainer.accelerator.prepare_optimizer(trainer.create_optimizer()), 0
    rates = [group["lr"] for group in optimizer.param_groups]
    loader = itertools.chain.from_iterable(itertools.repeat(trainer.get_train_dataloader()))
    losses: list[float] = []
    trainer.model.train()
    start = time.perf_counter()
    while (progress := (time.perf_counter() - start) / TRIAL_SECONDS) < 1:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, 2 * progress)
        optimizer.zero_grad()
        batches = [trainer._prepare_inputs(next(loader)) for _ in range(trainer.args.gradient_accumulation_steps)]
        losses.append(0.0)
        for batch in batches:
            with trainer.accelerator.autocast():
                loss = trainer.model(**batch).loss / len(batches)
            trainer.accelerator.backward(loss)
            losses[-1] += loss.item()
            images += len(batch["pixel_values"])
        if trainer.args.max_grad_norm > 0:
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
    part = math.ceil(len(losses) / 10)
    first, last = np.mean(losses[:part]), np.mean(losses[-part:])
    moves = last < (1 - MIN_RELATIVE_GAIN) * first
    print(
        f"Trial      loss {first:.3f} at first, {last:.3f} after {len(losses)} steps ({TRIAL_SECONDS:g} s, "
        f"{images / TRIAL_SECONDS:.0f} images/s): it {'falls' if moves else 'has hardly moved'}"
    )
    if not moves:
        return ["The loss has hardly moved in a short trial. Do the labels belong to the images (see the samples)? "
                "Else try a lower --learning_rate, or fewer augmentations."]  # fmt: skip
    return []


def data_report(trainer: ViTTrainer) -> str:
    """Measure loading alone and the model alone; print and return which bounds training, "loading" or "computing"."""
    dataset: Any = trainer.train_dataset
    loader = itertools.chain.from_iterable(itertools.repeat(trainer.get_train_dataloader()))

    def load() -> int:
        pixel_values = trainer._prepare_inputs(next(loader))["pixel_values"]
        pixel_values[-1, -1, -1, -1].item()  # reading it waits for the device
        return len(pixel_values)

    trainer.model.train()
    loading = images_per_second(load, SECONDS)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))  # the last of an epoch may be small

    def compute() -> int:
        with trainer.accelerator.autocast():
            loss = trainer.model(**batch).loss
        loss.backward()
        trainer.model.zero_grad()
        loss.item()  # reading it waits for the device
        return len(batch["pixel_values"])

    computing = images_per_second(compute, SECONDS)
    bound = "computing" if computing < loading else "loading"
    height, width = batch["pixel_values"].shape[-2:]  # those of the beginning; larger ones may come later
    print(
        f"Speed      loading alone {loading:.0f} images/s, the model alone {computing:.0f}: {bound} limits the speed "
        f"({width}x{height} pixels, as at the beginning)"
    )
    kept = isinstance(dataset, ImageClassificationDataset) and dataset.keep_decoded(trainer.args.device)
    if bound == "loading":
        print(f"           {'Fewer' if kept else 'More --dataloader_num_workers or fewer'} augmentations would help.")
    if isinstance(dataset, ImageClassificationDataset):  # the length of a stream is unknown
        passes = planned_passes(trainer.args, len(dataset))
        sizes = [dataset.batch_transform.image_size(trainer.stage(share / 100)) for share in range(100)]
        slower = sum(map(math.prod, sizes)) / len(sizes) / math.prod(sizes[0])
        visited = images_in_pass(trainer.args, len(dataset)) / trainer.args.world_size
        seconds = visited / loading, visited / computing * slower  # of a pass
        beside = trainer.args.dataloader_num_workers and not kept  # workers load while the model computes
        needed = passes * (max(seconds) if beside else sum(seconds)) / 60
        minutes = min(needed, trainer.args.max_train_minutes or math.inf)
        passes *= minutes / needed
        listed = "" if trainer.args.fit_to_images else f", about {passes:.0f} passes"  # whose number is in the plan
        print(f"Time       about {minutes:.1f} minutes of training{listed}")
    return bound


def _plot_samples(trainer: ViTTrainer, names: list[str], path: Path) -> None:
    """Plot training images, as they are and below that augmented, each with its class, its labels or its numbers."""
    dataset = cast(ImageClassificationDataset, trainer.train_dataset)
    images, captions = list[Image.Image](), list[str]()
    for stage in (None, max(len(dataset.batch_transform.stages) - 2, 0)):
        batch = dataset.sample(SHOWN_IMAGES, seed=1, stage=stage)
        images += [Image.fromarray(pixels) for pixels in denormalize(batch["pixel_values"], dataset.image_processor)]
        captions += _captions(trainer, names, batch["labels"])
    plot_images(images, captions, path)


def _captions(trainer: ViTTrainer, names: list[str], labels: Tensor) -> list[str]:
    """Return a text for the target of each image; of a mixture, the class that it has most of, and its share."""
    if (problem := trainer.model.config.problem_type) is not None:
        least = -math.inf if problem == "regression" else 0.1
        return [
            ", ".join(
                f"{name} {value:.3g}" for name, value in zip(names, label.tolist(), strict=True) if value > least
            )
            for label in labels
        ]
    if labels.is_floating_point():
        return [f"{names[int(label.argmax())]} {label.max() / label.sum():.0%}" for label in labels]
    return [names[int(label)] for label in labels]
