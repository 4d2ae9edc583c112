"""What an optimizer costs: the memory that it keeps per parameter, and the time of its step.

Both are learnt from a copy of it with a parameter made up for this; the optimizer itself is left alone.
"""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.calibration.compute import Clock

__all__ = [
    "ADAM_MEMORY",
    "OptimizerCosts",
    "OptimizerMemory",
    "OptimizerTime",
    "measure_optimizer",
    "numbers_of_holders",
    "time_optimizer",
]

_log = structlog.get_logger(__name__)

_LARGE = 1024 * 1024
"""Elements: enough that no cache holds what a step goes through."""
_STEPS = 5


class OptimizerMemory:
    """What an optimizer keeps per parameter: bytes per element, and bytes whatever its size."""

    def __init__(self, per_element: float, fixed: int) -> None:
        self.per_element = per_element
        self.fixed = fixed

    def bytes_for(self, elements: int) -> int:
        return round(self.per_element * elements) + self.fixed


ADAM_MEMORY = OptimizerMemory(8.0, 0)
"""Two fp32 numbers per parameter."""


def measure_optimizer(optimizer: Optimizer, *, averaged: bool = False) -> OptimizerMemory:
    """What `optimizer` will keep. One that cannot be copied is taken to keep two elements each, as Adam does.

    `averaged`: a moving average of the parameters is kept, too, of their size.
    """
    twin, made_up = _twin(optimizer, 256)
    average = float(made_up.element_size()) if averaged else 0.0
    try:
        twin.step()
    except _NOT_COPIED as error:
        _log.warning("optimizer state size is not known", optimizer=type(optimizer).__name__, error=str(error))
        return OptimizerMemory(2.0 * made_up.element_size() + average, 0)
    state = twin.state.get(made_up, {})
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    sized = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim() > 0)
    fixed = sum(tensor.element_size() for tensor in tensors if tensor.dim() == 0)
    return OptimizerMemory(sized / made_up.numel() + average, fixed)


@dataclass(frozen=True)
class OptimizerTime:
    """Of a step."""

    tensor_us: float
    """For each parameter, whatever its size."""
    element_us: float

    def times(self, factor: float) -> OptimizerTime:
        return OptimizerTime(self.tensor_us * factor, self.element_us * factor)

    def us_for(self, tensors: int, elements: int) -> float:
        return self.tensor_us * tensors + self.element_us * elements


@dataclass(frozen=True)
class OptimizerCosts:
    """Of a script's optimizers together. A parameter that none of them holds is taken to be the first one's."""

    optimizers: Sequence[Optimizer]
    memory: Sequence[OptimizerMemory]
    """Of each; of one at least."""
    step: Sequence[OptimizerTime]
    """Of each."""

    def bytes_for(self, parameters: Iterable[Tensor]) -> int:
        holder = numbers_of_holders(self.optimizers)
        return sum(self.memory[holder.get(id(p), 0)].bytes_for(p.numel()) for p in parameters)

    def us_for(self, parameters: Iterable[Tensor]) -> float:
        holder = numbers_of_holders(self.optimizers)
        return sum((self.step[holder.get(id(p), 0)].us_for(1, p.numel()) for p in parameters), 0.0)


def numbers_of_holders(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """The number of the optimizer that holds a parameter, by the parameter's id."""
    return {
        id(parameter): number
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def time_optimizer(optimizer: Optimizer, device: torch.device, clock: Clock) -> OptimizerTime:
    """What a step of `optimizer` takes on `device`. One that cannot be copied is taken to cost nothing."""
    try:
        small_us, large_us = (_step_us(optimizer, elements, device, clock) for elements in (1, _LARGE))
    except _NOT_COPIED as error:
        _log.warning("optimizer time is not known", optimizer=type(optimizer).__name__, error=str(error))
        return OptimizerTime(0.0, 0.0)
    return OptimizerTime(small_us, max(0.0, large_us - small_us) / _LARGE)


def _step_us(optimizer: Optimizer, elements: int, device: torch.device, clock: Clock) -> float:
    """The median of some steps after the first, which makes the state."""
    twin, _ = _twin(optimizer, elements, device)
    times_us = []
    with clock.watching():
        for _ in range(_STEPS + 1):
            started_us = clock.now_us()
            twin.step()
            times_us.append(clock.now_us() - started_us)
    return statistics.median(times_us[1:])


_NOT_COPIED = (AttributeError, KeyError, RuntimeError, TypeError)


def _twin(optimizer: Optimizer, elements: int, device: torch.device | None = None) -> tuple[Optimizer, nn.Parameter]:
    """A copy without state, for one parameter of its own, which has a gradient."""
    group = optimizer.param_groups[0]
    like = group["params"][0] if group["params"] else torch.empty(0)
    made_up = nn.Parameter(torch.zeros(elements, 1, dtype=like.dtype, device=device or like.device))
    made_up.grad = torch.ones_like(made_up)
    twin = copy.copy(optimizer)
    # Not through add_param_group: optimizers may do anything there, and here is the whole of what `step` looks at.
    twin.param_groups = [{**group, "params": [made_up]}]
    twin.state = defaultdict(dict)
    return twin, made_up
