"""Modules of the other Vision Transformers from and to ours: transformers' ViT and BERT, timm, torchvision.

`from_vit(module)` returns one of our models, `to_vit(module)` the reverse, and so on for the other libraries. Each
takes a module and returns a new one of the same dtypes, device and mode, which shares nothing with the first. The
outputs are the same for images of the size that the model was made for. What would change them and has no counterpart
is refused by name; regularisation, which acts in training only, is carried over where both have it, and otherwise left
behind with a warning.
"""

import copy
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..errors import UserError
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchModel,
    ViTScratchPreTrainedModel,
)

logger = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)

# What maps to what: their parameter, or their module for its parameters, and ours. {i} is the number of a layer; {qkv}
# stands for q, k and v, which the other library holds in one tensor, one below the other. transformers' ViT needs no
# table: its names are ours.
BERT = {
    "embeddings.LayerNorm": "embeddings.layernorm",
    "encoder.layer.{i}.attention.self.query": "layers.{i}.attention.q_proj",
    "encoder.layer.{i}.attention.self.key": "layers.{i}.attention.k_proj",
    "encoder.layer.{i}.attention.self.value": "layers.{i}.attention.v_proj",
    "encoder.layer.{i}.attention.output.dense": "layers.{i}.attention.o_proj",
    "encoder.layer.{i}.attention.output.LayerNorm": "layers.{i}.layernorm_before",
    "encoder.layer.{i}.intermediate.dense": "layers.{i}.mlp.fc1",
    "encoder.layer.{i}.output.dense": "layers.{i}.mlp.fc2",
    "encoder.layer.{i}.output.LayerNorm": "layers.{i}.layernorm_after",
}
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

# Fields that transformers' ViTConfig has under the same names.
VIT_FIELDS = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "hidden_act", "qkv_bias", "layer_norm_eps", "initializer_range", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "id2label", "label2id", "problem_type",
)  # fmt: skip
BERT_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps",
    "initializer_range", "hidden_dropout_prob", "attention_probs_dropout_prob",
)  # fmt: skip
# Positions of both kinds are one table, of which the fixed one becomes a parameter elsewhere.
TABLES = ("learned", "sincos2d")


# transformers' BERT


class BertComposite(nn.Module):
    """transformers' `BertModel` on images: the class token and Conv2d patches as its `inputs_embeds`.

    Shapes: pixels (B, C, height, width) -> `BaseModelOutputWithPoolingAndCrossAttentions` of 1 + rows * cols tokens.

    Args:
        bert: A `BertModel`.
        patch_embeddings: `nn.Conv2d` whose stride is its kernel, to `hidden_size` channels.
        cls_token: `hidden_size` values, in any shape.
    """

    def __init__(self, bert: nn.Module, patch_embeddings: nn.Conv2d, cls_token: Tensor):
        super().__init__()
        self.bert = bert
        self.patch_embeddings = patch_embeddings
        self.cls_token = nn.Parameter(cls_token.detach().clone().reshape(1, 1, -1))

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> Any:
        """Encode images; `kwargs` go to `BertModel`."""
        patches = self.patch_embeddings(pixel_values).flatten(2).transpose(1, 2)
        cls_token = self.cls_token.expand(len(patches), -1, -1)
        return self.bert(inputs_embeds=torch.cat((cls_token, patches), dim=1), **kwargs)


