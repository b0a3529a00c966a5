"""Random changes to training images, chosen by stage of training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

Rule = tuple[str, Callable[[Any], bool]]  # in words, and whether a value keeps to it
PROBABILITY: Rule = ("lie in [0, 1]", lambda value: 0 <= value <= 1)
SHARE: Rule = ("lie in [0, 1)", lambda value: 0 <= value < 1)
RULES: dict[str, Rule] = {
    "random_resized_crop_scale": ("lie in (0, 1]", lambda value: value is None or 0 < value <= 1),
    "horizontal_flip_prob": PROBABILITY,
    "rotation_degrees": ("lie in [0, 180]", lambda value: 0 <= value <= 180),
    "translate": SHARE,
    "scale": SHARE,
    "auto_augment": (f"be one of {', '.join(POLICIES)}", lambda value: value in (None, *POLICIES)),
    "randaugment_num_ops": ("be at least 1", lambda value: value >= 1),
    "randaugment_magnitude": ("lie in [0, 30]", lambda value: 0 <= value <= 30),
    "random_erasing_prob": PROBABILITY,
}


@dataclass
class Augmentation:
    """The chosen augmentations of a batch: crops first, then the others in the order of the arguments.

    Each does to every image what torchvision's transform of the same name does to one.

    Args:
        image_size: Height and width of the result in pixels.
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
        for name, (rule, is_allowed) in RULES.items():
            if not is_allowed(value := getattr(self, name)):
                raise UserError(f"{name} must {rule}, got {value!r}.")
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
        """Augment images of one size on their device: uint8 (B, 3, old height, old width) -> (B, 3, height, width)."""
        if self.random_resized_crop_scale is not None:
            images = random_resized_crop(images, rng, self.image_size, self.random_resized_crop_scale)
        elif images.shape[-2:] != self.image_size:
            images = TF.resize(images, list(self.image_size), antialias=True)
        if self.rotation_degrees or self.translate or self.scale:
            images = random_affine(images, rng, self.rotation_degrees, self.translate, self.scale)
        if self.crop_padding or self.horizontal_flip_prob:
            images = random_crop_and_flip(images, rng, self.crop_padding, self.horizontal_flip_prob)
        if self.policy is not None:
            images = random_policy(images, rng, self.policy, GREY)
        if self.random_erasing_prob:
            images = random_erasing(images, rng, self.random_erasing_prob, GREY)
        return images


def training_stages(
    image_size: tuple[int, int],
    *,
    initial_image_size: tuple[int, int] | None = None,
    initial_image_size_fraction: float = 0.0,
    augmentation_off_fraction: float = 0.0,
    **augmentation: Any,
) -> tuple[list[Augmentation | None], Callable[[float], int]]:
    """Return the augmentation of each stage of training, and a function that tells the stage.

    If chosen, images are smaller at first (Tan and Le 2021, https://arxiv.org/abs/2104.00298, section 4), and at the
    end there is neither augmentation nor mixing (Ge et al. 2021, https://arxiv.org/abs/2107.08430, section 2.1).

    Args:
        image_size: Height and width in pixels.
        initial_image_size: Height and width in the first stage.
        initial_image_size_fraction: Share of training that the first stage lasts.
        augmentation_off_fraction: Share of training that the last stage lasts.
        augmentation: Arguments of `Augmentation`.

    Returns:
        The augmentations, with `None` for the last stage; and a function from the share of training that is done to
        the number of the stage.

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
