"""The model against independent implementations, in float64 with every parameter random."""

import math
import weakref

import pytest
import torch
from helpers import TINY, assert_equal, randomize_
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTModel
from transformers.models.dinov3_vit.configuration_dinov3_vit import DINOv3ViTConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import (
    DINOv3ViTRopePositionEmbedding,
)
from transformers.models.dinov3_vit.modeling_dinov3_vit import (
    apply_rotary_pos_emb as dinov3_apply_rotary_pos_emb,
)

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification, ViTScratchModel
from hf_vit_scratch.model.modeling_vit_scratch import (
    ViTScratchDropPath,
    ViTScratchLayer,
    ViTScratchPreTrainedModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
    interpolate_pos_encoding,
    rope2d_cos_sin,
    sincos2d_positions,
)

SCALES = pytest.mark.parametrize("std", [0.02, 0.5], ids=["small", "large"])
STYLES = pytest.mark.parametrize("norm_first", [False, True], ids=["post_ln", "pre_ln"])
POSITIONS = pytest.mark.parametrize("position_embedding_type", ["learned", "sincos2d", "rope2d"])
POOLINGS = pytest.mark.parametrize("pooling", ["cls", "mean"])


def tiny_model(cls=ViTScratchModel, std=0.5, attn_implementation="eager", **fields):
    config = ViTScratchConfig(**TINY | fields)
    config._attn_implementation = attn_implementation
    return randomize_(cls(config), std).double().eval()


@pytest.fixture
def pixel_values():
    return torch.randn(3, 3, 16, 24, dtype=torch.float64, requires_grad=True)


# Attention


def test_attention_of_two_tokens_by_hand():
    # scores [[ln 3, 0], [0, 0]]: token 0 takes 3/4 of itself and 1/4 of token 1; token 1 takes half of each.
    query = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[math.log(3)], [0.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)

    context, probs = eager_attention_forward(nn.Identity(), query, key, value, None, scaling=1.0)

    assert_equal(probs, torch.tensor([[[[0.75, 0.25], [0.5, 0.5]]]], dtype=torch.float64), atol=1e-15)
    assert_equal(context, torch.tensor([[[[5.0]], [[6.0]]]], dtype=torch.float64), atol=1e-15)


def test_attention_of_scores_in_the_thousands_is_finite():
    query = torch.full((1, 1, 2, 1), 100.0)
    key = torch.tensor([[[[50.0], [-50.0]]]])

    _, probs = eager_attention_forward(nn.Identity(), query, key, torch.ones(1, 1, 2, 1), None, scaling=1.0)

    assert torch.equal(probs[0, 0], torch.tensor([[1.0, 0.0], [1.0, 0.0]]))


CASES = pytest.mark.parametrize(
    "fields",
    [{}, {"is_causal": True}, {"position_embedding_type": "rope2d", "qk_norm": True}],
    ids=["plain", "causal", "rope2d_qk_norm"],
)


@CASES
@STYLES
def test_sdpa_matches_eager_and_so_do_its_gradients(fields, norm_first, pixel_values):
    eager, sdpa = outputs_by_backend("sdpa", fields, norm_first, pixel_values)
    weights = torch.randn_like(eager)

    (eager * weights).sum().backward()
    expected, pixel_values.grad = pixel_values.grad, None
    (sdpa * weights).sum().backward()

    assert_equal(sdpa, eager)
    assert_equal(pixel_values.grad, expected)


@CASES
@STYLES
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch 2.11 itself
def test_flex_attention_matches_eager(fields, norm_first, pixel_values):
    # On the CPU, torch compiles flex attention for float32 alone and has no gradient; uncompiled it takes float64.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        eager, flex = outputs_by_backend("flex_attention", fields, norm_first, pixel_values)

    assert_equal(flex, eager)


@CASES
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_gradients_of_flex_attention_match_eager(fields, pixel_values, monkeypatch):
    # torch refuses these gradients on the CPU because it cannot compile them there; uncompiled they are computed.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)
    with torch.compiler.set_stance("force_eager"):
        eager, flex = outputs_by_backend("flex_attention", fields, True, pixel_values)
        weights = torch.randn_like(eager)
        expected = torch.autograd.grad((eager * weights).sum(), pixel_values)[0]
        actual = torch.autograd.grad((flex * weights).sum(), pixel_values)[0]

    assert_equal(actual, expected)


def outputs_by_backend(attn_implementation, fields, norm_first, pixel_values, std=0.2):
    """The last hidden states of one model, with attention written out and with a backend."""
    model = tiny_model(norm_first=norm_first, std=std, **fields).to(pixel_values)
    outputs = []
    for implementation in ("eager", attn_implementation):
        model.set_attn_implementation(implementation)
        outputs.append(model(pixel_values).last_hidden_state)
    return outputs


