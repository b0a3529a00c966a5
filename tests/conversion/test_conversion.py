"""Weights from and to the other libraries: equal outputs, layers and gradients; bit-identical there and back."""

import re
import sys

import pytest
import timm
import torch
from helpers import TINY, assert_equal, randomize_
from safetensors import safe_open
from timm.models import VisionTransformer as TimmVisionTransformer
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionVisionTransformer
from torchvision.models import resnet18
from torchvision.models.vision_transformer import ConvStemConfig
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    DeiTConfig,
    DeiTForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)
from transformers.activations import ACT2FN

from hf_vit_scratch import (
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchModel,
)
from hf_vit_scratch.conversion.convert import (
    from_bert,
    from_timm,
    from_torchvision,
    from_vit,
    to_bert,
    to_timm,
    to_torchvision,
    to_vit,
)
from hf_vit_scratch.conversion.parity import KINDS, PEERS, SCALES, limit, measure, with_gradients_as_parameters
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.model import modeling_vit_scratch
from hf_vit_scratch.speed.optimize import example_batch_for, optimize

IN_TURN = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name.replace(" ", "_").replace("`", ""))


def tiny_timm(**options):
    sizes = {"img_size": (16, 24), "patch_size": (4, 8), "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    return TimmVisionTransformer(**sizes | {"num_classes": 5} | options).eval()


def tiny_torchvision(**options):
    sizes = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    return TorchvisionVisionTransformer(**sizes | {"num_classes": 5} | options).eval()


def tiny_ours(cls=ViTScratchForImageClassification, **fields):
    return randomize_(cls(ViTScratchConfig(**TINY | {"norm_first": True} | fields)), 0.5).eval()


def assert_same_state(one, other, but_for=()):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert one.keys() - set(but_for)
    for name in one.keys() - set(but_for):
        assert torch.equal(one[name], other[name]), name


# Equality


@IN_TURN
@pytest.mark.parametrize("direction", ["from", "to"])
@pytest.mark.parametrize("std", SCALES)
def test_converted_model_is_equal_in_float64(peer, direction, std):
    differences = measure(peer, direction, torch.float64, std)

    assert set(differences) == set(KINDS) - (set() if peer.gives_attentions else {"attention maps"})
    for kind, difference in differences.items():
        assert difference <= (1e-8 if kind == "gradients" else 1e-10), kind


@IN_TURN
@pytest.mark.parametrize("direction", ["from", "to"])
def test_converted_model_is_equal_in_float32(peer, direction):
    differences = measure(peer, direction, torch.float32, 0.02)

    assert all(difference <= 1e-5 for difference in differences.values()), differences


def swap_norms(model):
    layer = model.base_model.layers[1]
    layer.layernorm_before, layer.layernorm_after = layer.layernorm_after, layer.layernorm_before


def drop_a_bias(model):
    nn.init.zeros_(model.base_model.layers[0].attention.o_proj.bias)


def use_tanh_gelu(model):
    for layer in model.base_model.layers:
        layer.mlp.activation = ACT2FN["gelu_pytorch_tanh"]


def use_another_eps(model):
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = {1e-12: 1e-6, 1e-6: 1e-12}[module.eps]


def use_eager_attention(model):  # which the test has spoilt
    model.set_attn_implementation("eager")


@IN_TURN
@pytest.mark.parametrize(
    "fault", [swap_norms, drop_a_bias, use_tanh_gelu, use_another_eps, use_eager_attention], ids=lambda f: f.__name__
)
def test_planted_fault_is_seen(peer, fault, monkeypatch):
    if fault is use_eager_attention:

        def softmax_over_the_queries(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
            probs = (query @ key.transpose(-2, -1) * scaling).softmax(dim=-2)
            return (probs @ value).transpose(1, 2), probs

        monkeypatch.setattr(modeling_vit_scratch, "eager_attention_forward", softmax_over_the_queries)

    def spoilt():
        calls = []

        def to_ours(theirs):
            ours = peer.to_ours(theirs)
            if not calls:  # the second call renames gradients
                fault(ours)
            calls.append(ours)
            return ours

        return peer._replace(to_ours=to_ours)

    measured = [measure(spoilt(), "from", torch.float64, std) for std in SCALES]

    for kind in ("outputs", "gradients"):
        assert max(differences[kind] for differences in measured) > 10 * limit(kind, torch.float64, 0.02)


@IN_TURN
def test_peer_there_and_back_is_bit_identical(peer):
    theirs = randomize_(peer.build(), 0.5)

    back = peer.to_theirs(peer.to_ours(theirs))

    # BERT's word embeddings are not used, and its token type goes into its positions: see the next test.
    unused = [name for name in back.state_dict() if re.search(r"(word|position|token_type)_embeddings\.weight$", name)]
    assert_same_state(theirs, back, but_for=unused)


def test_bert_of_the_same_positions_is_bit_identical_there_and_back():
    bert = BertModel(BertConfig(**BERT_SIZES, vocab_size=1, type_vocab_size=1), add_pooling_layer=False)
    randomize_(bert, 0.5)
    nn.init.zeros_(bert.embeddings.word_embeddings.weight)
    nn.init.zeros_(bert.embeddings.token_type_embeddings.weight)
    patch_embeddings, cls_token = nn.Conv2d(3, 32, kernel_size=4, stride=4), torch.randn(1, 1, 32)

    back, back_patch_embeddings, back_cls_token = to_bert(from_bert(bert, patch_embeddings, cls_token))

    assert_same_state(bert, back)
    assert_same_state(patch_embeddings, back_patch_embeddings)
    assert torch.equal(cls_token, back_cls_token)


@IN_TURN
def test_ours_there_and_back_is_bit_identical(peer):
    ours = randomize_(peer.to_ours(peer.build()), 0.5)

    back = peer.to_ours(peer.to_theirs(ours))

    assert type(back) is type(ours)
    assert_same_state(ours, back)
    assert back.config.to_dict() == ours.config.to_dict()


BERT_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 17,
}  # fmt: skip


@torch.no_grad()
def test_bert_token_type_is_folded_into_the_positions():
    bert = randomize_(BertModel(BertConfig(**BERT_SIZES)).double(), 0.5).eval()
    patch_embeddings = nn.Conv2d(3, 32, kernel_size=4, stride=4).double()

    ours = from_bert(bert, patch_embeddings, torch.randn(32))

    tables = bert.embeddings
    expected = tables.position_embeddings.weight + tables.token_type_embeddings.weight[0]
    assert_equal(ours.embeddings.position_embeddings[0], expected, atol=0)
    assert (ours.config.image_size, ours.config.patch_size, ours.config.norm_first) == (16, 4, False)


# Other builds of the same libraries


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": False},
        {"dynamic_img_size": True},
        {"act_layer": "gelu_tanh"},
        {"act_layer": "relu"},
        {"fc_norm": True},
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "class_token": False, "no_embed_class": True},
        {"norm_layer": nn.LayerNorm},
    ],
    ids=str,
)
@torch.no_grad()
def test_timm_options_that_we_have(options):
    theirs = randomize_(tiny_timm(**options).double(), 0.5)
    pixel_values = torch.randn(2, 3, 16, 24, dtype=torch.float64)

    ours = from_timm(theirs)

    assert_equal(ours(pixel_values).logits, theirs(pixel_values))
    assert_equal(to_timm(ours)(pixel_values), theirs(pixel_values))


