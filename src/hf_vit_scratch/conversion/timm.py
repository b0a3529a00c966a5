"""Conversion of timm's VisionTransformer from and to ours."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers.activations import ACT2CLS, ACT2FN

from ..errors import UserError
from ..model.modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel, ViTScratchPreTrainedModel
from .checks import PRE_LN, check_equal, require_class, require_values
from .names import as_number, build_from_weights, load_weights, to_our_names, to_their_names, weights_of

TIMM = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "blocks.{i}.norm1": "layers.{i}.layernorm_before",
    "blocks.{i}.attn.qkv": "layers.{i}.attention.{qkv}_proj",
    "blocks.{i}.attn.proj": "layers.{i}.attention.o_proj",
    "blocks.{i}.norm2": "layers.{i}.layernorm_after",
    "blocks.{i}.mlp.fc1": "layers.{i}.mlp.fc1",
    "blocks.{i}.mlp.fc2": "layers.{i}.mlp.fc2",
    "norm": "layernorm",
    "fc_norm": "layernorm",  # timm has one or the other
    "head": "classifier",
}
# transformers' names of activations by their class: that of timm, or of a model that `to_timm` has made.
ACTIVATIONS = {
    **{getattr(entry, "__name__", ""): name for name, entry in ACT2CLS.items()},
    **{"GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_pytorch_tanh", "QuickGELU": "quick_gelu"},
}


def _to_our_weights(vit: nn.Module) -> dict[str, Tensor]:
    return to_our_names(vit.state_dict(), TIMM, "from_timm")


def from_timm(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Convert timm's `VisionTransformer`, pooled by class token or average, with or without head, to ours.

    Without a head (`num_classes=0`) the result is a `ViTScratchModel`. timm's average pooling keeps the class token
    (`use_cls_token`) and normalizes after pooling (`fc_norm`), unless it was built otherwise; so does ours then.
    """
    require_class(vit, (timm_class("from_timm"),), "from_timm")
    source = cast(Any, vit)
    state = _to_our_weights(vit)
    block = source.blocks[0]
    activation = type(block.mlp.act).__name__
    poolings = {"token": "cls", "avg": "mean"}
    if "classifier.weight" not in state:  # then timm may return all tokens
        poolings[""] = "cls" if source.has_class_token else "mean"
    if source.global_pool not in poolings:
        raise UserError(f"from_timm: we have no counterpart of global_pool={source.global_pool!r}.")
    ours = build_from_weights(
        state,
        "from_timm",
        like=vit,
        image_size=as_number(source.patch_embed.img_size),
        num_attention_heads=block.attn.num_heads,
        hidden_act=ACTIVATIONS.get(activation, activation),
        layer_norm_eps=block.norm1.eps,
        attention_probs_dropout_prob=block.attn.attn_drop.p,
        drop_path_rate=getattr(source.blocks[-1].drop_path1, "drop_prob", 0.0),
        pooling=poolings[source.global_pool],
        fc_norm=not isinstance(source.fc_norm, nn.Identity),
    )
    check_equal(vit, ours, "from_timm", _to_our_weights)
    return ours


def to_timm(model: ViTScratchPreTrainedModel) -> Any:
    """Convert our classifier to timm's `VisionTransformer`, and a `ViTScratchModel` to one without a head."""
    vision_transformer = timm_class("to_timm")
    require_class(model, (ViTScratchModel, ViTScratchForImageClassification), "to_timm")
    require_values(model, "to_timm", PRE_LN)
    from timm.layers import LayerNorm

    config = model.config
    vit = vision_transformer(
        img_size=config.image_height_width,
        patch_size=config.patch_height_width,
        in_chans=config.num_channels,
        num_classes=config.num_labels if isinstance(model, ViTScratchForImageClassification) else 0,
        global_pool={"cls": "token", "mean": "avg"}[config.pooling],
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=(config.intermediate_size + 0.5) / config.hidden_size,  # timm multiplies back and rounds down
        qkv_bias=config.qkv_bias,
        class_token=config.num_prefix_tokens == 1,
        fc_norm=config.fc_norm,
        attn_drop_rate=config.attention_probs_dropout_prob,
        drop_path_rate=config.drop_path_rate,
        norm_layer=partial(LayerNorm, eps=config.layer_norm_eps),
        act_layer=partial(ACT2FN.__getitem__, config.hidden_act),
    )
    load_weights(vit, to_their_names(weights_of(model), vit.state_dict(), TIMM), "to_timm", like=model)
    check_equal(vit, model, "to_timm", _to_our_weights)
    return vit


def timm_class(caller: str) -> Any:
    """Return timm's class `VisionTransformer`; raise a `UserError` where timm is not installed."""
    try:
        from timm.models import VisionTransformer
    except ImportError:
        raise UserError(f"{caller} needs timm, which is not installed: python -m pip install timm.") from None
    return VisionTransformer