def test_output_attentions_under_sdpa_are_those_of_eager(pixel_values):
    eager, sdpa = tiny_model(), tiny_model(attn_implementation="sdpa", is_causal=False)
    sdpa.load_state_dict(eager.state_dict())

    expected = eager(pixel_values, output_attentions=True)
    actual = sdpa(pixel_values, output_attentions=True)

    assert len(actual.attentions) == 2
    assert_equal(torch.stack(actual.attentions), torch.stack(expected.attentions))
    assert_equal(torch.stack(actual.attentions).sum(-1), torch.ones(2, 3, 4, 13, dtype=torch.float64))
    assert sdpa.config._attn_implementation == "sdpa"


def test_causal_output_does_not_depend_on_later_patches(pixel_values):
    model = tiny_model(is_causal=True, pooling="mean", attn_implementation="sdpa")

    model(pixel_values).last_hidden_state[:, :3].sum().backward()  # the first row of patches

    assert pixel_values.grad[:, :, :4].abs().min() > 0
    assert pixel_values.grad[:, :, 4:].abs().max() == 0


def test_query_and_key_norm_makes_attention_independent_of_their_scale(pixel_values):
    model = tiny_model(qk_norm=True, layer_norm_eps=1e-12)
    expected = model(pixel_values).last_hidden_state

    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.layers[0].attention, name).weight.mul_(7)
            getattr(model.layers[0].attention, name).bias.mul_(7)

    assert_equal(model(pixel_values).last_hidden_state, expected, atol=1e-9)


# The whole model


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@SCALES
@torch.no_grad()
def test_pre_ln_model_matches_transformers_vit(std, attn_implementation):
    sizes = TINY | {"image_size": 16, "patch_size": 4}
    # Its eager attention rounds the softmax to float32, so the reference takes sdpa.
    reference = ViTForImageClassification(ViTConfig(**sizes, attn_implementation="sdpa"))
    reference = randomize_(reference, std).double().eval()
    model = tiny_model(
        ViTScratchForImageClassification, attn_implementation=attn_implementation, norm_first=True, **sizes
    )
    model.load_state_dict(reference.state_dict(), strict=True)  # a parameter of another name fails here
    pixel_values = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    expected = reference(pixel_values, output_hidden_states=True)
    actual = model(pixel_values, output_hidden_states=True)

    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_equal(ours, theirs)
    assert_equal(actual.logits, expected.logits)


@SCALES
@torch.no_grad()
def test_post_ln_layer_matches_torch(std):
    config = ViTScratchConfig(**TINY)
    config._attn_implementation = "eager"
    ours = randomize_(ViTScratchLayer(config, 0.0), std).double().eval()
    theirs = nn.TransformerEncoderLayer(
        32, 4, 48, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True, norm_first=False
    ).double().eval()  # fmt: skip
    for name in ("weight", "bias"):
        attention = ours.attention
        packed = torch.cat([getattr(x, name) for x in (attention.q_proj, attention.k_proj, attention.v_proj)])
        getattr(theirs.self_attn, f"in_proj_{name}").copy_(packed)
        for target, source in (
            (theirs.self_attn.out_proj, attention.o_proj), (theirs.linear1, ours.mlp.fc1),
            (theirs.linear2, ours.mlp.fc2), (theirs.norm1, ours.layernorm_before),
            (theirs.norm2, ours.layernorm_after),
        ):  # fmt: skip
            getattr(target, name).copy_(getattr(source, name))
    x = torch.randn(2, 7, 32, dtype=torch.float64)

    assert_equal(ours(x)[0], theirs(x))