@pytest.mark.parametrize(
    "options", [{}, {"global_pool": "avg"}, {"global_pool": "avg", "class_token": False}], ids=str
)
@torch.no_grad()
def test_timm_without_a_head_is_an_encoder(options):
    theirs = randomize_(tiny_timm(num_classes=0, **options).double(), 0.5)
    pixel_values = torch.randn(2, 3, 16, 24, dtype=torch.float64)

    ours = from_timm(theirs)

    assert type(ours) is ViTScratchModel
    assert_equal(ours(pixel_values).pooler_output, theirs(pixel_values))
    assert_equal(ours(pixel_values).last_hidden_state, theirs.forward_features(pixel_values))
    assert_same_state(to_timm(ours), theirs)


@torch.no_grad()
def test_published_timm_model_at_its_full_size():
    theirs = timm.create_model("deit_tiny_patch16_224", num_classes=7).eval()
    pixel_values = torch.randn(1, 3, 224, 224)

    ours = from_timm(theirs)

    assert ours.config.layer_norm_eps == 1e-6
    torch.testing.assert_close(ours(pixel_values).logits, theirs(pixel_values), rtol=0, atol=1e-5)


@torch.no_grad()
def test_torchvision_head_of_two_layers():
    theirs = randomize_(tiny_torchvision(representation_size=9).double(), 0.5)
    pixel_values = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    ours = from_torchvision(theirs)

    assert (ours.config.classifier_hidden_size, ours.config.classifier_act) == (9, "tanh")
    assert_equal(ours(pixel_values).logits, theirs(pixel_values))
    assert_same_state(to_torchvision(ours), theirs)


