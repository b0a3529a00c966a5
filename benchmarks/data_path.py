"""What the way from a JPEG file to the device costs, part by part, in images per second.

    python benchmarks/data_path.py --workers 0 1 2

Photographs: the two of scikit-learn, 640 by 427 pixels as JPEG, to 224 pixels, with RandAugment. Small images: 32 by
32, with crops and flips, one at a time and as `train.py` does it for small images, kept on the device and augmented in
batches. One thread per process. Given are the medians of the rounds, all parts in turn in each, and quartiles.
"""

import argparse
import io
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from peers import quartiles, write_results
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from transformers import ViTImageProcessor

from hf_vit_scratch.augmentation import Augmentation
from hf_vit_scratch.data import EpochSampler, ImageClassificationDataset, collate, decode_image
from hf_vit_scratch.machine import keep_freed_memory

SECONDS = 1.5  # that each part is measured in a round
BATCH = 64


def jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """A JPEG file of (height, width, 3)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


def rows(files: list[bytes], number: int) -> Dataset:
    """A data set that holds these files again and again."""
    content = {
        "image": [{"bytes": file, "path": None} for file in itertools.islice(itertools.cycle(files), number)],
        "label": [place % 2 for place in range(number)],
    }
    return Dataset.from_dict(
        content, features=Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    )


def batches(dataset: ImageClassificationDataset, workers: int) -> Iterator[int]:
    """Endless numbers of images, as the batches come out of the loader that a Trainer would have."""
    sampler = EpochSampler(len(dataset), seed=0, batch_size=BATCH)
    loader: Any = DataLoader(
        dataset, BATCH, sampler=sampler, collate_fn=collate, num_workers=workers, persistent_workers=workers > 0
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in loader:
            yield len(batch["pixel_values"])


def images_per_second(step: Callable[[], int]) -> float:
    """Of calls that return how many images they did."""
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        images += step()
    return images / (time.perf_counter() - start)


def parts(device: torch.device, workers: list[int]) -> Iterator[tuple[str, Callable[[], int]]]:
    """What is measured."""
    photographs = [jpeg(pixels, quality=90) for pixels in load_sample_images().images]
    decoded = [decode_image({"bytes": file, "path": None}, name="") for file in photographs]
    augment = Augmentation(
        (224, 224),
        random_resized_crop_scale=0.08,
        horizontal_flip_prob=0.5,
        auto_augment="randaugment",
        random_erasing_prob=0.25,
    )
    crop_and_flip = Augmentation((224, 224), random_resized_crop_scale=0.08, horizontal_flip_prob=0.5)

    def each(work: Callable[[Any], Any], items: list[Any]) -> Callable[[], int]:
        def step() -> int:
            for item in items:
                work(item)
            return len(items)

        return step

    yield (
        "photograph: decode",
        each(lambda file: decode_image({"bytes": file, "path": None}, name=""), photographs),
    )
    yield "photograph: crop, flip", each(crop_and_flip, decoded)
    yield "photograph: crop, flip, RandAugment, erase", each(augment, decoded)
    processor = ViTImageProcessor(size={"height": 224, "width": 224}, do_convert_rgb=True)
    for number in workers:
        whole = batches(ImageClassificationDataset(rows(photographs, 2048), processor, [augment]), number)
        yield f"photograph: all of it, {number} workers", partial(next, whole)

    small = [
        jpeg(np.random.default_rng(seed).integers(256, size=(32, 32, 3), dtype=np.uint8), 75) for seed in range(64)
    ]
    processor = ViTImageProcessor(size={"height": 32, "width": 32}, do_convert_rgb=True)
    crop = Augmentation((32, 32), crop_padding=4, horizontal_flip_prob=0.5)
    for number in workers:
        whole = batches(ImageClassificationDataset(rows(small, 8192), processor, [crop]), number)
        yield f"32x32: all of it, one at a time, {number} workers", partial(next, whole)
    kept = ImageClassificationDataset(rows(small, 8192), processor, [crop])
    assert kept.keep_on(device)
    on_device = batches(kept, 0)
    yield f"32x32: kept on {device.type}, in batches", partial(next, on_device)

    if device.type != "cpu":
        pixels = torch.randint(256, (BATCH, 3, 224, 224), dtype=torch.uint8).pin_memory()
        floats = pixels.float().pin_memory()
        for name, tensor in (("uint8", pixels), ("float32", floats)):

            def transfer(tensor: torch.Tensor = tensor) -> int:
                tensor.to(device, non_blocking=True)
                torch.accelerator.synchronize()
                return BATCH

            yield f"224x224: to the device as {name}", transfer


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="by default a dated file beside this one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as ViTTrainer does
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    steps = dict(parts(device, args.workers))
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()  # starts workers
    for _ in range(args.rounds):
        for name, step in steps.items():
            rates[name].append(images_per_second(step))

    lines = ["| part | images/s |", "| --- | --- |"]
    for name, numbers in rates.items():
        low, median, high = quartiles(numbers)
        lines.append(f"| {name} | {median:.0f} ({low:.0f} to {high:.0f}) |")
    write_results(__file__, "The way of an image to the device", lines, args)


if __name__ == "__main__":
    main()
