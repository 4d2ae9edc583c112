"""PyTorch's own optimizers step one part of the parameters while the gradients of the next part come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

from varuna.optim.host_parameters import ArrivingGradients, HostParameters
from varuna.optim.script_steps import step_optimizers, steps_each_by_itself, take_over_steps

Make = Callable[[Sequence[nn.Parameter]], Optimizer]

MAKERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: AdamW(p, 0.1),
    "AdamW, foreach": lambda p: AdamW(p, 0.1, foreach=True),
    "Adam, fused": lambda p: Adam(p, 0.1, fused=True, amsgrad=True),
    "NAdam": lambda p: NAdam(p, 0.1),
    "RMSprop": lambda p: RMSprop(p, 0.1, momentum=0.5),
    "Adagrad": lambda p: Adagrad(p, 0.1),
    "Adadelta": lambda p: Adadelta(p, 0.1),
    "Adafactor": lambda p: Adafactor(p, 0.1),
    "Muon": lambda p: Muon(p, 0.1),
    "groups": lambda p: AdamW([{"params": [p[0], p[2]], "lr": 0.3}, {"params": [p[1], p[3]]}], 0.1),
}


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3 + i, 4, generator=generator)) for i in range(4)]


def set_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def parts_of(parameters: Sequence[nn.Parameter]) -> list[ArrivingGradients]:
    return [ArrivingGradients(tuple(parameters[i : i + 2]), None) for i in range(0, len(parameters), 2)]


@pytest.mark.parametrize("name", MAKERS)
def test_an_update_in_parts_is_the_same_update(name: str) -> None:
    states: list[tuple[list[Tensor], list[Any]]] = []
    for in_parts in (False, True):
        parameters = make_parameters()
        optimizer = MAKERS[name](parameters)
        take_over_steps(optimizer)
        scheduler = StepLR(optimizer, 1)
        assert steps_each_by_itself(optimizer)
        groups = optimizer.param_groups
        for step in range(3):
            set_gradients(parameters, step)
            step_optimizers([optimizer], 1.0, parts_of(parameters) if in_parts else ())
            scheduler.step()
        assert optimizer.param_groups is groups
        state = [value for p in parameters for _, value in sorted(optimizer.state[p].items())]
        states.append(([p.detach() for p in parameters], state))
    for one, other in zip(*[[*found, *state] for found, state in states], strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


class CountingAdamW(AdamW):
    """An optimizer of the script's own."""


def make_wrapped() -> Optimizer:
    optimizer = AdamW(make_parameters(), 0.1)
    own = optimizer.step
    optimizer.step = lambda *args: own(*args)  # type: ignore[method-assign,assignment]
    return optimizer


def make_hooked() -> Optimizer:
    optimizer = AdamW(make_parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: CountingAdamW(make_parameters(), 0.1),
        lambda: LBFGS(make_parameters(), 0.1),
        make_wrapped,
        make_hooked,
    ],
    ids=["a class of the script's", "LBFGS", "a wrapped step", "a hook"],
)
def test_an_optimizer_that_may_look_at_all_parameters_steps_them_at_once(make: Callable[[], Optimizer]) -> None:
    optimizer = make()
    take_over_steps(optimizer)
    assert not steps_each_by_itself(optimizer)


def test_gradients_come_in_parts_of_about_a_size() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    host = HostParameters(dict(layers.named_parameters()))
    host.part_bytes = 4 * (16 + 4)
    layers[1].bias.requires_grad_(False)
    layers(torch.ones(1, 4)).sum().backward()
    names = {id(master): name for name, master in host.parameters.items()}
    parts = [[names[id(p)] for p in part.parameters] for part in host.start_moving_gradients()]
    assert parts == [["0.weight", "0.bias"], ["1.weight", "2.weight"], ["2.bias"]]
    assert all(parameter.grad is None for parameter in layers.parameters())
