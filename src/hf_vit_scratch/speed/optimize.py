"""Choose the fastest of several equivalent implementations by measuring them on this machine.

A choice is an attention (of the plain model), or an attention and a way to multiply: `"eager"`, `"sdpa+packed"`.
"""

import copy
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from timeit import timeit
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import fused
from .fused import ATTENTIONS
from .hardware import can_compile

MOST_EAGER_TOKENS = 577  # with more, the scores of eager attention take too much memory (docs/decisions.md)
# For each way to multiply: the faster methods of a class, or of a Linear or Conv2d whose path ends so. Classes are
# named, because remote code has its own.
WAYS: dict[str, dict[str, dict[str, Callable[..., Any]]]] = {
    "qkv": {
        "ViTScratchAttention": {"project": fused.project},
        "attention.o_proj": {"forward": fused.linear_forward},
        "mlp.fc2": {"forward": fused.linear_forward},
    },
    "joined": {"ViTScratchAttention": {"forward": fused.attention_forward}},
    "convolution": {
        "ViTScratchAttention": {"forward": fused.attention_forward},
        "ViTScratchMLP": {"forward": fused.mlp_forward},
    },
    "packed": {"ViTScratchLayer": {"forward": fused.layer_forward}},
}
for classes in WAYS.values():
    classes["patch_embeddings.projection"] = {"forward": fused.patch_forward}
METHODS = {method for classes in WAYS.values() for methods in classes.values() for method in methods.values()}
METHODS.add(fused.frozen_forward)
CHOICES = (*ATTENTIONS, *(f"{attention}+{way}" for way, attention in product(WAYS, ATTENTIONS)))
SECONDS = 4.0  # for all measurements together; the last round may take longer
SHARE_OF_RUN = 0.02  # of the time that the run will take
MIN_ROUNDS, MAX_ROUNDS = 3, 21
CLEARLY_SLOWER, CLEARLY_FASTER = 1.15, 0.98

_measured: dict[tuple[Any, ...], dict[str, float]] = {}  # by this process, seconds of each candidate


@dataclass
class Optimization:
    """What `optimize` has done to a model.

    Args:
        model, choice: The model and the name of the choice, which `optimize(..., choice=...)` repeats.
        ratios: Time of each measured candidate divided by that of the model as it was; empty without a measurement.
        seconds: Time that the choice took.
        attention: The attention that the model had.
        compiled: Whether its layers are compiled.
    """

    model: PreTrainedModel
    choice: str
    ratios: dict[str, float]
    seconds: float
    attention: str
    compiled: bool = False

    def undo(self) -> None:
        """Restore the plain methods and the attention. Compiled layers stay compiled, with their `DropPath`."""
        _apply(self.model, self.attention)


