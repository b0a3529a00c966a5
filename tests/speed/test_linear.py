"""Linear layers through another library: the same results, and for whoever looks inside the same operations."""

import copy
import math

import pytest
import torch
from helpers import TINY, randomize_
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.speed import linear
from hf_vit_scratch.speed.linear import use_faster_linear


def fast_linear(*sizes, **fields):
    return use_faster_linear(nn.Linear(*sizes, **fields))


@pytest.mark.parametrize(
    ("dtype", "autocast", "apart"),
    [(torch.bfloat16, False, True), (torch.float32, True, True), (torch.float32, False, False)],
    ids=["bf16", "autocast", "fp32"],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_compiled_linear_layer_adds_its_bias_apart_in_bf16_and_equals_the_product(dtype, autocast, apart, bias):
    layer = randomize_(fast_linear(8, 16, bias=bias), 0.5).to(dtype)
    x, graphs = torch.randn(2, 3, 8, dtype=dtype), []
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph.code) or graph, fullgraph=True)
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual, uncompiled = compiled(x), layer(x)

    assert actual.dtype == uncompiled.dtype == (torch.bfloat16 if autocast else dtype)
    tolerance = 1e-5 if actual.dtype == torch.float32 else 3 * 2**-8  # of rounding factors, product, and sum
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    assert (" + " in graphs[0]) == (apart and bias)


def linear_pair(**fields):
    """Ours and torch's with the same numbers."""
    ours, theirs = fast_linear(8, 16, **fields), nn.Linear(8, 16, **fields)
    randomize_(ours, 0.5)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.fixture
