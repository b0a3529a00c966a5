"""The faster forwards equal the plain ones, and step aside for whatever is not plain."""

import copy

import pytest
import torch
from helpers import TINY, randomize_
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from hf_vit_scratch import (
    ViTScratchBackbone,
    ViTScratchConfig,
    ViTScratchForImageClassification,
    ViTScratchForMaskedImageModeling,
)
from hf_vit_scratch.speed import fused
from hf_vit_scratch.speed.hardware import can_compile
from hf_vit_scratch.speed.optimize import optimize

PIXELS = torch.empty(3, 3, 16, 24)
TRAINING = ["sdpa+qkv", "eager+joined", "sdpa+joined", "eager+convolution", "sdpa+convolution"]
INFERENCE = ["eager+packed", "sdpa+packed"]
STYLES = pytest.mark.parametrize(
    "fields",
    [
        {"norm_first": True},
        {"norm_first": False},
        {"position_embedding_type": "rope2d"},
        {"qk_norm": True, "qkv_bias": False},
        {"position_embedding_type": "rope2d", "qk_norm": True, "hidden_act": "gelu_new"},
    ],
    ids=["pre-LN", "post-LN", "rope2d", "qk_norm", "rope2d and qk_norm"],
)


@pytest.fixture(autouse=True)
def _needs_onednn():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")


def build(model_class=ViTScratchForImageClassification, dtype=torch.float32, **fields):
    config = ViTScratchConfig(**TINY | fields)
    return randomize_(model_class(config), 0.3).to(dtype)


def pair(choice, **options):
    """A plain model, with the attention of the choice, and a copy that is optimized."""
    plain = build(**options)
    plain.config._attn_implementation = choice.partition("+")[0]
    fast = copy.deepcopy(plain)
    optimize(fast, PIXELS, training=choice in TRAINING, choice=choice)
    return plain, fast