@torch.no_grad()
def test_post_ln_embeddings_are_normalised(pixel_values):
    embeddings = tiny_model().embeddings

    tokens = embeddings.patch_embeddings(pixel_values)
    tokens = torch.cat((embeddings.cls_token.expand(3, 1, 32), tokens), dim=1) + embeddings.position_embeddings
    norm = embeddings.layernorm
    expected = F.layer_norm(tokens, (32,), norm.weight, norm.bias, 1e-12)

    actual, grid = embeddings(pixel_values)
    assert_equal(actual, expected)
    assert grid == (4, 3)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("field", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
@torch.no_grad()
def test_dropout_is_for_training_only(field, attn_implementation, pixel_values):
    model = tiny_model(attn_implementation=attn_implementation, **{field: 0.5})
    plain = tiny_model(attn_implementation=attn_implementation)
    plain.load_state_dict(model.state_dict())

    assert_equal(model(pixel_values).last_hidden_state, plain(pixel_values).last_hidden_state)
    attention, tokens = model.layers[0].attention.train(), torch.randn(3, 13, 32, dtype=torch.float64)
    expected = plain.layers[0].attention(tokens)[0]
    assert torch.allclose(attention(tokens)[0], expected) == (field == "hidden_dropout_prob")


@torch.no_grad()
def test_dropout_leaves_out_half_of_the_embeddings_and_of_each_branch(pixel_values):
    model = tiny_model(hidden_dropout_prob=0.5).train()
    shares = []
    for layer in model.layers:
        layer.drop_path.register_forward_pre_hook(lambda _, args: shares.append((args[0] == 0).double().mean()))

    embeddings, _ = model.embeddings(pixel_values)
    model(pixel_values)

    shares.append((embeddings == 0).double().mean())
    assert len(shares) == 2 * len(model.layers) + 1
    assert all(0.4 < share < 0.6 for share in shares)


@pytest.mark.parametrize(
    ("variant", "num_parameters"),
    [("Ti/16", 5_717_416), ("S/16", 22_050_664), ("B/16", 86_567_656), ("L/16", 304_326_632), ("H/14", 632_045_800)],
)
def test_parameter_count_of_published_sizes(variant, num_parameters):
    with torch.device("meta"):
        model = ViTScratchForImageClassification(ViTScratchConfig.from_variant(variant, num_labels=1000))

    assert model.num_parameters() == num_parameters


@torch.no_grad()
def test_patch_embedding_equals_unfold_and_matrix_product(pixel_values):
    embeddings = tiny_model().embeddings.patch_embeddings
    weight, bias = embeddings.projection.weight, embeddings.projection.bias

    patches = F.unfold(pixel_values, kernel_size=(4, 8), stride=(4, 8)).transpose(1, 2)  # (B, 12, 3 * 4 * 8)

    assert_equal(embeddings(pixel_values), patches @ weight.flatten(1).T + bias)


@POSITIONS
@STYLES
@torch.no_grad()
def test_batch_equals_images_one_by_one(position_embedding_type, norm_first, pixel_values):
    model = tiny_model(position_embedding_type=position_embedding_type, norm_first=norm_first)

    expected = torch.cat([model(image[None]).last_hidden_state for image in pixel_values])

    assert_equal(model(pixel_values).last_hidden_state, expected)


@STYLES
@torch.no_grad()
def test_without_positions_permuted_patches_give_permuted_outputs(norm_first, pixel_values):
    model = tiny_model(norm_first=norm_first)
    model.embeddings.position_embeddings.zero_()
    flipped = pixel_values.unflatten(2, (4, 4)).flip(2).flatten(2, 3)  # the rows of patches in reverse

    expected = model(pixel_values).last_hidden_state[:, 1:].unflatten(1, (4, 3)).flip(1).flatten(1, 2)

    assert_equal(model(flipped).last_hidden_state[:, 1:], expected)


@STYLES
def test_hidden_states_run_from_the_embeddings_to_the_last_layer(norm_first, pixel_values):
    model = tiny_model(norm_first=norm_first)

    outputs = model(pixel_values, output_hidden_states=True)

    assert len(outputs.hidden_states) == 3
    assert_equal(outputs.hidden_states[0], model.embeddings(pixel_values)[0])
    assert_equal(outputs.last_hidden_state, model.layernorm(outputs.hidden_states[-1]))
    assert torch.equal(outputs.last_hidden_state, outputs.hidden_states[-1]) is not norm_first


def test_pooled_vector_is_the_class_token(pixel_values):
    outputs = tiny_model(pooling="cls")(pixel_values)

    assert outputs.last_hidden_state.shape == (3, 13, 32)
    assert torch.equal(outputs.pooler_output, outputs.last_hidden_state[:, 0])


def test_pooled_vector_is_the_mean_of_the_patches(pixel_values):
    outputs = tiny_model(pooling="mean")(pixel_values)

    assert outputs.last_hidden_state.shape == (3, 12, 32)
    assert_equal(outputs.pooler_output, sum(outputs.last_hidden_state.unbind(1)) / 12)


def test_pooled_vector_leaves_out_a_class_token_that_is_there(pixel_values):
    outputs = tiny_model(pooling="mean", use_cls_token=True)(pixel_values)

    assert outputs.last_hidden_state.shape == (3, 13, 32)
    assert_equal(outputs.pooler_output, sum(outputs.last_hidden_state[:, 1:].unbind(1)) / 12)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_fc_norm_normalises_the_pooled_vector_only(pooling, pixel_values):
    model = tiny_model(pooling=pooling, norm_first=True, fc_norm=True)

    outputs = model(pixel_values, output_hidden_states=True)

    last = outputs.hidden_states[-1]
    pooled = last[:, 0] if pooling == "cls" else last.mean(1)
    assert torch.equal(outputs.last_hidden_state, last)
    expected = F.layer_norm(pooled, (32,), model.layernorm.weight, model.layernorm.bias, model.config.layer_norm_eps)
    assert_equal(outputs.pooler_output, expected)


@torch.no_grad()
def test_two_layer_classifier(pixel_values):
    model = tiny_model(ViTScratchForImageClassification, classifier_hidden_size=20, classifier_act="tanh")

    pooled = model.vit(pixel_values).pooler_output
    hidden, classifier = model.pre_logits[0], model.classifier
    expected = torch.tanh(pooled @ hidden.weight.T + hidden.bias) @ classifier.weight.T + classifier.bias

    assert hidden.weight.shape == (20, 32)
    assert_equal(model(pixel_values).logits, expected)


@STYLES
def test_gradient_checkpointing_changes_nothing(norm_first, pixel_values):
    model = tiny_model(ViTScratchForImageClassification, norm_first=norm_first, drop_path_rate=0.5).train()
    results = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
            assert all(layer.gradient_checkpointing for layer in model.vit.layers)
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(pixel_values, labels=torch.tensor([0, 1, 2])).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@STYLES
@POOLINGS
@POSITIONS
def test_every_parameter_of_the_classifier_gets_a_gradient(norm_first, pooling, position_embedding_type, pixel_values):
    model = tiny_model(
        ViTScratchForImageClassification,
        norm_first=norm_first, pooling=pooling, position_embedding_type=position_embedding_type, qk_norm=True,
    )  # fmt: skip

    model(pixel_values, labels=torch.tensor([0, 1, 2])).loss.backward()

    # A key's bias adds the same to all scores of a query and cancels in the softmax; not so after a norm.
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@torch.no_grad()
def test_outputs_of_layers_are_not_kept_where_nobody_asked(pixel_values):
    model = ViTScratchModel(ViTScratchConfig(**TINY | {"num_hidden_layers": 3}))
    outputs, alive = [], []
    model.layers[0].register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output[0])))
    model.layers[2].register_forward_hook(lambda module, args, output: alive.append(outputs[-1]() is not None))

    model(pixel_values)
    model(pixel_values, output_hidden_states=True)

    assert alive == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_half_precision_is_summed_in_float32(dtype):
    scores = torch.randn(4, 1000).to(dtype)  # in bfloat16 a sum of ones would stop at 256

    probs = eager_attention_forward(nn.Identity(), scores[None, None], torch.eye(1000)[None, None].to(dtype),
                                    torch.eye(1000)[None, None].to(dtype), None, scaling=1.0)[1]  # fmt: skip

    expected = scores.double().softmax(dim=-1)
    torch.testing.assert_close(probs[0, 0].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_model_takes_float32_pixels(dtype, pixel_values):
    model = tiny_model(ViTScratchForImageClassification, std=0.1, position_embedding_type="rope2d")
    expected = model(pixel_values).logits

    actual = model.to(dtype)(pixel_values.float()).logits

    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_autocast_keeps_near_to_full_precision_and_warns_of_nothing(norm_first):
    model = tiny_model(ViTScratchForImageClassification, std=0.1, qk_norm=True, norm_first=norm_first).float()
    pixel_values = torch.randn(3, 3, 16, 24)

    with torch.autocast("cpu", torch.bfloat16):
        actual = model(pixel_values).logits

    torch.testing.assert_close(actual.float(), model(pixel_values).logits, rtol=0, atol=0.03)


# Positions and image sizes


@torch.no_grad()
def test_resampled_positions_match_transformers():
    reference = ViTModel(ViTConfig(**TINY | {"image_size": 24, "patch_size": 4}), add_pooling_layer=False)
    positions = randomize_(reference, 1.0).double().embeddings.position_embeddings

    actual = interpolate_pos_encoding(positions, (6, 6), (9, 5))

    expected = reference.embeddings.interpolate_pos_encoding(torch.zeros(1, 46, 32), 36, 20)
    assert_equal(actual, expected)


def test_resampling_a_non_square_grid_keeps_what_varies_along_one_axis():
    rows = torch.linspace(-1, 1, 4, dtype=torch.float64)[:, None].expand(4, 3)
    positions = torch.cat((torch.tensor([7.0], dtype=torch.float64), rows.flatten()))[None, :, None]

    resampled = interpolate_pos_encoding(positions, (4, 3), (8, 5))[0, :, 0]

    grid = resampled[1:].unflatten(0, (8, 5))
    assert resampled[0] == 7
    assert_equal(grid, grid[:, :1].expand(8, 5), atol=1e-14)
    assert (grid[1:, 0] > grid[:-1, 0]).all()


@POSITIONS
@pytest.mark.parametrize("image_size", [32, [24, 16], [8, 48]], ids=str)
@torch.no_grad()
def test_loading_at_another_size_equals_calling_at_it(position_embedding_type, image_size, tmp_path):
    model = tiny_model(ViTScratchForImageClassification, position_embedding_type=position_embedding_type)
    model.save_pretrained(tmp_path)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    pixel_values = torch.randn(2, 3, height, width, dtype=torch.float64)

    loaded = AutoModelForImageClassification.from_pretrained(
        tmp_path, image_size=image_size, attn_implementation="eager"
    )

    assert loaded.config.image_size == image_size
    assert torch.equal(loaded(pixel_values).logits, model(pixel_values).logits)
    loaded.save_pretrained(tmp_path / "resized")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "resized", attn_implementation="eager")
    assert torch.equal(again(pixel_values).logits, model(pixel_values).logits)


