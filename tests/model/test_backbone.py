"""`ViTScratchBackbone`: feature maps by stage."""

import pytest
import torch
from helpers import TINY, assert_equal, randomize_
from transformers import AutoBackbone

from hf_vit_scratch import ViTScratchBackbone, ViTScratchConfig, ViTScratchForImageClassification

SIZES = TINY | {"num_hidden_layers": 3}  # images of 16x24 pixels in patches of 4x8


@pytest.fixture(
    params=[{}, {"norm_first": True}, {"norm_first": True, "pooling": "mean"}, {"norm_first": True, "fc_norm": True}],
    ids=["post-LN", "pre-LN", "no class token", "fc_norm"],
)
def backbone(request):
    config = ViTScratchConfig(**SIZES, **request.param, out_features=["stem", "stage2", "stage3"])
    model = ViTScratchBackbone(config).double().eval()
    randomize_(model, std=0.5)
    return model


def test_maps_are_the_patches_of_each_stage_after_the_final_norm(backbone):
    pixel_values = torch.randn(2, 3, 8, 32, dtype=torch.float64)  # another size than that of the positions

    outputs = backbone(pixel_values, output_hidden_states=True)

    for stage, maps in zip((0, 2, 3), outputs.feature_maps, strict=True):
        tokens = outputs.hidden_states[stage][:, backbone.config.num_prefix_tokens :]
        expected = tokens if backbone.config.fc_norm else backbone.layernorm(tokens)
        assert maps.shape == (2, 32, 2, 4)
        for row in range(2):
            for col in range(4):
                assert_equal(maps[:, :, row, col], expected[:, 4 * row + col])


def test_last_map_is_what_the_encoder_of_a_saved_classifier_gives(tmp_path):
    pixel_values = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    classifier = ViTScratchForImageClassification(ViTScratchConfig(**SIZES, norm_first=True)).double().eval()
    randomize_(classifier, std=0.5)
    classifier.save_pretrained(tmp_path)

    loaded = ViTScratchBackbone.from_pretrained(tmp_path, out_indices=[1, -1])
    maps = loaded(pixel_values).feature_maps

    tokens = classifier.vit(pixel_values).last_hidden_state[:, 1:]
    assert loaded.out_features == ["stage1", "stage3"]
    assert loaded.channels == [32, 32]
    assert_equal(maps[1].flatten(2).transpose(1, 2), tokens)


def test_stage_that_nobody_chose_is_the_last_one_also_of_fewer_layers(tmp_path):
    ViTScratchConfig(**SIZES).save_pretrained(tmp_path)

    config = ViTScratchConfig.from_pretrained(tmp_path, num_hidden_layers=2)

    assert (config.out_features, config.out_indices) == (["stage2"], [2])
    assert AutoBackbone.from_config(config).out_features == ["stage2"]


def test_configuration_of_a_backbone_can_be_used_again():
    config = ViTScratchConfig(**SIZES)
    ViTScratchBackbone(config)
    config.num_hidden_layers = 2

    assert ViTScratchBackbone(config).out_features == ["stage2"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"out_features": ["stage4"]}, "out_features must be a subset of stage_names"),
        ({"out_indices": [4]}, "out_indices must be valid indices for stage_names"),
        ({"out_features": ["stage1"], "out_indices": [2]}, "should correspond to the same stages"),
    ],
)
def test_stages_that_are_not_there_are_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        ViTScratchConfig(**SIZES, **choice)
