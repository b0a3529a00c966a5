"""BertModel of transformers on patches, from and to ours."""

import logging
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import (
    ViTScratchModel,
    ViTScratchPreTrainedModel,
)
from .checks import (
    TABLES,
    refuse_changed,
    refuse_mask_token,
    refuse_unlike,
    refusing,
    require,
    require_class,
    simplest,
    warn_left_behind,
)
from .names import load_like, to_our_names, to_their_names, with_prefix

logger = logging.getLogger(__name__)

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
BERT_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps",
    "initializer_range", "hidden_dropout_prob", "attention_probs_dropout_prob",
)  # fmt: skip


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

    require_class(bert, (BertModel,), "from_bert")
    config = cast(Any, bert.config)
    if not isinstance(patch_embeddings, nn.Conv2d):
        raise UserError(f"from_bert: patch_embeddings must be a Conv2d, got {type(patch_embeddings).__name__}.")
    kernel = cast(tuple[int, int], patch_embeddings.kernel_size)
    twin = nn.Conv2d(patch_embeddings.in_channels, config.hidden_size, kernel_size=kernel, stride=kernel)
    refuse_unlike(patch_embeddings, twin, "from_bert: patch_embeddings")
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
    refuse_unlike(bert, to_bert(ours)[0], "from_bert", but_for=r"embeddings\.\w+_embeddings|pooler")
    if bert.pooler is not None:
        logger.warning("from_bert: left behind BERT's pooler, a trained layer which ViTScratchModel has not.")

    theirs = bert.state_dict()
    positions = theirs.pop("embeddings.position_embeddings.weight")[:num_tokens]
    token_type = theirs.pop("embeddings.token_type_embeddings.weight")[0]
    state = to_our_names({name: tensor for name, tensor in theirs.items() if "pooler" not in name}, BERT)
    state["embeddings.position_embeddings"] = (positions + token_type)[None]
    state["embeddings.cls_token"] = cls_token.detach().reshape(1, 1, -1)
    state |= with_prefix(patch_embeddings.state_dict(), "embeddings.patch_embeddings.projection.")
    return load_like(ours, state, like=bert)


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

    require_class(model, (ViTScratchModel,), "to_bert")
    refuse_mask_token(model, "BertModel")
    refuse_changed(model, "to_bert")
    config = model.config
    require(
        config, "BertModel", norm_first=(False,), position_embedding_type=TABLES, pooling=("cls",), qkv_bias=(True,),
        qk_norm=(False,), is_causal=(False,),
    )  # fmt: skip
    warn_left_behind(config, "drop_path_rate")
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
    load_like(bert, own | to_their_names(state, bert.state_dict().keys() - own.keys(), BERT), like=model)
    projection = cast(Any, model).embeddings.patch_embeddings.projection
    patch_embeddings = nn.Conv2d(
        projection.in_channels, projection.out_channels, kernel_size=projection.kernel_size, stride=projection.stride
    )
    load_like(patch_embeddings, projection.state_dict(), like=model)
    return bert, patch_embeddings, state["embeddings.cls_token"].clone()


# transformers' ViT
