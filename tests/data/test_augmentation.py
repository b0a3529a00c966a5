import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from hf_vit_scratch.data.augmentation import GREY, Augmentation, training_stages
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.data.transforms import SampleRNG
from hf_vit_scratch.errors import UserError


@pytest.fixture
def picture(photographs):
    return photographs[1].resize((24, 16))


@pytest.fixture
def augmenting():
    """Builds a function of a PIL image that augments it in a batch, with other draws at every call."""

    def build(image_size, **choices):
        augmentation, calls = Augmentation(image_size, **choices), itertools.count()

        def one_of_a_batch(image):
            rng = SampleRNG([(next(calls),), (next(calls),)])
            return augmentation(torch.stack((pixels(image), 255 - pixels(image))), rng)[0]

        return one_of_a_batch

    return build


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_without_choices_the_image_passes_unchanged(augmenting, picture):
    augmented = augmenting((16, 24))(picture)

    assert augmented.dtype == torch.uint8
    assert torch.equal(augmented, pixels(picture))


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_flip(augmenting, picture, prob):
    expected = pixels(picture).flip(2) if prob else pixels(picture)

    assert torch.equal(augmenting((16, 24), horizontal_flip_prob=prob)(picture), expected)


def test_padded_crop_is_a_window_of_the_reflected_image(augmenting, picture):
    padded = np.pad(np.array(picture), ((2, 2), (2, 2), (0, 0)), mode="reflect")
    windows = [padded[y : y + 16, x : x + 24].transpose(2, 0, 1) for y in range(5) for x in range(5)]
    augment = augmenting((16, 24), crop_padding=2)

    for _ in range(20):
        augmented = augment(picture).numpy()
        assert any(np.array_equal(augmented, window) for window in windows)


def test_translation_moves_by_at_most_its_share(augmenting, picture):
    dot = Image.new("RGB", (40, 40))
    dot.putpixel((20, 20), (255, 255, 255))
    augment = augmenting((40, 40), translate=0.1)

    places = {tuple(augment(dot)[0].nonzero()[0].tolist()) for _ in range(200)}

    assert len(places) > 30
    assert {abs(coordinate - 20) <= 4 for place in places for coordinate in place} == {True}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"random_resized_crop_scale": 0.0}, r"random_resized_crop_scale must lie in \(0, 1\], got 0.0"),
        ({"crop_padding": 16}, r"crop_padding must be 0 or more and below the image size \(16, 24\), got 16"),
        ({"horizontal_flip_prob": 1.1}, r"horizontal_flip_prob must lie in \[0, 1\], got 1.1"),
        ({"rotation_degrees": -1}, r"rotation_degrees must lie in \[0, 180\], got -1"),
        ({"translate": 1.0}, r"translate must lie in \[0, 1\), got 1.0"),
        ({"scale": float("nan")}, r"scale must lie in \[0, 1\), got nan"),
        (
            {"auto_augment": "autoaugment"},
            r"auto_augment must be one of none, randaugment, trivialaugment, got 'autoaugment'",
        ),
        ({"randaugment_num_ops": 0}, r"randaugment_num_ops must be at least 1, got 0"),
        ({"randaugment_magnitude": 31}, r"randaugment_magnitude must lie in \[0, 30\], got 31"),
        ({"random_erasing_prob": 1.5}, r"random_erasing_prob must lie in \[0, 1\], got 1.5"),
    ],
)
def test_value_out_of_range_is_refused(choice, message):
    with pytest.raises(UserError, match=message):
        Augmentation((16, 24), **choice)


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_policy_changes_most_images_and_keeps_their_shape(augmenting, policy, picture):
    augment = augmenting((16, 24), auto_augment=policy)

    augmented = [augment(picture) for _ in range(40)]

    assert {(image.shape, image.dtype) for image in augmented} == {((3, 16, 24), torch.uint8)}
    assert sum(not torch.equal(image, pixels(picture)) for image in augmented) > 20
    assert len({image.numpy().tobytes() for image in augmented}) > 15


