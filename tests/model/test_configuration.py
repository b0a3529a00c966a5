import importlib
import json
import logging

import pytest
from helpers import TINY
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel, ViTConfig

from hf_vit_scratch import ViTScratchConfig, ViTScratchModel
from hf_vit_scratch.model.configuration_vit_scratch import AUTO_MAP


def test_defaults_are_those_of_transformers_vit():
    ours, theirs = ViTScratchConfig(), ViTConfig()

    shared = ["image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
              "intermediate_size", "hidden_act", "qkv_bias", "layer_norm_eps", "initializer_range",
              "hidden_dropout_prob", "attention_probs_dropout_prob"]  # fmt: skip
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(theirs, name) for name in shared}


def test_default_encoder_is_bert_style():
    assert ViTScratchConfig().norm_first is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 224, "patch_size": 15}, r"image_size \(height 224\) must be divisible by patch_size .*15"),
        ({"image_size": [32, 30], "patch_size": 4}, r"image_size \(width 30\) must be divisible"),
        ({"image_size": 0}, r"image_size must be an integer or a .*pair of integers, in pixels, of at least 1, got 0"),
        ({"image_size": [32, 32, 3]}, r"image_size must be an integer or a \[height, width\] pair"),
        (
            {"hidden_size": 30, "num_attention_heads": 4},
            r"hidden_size \(30\) must be divisible by num_attention_heads",
        ),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be an integer of at least 1, got 0"),
        ({"classifier_hidden_size": 0}, r"classifier_hidden_size must be an integer of at least 1, got 0"),
        ({"drop_path_rate": 1.0}, r"drop_path_rate must be a number of at least 0 and below 1, got 1"),
        (
            {"hidden_dropout_prob": float("nan")},
            r"hidden_dropout_prob must be a number of at least 0 and below 1, got nan",
        ),
        ({"layer_norm_eps": 0.0}, r"layer_norm_eps must be a positive and finite number"),
        ({"initializer_range": float("inf")}, r"initializer_range must be a positive and finite number"),
        ({"patch_initializer_range": 0.0}, r"patch_initializer_range must be a positive and finite number, got 0"),
        ({"temperature": 0.0}, r"temperature must be a positive and finite number, got 0"),
        ({"position_embedding_type": "sincos"}, r"position_embedding_type must be one of learned, sincos2d, rope2d"),
        ({"pooling": "max"}, r"pooling must be one of cls, mean, got 'max'"),
        ({"hidden_act": "gelo"}, r"hidden_act must be one of .*, got 'gelo'"),
        ({"position_embedding_type": "sincos2d", "hidden_size": 6, "num_attention_heads": 1}, r"multiple of 4"),
        ({"position_embedding_type": "sincos2d", "hidden_size": 4, "num_attention_heads": 1}, r"at least 8"),
        ({"position_embedding_type": "rope2d", "hidden_size": 36, "num_attention_heads": 6}, r"36 / 6 = 6"),
        ({"use_cls_token": False}, r"use_cls_token=False needs pooling='mean'"),
        ({"fc_norm": True}, r"fc_norm=True needs norm_first=True"),
        ({"label_mean": 0.5}, r"label_mean must be a list of finite numbers, got 0\.5"),
        ({"label_scale": [float("inf")]}, r"label_scale must be a list of positive numbers, got \[inf\]"),
        ({"label_scale": [1.0, 0.0]}, r"label_scale must be a list of positive numbers, got \[1\.0, 0\.0\]"),
    ],
)
def test_impossible_value_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTScratchConfig(**fields)


def test_unknown_problem_type_is_refused():
    # The field is the base class's; before transformers 5.23 its own check comes first, with an error of its own.
    with pytest.raises((ValueError, StrictDataclassError), match=r"problem_type.*\n?.*'ranking'"):
        ViTScratchConfig(problem_type="ranking")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": "32"}, r"image_size must be an integer or a \[height, width\] pair of integers, .*, got '32'"),
        ({"patch_size": [4, 4.0]}, r"patch_size must be an integer"),
        ({"num_attention_heads": 12.0}, r"num_attention_heads must be an integer of at least 1, got 12.0"),
        ({"num_hidden_layers": True}, r"num_hidden_layers must be an integer of at least 1, got True"),
        ({"drop_path_rate": "0.1"}, r"drop_path_rate must be a number of at least 0 and below 1, got '0.1'"),
        ({"layer_norm_eps": None}, r"layer_norm_eps must be a positive and finite number, got None"),
        ({"num_labels": 0.0}, r"num_labels must be an integer of at least 0, got 0.0"),
        ({"norm_first": 1}, r"norm_first must be True or False, got 1"),
        ({"use_cls_token": 0}, r"use_cls_token must be True or False, got 0"),
    ],
)
def test_wrong_type_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTScratchConfig(**fields)


