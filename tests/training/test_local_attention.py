"""Half of the heads start with attention to near patches."""

import pytest
import torch

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training.initial_weights import PLACES, start_local_attention

SIZES = {
    "image_size": 32, "patch_size": 4, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 64, "norm_first": True, "position_embedding_type": "rope2d", "pooling": "mean",
}  # fmt: skip


def attention_of(model, size):
    """Attention weights (H, rows, cols, rows, cols) of each layer, without what the images change."""
    with torch.no_grad():
        for layer in model.vit.layers:
            layer.attention.q_proj.weight.zero_()
            layer.attention.k_proj.weight.zero_()
        maps = model.vit(torch.randn(1, 3, *size), output_attentions=True).attentions
    rows, cols = size[0] // 4, size[1] // 4
    return [layer[0].unflatten(2, (rows, cols)).unflatten(1, (rows, cols)) for layer in maps]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ViTScratchForImageClassification(ViTScratchConfig(**SIZES, attn_implementation="eager")).eval()


def test_first_heads_look_most_at_their_place_and_mostly_around_it(model):
    start_local_attention(model)

    for number, weights in enumerate(attention_of(model, (32, 32))[:-1]):
        for head in range(2):
            down, right = PLACES[(number + head) % len(PLACES)]
            for row, col in ((2, 2), (4, 5), (5, 3)):
                of_patch = weights[head, row, col]
                assert of_patch.argmax() == (row + down) * 8 + col + right
                around = of_patch[row + down - 1 : row + down + 2, col + right - 1 : col + right + 2]
                assert 0.5 < around.sum() < 0.7  # uniform attention has 0.14 there


def test_places_stay_on_smaller_images(model):
    start_local_attention(model)

    weights = attention_of(model, (24, 24))[0][1]  # looks to the right; a patch is wider there

    assert weights[2, 2].argmax() in (2 * 6 + 3, 2 * 6 + 2)


def test_other_heads_and_the_last_layer_start_free(model):
    start_local_attention(model)

    *layers, last = attention_of(model, (32, 32))
    free = [weights[2:] for weights in layers] + [last]
    for weights in free:
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / 64))


def test_rows_and_columns_of_a_wide_image_have_their_own_distance():
    config = ViTScratchConfig(**SIZES | {"image_size": [24, 48]}, attn_implementation="eager")
    model = ViTScratchForImageClassification(config).eval()
    start_local_attention(model)

    down = attention_of(model, (24, 48))[2][0]  # PLACES[2] is below

    assert down[2, 4].argmax() == 3 * 12 + 4


@pytest.mark.parametrize("change", [{"position_embedding_type": "learned"}, {"qk_norm": True}, {"qkv_bias": False}])
def test_models_without_rotary_positions_or_biases_are_refused(change):
    model = ViTScratchForImageClassification(ViTScratchConfig(**SIZES | change))
    with pytest.raises(UserError, match=r"local_attention needs a model with position_embedding_type rope2d"):
        start_local_attention(model)