def calls(monkeypatch):
    """What linear layers call when oneDNN is said to be the faster for everything."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)
    everything = dict.fromkeys((torch.float32, torch.bfloat16), (0, 0))
    monkeypatch.setattr(linear, "MULTIPLICATIONS_FOR_ONEDNN", everything)
    monkeypatch.setattr(linear, "TOKENS_FOR_CONVOLUTION", 0)
    made = []
    for place, name in ((torch.ops.mkldnn, "_linear_pointwise"), (F, "conv2d")):
        called = getattr(place, name)
        spy = lambda *args, called=called, name=name: made.append(name) or called(*args)  # noqa: E731
        monkeypatch.setattr(place, name, spy)
    return made


@pytest.mark.parametrize(
    ("called", "with_gradients"), [("_linear_pointwise", False), ("conv2d", False), ("conv2d", True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_linear_layer_through_onednn_equals_the_product(calls, monkeypatch, called, with_gradients, dtype, bias):
    if dtype == torch.bfloat16 and called != "conv2d" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("without AVX-512 oneDNN has no product in bfloat16, and is never chosen for it")
    monkeypatch.setattr(linear, "TOKENS_FOR_CONVOLUTION", 6 if called == "conv2d" else 7)
    layer = randomize_(fast_linear(8, 16, bias=bias), 0.5).to(dtype)
    x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    factors = [x, *layer.parameters()]
    copies = [factor.detach().double().requires_grad_() for factor in factors]

    with torch.set_grad_enabled(with_gradients):
        actual, expected = layer(x), F.linear(*copies)
    pairs = [(actual, expected)]
    if with_gradients:
        upstream = torch.randn_like(actual)
        gradients = torch.autograd.grad(actual, factors, upstream)
        pairs += zip(gradients, torch.autograd.grad(expected, copies, upstream.double()), strict=True)

    assert calls == [called]
    tolerance = 1e-5 if dtype == torch.float32 else 2 * 2**-8
    for mine, theirs in pairs:
        assert mine.dtype == dtype
        assert mine.is_contiguous()
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance * scale)


def dual(layer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x.cos()))).tangent


def count(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return torch.tensor(counter.get_total_flops())


def autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


OBSERVERS = {
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x.cos(),))[1],
    "dual": dual,
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).square().sum())(x),
    "hessian": lambda layer, x: torch.func.hessian(lambda x: layer(x).square().sum())(x),
    "vmap": lambda layer, x: torch.func.vmap(layer, in_dims=1)(x.unsqueeze(2)),
    "count": count,
    "autocast": autocast,
}


# torch itself, for derivatives forward in time and a loop in the place of vmap.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("tokens", [0, math.inf], ids=["convolution", "product"])
def test_who_looks_into_a_linear_layer_sees_what_torch_shows(calls, monkeypatch, tokens, observer):
    monkeypatch.setattr(linear, "TOKENS_FOR_CONVOLUTION", tokens)
    ours, theirs = linear_pair()
    x = torch.randn(2, 3, 8)

    with torch.no_grad():
        actual, expected = OBSERVERS[observer](ours, x), OBSERVERS[observer](theirs, x)

    torch.testing.assert_close(actual, expected, rtol=1e-5 if expected.dtype != torch.bfloat16 else 0.02, atol=1e-5)
    assert "_linear_pointwise" not in calls


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_traced_linear_layer_has_only_what_other_tools_know(calls):
    layer = fast_linear(8, 16)
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(2, 3, 8))

    assert "mkldnn" not in str(traced.inlined_graph)


class Quantized(torch.Tensor):
    """Stands for the weights of libraries that bring their own products."""

    asked: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_weights_of_other_libraries_get_the_product_that_they_know(calls):
    layer = fast_linear(8, 16)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized))
    Quantized.asked.clear()

    with torch.no_grad():
        layer(torch.randn(2, 3, 8))

    assert F.linear in Quantized.asked
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("with_gradients", [False, True], ids=["inference", "training"])
def test_onednn_that_is_switched_off_or_cannot_do_it_is_not_called(calls, monkeypatch, dtype, with_gradients):
    layer = fast_linear(8, 16).to(dtype)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", dtype == torch.float64)
    with torch.set_grad_enabled(with_gradients):
        layer(torch.randn(2, 3, 8, dtype=dtype))

    assert not calls


@pytest.mark.parametrize("with_gradients", [False, True], ids=["inference", "training"])
def test_onednn_is_not_called_where_it_was_not_measured_to_be_faster(calls, monkeypatch, with_gradients):
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)
    with torch.set_grad_enabled(with_gradients):
        fast_linear(8, 16)(torch.randn(2, 3, 8))

    assert not calls


def test_linear_layer_of_another_dtype_raises_what_torch_raises(calls):
    ours, theirs = (layer.bfloat16() for layer in linear_pair())
    with torch.no_grad():
        for layer in (theirs, ours):
            with pytest.raises(RuntimeError, match="must have the same dtype"):
                layer(torch.randn(2, 8))


@pytest.mark.parametrize(
    ("rows", "with_gradients", "expected"),
    [
        (2**10 - 1, False, []),
        (2**10, False, ["_linear_pointwise"]),
        (2**12 - 1, False, ["_linear_pointwise"]),
        (2**12, False, ["conv2d"]),
        (2**12 - 1, True, []),
        (2**12, True, ["conv2d"]),
    ],
)
def test_onednn_is_called_from_so_many_multiplications_on(calls, monkeypatch, rows, with_gradients, expected):
    limits = {torch.float32: (2**17, 2**19)}  # of products of `rows` x 8 and 8 x 16
    monkeypatch.setattr(linear, "MULTIPLICATIONS_FOR_ONEDNN", limits)
    with torch.set_grad_enabled(with_gradients):
        fast_linear(8, 16)(torch.randn(1, rows, 8))

    assert calls == expected


@pytest.mark.parametrize(("images", "expected"), [(2, []), (3, ["conv2d"])])
def test_onednn_convolves_from_so_many_tokens_of_all_images_on(calls, monkeypatch, images, expected):
    monkeypatch.setattr(linear, "TOKENS_FOR_CONVOLUTION", 15)
    fast_linear(8, 16)(torch.randn(images, 5, 8))

    assert calls == expected


@pytest.mark.parametrize(
    ("cpu_name", "avx512_bf16", "expected"),
    [("AMD EPYC", True, True), ("AMD EPYC", False, False), ("Intel Xeon", True, False), (None, True, False)],
)
def test_onednn_is_said_to_be_faster_where_that_was_measured(monkeypatch, cpu_name, avx512_bf16, expected):
    capabilities = {"cpu_name": cpu_name, "avx512_bf16": avx512_bf16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)

    assert linear.onednn_is_faster.__wrapped__() is expected


def test_model_with_faster_layers_gives_the_same_logits_and_keeps_its_parameters(calls):
    model = randomize_(ViTScratchForImageClassification(ViTScratchConfig(**TINY)).eval(), 0.2)
    names, pixel_values = list(model.state_dict()), torch.randn(2, 3, 16, 24)
    with torch.no_grad():
        expected = model(pixel_values).logits
        actual = use_faster_linear(model)(pixel_values).logits

    assert calls
    assert list(model.state_dict()) == names
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_copy_of_a_faster_layer_multiplies_by_its_own_weights(calls):
    layer = fast_linear(8, 16)
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.weight)

    assert torch.equal(other(torch.ones(1, 1, 8))[0, 0], other.bias)
    assert not torch.equal(layer(torch.ones(1, 1, 8))[0, 0], layer.bias)
