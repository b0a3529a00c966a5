"""Measure how far two models are apart: outputs, every layer, attention maps and gradients, for random images.

A comparison at default initialisation is nearly blind: with biases of zero and norm scales of one, a model with
swapped norms equals its reference. So `randomize_` draws every parameter.
"""

import copy
import math
import platform
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from transformers import BertConfig, BertModel, ViTConfig, ViTForMaskedImageModeling, ViTModel

from ..model.modeling_vit_scratch import ViTScratchForMaskedImageModeling, ViTScratchPreTrainedModel
from .bert import BertComposite, from_bert, to_bert
from .checks import largest_differences, observe, randomize_
from .timm import from_timm, to_timm
from .torchvision import from_torchvision, to_torchvision
from .vit import CLASSES, from_vit, to_vit

KINDS = ("outputs", "hidden states", "attention maps", "gradients")


def with_gradients_as_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with its gradients in the place of its parameters, for a converter to rename."""
    twin = copy.deepcopy(module)
    for parameter, original in zip(twin.parameters(), module.parameters(), strict=True):
        parameter.data = torch.zeros_like(original) if original.grad is None else original.grad.clone()
    return twin


class Peer(NamedTuple):
    """An independent implementation to be measured against."""

    name: str
    package: str  # which must be installed
    build: Callable[[], nn.Module]  # makes a small model
    to_ours: Callable[[Any], ViTScratchPreTrainedModel]
    to_theirs: Callable[[Any], nn.Module]
    gives_attentions: bool = False


# Small, with no two equal sizes that could be confused; images and patches that are not square where the peer can.
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_OBLONG: dict[str, Any] = {"image_size": [16, 24], "patch_size": [4, 8]}
_SQUARE: dict[str, Any] = {"image_size": 24, "patch_size": 4}


def _composite(bert: nn.Module, patch_embeddings: nn.Conv2d, cls_token: Tensor) -> BertComposite:
    part = cast(Any, bert)
    part.set_attn_implementation("eager")  # the only one that returns attention maps
    part.embeddings.token_type_embeddings.requires_grad_(False)  # the positions, which it is folded into, have it
    return BertComposite(bert, patch_embeddings, cls_token)


def _build_bert() -> nn.Module:
    bert = BertModel(BertConfig(**_SIZES, vocab_size=7, max_position_embeddings=20), add_pooling_layer=False)
    return _composite(bert, nn.Conv2d(3, 32, kernel_size=(4, 8), stride=(4, 8)), torch.zeros(32))


def _build_vit(vit_class: type) -> nn.Module:
    sizes = _SIZES | (_SQUARE if vit_class is ViTForMaskedImageModeling else _OBLONG)
    options = {"add_pooling_layer": False} if vit_class is ViTModel else {}
    return cast(nn.Module, vit_class(ViTConfig(**sizes | {"num_labels": 5, "encoder_stride": 4}), **options))


def _build_timm(**options: Any) -> nn.Module:
    from timm.models import VisionTransformer

    sizes: dict[str, Any] = {"img_size": (16, 24), "patch_size": (4, 8), "mlp_ratio": 1.5, "num_classes": 5}
    return cast(nn.Module, VisionTransformer(embed_dim=32, depth=3, num_heads=4, **sizes | options))


def _build_torchvision() -> nn.Module:
    return VisionTransformer(24, 4, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5)


PEERS = (
    Peer(
        "transformers `BertModel` on patches",
        "transformers",
        _build_bert,
        lambda peer: from_bert(peer.bert, peer.patch_embeddings, peer.cls_token, image_size=[16, 24]),
        lambda model: _composite(*to_bert(model)),
        gives_attentions=True,
    ),
    *(
        Peer(f"transformers `{vit_class.__name__}`", "transformers", partial(_build_vit, vit_class), from_vit, to_vit)
        for vit_class in CLASSES
    ),
    *(
        Peer(name, "timm", partial(_build_timm, **options), from_timm, to_timm)
        for name, options in (
            ("timm `VisionTransformer`, class token", {}),
            ("timm, average", {"global_pool": "avg"}),
            ("timm, average without class token", {"global_pool": "avg", "class_token": False, "fc_norm": False}),
        )
    ),
    Peer("torchvision `VisionTransformer`", "torchvision", _build_torchvision, from_torchvision, to_torchvision),
)

SCALES = (0.02, 0.5)


def limit(kind: str, dtype: torch.dtype, std: float) -> float:
    """Return the largest difference that counts as equal; infinite if rounding alone may be larger."""
    if dtype == torch.float32:
        return 1e-5 if std == min(SCALES) else math.inf
    return 1e-8 if kind == "gradients" else 1e-10


def measure(peer: Peer, direction: str, dtype: torch.dtype, std: float) -> dict[str, float]:
    """Return the largest absolute differences between a model and what it was converted to.

    All parameters are random, with the standard deviation `std`. The direction is `"from"` the peer to ours, or `"to"`
    the peer.

    Returns:
        One number for each of `KINDS` that the peer shows: the outputs, the hidden states from the embeddings to the
        last layer, the attention maps, and the gradients of all parameters and pixels.
    """
    generator = torch.Generator().manual_seed(0)
    theirs = peer.build().to(dtype).eval()
    if direction == "from":
        ours = peer.to_ours(randomize_(theirs, std, generator))
    else:
        ours = peer.to_ours(theirs)
        theirs = peer.to_theirs(randomize_(ours, std, generator))
    if peer.gives_attentions:
        ours.set_attn_implementation("eager")

    config = ours.config
    pixels = torch.randn(3, config.num_channels, *config.image_height_width, generator=generator, dtype=torch.float64)
    kwargs: dict[str, Any] = {"output_attentions": True} if peer.gives_attentions else {}
    if isinstance(ours, ViTScratchForMaskedImageModeling):
        kwargs["bool_masked_pos"] = torch.rand(3, math.prod(config.grid_size), generator=generator) < 0.5
    models = (theirs, ours)
    inputs = [pixels.to(dtype).clone().requires_grad_() for _ in models]
    observed = [observe(model, x, **kwargs) for model, x in zip(models, inputs, strict=True)]
    outputs = {name for name in observed[0].keys() & observed[1].keys() if "." not in name}
    for model, x, seen in zip(models, inputs, observed, strict=True):
        torch.autograd.backward([_weighted_mean(seen[name]) for name in sorted(outputs)])
        gradients: nn.Module = with_gradients_as_parameters(model)
        if model is theirs:
            gradients = peer.to_ours(gradients)  # which renames them
        seen |= {f"gradients.{name}": tensor for name, tensor in gradients.named_parameters()}
        seen["gradients.pixel_values"] = cast(Tensor, x.grad)
    with torch.no_grad():
        return largest_differences(*observed)


def _weighted_mean(output: Tensor) -> Tensor:
    """Return the mean of an output, weighted with fixed random numbers, so that no gradient cancels."""
    generator = torch.Generator().manual_seed(output.numel())
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return (output * weights.to(output)).mean()


def verify() -> bool:
    """Print the table of measured differences, in Markdown; return whether all are within their limits."""
    dtypes = (torch.float64, torch.float32)
    columns = [f"{kind}, {str(dtype).removeprefix('torch.')}" for dtype in dtypes for kind in KINDS]
    print(f"| peer | {' | '.join(columns)} |")
    print("| --- " * (1 + len(columns)) + "|")
    versions, within = {"torch": version("torch")}, True
    for peer in PEERS:
        try:
            versions[peer.package] = version(peer.package)
        except PackageNotFoundError:
            cells = [("not installed", True)] * len(columns)
        else:
            cells = [cell for dtype in dtypes for cell in _cells(peer, dtype)]
        print(f"| {peer.name} | {' | '.join(text if equal else f'**{text}**' for text, equal in cells)} |")
        within = within and all(equal for _, equal in cells)
    scales = " / ".join(map(str, SCALES))
    print(f"\nLargest absolute differences, of both directions, with all parameters random at scale {scales}.")
    print(f"{', '.join(f'{name} {number}' for name, number in versions.items())}; CPU, {platform.machine()}.")
    print("All are within the limits." if within else "Those in bold exceed their limit.")
    return within


def _cells(peer: Peer, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    """Give a peer's cell for each of `KINDS`, and whether its differences are within their limits."""
    measured = {std: [measure(peer, direction, dtype, std) for direction in ("from", "to")] for std in SCALES}
    for kind in KINDS:
        found = {std: [both[kind] for both in measured[std] if kind in both] for std in SCALES}
        text = " / ".join(f"{max(found[std]):.0e}" for std in SCALES if found[std])
        yield text or "-", all(value <= limit(kind, dtype, std) for std in SCALES for value in found[std])
