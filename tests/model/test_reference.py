"""The NumPy reference against torch, rung by rung, and the torch model against the reference."""

import math

import numpy as np
import pytest
import torch
from helpers import TINY, randomize_
from torch import nn
from torch.nn import functional as F

from hf_vit_scratch import ViTScratchConfig, ViTScratchModel
from hf_vit_scratch.model import reference

STYLES = pytest.mark.parametrize("norm_first", [False, True], ids=["post_ln", "pre_ln"])
SCALES = pytest.mark.parametrize("std", [0.02, 0.5], ids=["small", "large"])


def random(*shape: int) -> np.ndarray:
    return np.random.standard_normal(shape)


def assert_equal(actual, expected, atol=1e-10):
    actual, expected = (x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in (actual, expected))
    assert actual.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def torch64(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


# Softmax


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_matches_torch(axis):
    scores = random(4, 6) * 5

    assert_equal(reference.softmax(scores, axis), torch.from_numpy(scores).softmax(axis), atol=1e-15)


def test_softmax_of_scores_in_the_thousands_does_not_overflow():
    weights = reference.softmax(np.array([[5000.0, 4999.0], [-9000.0, 9000.0]]))

    first = 1 / (1 + math.exp(-1))
    assert_equal(weights, np.array([[first, 1 - first], [0.0, 1.0]]), atol=1e-15)


# Attention


@pytest.mark.parametrize("value_width", [4, 12], ids=["narrow_values", "full_width_values"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "causal"])
def test_single_head_matches_torch(value_width, masked):
    x, w_q, w_k, w_v = random(7, 12), random(4, 12), random(4, 12), random(value_width, 12)
    mask = reference.causal_mask(7) if masked else None

    output, weights = reference.attention_head(x, w_q, w_k, w_v, mask)

    query, key, value = torch64(x @ w_q.T, x @ w_k.T, x @ w_v.T)
    assert_equal(output, F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=masked)[0])
    additive = torch.zeros(7, 7, dtype=torch.float64)
    if masked:
        additive = additive.masked_fill(torch.ones(7, 7).triu(1) == 1, -math.inf)
    assert_equal(output, F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=additive)[0])
    assert_equal(weights.sum(axis=-1), np.ones(7), atol=1e-15)
    assert not masked or (np.triu(weights, 1) == 0).all()


def test_single_head_of_the_size_of_vit_b16():
    x, w_q, w_k, w_v = random(197, 768), random(64, 768), random(64, 768), random(64, 768)  # scores in the hundreds
    w_o = random(768, 64)

    output, _ = reference.multi_head_attention(x, [(w_q, w_k, w_v)], w_o)

    query, key, value = torch64(x @ w_q.T, x @ w_k.T, x @ w_v.T)
    expected = F.scaled_dot_product_attention(query[None], key[None], value[None])[0] @ torch.from_numpy(w_o.T)
    assert np.isfinite(output).all()
    assert_equal(output / np.abs(output).max(), expected / np.abs(output).max())


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_matches_torch(causal):
    theirs = randomize_(nn.MultiheadAttention(12, 3, bias=False, batch_first=True), 0.5).double().eval()
    w_q, w_k, w_v = (weight.numpy() for weight in theirs.in_proj_weight.detach().chunk(3))
    heads = list(zip(*(np.split(weight, 3) for weight in (w_q, w_k, w_v)), strict=True))
    x = random(7, 12)
    mask = reference.causal_mask(7) if causal else None

    output, weights = reference.multi_head_attention(x, heads, theirs.out_proj.weight.detach().numpy(), mask)

    batch = torch.from_numpy(x)[None]
    forbidden = torch.ones(7, 7).triu(1).bool() if causal else None
    expected, expected_weights = theirs(batch, batch, batch, attn_mask=forbidden, average_attn_weights=False)
    assert_equal(output, expected[0])
    assert_equal(weights, expected_weights[0])


# Blocks


def test_feed_forward_matches_torch():
    network = randomize_(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12)), 0.5).double()
    x = random(7, 12)

    actual = reference.feed_forward(x, *(parameter.detach().numpy() for parameter in network.parameters()))

    assert_equal(actual, network(torch.from_numpy(x)))


def random_block(num_heads=2, width=6):
    def small(*shape):  # without a norm, the tokens grow from block to block
        return 0.3 * random(*shape)

    heads = [(small(3, width), small(3, width), small(width, width)) for _ in range(num_heads)]
    ffn = (small(8, width), small(8), small(width, 8), small(width))
    return heads, small(width, num_heads * width), ffn


