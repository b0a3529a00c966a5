"""Transforms of whole batches against torchvision's of one image at a time."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from hf_vit_scratch.data import transforms
from hf_vit_scratch.data.augmentation import GREY
from hf_vit_scratch.data.mixup import Mixup
from hf_vit_scratch.data.transforms import (
    SampleRNG,
    _rectangles,
    apply,
    random_affine,
    random_erasing,
    random_policy,
    random_resized_crop,
    resized_crops_by_products,
)

POLICIES = (v2.TrivialAugmentWide(fill=[GREY] * 3), v2.RandAugment(fill=[GREY] * 3))
BINS = (0, 3, 7, 11, 17, 23, 27, 30)


class Chosen(SampleRNG):
    """SampleRNG that are given, as shares of the range that is asked for."""

    def __init__(self, *shares):
        self.shares = [np.array(share) for share in shares]
        self.state = self.shares[0]

    def uniform(self, low=0.0, high=1.0):
        return low + (high - low) * self.shares.pop(0)


@pytest.fixture
def images(photographs):
    """Eight images, (8, 3, 32, 40)."""
    crops = [photographs[i % 2].crop((40 * i, 30 * i, 40 * i + 240, 30 * i + 192)) for i in range(8)]
    return torch.stack([TF.pil_to_tensor(crop.resize((40, 32))) for crop in crops])


# SampleRNG


def test_draws_are_those_of_splitmix64():
    draws = SampleRNG([(0,)])
    draws.state = np.array([1234567], np.uint64)

    # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    for number in (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431):
        assert draws.uniform()[0] == (number >> 11) / 2**53


def test_draws_depend_on_their_key_alone():
    together, alone = SampleRNG([(1, 2, 3), (4, 5, 6), (1, 2, 4)]), SampleRNG([(4, 5, 6)])

    for _ in range(3):
        first, second, third = together.uniform()
        assert second == alone.uniform()[0]
        assert len({first, second, third}) == 3


def test_draws_of_neighbouring_keys_are_uniform_and_independent():
    draws = SampleRNG([(0, 0, row) for row in range(20_000)])
    first, second = draws.uniform(), draws.uniform(-3, 1)

    assert stats.kstest(first, stats.uniform.cdf).pvalue > 0.01
    assert stats.kstest(second, stats.uniform(-3, 4).cdf).pvalue > 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03
    assert np.bincount(draws.integers(4)).min() > 4800


# Crops, affine maps, rectangles


def test_resized_crops_are_those_of_torchvision(images):
    keys = [(row,) for row in range(8)]
    boxes = _rectangles(SampleRNG(keys), (32, 40), (0.2, 1.0), (3 / 4, 4 / 3))

    one_by_one = random_resized_crop(images, SampleRNG(keys), (24, 30), 0.2)
    by_products = resized_crops_by_products(images, boxes, (24, 30))  # as on an accelerator

    expected = torch.stack(
        [TF.resized_crop(image, *box, size=[24, 30]) for image, box in zip(images, boxes.T.tolist(), strict=True)]
    )
    assert torch.equal(one_by_one, expected)
    assert (by_products.int() - expected.int()).abs().max() <= 1


def test_crop_of_an_image_depends_on_its_own_key_alone(images):
    crops = random_resized_crop(images[:3], SampleRNG([(0,), (1,), (2,)]), (24, 30), 0.2)

    assert torch.equal(crops[1:2], random_resized_crop(images[1:2], SampleRNG([(1,)]), (24, 30), 0.2))


def test_resized_crop_keeps_at_least_its_share_of_the_area():
    gradient = torch.arange(100, dtype=torch.uint8).expand(200, 3, 100, 100)

    crops = random_resized_crop(gradient, SampleRNG([(row,) for row in range(200)]), (100, 100), 0.25)

    # The width of a crop shows in the range of the gradient; ratio 4/3 at the most, so at least sqrt(.25 * 3/4) wide.
    widths = [int(image.max()) - int(image.min()) for image in crops]
    assert min(widths) >= 40
    assert len(set(widths)) > 10


def test_image_that_no_crop_fits_is_cut_in_the_middle(images):
    wide = images[:, :, 10:14]  # (8, 3, 4, 40): no crop of nearly all of it can have a ratio of at most 4/3

    crops = random_resized_crop(wide, SampleRNG([(row,) for row in range(8)]), (4, 5), 0.9999)

    torch.manual_seed(0)
    expected = v2.RandomResizedCrop((4, 5), scale=(0.9999, 1.0), antialias=True)(wide)
    assert (crops.int() - expected.int()).abs().max() <= 1


def test_affine_maps_are_those_of_torchvision(images):
    shares = [np.linspace(0.05, 0.95, 8), np.linspace(0.9, 0.1, 8), np.linspace(0.2, 0.6, 8), np.linspace(0, 1, 8)]

    moved = random_affine(images, Chosen(*shares), degrees=30, translate=0.2, scale=0.3)

    for image, result, (angle, across, down, scale) in zip(images, moved, np.stack(shares, 1).tolist(), strict=True):
        shift = [round((0.4 * across - 0.2) * 40), round((0.4 * down - 0.2) * 32)]
        expected = TF.affine(
            TF.to_pil_image(image),  # not of a tensor, which fades at the border
            60 * angle - 30, shift, 0.7 + 0.6 * scale, [0.0, 0.0], v2.InterpolationMode.BILINEAR,
        )  # fmt: skip
        assert (result.int() - TF.pil_to_tensor(expected).int()).abs().max() <= 1


def test_rectangles_have_the_areas_and_places_that_are_asked_for():
    rectangles = _rectangles(SampleRNG([(row,) for row in range(5000)]), (100, 80), (0.1, 0.3), (0.5, 2.0))

    top, left, height, width = rectangles
    area = height * width / 8000
    assert 0.09 < area.min() < 0.11
    assert 0.29 < area.max() < 0.31
    assert stats.kstest(area, stats.uniform(0.1, 0.2).cdf).statistic < 0.03
    assert stats.kstest(np.log(width / height), stats.uniform(np.log(0.5), np.log(4)).cdf).statistic < 0.03
    assert top.min() == 0 == left.min()
    assert (top + height).max() == 100
    assert (left + width).max() == 80


def test_share_of_erased_images(images):
    many = images.repeat(100, 1, 1, 1)

    erased = random_erasing(many, SampleRNG([(row,) for row in range(800)]), 0.3, GREY)

    shares = (erased != many).any(1).flatten(1).float().mean(1)  # of the pixels of each image
    assert (shares > 0).float().mean() == pytest.approx(0.3, abs=0.05)
    assert 0.25 < shares.max() < 0.36  # whole pixels


def test_erasing_leaves_a_row_and_a_column_as_torchvision_does():
    many = torch.zeros(500, 1, 8, 8, dtype=torch.uint8)

    erased = random_erasing(many, SampleRNG([(row,) for row in range(500)]), 1.0, GREY)[:, 0] != 0

    sides = torch.stack((erased.any(2).sum(1), erased.any(1).sum(1)))  # height and width
    assert sides.max() == 7


# Policies


@pytest.mark.parametrize("policy", POLICIES, ids=["trivialaugment", "randaugment"])
@pytest.mark.parametrize("name", [name for name in POLICIES[0]._AUGMENTATION_SPACE if name != "Identity"])
def test_operations_are_those_of_torchvision(policy, name, images):
    magnitudes, signed = policy._AUGMENTATION_SPACE[name]
    values = magnitudes(31, 32, 40)
    strengths = np.array([0.0 if values is None else float(values[i]) for i in BINS]) * (-1.0) ** (
        signed * np.arange(8)
    )

    changed = apply(images, np.array([name] * 8), strengths, GREY)

    for image, result, strength in zip(images, changed, strengths.tolist(), strict=True):
        expected = policy._apply_image_or_video_transform(image, name, strength, policy.interpolation, policy._fill)
        differing = ((result.int() - expected.int()).abs() > 1).float().mean()
        # Turned by 135 degrees, some pixels come from just between two others.
        assert differing < (0.02 if abs(strength) == 135 else 1e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=["trivialaugment", "randaugment"])
def test_policy_draws_for_each_image(policy, images):
    same = images[:1].repeat(200, 1, 1, 1)

    changed = random_policy(same, SampleRNG([(row,) for row in range(200)]), policy, GREY)

    assert len({image.numpy().tobytes() for image in changed}) > 80
    assert torch.equal(same, images[:1].expand(200, -1, -1, -1))  # what is kept for the next epoch


def test_policy_draws_every_operation_and_both_signs_equally_often(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        transforms, "apply", lambda images, names, strength, fill: drawn.append((names, strength)) or images
    )
    number, policy = 14_000, v2.TrivialAugmentWide()

    random_policy(torch.zeros(number, 3, 4, 4, dtype=torch.uint8), SampleRNG([(n,) for n in range(number)]), policy, 0)

    ((names, strength),) = drawn
    counts = Counter(names.tolist())
    assert {*counts} == {*policy._AUGMENTATION_SPACE}
    assert all(850 < count < 1150 for count in counts.values())
    for name, (_, signed) in policy._AUGMENTATION_SPACE.items():
        negative = (strength[names == name] < 0).mean()
        assert 0.4 < negative < 0.6 if signed else negative == 0


@pytest.mark.parametrize("policy", POLICIES, ids=["trivialaugment", "randaugment"])
def test_policy_does_the_same_to_an_image_in_any_batch(policy, images):
    together = random_policy(images, SampleRNG([(row,) for row in range(8)]), policy, GREY)

    for row in range(8):
        assert torch.equal(
            together[row : row + 1], random_policy(images[row : row + 1], SampleRNG([(row,)]), policy, GREY)
        )


# Mixing


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_of_mixup_have_a_beta_distribution(alpha):
    images = torch.tensor([0, 255], dtype=torch.uint8).repeat(2000)[:, None, None, None].expand(-1, 1, 2, 2)
    mixup, keys = Mixup(2, mixup_alpha=alpha), [(row,) for row in range(4000)]

    mixed, _ = mixup(images, torch.zeros(4000, dtype=torch.long), SampleRNG(keys))

    *_, shares = mixup.draw((2, 2), SampleRNG(keys))
    torch.testing.assert_close(mixed[1::2, 0, 0, 0] / 255, torch.from_numpy(shares[1::2]).float())
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_cutmix_takes_the_published_share_of_the_other_image():
    # The mean area of a square of the area u about a uniform place, cut at the borders, with u uniform in [0, 1].
    expected = 1 / 2 - 1 / 5 + 1 / 48

    *_, kept = Mixup(2, cutmix_alpha=1.0).draw((200, 200), SampleRNG([(row,) for row in range(20_000)]))

    assert 1 - kept.mean() == pytest.approx(expected, abs=0.01)


def test_cutmix_is_chosen_for_half_where_both_are():
    images = torch.tensor([0, 255], dtype=torch.uint8).repeat(500)[:, None, None, None].expand(-1, 1, 8, 8)
    keys = SampleRNG([(row,) for row in range(1000)])

    mixed, _ = Mixup(2, mixup_alpha=1.0, cutmix_alpha=1.0)(images, torch.zeros(1000, dtype=torch.long), keys)

    cut = ((mixed == 0) | (mixed == 255)).flatten(1).all(1)
    assert cut.float().mean() == pytest.approx(0.5, abs=0.05)
