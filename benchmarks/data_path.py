"""Measure how many images per second pass from a JPEG file to the device, part by part.

    python benchmarks/data_path.py --workers 0 1 2

- Photographs: the two of scikit-learn as JPEG files of 500 by 375 pixels. They become 224 by 224 pixels, with the
  augmentation of ImageNet recipes: random resized crops, flips, RandAugment, erasing, and mixing. They are either
  decoded and cropped again for each batch, by worker processes if there are any, or once, into a file. All else
  happens in batches on the device.
- Small images: 32 by 32 pixels, with crops and flips. They are either decoded again for each batch, or kept on the
  device.

Each process has one thread. Every round measures all parts in turn. The results are medians and quartiles of the
rounds.
"""

import argparse
import io
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from peers import quartiles, write_results
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from transformers import ViTImageProcessor

from hf_vit_scratch.data import dataset as dataset_module
from hf_vit_scratch.data.augmentation import Augmentation
from hf_vit_scratch.data.dataset import BatchTransform, ImageClassificationDataset, collate
from hf_vit_scratch.data.images import decode_image
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.data.sampler import EpochSampler, Sample
from hf_vit_scratch.speed.hardware import keep_freed_memory

SECONDS = 3.0  # for each part in a round
BATCH = 64
# Rows of a dataset: enough that no epoch ends in a measurement, where workers would wait for each other.
PHOTOGRAPHS = 2048
SMALL_IMAGES = 32_768


def jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Return pixels (height, width, 3) as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


def rows(files: list[bytes], number: int) -> Dataset:
    """Return a dataset of `number` rows that repeats these files."""
    content = {
        "image": [{"bytes": file, "path": None} for file in itertools.islice(itertools.cycle(files), number)],
        "label": [place % 2 for place in range(number)],
    }
    return Dataset.from_dict(
        content, features=Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    )


def batches(dataset: ImageClassificationDataset, workers: int, device: torch.device) -> Iterator[int]:
    """Yield the size of each batch without end, loaded and transformed as in the Trainer."""
    sampler = EpochSampler(len(dataset), seed=0, batch_size=BATCH)
    loader: Any = DataLoader(
        dataset, BATCH, sampler=sampler, collate_fn=collate, num_workers=workers, persistent_workers=workers > 0
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in loader:
            batch["pixel_values"] = batch["pixel_values"].to(device)
            yield wait_for(dataset.batch_transform(batch)["pixel_values"])


def wait_for(pixels: torch.Tensor) -> int:
    """Wait until the device has computed pixels, and return the number of images."""
    pixels[-1, -1, -1, -1].item()
    return len(pixels)


def loading(dataset: ImageClassificationDataset, workers: int, device: torch.device) -> float:
    """Return the images per second of new worker processes, once their prefetched batches are used up."""
    loaded = batches(dataset, workers, device)
    for _ in range(1 + 4 * workers):
        next(loaded)
    return images_per_second(partial(next, loaded))


def images_per_second(step: Callable[[], int]) -> float:
    """Return the images per second of a call that returns its number of images."""
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        images += step()
    return images / (time.perf_counter() - start)


def parts(device: torch.device, workers: list[int]) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield the name of each part, and a function that measures its images per second."""
    sizes = (500, 375)
    photographs = [
        jpeg(np.asarray(Image.fromarray(pixels).resize(sizes)), quality=90) for pixels in load_sample_images().images
    ]
    augment = Augmentation(
        (224, 224),
        random_resized_crop_scale=0.08,
        horizontal_flip_prob=0.5,
        auto_augment="randaugment",
        random_erasing_prob=0.25,
    )

    def decode() -> int:
        for file in photographs:
            decode_image({"bytes": file, "path": None}, name="")
        return len(photographs)

    yield "photograph: decode", partial(images_per_second, decode)
    processor = ViTImageProcessor(size={"height": 224, "width": 224}, do_convert_rgb=True)
    mixing = Mixup(2, mixup_alpha=0.8, cutmix_alpha=1.0)
    files = rows(photographs, PHOTOGRAPHS)
    decoded = ImageClassificationDataset(files, BatchTransform(processor, [augment], mixing))
    cached = ImageClassificationDataset(files, BatchTransform(processor, [augment], mixing), cache_images=True)
    with patch.object(dataset_module, "DECODED_BYTES_KEPT", 0):  # as if there were more of them
        cached.keep_decoded(device)

    samples = [Sample(0, 0, row) for row in range(BATCH)]

    def load(dataset: ImageClassificationDataset) -> int:
        return len(dataset.__getitems__(samples)["labels"])

    yield "photograph: decode and crop", partial(images_per_second, partial(load, decoded))
    yield "photograph: crop from the file", partial(images_per_second, partial(load, cached))
    for number in workers:
        yield f"photograph: decoded for each batch, {number} workers", partial(loading, decoded, number, device)
        yield f"photograph: cached in a file, {number} workers", partial(loading, cached, number, device)
    batch = decoded.__getitems__(samples)
    batch["pixel_values"] = batch["pixel_values"].to(device)
    yield (
        f"photograph: from its crop on, on {device.type}",
        partial(images_per_second, lambda: wait_for(decoded.batch_transform(batch)["pixel_values"])),
    )

    small = [
        jpeg(np.random.default_rng(seed).integers(256, size=(32, 32, 3), dtype=np.uint8), 75) for seed in range(64)
    ]
    processor = ViTImageProcessor(size={"height": 32, "width": 32}, do_convert_rgb=True)
    crop = Augmentation((32, 32), crop_padding=4, horizontal_flip_prob=0.5)
    files = rows(small, SMALL_IMAGES)
    dataset = ImageClassificationDataset(files, BatchTransform(processor, [crop]))
    for number in workers:
        yield f"32x32: decoded for each batch, {number} workers", partial(loading, dataset, number, device)
    kept = ImageClassificationDataset(files, BatchTransform(processor, [crop]))
    assert kept.keep_decoded(device)
    yield f"32x32: kept on {device.type}", partial(loading, kept, 0, device)

    if device.type != "cpu":
        pixels = torch.randint(256, (BATCH, 3, 224, 224), dtype=torch.uint8).pin_memory()
        floats = pixels.float().pin_memory()
        for name, tensor in (("uint8", pixels), ("float32", floats)):

            def transfer(tensor: torch.Tensor = tensor) -> int:
                tensor.to(device, non_blocking=True)
                torch.accelerator.synchronize()
                return BATCH

            yield f"224x224: to the device as {name}", partial(images_per_second, transfer)


def main() -> None:
    """Measure all parts, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="result file; by default a dated file beside this script")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as ViTTrainer does
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    with tempfile.TemporaryDirectory() as folder, patch.object(datasets.config, "HF_DATASETS_CACHE", folder):
        lines = measure(dict(parts(device, args.workers)), args.rounds)
    write_results(__file__, "The way of an image to the device", lines, args)


def measure(parts: dict[str, Callable[[], float]], rounds: int) -> list[str]:
    """Return a table of the images per second of each part."""
    rates: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            rates[name].append(part())

    lines = ["| part | images/s |", "| --- | --- |"]
    for name, numbers in rates.items():
        low, median, high = quartiles(numbers)
        lines.append(f"| {name} | {median:.0f} ({low:.0f} to {high:.0f}) |")
    return lines


if __name__ == "__main__":
    main()