def from_bert(
    bert: nn.Module,
    patch_embeddings: nn.Conv2d,
    cls_token: Tensor,
    image_size: int | list[int] | tuple[int, int] | None = None,
) -> ViTScratchModel:
    """The post-LN encoder that computes what `BertComposite(bert, patch_embeddings, cls_token)` does.

    BERT adds the first row of its token types to every token; here it is folded into the positions. Word embeddings
    and BERT's pooler have no place and are left behind.

    Args:
        bert: A `BertModel`, not a decoder.
        patch_embeddings: `nn.Conv2d` whose stride is its kernel, to `hidden_size` channels.
        cls_token: `hidden_size` values, in any shape.
        image_size: Height and width in pixels. Not needed where `max_position_embeddings` is one more than a square
            number, which is then taken for a square grid.

    Raises:
        UserError: The parts do not belong together, or BERT has a feature that we have not.
    """
    from transformers import BertModel

    _require_class(bert, (BertModel,), "from_bert")
    config = cast(Any, bert.config)
    if not isinstance(patch_embeddings, nn.Conv2d):
        raise UserError(f"from_bert: patch_embeddings must be a Conv2d, got {type(patch_embeddings).__name__}.")
    kernel = cast(tuple[int, int], patch_embeddings.kernel_size)
    twin = nn.Conv2d(patch_embeddings.in_channels, config.hidden_size, kernel_size=kernel, stride=kernel)
    _refuse_unlike(patch_embeddings, twin, "from_bert: patch_embeddings")
    if cls_token.numel() != config.hidden_size:
        raise UserError(
            f"from_bert: cls_token must have the {config.hidden_size} values of BERT's hidden_size, got "
            f"{tuple(cls_token.shape)}."
        )
    if image_size is None:
        side = math.isqrt(config.max_position_embeddings - 1)
        if side**2 != config.max_position_embeddings - 1:
            raise UserError(
                f"from_bert needs image_size: BERT's {config.max_position_embeddings} positions are not those of a "
                "class token and a square grid."
            )
        image_size = [side * pixels for pixels in kernel]
    with refusing("from_bert"):
        ours = ViTScratchModel(
            ViTScratchConfig(
                norm_first=False,
                image_size=simplest(image_size),
                patch_size=simplest(kernel),
                num_channels=patch_embeddings.in_channels,
                **{name: getattr(config, name) for name in BERT_FIELDS},
            )
        )
    num_tokens = 1 + math.prod(ours.config.grid_size)
    if num_tokens > config.max_position_embeddings:
        raise UserError(
            f"from_bert: images of {image_size} pixels make {num_tokens} tokens, but BERT has only "
            f"{config.max_position_embeddings} positions (max_position_embeddings)."
        )
    # The three embedding tables and the pooler are dealt with here.
    _refuse_unlike(bert, to_bert(ours)[0], "from_bert", but_for=r"embeddings\.\w+_embeddings|pooler")
    if bert.pooler is not None:
        logger.warning("from_bert: left behind BERT's pooler, a trained layer which ViTScratchModel has not.")

    theirs = bert.state_dict()
    positions = theirs.pop("embeddings.position_embeddings.weight")[:num_tokens]
    token_type = theirs.pop("embeddings.token_type_embeddings.weight")[0]
    state = to_our_names({name: tensor for name, tensor in theirs.items() if "pooler" not in name}, BERT)
    state["embeddings.position_embeddings"] = (positions + token_type)[None]
    state["embeddings.cls_token"] = cls_token.detach().reshape(1, 1, -1)
    state |= _with_prefix(patch_embeddings.state_dict(), "embeddings.patch_embeddings.projection.")
    return _load(ours, state, like=bert)


def to_bert(model: ViTScratchPreTrainedModel) -> tuple[Any, nn.Conv2d, Tensor]:
    """The parts of a `BertComposite` that computes what this post-LN encoder does.

    Args:
        model: A `ViTScratchModel`, post-LN, with a class token.

    Returns:
        A `BertModel` without pooler, with as many positions as there are tokens, one word and one token type, both
        zero; the Conv2d of the patches; and the class token, (1, 1, D).

    Raises:
        UserError: The model is none of ours, or BERT has no counterpart of a feature.
    """
    from transformers import BertConfig, BertModel

    _require_class(model, (ViTScratchModel,), "to_bert")
    _refuse_mask_token(model, "BertModel")
    _refuse_changed(model, "to_bert")
    config = model.config
    _require(
        config, "BertModel", norm_first=(False,), position_embedding_type=TABLES, pooling=("cls",), qkv_bias=(True,),
        qk_norm=(False,), is_causal=(False,),
    )  # fmt: skip
    _warn_left_behind(config, "drop_path_rate")
    num_tokens = 1 + math.prod(config.grid_size)
    bert = BertModel(
        BertConfig(
            vocab_size=1,
            type_vocab_size=1,
            max_position_embeddings=num_tokens,
            **{name: getattr(config, name) for name in BERT_FIELDS},
        ),
        add_pooling_layer=False,
    )
    state = model.state_dict()
    zeros = torch.zeros(1, config.hidden_size)
    own = {
        "embeddings.position_embeddings.weight": state["embeddings.position_embeddings"][0],
        "embeddings.word_embeddings.weight": zeros,
        "embeddings.token_type_embeddings.weight": zeros,
    }
    _load(bert, own | _to_their_names(state, bert.state_dict().keys() - own.keys(), BERT), like=model)
    projection = cast(Any, model).embeddings.patch_embeddings.projection
    patch_embeddings = nn.Conv2d(
        projection.in_channels, projection.out_channels, kernel_size=projection.kernel_size, stride=projection.stride
    )
    return bert, _load(patch_embeddings, projection.state_dict(), like=model), state["embeddings.cls_token"].clone()


