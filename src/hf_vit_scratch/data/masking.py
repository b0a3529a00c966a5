"""Images with masks, for training without labels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .dataset import ImageClassificationDataset
from .sampler import Sample
from .transforms import SampleRNG


class MaskedImageDataset(ImageClassificationDataset):
    """Rows of a dataset in batches of decoded images with `bool_masked_pos` (B, rows * cols) instead of labels.

    Units of patches are masked at random, as many in every image: SimMIM (Xie et al. 2022,
    https://arxiv.org/abs/2111.09886, section 3.2). The mask depends on (seed, epoch, row) only, like the augmentation.

    Args:
        patch_size: Height and width of a patch in pixels.
        mask_ratio: Share of the units that are masked.
        mask_patch_size: Side of a square unit in pixels; `None` for units of one patch.
        options: Arguments of `ImageClassificationDataset`, like the positional ones.

    Raises:
        UserError: The ratio or the size of a unit is impossible.
    """

    def __init__(
        self,
        *arguments: Any,
        patch_size: tuple[int, int],
        mask_ratio: float = 0.6,
        mask_patch_size: int | None = None,
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        unit = patch_size if mask_patch_size is None else (mask_patch_size, mask_patch_size)
        if any(side < 1 or side % patch for side, patch in zip(unit, patch_size, strict=True)):
            raise UserError(f"mask_patch_size must be a multiple of patch_size {patch_size}, got {mask_patch_size}.")
        self.patch_size = patch_size
        self.mask_ratio = mask_ratio
        self.unit = unit
        for stage in (None, *range(len(self.batch_transform.stages))):
            height, width = self.batch_transform.image_size(stage)
            if height % unit[0] or width % unit[1]:
                raise UserError(f"mask_patch_size must divide the image size {height}x{width}, got {unit[0]}.")
            number = (height // unit[0]) * (width // unit[1])
            if not 0 < round(mask_ratio * number) < number:
                raise UserError(f"mask_ratio must mask some of the {number} parts of an image, got {mask_ratio}.")

    def __getitems__(self, keys: Sequence[int | Sample]) -> dict[str, Any]:
        """Return a whole batch."""
        batch = super().__getitems__(keys)
        del batch["labels"]
        height, width = self.batch_transform.image_size(batch["stage"])
        units = (height // self.unit[0], width // self.unit[1])
        masks = random_masks(self.batch_transform.rng(batch["keys"], "masking"), units, self.mask_ratio)
        for axis in (0, 1):
            masks = masks.repeat(self.unit[axis] // self.patch_size[axis], axis=axis + 1)
        return batch | {"bool_masked_pos": torch.from_numpy(masks.reshape(len(keys), -1))}


def random_masks(rng: SampleRNG, units: tuple[int, int], ratio: float) -> np.ndarray:
    """Draw masks (B, *units) of which the same share is True."""
    ranks = np.argsort(rng.uniforms(math.prod(units)), axis=1)
    return (ranks < round(ratio * ranks.shape[1])).reshape(-1, *units)