def optimize(
    model: PreTrainedModel,
    example_batch: Tensor,
    training: bool = False,
    compile: bool | dict[str, Any] = False,
    *,
    choice: str = "auto",
    images: float = math.inf,
) -> Optimization:
    """Make a model faster on this machine. Its outputs and gradients stay the same up to rounding.

    Call it under the same `torch.autocast` as the model. On a CPU it measures one layer for up to four seconds, or
    repeats the choice of an earlier call of this process with the same sizes. Elsewhere it measures nothing.
    Parameters, their names, hooks, adapters and exports work as before, but a hook on an attention or a layer may see
    `None` for the attention weights. In a distributed run, all processes call it.

    For inference on a CPU, weights are packed, or constants of the compiled model. Both hold without gradients
    (`torch.inference_mode`), and packed layers without autocast; elsewhere the plain model runs. In-place changes
    through `weight.data` of the same storage, such as merging an adapter, leave no trace: call `undo()` first.

    Args:
        model: A model of this package, also one that was loaded with remote code.
        example_batch: Pixels of the size that the model will see, (B, C, height, width), on its device.
        training: Whether the model will be trained.
        compile: Whether to compile the layers or, for inference on a CPU, the whole model; or options of
            `torch.compile`. Only the attention is then chosen, and query, key and value come from one product. The
            first call compiles, and so does the first one with another batch size, for some seconds.
        choice: A name to repeat a choice, `"plain"` for the plain methods, or `"auto"` to measure.
        images: Number of images that the model will see. Measuring takes at most 2% of their time.

    Raises:
        ValueError: There is no such choice, or the model is not from this package.
    """
    if not _layers(model):
        raise ValueError(f"optimize is for models of this package, got {type(model).__name__}.")
    attention, ratios = cast(str, model.config._attn_implementation), dict[str, float]()
    device, start = example_batch.device.type, time.perf_counter()
    options = {"backend": "inductor", "dynamic": False, **(compile if isinstance(compile, dict) else {})}
    compiled = bool(compile) and (options["backend"] != "inductor" or can_compile(device))
    _apply(model, attention)
    if choice == "auto":
        choice, ratios = _choose(model, example_batch, training, compiled, images)
        choice += "+qkv" if compiled else ""
    elif choice == "plain":
        choice = attention
    elif choice not in (attention, f"{attention}+qkv", *CHOICES):
        raise ValueError(f"{choice!r} is not a choice of speed. Choose auto, plain, {', '.join(CHOICES)}.")
    seconds = time.perf_counter() - start
    _apply(model, choice)
    compiled = compiled and "packed" not in choice
    if compiled and device == "cpu" and not training and "forward" not in vars(model):
        vars(model).update(made=None, forward=partial(fused.frozen_forward, model, options))
        return Optimization(model, choice, ratios, seconds, attention, compiled)
    for layer in _layers(model):
        if "packed" in choice:
            vars(layer).pop("_compiled_call_impl", None)  # of an earlier call: it would go on with plain weights
        if not compiled:
            continue
        # Its probability differs from layer to layer.
        if layer.attention.config.drop_path_rate and type(layer.drop_path).__name__ == "ViTScratchDropPath":
            layer.drop_path = fused.DropPath(layer.drop_path.p).train(layer.training)
        layer.compile(**options)
    return Optimization(model, choice, ratios, seconds, attention, compiled)


def example_batch_for(model: PreTrainedModel, batch_size: int) -> Tensor:
    """Return pixels of the size, dtype and device of a model, to be given to `optimize`."""
    shape = (batch_size, model.config.num_channels, *model.config.image_height_width)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("ViTScratchLayer")]  # also FSDP2's


def _apply(model: nn.Module, choice: str) -> None:
    """Make a model plain, and then what the choice says."""
    attention, _, way = choice.partition("+")
    for path, module in cast(Iterable[tuple[str, Any]], model.named_modules()):
        # By name: a hook of accelerate keeps our method under another one, and calls it.
        ours = [name for name in ("forward", "project") if getattr(vars(module).get(name), "func", None) in METHODS]
        for name in ("products", "made", *ours) if ours else ():
            vars(module).pop(name, None)
        has_weight = type(module) in (nn.Linear, nn.Conv2d)
        key = ".".join(path.split(".")[-2:]) if has_weight else type(module).__name__
        faster = WAYS.get(way, {}).get(key)
        if faster is not None and "forward" not in vars(module):  # which a hook of accelerate sets, for example
            module.products, module.made = way, None
            for name, method in faster.items():
                setattr(module, name, partial(method, module))  # which can be copied and pickled
        if hasattr(module, "config"):
            module.config._attn_implementation = attention


def _candidates(device: torch.device, attention: str, training: bool, compile: bool) -> list[str]:
    """Return the names to choose from; none where nothing is measured."""
    if device.type != "cpu" or attention not in ATTENTIONS:
        return []
    ways: tuple[str, ...] = ("joined", "convolution") if training else ("packed",)
    if compile or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        ways = ()
    return [*ATTENTIONS, *(f"{name}+{way}" for way, name in product(ways, ATTENTIONS))]


