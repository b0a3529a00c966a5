"""Random changes to training images, chosen by stage of training."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchvision.transforms import v2

from ..errors import UserError
from .options import AugmentationArguments
from .transforms import SampleRNG, random_affine, random_crop, random_erasing, random_horizontal_flip, random_policy

GREY = 127  # what the default image processor makes 0


@dataclass
class Augmentation(AugmentationArguments):
    """The chosen augmentations of a batch in one stage of training.

    Each does to every image what torchvision's transform of the same name does to one.
    """

    image_size: tuple[int, int]  # height and width of the result in pixels
    mixes: bool = True  # whether the images are also mixed, if mixing is chosen

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.crop_padding < min(self.image_size):
            raise UserError(
                f"crop_padding must be 0 or more and below the image size {self.image_size}, got {self.crop_padding}."
            )
        self.policy: v2.RandAugment | v2.TrivialAugmentWide | None = None
        if self.auto_augment == "randaugment":
            self.policy = v2.RandAugment(self.randaugment_num_ops, self.randaugment_magnitude)
        elif self.auto_augment == "trivialaugment":
            self.policy = v2.TrivialAugmentWide()

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Augment images on their device, all but the random resized crop: uint8 (B, 3, height, width) -> the same."""
        if self.rotation_degrees or self.translate or self.scale:
            images = random_affine(images, rng, self.rotation_degrees, self.translate, self.scale)
        if self.crop_padding:
            images = random_crop(images, rng, self.crop_padding)
        if self.horizontal_flip_prob:
            images = random_horizontal_flip(images, rng, self.horizontal_flip_prob)
        if self.policy is not None:
            images = random_policy(images, rng, self.policy, GREY)
        if self.random_erasing_prob:
            images = random_erasing(images, rng, self.random_erasing_prob, GREY)
        return images


def training_stages(
    image_size: tuple[int, int], **choices: Any
) -> tuple[list[Augmentation | None], Callable[[float], int]]:
    """Return the augmentation of each stage of training, and a function from the share that is done to the stage.

    If chosen, images are smaller at first, and mixing and a policy come later. The last stage is `None`: neither
    augmentation nor mixing. The choices are fields of `AugmentationArguments`. The image size is the height and width
    in pixels.

    Raises:
        UserError: A value is out of its range.
    """
    args = AugmentationArguments(**choices)
    if (args.initial_image_size is None) != (args.initial_image_size_fraction == 0):
        raise UserError("Give both initial_image_size and initial_image_size_fraction, or neither.")
    first_size: Any = tuple(((args.initial_image_size or image_size) * 2)[:2])
    starts = (args.initial_image_size_fraction, args.mixing_start_fraction, args.policy_start_fraction)
    full_size_start, mixing_start, policy_start = starts
    end = 1 - args.augmentation_off_fraction

    def augmentation_at(progress: float) -> Augmentation:
        milder = {} if progress >= policy_start else {"auto_augment": "none", "random_erasing_prob": 0.0}
        size = image_size if progress >= full_size_start else first_size
        return Augmentation(size, progress >= mixing_start, **choices | milder)

    begins = sorted({0.0, end, *(start for start in starts if start < end)})
    stages = [augmentation_at(begin) if begin < end else None for begin in begins]
    return stages, lambda progress: bisect_right(begins, progress) - 1
