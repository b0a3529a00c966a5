"""A look at the data before a long run: sizes chosen to fit it, and a short trial of the model."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers.trainer_pt_utils import find_batch_size

from .arguments import Arguments
from .data import ImageClassificationDataset, Sample
from .image_files import size_and_mode
from .trainer import ViTTrainer

LOOKED_AT = 500  # images of which modes and sizes are counted
OVERFITTED = 64  # images that the model must be able to learn by heart
MAX_STEPS = 200
SECONDS = 5.0  # for each measurement of speed
IMAGE_SIZES = (32, 48, 64, 96, 128, 160, 192, 224)  # to choose from; patches divide them evenly
SMALL_MODEL = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}
LARGE_MODEL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}


def fit_to_images(args: Arguments, rows: Dataset, given: Set[str]) -> list[str]:
    """Choose sizes, batches, epochs and augmentation by the training images and the device.

    Rules of thumb for training from random weights: many passes and strong augmentation where images are few, no image
    made larger than it is, and on a CPU no more than 64 tokens.

    Args:
        args: Changed in place: the fields that are not in `given`.
        rows: The training split of `load_splits`.
        given: Names of the fields that a recipe or a flag has set, which stay.

    Returns:
        One line for each choice, with its reason.
    """
    model, _, augmentation, mixing, training = args
    number, on_cpu = len(rows), training.device.type == "cpu"
    sides, _ = _sizes_and_modes(rows)
    side, alike = int(np.median(sides.min(axis=1))), len(np.unique(sides, axis=0)) == 1
    lines = []

    def choose(part: Any, reason: str, **values: Any) -> None:
        if not given & values.keys():  # these belong together: none, where one of them is given
            for name, value in values.items():
                setattr(part, name, value)
            lines.append(f"{', '.join(f'{name} {_plain(value)}' for name, value in values.items())}: {reason}")

    largest = 64 if on_cpu else 224
    image_size = max([IMAGE_SIZES[0], *(size for size in IMAGE_SIZES if size <= min(side, largest))])
    choose(
        model,
        f"half of the images are {side} pixels or less on their shorter side"
        + (f", and a CPU is slow beyond {largest}" if on_cpu and side > largest else ""),
        image_size=[image_size],
    )
    pixels = ((model.image_size or []) * 2)[:2]  # height and width
    tokens = 64 if on_cpu or max(pixels) <= 64 else 256
    patches = [size for size in range(1, min(pixels) + 1) if not any(length % size for length in pixels)]
    patch_size = next((size for size in patches if math.prod(pixels) <= tokens * size**2), patches[-1])
    if "model" not in given:  # which has sizes of its own
        small = on_cpu or number < 20_000
        choose(model, f"at most {tokens} tokens", patch_size=[patch_size])
        choose(model, "a CPU" if on_cpu else f"{number} images", **(SMALL_MODEL if small else LARGE_MODEL))

    batch_size = 2 ** round(math.log2(min(max(number / 20, 16), 128 if on_cpu else 512)))
    choose(training, f"about 20 or more steps in a pass over {number} images", per_device_train_batch_size=batch_size)
    if training.max_steps > 0:
        images_per_step = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
        epochs = training.max_steps * images_per_step / number
    else:
        epochs = float(round(min(max(300 * (1000 / number) ** 0.5, 30), 300)))
        choose(training, f"the fewer images, the more passes; {number} images", num_train_epochs=epochs)
        epochs = training.num_train_epochs

    if alike and max(sides[0]) <= max(pixels):
        choose(augmentation, "small images, all of one size", crop_padding=max(1, min(pixels) // 8))
    else:
        least = 0.35 if number < 20_000 else 0.2
        choose(augmentation, "images of many sizes, or larger than the model's", random_resized_crop_scale=least)
    if epochs >= 60:
        passes = f"{epochs:.0f} passes over the same images"
        choose(augmentation, passes, auto_augment="trivialaugment")
        if training.task == "image-classification":
            choose(mixing, passes, mixup_alpha=0.8, cutmix_alpha=1.0, mixing_prob=0.5)
    return lines


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _sizes_and_modes(rows: Dataset) -> tuple[NDArray[np.int64], Counter[str]]:
    """(width, height) of some of the images, and how many there are of each mode."""
    chosen = np.random.default_rng(0).permutation(len(rows))[:LOOKED_AT].tolist()
    encoded = rows.cast_column("image", datasets.Image(decode=False))[chosen]["image"]
    found = [size_and_mode(row, f"image {number}") for number, row in zip(chosen, encoded, strict=True)]
    return np.array([size for size, _ in found]), Counter(mode for _, mode in found)


def check(trainer: ViTTrainer, splits: DatasetDict, output_dir: Path) -> bool:
    """Print what was found, write a sheet of training images as the model sees them, and end in a verdict.

    Looked at: the balance of classes, modes and sizes of images, parameters without a gradient, whether the model can
    learn 64 images by heart, and whether loading or computing bounds the speed. The model is left trained on those 64.

    Args:
        trainer: As for training; its model is used up.
        splits: Of `load_splits`.
        output_dir: Where `samples.png` is written.

    Returns:
        Whether nothing was found that should be changed before training.
    """
    problems = [*_classes(splits), *_images(splits["train"], trainer)]
    problems += _unused_parameters(trainer)
    problems += _overfit(trainer)
    data_report(trainer)
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
    sides, modes = _sizes_and_modes(rows)
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
    dataset: Any = trainer.train_dataset
    rows = np.random.default_rng(1).permutation(len(dataset))[:size].tolist()
    batch = dataset.__getitems__([Sample(0, stage, *pair) for pair in zip(rows, rows[1:] + rows[:1], strict=True)])
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


def data_report(trainer: ViTTrainer) -> str:
    """Measure loading alone and the model alone, and print which of the two bounds the speed of training.

    Returns:
        `"loading"` or `"computing"`.
    """
    dataset: Any = trainer.train_dataset
    dataset.finish_later = True  # as in training
    loader = itertools.chain.from_iterable(itertools.repeat(trainer.get_train_dataloader()))
    loading = _images_per_second(lambda: find_batch_size(next(loader)))
    batch = {name: tensor.to(trainer.args.device) for name, tensor in next(loader).items()}
    batch = dataset.preparation.finish(batch)
    dataset.finish_later = False
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
        kept = (
            isinstance(dataset, ImageClassificationDataset)
            and trainer.args.dataloader_num_workers == 0
            and dataset.keep_on(trainer.args.device)
        )
        print(f"           {'Fewer' if kept else 'More --dataloader_num_workers or fewer'} augmentations would help.")
    return bound


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
