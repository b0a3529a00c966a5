"""Conversion of transformers' ViT from and to ours."""

from typing import Any, cast

from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTForMaskedImageModeling, ViTModel

from ..errors import blame_the_user
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchModel,
    ViTScratchPreTrainedModel,
)
from .checks import PRE_LN, check_equal, require_class, require_values
from .names import load_weights, weights_of

CLASSES: dict[type, type] = {
    ViTModel: ViTScratchModel,
    ViTForImageClassification: ViTScratchForImageClassification,
    ViTForMaskedImageModeling: ViTScratchForMaskedImageModeling,
}
# The names of parameters are the same, and so are these fields.
FIELDS = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "qkv_bias", "layer_norm_eps", "initializer_range", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "id2label", "label2id", "problem_type",
)  # fmt: skip
ACCEPTED = PRE_LN | {"pooling": ("cls",), "fc_norm": (False,)}


def from_vit(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Convert transformers' `ViTModel`, `ViTForImageClassification` or `ViTForMaskedImageModeling` to ours.

    Published DeiT models without distillation token are of these classes. The pooler of a `ViTModel`, a trained layer
    after the encoder, is left behind. With `nn.Identity` as its classifier a model becomes a `ViTScratchModel`.
    """
    require_class(vit, CLASSES, "from_vit")
    if isinstance(vit, ViTForImageClassification) and isinstance(vit.classifier, nn.Identity):
        return from_vit(vit.vit)
    state, source_config = weights_of(vit), cast(Any, vit.config)
    with blame_the_user():
        config = ViTScratchConfig(norm_first=True, **{name: getattr(source_config, name) for name in FIELDS})
    if "classifier.weight" in state:  # it may have been replaced
        config.num_labels = len(state["classifier.weight"])
    ours_class = next(ours for theirs, ours in CLASSES.items() if isinstance(vit, theirs))
    options = {"use_mask_token": "embeddings.mask_token" in state} if ours_class is ViTScratchModel else {}
    ours = load_weights(ours_class(config, **options), state, "from_vit", like=vit)
    check_equal(vit, ours, "from_vit", weights_of)
    return ours


def to_vit(model: ViTScratchPreTrainedModel) -> Any:
    """Convert a ViTScratch model to transformers' ViT of the same kind, `ViTModel` without a pooler."""
    require_class(model, CLASSES.values(), "to_vit")
    require_values(model, "to_vit", ACCEPTED)
    config, state = ViTConfig(**{name: getattr(model.config, name) for name in FIELDS}), weights_of(model)
    if isinstance(model, ViTScratchForMaskedImageModeling):
        config.image_size, config.patch_size = model.config.image_height_width[0], model.config.patch_height_width[0]
        config.encoder_stride = config.patch_size
    vit_class = next(theirs for theirs, ours in CLASSES.items() if isinstance(model, ours))
    options = {"add_pooling_layer": False, "use_mask_token": "embeddings.mask_token" in state}
    vit = load_weights(vit_class(config, **(options if vit_class is ViTModel else {})), state, "to_vit", like=model)
    check_equal(vit, model, "to_vit", weights_of)
    return vit
