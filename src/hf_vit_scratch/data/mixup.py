"""Mixtures of two training images, and the targets of training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from .options import MixingArguments
from .transforms import Numbers, SampleRNG, inside, to_device


@dataclass
class Mixup(MixingArguments):
    """The targets of training: class probabilities, smoothed, weighted, and mixed together with the images.

    MixUp, CutMix, one of the two by chance if both are chosen, and label smoothing (Szegedy et al. 2015,
    https://arxiv.org/abs/1512.00567, section 7).

    Args:
        num_classes: Number of classes, L.
        label_smoothing: Probability mass that is spread evenly over all classes. Each of several labels is smoothed
            as two classes, yes and no.
        class_counts: Number of training images of each class, (L,), for `class_weighting`. It weighs a class by the
            inverse of its number, 1 in the mean over all images, as torch's `CrossEntropyLoss` does. What smoothing
            spreads has the weight of the image's own classes.

    Raises:
        UserError: A value is out of its range, or `class_weighting` lacks `class_counts`.
    """

    num_classes: int
    label_smoothing: float = field(default=0.0, kw_only=True)
    class_counts: NDArray[np.int64] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.mixup_alpha or self.cutmix_alpha):
            self.mixup_prob = 0.0
        self.class_weights: Tensor | None = None
        if self.class_weighting == "balanced":
            if self.class_counts is None:
                raise UserError("class_weighting balanced needs class_counts, the training images of each class.")
            counts = torch.from_numpy(self.class_counts)
            self.class_weights = (counts.sum() / (counts > 0).sum() / counts.clamp(min=1)).float()

    def __call__(self, images: Tensor, labels: Tensor, rng: SampleRNG | None) -> tuple[Tensor, Tensor]:
        """Mix each image with its neighbor in the batch: the first with the second, the third with the fourth.

        Args:
            images: uint8 (B, C, height, width). The last image of an odd batch stays as it is.
            labels: Class ids (B,), zeros and ones (B, L), or numbers (B, L), which are mixed as they are.
            rng: Source of the shares; `None` to mix nothing.

        Returns:
            The images, float if they are mixed, and the labels as they were, or float (B, L).
        """
        if not (self.mixup_prob or self.label_smoothing or self.class_weights is not None):
            return images, labels
        spread = self.num_classes if labels.ndim == 1 else 2
        targets = F.one_hot(labels, self.num_classes).float() if labels.ndim == 1 else labels.float()
        if rng is not None and self.mixup_prob:
            positions = torch.arange(len(images), device=images.device)
            mix_index = (positions ^ 1).clamp(max=len(images) - 1)
            share, rectangles, kept = self.draw(images.shape[-2:], rng)
            images = images.float()
            own = to_device(share, images)[:, None, None, None].masked_fill(inside(rectangles, images), 0.0)
            images = torch.lerp(images.index_select(0, mix_index), images, own)
            targets = torch.lerp(targets[mix_index], targets, to_device(kept, images)[:, None])
        mass: Tensor | float = 1.0
        if self.class_weights is not None:
            targets = targets * self.class_weights.to(targets.device, non_blocking=True)
            mass = targets.sum(dim=1, keepdim=True)
        return images, targets * (1 - self.label_smoothing) + mass * self.label_smoothing / spread

    def draw(self, image_size: Sequence[int], rng: SampleRNG) -> tuple[Numbers, NDArray[np.int64], Numbers]:
        """Draw how images are mixed with others of their size.

        Returns:
            The share of the image's own pixels outside the rectangle, (B,); the rectangle's top, left, height and
            width in pixels, (4, B); and the share of the image's own target, (B,).
        """
        mixed = rng.uniform() < self.mixup_prob
        cut = rng.uniform() < (0.5 if self.mixup_alpha and self.cutmix_alpha else float(self.cutmix_alpha > 0))
        alpha = np.where(cut, self.cutmix_alpha or 1.0, self.mixup_alpha or 1.0)
        share = np.where(mixed, betaincinv(alpha, alpha, rng.uniform()), 1.0)
        # A rectangle of the other share of the area about a pixel; what of it lies outside the image is cut off.
        half = np.sqrt(1 - share) / 2
        (top, bottom), (left, right) = (
            np.clip(rng.integers(side) + np.array([-1, 1])[:, None] * (half * side).astype(int), 0, side)
            for side in image_size
        )
        kept = np.where(cut, 1 - (bottom - top) * (right - left) / math.prod(image_size), share)
        return np.where(cut, 1.0, share), np.stack((top, left, (bottom - top) * cut, right - left)), kept
