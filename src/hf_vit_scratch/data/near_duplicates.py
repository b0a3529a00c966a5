"""Near duplicates: images that were copied, resized, compressed again or mirrored."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from PIL import Image

from .images import decode_image, map_images

SIDE = 12  # pixels of a thumbnail
COMPONENTS = 64
SIMILARITY = 0.9  # least cosine of near duplicates; that of two other images is around 0, with a deviation of 1/8
CONTRAST = 2.0  # least standard deviation of a color channel, of 255: a blank page is nobody's duplicate
DIFFERENCE = 20.0  # their largest root mean square difference, of 255
MOST_SAMPLES = 20_000  # images whose principal components are found
BLOCK = 512  # images that are compared with all others at once
MOST_MATCHES = 20  # later images that one is listed with


def find_near_duplicates(splits: Iterable[Dataset]) -> NDArray[np.int64]:
    """Return the pairs of images that are alike, or mirror images of each other: (M, 2), the lower number first.

    Images are numbered through all splits.
    """

    def shrink(number: int, row: dict[str, Any]) -> NDArray[np.uint8]:
        image = decode_image(row, f"image {number}", enough=2 * SIDE)
        return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    return compare(np.stack([image for rows in splits for image in map_images(shrink, rows)]))


def compare(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the pairs of near duplicates among thumbnails (N, 12, 12, 3), as `find_near_duplicates`.

    They are compared by the cosine of their whitened principal components. So what all images of a data set share,
    such as a white background, does not count. An image is listed with at most 20 later ones.
    """

    def shapes(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        pixels = images.reshape(len(images), -1).astype(np.float32)
        centered = pixels - pixels.mean(axis=1, keepdims=True)
        return centered / np.maximum(centered.std(axis=1, keepdims=True), CONTRAST)

    number = len(images)
    sample = shapes(images[:: math.ceil(number / MOST_SAMPLES)])
    center = sample.mean(axis=0)
    variances, axes = np.linalg.eigh(np.cov((sample - center).T, bias=True))
    # With as many components as images, all images would be equally far from each other.
    components = min(COMPONENTS, max(1, number // 2))
    axes = (axes[:, -components:] / np.sqrt(np.maximum(variances[-components:], 1e-6))).astype(np.float32)

    def vectors(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        projected = np.concatenate([(shapes(images[i : i + BLOCK]) - center) @ axes for i in range(0, number, BLOCK)])
        return projected / np.maximum(np.linalg.norm(projected, axis=1, keepdims=True), 1e-6)

    views = (images, images[:, :, ::-1])
    plain, mirrored = (vectors(view) for view in views)
    is_blank = images.reshape(number, -1, 3).std(axis=1, dtype=np.float32).max(axis=1) < CONTRAST
    plain[is_blank] = mirrored[is_blank] = 0
    pairs: list[tuple[int, int]] = []
    for start in range(0, number, BLOCK):
        block = plain[start : start + BLOCK]
        alike = np.triu((block @ plain[start:].T >= SIMILARITY) | (block @ mirrored[start:].T >= SIMILARITY), 1)
        for row in np.flatnonzero(alike.any(axis=1)):
            others, image = start + np.flatnonzero(alike[row]), images[start + row].astype(np.float32)
            differences = [np.square(view[others] - image).mean(axis=(1, 2, 3)) for view in views]
            matches = others[np.minimum(*differences) <= DIFFERENCE**2][:MOST_MATCHES]
            pairs += [(start + int(row), int(match)) for match in matches]
    return np.array(pairs, np.int64).reshape(-1, 2)