@pytest.mark.parametrize("use_mask_token", [False, True])
def test_pooler_of_vit_is_left_behind(use_mask_token):
    sizes = {name: value for name, value in TINY.items() if name != "num_labels"}
    theirs = randomize_(ViTModel(ViTConfig(**sizes), use_mask_token=use_mask_token).double(), 0.5).eval()
    pixel_values = torch.randn(2, 3, 16, 24, dtype=torch.float64)

    ours = from_vit(theirs)

    assert_equal(ours(pixel_values).last_hidden_state, theirs(pixel_values).last_hidden_state)
    assert ("embeddings.mask_token" in ours.state_dict()) == use_mask_token


def test_names_and_problem_type_come_along():
    config = ViTConfig(**TINY | {"num_labels": 2}, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    config.problem_type = "multi_label_classification"

    ours = from_vit(ViTForImageClassification(config))

    assert ours.config.id2label == to_vit(ours).config.id2label == {0: "cat", 1: "dog"}
    assert ours.config.problem_type == to_vit(ours).config.problem_type == "multi_label_classification"


# What a converted model is


def test_saved_names_are_ours(tmp_path):
    ours = from_timm(tiny_timm())

    ours.save_pretrained(tmp_path)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tiny_ours().state_dict())
    loaded, report = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert_same_state(loaded, ours)


def test_saved_names_are_ours_after_a_model_that_transformers_has_renamed(tmp_path):
    ViTForImageClassification(ViTConfig(**TINY)).save_pretrained(tmp_path / "theirs")
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "theirs")

    from_vit(theirs).save_pretrained(tmp_path / "ours")

    with safe_open(tmp_path / "ours" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tiny_ours().state_dict())


def test_converted_model_shares_nothing_and_keeps_dtypes_and_mode():
    theirs = tiny_timm().to(torch.bfloat16).train()
    theirs.norm.float()

    ours = from_timm(theirs)
    back = to_timm(ours)

    assert (ours.training, back.training) == (True, True)
    assert ours.vit.layernorm.weight.dtype == back.norm.weight.dtype == torch.float32
    assert ours.classifier.weight.dtype == back.head.weight.dtype == torch.bfloat16
    storages = [{p.untyped_storage().data_ptr() for p in model.parameters()} for model in (theirs, ours, back)]
    assert len(set.union(*storages)) == sum(map(len, storages))
    assert all(parameter.requires_grad for parameter in ours.parameters())


def test_regularisation_that_both_have_is_carried():
    theirs = tiny_timm(attn_drop_rate=0.1, drop_path_rate=0.2)

    ours = from_timm(theirs)
    back = to_timm(ours)

    assert ours.config.attention_probs_dropout_prob == 0.1
    assert [layer.drop_path.p for layer in ours.vit.layers] == pytest.approx([0, 0.2])
    assert (back.blocks[1].attn.attn_drop.p, back.blocks[1].drop_path2.drop_prob) == pytest.approx((0.1, 0.2))


