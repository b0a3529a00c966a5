import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit_scratch.augmentation import build_augmentation
from hf_vit_scratch.errors import UserError


@pytest.fixture
def picture(photographs):
    return photographs[1].resize((24, 16))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_without_choices_the_image_passes_unchanged(picture):
    augmented = build_augmentation((16, 24))(picture)

    assert augmented.dtype == torch.uint8
    assert torch.equal(augmented, pixels(picture))


def test_image_of_another_size_is_resized(photographs):
    assert build_augmentation((16, 24))(photographs[0]).shape == (3, 16, 24)


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_flip(picture, prob):
    expected = pixels(picture).flip(2) if prob else pixels(picture)

    assert torch.equal(build_augmentation((16, 24), horizontal_flip_prob=prob)(picture), expected)


def test_padded_crop_is_a_window_of_the_reflected_image(picture):
    padded = np.pad(np.array(picture), ((2, 2), (2, 2), (0, 0)), mode="reflect")
    windows = [padded[y : y + 16, x : x + 24].transpose(2, 0, 1) for y in range(5) for x in range(5)]
    augment = build_augmentation((16, 24), crop_padding=2)

    for _ in range(20):
        augmented = augment(picture).numpy()
        assert any(np.array_equal(augmented, window) for window in windows)


def test_translation_moves_by_at_most_its_share(picture):
    dot = Image.new("RGB", (40, 40))
    dot.putpixel((20, 20), (255, 255, 255))
    augment = build_augmentation((40, 40), translation=0.1)

    places = {tuple(augment(dot)[0].nonzero()[0].tolist()) for _ in range(200)}

    assert len(places) > 30
    assert {abs(coordinate - 20) <= 4 for place in places for coordinate in place} == {True}


def test_resized_crop_keeps_at_least_its_share_of_the_area():
    gradient = Image.fromarray(np.arange(100, dtype=np.uint8)[None, :, None].repeat(100, 0).repeat(3, 2))
    augment = build_augmentation((100, 100), random_resized_crop_scale=0.25)

    # The width of a crop shows in the range of the gradient; ratio 4/3 at the most, so at least sqrt(.25 * 3/4) wide.
    widths = [int(image.max()) - int(image.min()) for image in (augment(gradient)[0] for _ in range(100))]

    assert min(widths) >= 40
    assert len(set(widths)) > 10


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"random_resized_crop_scale": 0.0}, r"random_resized_crop_scale must lie in \(0, 1\], got 0.0"),
        ({"crop_padding": 16}, r"crop_padding must be 0 or more and below the image size \(16, 24\), got 16"),
        ({"horizontal_flip_prob": 1.1}, r"horizontal_flip_prob must lie in \[0, 1\], got 1.1"),
        ({"rotation_degrees": -1}, r"rotation_degrees must lie in \[0, 180\], got -1"),
        ({"translation": 1.0}, r"translation must lie in \[0, 1\), got 1.0"),
        ({"scaling": float("nan")}, r"scaling must lie in \[0, 1\), got nan"),
    ],
)
def test_value_out_of_range_is_refused(choice, message):
    with pytest.raises(UserError, match=message):
        build_augmentation((16, 24), **choice)
