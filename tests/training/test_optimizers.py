"""Parameter groups, Muon beside AdamW, and the schedule by progress."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import TINY, randomize_
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Dinov2Config, Dinov2Model, ResNetConfig, ResNetModel, get_scheduler

from hf_vit_scratch import ViTScratchConfig, ViTScratchForImageClassification
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training.arguments import ViTTrainingArguments
from hf_vit_scratch.training.optimizers import (
    SCHEDULE_STEPS,
    BatchedMuon,
    MuonWithAdamW,
    build_optimizer,
    follow_progress,
    layer_number,
    orthogonalize,
    parameter_groups,
)


def tiny_model(**fields):
    return randomize_(ViTScratchForImageClassification(ViTScratchConfig(**TINY | {"norm_first": True} | fields)), 0.1)


def grouped(model, **fields):
    defaults = {"layer_decay": 1.0, "muon": False, "muon_learning_rate": None}
    args = SimpleNamespace(**defaults | fields)
    return parameter_groups(model, args, args.learning_rate)


def by_name(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group for group in groups for parameter in group["params"]}


def test_layers_are_numbered_from_the_embeddings_to_the_head():
    numbers = {name: layer_number(name, 2) for name, _ in tiny_model(classifier_hidden_size=8).named_parameters()}

    assert {number for name, number in numbers.items() if "embeddings" in name} == {0}
    assert {number for name, number in numbers.items() if ".layers.0." in name} == {1}
    assert {number for name, number in numbers.items() if ".layers.1." in name} == {2}
    others = {number for name, number in numbers.items() if "embeddings" not in name and ".layers." not in name}
    assert others == {3}


def test_layer_decay_gives_the_stated_rates():
    model = tiny_model()

    groups = grouped(model, learning_rate=0.1, weight_decay=0.05, layer_decay=0.5)

    rates = {name: group["lr"] for name, group in by_name(model, groups).items()}
    assert rates["classifier.weight"] == rates["vit.layernorm.bias"] == 0.1
    assert rates["vit.layers.1.mlp.fc1.weight"] == rates["vit.layers.1.layernorm_before.weight"] == 0.05
    assert rates["vit.layers.0.attention.q_proj.bias"] == 0.025
    assert rates["vit.embeddings.cls_token"] == rates["vit.embeddings.patch_embeddings.projection.weight"] == 0.0125
    assert len(rates) == len(list(model.parameters()))
    assert groups[0]["lr"] == 0.1  # the one that is logged


def test_muon_takes_the_matrices_of_the_layers_and_nothing_else():
    model = tiny_model()

    groups = by_name(model, grouped(model, learning_rate=0.1, weight_decay=0.05, muon=True))

    of_muon = {name for name, group in groups.items() if group["muon"]}
    assert of_muon == {
        f"vit.layers.{i}.{part}.weight"
        for i in range(2)
        for part in (*(f"attention.{p}_proj" for p in "qkvo"), "mlp.fc1", "mlp.fc2")
    }
    assert {group["weight_decay"] for name, group in groups.items() if name in of_muon} == {0.05}


def test_frozen_parameters_are_left_out():
    model = tiny_model()
    model.vit.requires_grad_(False)

    groups = by_name(model, grouped(model, learning_rate=0.1, weight_decay=0.0))

    assert set(groups) == {"classifier.weight", "classifier.bias"}


def test_muon_with_frozen_layers_is_adamw(tmp_path):
    model, args = tiny_model(), ViTTrainingArguments(str(tmp_path), muon=True)
    model.vit.requires_grad_(False)

    optimizer = build_optimizer(model, args, torch.optim.AdamW, {"lr": 0.1})

    assert type(optimizer) is torch.optim.AdamW


def with_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def test_update_of_a_hidden_matrix_is_nearly_orthogonal_and_of_the_size_of_adamw():
    model = with_gradients(tiny_model(hidden_size=64, intermediate_size=128))
    weight = model.vit.layers[0].mlp.fc1.weight  # (128, 64)
    before = weight.detach().clone()
    groups = grouped(model, learning_rate=0.01, weight_decay=0.0, muon=True)

    MuonWithAdamW(groups).step()

    update = (weight.detach() - before) / 0.01
    singular_values = torch.linalg.svdvals(update) / (0.2 * math.sqrt(128))
    assert 0.6 < singular_values.min() < singular_values.max() < 1.3  # five Newton-Schulz steps come this near to one
    assert 0.1 < update.square().mean().sqrt() < 0.25  # AdamW's updates are about 0.2 to 0.4 of the learning rate


@pytest.mark.parametrize("shape", [(8, 6), (6, 8)])
def test_muon_multiplies_in_float32_where_asked(shape):
    # By default the next test holds: the same bits as torch's, which multiplies in bfloat16 everywhere.
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    expected = weight.grad.double() / weight.grad.norm()  # the momentum of a first step is only a factor
    for _ in range(5):
        gram = expected @ expected.T
        expected = 3.4445 * expected + (-4.775 * gram + 2.0315 * gram @ gram) @ expected

    BatchedMuon(
        [weight], torch.float32, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    ).step()

    torch.testing.assert_close(weight.double(), -0.2 * 8**0.5 * expected, rtol=0, atol=1e-5)


def test_model_of_another_library_needs_layers_for_layer_decay_only():
    resnet = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))  # has no num_hidden_layers
    assert len(grouped(resnet, learning_rate=0.1, weight_decay=0.1)) == 2
    dinov2 = Dinov2Model(Dinov2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(UserError, match=r"need parameters named layers\.0 and so on; Dinov2Model has none"):
        grouped(dinov2, learning_rate=0.1, weight_decay=0.1, layer_decay=0.5)


def test_the_two_parts_step_as_the_two_optimizers_alone():
    model, twin = (with_gradients(tiny_model()) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = MuonWithAdamW(grouped(model, learning_rate=0.01, weight_decay=0.1, muon=True), **options)
    groups = grouped(twin, learning_rate=0.01, weight_decay=0.1, muon=True)
    alone = [
        torch.optim.Muon([group for group in groups if group["muon"]], adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([group for group in groups if not group["muon"]], **options),
    ]

    for seed in range(3):
        with_gradients(model, seed)
        with_gradients(twin, seed)
        optimizer.step()
        for part in alone:
            part.step()

    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_matrices_that_are_spread_over_devices_step_as_in_torch():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        weights = torch.randn(2, 8, 6)
        spread = [nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights]
        whole = [nn.Parameter(weight.clone()) for weight in weights]
        for parameter, same, gradient in zip(spread, whole, torch.randn(2, 8, 6), strict=True):
            parameter.grad, same.grad = distribute_tensor(gradient, mesh, [Shard(0)]), gradient.clone()

        BatchedMuon(spread, adjust_lr_fn="match_rms_adamw").step()
        torch.optim.Muon(whole, adjust_lr_fn="match_rms_adamw").step()

        for parameter, same in zip(spread, whole, strict=True):
            torch.testing.assert_close(parameter.full_tensor(), same, rtol=0, atol=1e-6)
        with pytest.raises(UserError, match=r"muon_beta2 needs whole matrices"):
            BatchedMuon(spread, beta2=0.9, adjust_lr_fn="match_rms_adamw").step()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shape", [(6, 6), (8, 6), (6, 8)], ids=["square", "tall", "wide"])
def test_normuon_divides_each_neuron_by_the_root_of_its_mean_square(shape):
    weights = [nn.Parameter(torch.randn(shape)) for _ in range(3)]
    expected = [weight.detach().double() for weight in weights]
    moments, seconds = [torch.zeros(shape, dtype=torch.float64) for _ in weights], [0.0] * 3
    options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = BatchedMuon(weights, torch.float32, 0.8, **options)

    for _ in range(3):
        for number, weight in enumerate(weights):  # algorithm 1 of the paper, one matrix after the other
            weight.grad = torch.randn(shape)
            gradient = weight.grad.double()
            moments[number] = 0.9 * moments[number] + 0.1 * gradient
            update = orthogonalize((0.1 * gradient + 0.9 * moments[number])[None], (3.4445, -4.775, 2.0315), 5, 1e-7)[
                0
            ]
            square = update.square().mean(dim=0 if shape[0] < shape[1] else 1, keepdim=True)
            seconds[number] = 0.8 * seconds[number] + 0.2 * square
            normalized = update / seconds[number].sqrt()
            normalized *= update.norm() / normalized.norm()
            expected[number] = 0.98 * expected[number] - 0.1 * 0.2 * max(shape) ** 0.5 * normalized
        optimizer.step()

    for weight, true in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), true, rtol=0, atol=1e-5)


def test_normuon_keeps_an_update_of_zeros():
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.zeros(4, 4)

    BatchedMuon([weight], beta2=0.9, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()

    assert torch.equal(weight, torch.ones(4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta2", [None, 0.9])
def test_optimizer_that_is_loaded_goes_on_as_the_saved_one(beta2, dtype):
    model = with_gradients(tiny_model().to(dtype))
    make = lambda m: MuonWithAdamW(  # noqa: E731
        grouped(m, learning_rate=0.01, weight_decay=0.1, muon=True), muon_beta2=beta2
    )
    optimizer = make(model)
    optimizer.step()
    twin = with_gradients(tiny_model().to(dtype))
    twin.load_state_dict(model.state_dict())
    loaded = make(twin)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors

    for one, m in ((optimizer, model), (loaded, twin)):
        for group in one.param_groups:
            group["lr"] = 0.02  # as a schedule does
        with_gradients(m, seed=5)
        one.step()

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert len(loaded.state_dict()["state"]) == len(list(twin.parameters()))


@pytest.mark.parametrize(
    ("name", "kwargs", "in_shares"),
    [
        ("cosine", None, None),
        ("linear", None, None),
        ("warmup_stable_decay", {"num_decay_steps": 20}, {"num_decay_steps": 2000}),
    ],
)
def test_schedule_that_follows_progress_equals_the_stock_one_where_progress_is_the_share_of_steps(
    name, kwargs, in_shares
):
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5) for _ in range(2))
    step = 0
    of_shares = get_scheduler(name, ours, SCHEDULE_STEPS // 10, SCHEDULE_STEPS, scheduler_specific_kwargs=in_shares)
    by_progress = follow_progress(of_shares, lambda: step / 100)
    stock = get_scheduler(name, theirs, 10, 100, scheduler_specific_kwargs=kwargs)

    for step in range(1, 101):  # noqa: B007
        for optimizer, schedule in ((ours, by_progress), (theirs, stock)):
            optimizer.step()
            schedule.step()
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9)
    assert ours.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)
