"""Faster forwards of the model's parts, equal to the plain ones up to rounding.

Each public function but `linear_forward` takes the place of a method, and calls the plain one if something is not as
it expects: an adapter, a hook, a quantized weight. It decides at every call, because these may come later.
`attention_forward` and `mlp_forward` are for training on a CPU, `layer_forward` is for inference there, and
`patch_forward` for both; a mask, another device or a compiler makes them plain, too. `project` and `linear_forward`
are for compiled layers, `frozen_forward` is for a whole model that is compiled for inference.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

ATTENTIONS = ("eager", "sdpa")  # that these methods compute
# torch copies a bias into the result before the product. Beside the fast products of AMX, the copy takes long, and the
# compiler's next kernel adds the bias for less (benchmarks/2026-11-25_layers_cpu.md).
BIAS_COMES_LAST = torch.cpu.get_capabilities().get("amx_bf16", False)
WEIGHTS = (nn.Parameter, Tensor)  # types of what is no quantized weight
Mask = Tensor | None
Tables = tuple[Tensor, Tensor] | None  # position embeddings: cosines and sines, each (N, K / 2)


def attention_forward(
    self: Any, hidden_states: Tensor, attention_mask: Mask = None, position_embeddings: Tables = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return `ViTScratchAttention.forward`, with one product for query, key and value."""
    projections = (self.q_proj, self.k_proj, self.v_proj)
    config = self.config
    special = attention_mask is not None or kwargs or self.is_causal or config._attn_implementation not in ATTENTIONS
    drops = self.training and config.attention_probs_dropout_prob > 0
    if special or drops or not _are_plain(hidden_states, (*projections, self.o_proj), (self.q_norm, self.k_norm)):
        return type(self).forward(self, hidden_states, attention_mask, position_embeddings, **kwargs)
    weight, bias = _joined(projections)
    joined = _linear(_as_autocast(hidden_states), weight, bias, self.products)  # cast once instead of three times
    context = _attention(joined, self, position_embeddings)
    return _linear(context, self.o_proj.weight, self.o_proj.bias, self.products), None


