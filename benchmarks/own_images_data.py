"""Data sets for `own_images.py`: folders of image files, one folder per class, made from CIFAR-10 and scikit-learn.

Each function draws from two disjoint pools, the training and the test images of CIFAR-10, and writes JPEG or PNG files
into `train/CLASS/` and `test/CLASS/`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from datasets import DatasetDict, load_dataset
from PIL import Image
from sklearn.datasets import load_digits

Item = tuple[str, Image.Image]  # class name, picture
Maker = Callable[[DatasetDict, str, np.random.Generator], Iterator[Item]]

TEST_IMAGES = 2_000
QUALITY = 90  # of the JPEG files


def _by_class(source: DatasetDict, split: str, rng: np.random.Generator) -> dict[str, Iterator[Image.Image]]:
    """Return the images of a split in random order, one iterator per class name."""
    labels = np.array(source[split]["label"][:])
    names = source[split].features["label"].names

    def images(label: int) -> Iterator[Image.Image]:
        for row in rng.permutation(np.flatnonzero(labels == label)).tolist():
            yield source[split][row]["image"].convert("RGB")

    return {name: images(label) for label, name in enumerate(names)}


def _stretched(image: Image.Image, side: int, rng: np.random.Generator) -> Image.Image:
    """Resize to about `side` pixels, with a width to height ratio between 3:4 and 4:3."""
    ratio = np.exp(rng.uniform(-1, 1) * np.log(4 / 3) / 2)
    return image.resize((round(side * ratio), round(side / ratio)), Image.Resampling.BICUBIC)


def _objects(number: int, side: int) -> Maker:
    def make(source: DatasetDict, split: str, rng: np.random.Generator) -> Iterator[Item]:
        pools = _by_class(source, split, rng)
        for _ in range((number if split == "train" else TEST_IMAGES) // len(pools)):
            for name, images in pools.items():
                image = next(images)
                yield name, image if side == 32 else _stretched(image, side, rng)

    return make


def _cats_and_dogs(source: DatasetDict, split: str, rng: np.random.Generator) -> Iterator[Item]:
    pools = _by_class(source, split, rng)
    for _ in range((4_000 if split == "train" else TEST_IMAGES) // 2):
        for name in ("cat", "dog"):
            yield name, _stretched(next(pools[name]), 100, rng).convert("L")


def _upright_or_rotated(source: DatasetDict, split: str, rng: np.random.Generator) -> Iterator[Item]:
    pools = _by_class(source, split, rng)
    for number in range((4_000 if split == "train" else TEST_IMAGES) // len(pools)):
        for images in pools.values():
            image = next(images).resize((64, 64), Image.Resampling.BICUBIC)
            turns = int(rng.integers(1, 4)) if number % 2 else 0
            yield ("rotated" if turns else "upright"), image.rotate(90 * turns)


def _imbalanced(source: DatasetDict, split: str, rng: np.random.Generator) -> Iterator[Item]:
    """Yield 500 images of the commonest class and 25 of the rarest; the test split is balanced."""
    pools = _by_class(source, split, rng)
    for rank, (name, images) in enumerate(pools.items()):
        share = 20 ** (-rank / (len(pools) - 1))
        for _ in range(round(500 * share) if split == "train" else TEST_IMAGES // len(pools)):
            yield name, next(images).resize((80, 80), Image.Resampling.BICUBIC)


def _digits_on_photographs(source: DatasetDict, split: str, rng: np.random.Generator) -> Iterator[Item]:
    """Yield handwritten digits of a random colour, size and place, each on another photograph."""
    backgrounds = _by_class(source, split, rng)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    rows = order[: len(order) * 2 // 3] if split == "train" else order[len(order) * 2 // 3 :]
    for place, row in enumerate(rows):
        pool = list(backgrounds.values())[place % len(backgrounds)]
        picture = next(pool).resize((96, 96), Image.Resampling.BICUBIC)
        side = int(rng.integers(32, 65))
        ink = Image.fromarray(np.round(digits.images[row] * (255 / 16)).astype(np.uint8))
        ink = ink.resize((side, side), Image.Resampling.BICUBIC)
        colour = Image.new("RGB", (side, side), tuple(int(c) for c in rng.integers(0, 256, 3)))
        left, top = rng.integers(0, 97 - side, 2).tolist()
        picture.paste(colour, (left, top), ink)
        yield f"digit {digits.target[row]}", picture


DATA_SETS: dict[str, Maker] = {
    "objects_500": _objects(500, 100),
    "objects_2000": _objects(2_000, 32),
    "objects_10000": _objects(10_000, 300),
    "cats_and_dogs_grey": _cats_and_dogs,
    "digits_on_photographs": _digits_on_photographs,
    "upright_or_rotated": _upright_or_rotated,
    "imbalanced": _imbalanced,
}


def make(name: str, cifar10: str, folder: Path) -> Path:
    """Write a data set into `folder/name`, unless it is there, and return that path.

    Args:
        name: A key of `DATA_SETS`.
        cifar10: Folder of parquet files, or a name on the Hub, with the columns `image` (or `img`) and `label`.
        folder: Folder of all data sets.
    """
    root = folder / name
    if (root / "complete").exists():
        return root
    source = load_dataset(cifar10)
    if "img" in source["train"].features:
        source = source.rename_column("img", "image")
    for split in ("train", "test"):
        rng = np.random.default_rng([sorted(DATA_SETS).index(name), split == "test"])
        for number, (label, image) in enumerate(DATA_SETS[name](source, split, rng)):
            path = root / split / label / f"{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=QUALITY)
    (root / "complete").touch()
    return root