# What cannot be converted


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reg_tokens": 4}, r"no counterpart of reg_token\."),
        ({"init_values": 1e-5}, r"no counterpart of blocks\.0\.ls1\.gamma\."),
        ({"qk_norm": True}, r"no counterpart of blocks\.0\.attn\.q_norm\.weight"),
        ({"scale_attn_norm": True}, r"no counterpart of blocks\.0\.attn\.norm\.weight"),
        ({"pre_norm": True}, r"no counterpart of norm_pre\.weight"),
        ({"final_norm": False}, r"layernorm\.weight is missing"),
        ({"no_embed_class": True}, r"position_embeddings is \(1, 12, 32\), not \(1, 13, 32\)"),
        ({"pos_embed": "none"}, r"embeddings\.position_embeddings is missing"),
        ({"global_pool": "map"}, r"no counterpart of attn_pool\.latent"),
        ({"global_pool": "max"}, r"global_pool='max'"),
        (
            {"global_pool": "avg", "pool_include_prefix": True},
            r"not equal: its outputs differ",
        ),
        ({"proj_bias": False}, r"layers\.0\.attention\.o_proj\.bias is missing"),
        ({"act_layer": "elu"}, r"hidden_act must be one of .*, got 'ELU'"),
        ({"norm_layer": "rmsnorm"}, r"layers\.0\.layernorm_before\.bias is missing"),
        ({"embed_norm_layer": "layernorm"}, r"patch_embed\.norm"),
        ({"block_fn": timm.models.vision_transformer.ParallelScalingBlock}, r"from_timm: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_timm_feature_that_we_have_not_is_refused_by_name(options, named):
    with pytest.raises(UserError, match=named):
        from_timm(tiny_timm(**options))


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: from_vit(resnet18()), r"from_vit takes ViTModel or .* of transformers, got ResNet\."),
        (lambda: from_timm(resnet18()), r"from_timm takes VisionTransformer of timm, got ResNet\."),
        (lambda: from_torchvision(resnet18()), r"from_torchvision takes VisionTransformer of torchvision, got ResNet"),
        (lambda: from_bert(resnet18(), nn.Conv2d(3, 8, 4, 4), torch.ones(8)), r"from_bert takes BertModel of tra"),
        (lambda: to_timm(resnet18()), r"to_timm takes ViTScratchModel or ViTScratchForImageClassification of hf_vit_"),
        (
            lambda: from_vit(DeiTForImageClassification(DeiTConfig(**TINY | {"image_size": 16, "patch_size": 4}))),
            r"from_vit takes ViTModel or .*, got DeiTForImageClassification",
        ),
        (
            lambda: from_torchvision(tiny_torchvision(conv_stem_configs=[ConvStemConfig(8, 3, 2)])),
            r"no counterpart of conv_proj\.conv_bn_relu_0\.0\.weight",
        ),
        (
            lambda: from_vit(ViTForMaskedImageModeling(ViTConfig(**TINY | {"image_size": 16, "patch_size": 4}))),
            r"decoder\.0\.weight is \(768, 32, 1, 1\), not \(48, 32, 1, 1\)",
        ),
    ],
    ids=["vit_cnn", "timm_cnn", "torchvision_cnn", "bert_cnn", "to_timm_cnn", "deit", "conv_stem", "encoder_stride"],
)  # fmt: skip
def test_wrong_model_is_refused(convert, message):
    with pytest.raises(UserError, match=message):
        convert()


@pytest.mark.parametrize(
    ("convert", "fields", "named"),
    [
        (to_vit, {"norm_first": False}, r"to_vit: the other library has no counterpart of norm_first=False\."),
        (to_vit, {"pooling": "mean"}, r"pooling='mean'"),
        (to_vit, {"position_embedding_type": "rope2d", "pooling": "mean"}, r"='rope2d', pooling='mean'\."),
        (to_vit, {"classifier_hidden_size": 8}, r"no counterpart of pre_logits\.0\.weight"),
        (to_timm, {"norm_first": False}, r"to_timm: the other library has no counterpart of norm_first=False\."),
        (to_timm, {"is_causal": True, "pooling": "mean"}, r"is_causal=True"),
        (to_torchvision, {"hidden_act": "relu"}, r"hidden_act='relu'"),
        (to_torchvision, {}, r"encoder\.pos_embedding is \(1, \d+, 32\), not"),
        (to_torchvision, {"classifier_hidden_size": 8}, r"classifier_act='gelu'"),
    ],
)  # fmt: skip
def test_feature_that_the_other_library_has_not_is_refused_by_name(convert, fields, named):
    with pytest.raises(UserError, match=named):
        convert(tiny_ours(**fields))


def test_mask_token_has_no_place_in_timm():
    with pytest.raises(UserError, match=r"to_timm: there is no counterpart of embeddings\.mask_token"):
        to_timm(ViTScratchModel(ViTScratchConfig(**TINY, norm_first=True), use_mask_token=True))


def test_masked_images_that_are_not_square_have_no_place_in_transformers():
    with pytest.raises(UserError, match=r"to_vit: embeddings\.position_embeddings is \(1, \d+, 32\), not"):
        to_vit(tiny_ours(ViTScratchForMaskedImageModeling))


def test_grid_that_leaves_pixels_out_has_no_place_here():
    vit = ViTModel(ViTConfig(**TINY | {"image_size": 30, "patch_size": 4}))  # transformers rounds the grid down

    with pytest.raises(UserError, match=r"image_size .*30.* patch_size .*4"):
        from_vit(vit)


def test_pre_ln_has_no_place_in_bert():
    with pytest.raises(UserError, match=r"to_bert: .* no counterpart of norm_first=True, pooling='mean'\."):
        to_bert(tiny_ours(ViTScratchModel, pooling="mean"))