def gradients(model, pixels, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(pixels)
    tensors = output.feature_maps if hasattr(output, "feature_maps") else [output[0]]
    loss = sum((tensor.double() * torch.linspace(-1, 1, tensor.numel()).view_as(tensor)).sum() for tensor in tensors)
    loss.backward()
    return [tensors[-1].detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@STYLES
@pytest.mark.parametrize("choice", TRAINING)
def test_outputs_and_gradients_are_the_same(choice, fields):
    plain, fast = pair(choice, dtype=torch.float64, **fields)
    pixels = torch.randn_like(PIXELS, dtype=torch.float64)

    expected, actual = gradients(plain, pixels), gradients(fast, pixels)

    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@STYLES
@pytest.mark.parametrize(("bias_comes_last", "biases"), [(False, [1, 1, 1, 1]), (True, [0, 0, 1, 0])])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_layers_with_one_product_for_query_key_and_value_give_the_same(
    bias_comes_last, biases, fields, monkeypatch
):
    torch.compiler.reset()  # or the limit of compilations is reached
    monkeypatch.setattr(fused, "BIAS_COMES_LAST", bias_comes_last)
    plain = build(dtype=torch.float64, **fields)
    fast, graphs = copy.deepcopy(plain), []

    def count_products(graph, example_inputs):
        graphs.append([len(node.args) - 2 for node in graph.graph.nodes if node.target is F.linear])
        return graph

    optimize(fast, PIXELS, training=True, choice="sdpa+qkv", compile={"backend": count_products})
    pixels = torch.randn_like(PIXELS, dtype=torch.float64)

    for one, other in zip(gradients(fast, pixels), gradients(plain, pixels), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert graphs
    assert all(graph == biases for graph in graphs)  # joined, output, and two of the MLP


@pytest.mark.parametrize("choice", [*TRAINING, *INFERENCE])
def test_patches_and_weights_are_one_product(choice, monkeypatch):
    _, fast = pair(choice)
    monkeypatch.delattr(nn.Conv2d, "forward")
    fast(PIXELS)


@pytest.mark.parametrize("options", [{"stride": 2}, {"stride": 4, "padding": 1}, {"stride": 4, "groups": 3}])
def test_users_other_convolution_stays_one(options):
    convolution = nn.Conv2d(3, 6, kernel_size=4, **options)
    pixels = torch.randn(2, 3, 12, 12)
    assert torch.equal(fused.patch_forward(convolution, pixels), convolution(pixels))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_users_layers_without_a_bias_are_compiled(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(fused, "BIAS_COMES_LAST", True)
    plain = build(dtype=torch.float64)
    for layer in plain.vit.layers:
        layer.mlp.fc2.bias = None
    fast = copy.deepcopy(plain)
    optimize(fast, PIXELS, training=True, choice="sdpa+qkv", compile={"backend": "eager"})
    pixels = torch.randn_like(PIXELS, dtype=torch.float64)
    torch.testing.assert_close(fast(pixels).logits, plain(pixels).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model_class", [ViTScratchForMaskedImageModeling, ViTScratchBackbone])
@pytest.mark.parametrize("choice", TRAINING)
def test_outputs_and_gradients_of_the_other_classes_are_the_same(choice, model_class):
    plain, fast = pair(choice, model_class=model_class, dtype=torch.float64)
    pixels = torch.randn_like(PIXELS, dtype=torch.float64)
    for one, other in zip(gradients(fast, pixels), gradients(plain, pixels), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@STYLES
@pytest.mark.parametrize("choice", TRAINING)
def test_gradients_under_autocast_are_as_near_to_exact_ones_as_the_plain_models(choice, fields):
    plain, fast = pair(choice, **fields)
    pixels = torch.randn_like(PIXELS)
    exact = gradients(copy.deepcopy(plain).double(), pixels.double())

    def error(model):
        pairs = zip(gradients(model, pixels, autocast=True), exact, strict=True)
        # The gradient of a key's bias is zero.
        return sum((one.double() - other).norm() / other.norm() for one, other in pairs if other.norm() > 1e-9)

    assert error(fast) < 1.5 * error(plain)


@STYLES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("choice", INFERENCE)
def test_packed_weights_give_the_same_outputs_for_every_batch(choice, dtype, fields):
    plain, fast = (model.eval() for model in pair(choice, dtype=dtype, **fields))
    for number in (3, 1, 7):
        pixels = torch.randn(number, 3, 16, 24, dtype=dtype)
        with torch.inference_mode():
            expected, actual = plain(pixels).logits, fast(pixels).logits
        can = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert (fast.vit.layers[0].made is not None) == can
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def test_bfloat16_runs_as_it_is_where_the_processor_cannot_pack_it(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    plain, fast = (model.eval() for model in pair("sdpa+packed", dtype=torch.bfloat16))
    pixels = torch.randn(3, 3, 16, 24, dtype=torch.bfloat16)

    with torch.inference_mode():
        assert torch.equal(fast(pixels).logits, plain(pixels).logits)

    assert fast.vit.layers[0].made is None


@torch.no_grad()
def test_packed_weights_follow_the_models():
    plain, fast = (model.eval() for model in pair("eager+packed"))
    pixels = torch.randn_like(PIXELS)
    fast(pixels)
    other = build()
    other.config._attn_implementation = "eager"

    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(fast(pixels).logits, other.eval()(pixels).logits, rtol=1e-5, atol=1e-5)
    for model in (fast, other):
        model.vit.layers[1].attention.k_proj.bias.mul_(2)
        model.vit.layers[1].attention.v_proj.bias.add_(1)
    torch.testing.assert_close(fast(pixels).logits, other(pixels).logits, rtol=1e-5, atol=1e-5)
    copied = copy.deepcopy(fast)
    copied.load_state_dict(plain.state_dict())
    torch.testing.assert_close(copied(pixels).logits, plain(pixels).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast(pixels).logits, other(pixels).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_packed_weights_are_not_taken_for_new_ones_at_the_same_address():
    # Memory of this size is given to the next tensor as soon as it is free.
    fields = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    plain, fast = (model.eval() for model in pair("sdpa+packed", **fields))
    name, pixels = "vit.layers.0.mlp.fc1.weight", torch.randn_like(PIXELS)
    weight = plain.state_dict()[name].clone()
    for scale in range(8):
        expected, actual = (
            torch.func.functional_call(m, {name: weight * scale}, pixels).logits for m in (plain, fast)
        )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class Doubled(nn.Linear):
    """A linear layer with something more, as adapters are."""

    def forward(self, x):
        return 2 * super().forward(x)


@torch.no_grad()
def test_hooks_of_all_modules_are_called():
    _, fast = pair("sdpa+packed")
    called = []
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: called.append(module)):
        fast.eval()(PIXELS)

    assert fast.vit.layers[0].mlp.fc1 in called


def double_a_layer(model):
    for layer in model.vit.layers:
        for part, name in ((layer.attention, "v_proj"), (layer.mlp, "fc1")):
            old = getattr(part, name)
            new = Doubled(old.in_features, old.out_features)
            new.load_state_dict(old.state_dict())
            setattr(part, name, new.to(old.weight.dtype))


def add_hooks(model):
    for layer in model.vit.layers:
        layer.attention.v_proj.register_forward_hook(lambda module, args, output: 2 * output)
        layer.mlp.fc1.register_forward_pre_hook(lambda module, args: (3 * args[0],))


def double_branches(model):
    for layer in model.vit.layers:
        layer.dropout.register_forward_hook(lambda module, args, output: 2 * output)
        layer.drop_path.register_forward_hook(lambda module, args, output: 2 * output)


class Wrapped(nn.Module):
    """A norm in another module, as PEFT's."""

    def __init__(self, norm):
        super().__init__()
        self.base_layer, self.weight = norm, nn.Parameter(3 * torch.ones(()))

    def forward(self, x):
        return self.weight.to(x.dtype) * self.base_layer(x)


def wrap_norms(model):
    for layer in model.vit.layers:
        layer.attention.q_norm = Wrapped(layer.attention.q_norm)


class Quantized(nn.Module):
    """A layer whose weight is a method, as after torch's dynamic quantization."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def weight(self):
        return self.linear.weight

    def forward(self, x):
        return 2 * self.linear(x)


def quantize(model):
    for layer in model.vit.layers:
        layer.attention.o_proj = Quantized(layer.attention.o_proj)


class Scaled(nn.Module):
    """Another module in the place of one of the model's, with the same children."""

    def __init__(self, module):
        super().__init__()
        self._modules.update(module._modules)
        self.module = [module]

    def forward(self, *args, **kwargs):
        return 3 * self.module[0](*args, **kwargs)


def scale(name):
    def change(model):
        for layer in model.vit.layers:
            setattr(layer, name, Scaled(getattr(layer, name)))

    return change


class OtherNorm(nn.RMSNorm):
    """Another RMSNorm than the model's."""

    def forward(self, x):
        return 2 * super().forward(x)


def replace_norms(model):
    for layer in model.vit.layers:
        for name in ("q_norm", "k_norm"):
            setattr(
                layer.attention, name, OtherNorm(layer.attention.head_dim, dtype=layer.attention.q_proj.weight.dtype)
            )


def take_a_bias(model):
    for layer in model.vit.layers:
        layer.attention.q_proj.bias = None


@torch.no_grad()
@pytest.mark.parametrize("name", ["dropout", "attention"])
def test_dropout_that_stays_on_in_evaluation_takes_part(name):
    plain, fast = pair("sdpa+packed", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    pixels, logits = torch.randn_like(PIXELS), []
    without = fast.eval()(pixels).logits
    for model in (plain.eval(), fast):
        model.vit.layers[0].get_submodule(name).train()
        torch.manual_seed(0)
        logits.append(model(pixels).logits)

    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    assert not torch.allclose(logits[1], without, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        double_a_layer, add_hooks, double_branches, wrap_norms, replace_norms, quantize, take_a_bias, scale("mlp"),
        scale("dropout"), scale("drop_path"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("choice", [*TRAINING, *INFERENCE])
def test_what_is_added_later_takes_part(choice, change):
    plain, fast = pair(choice, dtype=torch.float32 if choice in INFERENCE else torch.float64)
    pixels = torch.randn_like(PIXELS).to(plain.dtype)
    before = fast.train(choice in TRAINING)(pixels).logits.detach()
    for model in (plain, fast):
        change(model)
        model.train(choice in TRAINING)

    with torch.set_grad_enabled(choice in TRAINING):
        expected, actual = plain(pixels).logits, fast(pixels).logits

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("choice", ["eager+joined", "sdpa+packed"])
def test_attention_of_the_users_own_takes_part(choice):
    def mean_of_values(module, query, key, value, attention_mask, **kwargs):
        return value.mean(dim=2, keepdim=True).expand_as(value).transpose(1, 2), None

    AttentionInterface.register("mean_of_values", mean_of_values)
    plain, fast = pair(choice)
    for model in (plain, fast):
        model.eval().set_attn_implementation("mean_of_values")
    pixels = torch.randn_like(PIXELS).to(plain.dtype)

    torch.testing.assert_close(fast(pixels).logits, plain(pixels).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("choice", ["eager+joined", "sdpa+packed"])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"output_attentions": True}),
        ({"is_causal": True, "pooling": "mean"}, {}),
    ],
    ids=["output_attentions", "is_causal"],
)
def test_masks_and_attention_maps_are_as_in_the_plain_model(choice, fields, options):
    plain, fast = (model.eval() for model in pair(choice, **fields))
    pixels = torch.randn_like(PIXELS)
    with torch.no_grad():
        expected, actual = plain(pixels, **options), fast(pixels, **options)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-5)
    for one, other in zip(actual.attentions or (), expected.attentions or (), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_dropout_of_the_attention_is_as_in_the_plain_model():
    plain, fast = (model.train() for model in pair("eager+joined", attention_probs_dropout_prob=0.5))
    pixels = torch.randn_like(PIXELS)
    torch.manual_seed(1)
    expected = plain(pixels).logits
    torch.manual_seed(1)
    torch.testing.assert_close(fast(pixels).logits, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, plain.eval()(pixels).logits, atol=1e-3)


@pytest.mark.parametrize("choice", ["eager+convolution", "sdpa+packed"])
def test_who_looks_into_the_model_sees_the_plain_one(choice):
    plain, fast = (model.eval() for model in pair(choice))
    pixels = torch.randn_like(PIXELS)

    counts, exported = [], []
    for model in (plain, fast):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(pixels)
        counts.append(counter.get_total_flops())
        with torch.no_grad():
            exported.append(torch.export.export(model, (pixels,)).graph_module.code)
    assert counts[0] == counts[1]
    assert exported[0] == exported[1]


@pytest.mark.parametrize("choice", ["eager+joined", "sdpa+convolution"])
def test_autocast_leaves_float64_alone(choice):
    plain, fast = pair(choice, dtype=torch.float64)
    pixels = torch.randn_like(PIXELS, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(pixels).logits, plain(pixels).logits, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@torch.no_grad()
def test_packed_model_in_bfloat16_can_be_compiled_as_one_graph():
    torch.compiler.reset()
    _, fast = pair("sdpa+packed", dtype=torch.bfloat16)
    pixels = torch.randn_like(PIXELS)
    expected = fast.eval()(pixels).logits
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(pixels).logits, expected, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's forward mode, of itself
@pytest.mark.parametrize("choice", ["eager+joined", "eager+packed"])
def test_forward_derivatives_are_those_of_the_plain_model(choice):
    pixels, tangents = torch.randn_like(PIXELS), []
    for model in pair(choice):
        with torch.set_grad_enabled(choice in TRAINING), forward_ad.dual_level():  # packed layers need it off
            output = model.eval()(forward_ad.make_dual(pixels, pixels)).logits
            tangents.append(forward_ad.unpack_dual(output).tangent)
    assert torch.equal(*tangents)


def test_packed_model_has_gradients():
    plain, fast = (model.eval() for model in pair("eager+packed"))
    pixels = torch.randn_like(PIXELS)
    for one, other in zip(gradients(fast, pixels), gradients(plain, pixels), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_model_made_in_inference_mode_runs_as_it_is():
    with torch.inference_mode():
        plain, fast = (model.eval() for model in pair("sdpa+packed"))
        pixels = torch.randn_like(PIXELS)
        torch.testing.assert_close(fast(pixels).logits, plain(pixels).logits, rtol=0, atol=1e-5)


def test_second_derivatives_are_refused():
    _, fast = pair("eager+joined", dtype=torch.float64)
    pixels = torch.randn_like(PIXELS, dtype=torch.float64).requires_grad_()
    (first,) = torch.autograd.grad(fast(pixels).logits.square().sum(), pixels, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_gradients_of_the_functions_are_the_numeric_ones():
    pair_of_heads = torch.randn(2, 2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(3, 2, dtype=torch.float64)
    for function, inputs in (
        (fused._EagerAttention, (pair_of_heads, value, 0.7)),
        (fused._RMSNorm, (pair_of_heads, weight, 1e-6)),
        (fused._Rotation, (pair_of_heads, angles.cos(), angles.sin())),
    ):
        assert torch.autograd.gradcheck(function.apply, inputs)


def frozen(model, backend=lambda graph, _: copy.deepcopy(graph)):
    """Compile a model for inference. The default backend copies the weights into the graph, as inductor does."""
    torch.compiler.reset()
    optimize(model.eval(), PIXELS, compile={"backend": backend}, choice="sdpa+qkv")
    return model


@torch.inference_mode()
def outputs(model, pixels):
    return model(pixels)[0]


def assert_same_outputs(fast, plain, pixels):
    torch.testing.assert_close(outputs(fast, pixels), outputs(plain, pixels), rtol=1e-5, atol=1e-5)


@STYLES
@pytest.mark.parametrize("model_class", [ViTScratchForImageClassification, ViTScratchForMaskedImageModeling])
def test_model_compiled_for_inference_gives_the_same_outputs_for_every_batch(model_class, fields):
    plain = build(model_class, **fields).eval()
    fast = frozen(copy.deepcopy(plain))
    for number in (3, 1):
        assert_same_outputs(fast, plain, torch.randn(number, 3, 16, 24))


@pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_inductor_packs_the_weights_of_a_model_that_is_compiled_for_inference(dtype):
    plain = build(dtype=dtype).eval()
    fast, pixels = frozen(copy.deepcopy(plain), "inductor"), torch.randn_like(PIXELS, dtype=dtype)
    actual, (code,) = run_and_get_code(outputs, fast, pixels)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(actual, outputs(plain, pixels), rtol=tolerance, atol=tolerance)
    assert "addmm(" not in code


def _load(model, other):
    model.load_state_dict(other.state_dict())


@torch.no_grad()
def _change_in_place(model, other):
    for own, its in zip(model.parameters(), other.parameters(), strict=True):
        own.copy_(its)


def _exchange_data(model, other):  # as a moving average does
    for own, its in zip(model.parameters(), other.parameters(), strict=True):
        own.data = its.data


def _replace_modules(model, other):
    for name, child in copy.deepcopy(other).named_children():
        setattr(model, name, child)


@pytest.mark.parametrize("change", [_load, _change_in_place, _exchange_data, _replace_modules])
def test_model_compiled_for_inference_follows_its_weights(change):
    fast, other, pixels = frozen(build()), build().eval(), torch.randn_like(PIXELS)
    for _ in range(2):  # what has come new may be changed, too
        outputs(fast, pixels)
        change(fast, other)
        assert_same_outputs(fast, other, pixels)
        other = build().eval()


def test_models_compiled_for_inference_keep_their_own_weights():
    plain = [build().eval() for _ in range(2)]
    fast = [frozen(copy.deepcopy(model)) for model in plain]
    fast.append(copy.deepcopy(fast[0]))
    pixels = torch.randn_like(PIXELS)
    for one, its in zip(fast, (*plain, plain[0]), strict=True):
        assert_same_outputs(one, its, pixels)


def test_model_compiled_for_inference_calls_hooks_that_come_later():
    fast, called = frozen(build()), []
    outputs(fast, PIXELS)
    fast.vit.layers[1].mlp.fc1.register_forward_hook(lambda *args: called.append(1))
    outputs(fast, PIXELS)
    assert called


def test_model_compiled_for_inference_is_not_compiled_for_gradients():  # which would be done anew at each step
    plain, graphs = build(dtype=torch.float64).eval(), []
    fast = frozen(copy.deepcopy(plain), lambda graph, _: graphs.append(graph) or graph)
    pixels = torch.randn_like(PIXELS, dtype=torch.float64)

    actual = gradients(fast, pixels)

    assert not graphs
    for one, its in zip(actual, gradients(plain, pixels), strict=True):
        torch.testing.assert_close(one, its, rtol=0, atol=1e-10)


def test_weights_without_a_version_are_no_constants():
    with torch.inference_mode():
        model = build().eval()
    frozen(model)
    outputs(model, PIXELS)
    assert model.made is None
