"""Choosing the fastest forwards: by measurements, without a trace, and the same choice again."""

import copy
import pickle
import time

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers import TINY, randomize_
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.speed import fused
from hf_vit_scratch.speed import optimize as speed
from hf_vit_scratch.speed.optimize import optimize

PIXELS = torch.zeros(4, 3, 16, 24)


@pytest.fixture(autouse=True)
def _nothing_is_measured_yet(monkeypatch):
    monkeypatch.setattr(speed, "_measured", {})


@pytest.fixture
def times(monkeypatch):
    """Sets the measured seconds of some candidates; the others take 1 second."""
    calls = []

    def pretend(**seconds):
        def measure(steps, deadline):
            calls.append(list(steps))
            return {name: seconds.get(name.replace("+", "_"), 1.0) for name in steps}

        monkeypatch.setattr(speed, "_measure", measure)
        return calls

    return pretend


def build(**fields):
    return randomize_(ViTScratchForImageClassification(ViTScratchConfig(**TINY | fields)), 0.3)


def test_flag_of_transformers_vit_does_not_make_layers_slow():
    model = build().eval()
    optimize(model, PIXELS, choice="sdpa+packed")

    with torch.inference_mode():
        logits = model(PIXELS, interpolate_pos_encoding=True).logits

        assert model.vit.layers[0].made is not None
        assert torch.equal(logits, model(PIXELS).logits)


@pytest.mark.parametrize("training", [True, False])
def test_a_choice_is_measured_relative_to_the_plain_model(training):
    optimization = optimize(build(), PIXELS, training=training)
    ratios = optimization.ratios
    assert ratios["sdpa"] == 1.0
    assert optimization.choice in ratios


def test_the_fastest_is_chosen(times):
    times(eager=0.9, eager_packed=0.5, sdpa_packed=0.6)
    model = build()
    assert optimize(model, PIXELS).choice == "eager+packed"
    assert model.config._attn_implementation == "eager"
    assert all("forward" in vars(layer) for layer in model.vit.layers)


def test_a_candidate_that_is_hardly_faster_is_not_chosen(times):
    times(eager_packed=0.99)
    assert optimize(build(), PIXELS).choice == "sdpa"


def test_a_choice_is_repeated_without_measuring(times):
    calls = times(sdpa_joined=0.5)
    first = optimize(build(), PIXELS, training=True)
    again = optimize(build(), PIXELS, training=True)
    assert again.choice == first.choice == "sdpa+joined"
    assert len(calls) == 1
    assert again.ratios == first.ratios


@pytest.mark.parametrize(
    ("fields", "batch", "training"),
    [({"qk_norm": True}, 4, True), ({"attention_probs_dropout_prob": 0.1}, 4, True), ({}, 5, True), ({}, 4, False)],
)
def test_other_sizes_options_and_modes_are_measured_apart(times, fields, batch, training):
    calls = times()
    optimize(build(), PIXELS, training=True)
    optimize(build(**fields), torch.zeros(batch, 3, 16, 24), training=training)
    assert len(calls) == 2


def test_packed_layers_are_measured_as_such_in_inference_mode_too(monkeypatch):
    model, packed = build().eval(), []
    packing = fused._packed
    monkeypatch.setattr(fused, "_packed", lambda *args, **kwargs: packed.append(1) or packing(*args, **kwargs))

    with torch.inference_mode():
        optimize(model, PIXELS)

    assert packed


def test_packed_layers_are_not_compiled():
    packed, plain = (
        optimize(build(), PIXELS, compile={"backend": "eager"}, choice=name) for name in ("sdpa+packed", "sdpa")
    )

    assert (packed.compiled, plain.compiled) == (False, True)
    assert all(layer._compiled_call_impl is None for layer in packed.model.vit.layers)


def test_layers_that_were_compiled_for_training_can_be_packed_afterwards():
    model = build(drop_path_rate=0.1).train()
    optimize(model, PIXELS, training=True, compile={"backend": "eager"})
    optimize(model.eval(), PIXELS, choice="sdpa+packed")

    with torch.inference_mode():
        model(PIXELS)

    assert all(layer.made is not None for layer in speed._layers(model))


@pytest.mark.parametrize(("compile", "expected"), [({"backend": "eager"}, "sdpa+qkv"), (False, "sdpa")])
def test_other_devices_join_query_key_and_value_if_they_compile(times, compile, expected):
    calls = times()
    assert optimize(build(), PIXELS.to("meta"), training=True, compile=compile).choice == expected
    assert calls == []


@pytest.mark.parametrize("training", [True, False])
def test_on_a_cpu_what_is_compiled_joins_query_key_and_value(times, training):
    times(eager=0.5)
    assert optimize(build(), PIXELS, training=training, compile={"backend": "eager"}).choice == "eager+qkv"


def test_without_a_compiler_the_choice_is_that_of_uncompiled_layers(times, monkeypatch):
    monkeypatch.setattr(speed, "can_compile", lambda device: False)
    times(eager_joined=0.5)
    optimization = optimize(build(), PIXELS, training=True, compile=True)
    assert (optimization.choice, optimization.compiled) == ("eager+joined", False)


