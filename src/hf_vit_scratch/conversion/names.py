"""Parameters under the names of another library, and the one check of names and shapes."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import BaseImageProcessor

from ..errors import UserError, blame_the_user
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import ViTScratchForImageClassification, ViTScratchModel, ViTScratchPreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


class LoadedModel(NamedTuple):
    """A saved model of any library as a model of ours."""

    model: ViTScratchPreTrainedModel
    kind: str  # what the source holds
    assumed: str  # because the source does not say it
    image_processor: BaseImageProcessor | None  # None if it is not known how images are prepared


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of an encoder or a model with a head, without the prefix `vit.` and without a pooler."""
    state = model.state_dict().items()
    return {name.removeprefix("vit."): tensor for name, tensor in state if not name.startswith("pooler.")}


def _our_names(name: str, table: Mapping[str, str]) -> list[str]:
    """Return our names for their parameter: three where theirs joins q, k and v, none where the table lacks it.

    A key of the table is a parameter, or a module for its parameters. {i} is the number of a layer.
    """
    for theirs, ours in table.items():
        pattern = re.escape(theirs).replace(r"\{i\}", r"(?P<i>\d+)") + r"(?P<leaf>(\.\w+)?)"
        if match := re.fullmatch(pattern, name):
            own = ours.replace("{i}", match.groupdict().get("i", "")) + match["leaf"]
            return [own.replace("{qkv}", letter) for letter in ("qkv" if "{qkv}" in own else "q")]
    return []


def to_our_names(theirs: Mapping[str, Tensor], table: Mapping[str, str], caller: str) -> dict[str, Tensor]:
    """Return parameters under our names, joined ones split."""
    names = {name: _our_names(name, table) for name in theirs}
    if unknown := [name for name, ours in names.items() if not ours]:
        raise UserError(f"{caller}: no plain Vision Transformer: we have no counterpart of {summarize(unknown)}.")
    state: dict[str, Tensor] = {}
    for name, ours in names.items():
        if state.keys() & set(ours):
            raise UserError(f"{caller}: {name} has the place of another weight. Delete one of them.")
        state |= zip(ours, theirs[name].chunk(len(ours)), strict=False)
    return state


def to_their_names(ours: Mapping[str, Tensor], names: Iterable[str], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Return parameters under the other library's names, joined where that joins them.

    Parameters without a counterpart keep our names, so that `load_weights` refuses them.
    """
    ours, state = dict(ours), {}
    for name in names:
        own = _our_names(name, table)
        if own and ours.keys() >= set(own):
            state[name] = torch.cat([ours.pop(part) for part in own])
    return state | ours


def load_weights(module: Module, state: Mapping[str, Tensor], caller: str, like: nn.Module | None = None) -> Module:
    """Load copies of these tensors, each in its own dtype, if their names and shapes are those of a new module.

    The names come without the prefix `vit.`. The module takes the device and the mode of the model `like`.
    """
    expected, given = (
        {name: tuple(tensor.shape) for name, tensor in part.items()} for part in (weights_of(module), state)
    )
    wrong = [f"there is no counterpart of {name}" for name in given if name not in expected]
    wrong += [f"{name} is missing" for name in expected if name not in given]
    wrong += [
        f"{name} is {given[name]}, not {shape}" for name, shape in expected.items() if given.get(name, shape) != shape
    ]
    if wrong:
        raise UserError(f"{caller}: {summarize(wrong)}.")
    tensors = {name: state[name.removeprefix("vit.")].detach().clone() for name in module.state_dict()}
    module.load_state_dict(tensors, assign=True)
    return module if like is None else module.to(next(like.parameters()).device).train(like.training)


def build_from_weights(
    state: Mapping[str, Tensor], caller: str, like: nn.Module | None = None, **fields: Any
) -> ViTScratchPreTrainedModel:
    """Build our pre-LN model of these weights, whose shapes show its sizes; without a classifier, an encoder.

    `fields` are those of the configuration that no shape shows. For the rest, see `load_weights`.
    """
    hidden_size, num_channels, *patch_size = state["embeddings.patch_embeddings.projection.weight"].shape
    if "classifier.weight" in state:
        fields["num_labels"] = len(state["classifier.weight"])
    if "pre_logits.0.weight" in state:
        fields |= {"classifier_hidden_size": len(state["pre_logits.0.weight"]), "classifier_act": "tanh"}
    with blame_the_user():
        config = ViTScratchConfig(
            patch_size=as_number(patch_size),
            num_channels=num_channels,
            hidden_size=hidden_size,
            num_hidden_layers=len({name.split(".")[1] for name in state if name.startswith("layers.")}),
            intermediate_size=len(state["layers.0.mlp.fc1.weight"]),
            qkv_bias="layers.0.attention.q_proj.bias" in state,
            norm_first=True,
            use_cls_token="embeddings.cls_token" in state,
            **fields,
        )
    ours = ViTScratchForImageClassification(config) if "num_labels" in fields else ViTScratchModel(config)
    return load_weights(ours, state, caller, like)


def summarize(texts: list[str]) -> str:
    """Join the first four texts; one stands for all that differ in their numbers only."""
    first = list({re.sub(r"\d+", "", text): text for text in reversed(texts)}.values())[::-1]
    return ", ".join(first[:4]) + (f", and {len(first) - 4} more" if len(first) > 4 else "")


def as_number(sizes: Any) -> Any:
    """Return equal sizes, such as a height and a width in pixels, as one number, and others as they are."""
    return sizes[0] if isinstance(sizes, list | tuple) and len(set(sizes)) == 1 else sizes