# transformers' ViT


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
    _require_class(vit, (ViTModel, ViTForImageClassification, ViTForMaskedImageModeling), "from_vit")
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
    _refuse_unlike(vit, to_vit(ours), "from_vit", but_for="pooler")
    if any(name.startswith("pooler.") for name in theirs):
        logger.warning("from_vit: left behind the ViT's pooler, a trained layer which ViTScratchModel has not.")
    return _load(ours, {name: tensor for name, tensor in theirs.items() if not name.startswith("pooler.")}, like=vit)


def to_vit(model: ViTScratchPreTrainedModel) -> Any:
    """Transformers' ViT of the same kind: `ViTModel` (without pooler), `...ForImageClassification`, `...ForMasked...`.

    Raises:
        UserError: The model is none of ours, or transformers' ViT has no counterpart of a feature.
    """
    from transformers import ViTConfig, ViTForImageClassification, ViTForMaskedImageModeling, ViTModel

    _require_class(model, OURS, "to_vit")
    _refuse_changed(model, "to_vit")
    config = model.config
    _require(
        config, "transformers' ViT", norm_first=(True,), position_embedding_type=TABLES, pooling=("cls",),
        fc_norm=(False,), qk_norm=(False,), is_causal=(False,), classifier_hidden_size=(None,),
    )  # fmt: skip
    _warn_left_behind(config, "drop_path_rate")
    fields = {name: getattr(config, name) for name in VIT_FIELDS}
    vit: nn.Module
    if isinstance(model, ViTScratchForMaskedImageModeling):
        _require_square(config, "transformers' ViTForMaskedImageModeling")
        size, patch = config.image_height_width[0], config.patch_height_width[0]
        fields |= {"image_size": size, "patch_size": patch, "encoder_stride": patch}
        vit = ViTForMaskedImageModeling(ViTConfig(**fields))
    elif isinstance(model, ViTScratchForImageClassification):
        vit = ViTForImageClassification(ViTConfig(**fields))
    else:
        use_mask_token = "embeddings.mask_token" in model.state_dict()
        vit = ViTModel(ViTConfig(**fields), add_pooling_layer=False, use_mask_token=use_mask_token)
    return _load(vit, model.state_dict(), like=model)


# timm


