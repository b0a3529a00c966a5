"""Random changes to training images, and mixtures of two of them, from torchvision's v2 transforms."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from .errors import UserError

POLICIES = ("randaugment", "trivialaugment")
GREY = 127  # what the default image processor makes 0


def build_augmentation(
    image_size: tuple[int, int],
    *,
    random_resized_crop_scale: float | None = None,
    crop_padding: int = 0,
    horizontal_flip_prob: float = 0.0,
    rotation_degrees: float = 0.0,
    translation: float = 0.0,
    scaling: float = 0.0,
    auto_augment: str | None = None,
    randaugment_num_ops: int = 2,
    randaugment_magnitude: int = 9,
    random_erasing_prob: float = 0.0,
) -> Callable[[Image.Image], Tensor]:
    """Chain the chosen augmentations, in the order of the arguments below but for the crops, which come first.

    Args:
        image_size: Height and width of the result, pixels.
        random_resized_crop_scale: Least share of the image's area that a random crop keeps before it is resized
            (Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6); `None` resizes the whole image.
        crop_padding: Pixels by which the resized image is padded (by reflection) on each side before a crop of
            `image_size`.
        horizontal_flip_prob: Probability of a mirror image.
        rotation_degrees: Largest rotation to either side.
        translation: Largest shift to any side, as a share of height and width.
        scaling: Largest relative change of size, up or down.
        auto_augment: `"randaugment"` (Cubuk et al. 2019, https://arxiv.org/abs/1909.13719) or `"trivialaugment"`
            (Mueller and Hutter 2021, https://arxiv.org/abs/2103.10158).
        randaugment_num_ops: Number of operations that RandAugment draws per image.
        randaugment_magnitude: Their strength, 0 to 30.
        random_erasing_prob: Probability that a random rectangle turns grey (Zhong et al. 2017,
            https://arxiv.org/abs/1708.04896).

    Returns:
        A function of an RGB image that returns a uint8 tensor (3, height, width); it draws from torch's generator.

    Raises:
        UserError: A value is out of its range; the message names it.
    """
    if random_resized_crop_scale is not None and not 0 < random_resized_crop_scale <= 1:
        raise UserError(f"random_resized_crop_scale must lie in (0, 1], got {random_resized_crop_scale}.")
    if not 0 <= crop_padding < min(image_size):
        raise UserError(f"crop_padding must be 0 or more and below the image size {image_size}, got {crop_padding}.")
    if not 0 <= horizontal_flip_prob <= 1:
        raise UserError(f"horizontal_flip_prob must lie in [0, 1], got {horizontal_flip_prob}.")
    if not 0 <= rotation_degrees <= 180:
        raise UserError(f"rotation_degrees must lie in [0, 180], got {rotation_degrees}.")
    for name, share in (("translation", translation), ("scaling", scaling)):
        if not 0 <= share < 1:
            raise UserError(f"{name} must lie in [0, 1), got {share}.")

    if auto_augment not in (None, *POLICIES):
        raise UserError(f"auto_augment must be one of {', '.join(POLICIES)}; got {auto_augment!r}.")
    if randaugment_num_ops < 1:
        raise UserError(f"randaugment_num_ops must be at least 1, got {randaugment_num_ops}.")
    if not 0 <= randaugment_magnitude <= 30:
        raise UserError(f"randaugment_magnitude must lie in [0, 30], got {randaugment_magnitude}.")
    if not 0 <= random_erasing_prob <= 1:
        raise UserError(f"random_erasing_prob must lie in [0, 1], got {random_erasing_prob}.")

    transforms: list[Callable] = []
    if random_resized_crop_scale is not None:
        transforms.append(v2.RandomResizedCrop(image_size, scale=(random_resized_crop_scale, 1.0), antialias=True))
    else:
        transforms.append(v2.Resize(image_size, antialias=True))
    if rotation_degrees or translation or scaling:
        transforms.append(
            v2.RandomAffine(
                rotation_degrees,
                translate=(translation, translation),
                scale=(1 - scaling, 1 + scaling),
                interpolation=v2.InterpolationMode.BILINEAR,
            )
        )
    if crop_padding:
        transforms.append(v2.RandomCrop(image_size, padding=crop_padding, padding_mode="reflect"))
    if horizontal_flip_prob:
        transforms.append(v2.RandomHorizontalFlip(horizontal_flip_prob))
    fill = (GREY, GREY, GREY)
    if auto_augment == "randaugment":
        transforms.append(v2.RandAugment(randaugment_num_ops, randaugment_magnitude, fill=fill))
    elif auto_augment == "trivialaugment":
        transforms.append(v2.TrivialAugmentWide(fill=fill))
    # The tensor is made late: the geometric transforms are four times as fast on a small PIL image.
    transforms.append(v2.PILToTensor())
    if random_erasing_prob:
        transforms.append(v2.RandomErasing(random_erasing_prob, value=GREY))
    return v2.Compose(transforms)


def training_stages(
    image_size: tuple[int, int],
    *,
    initial_image_size: tuple[int, int] | None = None,
    initial_image_size_fraction: float = 0.0,
    augmentation_off_fraction: float = 0.0,
    **augmentation: Any,
) -> tuple[list[Callable[[Image.Image], Tensor] | None], Callable[[float], int]]:
    """The augmentation of each stage of training, and which stage it is.

    Smaller images at first (Tan and Le 2021, https://arxiv.org/abs/2104.00298, section 4), and neither augmentation
    nor mixing at last (Ge et al. 2021, YOLOX, https://arxiv.org/abs/2107.08430, section 2.1), where chosen.

    Args:
        image_size: Height and width, pixels.
        initial_image_size: Those of the first stage.
        initial_image_size_fraction: Share of training that the first stage lasts.
        augmentation_off_fraction: Share of training that the last stage lasts.
        augmentation: As of `build_augmentation`.

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
    stages = [(first, build_augmentation(initial_image_size or image_size, **augmentation)),
              (1 - last, build_augmentation(image_size, **augmentation)), (1.0, None)]  # fmt: skip
    ends = [end for end, _ in stages[:-1]]
    return [augment for _, augment in stages], lambda progress: sum(progress >= end for end in ends)


class Mixing:
    """The targets of training: class probabilities, smoothed, and mixed together with the images.

    MixUp (Zhang et al. 2017, https://arxiv.org/abs/1710.09412, equation 1), CutMix (Yun et al. 2019,
    https://arxiv.org/abs/1905.04899, equation 1), one of the two by chance where both are chosen, and label smoothing
    (Szegedy et al. 2015, https://arxiv.org/abs/1512.00567, section 7).

    Args:
        num_classes: L.
        mixup_alpha: Share from Beta(alpha, alpha); 0 for no MixUp.
        cutmix_alpha: The same for the area of CutMix.
        mixing_prob: Probability that an image is mixed at all.
        label_smoothing: Probability mass that is spread evenly over all classes.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        mixing_prob: float = 1.0,
        label_smoothing: float = 0.0,
    ):
        for name, alpha in (("mixup_alpha", mixup_alpha), ("cutmix_alpha", cutmix_alpha)):
            if not 0 <= alpha < float("inf"):
                raise UserError(f"{name} must be 0 or more, got {alpha}.")
        if not 0 <= mixing_prob <= 1:
            raise UserError(f"mixing_prob must lie in [0, 1], got {mixing_prob}.")
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing_factor must lie in [0, 1), got {label_smoothing}.")
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.mixers: list[Callable] = []
        if mixup_alpha:
            self.mixers.append(v2.MixUp(alpha=mixup_alpha, num_classes=num_classes))
        if cutmix_alpha:
            self.mixers.append(v2.CutMix(alpha=cutmix_alpha, num_classes=num_classes))
        self.mixing_prob = mixing_prob if self.mixers else 0.0

    @property
    def changes_targets(self) -> bool:
        """Whether targets are anything else than class ids."""
        return bool(self.mixing_prob or self.label_smoothing)

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the second of two images into the first; random by torch's global generator.

        Shapes: float images (2, C, height, width) and class ids (2,) -> (C, height, width) and probabilities (L,).
        """
        mixer = self.mixers[int(torch.randint(len(self.mixers), ()))]
        images, targets = mixer(images, labels)
        return images[0], targets[0]

    def smooth(self, targets: Tensor) -> Tensor:
        """Class ids (B,) or probabilities (B, L) as smoothed probabilities (B, L)."""
        if not targets.is_floating_point():
            targets = F.one_hot(targets, self.num_classes).float()
        return targets * (1 - self.label_smoothing) + self.label_smoothing / self.num_classes
