"""The loss scale's rules, and what the two arguments for precision mean together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from varuna.optim.precision import GROWTH_STEPS, LossScaler, TrainingPrecision

CPU = torch.device("cpu")


def test_a_dynamic_scale_halves_at_once_and_doubles_with_patience() -> None:
    scaler = LossScaler("dynamic", 2**10, 1.0)
    scaler.update_scale(overflow=True)
    assert scaler.scale == 2**9
    for _ in range(GROWTH_STEPS - 1):
        scaler.update_scale(overflow=False)
    assert scaler.scale == 2**9
    scaler.update_scale(overflow=False)
    assert scaler.scale == 2**10
    for _ in range(GROWTH_STEPS - 1):
        scaler.update_scale(overflow=False)
    scaler.update_scale(overflow=True)  # the count begins again
    scaler.update_scale(overflow=False)
    assert scaler.scale == 2**9


@settings(deadline=None)
@given(steps=st.lists(st.booleans(), max_size=60), least=st.sampled_from([1.0, 2.0**18]))
def test_a_dynamic_scale_stays_a_power_of_two_within_its_bounds(steps: list[bool], least: float) -> None:
    scaler = LossScaler("dynamic", 2**20, least)
    for overflow in steps:
        before = scaler.scale
        scaler.update_scale(overflow)
        assert scaler.scale == (max(least, before / 2) if overflow else before)
        assert math.frexp(scaler.scale)[0] == 0.5


def test_a_scale_does_not_grow_for_ever() -> None:
    scaler = LossScaler("dynamic", 2**24, 1.0)
    for _ in range(GROWTH_STEPS):
        scaler.update_scale(overflow=False)
    assert scaler.scale == 2**24
    chosen = LossScaler("dynamic", 2**30, 1.0)  # one that begins above grows no further, but is not cut either
    for _ in range(GROWTH_STEPS):
        chosen.update_scale(overflow=False)
    assert chosen.scale == 2**30


def test_a_fixed_scale_stays() -> None:
    scaler = LossScaler(128.0, 2**20, 1.0)
    for overflow in [True] + [False] * GROWTH_STEPS:
        scaler.update_scale(overflow)
    scaler.load_state_dict(LossScaler("dynamic", 2**20, 1.0).state_dict())
    assert scaler.scale == 128.0


def test_the_state_brings_scale_and_patience_back() -> None:
    scaler, again = LossScaler("dynamic", 2**10, 1.0), LossScaler("dynamic", 2**20, 1.0)
    scaler.update_scale(overflow=True)
    for _ in range(GROWTH_STEPS - 1):
        scaler.update_scale(overflow=False)
    again.load_state_dict(scaler.state_dict())
    again.update_scale(overflow=False)
    assert again.scale == 2**10


@pytest.mark.parametrize(
    "scales", [(0.0, 1.0, 1.0), (-2.0, 1.0, 1.0), (math.inf, 1.0, 1.0), ("dynamic", 8.0, 0.0), ("dynamic", 4.0, 8.0)]
)
def test_scales_that_are_none(scales: tuple[Any, float, float]) -> None:
    with pytest.raises(ValueError, match="scale"):
        LossScaler(*scales)


def test_what_is_asked_for() -> None:
    chosen = TrainingPrecision.from_arguments
    assert chosen(False, None, CPU) == chosen(False, torch.float32, CPU)
    assert not chosen(False, None, CPU).is_mixed
    assert chosen(True, None, CPU).dtype is torch.float16
    assert chosen(True, None, CPU).needs_scale
    assert chosen(False, torch.bfloat16, CPU).is_mixed
    assert not chosen(False, torch.bfloat16, CPU).needs_scale
    with pytest.raises(ValueError, match="contradicts"):
        chosen(True, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        chosen(False, torch.int8, CPU)


def test_what_is_trained_must_be_fp32() -> None:
    half = nn.Linear(2, 2).half()
    TrainingPrecision.from_arguments(False, None, CPU).check_parameters(half.named_parameters())
    with pytest.raises(ValueError, match=r"parameter weight is torch\.float16"):
        TrainingPrecision.from_arguments(True, None, CPU).check_parameters(half.named_parameters())
    TrainingPrecision.from_arguments(True, None, CPU).check_parameters(half.requires_grad_(False).named_parameters())


def test_casts_of_parameters_last_for_a_pass_and_no_longer() -> None:
    precision, layer, x = TrainingPrecision(torch.bfloat16, "cpu"), nn.Linear(3, 3), torch.ones(2, 3)

    def run() -> torch.Tensor:
        with precision.forward_context():
            return layer(x)

    with precision.pass_context():
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            before = run()  # a forward that is to be recomputed must not cost the later ones their gradients
        after = run()
        assert after.dtype is torch.bfloat16
        for _ in range(2):
            run().sum().backward()  # the cast is shared, and goes through as many backwards as there are forwards
    assert torch.equal(layer.bias.grad, torch.full((3,), 4.0))
    with torch.no_grad():
        layer.weight.add_(1.0)
    with precision.pass_context():
        assert not torch.equal(run(), before)
