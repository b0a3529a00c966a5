"""Linear layers through the library that is faster on this CPU; the results differ by rounding.

torch multiplies float32 through MKL, which is the slower library on AMD processors from Zen 4 on. It multiplies
bfloat16 through oneDNN, but first copies the bias into every row of the result. `use_faster_linear` calls oneDNN for
both, where that was measured to be faster.
"""

import functools
import math
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Module = TypeVar("Module", bound=nn.Module)

# Multiplications in a layer from which oneDNN is faster: its matrix product, which has no gradients, and its
# convolution, which has.
MULTIPLICATIONS_FOR_ONEDNN = {torch.float32: (2**24, 2**26), torch.bfloat16: (0, 2**28)}
# The convolution also needs so many tokens, of all images together.
TOKENS_FOR_CONVOLUTION = 1536


def use_faster_linear(model: Module) -> Module:
    """Let each plain `nn.Linear` of a model choose its library at every call, and return the same model.

    Parameters, their names and the state dict stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(linear_forward, module)  # type: ignore[method-assign]
    return model


def linear_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return `layer` applied to `x`.  (..., in_features) -> (..., out_features)."""
    if torch.compiler.is_compiling():
        # In bfloat16 the compiler fuses a bias that is an addition of its own with what follows.
        bias_apart = torch.compiler.is_dynamo_compiling() and x.is_cpu and product_dtype(x) == torch.bfloat16
        if bias_apart and layer.bias is not None:
            product = F.linear(x, layer.weight)
            return product + layer.bias.to(product.dtype)
    elif x.is_cpu and onednn_is_faster() and not torch.jit.is_tracing():
        return onednn_linear(layer, x)
    return F.linear(x, layer.weight, layer.bias)


def onednn_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return `layer` applied to `x`, by oneDNN where it can be called and is the faster library for so much work."""
    weight, bias = layer.weight, layer.bias
    multiplications = x.numel() * layer.out_features
    for_product, for_convolution = MULTIPLICATIONS_FOR_ONEDNN.get(product_dtype(x), (math.inf, math.inf))
    if multiplications >= for_product and are_plain(x, weight) and torch.backends.mkldnn.enabled:
        if multiplications >= for_convolution and x.ndim == 3 and len(x) * x.shape[1] >= TOKENS_FOR_CONVOLUTION:
            # torch gives convolutions to oneDNN, with their gradients. This one sees an image one token high and N
            # wide, one pixel at a time.
            image = x.transpose(1, 2).unsqueeze(2)  # (B, in_features, 1, N)
            return F.conv2d(image, weight[:, :, None, None], bias).squeeze(2).transpose(1, 2)
        if x.dtype == weight.dtype and only_result_is_wanted():
            # The compiler's own call of oneDNN. No gradient is defined for it.
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this is a processor on which oneDNN was measured to be faster: AMD's, from Zen 4 on."""
    capabilities = torch.cpu.get_capabilities()
    is_amd = "AMD" in str(capabilities.get("cpu_name"))
    return torch.backends.mkldnn.is_available() and is_amd and bool(capabilities.get("avx512_bf16"))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies `x`, a tensor on a CPU."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def only_result_is_wanted() -> bool:
    """Return whether no gradient, cast or count of what happens is asked for."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def are_plain(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN can take these factors: none is distributed, quantized or sparse."""
    return type(x) is Tensor and type(weight) in (nn.Parameter, Tensor) and weight.layout == torch.strided