@torch.no_grad()
def test_loading_with_a_changed_configuration_resamples_too(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    config = ViTScratchConfig.from_pretrained(tmp_path, image_size=[8, 16])

    loaded = ViTScratchModel.from_pretrained(tmp_path, config=config)

    assert loaded.embeddings.position_embeddings.shape == (1, 1 + 2 * 2, 32)
    assert (loaded.config.image_size, config.image_size) == ([8, 16], [8, 16])


def test_size_beside_the_path_of_a_configuration_resamples_too(tmp_path):
    tiny_model().save_pretrained(tmp_path)

    loaded = ViTScratchModel.from_pretrained(tmp_path, config=str(tmp_path), image_size=[8, 16])

    assert loaded.embeddings.position_embeddings.shape == (1, 1 + 2 * 2, 32)


def test_positions_stay_where_patches_and_images_grow_alike(tmp_path):
    saved = randomize_(ViTScratchModel(ViTScratchConfig(**TINY)), 0.2)  # 16x24 pixels in patches of 4x8
    saved.save_pretrained(tmp_path)

    loaded = ViTScratchModel.from_pretrained(
        tmp_path, image_size=[32, 48], patch_size=[8, 16], ignore_mismatched_sizes=True
    )

    assert loaded.config.image_height_width == (32, 48)
    assert torch.equal(loaded.embeddings.position_embeddings, saved.embeddings.position_embeddings)


@pytest.mark.parametrize("changed", [{"num_channels": 1}, {"image_size": [32, 48], "patch_size": [8, 16]}])
def test_patch_embedding_that_does_not_fit_starts_at_its_own_scale(changed, tmp_path):
    ViTScratchForImageClassification(ViTScratchConfig(**TINY)).save_pretrained(tmp_path)

    loaded = ViTScratchForImageClassification.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **changed)

    weight = loaded.vit.embeddings.patch_embeddings.projection.weight
    assert weight.std().item() == pytest.approx(weight[0].numel() ** -0.5, rel=0.1)


