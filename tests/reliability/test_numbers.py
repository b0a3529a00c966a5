"""Properties that hold for every configuration, in float64, and inputs at the ends of what there is."""

import os

import pytest
import torch
from helpers import assert_equal, randomize_
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification

pytestmark = pytest.mark.slow

CASES = 300 if os.environ.get("RELIABILITY") == "long" else 40
SEARCH = settings(max_examples=CASES, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "image_size": st.sampled_from([[8, 12], [12, 8]]),
        "patch_size": st.sampled_from([2, 4]),
        "num_hidden_layers": st.integers(1, 3),
        "num_attention_heads": st.sampled_from([1, 2, 4]),
        "intermediate_size": st.sampled_from([8, 40]),
        "position_embedding_type": st.sampled_from(["learned", "sincos2d", "rope2d"]),
        "pooling": st.sampled_from(["cls", "mean"]),
        "norm_first": st.booleans(),
        "qk_norm": st.booleans(),
        "qkv_bias": st.booleans(),
    }
)


def model_of(fields, **more):
    torch.manual_seed(0)
    config = ViTScratchConfig(**{"hidden_size": 32, "num_labels": 3} | fields | more)
    model = ViTScratchForImageClassification(config).double().eval()
    randomize_(model, std=0.3)
    return model, torch.randn(3, 3, *config.image_height_width, dtype=torch.float64)


def shuffled(pixels, patch, order):
    """The patches of the images in another order."""
    rows, cols = pixels.shape[2] // patch, pixels.shape[3] // patch
    cut = pixels.unflatten(2, (rows, patch)).unflatten(4, (cols, patch)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    cut = cut[:, order].unflatten(1, (rows, cols)).permute(0, 3, 1, 4, 2, 5)
    return cut.flatten(4, 5).flatten(2, 3)


@SEARCH
@given(CONFIGURATIONS)
def test_without_positions_shuffled_patches_give_shuffled_tokens(fields):
    model, pixels = model_of(fields, position_embedding_type="learned")
    model.vit.embeddings.position_embeddings.data.zero_()
    prefix, order = (
        model.config.num_prefix_tokens,
        torch.randperm(model.config.grid_size[0] * model.config.grid_size[1]),
    )
    with torch.no_grad():
        tokens = model.vit(pixels).last_hidden_state
        others = model.vit(shuffled(pixels, fields["patch_size"], order)).last_hidden_state
    assert_equal(others[:, prefix:], tokens[:, prefix:][:, order])
    assert_equal(others[:, :prefix], tokens[:, :prefix])


@SEARCH
@given(CONFIGURATIONS)
def test_image_has_the_same_logits_in_every_batch(fields):
    model, pixels = model_of(fields)
    with torch.no_grad():
        assert_equal(model(pixels).logits, torch.cat([model(image[None]).logits for image in pixels]))
        pixels[1] = 1e6 * torch.randn_like(pixels[1])
        assert_equal(model(pixels).logits[[0, 2]], model(pixels[[0, 2]]).logits)


@SEARCH
@given(CONFIGURATIONS, st.data())
def test_causal_tokens_know_nothing_of_later_patches(fields, data):
    model, pixels = model_of(fields, is_causal=True, pooling="mean")
    token = data.draw(st.integers(0, model.config.grid_size[0] * model.config.grid_size[1] - 1))
    pixels.requires_grad_()
    output = model.vit(pixels).last_hidden_state[:, token]
    (gradient,) = torch.autograd.grad((output * torch.randn_like(output)).sum(), pixels)
    patch, (rows, cols) = fields["patch_size"], model.config.grid_size
    by_patch = gradient.unflatten(2, (rows, patch)).unflatten(4, (cols, patch)).abs().amax((0, 1, 3, 5)).flatten()
    assert (by_patch[token + 1 :] == 0).all()
    assert by_patch[token] > 0


EXTREMES = {
    "black": lambda shape: torch.full(shape, -1.0),
    "white": lambda shape: torch.full(shape, 1.0),
    "grey": torch.zeros,
    "nearly constant": lambda shape: torch.full(shape, 1.0) + 1e-7 * torch.randn(shape),
    "chessboard": lambda shape: (
        (torch.arange(shape[-1]) + torch.arange(shape[-2])[:, None]).expand(shape) % 2 * 2.0 - 1
    ),
    "a hundred times too bright": lambda shape: 100 * torch.randn(shape),
}


@pytest.mark.parametrize(
    ("weights", "autocast"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
def test_extreme_images_have_finite_logits_and_gradients(extreme, weights, autocast, norm_first):
    torch.manual_seed(0)
    model = ViTScratchForImageClassification(
        ViTScratchConfig(image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
                         intermediate_size=64, norm_first=norm_first, num_labels=3)
    ).to(weights)  # fmt: skip
    pixels = EXTREMES[extreme]((2, 3, 16, 16))
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        outputs = model(pixels, labels=torch.tensor([0, 2]))
    outputs.loss.backward()
    assert outputs.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
