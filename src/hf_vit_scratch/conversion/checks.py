"""What must hold for a model to be converted, and the errors that say so."""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..errors import UserError
from ..model.configuration_vit_scratch import ViTScratchConfig
from ..model.modeling_vit_scratch import ViTScratchModel, ViTScratchPreTrainedModel
from ..speed.linear import linear_forward

logger = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)

# Positions of both kinds are one table, of which the fixed one becomes a parameter elsewhere.
TABLES = ("learned", "sincos2d")


# Attributes that change nothing for images of the trained size, or that the parameters' shapes show better.
_HARMLESS = {
    "training", "name_or_path", "gradient_checkpointing", "grad_checkpointing", "fused_attn", "inplace", "flatten",
    "output_fmt", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init_mode", "fix_init",
    "num_classes", "num_labels", "global_pool", "dropout", "attention_dropout", "dropout_prob",
}  # fmt: skip
_REGULARISATION = {"Dropout", "DropPath", "PatchDropout", "Identity", "ViTScratchDropPath", "NoneType"}


def require_class(module: object, classes: tuple[type, ...], caller: str) -> None:
    """Refuse anything but an instance of one of these classes."""
    if not isinstance(module, classes):
        names = " or ".join(cls.__name__ for cls in classes)
        library = classes[0].__module__.partition(".")[0]
        raise UserError(f"{caller} takes {names} of {library}, got {type(module).__name__}.")


def require(config: ViTScratchConfig, peer: str, **allowed: tuple[Any, ...]) -> None:
    """Refuse a model of ours with a feature that the other library has not."""
    wrong = [
        f"{name}={getattr(config, name)!r}" for name, values in allowed.items() if getattr(config, name) not in values
    ]
    if wrong:
        raise UserError(f"{peer} has no counterpart of {', '.join(wrong)}.")


def require_square(config: ViTScratchConfig, peer: str) -> None:
    """Refuse a model of ours whose images or patches are not square."""
    sizes = {"an image_size": config.image_height_width, "a patch_size": config.patch_height_width}
    for name, (height, width) in sizes.items():
        if height != width:
            raise UserError(f"{peer} has no counterpart of {name} that is not square, {height}x{width}.")


def refuse_mask_token(model: ViTScratchPreTrainedModel, peer: str) -> None:
    """Refuse a model of ours with a mask token."""
    if cast(Any, model.base_model).embeddings.mask_token is not None:
        raise UserError(f"{peer} has no counterpart of the mask token.")


def warn_left_behind(config: ViTScratchConfig, *names: str) -> None:
    """Name the fields that are set and have no counterpart, but act in training only."""
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


def refuse_changed(model: ViTScratchPreTrainedModel, caller: str) -> None:
    """Refuse a model of ours whose modules are no longer those of its configuration."""
    options = {}
    if isinstance(model, ViTScratchModel):
        options["use_mask_token"] = "embeddings.mask_token" in model.state_dict()
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config), **options)
    refuse_unlike(model, twin, caller)


def refuse_unlike(source: nn.Module, twin: nn.Module, caller: str, but_for: str | None = None) -> None:
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
        forward = vars(module).get("forward")
        is_ours = getattr(forward, "__func__", None) is linear_forward  # of `use_faster_linear`
        if forward is not None and not is_ours and not hasattr(module, "_hf_hook"):
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


def activation_name(activations: list[nn.Module]) -> str:
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