def test_stronger_randaugment_changes_more(augmenting, picture):
    def mean_change(magnitude):
        augment = augmenting((16, 24), auto_augment="randaugment", randaugment_magnitude=magnitude)
        return sum((augment(picture).float() - pixels(picture)).abs().mean().item() for _ in range(100))

    assert mean_change(2) < 0.7 * mean_change(25)


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_erasing_turns_a_rectangle_grey(augmenting, prob, picture):
    erased = augmenting((16, 24), random_erasing_prob=prob)(picture)

    changed = (erased != pixels(picture)).any(0)
    assert changed.any() == bool(prob)
    assert set(erased[:, changed].flatten().tolist()) <= {GREY}
    rows, cols = (changed.any(axis).nonzero().flatten() for axis in (1, 0))
    inside = erased[:, rows.min() : rows.max() + 1, cols.min() : cols.max() + 1] if prob else erased[:, :0]
    assert (inside == GREY).all()


def test_stages_of_training_follow_each_other(picture):
    stages, stage = training_stages(
        (16, 24), initial_image_size=(8, 12), initial_image_size_fraction=0.5, augmentation_off_fraction=0.25,
        horizontal_flip_prob=1.0,
    )  # fmt: skip

    assert [stage(progress) for progress in (0, 0.49, 0.5, 0.74, 0.75, 1.0)] == [0, 0, 1, 1, 2, 2]
    images, rng = pixels(picture)[None], SampleRNG([(0,)])
    assert [augmentation.image_size for augmentation in stages[:2]] == [(8, 12), (16, 24)]
    assert torch.equal(stages[1](images, rng), images.flip(3))
    assert stages[2] is None


def test_mixing_policy_and_erasing_begin_later():
    stages, stage = training_stages(
        (16, 24), auto_augment="trivialaugment", random_erasing_prob=0.5, mixing_start_fraction=0.2,
        policy_start_fraction=0.6,
    )  # fmt: skip

    early, middle, late = (stages[stage(progress)] for progress in (0.19, 0.2, 0.6))
    assert [augmentation.mixes for augmentation in (early, middle, late)] == [False, True, True]
    assert (early.policy, middle.policy) == (None, None)
    assert isinstance(late.policy, v2.TrivialAugmentWide)
    assert [augmentation.random_erasing_prob for augmentation in (early, middle, late)] == [0, 0, 0.5]


def test_last_stage_comes_before_what_would_begin_after_it():
    stages, stage = training_stages((16, 24), policy_start_fraction=0.9, augmentation_off_fraction=0.25)

    assert [stages[stage(progress)] is None for progress in (0.74, 0.75, 0.9)] == [False, True, True]


def test_without_choices_all_of_training_is_one_stage():
    _, stage = training_stages((16, 24))

    assert {stage(progress) for progress in (0, 0.5, 0.999)} == {0}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"initial_image_size": (8, 8)}, r"Give both initial_image_size and initial_image_size_fraction"),
        ({"initial_image_size_fraction": 0.5}, r"Give both initial_image_size and initial_image_size_fraction"),
        ({"augmentation_off_fraction": 1.1}, r"augmentation_off_fraction must lie in \[0, 1\], got 1.1"),
        ({"mixing_start_fraction": -0.1}, r"mixing_start_fraction must lie in \[0, 1\], got -0.1"),
    ],
)
def test_impossible_stages_are_refused(choice, message):
    with pytest.raises(UserError, match=message):
        training_stages((16, 24), **choice)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"mixup_alpha": -1.0}, r"mixup_alpha must be 0 or more, got -1.0"),
        ({"cutmix_alpha": float("inf")}, r"cutmix_alpha must be 0 or more, got inf"),
        ({"mixup_prob": 2.0}, r"mixup_prob must lie in \[0, 1\], got 2.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\), got 1.0"),
        ({"class_weighting": "balanced"}, r"class_weighting balanced needs class_counts"),
    ],
)
def test_impossible_mixing_is_refused(choice, message):
    with pytest.raises(UserError, match=message):
        Mixup(3, **choice)


def test_smoothed_label_by_hand():
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)

    same, targets = Mixup(4, label_smoothing=0.2)(images, torch.tensor([2]), rng=None)

    assert same is images
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05]]))
