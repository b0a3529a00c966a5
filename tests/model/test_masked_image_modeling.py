"""Masked image modelling: the mask token, the decoder, the loss, and the encoder's way into a classifier."""

import pytest
import torch
from helpers import TINY, assert_equal, randomize_
from transformers import AutoModelForImageClassification, AutoModelForMaskedImageModeling

from hf_vit_scratch import (
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchModel,
)


def tiny_model(std=0.5, **fields):
    return randomize_(ViTScratchForMaskedImageModeling(ViTScratchConfig(**TINY | fields)), std).double().eval()


@pytest.fixture
def pixel_values():
    return torch.randn(3, 3, 16, 24, dtype=torch.float64)


@pytest.fixture
def mask():
    """Half of the 4x3 patches of each image."""
    return torch.stack([torch.randperm(12) < 6 for _ in range(3)])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post_ln", "pre_ln"])
@pytest.mark.parametrize(("pooling", "use_cls_token"), [("cls", True), ("mean", False)])
@torch.no_grad()
def test_hidden_pixels_have_no_influence(norm_first, pooling, use_cls_token, pixel_values, mask):
    model = tiny_model(norm_first=norm_first, pooling=pooling, use_cls_token=use_cls_token)
    hidden = mask.view(3, 1, 4, 3).repeat_interleave(4, 2).repeat_interleave(8, 3)

    painted = model(pixel_values, mask).reconstruction

    assert painted.shape == pixel_values.shape
    assert torch.equal(model(pixel_values + 9 * hidden, mask).reconstruction, painted)
    assert not torch.equal(model(pixel_values + 9 * ~hidden, mask).reconstruction, painted)
    assert not torch.equal(model(pixel_values).reconstruction, painted)


@torch.no_grad()
def test_masked_patches_are_the_mask_token_at_their_position(pixel_values, mask):
    model = tiny_model(norm_first=True)
    embeddings = model.vit.embeddings

    embedded = model(pixel_values, mask, output_hidden_states=True).hidden_states[0]

    expected = embeddings.mask_token[0] + embeddings.position_embeddings[0, 1:].expand(3, -1, -1)[mask]
    assert_equal(embedded[:, 1:][mask], expected)


@torch.no_grad()
def test_decoder_paints_each_patch_in_its_place(pixel_values):
    model = tiny_model(norm_first=True)

    outputs = model(pixel_values, output_hidden_states=True)

    tokens = model.vit.layernorm(outputs.hidden_states[-1])[:, 1:]
    values = tokens @ model.decoder[0].weight[..., 0, 0].T + model.decoder[0].bias  # (3, 12, 3 * 4 * 8)
    for patch in range(12):
        row, col = divmod(patch, 3)
        painted = outputs.reconstruction[:, :, 4 * row : 4 * row + 4, 8 * col : 8 * col + 8]
        assert_equal(painted.flatten(1), values[:, patch])


@torch.no_grad()
def test_loss_is_the_mean_absolute_error_of_the_hidden_pixels(pixel_values, mask):
    outputs = tiny_model()(pixel_values, mask)

    hidden = mask.view(3, 1, 4, 3).repeat_interleave(4, 2).repeat_interleave(8, 3).expand(-1, 3, -1, -1)
    expected = (outputs.reconstruction - pixel_values)[hidden].abs().mean()
    assert_equal(outputs.loss, expected)


@torch.no_grad()
def test_nothing_masked_gives_a_loss_of_zero_and_no_mask_gives_none(pixel_values):
    model = tiny_model()

    assert model(pixel_values, torch.zeros(3, 12)).loss == 0
    assert model(pixel_values).loss is None


def test_every_parameter_gets_a_gradient(pixel_values, mask):
    model = tiny_model()

    model(pixel_values, mask).loss.backward()

    # A key's bias adds the same to all scores of a query and cancels in the softmax.
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if not name.endswith("k_proj.bias"))


@torch.no_grad()
def test_half_precision_model_has_a_float32_loss(pixel_values, mask):
    model = tiny_model(std=0.1)
    expected = model(pixel_values, mask)

    actual = model.to(torch.bfloat16)(pixel_values.float(), mask)

    assert (actual.reconstruction.dtype, actual.loss.dtype) == (torch.bfloat16, torch.float32)
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=0.01)


@torch.no_grad()
def test_other_image_size_is_painted_whole(mask):
    model = tiny_model()

    assert model(torch.zeros(2, 3, 24, 16, dtype=torch.float64), mask[:2]).reconstruction.shape == (2, 3, 24, 16)


@pytest.mark.parametrize("shape", [(3, 13), (12,), (3, 4, 3)])
def test_mask_of_the_wrong_shape_is_refused(shape, pixel_values):
    with pytest.raises(ValueError, match=r"bool_masked_pos must have one entry per patch: shape \(3, 12\), got"):
        tiny_model()(pixel_values, torch.zeros(shape))


def test_mask_without_a_mask_token_is_refused(pixel_values):
    with pytest.raises(ValueError, match=r"bool_masked_pos needs a mask token: use ViTScratchForMaskedImageModeling"):
        ViTScratchModel(ViTScratchConfig(**TINY)).double()(pixel_values, bool_masked_pos=torch.zeros(3, 12))


@torch.no_grad()
def test_saving_and_loading_changes_nothing(tmp_path, pixel_values, mask):
    model = tiny_model(attn_implementation="eager")
    model.save_pretrained(tmp_path)

    loaded, report = AutoModelForMaskedImageModeling.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )

    assert type(loaded) is ViTScratchForMaskedImageModeling
    assert not any(report.values())
    assert torch.equal(loaded(pixel_values, mask).loss, model(pixel_values, mask).loss)


def test_classifier_starts_from_the_encoder(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)

    classifier, report = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)

    assert type(classifier) is ViTScratchForImageClassification
    assert report["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert not report["unexpected_keys"]
    for name, tensor in classifier.vit.state_dict().items():
        assert torch.equal(tensor, model.vit.state_dict()[name]), name


def test_mask_token_and_decoder_start_random_with_the_configured_spread():
    config = ViTScratchConfig(**TINY | {"hidden_size": 256, "initializer_range": 0.05})

    model = ViTScratchForMaskedImageModeling(config)

    for tensor in (model.vit.embeddings.mask_token, model.decoder[0].weight):
        assert tensor.std().item() == pytest.approx(0.05, rel=0.15)


def test_norm_after_pooling_is_refused():
    with pytest.raises(ValueError, match=r"fc_norm=True would leave the decoded tokens unnormalized"):
        tiny_model(norm_first=True, pooling="mean", fc_norm=True)
