"""Random changes to a batch of images at once, on a CPU or CUDA device; every image gets its own random numbers.

torchvision's transforms draw once for a whole batch. These do to every image what torchvision's of the same names do
to one. Numbers are drawn on the CPU, in NumPy, so that nothing is read back from the device.

Shapes: images are uint8 (B, C, height, width). Random numbers and what follows from them have B entries.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

Numbers = NDArray[np.float64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")  # of the operations of torchvision's policies
TRIES = 10  # for a rectangle that fits into the image, as many as torchvision has


class SampleRNG:
    """Random numbers for each image that depend on its key, and on how many were drawn for it before.

    SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195, figure 17), started for each image
    from its key.

    Args:
        keys: One tuple of integers from 0 to 2**64 - 1 for each image, such as (seed, epoch, row).
    """

    def __init__(self, keys: Sequence[tuple[int, ...]] | NDArray[np.uint64]):
        self.state = np.zeros(len(keys), np.uint64)
        for part in np.asarray(keys, np.uint64).T:
            self.state = _mix(self.state + part + GOLDEN_GAMMA)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Numbers:
        """Draw one number in [low, high) for each image."""
        return low + (high - low) * self.uniforms(1)[:, 0]

    def uniforms(self, number: int) -> Numbers:
        """Draw numbers in [0, 1) for each image, (B, number)."""
        states = self.state[:, None] + GOLDEN_GAMMA * np.arange(1, number + 1, dtype=np.uint64)
        self.state = states[:, -1]
        return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, end: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw one integer in [0, end) for each image."""
        return (self.uniform() * end).astype(np.int64)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def to_device(numbers: NDArray[Any], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers (B, ...) as a tensor on the device of `like`, without waiting for what the device is doing."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(dtype).to(like.device, non_blocking=True)


def _to_uint8(pixels: Tensor) -> Tensor:
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _rectangles(
    rng: SampleRNG, size: Sequence[int], scale: tuple[float, float], ratio: tuple[float, float], rest: int = 0
) -> NDArray[np.int64]:
    """Draw a rectangle in each image of a height and width, (4, B).

    They are top, left, height and width; the last two are 0 if none of ten tries fits and leaves `rest` pixels of the
    height and of the width.
    """
    height, width = size
    *shapes, down, right = rng.uniforms(2 * TRIES + 2).T
    area = height * width * (scale[0] + (scale[1] - scale[0]) * np.array(shapes[::2]))  # (TRIES, B)
    aspect = ratio[0] * (ratio[1] / ratio[0]) ** np.array(shapes[1::2])
    tall, wide = np.rint((area / aspect) ** 0.5), np.rint((area * aspect) ** 0.5)
    fits = (tall > 0) & (tall <= height - rest) & (wide > 0) & (wide <= width - rest)
    first = fits.argmax(axis=0)  # the first try that fits
    tall, wide = (np.where(fits, side, 0)[first, np.arange(len(first))].astype(np.int64) for side in (tall, wide))
    top, left = (down * (height - tall + 1)).astype(np.int64), (right * (width - wide + 1)).astype(np.int64)
    return np.stack((top, left, tall, wide))


def inside(rectangles: NDArray[np.int64], like: Tensor) -> Tensor:
    """Return whether each pixel lies in its image's rectangle: (4, B) -> bool (B, 1, height, width)."""
    top, left, tall, wide = to_device(rectangles, like, torch.int32)[:, :, None]
    rows, columns = (torch.arange(side, device=like.device, dtype=torch.int32) for side in like.shape[-2:])
    across = (columns >= left) & (columns < left + wide)
    return (((rows >= top) & (rows < top + tall))[:, :, None] & across[:, None])[:, None]


def random_resized_crop(images: Tensor, rng: SampleRNG, size: tuple[int, int], least_scale: float) -> Tensor:
    """Crop each image at random and resize it, with antialiasing; `v2.RandomResizedCrop`."""
    low, high = ratio = (3 / 4, 4 / 3)
    height, width = images.shape[-2:]
    boxes = _rectangles(rng, (height, width), (least_scale, 1.0), ratio)
    # Where none fitted: the largest part in the middle that is neither too wide nor too tall.
    tall, wide = min(height, round(width / low)), min(width, round(height * high))
    middle = np.array([[(height - tall) // 2], [(width - wide) // 2], [tall], [wide]])
    boxes = np.where(boxes[2] > 0, boxes, middle)
    if images.device.type != "cpu":
        return resized_crops_by_products(images, boxes, size)
    crops = (
        image[None, :, top : top + tall, left : left + wide]
        for image, (top, left, tall, wide) in zip(images, boxes.T.tolist(), strict=True)
    )
    return torch.cat([F.interpolate(crop, size, mode="bilinear", antialias=True) for crop in crops])


def resized_crops_by_products(images: Tensor, boxes: NDArray[np.int64], size: tuple[int, int]) -> Tensor:
    """Crop and resize all images at once, which keeps an accelerator busy.

    Resizing is linear along height and along width: a matrix product for each. Boxes are (4, B), as of
    `_rectangles`.
    """
    (top, left, tall, wide), (height, width) = boxes, images.shape[-2:]
    rows = _resizing_weights(top, tall, height, size[0], images)
    columns = _resizing_weights(left, wide, width, size[1], images)
    return _to_uint8(rows[:, None] @ images.float() @ columns[:, None].transpose(2, 3))


def _resizing_weights(start: NDArray[np.int64], length: NDArray[np.int64], old: int, new: int, like: Tensor) -> Tensor:
    """(B, new, old): the share of each old pixel in each new one, a triangle over two steps of the coarser pixels."""
    begin, extent = (to_device(numbers, like)[:, None, None] for numbers in (start, length))
    step = extent / new
    center = begin + (torch.arange(new, device=like.device)[:, None] + 0.5) * step
    place = torch.arange(old, device=like.device) + 0.5
    weights = (1 - (place - center).abs() / step.clamp(min=1)).clamp(min=0)
    weights = weights * ((place > begin) & (place < begin + extent))
    return weights / weights.sum(-1, keepdim=True)


def random_crop(images: Tensor, rng: SampleRNG, padding: int) -> Tensor:
    """Crop each image to its size after padding by reflection; `v2.RandomCrop`."""
    height, width = images.shape[-2:]
    rows, columns = (
        size - 1 - np.abs(size - 1 - np.abs(rng.integers(2 * padding + 1)[:, None] - padding + np.arange(size)))
        for size in (height, width)
    )
    from_row, from_column = to_device(rows, images, torch.int64), to_device(columns, images, torch.int64)
    places = from_row[:, :, None] * width + from_column[:, None]  # (B, height, width)
    index = places.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view_as(images)


def random_horizontal_flip(images: Tensor, rng: SampleRNG, probability: float) -> Tensor:
    """Mirror some images; `v2.RandomHorizontalFlip`."""
    mirrored = to_device(np.flatnonzero(rng.uniform() < probability), images, torch.int64)
    return images.index_copy(0, mirrored, images.index_select(0, mirrored).flip(3))


def random_affine(images: Tensor, rng: SampleRNG, degrees: float, translate: float, scale: float) -> Tensor:
    """Rotate, shift and scale each image about its middle; `v2.RandomAffine`, bilinear, black outside."""
    height, width = images.shape[-2:]
    angle = np.radians(rng.uniform(-degrees, degrees))
    across = np.rint(rng.uniform(-translate, translate) * width)
    down = np.rint(rng.uniform(-translate, translate) * height)
    factor = rng.uniform(1 - scale, 1 + scale)
    cos, sin = np.cos(angle) / factor, np.sin(angle) / factor
    # The inverse: where in the old image a pixel of the new one comes from.
    matrix = np.stack([cos, sin, -cos * across - sin * down, -sin, cos, sin * across - cos * down], axis=-1)
    return _warp(images, matrix, "bilinear", 0)


def _warp(images: Tensor, matrix: Numbers, mode: str, fill: int) -> Tensor:
    """Take each pixel from where its image's matrix of 2 x 3 numbers, (B, 6), sends its (x, y, 1), from the middle."""
    half = np.array(images.shape[:1:-1]) / 2  # of the width and the height
    scaled = (
        matrix.reshape(-1, 2, 3) * np.array([*half, 1.0]) / half[:, None]
    )  # grid_sample's coordinates go from -1 to 1
    grid = F.affine_grid(to_device(scaled, images), list(images.shape), align_corners=False)
    # As in PIL: what comes from outside is filled, and what comes from the outer half of a border pixel is that pixel.
    moved = F.grid_sample(images.float(), grid, mode, padding_mode="border", align_corners=False)
    return _to_uint8(moved.masked_fill_((grid.abs() > 1).any(-1)[:, None], fill))


def random_erasing(images: Tensor, rng: SampleRNG, probability: float, value: int) -> Tensor:
    """Fill a random rectangle of some images; `v2.RandomErasing`."""
    chosen = np.flatnonzero(rng.uniform() < probability)
    ratio = (1 / 3.3, 1 / 0.3)  # width to height; torchvision's numbers are height to width
    rectangles = _rectangles(rng, images.shape[-2:], (0.02, 0.33), ratio, rest=1)[:, chosen]
    places = to_device(chosen, images, torch.int64)
    erased = images.index_select(0, places).masked_fill_(inside(rectangles, images), value)
    return images.index_copy(0, places, erased)


def random_policy(images: Tensor, rng: SampleRNG, policy: v2.RandAugment | v2.TrivialAugmentWide, fill: int) -> Tensor:
    """Apply random operations of torchvision's policy, each image's own."""
    height, width = images.shape[-2:]
    space = policy._AUGMENTATION_SPACE
    names = np.array(list(space))
    for _ in range(getattr(policy, "num_ops", 1)):
        operation = names[rng.integers(len(space))]
        bins = rng.integers(policy.num_magnitude_bins)
        if isinstance(policy, v2.RandAugment):
            bins[:] = policy.magnitude
        sign = np.where(rng.uniform() < 0.5, -1, 1)
        strength = np.zeros(len(images))
        for name, (magnitudes, signed) in space.items():
            strengths = magnitudes(policy.num_magnitude_bins, height, width)
            if strengths is not None:
                chosen = operation == name
                strength[chosen] = strengths.double().numpy()[bins[chosen]] * sign[chosen] ** signed
        images = apply(images, operation, strength, fill)
    return images


def apply(images: Tensor, names: NDArray[np.str_], strength: Numbers, fill: int) -> Tensor:
    """Apply to each image the operation of torchvision's policies of this name (B,), with this strength (B,)."""
    # All geometric operations are one, with a matrix for each image.
    groups = dict.fromkeys(GEOMETRIC if name in GEOMETRIC else (name,) for name in names.tolist())
    places = [np.flatnonzero(np.isin(names, group)) for group in groups]
    changed = []
    for group, chosen in zip(groups, places, strict=True):
        part = images.index_select(0, to_device(chosen, images, torch.int64))
        if group is GEOMETRIC:
            part = _warp(part, _matrices(names[chosen], strength[chosen], images.shape[-2:]), "nearest", fill)
        elif group[0] != "Identity":
            part = _change_colors(part, group[0], strength[chosen])
        changed.append(part)
    back = np.argsort(np.concatenate(places))
    return torch.cat(changed).index_select(0, to_device(back, images, torch.int64))


def _matrices(names: NDArray[np.str_], strength: Numbers, size: Sequence[int]) -> Numbers:
    """(B, 6): where geometric operations take a pixel from, for `_warp`."""
    height, width = size
    # Each image has one of them; the others do nothing. Shears leave the upper left corner where it is.
    shear_x, shear_y, right, down, turn = (np.where(names == name, strength, 0.0) for name in GEOMETRIC)
    cos, sin = np.cos(np.radians(turn)), np.sin(np.radians(turn))
    of_x = [cos, shear_x - sin, shear_x * height / 2 - np.trunc(right)]
    of_y = [shear_y + sin, cos, shear_y * width / 2 - np.trunc(down)]
    return np.stack([*of_x, *of_y], axis=-1)


def _change_colors(images: Tensor, name: str, strength: Numbers) -> Tensor:
    """Change each image by an operation of torchvision's policies that moves no pixels, each by its strength."""
    parameter = to_device(strength, images)[:, None, None, None]
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        # These go from, or beyond, what is left without any of it: black, grey, one mean grey, or a blurred image.
        if name == "Brightness":
            least = torch.zeros((), device=images.device)
        else:
            least = (TF.adjust_sharpness(images, 0.0) if name == "Sharpness" else TF.rgb_to_grayscale(images)).float()
        if name == "Contrast":
            least = least.mean((1, 2, 3), keepdim=True)
        return torch.lerp(least, images.float(), 1 + parameter).clamp_(0, 255).to(torch.uint8)
    if name == "Posterize":
        return images & (256 - 2 ** (8 - parameter)).to(torch.uint8)
    if name == "Solarize":
        return images ^ (images >= 255 * parameter).to(torch.uint8).neg_()  # 255 - x, by its bits
    return {"AutoContrast": TF.autocontrast, "Equalize": TF.equalize}[name](images)