def test_model_on_the_meta_device_is_loaded_at_another_size(tmp_path):
    ViTScratchModel(ViTScratchConfig(**TINY)).save_pretrained(tmp_path)
    on_meta = ViTScratchModel.from_pretrained(tmp_path, image_size=[32, 24], device_map="meta")
    assert on_meta.embeddings.position_embeddings.shape == (1, 1 + 8 * 3, 32)


def test_size_of_a_model_with_the_same_configuration_changes_nothing(pixel_values):
    model = tiny_model()
    other = ViTScratchModel(model.config)
    expected = model(pixel_values).last_hidden_state

    other.set_image_size([32, 24])

    assert_equal(model(pixel_values).last_hidden_state, expected)


def test_image_size_that_the_patches_do_not_divide_is_refused():
    model = tiny_model()

    with pytest.raises(ValueError, match=r"image_size \(height 18\) must be divisible"):
        model.set_image_size([18, 24])
    assert model.config.image_size == [16, 24]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("use_cls_token", [False, True])
def test_tokens_lie_one_after_the_other_in_the_precision_of_autocast(use_cls_token, autocast):
    config = ViTScratchConfig(**TINY, norm_first=True, pooling="mean", use_cls_token=use_cls_token)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = ViTScratchModel(config)(torch.randn(2, 3, 16, 24), output_hidden_states=True)

    for hidden_states in outputs.hidden_states:  # otherwise norms would make copies, and sums would be slow
        assert hidden_states.is_contiguous()
        assert hidden_states.dtype == (torch.bfloat16 if autocast else torch.float32)


def test_sincos_positions_written_out():
    table = sincos2d_positions((2, 3), 8)

    for token, (y, x) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]):
        angles_x, angles_y = [x * 1.0, x * 1e-4], [y * 1.0, y * 1e-4]
        expected = [f(a) for angles in (angles_x, angles_y) for f in (math.sin, math.cos) for a in angles]
        assert table[token].tolist() == pytest.approx(expected, abs=1e-12)


def test_sincos_positions_are_fixed_and_saved():
    model = ViTScratchModel(ViTScratchConfig(**TINY, position_embedding_type="sincos2d"))

    assert "embeddings.position_embeddings" not in dict(model.named_parameters())
    table = model.state_dict()["embeddings.position_embeddings"]
    assert torch.equal(table[0, 0], torch.zeros(32))
    torch.testing.assert_close(table[0, 1:], sincos2d_positions((4, 3), 32).float())