def test_residual_stack_adds_every_branch_and_collects_all_weights():
    x, blocks, mask = random(5, 6), [random_block() for _ in range(3)], reference.causal_mask(5)

    output, weights = reference.residual_stack(x, blocks, mask)

    for index, (heads, w_o, (w_1, b_1, w_2, b_2)) in enumerate(blocks):
        contexts = []
        for number, (w_q, w_k, w_v) in enumerate(heads):
            scores = (x @ w_q.T) @ (x @ w_k.T).T / math.sqrt(3)
            exponentials = np.exp(scores - scores.max()) * mask
            by_hand = exponentials / exponentials.sum(1, keepdims=True)
            assert_equal(weights[index, number], by_hand)
            contexts.append(by_hand @ (x @ w_v.T))
        x = x + np.hstack(contexts) @ w_o.T
        x = x + np.maximum(x @ w_1.T + b_1, 0) @ w_2.T + b_2
    assert_equal(output, x)
    assert weights.shape == (3, 2, 5, 5)


@STYLES
@SCALES
def test_encoder_layer_matches_torch(norm_first, std):
    theirs = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=norm_first
    )
    theirs = randomize_(theirs, std).double().eval()
    names = {"self_attn.out_proj": "attention.o_proj", "linear1": "mlp.fc1", "linear2": "mlp.fc2",
             "norm1": "layernorm_before", "norm2": "layernorm_after"}  # fmt: skip
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    parameters = {}
    for kind in ("weight", "bias"):
        for letter, rows in zip("qkv", np.split(state[f"self_attn.in_proj_{kind}"], 3), strict=True):
            parameters[f"attention.{letter}_proj.{kind}"] = rows
        parameters |= {f"{ours}.{kind}": state[f"{name}.{kind}"] for name, ours in names.items()}
    x = random(7, 12)

    output, _ = reference.encoder_layer(x, parameters, num_heads=3, norm_first=norm_first, eps=1e-6)

    assert_equal(output, theirs(torch.from_numpy(x)[None])[0])


# Patches


def test_patches_of_a_photograph_match_unfold(photographs):
    image = np.asarray(photographs[0].resize((224, 224)), dtype=np.float64).transpose(2, 0, 1)

    patches = reference.extract_patches(image, (16, 16))

    assert patches.shape == (196, 768)
    assert_equal(patches, F.unfold(torch.from_numpy(image)[None], 16, stride=16)[0].T, atol=0)


def test_patch_embedding_matches_a_convolution():
    convolution = randomize_(nn.Conv2d(3, 10, (4, 8), stride=(4, 8)), 0.5).double()
    image = random(3, 16, 24)

    actual = reference.patch_embedding(image, convolution.weight.detach().numpy(), convolution.bias.detach().numpy())

    assert_equal(actual, convolution(torch.from_numpy(image)[None])[0].flatten(1).T)


# The whole model


def largest_difference(model: ViTScratchModel, image: np.ndarray) -> float:
    """Between the model and the reference, over every hidden state, the last one, and every attention map."""
    config = model.config
    parameters = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    hidden_states, last, weights = reference.vit(
        image, parameters, num_layers=2, num_heads=4, norm_first=config.norm_first, eps=config.layer_norm_eps,
        mask=reference.causal_mask(13) if config.is_causal else None,
    )  # fmt: skip
    with torch.no_grad():
        outputs = model(torch.from_numpy(image)[None], output_hidden_states=True, output_attentions=True)
    actual = [*outputs.hidden_states, outputs.last_hidden_state, *outputs.attentions]
    expected = [*hidden_states, last, *weights]
    return max(np.abs(ours[0].numpy() - theirs).max() for ours, theirs in zip(actual, expected, strict=True))


def make_model(norm_first=True, std=0.5, **fields):
    config = ViTScratchConfig(**TINY, norm_first=norm_first, attn_implementation="eager", **fields)
    return randomize_(ViTScratchModel(config), std).double().eval()


@STYLES
@SCALES
@pytest.mark.parametrize("fields", [{}, {"is_causal": True}, {"qkv_bias": False}], ids=["plain", "causal", "no_bias"])
def test_model_matches_the_reference(norm_first, std, fields):
    assert largest_difference(make_model(norm_first, std, **fields), random(3, 16, 24)) < 1e-10


# The mistakes of a well-known step-by-step implementation; each planted here, and each must be seen.


def test_softmax_over_the_queries_is_seen(monkeypatch):
    model, softmax = make_model(), torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda scores, dim: softmax(scores, -2))

    assert largest_difference(model, random(3, 16, 24)) > 1e-3


def test_patches_flattened_in_another_channel_order_are_seen(monkeypatch):
    model, embed = make_model(), F.conv2d
    monkeypatch.setattr("torch.nn.modules.conv.F.conv2d", lambda x, weight, *rest: embed(x, weight.flip(1), *rest))

    assert largest_difference(model, random(3, 16, 24)) > 1e-3


def test_missing_final_norm_is_seen():
    model = make_model()
    model.layernorm.forward = lambda hidden_states: hidden_states

    assert largest_difference(model, random(3, 16, 24)) > 1e-3
