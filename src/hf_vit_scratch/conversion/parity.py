"""How far two models are apart: outputs, every layer, attention maps and gradients, on the same random images.

A comparison at default initialisation is nearly blind: with biases of zero and norm scales of one, a model with
swapped norms equals its reference. So `randomize_` draws every parameter.
"""

import copy
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..model.modeling_vit_scratch import ViTScratchPreTrainedModel
from .bert import BertComposite, from_bert, to_bert
from .timm import from_timm, to_timm
from .torchvision import from_torchvision, to_torchvision
from .vit import from_vit, to_vit

KINDS = ("outputs", "hidden states", "attention maps", "gradients")


@torch.no_grad()
def randomize_(module: nn.Module, std: float, generator: torch.Generator | None = None) -> nn.Module:
    """Draw every parameter of `module` from a normal distribution around 0, norm scales around 1, in place."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            parameter.normal_(std=std, generator=generator)
            if name == "weight" and isinstance(part, nn.LayerNorm | nn.RMSNorm):
                parameter.add_(1)
    return module


def observe(module: nn.Module, layers: Iterable[nn.Module], *inputs: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    """Run a model and keep all that can be compared.

    Args:
        module: Returns a tensor (of logits) or a transformers `ModelOutput`.
        layers: Its encoder layers; each gives a tensor, or a tuple that begins with one.
        inputs: Positional arguments of the model.
        kwargs: Keyword arguments of the model.

    Returns:
        "hidden_states.0" (what enters the first layer), "hidden_states.1" and so on, "attentions.0" and so on where
        the model returns them, and the outputs under transformers' names.
    """
    seen: dict[str, Tensor] = {}
    layers = list(layers)

    def keep(depth: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen[f"hidden_states.{depth}"] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[0].register_forward_pre_hook(lambda _, args: seen.update({"hidden_states.0": args[0]}))]
    handles += [layer.register_forward_hook(keep(depth)) for depth, layer in enumerate(layers, start=1)]
    try:
        outputs = module(*inputs, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(outputs, Tensor):
        return seen | {"logits": outputs}
    for name, value in outputs.items():
        if name == "attentions":
            seen |= {f"attentions.{depth}": probs for depth, probs in enumerate(value)}
        elif isinstance(value, Tensor) and name != "pooler_output":  # a layer of its own in transformers' ViT
            seen[name] = value
    return seen


def backward(observed: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Backpropagate the mean of the named outputs, weighted with fixed random numbers, into `.grad`."""
    total = torch.zeros(())
    for name in sorted(names):
        output = observed[name]
        generator = torch.Generator().manual_seed(output.numel())
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        total = total.to(output) + (output * weights).mean()
    total.backward()


def with_gradients_as_parameters(module: nn.Module) -> nn.Module:
    """A copy of `module` that holds its gradients in the place of its parameters, for a converter to rename."""
    twin = copy.deepcopy(module)
    for parameter, original in zip(twin.parameters(), module.parameters(), strict=True):
        parameter.data = torch.zeros_like(original) if original.grad is None else original.grad.clone()
    return twin


