"""What must hold for a model to be converted: its class, its configuration, and that the result computes the same."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..model.modeling_vit_scratch import ViTScratchModel, ViTScratchPreTrainedModel
from .names import load_weights

# Values of our fields that the other libraries can express; each converter adds its own. Weights show the rest.
PRE_LN: dict[str, Sequence[Any]] = {
    "norm_first": (True,),
    "position_embedding_type": ("learned", "sincos2d"),  # one table of positions, a parameter elsewhere
    "is_causal": (False,),
    "label_scale": (None,),
}


def require_class(module: object, classes: Iterable[type], caller: str) -> None:
    """Refuse anything but an instance of one of these classes."""
    classes = tuple(classes)
    if not isinstance(module, classes):
        names = " or ".join(cls.__name__ for cls in classes)
        library = classes[0].__module__.partition(".")[0]
        raise UserError(f"{caller} takes {names} of {library}, got {type(module).__name__}.")


def require_values(model: ViTScratchPreTrainedModel, caller: str, accepted: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a model whose fields have other values than the accepted ones."""
    config = model.config
    wrong = [
        f"{name}={getattr(config, name)!r}" for name, values in accepted.items() if getattr(config, name) not in values
    ]
    if wrong:
        raise UserError(f"{caller}: the other library has no counterpart of {', '.join(wrong)}.")


@torch.no_grad()
def randomize_(module: nn.Module, std: float, generator: torch.Generator | None = None) -> nn.Module:
    """Draw every parameter of `module` from a normal distribution around 0, norm scales around 1, in place."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            parameter.normal_(std=std, generator=generator)
            if name == "weight" and isinstance(part, nn.LayerNorm | nn.RMSNorm):
                parameter.add_(1)
    return module


def check_equal(
    theirs: nn.Module,
    ours: ViTScratchPreTrainedModel,
    caller: str,
    to_our_weights: Callable[[Any], Mapping[str, Tensor]],
) -> None:
    """Refuse a conversion unless copies of both models with the same random weights agree on a random image.

    It finds what no name and no shape shows: another activation, another order of the norms, a module's own forward.
    The models' own weights may hide these: a new head of zeros gives the same logits for every pooling.
    `to_our_weights` returns the weights of a model like `theirs` under our names.
    """
    config, generator = ours.config, torch.Generator().manual_seed(0)
    pixels = torch.randn(1, config.num_channels, *config.image_height_width, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        try:
            twin, our_twin = _twin(theirs), _twin(ours)
            randomize_(twin, config.hidden_size**-0.5, generator)  # so that the tokens keep their scale
            load_weights(our_twin, to_our_weights(twin), caller)
            expected, seen_ours = observe(twin, pixels), observe(our_twin, pixels)
        except RuntimeError as error:
            raise UserError(f"{caller}: the model cannot be compared with ours: {error}.") from error
        expected.pop("pooler_output", None)  # a trained layer of transformers' ViT, which is left behind
        if isinstance(ours, ViTScratchModel) and "logits" in expected:  # of an encoder; timm may return all tokens
            pooled = expected["logits"].ndim == 2
            seen_ours["logits"] = seen_ours["pooler_output" if pooled else "last_hidden_state"]
        differences = largest_differences(expected, seen_ours)
    scale = max(1.0, *(tensor.abs().max().item() for tensor in expected.values()))
    for kind, difference in differences.items():
        if not difference <= 1e-8 * scale:
            raise UserError(
                f"{caller}: the converted model is not equal: its {kind} differ by {difference:.0e} on a random "
                "image. A module computes something that we have no counterpart of, or was changed after it was built."
            )


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy for exact comparisons: float64, on the CPU, with an attention that runs everywhere."""
    twin = copy.deepcopy(model).to("cpu", torch.float64).eval()
    for part in twin.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation("sdpa")
            part.config.return_dict = True
    return twin


def observe(module: nn.Module, *inputs: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    """Run a model that returns logits or a transformers `ModelOutput`, and keep all that can be compared.

    Returns:
        "hidden_states.0" (what enters the first layer), "hidden_states.1" and so on, "attentions.0" and so on where
        the model returns them, and the outputs under transformers' names.
    """
    seen: dict[str, Tensor] = {}

    def keep(depth: int, _layer: nn.Module, inputs: Any, output: Any) -> None:
        seen[f"hidden_states.{depth}"] = inputs[0]
        seen[f"hidden_states.{depth + 1}"] = output[0] if isinstance(output, tuple) else output

    # In every library, the first list of modules holds the encoder layers.
    layers = next(part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential))
    with ExitStack() as hooks:
        for depth, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_hook(partial(keep, depth)))
        outputs = module(*inputs, **kwargs)
    for name, value in {"logits": outputs}.items() if isinstance(outputs, Tensor) else outputs.items():
        if name == "attentions":
            seen |= {f"attentions.{depth}": weights for depth, weights in enumerate(value)}
        elif isinstance(value, Tensor):
            seen[name] = value
    return seen


def largest_differences(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute difference of each kind between two sets of tensors by name."""
    kinds = {"hidden_states": "hidden states", "attentions": "attention maps", "gradients": "gradients"}
    for name in theirs.keys() ^ ours.keys():
        if name.startswith(("hidden_states.", "gradients.")):
            raise UserError(f"Only one of the models has {name}.")
    differences: dict[str, list[Tensor]] = {}
    for name in (name for name in theirs if name in ours):
        if theirs[name].shape != ours[name].shape:
            raise UserError(f"{name} has the shapes {tuple(theirs[name].shape)} and {tuple(ours[name].shape)}.")
        kind = kinds.get(name.partition(".")[0], "outputs")
        differences.setdefault(kind, []).append((theirs[name] - ours[name]).abs().max())
    if "outputs" not in differences:
        raise UserError(f"No output in common: {', '.join(theirs)} and {', '.join(ours)}.")
    # torch's maximum, unlike Python's, keeps a NaN.
    return {kind: torch.stack(maxima).max().item() for kind, maxima in differences.items()}