def from_timm(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Our model from timm's `VisionTransformer`, pooled by class token or average, with or without head.

    Without a head (`num_classes=0`) the result is a `ViTScratchModel`. timm's average pooling keeps the class token
    (`use_cls_token`) and normalises after pooling (`fc_norm`), unless it was built otherwise; so does ours then.

    Raises:
        UserError: timm is not installed, the module is of another class, or has a feature that we have not.
    """
    vision_transformer = timm_class("from_timm")
    _require_class(vit, (vision_transformer,), "from_timm")
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
            hidden_act=_activation_name([block.mlp.act for block in source.blocks]),
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
    _refuse_unlike(vit, twin, "from_timm")
    state = to_our_names(vit.state_dict(), TIMM)
    return _load(ours, with_base_prefix(state) if num_classes else state, like=vit)


def to_timm(model: ViTScratchPreTrainedModel) -> Any:
    """Timm's `VisionTransformer`: with a head from our classifier, with `num_classes=0` from a `ViTScratchModel`.

    Raises:
        UserError: timm is not installed, the model is none of these, or timm has no counterpart of a feature.
    """
    vision_transformer = timm_class("to_timm")
    _require_class(model, (ViTScratchModel, ViTScratchForImageClassification), "to_timm")
    _refuse_mask_token(model, "timm's VisionTransformer")
    _refuse_changed(model, "to_timm")
    config = model.config
    _require(
        config, "timm's VisionTransformer", norm_first=(True,), position_embedding_type=TABLES, qk_norm=(False,),
        is_causal=(False,), classifier_hidden_size=(None,),
    )  # fmt: skip
    _warn_left_behind(config, "hidden_dropout_prob")
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
    return _load(vit, _to_their_names(state, vit.state_dict(), TIMM), like=model)


# torchvision


def from_torchvision(vit: nn.Module) -> ViTScratchPreTrainedModel:
    """Our classifier from torchvision's `VisionTransformer` (`vit_b_16` and its family).

    Its head of two layers (`representation_size`) becomes `classifier_hidden_size` with tanh. `heads` that were
    replaced may be one linear layer; with none (`nn.Identity()`) the result is a `ViTScratchModel`.

    Raises:
        UserError: The module is of another class, or has a feature that we have not.
    """
    from torchvision.models import VisionTransformer

    _require_class(vit, (VisionTransformer,), "from_torchvision")
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
    _refuse_unlike(vit, to_torchvision(ours), "from_torchvision", but_for=None if is_stock else r"heads\b")
    state = {re.sub(rf"^{re.escape(head_path)}\b", "heads.head", name): x for name, x in vit.state_dict().items()}
    renamed = to_our_names(state, TORCHVISION)
    if not num_labels:
        return _load(ViTScratchModel(config), renamed, like=vit)
    return _load(ours, with_base_prefix(renamed), like=vit)


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

    _require_class(model, (ViTScratchForImageClassification,), "to_torchvision")
    _refuse_changed(model, "to_torchvision")
    config = model.config
    peer = "torchvision's VisionTransformer"
    _require(
        config, peer, norm_first=(True,), position_embedding_type=TABLES, pooling=("cls",), fc_norm=(False,),
        qk_norm=(False,), is_causal=(False,), qkv_bias=(True,), hidden_act=("gelu",), num_channels=(3,),
    )  # fmt: skip
    if config.classifier_hidden_size is not None:
        _require(config, peer, classifier_act=("tanh",))
    _require_square(config, peer)
    _warn_left_behind(config, "hidden_dropout_prob", "drop_path_rate")
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
    return _load(vit, _to_their_names(state, vit.state_dict(), TORCHVISION), like=model)


# Names and tensors

OURS = (ViTScratchModel, ViTScratchForImageClassification, ViTScratchForMaskedImageModeling)


def _translate(name: str, table: Mapping[str, str]) -> str:
    """Our name for their parameter, with {qkv} left in it."""
    for theirs, ours in table.items():
        pattern = re.escape(theirs).replace(r"\{i\}", r"(?P<i>\d+)") + r"(?P<leaf>(\.\w+)?)"
        if match := re.fullmatch(pattern, name):
            return ours.replace("{i}", match.groupdict().get("i", "")) + match["leaf"]
    raise KeyError(name)


def to_our_names(theirs: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Parameters under our names, joined ones split; a `KeyError` names one that the table does not know."""
    state = {}
    for name, tensor in theirs.items():
        if name.startswith("embeddings.word_embeddings."):
            continue
        ours = _translate(name, table)
        if "{qkv}" in ours:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                state[ours.replace("{qkv}", letter)] = part
        else:
            state[ours] = tensor
    return state


def _to_their_names(ours: Mapping[str, Tensor], names: Iterable[str], table: Mapping[str, str]) -> dict[str, Tensor]:
    state = {}
    for name in names:
        own = _translate(name, table)
        if "{qkv}" in own:
            state[name] = torch.cat([ours[own.replace("{qkv}", letter)] for letter in "qkv"])
        else:
            state[name] = ours[own]
    return state


def _with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def with_base_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Encoder names as a classifier has them."""
    heads = ("classifier.", "pre_logits.")
    return {(name if name.startswith(heads) else f"vit.{name}"): tensor for name, tensor in state.items()}


def _load(module: Module, state: Mapping[str, Tensor], like: nn.Module) -> Module:
    """Give `module` copies of these tensors, each in its own dtype, and the device and mode of `like`."""
    module.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
    return module.to(next(like.parameters()).device).train(like.training)


# What cannot be converted

# Attributes that change nothing for images of the trained size, or that the parameters' shapes show better.
_HARMLESS = {
    "training", "name_or_path", "gradient_checkpointing", "grad_checkpointing", "fused_attn", "inplace", "flatten",
    "output_fmt", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init_mode", "fix_init",
    "num_classes", "num_labels", "global_pool", "dropout", "attention_dropout", "dropout_prob",
}  # fmt: skip
_REGULARISATION = {"Dropout", "DropPath", "PatchDropout", "Identity", "ViTScratchDropPath", "NoneType"}


def _require_class(module: object, classes: tuple[type, ...], caller: str) -> None:
    if not isinstance(module, classes):
        names = " or ".join(cls.__name__ for cls in classes)
        library = classes[0].__module__.partition(".")[0]
        raise UserError(f"{caller} takes {names} of {library}, got {type(module).__name__}.")


def _require(config: ViTScratchConfig, peer: str, **allowed: tuple[Any, ...]) -> None:
    """Refuse a model of ours with a feature that the other library has not."""
    wrong = [
        f"{name}={getattr(config, name)!r}" for name, values in allowed.items() if getattr(config, name) not in values
    ]
    if wrong:
        raise UserError(f"{peer} has no counterpart of {', '.join(wrong)}.")


def _require_square(config: ViTScratchConfig, peer: str) -> None:
    sizes = {"an image_size": config.image_height_width, "a patch_size": config.patch_height_width}
    for name, (height, width) in sizes.items():
        if height != width:
            raise UserError(f"{peer} has no counterpart of {name} that is not square, {height}x{width}.")


def _refuse_mask_token(model: ViTScratchPreTrainedModel, peer: str) -> None:
    if cast(Any, model.base_model).embeddings.mask_token is not None:
        raise UserError(f"{peer} has no counterpart of the mask token.")


def _warn_left_behind(config: ViTScratchConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name):
            logger.warning("Left behind %s=%s, which acts in training only.", name, getattr(config, name))


@contextmanager
def refusing(caller: str) -> Iterator[None]:
    """Our configuration's errors, and attributes that a plain model would have, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{caller}: {error}") from error


def _refuse_changed(model: ViTScratchPreTrainedModel, caller: str) -> None:
    """Refuse a model of ours whose modules are no longer those of its configuration."""
    options = {}
    if isinstance(model, ViTScratchModel):
        options["use_mask_token"] = "embeddings.mask_token" in model.state_dict()
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config), **options)
    _refuse_unlike(model, twin, caller)


