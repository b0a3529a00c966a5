"""Conversion of torchvision's VisionTransformer from and to ours."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torchvision.models import VisionTransformer

from ..model.modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel, ViTScratchPreTrainedModel
from .checks import PRE_LN, check_equal, require_class, require_values
from .names import build_from_weights, load_weights, to_our_names, to_their_names, weights_of

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
    "heads": "classifier",  # replaced by one linear layer
    "heads.0": "classifier",
}
ACCEPTED = PRE_LN | {"pooling": ("cls",), "fc_norm": (False,), "hidden_act": ("gelu",)}


def _to_our_weights(vit: nn.Module) -> dict[str, Tensor]:
    return to_our_names(vit.state_dict(), TORCHVISION, "from_torchvision")


def from_torchvision(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Convert torchvision's `VisionTransformer` (`vit_b_16` and its family) to ours.

    Its head of two layers (`representation_size`) becomes `classifier_hidden_size` with tanh. `heads` that were
    replaced may be one `nn.Linear`; with `nn.Identity` the result is a `ViTScratchModel`.
    """
    require_class(vit, (VisionTransformer,), "from_torchvision")
    source = cast(Any, vit)
    state = _to_our_weights(vit)
    layer = source.encoder.layers[0]
    ours = build_from_weights(
        state,
        "from_torchvision",
        like=vit,
        image_size=source.image_size,
        num_attention_heads=layer.self_attention.num_heads,
        layer_norm_eps=layer.ln_1.eps,
        attention_probs_dropout_prob=layer.self_attention.dropout,
    )
    check_equal(vit, ours, "from_torchvision", _to_our_weights)
    return ours


def to_torchvision(model: ViTScratchPreTrainedModel) -> Any:
    """Convert our classifier to torchvision's `VisionTransformer`, and a `ViTScratchModel` to one without heads."""
    require_class(model, (ViTScratchForImageClassification, ViTScratchModel), "to_torchvision")
    config = model.config
    head = {} if config.classifier_hidden_size is None else {"classifier_act": ("tanh",)}
    require_values(model, "to_torchvision", ACCEPTED | head)
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
    if isinstance(model, ViTScratchModel):
        vit.heads = nn.Identity()
    load_weights(vit, to_their_names(weights_of(model), vit.state_dict(), TORCHVISION), "to_torchvision", like=model)
    check_equal(vit, model, "to_torchvision", _to_our_weights)
    return vit