@pytest.mark.parametrize(
    ("changes", "conv", "num_values", "kwargs", "message"),
    [
        (
            {},
            (3, 48, 4, 4),
            32,
            {},
            r"projection\.weight is \(48, 3, 4, 4\), not \(32, 3, 4, 4\)",
        ),
        (
            {},
            (3, 32, 4, 2),
            32,
            {},
            r"from_bert: the model cannot be compared with ours",
        ),
        ({}, (3, 32, 4, 4), 31, {}, r"embeddings\.cls_token is \(1, 1, 31\), not \(1, 1, 32\)"),
        ({}, (3, 32, 4, 4), 32, {"image_size": 20}, r"position_embeddings is \(1, 17, 32\), not \(1, 26, 32\)"),
        ({}, (3, 32, 4, 4), 32, {"image_size": 18}, r"image_size \(height 18\) must be divisible by patch_size"),
        (
            {"is_decoder": True},
            (3, 32, 4, 4),
            32,
            {},
            r"not equal: its hidden states",
        ),
    ],
)
def test_parts_of_bert_that_do_not_belong_together_are_refused(changes, conv, num_values, kwargs, message):
    bert = BertModel(BertConfig(**BERT_SIZES | changes))

    with pytest.raises(UserError, match=message):
        from_bert(bert, nn.Conv2d(*conv), torch.zeros(num_values), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bert_in_half_precision_is_converted(dtype):
    bert = BertModel(BertConfig(**BERT_SIZES)).to(dtype)

    ours = from_bert(bert, nn.Conv2d(3, 32, 4, 4).to(dtype), torch.zeros(32, dtype=dtype))

    assert ours.layers[0].mlp.fc1.weight.dtype == dtype


def test_layer_that_a_user_has_replaced_is_refused():
    theirs = tiny_timm()
    theirs.blocks[1].mlp.fc2 = nn.Sequential(theirs.blocks[1].mlp.fc2, nn.Dropout(0.1))

    with pytest.raises(UserError, match=r"no counterpart of blocks\.1\.mlp\.fc2\.0\.weight"):
        from_timm(theirs)


@pytest.mark.parametrize(
    "convert", [lambda: from_timm(nn.Identity()), lambda: to_timm(tiny_ours())], ids=["from", "to"]
)
def test_missing_timm_is_said(convert, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.models", None)

    with pytest.raises(UserError, match=r"needs timm, which is not installed: python -m pip install timm\."):
        convert()


def changed(model, change):
    change(model)
    return model


def use_relu_in_one_layer(model):
    model.blocks[1].mlp.act = nn.ReLU()


def drop_tanh(model):
    del model.heads.act


def use_head_of_zeros(model):
    nn.init.zeros_(model.head.weight)


def tiny_torchvision_with_heads(heads):
    return changed(tiny_torchvision(), lambda model: setattr(model, "heads", heads))


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: from_timm(changed(tiny_timm(), use_relu_in_one_layer)), r"not equal: its hidden states"),
        (
            lambda: from_torchvision(changed(tiny_torchvision(representation_size=9), drop_tanh)),
            r"from_torchvision: the converted model is not equal: its outputs",
        ),
        (lambda: from_timm(tiny_timm(norm_layer=OtherNorm)), r"not equal: its hidden states"),
        (
            lambda: from_timm(changed(tiny_timm(), lambda m: setattr(m.blocks[0], "forward", lambda x: x))),
            r"not equal: its hidden states",
        ),
        (
            lambda: from_timm(changed(tiny_timm(), lambda m: m.norm.register_forward_hook(lambda *args: args[2] + 1))),
            r"not equal: its outputs",
        ),
        (
            lambda: to_timm(changed(tiny_ours(), lambda m: setattr(m.vit.layers[0].mlp, "activation", nn.ReLU()))),
            r"to_timm: the converted model is not equal: its hidden states",
        ),
        (
            lambda: to_torchvision(changed(tiny_ours(**SQUARE), lambda m: setattr(m, "classifier", nn.Linear(32, 7)))),
            r"to_torchvision: heads\.head\.weight is \(7, 32\), not \(5, 32\)",
        ),
        (
            lambda: to_vit(changed(tiny_ours(), lambda m: setattr(m.vit, "layers", m.vit.layers[:1]))),
            r"to_vit: layers\.1\.attention\.q_proj\.weight is missing",
        ),
        (
            lambda: from_timm(tiny_timm(act_layer=lambda: nn.GELU(approximate="tanh"))),
            r"from_timm: the converted model is not equal: its hidden states",
        ),
        (
            lambda: from_timm(changed(tiny_timm(global_pool="avg", pool_include_prefix=True), use_head_of_zeros)),
            r"from_timm: the converted model is not equal: its outputs",
        ),
        (
            lambda: from_torchvision(tiny_torchvision_with_heads(nn.ReLU())),
            r"from_torchvision: the converted model is not equal: its outputs",
        ),
    ],
    ids=["act", "head_act", "norm", "forward", "hook", "our_act", "our_head", "our_depth", "gelu", "zeros", "heads"],
)  # fmt: skip
def test_module_that_computes_something_else_is_refused_whatever_the_weights(convert, message):
    with pytest.raises(UserError, match=message):
        convert()


class OtherNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


SQUARE = {"image_size": 16, "patch_size": 4}


@pytest.mark.parametrize(
    ("convert", "fields", "named"),
    [
        *((convert, fields, named)
          for convert in (to_vit, to_timm, to_torchvision)
          for fields, named in (({"qk_norm": True}, r"attention\.q_norm\.weight"),
                                ({"position_embedding_type": "rope2d"}, "'rope2d'"),
                                ({"is_causal": True, "pooling": "mean"}, "is_causal=True"))),
        (to_vit, {"fc_norm": True}, "fc_norm=True"),
        (to_torchvision, {"fc_norm": True}, "fc_norm=True"),
        (to_torchvision, {"pooling": "mean"}, "pooling='mean'"),
        (to_torchvision, {"qkv_bias": False}, r"in_proj_bias is missing"),
        (to_torchvision, {"num_channels": 1}, r"conv_proj\.weight is \(32, 1, 4, 4\), not"),
    ],
)  # fmt: skip
def test_every_feature_that_the_other_library_has_not_is_refused(convert, fields, named):
    with pytest.raises(UserError, match=named):
        convert(tiny_ours(**SQUARE | fields))


def test_mask_token_has_no_place_in_bert():
    with pytest.raises(UserError, match=r"to_bert: there is no counterpart of embeddings\.mask_token"):
        to_bert(ViTScratchModel(ViTScratchConfig(**TINY), use_mask_token=True))


@pytest.mark.parametrize(
    "heads",
    [nn.Linear(32, 7), nn.Sequential(nn.Linear(32, 7)), nn.Identity()],
    ids=["linear", "sequential", "identity"],
)
@torch.no_grad()
def test_torchvision_head_that_was_replaced(heads):
    theirs = randomize_(tiny_torchvision_with_heads(heads).double(), 0.5)
    pixel_values = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    ours = from_torchvision(theirs)(pixel_values)

    assert_equal(ours.pooler_output if isinstance(heads, nn.Identity) else ours.logits, theirs(pixel_values))


@pytest.mark.parametrize("head", [nn.Linear(32, 7), nn.Identity()], ids=str)
@torch.no_grad()
def test_vit_head_that_was_replaced(head):
    theirs = ViTForImageClassification(ViTConfig(**TINY)).eval()
    theirs.classifier = head
    randomize_(theirs.double(), 0.5)
    pixel_values = torch.randn(2, 3, 16, 24, dtype=torch.float64)

    ours = from_vit(theirs)(pixel_values)

    actual = ours.pooler_output if isinstance(head, nn.Identity) else ours.logits
    assert_equal(actual, theirs(pixel_values).logits)


def test_model_that_has_been_called_and_one_with_hooks_of_transformers_are_converted():
    theirs = ViTForImageClassification(ViTConfig(**TINY)).eval()
    theirs(torch.zeros(1, 3, 16, 24), output_hidden_states=True)

    assert_same_state(to_vit(from_vit(theirs)), theirs)


def test_gradients_take_the_place_of_parameters():
    model = nn.Linear(2, 1)
    model(torch.tensor([[3.0, 4.0]])).backward()

    copied = with_gradients_as_parameters(model)

    assert copied.weight.tolist() == [[3.0, 4.0]]
    assert copied.bias.tolist() == [1.0]
    assert model.weight.tolist() != [[3.0, 4.0]]


def test_optimized_model_is_converted_like_a_plain_one():
    model = tiny_ours()
    expected = to_vit(model).state_dict()

    optimize(model, example_batch_for(model, 1), choice="sdpa+packed")
    actual = to_vit(model).state_dict()

    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
