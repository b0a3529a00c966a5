"""Random changes to a batch of images at once, on a CPU or CUDA device, with numbers of its own for every image.

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
TRIES = 10  # for a rectangle that fits into the image, as many as torchvision has


class SampleRNG:
    """Random numbers for each image that depend on its key, and on how many were drawn for it before.

    SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195, figure 17), started for each image
    from its key.

    Args:
        keys: One tuple of integers from 0 to 2**64 - 1 for each image, such as (seed, epoch, row).
    """

    def __init__(self, keys: Sequence[tuple[int, ...]]):
        self.state = np.zeros(len(keys), np.uint64)
        for part in np.array(keys, np.uint64).T:
            self.state = _mix(self.state + part + GOLDEN_GAMMA)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Numbers:
        """Draw one number in [low, high) for each image."""
        self.state = self.state + GOLDEN_GAMMA
        return low + (high - low) * (_mix(self.state) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, end: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw one integer in [0, end) for each image."""
        return (self.uniform() * end).astype(np.int64)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def to_device(numbers: NDArray[Any], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers (B, ...) as a tensor on the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(like.device, dtype)


def _to_uint8(pixels: Tensor) -> Tensor:
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _rectangles(
    rng: SampleRNG, size: Sequence[int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[NDArray[np.int64], ...]:
    """Draw a rectangle in each image: top, left, height and width; the last two are 0 if none of ten tries fits."""
    height, width = size
    tall, wide = np.zeros((2, len(rng.state)), np.int64)
    for _ in range(TRIES):
        area = height * width * rng.uniform(*scale)
        aspect = np.exp(rng.uniform(*np.log(ratio)))
        h, w = np.rint(np.sqrt(area / aspect)).astype(int), np.rint(np.sqrt(area * aspect)).astype(int)
        fits = (tall == 0) & (h > 0) & (w > 0) & (h <= height) & (w <= width)
        tall, wide = np.where(fits, h, tall), np.where(fits, w, wide)
    return rng.integers(height - tall + 1), rng.integers(width - wide + 1), tall, wide


def random_resized_crop(images: Tensor, rng: SampleRNG, size: tuple[int, int], least_scale: float) -> Tensor:
    """Crop each image at random and resize it, with antialiasing; `v2.RandomResizedCrop`."""
    height, width = images.shape[-2:]
    ratio = (3 / 4, 4 / 3)
    top, left, tall, wide = _rectangles(rng, (height, width), (least_scale, 1.0), ratio)
    # Where none fitted: the largest part in the middle that is neither too wide nor too tall.
    middle_tall, middle_wide = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))
    none = tall == 0
    tall, wide = np.where(none, middle_tall, tall), np.where(none, middle_wide, wide)
    top, left = np.where(none, (height - middle_tall) // 2, top), np.where(none, (width - middle_wide) // 2, left)
    if images.device.type == "cpu":  # one by one, by torchvision's kernel for bytes
        boxes = np.stack((top, left, tall, wide), axis=1).tolist()
        crops = [TF.resized_crop(image, *box, list(size)) for image, box in zip(images, boxes, strict=True)]
        return torch.stack(crops)
    return resized_crops_by_products(images, top, left, tall, wide, size)


def resized_crops_by_products(
    images: Tensor,
    top: NDArray[np.int64],
    left: NDArray[np.int64],
    tall: NDArray[np.int64],
    wide: NDArray[np.int64],
    size: tuple[int, int],
) -> Tensor:
    """Crop and resize all images at once, which keeps an accelerator busy.

    It is linear, and separately so along height and width: a matrix product for each.
    """
    height, width = images.shape[-2:]
    rows = _resizing_weights(top, tall, height, size[0], images)
    columns = _resizing_weights(left, wide, width, size[1], images)
    return _to_uint8(rows[:, None] @ images.float() @ columns[:, None].transpose(2, 3))


def _resizing_weights(start: NDArray[np.int64], length: NDArray[np.int64], old: int, new: int, like: Tensor) -> Tensor:
    """(B, new, old): how much of each old pixel is in each new one; a triangle as wide as the step between the new."""
    begin, extent = (to_device(numbers, like)[:, None, None] for numbers in (start, length))
    step = extent / new
    centre = begin + (torch.arange(new, device=like.device)[:, None] + 0.5) * step
    place = torch.arange(old, device=like.device) + 0.5
    weights = (1 - (place - centre).abs() / step.clamp(min=1)).clamp(min=0)
    weights = weights * ((place > begin) & (place < begin + extent))
    return weights / weights.sum(-1, keepdim=True)


def random_crop_and_flip(images: Tensor, rng: SampleRNG, padding: int, flip_prob: float) -> Tensor:
    """Crop after padding by reflection, then mirror by chance; `v2.RandomCrop`, `v2.RandomHorizontalFlip`."""
    places = []
    for size in images.shape[-2:]:
        place = np.abs(rng.integers(2 * padding + 1)[:, None] - padding + np.arange(size))
        places.append(size - 1 - np.abs(size - 1 - place))
    rows, columns = places
    columns = np.where((rng.uniform() < flip_prob)[:, None], columns[:, ::-1], columns)
    images = images.take_along_dim(to_device(rows, images, torch.int64)[:, None, :, None], dim=2)
    return images.take_along_dim(to_device(columns, images, torch.int64)[:, None, None, :], dim=3)


def random_affine(images: Tensor, rng: SampleRNG, degrees: float, translate: float, scale: float) -> Tensor:
    """Rotate, shift and scale each image about its middle; `v2.RandomAffine`, bilinear, black outside."""
    height, width = images.shape[-2:]
    angle = np.radians(rng.uniform(-degrees, degrees))
    across = np.rint(rng.uniform(-translate, translate) * width)
    down = np.rint(rng.uniform(-translate, translate) * height)
    factor = rng.uniform(1 - scale, 1 + scale)
    cos, sin = np.cos(angle) / factor, np.sin(angle) / factor
    # The inverse: where in the old image a pixel of the new one comes from.
    matrix = np.stack([cos, sin, -cos * across - sin * down, -sin, cos, sin * across - cos * down], axis=-1).reshape(
        -1, 2, 3
    )
    return _sample(images, matrix, "bilinear", fill=0)


def _sample(images: Tensor, matrix: Numbers, mode: str, fill: int) -> Tensor:
    """Take each pixel from where the matrix (B, 2, 3) sends its (x, y, 1); pixels, from the middle."""
    height, width = images.shape[-2:]
    half = np.array([width / 2, height / 2])
    # grid_sample's coordinates go from -1 to 1.
    scaled = matrix * np.array([*half, 1.0]) / half[:, None]
    grid = F.affine_grid(to_device(scaled, images), list(images.shape), align_corners=False)
    # As in PIL: what comes from outside is filled, and what comes from the outer half of a border pixel is that pixel.
    moved = F.grid_sample(images.float(), grid, mode=mode, padding_mode="border", align_corners=False)
    outside = (grid.abs() > 1).any(-1)
    return _to_uint8(moved.masked_fill_(outside[:, None], fill))


def random_erasing(images: Tensor, rng: SampleRNG, probability: float, value: int) -> Tensor:
    """Fill a random rectangle of some images; `v2.RandomErasing`."""
    chosen = rng.uniform() < probability
    top, left, tall, wide = _rectangles(rng, images.shape[-2:], (0.02, 0.33), (0.3, 3.3))
    rectangles = to_device(np.stack((top, left, tall * chosen, wide), axis=1), images)
    return images.masked_fill(rectangle_mask(images, rectangles), value)


def rectangle_mask(images: Tensor, rectangles: Tensor) -> Tensor:
    """Return which pixels (B, 1, height, width) lie in their image's rectangle (B, 4): top, left, height, width."""
    top, left, tall, wide = rectangles.T[..., None]  # (B, 1) each
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    inside_rows = (rows >= top) & (rows < top + tall)
    inside_columns = (columns >= left) & (columns < left + wide)
    return inside_rows[:, None, :, None] & inside_columns[:, None, None, :]


def random_policy(images: Tensor, rng: SampleRNG, policy: v2.RandAugment | v2.TrivialAugmentWide, fill: int) -> Tensor:
    """Apply random operations of torchvision's policy, each image's own."""
    height, width = images.shape[-2:]
    space = list(policy._AUGMENTATION_SPACE.items())
    for _ in range(getattr(policy, "num_ops", 1)):
        operation = rng.integers(len(space))
        bins = rng.integers(policy.num_magnitude_bins)
        if isinstance(policy, v2.RandAugment):
            bins[:] = policy.magnitude
        sign = np.where(rng.uniform() < 0.5, -1, 1)
        changed = images.clone()
        for number, (name, (magnitudes, signed)) in enumerate(space):
            chosen = np.flatnonzero(operation == number)
            strengths = magnitudes(policy.num_magnitude_bins, height, width)
            if len(chosen) and name != "Identity":
                strength = np.zeros(len(chosen)) if strengths is None else strengths.double().numpy()[bins[chosen]]
                places = to_device(chosen, images, torch.int64)
                changed[places] = apply(images[places], name, strength * sign[chosen] ** signed, fill)
        images = changed
    return images


def apply(images: Tensor, name: str, strength: Numbers, fill: int) -> Tensor:
    """Change each image by an operation of torchvision's policies, each as strongly as it should."""
    height, width = images.shape[-2:]
    zero, one = np.zeros(len(strength)), np.ones(len(strength))
    radians, whole = np.radians(strength), np.trunc(strength)
    # Where a pixel comes from, in pixels from the middle; shears leave the upper left corner where it is.
    matrices = {
        "ShearX": (one, strength, strength * height / 2, zero, one, zero),
        "ShearY": (one, zero, zero, strength, one, strength * width / 2),
        "TranslateX": (one, zero, -whole, zero, one, zero),
        "TranslateY": (one, zero, zero, zero, one, -whole),
        "Rotate": (np.cos(radians), -np.sin(radians), zero, np.sin(radians), np.cos(radians), zero),
    }
    if name in matrices:
        return _sample(images, np.stack(matrices[name], axis=-1).reshape(-1, 2, 3), "nearest", fill)
    # These go from, or beyond, what is left without any brightness, colour, contrast or sharpness.
    without = {
        "Brightness": TF.adjust_brightness,
        "Color": TF.adjust_saturation,
        "Contrast": TF.adjust_contrast,
        "Sharpness": TF.adjust_sharpness,
    }
    parameter = to_device(strength, images)[:, None, None, None]
    if name in without:
        least = without[name](images, 0.0).float()
        return (least + (1 + parameter) * (images.float() - least)).clamp_(0, 255).to(torch.uint8)
    if name == "Posterize":
        step = 2 ** (8 - parameter)
        return (torch.floor(images / step) * step).to(torch.uint8)
    if name == "Solarize":
        return torch.where(images >= 255 * parameter, 255 - images, images)
    return {"AutoContrast": TF.autocontrast, "Equalize": TF.equalize}[name](images)
