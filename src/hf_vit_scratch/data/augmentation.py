"""Random changes to training images, and mixtures of two of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from ..errors import UserError
from .transforms import (
    SampleRNG,
    random_affine,
    random_crop_and_flip,
    random_erasing,
    random_policy,
    random_resized_crop,
)

POLICIES = ("randaugment", "trivialaugment")
GREY = 127  # what the default image processor makes 0


@dataclass
class Augmentation:
    """The chosen augmentations: crops first, then the others in the order of the arguments.

    An image is augmented alone, by torchvision's v2 transforms in PIL, or in a batch of images of one size, by those
    of `hf_vit_scratch.data.transforms`, which are the same but for what is drawn and the rounding of resized pixels.

    Args:
        image_size: Height and width of the result, pixels.
        random_resized_crop_scale: Least share of the image's area that a random crop keeps before it is resized
            (Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6); `None` resizes the whole image.
        crop_padding: Pixels by which the resized image is padded (by reflection) on each side before a crop of
            `image_size`.
        horizontal_flip_prob: Probability of a mirror image.
        rotation_degrees: Largest rotation to either side.
        translate: Largest shift to any side, as a share of height and width.
        scale: Largest relative change of size, up or down.
        auto_augment: `"randaugment"` (Cubuk et al. 2019, https://arxiv.org/abs/1909.13719) or `"trivialaugment"`
            (Mueller and Hutter 2021, https://arxiv.org/abs/2103.10158).
        randaugment_num_ops: Number of operations that RandAugment draws per image.
        randaugment_magnitude: Their strength, 0 to 30.
        random_erasing_prob: Probability that a random rectangle turns grey (Zhong et al. 2017,
            https://arxiv.org/abs/1708.04896).

    Raises:
        UserError: A value is out of its range; the message names it.
    """

    image_size: tuple[int, int]
    random_resized_crop_scale: float | None = None
    crop_padding: int = 0
    horizontal_flip_prob: float = 0.0
    rotation_degrees: float = 0.0
    translate: float = 0.0
    scale: float = 0.0
    auto_augment: str | None = None
    randaugment_num_ops: int = 2
    randaugment_magnitude: int = 9
    random_erasing_prob: float = 0.0

    def __post_init__(self) -> None:
        if self.random_resized_crop_scale is not None and not 0 < self.random_resized_crop_scale <= 1:
            raise UserError(f"random_resized_crop_scale must lie in (0, 1], got {self.random_resized_crop_scale}.")
        if not 0 <= self.crop_padding < min(self.image_size):
            raise UserError(
                f"crop_padding must be 0 or more and below the image size {self.image_size}, got {self.crop_padding}."
            )
        if not 0 <= self.horizontal_flip_prob <= 1:
            raise UserError(f"horizontal_flip_prob must lie in [0, 1], got {self.horizontal_flip_prob}.")
        if not 0 <= self.rotation_degrees <= 180:
            raise UserError(f"rotation_degrees must lie in [0, 180], got {self.rotation_degrees}.")
        for name, share in (("translate", self.translate), ("scale", self.scale)):
            if not 0 <= share < 1:
                raise UserError(f"{name} must lie in [0, 1), got {share}.")

        if self.auto_augment not in (None, *POLICIES):
            raise UserError(f"auto_augment must be one of {', '.join(POLICIES)}; got {self.auto_augment!r}.")
        if self.randaugment_num_ops < 1:
            raise UserError(f"randaugment_num_ops must be at least 1, got {self.randaugment_num_ops}.")
        if not 0 <= self.randaugment_magnitude <= 30:
            raise UserError(f"randaugment_magnitude must lie in [0, 30], got {self.randaugment_magnitude}.")
        if not 0 <= self.random_erasing_prob <= 1:
            raise UserError(f"random_erasing_prob must lie in [0, 1], got {self.random_erasing_prob}.")

        self.policy: v2.RandAugment | v2.TrivialAugmentWide | None = None
        fill = (GREY, GREY, GREY)
        if self.auto_augment == "randaugment":
            self.policy = v2.RandAugment(self.randaugment_num_ops, self.randaugment_magnitude, fill=fill)
        elif self.auto_augment == "trivialaugment":
            self.policy = v2.TrivialAugmentWide(fill=fill)
        self._one = self._torchvision_transforms()

    def __call__(self, image: Image.Image) -> Tensor:
        """An RGB image as a uint8 tensor (3, height, width), random by torch's global generator."""
        return self._one(image)

    def batch(self, images: Tensor, draws: SampleRNG) -> Tensor:
        """Images of one size, uint8 (B, 3, old height, old width) -> (B, 3, height, width), on their device."""
        if self.random_resized_crop_scale is not None:
            images = random_resized_crop(images, draws, self.image_size, self.random_resized_crop_scale)
        elif images.shape[-2:] != self.image_size:
            images = TF.resize(images, list(self.image_size), antialias=True)
        if self.rotation_degrees or self.translate or self.scale:
            images = random_affine(images, draws, self.rotation_degrees, self.translate, self.scale)
        if self.crop_padding or self.horizontal_flip_prob:
            images = random_crop_and_flip(images, draws, self.crop_padding, self.horizontal_flip_prob)
        if self.policy is not None:
            images = random_policy(images, draws, self.policy, GREY)
        if self.random_erasing_prob:
            images = random_erasing(images, draws, self.random_erasing_prob, GREY)
        return images

    def _torchvision_transforms(self) -> Callable[[Image.Image], Tensor]:
        transforms: list[Callable] = []
        if self.random_resized_crop_scale is not None:
            transforms.append(
                v2.RandomResizedCrop(self.image_size, scale=(self.random_resized_crop_scale, 1.0), antialias=True)
            )
        else:
            transforms.append(v2.Resize(self.image_size, antialias=True))
        if self.rotation_degrees or self.translate or self.scale:
            transforms.append(
                v2.RandomAffine(
                    self.rotation_degrees,
                    translate=(self.translate, self.translate),
                    scale=(1 - self.scale, 1 + self.scale),
                    interpolation=v2.InterpolationMode.BILINEAR,
                )
            )
        if self.crop_padding:
            transforms.append(v2.RandomCrop(self.image_size, padding=self.crop_padding, padding_mode="reflect"))
        if self.horizontal_flip_prob:
            transforms.append(v2.RandomHorizontalFlip(self.horizontal_flip_prob))
        if self.policy is not None:
            transforms.append(self.policy)
        # The tensor is made late: the geometric transforms are four times as fast on a small PIL image.
        transforms.append(v2.PILToTensor())
        if self.random_erasing_prob:
            transforms.append(v2.RandomErasing(self.random_erasing_prob, value=GREY))
        return v2.Compose(transforms)


def training_stages(
    image_size: tuple[int, int],
    *,
    initial_image_size: tuple[int, int] | None = None,
    initial_image_size_fraction: float = 0.0,
    augmentation_off_fraction: float = 0.0,
    **augmentation: Any,
) -> tuple[list[Augmentation | None], Callable[[float], int]]:
    """The augmentation of each stage of training, and which stage it is.

    Smaller images at first (Tan and Le 2021, https://arxiv.org/abs/2104.00298, section 4), and neither augmentation
    nor mixing at last (Ge et al. 2021, YOLOX, https://arxiv.org/abs/2107.08430, section 2.1), where chosen.

    Args:
        image_size: Height and width, pixels.
        initial_image_size: Those of the first stage.
        initial_image_size_fraction: Share of training that the first stage lasts.
        augmentation_off_fraction: Share of training that the last stage lasts.
        augmentation: Arguments of `Augmentation`.

    Returns:
        The augmentations, `None` for the stage without one; and the number of the stage from the share of training
        that is done.

    Raises:
        UserError: A value is out of its range.
    """
    if (initial_image_size is None) != (initial_image_size_fraction == 0):
        raise UserError("initial_image_size and initial_image_size_fraction need each other.")
    first, last = initial_image_size_fraction, augmentation_off_fraction
    if not (first >= 0 and last >= 0 and first + last <= 1):
        raise UserError(
            "initial_image_size_fraction and augmentation_off_fraction must be shares of training, of which 1 is the "
            f"whole; got {first} and {last}."
        )
    stages = [(first, Augmentation(initial_image_size or image_size, **augmentation)),
              (1 - last, Augmentation(image_size, **augmentation)), (1.0, None)]  # fmt: skip
    ends = [end for end, _ in stages[:-1]]
    return [augment for _, augment in stages], lambda progress: sum(progress >= end for end in ends)
