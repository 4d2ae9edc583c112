"""Scripts that drop what they have accumulated, and several optimizers that they step themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from varuna import Varuna
from varuna.optim.parameter_updater import ParameterUpdater, StepGradient

OFFLOAD = pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])


class Slopes(nn.Module):
    """The gradient of each parameter is the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.first + self.second)).sum(1).mean()


def batch(value: float) -> dict[str, Tensor]:
    return {"x": torch.full((2, 2), value)}


def wrapped(**options: Any) -> Varuna:
    return Varuna(Slopes(), get_batch_fn=batch(1.0), **{"accumulate": True, **options})


def values(model: nn.Module) -> tuple[list[float], list[float]]:
    return model.first.tolist(), model.second.tolist()  # type: ignore[operator]


# ---------------------------------------------------------------- all gradients at once


def by_optimizer(model: Varuna, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def by_model(model: Varuna, optimizer: Optimizer) -> None:
    model.zero_grad()


def by_hand(model: Varuna, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def to_zeros(model: Varuna, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


@OFFLOAD
@pytest.mark.parametrize("drop", [by_optimizer, by_model, by_hand, to_zeros])
@pytest.mark.parametrize("steps_between", [False, True], ids=["at once", "after optimizer.step()"])
def test_what_was_dropped_is_neither_in_the_update_nor_in_the_norm(
    drop: Callable[[Varuna, Optimizer], None], steps_between: bool, offload: bool
) -> None:
    model = wrapped(offload_optimizer=offload)
    optimizer = SGD(model.parameters(), lr=1.0)
    model.set_optimizer(optimizer)
    model.step(batch(100.0))
    drop(model, optimizer)
    if steps_between:
        optimizer.step()
        drop(model, optimizer)
    assert model.step(batch(1.0))[2] == pytest.approx(2.0)
    optimizer.step()
    assert values(model) == ([-1.0, -1.0], [-1.0, -1.0])


@OFFLOAD
def test_accumulated_gradients_can_be_read_where_the_optimizer_is(offload: bool) -> None:
    model = wrapped(offload_optimizer=offload)
    optimizer = SGD(model.parameters(), lr=1.0)
    model.set_optimizer(optimizer)
    for value, mean in ((1.0, 1.0), (3.0, 2.0)):
        model.step(batch(value))
        assert model.first.grad.tolist() == [mean, mean]
    optimizer.step()
    optimizer.zero_grad()
    assert values(model) == ([-2.0, -2.0], [-2.0, -2.0])


def test_gradients_of_parameters_that_no_optimizer_holds_keep_nothing_alive() -> None:
    model = wrapped()
    optimizer = SGD([model.first], lr=1.0)
    model.set_optimizer(optimizer)
    model.step(batch(100.0))
    optimizer.zero_grad()
    model.step(batch(1.0))
    optimizer.step()
    assert values(model) == ([-1.0, -1.0], [0.0, 0.0])


@pytest.mark.parametrize("is_anywhere", [False, True])
def test_a_stage_without_a_gradient_follows_the_others(is_anywhere: bool) -> None:
    frozen = {"weight": nn.Parameter(torch.ones(2), requires_grad=False)}
    asked: list[bool] = []

    def agree(here: bool) -> bool:
        asked.append(here)
        return is_anywhere

    updater = ParameterUpdater(frozen, frozen, host=None, average=None, accumulate=True, is_anywhere=agree)
    optimizer = SGD(frozen.values(), lr=1.0)
    updater.set_optimizers([optimizer])
    updater.agree_on_drop()
    assert not asked  # nothing awaits an update
    gradient = StepGradient(weight=2.0, correction=1.0, norm=1.0, overflow=False)
    updater.finish_step(gradient, None, skip=False)
    updater.watch_gradients()
    optimizer.zero_grad()
    updater.check_gradients()
    assert updater.accumulation.is_pending
    updater.agree_on_drop()
    assert asked == [False]
    assert updater.accumulation.is_pending is is_anywhere


def test_optimizers_that_varuna_steps_can_be_copied_and_stored() -> None:
    model = wrapped()
    optimizer = AdamW(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)
    model.step(batch(1.0))
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    stored = pickle.loads(pickle.dumps(optimizer))
    for other in (twin, stored):
        assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        other.zero_grad()
    assert model.first.grad is not None


# ---------------------------------------------------------------- several optimizers


@OFFLOAD
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_one_optimizer_drops_its_parameters_gradients_only(to_none: bool, offload: bool) -> None:
    model, plain = wrapped(offload_optimizer=offload), Slopes()
    pairs = [[SGD([each.first], lr=1.0), SGD([each.second], lr=1.0)] for each in (model, plain)]
    model.set_optimizer(pairs[0])
    for number, value in enumerate((100.0, 1.0, 3.0, 5.0), start=1):
        norm = model.step(batch(value))[2]
        (plain(**batch(value)) / 2).backward()
        if number % 2 == 0:
            gradients = [p.grad for p in plain.parameters() if p.grad is not None]
            assert norm == pytest.approx(float(nn.utils.get_total_norm(gradients)))
        for first, second in pairs:
            if number == 1:
                first.zero_grad(set_to_none=to_none)
            if number % 2 == 0:
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
    assert values(model) == values(plain)


Loop = Callable[[int, Optimizer, Optimizer], Iterable[Optimizer]]
"""The optimizers that the script steps after each iteration, in their order."""

TOGETHER: Mapping[str, Loop] = {
    "both": lambda i, a, b: [a, b] if i % 2 else [],
    "the other order": lambda i, a, b: [b, a] if i % 2 else [],
    "changing order": lambda i, a, b: ([a, b] if i % 4 == 1 else [b, a]) if i % 2 else [],
    "each iteration": lambda i, a, b: [a, b],
}


@pytest.mark.parametrize("loop", TOGETHER.values(), ids=TOGETHER)
def test_optimizers_that_are_stepped_together_make_one_update(loop: Loop) -> None:
    model, plain = wrapped(), Slopes()
    pairs = [[SGD([each.first], lr=1.0), AdamW([each.second], lr=0.1)] for each in (model, plain)]
    model.set_optimizer(pairs[0])
    every = 1 if loop is TOGETHER["each iteration"] else 2
    for i in range(6):
        model.step(batch(float(i)))
        (plain(**batch(float(i))) / every).backward()
        for pair in pairs:
            for optimizer in loop(i, *pair):
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


APART: Mapping[str, tuple[Loop, int]] = {
    "one less often": (lambda i, a, b: [a, *([b] if i % 4 == 3 else [])], 1),
    "one less often, first": (lambda i, a, b: [*([b] if i % 4 == 3 else []), a], 1),
    "one more often": (lambda i, a, b: [b, *([a] if i % 3 == 0 else [])], 2),
    "in turns": (lambda i, a, b: [b if i % 2 else a], 1),
    "one never": (lambda i, a, b: [a], 1),
}
"""With the number of updates before the script is refused."""


@pytest.mark.parametrize(("loop", "made"), APART.values(), ids=APART)
def test_optimizers_that_are_stepped_at_different_rates_are_refused(loop: Loop, made: int) -> None:
    model = wrapped()
    first, second = SGD([model.first], lr=1.0), AdamW([model.second], lr=0.1)
    model.set_optimizer([first, second])

    def train() -> None:
        for i in range(8):
            model.step(batch(1.0))
            for optimizer in loop(i, first, second):
                optimizer.step()
                optimizer.zero_grad()

    here = r"(AdamW|SGD)\.step\(\) (at test_dropped_gradients\.py:\d+ in train|\(not called yet\))"
    with pytest.raises(RuntimeError, match=rf"^{here} and {here} are called at different rates.* under the same cond"):
        train()
    assert values(model)[0] == [-made, -made]


def test_different_rates_are_refused_where_each_step_updates_too() -> None:
    model = wrapped(accumulate=False)
    first, second = SGD([model.first], lr=1.0), AdamW([model.second], lr=0.1)
    model.set_optimizer([first, second])
    for _ in range(3):
        model.step(batch(1.0))
        for optimizer in (first, second):
            step_elsewhere(optimizer)
    for _ in range(3):
        model.step(batch(1.0))
        step_elsewhere(first)
    with pytest.raises(RuntimeError, match=r"AdamW\.step\(\) at .*SGD\.step\(\) at .*under the same condition"):
        step_elsewhere(second)


def test_an_optimizer_that_the_script_never_steps_is_no_fault_where_each_step_updates() -> None:
    model = wrapped(accumulate=False)
    first, second = SGD([model.first], lr=1.0), SGD([model.second], lr=1.0)
    model.set_optimizer([first, second])
    for _ in range(4):
        model.step(batch(1.0))
        step_elsewhere(first)
    assert values(model) == ([-4.0, -4.0], [-4.0, -4.0])


def step_elsewhere(optimizer: Optimizer) -> None:
    optimizer.step()