def project(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Return `ViTScratchAttention.project`, three times (B, N, D), with one product for query, key and value."""
    projections = (self.q_proj, self.k_proj, self.v_proj)
    if not _are_linear(projections):
        return type(self).project(self, hidden_states)
    return _product_and_bias(hidden_states, *_joined(projections)).chunk(3, dim=-1)


def linear_forward(self: Any, x: Tensor) -> Tensor:
    """Return `nn.Linear.forward`; compiled for a CPU with AMX, the bias is added last."""
    return _product_and_bias(x, self.weight, self.bias)


def patch_forward(self: Any, pixels: Tensor) -> Tensor:
    """Return `nn.Conv2d.forward` of patches, as one product.  (B, C, height, width) -> (B, D, rows, cols)."""
    cuts_patches = (self.stride, self.padding, self.dilation, self.groups) == (self.kernel_size, (0, 0), (1, 1), 1)
    if not cuts_patches or not _are_plain(pixels, ()) or type(self.weight) not in WEIGHTS:
        return type(self).forward(self, pixels)
    height, width = self.kernel_size
    patches = _as_autocast(pixels).unflatten(3, (-1, width)).unflatten(2, (-1, height))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, rows, cols, values of a patch)
    return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Return `ViTScratchMLP.forward`, with the products of the chosen library."""
    if not _are_plain(hidden_states, (self.fc1, self.fc2)):
        return type(self).forward(self, hidden_states)
    hidden_states = self.activation(_linear(hidden_states, self.fc1.weight, self.fc1.bias, self.products))
    return _linear(hidden_states, self.fc2.weight, self.fc2.bias, self.products)


def layer_forward(
    self: Any, x: Tensor, attention_mask: Mask = None, position_embeddings: Tables = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return `ViTScratchLayer.forward` of inference, with packed weights.

    They are made of the parameters at the first call, and again when one of these has another storage or version.
    """
    part, mlp, norms = self.attention, self.mlp, (self.layernorm_before, self.layernorm_after)
    if attention_mask is not None or kwargs or not _can_be_packed(self, x):
        self.made = None
        return type(self).forward(self, x, attention_mask, position_embeddings=position_embeddings, **kwargs)
    linear = (part.q_proj, part.k_proj, part.v_proj, part.o_proj, mlp.fc1, mlp.fc2)
    sources = [layer.weight for layer in linear] + [layer.bias for layer in linear[:3] if layer.bias is not None]
    packed = _made_of(sources, self, lambda: _packed(linear, tokens=x.shape[0] * x.shape[1]))
    qkv_bias, (qkv_weight, o_weight, fc1_weight, fc2_weight) = packed

    product, product_and_sum = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._linear_pointwise.binary
    h = norms[0](x) if self.norm_first else x
    context = _attention(product(h, qkv_weight, qkv_bias, "none", [], ""), part, position_embeddings)
    x = product_and_sum(context, x, o_weight, part.o_proj.bias, "add")
    x = x if self.norm_first else norms[0](x)
    h = norms[1](x) if self.norm_first else x
    gelu = type(mlp.activation).__name__ == "GELUActivation"
    h = product(h, fc1_weight, mlp.fc1.bias, "gelu" if gelu else "none", [], "none" if gelu else "")
    x = product_and_sum(h if gelu else mlp.activation(h), x, fc2_weight, mlp.fc2.bias, "add")
    return x if self.norm_first else norms[1](x), None


def frozen_forward(self: Any, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return a model's `forward` of inference, compiled with its parameters and buffers as constants.

    It is compiled at the first call, and again when one of them has another storage or version.
    """
    owned = (vars(module)[kind].values() for module in self.modules() for kind in ("_parameters", "_buffers"))
    tensors = [tensor for some in owned for tensor in some if tensor is not None]  # `parameters()` takes twice as long
    are_plain = all(type(tensor) in WEIGHTS and not tensor.is_inference() for tensor in tensors)
    if _is_traced() or torch.is_grad_enabled() or not are_plain:
        return type(self).forward(self, *args, **kwargs)
    compiled = _made_of(tensors, self, lambda: _compiled(type(self).forward, options))
    # Each call may compile, for other sizes or arguments, and must notice hooks that came later.
    with torch._inductor.config.patch(freezing=True), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        return compiled(self, *args, **kwargs)


class DropPath(nn.Module):
    """`ViTScratchDropPath`, with the probability as a tensor: one compiled layer then serves all."""

    def __init__(self, p: float):
        super().__init__()
        self.p, self.keep_prob = p, torch.tensor(1 - p)

    def forward(self, branch: Tensor) -> Tensor:
        """Return the branch with some images dropped.  (B, N, D) -> (B, N, D)."""
        if not self.training:
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) < self.keep_prob
        return branch * (kept / self.keep_prob).to(branch.dtype)


def _attention(joined: Tensor, module: Any, position_embeddings: Tables) -> Tensor:
    """Return multi-head attention of joined queries, keys and values.  (B, N, 3 D) -> (B, N, D)."""
    pair, value = joined.unflatten(2, (3, -1, module.head_dim)).split((2, 1), dim=2)
    pair, value = pair.permute(2, 0, 3, 1, 4), value.squeeze(2).transpose(1, 2)  # (2, B, H, N, K), (B, H, N, K)
    norms = (module.q_norm, module.k_norm)
    if all(type(norm).__name__ == "ViTScratchRMSNorm" for norm in norms):
        weight = torch.stack((module.q_norm.weight, module.k_norm.weight))[:, None, None, None]
        pair = _RMSNorm.apply(pair, weight.to(pair.dtype), module.q_norm.eps)
    elif not all(type(norm) is nn.Identity for norm in norms):  # an adapter around one of them, or another norm
        pair = torch.stack([norm(one) for norm, one in zip(norms, pair, strict=True)])
    if position_embeddings is not None:
        pair = _Rotation.apply(pair, *(table.to(pair.dtype) for table in position_embeddings))
    if module.config._attn_implementation == "eager":
        return _EagerAttention.apply(pair, value, module.head_dim**-0.5)
    return F.scaled_dot_product_attention(pair[0], pair[1], value).transpose(1, 2).flatten(2)


class _RMSNorm(torch.autograd.Function):
    """`nn.RMSNorm` of queries and keys together.  (2, B, H, N, K) -> (2, B, H, N, K)."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor, weight: Tensor, eps: float) -> Tensor:
        pair = pair.contiguous()
        scale = (pair.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = pair * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        weight_grad = (grad * normed).sum((1, 2, 3), keepdim=True)
        normed_grad = grad * weight
        mean = (normed_grad * normed).mean(-1, keepdim=True)
        return normed_grad.addcmul_(normed, mean, value=-1).mul_(scale), weight_grad, None


class _Rotation(torch.autograd.Function):
    """`apply_rotary_pos_emb` of queries and keys together.  (2, B, H, N, K) -> (2, B, H, N, K)."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(pair, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(pair: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (first, second), result = pair.chunk(2, dim=-1), torch.empty_like(pair)
    new_first, new_second = result.chunk(2, dim=-1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin)
    return result


class _EagerAttention(torch.autograd.Function):
    """`eager_attention_forward` in the precision of its input.  (2, B, H, N, K), (B, H, N, K) -> (B, N, D)."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor, value: Tensor, scaling: float) -> Tensor:
        pair, value = pair.contiguous(), value.contiguous()
        query, key = pair.flatten(1, 2).unbind()  # each (B H, N, K)
        with torch.autocast("cpu", enabled=False):  # or softmax would compute and store float32
            scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scaling)
            attn_weights = scores.softmax(dim=-1)
            context = torch.bmm(attn_weights, value.flatten(0, 1))
        ctx.save_for_backward(pair, value, attn_weights)
        ctx.scaling = scaling
        return context.view(value.shape).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        pair, value, attn_weights = ctx.saved_tensors
        query, key = pair.flatten(1, 2).unbind()
        pair_grad, nothing = torch.empty_like(pair), query.new_empty(())
        query_grad, key_grad = pair_grad.flatten(1, 2).unbind()
        grad = grad.unflatten(2, (-1, value.shape[-1])).transpose(1, 2).flatten(0, 1)  # (B H, N, K)
        weights_grad = torch.bmm(grad, value.flatten(0, 1).mT)
        scores_grad = torch.ops.aten._softmax_backward_data(weights_grad, attn_weights, -1, attn_weights.dtype)
        torch.baddbmm(nothing, scores_grad, key, beta=0, alpha=ctx.scaling, out=query_grad)
        torch.baddbmm(nothing, scores_grad.mT, query, beta=0, alpha=ctx.scaling, out=key_grad)
        return pair_grad, torch.bmm(attn_weights.mT, grad).view(value.shape), None


def _product_and_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    comes_last = BIAS_COMES_LAST and x.is_cpu and torch.compiler.is_compiling() and torch.is_grad_enabled()
    if bias is None or not comes_last:
        return F.linear(x, weight, bias)
    product = F.linear(x, weight)
    return product + bias.to(product.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: str) -> Tensor:
    """Return a linear layer's output, through the library that torch chooses, or through oneDNN's convolution."""
    if products != "convolution":
        return F.linear(x, weight, bias)
    # torch gives convolutions to oneDNN, with their gradients. The tokens are its image, of height 1 and width N.
    image = x.transpose(1, 2).unsqueeze(2)  # (B, D, 1, N)
    return F.conv2d(image, weight[:, :, None, None], bias).squeeze(2).transpose(1, 2)


def _as_autocast(x: Tensor) -> Tensor:
    """Return the input of a product as autocast would make it; it leaves float64 alone."""
    is_cast = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype("cpu")) if is_cast else x


def _can_be_packed(layer: Any, x: Tensor) -> bool:
    """Return whether a layer is as its class makes it, and infers in a precision for which oneDNN has products."""
    part, mlp, drops = layer.attention, layer.mlp, (layer.dropout, layer.drop_path)
    kinds = [type(one).__name__ for one in (part, mlp, *drops)]
    is_ours = kinds[:3] == ["ViTScratchAttention", "ViTScratchMLP", "Dropout"] and kinds[3].endswith("DropPath")
    if not is_ours or part.is_causal or part.config._attn_implementation not in ATTENTIONS:
        return False
    linear = (part.q_proj, part.k_proj, part.v_proj, part.o_proj, mlp.fc1, mlp.fc2)
    others = (layer.layernorm_before, layer.layernorm_after, part, *drops, part.q_norm, part.k_norm, mlp)
    trains = any(one.training for one in (layer, part, *drops)) or torch.is_grad_enabled()
    if trains or torch.is_autocast_enabled("cpu") or not _are_plain(x, linear, (*others, mlp.activation)):
        return False
    bf16 = (torch.bfloat16,) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ()  # not by a CPU with AVX2 alone
    return x.dtype == part.o_proj.weight.dtype and x.dtype in (torch.float32, *bf16)


class _Made:
    """What was made of parameters, as they were. It can be neither copied nor saved: a copied module makes its own."""

    def __init__(self, state: Sequence[Any], parameters: Sequence[Tensor], what: Any):
        self.state, self.what = state, what
        self.parameters = [one.detach() for one in parameters]  # kept, or new ones could get their addresses

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def _made_of(parameters: Sequence[Tensor], module: Any, make: Callable[[], Any]) -> Any:
    """Return what a module has made of these parameters; it is made anew if one has another storage or version."""
    state = [(parameter.data_ptr(), parameter._version) for parameter in parameters]
    made = module.made  # which another thread may replace
    if made is None or made.state != state:
        made = module.made = _Made(state, parameters, make())
    return made.what


def _packed(linear: Sequence[nn.Linear], tokens: int) -> tuple[Tensor, list[Tensor]]:
    """Return the bias of query, key and value, and the weights in oneDNN's order, those of these three as one."""
    weight, bias = _joined(linear[:3])
    weights = (weight, *(layer.weight for layer in linear[3:]))
    return bias, [torch.ops.mkldnn._reorder_linear_weight(weight.detach(), tokens) for weight in weights]


def _compiled(function: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a function anew, whatever torch has compiled of it, which it would find by the function's code."""

    def own(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own.__code__ = own.__code__.replace()
    return torch.compile(own, **options)


def _joined(linear: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Join linear layers with the same input into one: return its weight and bias. A missing bias counts as zeros."""
    biases = tuple(one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias for one in linear)
    return torch.cat(tuple(one.weight for one in linear)), torch.cat(biases)


def _are_plain(x: Tensor, linear: Sequence[Any], others: Iterable[Any] = ()) -> bool:
    """Return whether these modules do what their classes say, on a CPU, and nothing watches or traces them."""
    if _is_traced():
        return False
    if type(x) is not Tensor or not x.is_cpu or not _are_linear(linear) or any(map(_is_watched, others)):
        return False
    return not any(module.weight.is_inference() for module in linear)  # such weights have no version


def _is_traced() -> bool:
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode()
    return is_traced or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _are_linear(modules: Iterable[Any]) -> bool:
    """Return whether these modules are nothing but linear layers, without adapters, hooks or quantized weights."""
    return all(type(one) is nn.Linear and type(one.weight) in WEIGHTS and not _is_watched(one) for one in modules)


def _is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks, or another library's forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or torch.nn.modules.module._has_any_global_hook() or "forward" in vars(module)
