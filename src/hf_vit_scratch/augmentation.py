"""Random changes to training images that keep their label, from torchvision's v2 transforms."""

from collections.abc import Callable

from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from .errors import UserError


def build_augmentation(
    image_size: tuple[int, int],
    *,
    random_resized_crop_scale: float | None = None,
    crop_padding: int = 0,
    horizontal_flip_prob: float = 0.0,
    rotation_degrees: float = 0.0,
    translation: float = 0.0,
    scaling: float = 0.0,
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
    # The tensor is made last: the geometric transforms are four times as fast on a small PIL image.
    return v2.Compose([*transforms, v2.PILToTensor()])