def test_sizes_may_be_compiled_as_dynamic(monkeypatch):
    options = {}
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **given: options.update(given))
    optimize(build(), PIXELS, training=True, compile={"backend": "eager", "dynamic": True}, choice="sdpa")
    assert options == {"backend": "eager", "dynamic": True}


def test_compiled_models_are_measured_apart_for_training_and_inference(times):
    calls = times()
    for training in (True, False):
        optimize(build(), PIXELS, training=training, compile={"backend": "eager"})
    assert calls == [["eager", "sdpa"], ["eager", "sdpa"]]


def test_model_whose_forward_another_library_has_replaced_is_compiled_by_layers():
    model = add_hook_to_module(build(), ModelHook())
    optimize(model, PIXELS, compile={"backend": "eager"}, choice="sdpa")
    assert all(layer._compiled_call_impl is not None for layer in model.vit.layers)


def test_other_programs_do_not_change_the_choice(monkeypatch):
    seconds = {"slow": iter([2.0, 2.0, 2.0]), "fast": iter([9.0, 1.0, 9.0])}  # twice, something else ran

    monkeypatch.setattr(speed, "timeit", lambda step, number: next(seconds[step()]))
    steps = {name: lambda name=name: name for name in seconds}

    assert speed._measure(steps, deadline=0.0) == {"slow": 2.0, "fast": 1.0}


def test_a_short_run_is_not_measured(times):
    calls = times()
    assert optimize(build(), PIXELS, images=8).choice == "sdpa"
    assert calls == []


def test_random_state_gradients_and_mode_stay():
    model = build(hidden_dropout_prob=0.1, drop_path_rate=0.1).eval()
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    state = torch.get_rng_state()

    optimize(model, PIXELS, training=True)

    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["classifier.weight"]


@pytest.mark.parametrize("compile", [False, {"backend": "eager"}], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("choice", ["eager+packed", "sdpa+joined", "eager"])
def test_undo_gives_the_plain_model_back(choice, compile):
    model = build().eval()
    before, names = model(PIXELS).logits, [*model.state_dict()]
    attributes = [set(vars(module)) for module in model.modules()]

    optimization = optimize(model, PIXELS, choice=choice, compile=compile)
    assert [*model.state_dict()] == names
    optimization.undo()

    assert [set(vars(module)) for module in model.modules()] == attributes
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(PIXELS).logits, before)


def test_plain_changes_nothing():
    model = build()
    assert optimize(model, PIXELS, choice="plain").choice == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("choice", ["fast", "sdpa+fast", "fast+joined"])
def test_unknown_choice_is_refused(choice):
    with pytest.raises(
        ValueError, match=rf"'{choice.replace('+', '.')}' is not a choice of speed. Choose auto, plain"
    ):
        optimize(build(), PIXELS, choice=choice)


@pytest.mark.parametrize(
    ("device", "attention", "compiled", "expected"),
    [
        ("cuda", "sdpa", False, []),
        ("cpu", "flash_attention_2", False, []),
        ("cpu", "sdpa", True, ["eager", "sdpa"]),
        (
            "cpu",
            "eager",
            False,
            ["eager", "sdpa", "eager+joined", "sdpa+joined", "eager+convolution", "sdpa+convolution"],
        ),
    ],
)
def test_candidates_are_those_that_the_machine_has(device, attention, compiled, expected):
    assert speed._candidates(torch.device(device), attention, training=True, compile=compiled) == expected


def test_eager_attention_is_not_tried_with_many_tokens(times):
    calls = times()
    model = build(image_size=[100, 200])
    assert optimize(model, torch.zeros(1, 3, 100, 200)).choice == "sdpa"
    assert calls == [["sdpa", "sdpa+packed"]]