@torch.no_grad()
def test_rotary_positions_match_dinov3():
    reference = DINOv3ViTRopePositionEmbedding(
        DINOv3ViTConfig(hidden_size=32, num_attention_heads=2, patch_size=4, rope_theta=100.0)
    )
    query, key = torch.randn(2, 2, 3, 1 + 4 * 6, 16).unbind(0)  # a class token before 4 x 6 patches

    cos, sin = rope2d_cos_sin((4, 6), head_dim=16, num_prefix_tokens=1, like=query)
    expected = dinov3_apply_rotary_pos_emb(query, key, *reference.eval()(torch.zeros(1, 3, 16, 24)))

    torch.testing.assert_close(apply_rotary_pos_emb(query, cos, sin), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(apply_rotary_pos_emb(key, cos, sin), expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("head_dim", [4, 64, 196])
def test_rotary_tables_have_one_angle_per_pair_of_channels(head_dim):
    cos, sin = rope2d_cos_sin((2, 3), head_dim, num_prefix_tokens=1, like=torch.zeros(()))

    assert cos.shape == sin.shape == (7, head_dim // 2)


def test_rotary_scores_depend_on_relative_positions_only():
    query, key = torch.randn(2, 16, dtype=torch.float64)
    cos, sin = rope2d_cos_sin((5, 5), head_dim=16, num_prefix_tokens=0, like=query)
    at = lambda vector, y, x: apply_rotary_pos_emb(vector[None], cos[5 * y + x], sin[5 * y + x])[0]  # noqa: E731

    scores = [at(query, y, x) @ at(key, y + 2, x + 1) for y, x in [(0, 0), (2, 3), (1, 2)]]

    assert_equal(torch.stack(scores), scores[0].expand(3), atol=1e-13)
    assert abs(scores[0] - at(query, 0, 0) @ at(key, 1, 2)) > 1e-3


# Stochastic depth


def test_drop_path_drops_whole_images_and_keeps_the_expectation():
    branch = torch.ones(20_000, 2, 3, dtype=torch.float64)

    dropped = ViTScratchDropPath(0.25).train()(branch)

    assert set(dropped.flatten().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))
    assert dropped.mean().item() == pytest.approx(1, abs=4 * math.sqrt(0.25 / 0.75 / 20_000))  # four deviations


def test_drop_path_does_nothing_in_evaluation():
    branch = torch.randn(4, 2, 3)

    assert ViTScratchDropPath(0.9).eval()(branch) is branch


@pytest.mark.parametrize(("num_hidden_layers", "rates"), [(5, [0, 0.05, 0.1, 0.15, 0.2]), (1, [0.2])])
def test_drop_path_rate_grows_linearly_with_depth(num_hidden_layers, rates):
    model = tiny_model(num_hidden_layers=num_hidden_layers, drop_path_rate=0.2)

    assert [layer.drop_path.p for layer in model.layers] == pytest.approx(rates)


@STYLES
def test_layer_dropped_entirely_passes_its_input_on(norm_first, pixel_values):
    model = tiny_model(norm_first=norm_first, num_hidden_layers=1).train()
    model.layers[0].drop_path.p = 1 - 1e-12
    x, _ = model.embeddings(pixel_values)
    norms = (model.layers[0].layernorm_before, model.layers[0].layernorm_after)

    actual, _ = model.layers[0](x)

    assert_equal(actual, x if norm_first else norms[1](norms[0](x)))


# Losses


@pytest.mark.parametrize("problem_type", [None, "single_label_classification"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_class_ids_give_cross_entropy(problem_type, dtype, pixel_values):
    model = tiny_model(ViTScratchForImageClassification, problem_type=problem_type)
    outputs = model(pixel_values, labels=torch.tensor([4, 0, 2], dtype=dtype))

    log_probs = outputs.logits - outputs.logits.exp().sum(1, keepdim=True).log()

    assert_equal(outputs.loss, -(log_probs[0, 4] + log_probs[1, 0] + log_probs[2, 2]) / 3)


@pytest.mark.parametrize("problem_type", [None, "single_label_classification"])
def test_class_probabilities_stay_cross_entropy(problem_type, pixel_values):
    model = tiny_model(ViTScratchForImageClassification, problem_type=problem_type)
    labels = torch.tensor([[0.7, 0, 0, 0.3, 0], [0, 1, 0, 0, 0], [0.2] * 5])  # float32, as mixing makes them

    outputs = model(pixel_values, labels=labels)

    log_probs = outputs.logits - outputs.logits.exp().sum(1, keepdim=True).log()
    assert_equal(outputs.loss, -(labels.double() * log_probs).sum() / 3)
    assert model.config.problem_type == problem_type


def test_multi_label_loss_is_binary_cross_entropy(pixel_values):
    model = tiny_model(ViTScratchForImageClassification, std=0.1, problem_type="multi_label_classification")
    labels = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])

    outputs = model(pixel_values, labels=labels)

    probs = 1 / (1 + (-outputs.logits).exp())
    assert_equal(outputs.loss, -(labels * probs.log() + (1 - labels) * (1 - probs).log()).mean())


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_one_label_is_regression(shape, pixel_values):
    model = tiny_model(ViTScratchForImageClassification, num_labels=1)
    labels = torch.tensor([1.0, -2.0, 0.5]).view(shape)

    outputs = model(pixel_values, labels=labels)

    assert_equal(outputs.loss, ((outputs.logits[:, 0] - labels.flatten().double()) ** 2).mean())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_regression_answers_in_the_units_of_the_labels_and_learns_them_standardized(dtype, pixel_values):
    mean, std = [1990.0, 0.0, -1.0, 3e5, 0.5], [10.0, 1.0, 1e-3, 1e5, 2.0]
    model = tiny_model(ViTScratchForImageClassification, problem_type="regression").to(dtype)
    standardized = model(pixel_values).logits
    model.config.label_mean, model.config.label_scale = mean, std
    labels = torch.randn(len(pixel_values), 5).double() * torch.tensor(std) + torch.tensor(mean)

    outputs = model(pixel_values, labels=labels)

    wide = torch.promote_types(dtype, torch.float32)
    expected = standardized.to(wide) * torch.tensor(std, dtype=wide) + torch.tensor(mean, dtype=wide)
    torch.testing.assert_close(outputs.logits, expected)
    errors = (standardized - (labels - torch.tensor(mean)) / torch.tensor(std)).double()
    torch.testing.assert_close(outputs.loss.double(), errors.square().mean(), rtol=1e-3, atol=1e-6)


def test_one_label_is_saved_as_regression_for_pipelines(tmp_path):
    tiny_model(ViTScratchForImageClassification, num_labels=1).save_pretrained(tmp_path)

    assert ViTScratchConfig.from_pretrained(tmp_path).problem_type == "regression"


def test_units_of_an_earlier_regression_do_not_change_classes(pixel_values):
    units = {"label_mean": [40.0], "label_scale": [12.0]}
    model = tiny_model(ViTScratchForImageClassification, problem_type="single_label_classification")
    expected = model(pixel_values, labels=torch.tensor([0, 1, 2]))
    vars(model.config).update(units)

    outputs = model(pixel_values, labels=torch.tensor([0, 1, 2]))

    assert_equal(outputs.logits, expected.logits)
    assert_equal(outputs.loss, expected.loss)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_of_one_call_has_the_mask_that_it_needs(implementation, pixel_values):
    model = tiny_model(ViTScratchModel, is_causal=True, pooling="mean", attn_implementation="sdpa")

    outputs = model(pixel_values, attn_implementation=implementation)

    torch.testing.assert_close(outputs.last_hidden_state, model(pixel_values).last_hidden_state)


@pytest.mark.parametrize(("mean", "scale"), [(None, [2.0, 1.0]), ([1.0], [2.0]), ([], [])])
def test_units_of_other_numbers_are_refused(mean, scale):
    config = ViTScratchConfig(problem_type="regression", num_labels=2, label_mean=mean, label_scale=scale)
    with pytest.raises(
        ValueError, match=r"must have a number for each of the 2 labels, got (None|\[1\.0\]|\[\]) and \[(2|\])"
    ):
        ViTScratchForImageClassification(config)


def test_saved_regression_becomes_a_classifier_of_more_classes(tmp_path):
    units = {"num_labels": 2, "label_mean": [1.0, 2.0], "label_scale": [2.0, 1.0]}
    tiny_model(ViTScratchForImageClassification, problem_type="regression", **units).save_pretrained(tmp_path)

    loaded = ViTScratchForImageClassification.from_pretrained(
        tmp_path, num_labels=5, problem_type="single_label_classification", ignore_mismatched_sizes=True
    )

    assert loaded.classifier.out_features == 5


def test_regression_of_several_numbers(pixel_values):
    model = tiny_model(ViTScratchForImageClassification, problem_type="regression")
    labels = torch.randn(3, 5, dtype=torch.float64)

    outputs = model(pixel_values, labels=labels)

    assert_equal(outputs.loss, ((outputs.logits - labels) ** 2).mean())


def test_one_class_takes_class_ids(pixel_values):
    model = tiny_model(ViTScratchForImageClassification, num_labels=1)
    model.config.problem_type = "single_label_classification"  # as transformers' own tests do

    assert model(pixel_values, labels=torch.zeros(3, dtype=torch.int64)).loss == 0


@pytest.mark.parametrize(
    ("problem_type", "labels", "message"),
    [
        (None, torch.zeros(3, 1, dtype=torch.int64), r"shape \(3,\) .*got torch.int64 of shape \(3, 1\)\. Class ids"),
        (None, torch.zeros(3), r"shape \(3, 5\) for single_label_classification, got torch.float32 of shape \(3,\)"),
        (None, torch.zeros(2, dtype=torch.int64), r"got torch.int64 of shape \(2,\)"),
        ("multi_label_classification", torch.zeros(3, dtype=torch.int64), r"\(3, 5\) for multi_label_classification"),
        ("regression", torch.zeros(3), r"\(3, 5\) for regression, got torch.float32 of shape \(3,\)"),
    ],
)
def test_labels_of_the_wrong_shape_are_refused(problem_type, labels, message, pixel_values):
    model = tiny_model(ViTScratchForImageClassification, problem_type=problem_type)

    with pytest.raises(ValueError, match=message):
        model(pixel_values, labels=labels)


# Bad input


@pytest.mark.parametrize(
    ("pixel_values", "message"),
    [
        (torch.zeros(3, 16, 24), r"got torch\.float32 of shape \(3, 16, 24\)\. Use the image processor"),
        (torch.zeros(1, 4, 16, 24), r"batch, 3 channels, .*of shape \(1, 4, 16, 24\)"),
        (torch.zeros(1, 3, 18, 24), r"divisible by the patch size 4x8, got .* of shape \(1, 3, 18, 24\)"),
        (torch.zeros(1, 3, 16, 24, dtype=torch.uint8), r"floating point .*got torch\.uint8 of shape"),
    ],
)
def test_bad_pixel_values_are_refused(pixel_values, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(pixel_values)


@pytest.mark.parametrize(("name", "accepted", "refused"), [
    ("is_causal", False, True),  # which eager attention would ignore, and sdpa would not
    ("attention_mask", None, torch.ones(3, 13)),
])  # fmt: skip
def test_options_of_text_models_are_refused_unless_they_change_nothing(name, accepted, refused, pixel_values):
    model = tiny_model()
    assert_equal(model(pixel_values, **{name: accepted})[0], model(pixel_values)[0])
    with pytest.raises(ValueError, match=r"takes no attention_mask, and is_causal is a field of the configuration\."):
        model(pixel_values, **{name: refused})


def test_causal_classifier_on_the_class_token_is_refused():
    with pytest.raises(ValueError, match=r"is_causal=True needs pooling='mean': the class token, being first"):
        tiny_model(ViTScratchForImageClassification, is_causal=True)


def test_model_refuses_a_configuration_spoilt_after_construction():
    config = ViTScratchConfig(**TINY)
    config.num_attention_heads = 5

    with pytest.raises(ValueError, match=r"hidden_size \(32\) must be divisible by num_attention_heads \(5\)"):
        ViTScratchModel(config)


# Saving, loading, initialising


@STYLES
@POSITIONS
@POOLINGS
@torch.no_grad()
def test_saving_and_loading_changes_nothing(norm_first, position_embedding_type, pooling, tmp_path, pixel_values):
    model = tiny_model(
        ViTScratchForImageClassification, norm_first=norm_first, position_embedding_type=position_embedding_type,
        pooling=pooling, qk_norm=True, classifier_hidden_size=20,
    )  # fmt: skip
    model.save_pretrained(tmp_path)

    loaded, report = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    assert not any(report.values())
    assert type(loaded) is ViTScratchForImageClassification
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    loaded.set_attn_implementation("eager")
    assert torch.equal(loaded(pixel_values).logits, model(pixel_values).logits)


@torch.no_grad()
def test_encoder_loads_out_of_a_classifier(tmp_path, pixel_values):
    model = tiny_model(ViTScratchForImageClassification, classifier_hidden_size=20)
    model.save_pretrained(tmp_path)

    encoder, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")

    assert type(encoder) is ViTScratchModel
    assert not any(report.values())  # the head is left behind without a word
    assert torch.equal(encoder(pixel_values).pooler_output, model.vit(pixel_values).pooler_output)


def test_classifier_that_loses_its_hidden_layer_is_reported(tmp_path):
    tiny_model(ViTScratchForImageClassification, classifier_hidden_size=32).save_pretrained(tmp_path)

    _, report = ViTScratchForImageClassification.from_pretrained(
        tmp_path, classifier_hidden_size=None, output_loading_info=True
    )

    assert report["unexpected_keys"] == {"pre_logits.0.weight", "pre_logits.0.bias"}


@POSITIONS
@STYLES
def test_init_weights_alone_sets_every_tensor(position_embedding_type, norm_first, monkeypatch):
    config = ViTScratchConfig(
        **TINY, position_embedding_type=position_embedding_type, norm_first=norm_first, qk_norm=True
    )
    init_weights = ViTScratchModel._init_weights

    def seeded_init_weights(self, module):  # torch's own initialisation draws numbers too, but not on the meta device
        torch.manual_seed(3)
        init_weights(self, module)

    monkeypatch.setattr(ViTScratchPreTrainedModel, "_init_weights", seeded_init_weights)
    built = ViTScratchForImageClassification(config).state_dict()
    loaded = ViTScratchForImageClassification.from_pretrained(None, config=config, state_dict={}).state_dict()

    assert all(torch.equal(built[name], loaded[name]) for name in built)


def test_initial_weights_have_the_configured_spread():
    config = ViTScratchConfig(**TINY | {"hidden_size": 128, "intermediate_size": 512, "initializer_range": 0.05})
    model = ViTScratchForImageClassification(config)

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif parameter.numel() > 1000 and "patch_embeddings" not in name:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.01, name


@pytest.mark.parametrize("chosen", [None, 0.3])
@pytest.mark.parametrize("patch_size", [4, [2, 8], 16])
def test_patch_embedding_starts_with_unit_gain_or_the_chosen_spread(patch_size, chosen):
    config = ViTScratchConfig(
        image_size=16, patch_size=patch_size, patch_initializer_range=chosen, num_hidden_layers=1
    )
    projection = ViTScratchModel(config).embeddings.patch_embeddings.projection

    tokens = projection(torch.randn(500, 3, *config.patch_height_width)).detach()

    pixels = 3 * math.prod(config.patch_height_width)
    assert tokens.std().item() == pytest.approx(1.0 if chosen is None else chosen * pixels**0.5, rel=0.05)


def test_gradient_of_the_loss_matches_finite_differences():
    model = tiny_model(
        ViTScratchForImageClassification, std=0.3, num_hidden_layers=1, position_embedding_type="rope2d"
    )
    pixel_values = torch.randn(1, 3, 4, 8, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x: model(x, labels=torch.tensor([1])).loss, pixel_values)


def test_inputs_of_the_first_layer_get_gradients_where_asked(pixel_values):
    model = tiny_model(ViTScratchForImageClassification)
    model.requires_grad_(False)
    model.enable_input_require_grads()  # as PEFT asks for under gradient checkpointing

    assert model(pixel_values.detach()).logits.requires_grad