def largest_differences(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest absolute difference of each of `KINDS` between two sets of tensors by name.

    Raises:
        ValueError: A hidden state or gradient is missing in one, a shape differs, or nothing can be compared.
    """
    for name in theirs.keys() ^ ours.keys():
        if name.startswith(("hidden_states.", "gradients.")):
            raise ValueError(f"Only one of the models has {name}.")
    differences: dict[str, list[Tensor]] = {}
    kinds = {"hidden_states": "hidden states", "attentions": "attention maps", "gradients": "gradients"}
    for name in theirs.keys() & ours.keys():
        if theirs[name].shape != ours[name].shape:
            raise ValueError(f"{name} has the shapes {tuple(theirs[name].shape)} and {tuple(ours[name].shape)}.")
        kind = kinds.get(name.partition(".")[0], "outputs")
        differences.setdefault(kind, []).append((theirs[name] - ours[name]).abs().max())
    if "outputs" not in differences:
        raise ValueError(f"No output in common: {', '.join(theirs)} and {', '.join(ours)}.")
    # torch's maximum, unlike Python's, keeps a NaN.
    return {kind: torch.stack(maxima).max().item() for kind, maxima in differences.items()}


@dataclass(frozen=True)
class Peer:
    """An independent implementation to be measured against.

    Args:
        name: Name in the table.
        package: Package that must be installed.
        build: Makes a small model of it.
        to_ours: Converts such a model.
        to_theirs: Converts one of ours.
        takes_mask: Whether the model takes `bool_masked_pos`.
        gives_attentions: Whether it returns attention maps.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    to_ours: Callable[[Any], ViTScratchPreTrainedModel]
    to_theirs: Callable[[Any], nn.Module]
    takes_mask: bool = False
    gives_attentions: bool = False


# Small, with no two equal sizes that could be confused; images and patches that are not square where the peer can.
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_OBLONG: dict[str, Any] = {"image_size": [16, 24], "patch_size": [4, 8]}
_SQUARE: dict[str, Any] = {"image_size": 24, "patch_size": 4}


def _composite(bert: nn.Module, patch_embeddings: nn.Conv2d, cls_token: Tensor) -> BertComposite:
    composite = BertComposite(bert, patch_embeddings, cls_token)
    cast(Any, composite.bert).set_attn_implementation("eager")  # the only one that returns attention maps
    # Folded into the positions, whose gradient it has.
    cast(Any, composite.bert).embeddings.token_type_embeddings.requires_grad_(False)
    return composite


def _build_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    bert = BertModel(BertConfig(**_SIZES, vocab_size=7, max_position_embeddings=20), add_pooling_layer=False)
    return _composite(bert, nn.Conv2d(3, 32, kernel_size=(4, 8), stride=(4, 8)), torch.zeros(32))


def _build_vit(head: str) -> nn.Module:
    import transformers

    sizes = _SIZES | (_SQUARE if head == "ForMaskedImageModeling" else _OBLONG)
    config = transformers.ViTConfig(**sizes | {"num_labels": 5, "encoder_stride": 4})
    options = {"add_pooling_layer": False} if head == "Model" else {}
    return cast(nn.Module, getattr(transformers, f"ViT{head}")(config, **options))


def _build_timm(**options: Any) -> nn.Module:
    from timm.models import VisionTransformer

    sizes: dict[str, Any] = {"img_size": (16, 24), "patch_size": (4, 8), "mlp_ratio": 1.5, "num_classes": 5}
    return cast(nn.Module, VisionTransformer(embed_dim=32, depth=3, num_heads=4, **sizes | options))


def _build_torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(24, 4, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5)


PEERS = (
    Peer(
        "transformers `BertModel` on patches", "transformers", _build_bert,
        lambda peer: from_bert(peer.bert, peer.patch_embeddings, peer.cls_token, image_size=[16, 24]),
        lambda model: _composite(*to_bert(model)), gives_attentions=True,
    ),
    Peer("transformers `ViTModel`", "transformers", partial(_build_vit, "Model"), from_vit, to_vit),
    Peer(
        "transformers `ViTForImageClassification`", "transformers", partial(_build_vit, "ForImageClassification"),
        from_vit, to_vit,
    ),
    Peer(
        "transformers `ViTForMaskedImageModeling`", "transformers", partial(_build_vit, "ForMaskedImageModeling"),
        from_vit, to_vit, takes_mask=True,
    ),
    Peer("timm `VisionTransformer`, class token", "timm", _build_timm, from_timm, to_timm),
    Peer("timm, average", "timm", partial(_build_timm, global_pool="avg"), from_timm, to_timm),
    Peer(
        "timm, average without class token", "timm",
        partial(_build_timm, global_pool="avg", class_token=False, fc_norm=False), from_timm, to_timm,
    ),
    Peer("torchvision `VisionTransformer`", "torchvision", _build_torchvision, from_torchvision, to_torchvision),
)  # fmt: skip

SCALES = (0.02, 0.5)


def limit(kind: str, dtype: torch.dtype, std: float) -> float:
    """The largest difference that counts as equal; infinite where rounding alone may be larger."""
    if dtype == torch.float32:
        return 1e-5 if std == min(SCALES) else math.inf
    return 1e-8 if kind == "gradients" else 1e-10


def measure(
    peer: Peer,
    direction: str,
    dtype: torch.dtype,
    std: float,
    seed: int = 0,
    spoil: Callable[[Any], None] | None = None,
) -> dict[str, float]:
    """The largest absolute differences between a model and what it was converted to.

    Args:
        peer: The other implementation.
        direction: `"from"`, random parameters there and ours converted, or `"to"`, the reverse.
        dtype: Precision of parameters and pixels.
        std: Standard deviation of all parameters.
        seed: Seed of parameters, pixels and mask.
        spoil: A change to our model before the comparison, for tests.

    Returns:
        One number for each of `KINDS` that the peer shows: the outputs, the hidden states from the embeddings to the
        last layer, the attention maps, and the gradients of all parameters and pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    theirs = peer.build().to(dtype).eval()
    if direction == "from":
        ours = peer.to_ours(randomize_(theirs, std, generator))
    else:
        ours = peer.to_ours(theirs)
        theirs = peer.to_theirs(randomize_(ours, std, generator))
    if peer.gives_attentions:
        ours.set_attn_implementation("eager")
    if spoil is not None:
        spoil(ours)

    config = ours.config
    pixels = torch.randn(3, config.num_channels, *config.image_height_width, generator=generator, dtype=torch.float64)
    kwargs: dict[str, Any] = {"output_attentions": True} if peer.gives_attentions else {}
    if peer.takes_mask:
        kwargs["bool_masked_pos"] = torch.rand(3, math.prod(config.grid_size), generator=generator) < 0.5
    models = (theirs, ours)
    inputs = [pixels.to(dtype).clone().requires_grad_() for _ in models]
    observed = [observe(model, encoder_layers(model), x, **kwargs) for model, x in zip(models, inputs, strict=True)]
    outputs = {name for name in observed[0].keys() & observed[1].keys() if "." not in name}
    for model, x, seen in zip(models, inputs, observed, strict=True):
        backward(seen, outputs)
        gradients: nn.Module = with_gradients_as_parameters(model)
        if model is theirs:
            gradients = peer.to_ours(gradients)  # which renames them
        seen |= {f"gradients.{name}": tensor for name, tensor in gradients.named_parameters()}
        seen["gradients.pixel_values"] = cast(Tensor, x.grad)
    with torch.no_grad():
        return largest_differences(*observed)


def encoder_layers(model: nn.Module) -> list[nn.Module]:
    """The encoder layers of a model of ours, or of a peer."""
    for path in ("layers", "vit.layers", "blocks", "encoder.layers", "bert.encoder.layer"):
        try:
            return list(model.get_submodule(path).children())
        except AttributeError:
            continue
    raise TypeError(f"{type(model).__name__} has no layers that are known here.")


def verify() -> bool:
    """Print the table of measured differences, in Markdown; return whether all are within their limits."""
    versions = {"torch": version("torch")}
    dtypes = (torch.float64, torch.float32)
    print("| peer | " + " | ".join(f"{kind}, {str(dtype)[6:]}" for dtype in dtypes for kind in KINDS) + " |")
    print("| --- " * (1 + len(dtypes) * len(KINDS)) + "|")
    within = True
    for peer in PEERS:
        cells = []
        try:
            versions[peer.package] = version(peer.package)
        except PackageNotFoundError:
            cells = ["not installed"] * (len(dtypes) * len(KINDS))
        for dtype in dtypes if not cells else ():
            measured = {std: [measure(peer, way, dtype, std) for way in ("from", "to")] for std in SCALES}
            for kind in KINDS:
                if kind not in measured[SCALES[0]][0]:
                    cells.append("-")
                    continue
                both_ways = {std: [differences[kind] for differences in measured[std]] for std in SCALES}
                equal = all(value <= limit(kind, dtype, std) for std in SCALES for value in both_ways[std])
                within = within and equal
                cell = " / ".join(f"{max(both_ways[std]):.0e}" for std in SCALES)
                cells.append(cell if equal else f"**{cell}**")
        print(f"| {peer.name} | {' | '.join(cells)} |")
    scales = " / ".join(map(str, SCALES))
    print(f"\nLargest absolute differences, of both directions, with all parameters random at scale {scales}.")
    print(f"{', '.join(f'{name} {number}' for name, number in versions.items())}; CPU, {platform.machine()}.")
    print("All are within the limits." if within else "Those in bold exceed their limit.")
    return within