def _first_layer(model: PreTrainedModel, example_batch: Tensor) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the first layer, and the arguments that the model calls it with, for one image repeated."""
    layer, calls = _layers(model)[0], list[tuple[Any, Any]]()
    hook = layer.register_forward_pre_hook(lambda module, *call: calls.append(call), with_kwargs=True)
    with hook, torch.no_grad(), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        model.base_model(example_batch[:1])
    (hidden_states, *args), kwargs = calls[0]
    return layer, (hidden_states.expand(len(example_batch), -1, -1), *args), kwargs


def _choose(
    model: PreTrainedModel, example_batch: Tensor, training: bool, compile: bool, images: float
) -> tuple[str, dict[str, float]]:
    """Return the fastest choice, and the time of each relative to the plain model, if they were measured."""
    plain = cast(str, model.config._attn_implementation)
    names = _candidates(example_batch.device, plain, training, compile)
    if not names or not images:
        return plain, {}
    layer, (hidden_states, *args), kwargs = _first_layer(model, example_batch)
    if hidden_states.shape[1] > MOST_EAGER_TOKENS:
        names = [name for name in names if not name.startswith("eager") or name == plain]
    key = _facts(layer, hidden_states, names, training)
    times = of_first_process(_measured.get(key))
    if times is None:
        calls = model.config.num_hidden_layers * images / len(example_batch)  # of a layer in the whole run
        # Copies made in inference mode have no version, so they could not be packed.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.set_grad_enabled(training):
            layers = {name: copy.deepcopy(layer).train(training) for name in names}
            for name, candidate in layers.items():
                _apply(candidate, name)
            x = hidden_states.detach().clone().requires_grad_(training)
            step = partial(_call, layers[plain], x, args, kwargs)
            step()
            once = timeit(step, number=1)
            seconds = min(SECONDS, SHARE_OF_RUN * calls * once)
            # With so many images, there is time to warm up and for the fewest rounds.
            number = of_first_process(int(len(x) * seconds / (len(names) * (MIN_ROUNDS + 2) * once)))
            if number < 1:
                return plain, {}
            x = x.detach()[:number].requires_grad_(training)
            steps = {name: partial(_call, layer, x, args, kwargs) for name, layer in layers.items()}
            times = _measure(steps, time.perf_counter() + seconds)
        _measured[key] = times
    best = min(names, key=times.__getitem__)
    ratios = {name: seconds / times[plain] for name, seconds in times.items()}
    return best if ratios[best] < CLEARLY_FASTER else plain, ratios


def of_first_process(value: Any) -> Any:
    """Return what the first of all processes has, so that all do the same."""
    values = [value]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        broadcast_object_list(values)
    return values[0]


def _call(layer: nn.Module, x: Tensor, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Call a layer once, and in training compute the gradients as well."""
    output = layer(x, *args, **kwargs)[0]
    if layer.training:
        output.backward(torch.ones_like(output))
        layer.zero_grad()
        x.grad = None


def _measure(steps: Mapping[str, Callable[[], None]], deadline: float) -> dict[str, float]:
    """Return the least seconds of each step in the first process: other programs only add to them.

    All steps are timed in turn, again and again. One that is clearly slower is left out after some rounds.
    """
    order, times, rng = list(steps), {name: list[float]() for name in steps}, random.Random(0)
    for step in steps.values():
        step()  # allocates memory
    for number in range(1, MAX_ROUNDS + 1):
        rng.shuffle(order)
        for name in order:
            times[name].append(timeit(steps[name], number=1))
        least = {name: min(times[name]) for name in steps}
        if number >= MIN_ROUNDS:
            order = [name for name in order if least[name] < CLEARLY_SLOWER * min(least.values())]
            if len(order) == 1 or time.perf_counter() > deadline:
                break
    return of_first_process(least)


def _facts(layer: Any, x: Tensor, names: list[str], training: bool) -> tuple[Any, ...]:
    """Return what a choice depends on within a process: threads, sizes, precision, and the options of a layer."""
    fields = "num_attention_heads intermediate_size hidden_act qkv_bias qk_norm norm_first is_causal "
    fields += "position_embedding_type attention_probs_dropout_prob"
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    options = (getattr(layer.attention.config, field) for field in fields.split())
    return torch.get_num_threads(), *x.shape, x.dtype, autocast, training, *options, *names
