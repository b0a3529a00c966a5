"""torchvision's VisionTransformer from and to ours."""

import re
from functools import partial
from typing import Any, cast

from torch import nn

from ..errors import UserError
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchModel,
    ViTScratchPreTrainedModel,
)
from .checks import (
    TABLES,
    refuse_changed,
    refuse_unlike,
    refusing,
    require,
    require_class,
    require_square,
    warn_left_behind,
)
from .names import load_like, to_our_names, to_their_names, with_base_prefix

TORCHVISION = {
    "class_token": "embeddings.cls_token",
    "encoder.pos_embedding": "embeddings.position_embeddings",
    "conv_proj": "embeddings.patch_embeddings.projection",
    "encoder.layers.encoder_layer_{i}.ln_1": "layers.{i}.layernorm_before",
    "encoder.layers.encoder_layer_{i}.self_attention.in_proj_weight": "layers.{i}.attention.{qkv}_proj.weight",
    "encoder.layers.encoder_layer_{i}.self_attention.in_proj_bias": "layers.{i}.attention.{qkv}_proj.bias",
    "encoder.layers.encoder_layer_{i}.self_attention.out_proj": "layers.{i}.attention.o_proj",
    "encoder.layers.encoder_layer_{i}.ln_2": "layers.{i}.layernorm_after",
    "encoder.layers.encoder_layer_{i}.mlp.0": "layers.{i}.mlp.fc1",
    "encoder.layers.encoder_layer_{i}.mlp.3": "layers.{i}.mlp.fc2",
    "encoder.layers.encoder_layer_{i}.mlp.linear_1": "layers.{i}.mlp.fc1",  # the names of older files
    "encoder.layers.encoder_layer_{i}.mlp.linear_2": "layers.{i}.mlp.fc2",
    "encoder.ln": "layernorm",
    "heads.pre_logits": "pre_logits.0",
    "heads.head": "classifier",
}


def from_torchvision(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Our classifier from torchvision's `VisionTransformer` (`vit_b_16` and its family).

    Its head of two layers (`representation_size`) becomes `classifier_hidden_size` with tanh. `heads` that were
    replaced may be one linear layer; with none (`nn.Identity()`) the result is a `ViTScratchModel`.

    Raises:
        UserError: The module is of another class, or has a feature that we have not.
    """
    from torchvision.models import VisionTransformer

    require_class(vit, (VisionTransformer,), "from_torchvision")
    with refusing("from_torchvision"):
        source = cast(Any, vit)
        layer = source.encoder.layers[0]
        head_path, num_labels = _last_linear(source.heads)
        is_stock = head_path == "heads.head"
        config = ViTScratchConfig(
            image_size=source.image_size,
            patch_size=source.patch_size,
            hidden_size=source.hidden_dim,
            num_hidden_layers=len(source.encoder.layers),
            num_attention_heads=layer.self_attention.num_heads,
            intermediate_size=layer.mlp[0].out_features,
            layer_norm_eps=layer.ln_1.eps,
            norm_first=True,
            attention_probs_dropout_prob=layer.self_attention.dropout,
            classifier_hidden_size=source.representation_size if is_stock else None,
            classifier_act="tanh",
            num_labels=num_labels or 1,  # type: ignore[call-arg]
        )
        ours = ViTScratchForImageClassification(config)
    refuse_unlike(vit, to_torchvision(ours), "from_torchvision", but_for=None if is_stock else r"heads\b")
    state = {re.sub(rf"^{re.escape(head_path)}\b", "heads.head", name): x for name, x in vit.state_dict().items()}
    renamed = to_our_names(state, TORCHVISION)
    if not num_labels:
        return load_like(ViTScratchModel(config), renamed, like=vit)
    return load_like(ours, with_base_prefix(renamed), like=vit)


def _last_linear(heads: nn.Module) -> tuple[str, int]:
    """The path and the number of classes of torchvision's head, 0 without one."""
    if hasattr(heads, "head") and isinstance(heads.head, nn.Linear):
        return "heads.head", heads.head.out_features
    parts = {name: part for name, part in heads.named_modules() if not isinstance(part, nn.Sequential | nn.Identity)}
    if not parts:
        return "heads", 0
    (name, part), *more = parts.items()
    if more or not isinstance(part, nn.Linear):
        raise UserError("from_torchvision: heads must be torchvision's own, one Linear, or an Identity.")
    return f"heads.{name}".removesuffix("."), part.out_features


def to_torchvision(model: ViTScratchPreTrainedModel) -> Any:
    """Torchvision's `VisionTransformer` from our classifier.

    Raises:
        UserError: The model is no classifier of ours, or torchvision has no counterpart of a feature.
    """
    from torchvision.models import VisionTransformer

    require_class(model, (ViTScratchForImageClassification,), "to_torchvision")
    refuse_changed(model, "to_torchvision")
    config = model.config
    peer = "torchvision's VisionTransformer"
    require(
        config, peer, norm_first=(True,), position_embedding_type=TABLES, pooling=("cls",), fc_norm=(False,),
        qk_norm=(False,), is_causal=(False,), qkv_bias=(True,), hidden_act=("gelu",), num_channels=(3,),
    )  # fmt: skip
    if config.classifier_hidden_size is not None:
        require(config, peer, classifier_act=("tanh",))
    require_square(config, peer)
    warn_left_behind(config, "hidden_dropout_prob", "drop_path_rate")
    vit = VisionTransformer(
        image_size=config.image_height_width[0],
        patch_size=config.patch_height_width[0],
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        hidden_dim=config.hidden_size,
        mlp_dim=config.intermediate_size,
        attention_dropout=config.attention_probs_dropout_prob,
        num_classes=config.num_labels,
        representation_size=config.classifier_hidden_size,
        norm_layer=partial(nn.LayerNorm, eps=config.layer_norm_eps),
    )
    state = {name.removeprefix("vit."): tensor for name, tensor in model.state_dict().items()}
    return load_like(vit, to_their_names(state, vit.state_dict(), TORCHVISION), like=model)


# Names and tensors
