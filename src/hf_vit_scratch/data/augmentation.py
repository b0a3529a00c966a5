"""Random changes to training images, chosen by stage of training."""

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

    If chosen, images are smaller at first, and in the last stage there is neither augmentation (`None`) nor mixing.
    The choices are fields of `AugmentationArguments`. The image size is the height and width in pixels.

    Raises:
        UserError: A value is out of its range.
    """
    args = AugmentationArguments(**choices)
    first, last = args.initial_image_size_fraction, args.augmentation_off_fraction
    if (args.initial_image_size is None) != (first == 0):
        raise UserError("initial_image_size and initial_image_size_fraction need each other.")
    if not (first >= 0 and last >= 0 and first + last <= 1):
        raise UserError(
            "initial_image_size_fraction and augmentation_off_fraction must be shares of training, of which 1 is the "
            f"whole; got {first} and {last}."
        )
    first_size: Any = ((args.initial_image_size or image_size) * 2)[:2]
    stages = [Augmentation(tuple(first_size), **choices), Augmentation(image_size, **choices), None]
    return stages, lambda progress: (progress >= first) + (progress >= 1 - last)