def test_suggested_size_is_divisible():
    with pytest.raises(ValueError, match=r"Use image size 225\.$"):
        ViTScratchConfig(image_size=224, patch_size=15)


@pytest.mark.parametrize("name", ["hiden_size", "num_hidden_layer", "drop_path_rates", "normfirst", "num_label"])
def test_misspelt_field_names_the_right_one(name):
    with pytest.raises(ValueError, match=rf"no field '{name}'\. Did you mean '\w+'\?"):
        ViTScratchConfig(**{name: 3})


@pytest.mark.parametrize(
    ("name", "field"), [("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads")]
)
def test_word_of_timm_names_the_field(name, field):
    with pytest.raises(ValueError, match=rf"no field '{name}'\. Did you mean '{field}'\?"):
        ViTScratchConfig(**{name: 3})


def test_unknown_field_unlike_any_other_is_kept():
    assert ViTScratchConfig(finetuned_on="beans").finetuned_on == "beans"


def test_configuration_survives_saving(tmp_path):
    config = ViTScratchConfig(
        image_size=(32, 64),
        patch_size=[8, 4],
        norm_first=True,
        pooling="mean",
        id2label={0: "cat", 1: "dog", 2: "cow"},
    )

    config.save_pretrained(tmp_path)
    loaded = ViTScratchConfig.from_pretrained(tmp_path)

    saved = config.to_dict() | {"image_size": [32, 64]}  # JSON has no tuples
    assert {**loaded.to_dict(), "image_size": list(loaded.image_size)} == saved
    assert loaded.grid_size == (4, 16)
    assert loaded.id2label == {0: "cat", 1: "dog", 2: "cow"}


def test_configuration_that_asks_for_attentions_can_be_saved(tmp_path):
    config = ViTScratchConfig(output_attentions=True)
    config._attn_implementation_internal = "sdpa"  # as the model's constructor chooses

    config.save_pretrained(tmp_path)

    assert (tmp_path / "config.json").is_file()


def test_field_spoilt_after_construction_is_not_saved(tmp_path):
    config = ViTScratchConfig()
    config.hidden_size = 30

    with pytest.raises(ValueError, match=r"hidden_size \(30\) must be divisible"):
        config.save_pretrained(tmp_path)


def test_variant_sets_sizes_and_pre_ln_and_overrides_win():
    config = ViTScratchConfig.from_variant("S/16", num_hidden_layers=4)

    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (384, 6, 1536)
    assert (config.patch_size, config.num_hidden_layers, config.norm_first) == (16, 4, True)
    assert ViTScratchConfig.from_variant("S/16", norm_first=False).norm_first is False


@pytest.mark.parametrize(("size", "num_heads"), [("Ti", 3), ("S", 6), ("B", 12), ("L", 16), ("H", 16)])
def test_heads_of_the_published_sizes(size, num_heads):  # which no number of parameters shows
    assert ViTScratchConfig.from_variant(f"{size}/16").num_attention_heads == num_heads


@pytest.mark.parametrize("variant", ["S16", "S/0", "XL/16", "s/16", "S/16 "])
def test_unknown_variant_is_refused(variant):
    with pytest.raises(ValueError, match=r"variant must be one of Ti, S, B, L, H, a slash and the patch size"):
        ViTScratchConfig.from_variant(variant)


def test_attribute_that_was_set_later_is_saved_and_loads_again_though_it_looks_like_a_field(tmp_path):
    config = ViTScratchConfig()
    config.layer_norm_epsilon = 1e-5  # as transformers' own tests do
    config.save_pretrained(tmp_path)

    assert ViTScratchConfig.from_pretrained(tmp_path).layer_norm_epsilon == 1e-5


def test_code_of_a_subclass_is_saved_beside_ours(tmp_path, monkeypatch):
    imports = "from hf_vit_scratch import ViTScratchForImageClassification"
    (tmp_path / "my_vit.py").write_text(f"{imports}\n\nclass MyViT(ViTScratchForImageClassification):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    my_class = importlib.import_module("my_vit").MyViT
    my_class.register_for_auto_class("AutoModelForImageClassification")

    my_class(ViTScratchConfig(**TINY)).save_pretrained(tmp_path / "saved")

    auto_map = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    assert auto_map == AUTO_MAP | {"AutoModelForImageClassification": "my_vit.MyViT"}
    code = {"configuration_vit_scratch.py", "modeling_vit_scratch.py", "my_vit.py"}
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == code


def test_loading_of_remote_code_warns_of_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    ViTScratchModel(ViTScratchConfig(**TINY)).save_pretrained(tmp_path)

    AutoModel.from_pretrained(tmp_path, trust_remote_code=True)

    assert caplog.text == ""