def _refuse_unlike(source: nn.Module, twin: nn.Module, caller: str, but_for: str | None = None) -> None:
    """Refuse a model that is not built like its plain twin, and name the differences.

    Compared are the modules and their public numbers and words, and the names and shapes of all parameters; not their
    values. Dropout that differs is only warned of.
    """
    found: list[str] = []
    left_behind: list[str] = []
    named: list[str] = []  # modules whose parameters need not be named too

    def wanted(name: str) -> bool:
        return (but_for is None or re.match(but_for, name) is None) and not name.startswith(tuple(named))

    twins = dict(twin.named_modules())
    for path, module in source.named_modules():
        if not wanted(path):
            continue
        plain = twins.pop(path, None)
        is_activation = path.endswith("mlp.act")  # timm's, which is compared by what it computes
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            found.append(f"{path or 'it'} has a forward of its own")
        elif _foreign_hooks(module):
            found.append(f"{path or 'it'} has a hook")
        if {_kind(module), _kind(plain)} <= _REGULARISATION:
            probability = _probability(module)
            if probability != _probability(plain):
                left_behind.append(f"{path} (probability {probability:g})")
        elif plain is None:
            found.append(f"{path} ({_kind(module)})")
            named.append(f"{path}.")
        elif _kind(module) != _kind(plain) and not is_activation:
            found.append(f"{path or 'it'} is {_kind(module)}, not {_kind(plain)}")
            if path:
                named.append(f"{path}.")
        elif not is_activation:
            for name, value in vars(module).items():
                comparable = isinstance(value, bool | int | float | str | tuple)
                if not comparable or name.startswith("_") or name in _HARMLESS:
                    continue
                plain_value = getattr(plain, name, None)
                if value != plain_value:
                    found.append(f"{path}.{name}={value!r}, not {plain_value!r}".removeprefix("."))
    for path, plain in twins.items():
        if wanted(path) and _kind(plain) not in _REGULARISATION:
            found.append(f"{path} ({_kind(plain)}) is missing")
            named.append(f"{path}.")

    states = ({name: tensor for name, tensor in part.state_dict().items() if wanted(name)} for part in (source, twin))
    found += shape_differences(*states)
    if found:
        raise UserError(f"{caller}: {type(source).__name__} is not built like a plain one: {some(found)}.")
    if left_behind:
        logger.warning("%s: left behind %s, which acts in training only.", caller, some(left_behind))


