"""timm's VisionTransformer from and to ours."""

from functools import partial
from typing import Any, cast

from torch import nn
from transformers.activations import ACT2FN

from ..errors import UserError
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchModel,
    ViTScratchPreTrainedModel,
)
from .checks import (
    TABLES,
    activation_name,
    refuse_changed,
    refuse_mask_token,
    refuse_unlike,
    refusing,
    require,
    require_class,
    simplest,
    warn_left_behind,
)
from .names import load_like, to_our_names, to_their_names, with_base_prefix

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


def from_timm(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Our model from timm's `VisionTransformer`, pooled by class token or average, with or without head.

    Without a head (`num_classes=0`) the result is a `ViTScratchModel`. timm's average pooling keeps the class token
    (`use_cls_token`) and normalises after pooling (`fc_norm`), unless it was built otherwise; so does ours then.

    Raises:
        UserError: timm is not installed, the module is of another class, or has a feature that we have not.
    """
    vision_transformer = timm_class("from_timm")
    require_class(vit, (vision_transformer,), "from_timm")
    with refusing("from_timm"):
        source = cast(Any, vit)
        block, num_classes = source.blocks[0], getattr(source.head, "out_features", 0)
        fc_norm = not isinstance(source.fc_norm, nn.Identity)
        # Without a head timm may return all tokens.
        pooling = {"token": "cls", "avg": "mean"}.get(source.global_pool)
        if pooling is None and source.global_pool == "" and not num_classes:
            pooling = "cls" if source.has_class_token else "mean"
        if pooling is None:
            raise UserError(f"from_timm: we have no counterpart of global_pool={source.global_pool!r}.")
        last_drop_path = getattr(source.blocks[-1].drop_path1, "drop_prob", 0.0)
        config = ViTScratchConfig(
            image_size=simplest(source.patch_embed.img_size),
            patch_size=simplest(source.patch_embed.patch_size),
            num_channels=source.patch_embed.proj.in_channels,
            hidden_size=source.embed_dim,
            num_hidden_layers=len(source.blocks),
            num_attention_heads=block.attn.num_heads,
            intermediate_size=block.mlp.fc1.out_features,
            hidden_act=activation_name([block.mlp.act for block in source.blocks]),
            qkv_bias=block.attn.qkv.bias is not None,
            layer_norm_eps=block.norm1.eps,
            norm_first=True,
            attention_probs_dropout_prob=block.attn.attn_drop.p,
            drop_path_rate=last_drop_path,
            pooling=pooling,
            use_cls_token=source.has_class_token,
            fc_norm=fc_norm,
            **({"num_labels": num_classes} if num_classes else {}),  # type: ignore[arg-type]
        )
        ours = ViTScratchForImageClassification(config) if num_classes else ViTScratchModel(config)
    twin = to_timm(ours)
    if not source.has_class_token:
        twin.no_embed_class = source.no_embed_class  # then it means nothing
    refuse_unlike(vit, twin, "from_timm")
    state = to_our_names(vit.state_dict(), TIMM)
    return load_like(ours, with_base_prefix(state) if num_classes else state, like=vit)


def to_timm(model: ViTScratchPreTrainedModel) -> Any:
    """Timm's `VisionTransformer`: with a head from our classifier, with `num_classes=0` from a `ViTScratchModel`.

    Raises:
        UserError: timm is not installed, the model is none of these, or timm has no counterpart of a feature.
    """
    vision_transformer = timm_class("to_timm")
    require_class(model, (ViTScratchModel, ViTScratchForImageClassification), "to_timm")
    refuse_mask_token(model, "timm's VisionTransformer")
    refuse_changed(model, "to_timm")
    config = model.config
    require(
        config, "timm's VisionTransformer", norm_first=(True,), position_embedding_type=TABLES, qk_norm=(False,),
        is_causal=(False,), classifier_hidden_size=(None,),
    )  # fmt: skip
    warn_left_behind(config, "hidden_dropout_prob")
    from timm.layers import LayerNorm

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
        act_layer=None if config.hidden_act == "gelu" else partial(ACT2FN.__getitem__, config.hidden_act),
    )
    state = {name.removeprefix("vit."): tensor for name, tensor in model.state_dict().items()}
    return load_like(vit, to_their_names(state, vit.state_dict(), TIMM), like=model)


# torchvision


def timm_class(caller: str) -> Any:
    """The class `VisionTransformer` of timm; a `UserError` where timm is not installed."""
    try:
        from timm.models import VisionTransformer
    except ImportError:
        raise UserError(f"{caller} needs timm, which is not installed: python -m pip install timm.") from None
    return VisionTransformer
