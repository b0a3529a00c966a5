"""Parameters under the names of another library."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..model.modeling_vit_scratch import (
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
    ViTScratchModel,
)
from .checks import Module

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


def to_their_names(ours: Mapping[str, Tensor], names: Iterable[str], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Parameters of ours under the other library's names, joined where that joins them."""
    state = {}
    for name in names:
        own = _translate(name, table)
        if "{qkv}" in own:
            state[name] = torch.cat([ours[own.replace("{qkv}", letter)] for letter in "qkv"])
        else:
            state[name] = ours[own]
    return state


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same tensors with a prefix before each name."""
    return {prefix + name: tensor for name, tensor in state.items()}


def with_base_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Encoder names as a classifier has them."""
    heads = ("classifier.", "pre_logits.")
    return {(name if name.startswith(heads) else f"vit.{name}"): tensor for name, tensor in state.items()}


def load_like(module: Module, state: Mapping[str, Tensor], like: nn.Module) -> Module:
    """Give `module` copies of these tensors, each in its own dtype, and the device and mode of `like`."""
    module.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
    return module.to(next(like.parameters()).device).train(like.training)


# What cannot be converted
