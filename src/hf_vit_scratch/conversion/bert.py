"""Conversion of transformers' BertModel on patches from and to ours."""

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from ..errors import blame_the_user
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import ViTScratchModel, ViTScratchPreTrainedModel
from .checks import PRE_LN, check_equal, require_class, require_values
from .names import as_number, load_weights, to_our_names, to_their_names, weights_of

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
FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps",
    "initializer_range", "hidden_dropout_prob", "attention_probs_dropout_prob",
)  # fmt: skip
ACCEPTED = PRE_LN | {"norm_first": (False,), "pooling": ("cls",)}
PROJECTION = "embeddings.patch_embeddings.projection"


class BertComposite(nn.Module):
    """Feed transformers' `BertModel` a class token and Conv2d patches of images, as its `inputs_embeds`.

    Shapes: pixels (B, C, height, width) -> `BaseModelOutputWithPoolingAndCrossAttentions` of 1 + rows * cols tokens.
    The parts are those of `from_bert`.
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
    """Convert the parts of a `BertComposite` to our post-LN encoder.

    BERT adds the first row of its token types to every token; here it is folded into the positions. Word embeddings
    and BERT's pooler have no place and are left behind. The image size is the height and width in pixels; without it,
    the largest square grid that BERT has positions for is taken.
    """
    require_class(bert, (BertModel,), "from_bert")
    require_class(patch_embeddings, (nn.Conv2d,), "from_bert")
    config, kernel = cast(Any, bert.config), cast(tuple[int, int], patch_embeddings.kernel_size)
    side = math.isqrt(config.max_position_embeddings - 1)
    with blame_the_user():
        our_config = ViTScratchConfig(
            norm_first=False,
            image_size=as_number([side * pixels for pixels in kernel] if image_size is None else image_size),
            patch_size=as_number(kernel),
            num_channels=patch_embeddings.in_channels,
            **{name: getattr(config, name) for name in FIELDS},
        )
    ours = ViTScratchModel(our_config)
    composite = BertComposite(bert, patch_embeddings, cls_token)
    to_our_weights = partial(_to_our_weights, num_tokens=1 + math.prod(ours.config.grid_size))
    load_weights(ours, to_our_weights(composite), "from_bert", like=bert)
    check_equal(composite, ours, "from_bert", to_our_weights)
    return ours


def _to_our_weights(composite: BertComposite, num_tokens: int) -> dict[str, Tensor]:
    """Return the weights of a composite under our names, its first token type folded into the positions."""
    theirs = weights_of(composite.bert)
    tables = {name: theirs.pop(f"embeddings.{name}_embeddings.weight") for name in ("word", "position", "token_type")}
    state = to_our_names(theirs, BERT, "from_bert")
    state["embeddings.position_embeddings"] = (tables["position"][:num_tokens] + tables["token_type"][0])[None]
    state["embeddings.cls_token"] = composite.cls_token
    return state | {f"{PROJECTION}.{name}": tensor for name, tensor in composite.patch_embeddings.state_dict().items()}


def to_bert(model: ViTScratchPreTrainedModel) -> tuple[Any, nn.Conv2d, Tensor]:
    """Convert our post-LN encoder to the parts of a `BertComposite`.

    Args:
        model: A `ViTScratchModel`, post-LN, with a class token.

    Returns:
        A `BertModel` without pooler, with as many positions as there are tokens, one word and one token type, both
        zero; the Conv2d of the patches; and the class token, (1, 1, D).
    """
    require_class(model, (ViTScratchModel,), "to_bert")
    require_values(model, "to_bert", ACCEPTED)
    config, state = model.config, weights_of(model)
    fields = {name: getattr(config, name) for name in FIELDS}
    num_tokens = 1 + math.prod(config.grid_size)
    bert = BertModel(
        BertConfig(vocab_size=1, type_vocab_size=1, max_position_embeddings=num_tokens, **fields),
        add_pooling_layer=False,
    )
    positions, cls_token = state.pop("embeddings.position_embeddings"), state.pop("embeddings.cls_token")
    projection = {name: state.pop(f"{PROJECTION}.{name}") for name in ("weight", "bias")}
    theirs = to_their_names(state, bert.state_dict(), BERT)
    theirs["embeddings.position_embeddings.weight"] = positions[0]
    for name in ("word", "token_type"):
        theirs[f"embeddings.{name}_embeddings.weight"] = positions.new_zeros(1, config.hidden_size)
    patch = config.patch_height_width
    patch_embeddings = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=patch, stride=patch)
    load_weights(bert, theirs, "to_bert", like=model)
    load_weights(patch_embeddings, projection, "to_bert", like=model)
    composite = BertComposite(bert, patch_embeddings, cls_token)
    check_equal(composite, model, "to_bert", partial(_to_our_weights, num_tokens=num_tokens))
    return bert, patch_embeddings, cls_token.clone()
