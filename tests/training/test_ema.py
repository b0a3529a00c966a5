"""The moving average of the weights, on its own."""

import pytest
import torch
from torch import nn
from transformers import TrainerState

from hf_vit_scratch.errors import UserError
from hf_vit_scratch.training.ema import EMA


def test_weights_of_16_bits_are_refused():
    with pytest.raises(UserError, match=r"^ema_decay needs weights in float32: 16 bits round"):
        EMA.start(nn.Linear(3, 2).bfloat16(), 0.9, TrainerState(max_steps=100), None)


def test_frozen_weights_may_have_16_bits():
    model = nn.Sequential(nn.Linear(3, 2).bfloat16().requires_grad_(False), nn.Linear(2, 2))

    assert EMA.start(model, 0.9, TrainerState(max_steps=100), None) is not None


@pytest.fixture
def model():
    return nn.Linear(3, 2).double()


def train(model, ema, steps=4):
    """Change the weights at random; return them after each step."""
    history = []
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ema.update_parameters(model)
        history.append(model.weight.detach().clone())
    return history


def test_average_is_the_weighted_sum_of_the_steps(model):
    expected = model.weight.detach().clone()
    ema = EMA(model, decay=0.25)
    history = train(model, ema)
    for decay, weight in zip((1 / 10, 2 / 11, 0.25, 0.25), history, strict=True):
        expected = decay * expected + (1 - decay) * weight

    ema.swap(model)

    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-14)
    assert ema.n_averaged == 4


def test_slow_average_of_a_short_training_does_not_stay_near_the_first_weights(model):
    first, ema = model.weight.detach().clone(), EMA(model, decay=0.9999)
    with torch.no_grad():
        model.weight += 1
    for _ in range(100):
        ema.update_parameters(model)

    ema.swap(model)

    torch.testing.assert_close(model.weight.detach(), first + 1, rtol=0, atol=1e-6)


def test_weights_come_back_after_the_context_even_if_it_fails(model):
    ema = EMA(model, decay=0.5)
    trained = train(model, ema)[-1]

    with pytest.raises(RuntimeError, match="within"), ema.swapped(model):
        raise RuntimeError("within")

    assert torch.equal(model.weight, trained)


def test_nested_contexts_hold_the_average_throughout(model):
    ema = EMA(model, decay=0.5)
    trained = train(model, ema)[-1]

    with ema.swapped(model):
        average = model.weight.detach().clone()
        with ema.swapped(model):
            assert torch.equal(model.weight, average)
        assert torch.equal(model.weight, average)

    assert not torch.equal(average, trained)
    assert torch.equal(model.weight, trained)


def test_average_without_a_step_changes_nothing(model):
    ema = EMA(model, decay=0.5)
    before = model.weight.detach().clone()

    with ema.swapped(model):
        assert torch.equal(model.weight, before)
