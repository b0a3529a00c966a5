"""transformers' ViT from and to ours."""

import logging
from typing import Any, cast

from torch import nn

from ..errors import UserError
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
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
from .names import OURS, load_like

logger = logging.getLogger(__name__)

# Fields that transformers' ViTConfig has under the same names.
VIT_FIELDS = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "qkv_bias", "layer_norm_eps", "initializer_range", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "id2label", "label2id", "problem_type",
)  # fmt: skip


def from_vit(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Our model from transformers' `ViTModel`, `ViTForImageClassification` or `ViTForMaskedImageModeling`.

    Published DeiT models without distillation token are of these classes; `DeiTModel` has one and is refused. The
    pooler of a `ViTModel`, a trained layer after the encoder, is left behind.

    Raises:
        UserError: The module is of another class, or has a feature that we have not.
    """
    from transformers import ViTForImageClassification, ViTForMaskedImageModeling, ViTModel

    if type(vit).__name__.startswith("DeiT"):
        raise UserError(
            f"from_vit: {type(vit).__name__} has a distillation token, which we have not. DeiT models without one "
            "load as ViTForImageClassification."
        )
    require_class(vit, (ViTModel, ViTForImageClassification, ViTForMaskedImageModeling), "from_vit")
    if isinstance(vit, ViTForImageClassification) and isinstance(vit.classifier, nn.Identity):
        return from_vit(vit.vit)
    theirs = vit.state_dict()
    with refusing("from_vit"):
        fields = {name: getattr(vit.config, name) for name in VIT_FIELDS}
        labels_of_config = cast(Any, vit.config).num_labels
        num_labels = getattr(getattr(vit, "classifier", None), "out_features", labels_of_config)
        if num_labels != labels_of_config:  # a head that was replaced has other classes than the configuration
            fields = {name: value for name, value in fields.items() if name not in ("id2label", "label2id")}
            fields["num_labels"] = num_labels
        config = ViTScratchConfig(norm_first=True, **fields)
        ours: ViTScratchPreTrainedModel
        if isinstance(vit, ViTModel):
            ours = ViTScratchModel(config, use_mask_token="embeddings.mask_token" in theirs)
        elif isinstance(vit, ViTForImageClassification):
            ours = ViTScratchForImageClassification(config)
        else:
            ours = ViTScratchForMaskedImageModeling(config)
    refuse_unlike(vit, to_vit(ours), "from_vit", but_for="pooler")
    if any(name.startswith("pooler.") for name in theirs):
        logger.warning("from_vit: left behind the ViT's pooler, a trained layer which ViTScratchModel has not.")
    return load_like(
        ours, {name: tensor for name, tensor in theirs.items() if not name.startswith("pooler.")}, like=vit
    )


def to_vit(model: ViTScratchPreTrainedModel) -> Any:
    """Transformers' ViT of the same kind: `ViTModel` (without pooler), `...ForImageClassification`, `...ForMasked...`.

    Raises:
        UserError: The model is none of ours, or transformers' ViT has no counterpart of a feature.
    """
    from transformers import ViTConfig, ViTForImageClassification, ViTForMaskedImageModeling, ViTModel

    require_class(model, OURS, "to_vit")
    refuse_changed(model, "to_vit")
    config = model.config
    require(
        config, "transformers' ViT", norm_first=(True,), position_embedding_type=TABLES, pooling=("cls",),
        fc_norm=(False,), qk_norm=(False,), is_causal=(False,), classifier_hidden_size=(None,),
    )  # fmt: skip
    warn_left_behind(config, "drop_path_rate")
    fields = {name: getattr(config, name) for name in VIT_FIELDS}
    vit: nn.Module
    if isinstance(model, ViTScratchForMaskedImageModeling):
        require_square(config, "transformers' ViTForMaskedImageModeling")
        size, patch = config.image_height_width[0], config.patch_height_width[0]
        fields |= {"image_size": size, "patch_size": patch, "encoder_stride": patch}
        vit = ViTForMaskedImageModeling(ViTConfig(**fields))
    elif isinstance(model, ViTScratchForImageClassification):
        vit = ViTForImageClassification(ViTConfig(**fields))
    else:
        use_mask_token = "embeddings.mask_token" in model.state_dict()
        vit = ViTModel(ViTConfig(**fields), add_pooling_layer=False, use_mask_token=use_mask_token)
    return load_like(vit, model.state_dict(), like=model)


# timm