def test_onednn_that_is_switched_off_is_no_candidate(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert speed._candidates(torch.device("cpu"), "sdpa", training=False, compile=False) == ["eager", "sdpa"]


def test_a_model_of_remote_code_is_made_faster(tmp_path):
    plain = build().eval()
    plain.save_pretrained(tmp_path)
    name = "modeling_vit_scratch.ViTScratchForImageClassification"
    remote = get_class_from_dynamic_module(name, str(tmp_path)).from_pretrained(tmp_path).eval()
    assert not isinstance(remote, ViTScratchForImageClassification)

    optimize(remote, PIXELS, choice="sdpa+packed")

    with torch.no_grad():
        torch.testing.assert_close(remote(PIXELS + 1).logits, plain(PIXELS + 1).logits, rtol=1e-5, atol=1e-5)
    assert remote.vit.layers[0].made is not None


def test_forward_that_another_library_has_replaced_stays():
    model = build()
    replaced = model.vit.layers[0].forward = lambda *args, **kwargs: (args[0], None)
    optimize(model, PIXELS, choice="sdpa+packed")
    assert model.vit.layers[0].forward is replaced
    assert "forward" in vars(model.vit.layers[1])


@pytest.mark.parametrize("choice", speed.CHOICES)
def test_users_own_layers_of_our_names_stay(choice):
    model = build()
    model.classifier = torch.nn.ModuleDict({"projection": torch.nn.Conv2d(3, 4, 2, stride=2)})
    model.classifier["fc2"] = torch.nn.Linear(4, 4)
    optimize(model, PIXELS, choice=choice)
    assert not any("forward" in vars(layer) for layer in model.classifier.values())


@torch.no_grad()
def test_hook_that_comes_later_keeps_the_method_it_calls():
    optimization = optimize(build().eval(), PIXELS, choice="sdpa+packed")
    expected = optimization.model(PIXELS).logits
    add_hook_to_module(optimization.model.vit.layers[0], ModelHook())
    optimization.undo()
    torch.testing.assert_close(optimization.model(PIXELS).logits, expected)


def test_a_slow_candidate_is_left_out_and_the_time_is_kept():
    calls = dict.fromkeys(("fast", "slow", "other"), 0)

    def step(name, seconds):
        def run():
            calls[name] += 1
            time.sleep(seconds)

        return run

    start = time.perf_counter()
    times = speed._measure({"fast": step("fast", 0.002), "slow": step("slow", 0.02)}, start + 60)
    assert time.perf_counter() - start < 5
    assert calls["slow"] == 1 + speed.MIN_ROUNDS  # one to allocate memory
    assert times["slow"] > times["fast"] >= 0.002
    calls["fast"] = 0
    speed._measure({"fast": step("fast", 0.002), "other": step("other", 0.002)}, time.perf_counter() - 1)
    assert calls["fast"] <= 1 + speed.MIN_ROUNDS


def test_the_models_own_attention_is_a_choice():
    model = build()
    model.config._attn_implementation = "flex_attention"
    assert optimize(model, PIXELS).choice == "flex_attention"
    assert optimize(model, PIXELS, choice="flex_attention").choice == "flex_attention"


def test_copies_are_fast_with_their_own_weights():
    model = build().eval()
    optimize(model, PIXELS, choice="sdpa+packed")
    copied = copy.deepcopy(model)
    randomize_(copied, 0.1)
    with torch.no_grad():
        expected = optimize(copy.deepcopy(copied), PIXELS, choice="plain").model(PIXELS).logits
        torch.testing.assert_close(copied(PIXELS).logits, expected, rtol=1e-5, atol=1e-5)
    assert copied.vit.layers[0].made is not None


def test_model_of_another_library_is_refused():
    with pytest.raises(ValueError, match="optimize is for models of this package, got Linear"):
        optimize(torch.nn.Linear(2, 2), PIXELS)


def test_fast_model_can_be_pickled():
    model = build().eval()
    optimize(model, PIXELS, choice="sdpa+packed")
    with torch.no_grad():
        expected = model(PIXELS).logits
        loaded = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(loaded(PIXELS).logits, expected)
    assert loaded.vit.layers[0].made is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_whole_model_that_the_user_compiles_has_no_mask():
    masks = []  # with one, attention on a GPU takes ten times as long

    def note_masks(graph, example_inputs):
        attention = (node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        masks.extend(node.kwargs.get("attn_mask") for node in attention)
        return graph

    torch.compile(build().eval(), backend=note_masks)(PIXELS)

    assert masks == [None, None]  # of both layers


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("choice", ["sdpa", "sdpa+qkv"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_all_layers_share_one_compiled_graph(choice, rate):
    torch.compiler.reset()
    graphs = []
    model = build(num_hidden_layers=3, drop_path_rate=rate).train()
    optimize(model, PIXELS, training=True, compile={"backend": lambda g, _: graphs.append(g) or g}, choice=choice)

    model(PIXELS)

    assert len(graphs) == 1


def test_users_own_drop_path_stays_when_layers_are_compiled():
    model = build(drop_path_rate=0.5).train()
    for layer in model.vit.layers:
        layer.drop_path = torch.nn.Identity()
    optimize(model, PIXELS, training=True, compile={"backend": "eager"}, choice="sdpa")
    assert all(type(layer.drop_path) is torch.nn.Identity for layer in model.vit.layers)


def test_stochastic_depth_of_compiled_layers_drops_whole_images():
    torch.manual_seed(0)
    model = build(num_hidden_layers=3, drop_path_rate=0.5).train()
    optimize(model, PIXELS, training=True, compile={"backend": "eager"})
    branch = torch.ones(4000, 2, 3)

    for layer, rate in zip(speed._layers(model), (0.0, 0.25, 0.5), strict=True):
        result = layer.drop_path(branch)

        kept = result[:, 0, 0] > 0
        assert kept.float().mean() == pytest.approx(1 - rate, abs=0.03)
        assert torch.equal(result, kept[:, None, None] * branch / (1 - rate))
        assert layer.drop_path.eval()(branch) is branch
