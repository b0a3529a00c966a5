"""A patch embedding that is drawn by the images' covariance: whitened is what whitened means."""

import numpy as np
import pytest
import torch
from helpers import TINY
from torch.nn import functional as F
from transformers import ViTImageProcessor

from hf_vit_scratch import ViTScratchConfig, ViTScratchModel
from hf_vit_scratch.training.initial_weights import whiten_patches


@pytest.fixture
def pixels(photographs):
    """Crops of two real photographs, (64, 3, 32, 48)."""
    crops = [
        photograph.crop((48 * i, 32 * j, 48 * i + 48, 32 * j + 32))
        for photograph in photographs
        for i in range(8)
        for j in range(4)
    ]
    return ViTImageProcessor(size={"height": 32, "width": 48})(crops, return_tensors="pt")["pixel_values"]


def tokens_of(model, pixels):
    return model.embeddings.patch_embeddings(pixels).detach().flatten(0, 1).double()


def test_tokens_are_centred_and_of_about_one_size(pixels):
    model = ViTScratchModel(ViTScratchConfig(**TINY | {"patch_size": 4, "hidden_size": 64}))
    whiten_patches(model, pixels)
    tokens = tokens_of(model, pixels)
    torch.testing.assert_close(tokens.mean(0), torch.zeros(64, dtype=torch.float64), rtol=0, atol=1e-4)
    assert 0.1 < tokens.var() < 1.1  # 1 but for directions that hardly vary, of which photographs have many


def test_directions_of_the_patches_become_alike(pixels):
    """The variances of the tokens along the filters' span, against those of a random embedding."""

    def spread(model):
        variances = np.linalg.eigvalsh(np.cov(tokens_of(model, pixels).numpy(), rowvar=False))[-48:]
        return variances[-1] / np.median(variances)

    model = ViTScratchModel(ViTScratchConfig(**TINY | {"patch_size": 4, "hidden_size": 64}))
    random = spread(model)
    whiten_patches(model, pixels)
    assert spread(model) < 0.05 * random


def test_it_is_the_inverse_root_of_the_covariance(pixels):
    model = ViTScratchModel(ViTScratchConfig(**TINY | {"patch_size": 4, "hidden_size": 64})).double()
    torch.manual_seed(3)
    whiten_patches(model, pixels)
    torch.manual_seed(3)
    random = torch.randn(64, 48, dtype=torch.float64).numpy() / 48**0.5
    patches = F.unfold(pixels, 4, stride=4).transpose(1, 2).reshape(-1, 48).double().numpy()
    covariance = np.cov(patches, rowvar=False, bias=True)
    covariance += 0.04 * np.trace(covariance) / 48 * np.eye(48)
    weight = model.embeddings.patch_embeddings.projection.weight.detach().flatten(1).numpy()
    # The root is symmetric, so (R C^-1/2) C (R C^-1/2)^T is R R^T, and R C^-1/2 R^T is symmetric.
    np.testing.assert_allclose(weight @ covariance @ weight.T, random @ random.T, atol=1e-8)
    np.testing.assert_allclose(weight @ random.T, random @ weight.T, atol=1e-8)


def test_fewer_patches_than_numbers_in_a_patch_give_finite_weights(pixels):
    model = ViTScratchModel(ViTScratchConfig(**TINY | {"patch_size": 16, "image_size": [32, 48], "hidden_size": 64}))
    whiten_patches(model, pixels)  # 384 patches of 768 numbers
    patches = model.embeddings.patch_embeddings(pixels)
    assert 0.1 < patches.std() < 10