def _kind(module: nn.Module | None) -> str:
    """The class's name, with its module where it belongs to none of the libraries, so that nothing passes for them."""
    cls = type(module)
    libraries = ("torch", "torchvision", "timm", "transformers", "hf_vit_scratch", "builtins")
    known = cls.__module__.partition(".")[0] in libraries
    if known and isinstance(module, nn.LayerNorm) and cls.__name__ == "LayerNorm":
        return "LayerNorm"  # timm has its own, which computes the same
    return cls.__name__ if known else f"{cls.__module__}.{cls.__name__}"


def _probability(module: nn.Module | None) -> float:
    return next((getattr(module, name) for name in ("p", "prob", "drop_prob") if hasattr(module, name)), 0.0)


def _foreign_hooks(module: nn.Module) -> list[Any]:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("transformers.")]


def shape_differences(state: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    """Names that only one of two has, and shapes that differ."""
    shapes, plain_shapes = (
        {name: tuple(tensor.shape) for name, tensor in part.items() if isinstance(tensor, Tensor)}
        for part in (state, plain)
    )
    found = [f"{name} {shape} is unknown" for name, shape in shapes.items() if name not in plain_shapes]
    found += [f"{name} is missing" for name in plain_shapes if name not in shapes]
    both = shapes.keys() & plain_shapes.keys()
    return found + [
        f"{name} is {shapes[name]}, not {plain_shapes[name]}"
        for name in shapes
        if name in both and shapes[name] != plain_shapes[name]
    ]


def some(texts: list[str]) -> str:
    """The first four, of which one stands for all that differ in their numbers only."""
    first = list({re.sub(r"\d+", "", text): text for text in reversed(texts)}.values())[::-1]
    return ", ".join(first[:4]) + (f", and {len(first) - 4} more" if len(first) > 4 else "")


def timm_class(caller: str) -> Any:
    """The class `VisionTransformer` of timm; a `UserError` where timm is not installed."""
    try:
        from timm.models import VisionTransformer
    except ImportError:
        raise UserError(f"{caller} needs timm, which is not installed: python -m pip install timm.") from None
    return VisionTransformer


def _activation_name(activations: list[nn.Module]) -> str:
    """Transformers' name of the activations, found by what they compute: every library has its own classes."""
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for name in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"):
        expected = ACT2FN[name](x)
        if all(torch.allclose(expected, activation(x.clone()), rtol=0, atol=1e-12) for activation in activations):
            return name
    kinds = ", ".join(sorted({type(activation).__name__ for activation in activations}))
    raise UserError(f"from_timm: we have no counterpart of the activation {kinds} in all layers.")


def simplest(size: int | Iterable[int]) -> int | list[int]:
    """A height and width in pixels as one number, where they are equal."""
    if isinstance(size, int):
        return size
    height, width = size
    return height if height == width else [height, width]
