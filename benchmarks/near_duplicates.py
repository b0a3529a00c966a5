"""Plant copies among images, and count how many near duplicates are found, and how many pairs are something else.

python benchmarks/near_duplicates.py --data FOLDER --images 10000
"""

import argparse
import io
import random
import time
from collections.abc import Callable

import datasets
from datasets import Dataset, Features
from PIL import Image, ImageOps

from hf_vit_scratch.data.near_duplicates import find_near_duplicates
from hf_vit_scratch.data.splits import load_splits

BICUBIC = Image.Resampling.BICUBIC
Change = Callable[[Image.Image], Image.Image]


def compressed(quality: int) -> Change:
    """Return a function that compresses an image again."""

    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return change


def resized(width: float, height: float) -> Change:
    """Return a function that multiplies the sides of an image."""
    return lambda image: image.resize((round(image.width * width), round(image.height * height)), BICUBIC)


def cropped(share: float) -> Change:
    """Return a function that cuts out the middle of an image."""

    def change(image: Image.Image) -> Image.Image:
        w, h = image.width / 2, image.height / 2
        return image.crop((round(w - share * w), round(h - share * h), round(w + share * w), round(h + share * h)))

    return change


CHANGES: dict[str, Change] = {
    "none": lambda image: image,
    "compressed again, quality 60": compressed(60),
    "compressed again, quality 30": compressed(30),
    "half the size": resized(0.5, 0.5),
    "0.7 of the size": resized(0.7, 0.7),
    "1.5 times the size": resized(1.5, 1.5),
    "0.75 of the height": resized(1, 0.75),
    "mirrored": ImageOps.mirror,
    "the middle 95% of each side": cropped(0.95),
    "the middle 90% of each side": cropped(0.9),
    "the middle 80% of each side": cropped(0.8),
}


def rows_of(images: list[Image.Image]) -> Dataset:
    """Return images as rows."""
    return Dataset.from_dict({"image": images}, features=Features({"image": datasets.Image()}))


def main() -> None:
    """Print a row for each change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as for `vit-scratch train`")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--copies", type=int, default=200)
    args = parser.parse_args()
    train = load_splits(args.data, near_duplicates="ignore")["train"].shuffle(seed=1)
    images = [row["image"].convert("RGB") for row in train.select(range(min(args.images, len(train))))]
    start = time.perf_counter()
    before = set(map(tuple, find_near_duplicates([rows_of(images)]).tolist()))
    print(f"{len(images)} images, {len(before)} pairs before copies, {time.perf_counter() - start:.1f} s")
    number = len(images)
    originals = random.Random(0).sample(range(number), args.copies)
    print("| change | found | of the pairs found, neither these nor copies of a pair before |\n| --- | --- | --- |")
    for name, change in CHANGES.items():
        copies = rows_of([change(images[original]) for original in originals])
        pairs = map(tuple, find_near_duplicates([rows_of(images), copies]).tolist())
        found = {pair for pair in pairs if pair[1] >= number}
        planted = {(original, number + place) for place, original in enumerate(originals)}
        known = {(a, b) for a, b in found if tuple(sorted((a, originals[b - number]))) in before}
        others = len(found - planted - known)
        print(f"| {name} | {len(found & planted) / args.copies:.1%} | {others} of {len(found)} |")


if __name__ == "__main__":
    main()
