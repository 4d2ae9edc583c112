"""What an optimizer costs: the memory that it keeps per parameter, and the time of its step. On the host that has the
gradients' way there and the parameters' way back in it.

Both are measured on a copy of it with a parameter made for this purpose. The optimizer itself does not change.
"""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.calibration.clock import ComputeClock
from varuna.devices.accelerator import is_accelerator, peak_memory_bytes, reset_peak_memory
from varuna.devices.pinned_arena import PinnedArena
from varuna.optim.optimizers import Optimizers, list_optimizers
from varuna.optim.script_steps import steps_each_by_itself

__all__ = [
    "ADAM_MEMORY",
    "HostCopies",
    "OptimizerCosts",
    "OptimizerMemory",
    "OptimizerSetup",
    "OptimizerTime",
    "measure_optimizer",
    "measure_step_bytes",
    "number_holders",
    "time_host_copies",
    "time_optimizer",
]

_log = structlog.get_logger(__name__)

_LARGE = 1024 * 1024
"""Elements: so many that no cache holds what a step goes through."""
_STEPS = 5
_PROBES = 16
"""How many parameters a model has at least."""


class OptimizerMemory:
    """What an optimizer keeps per parameter: bytes per element, and bytes for any size."""

    def __init__(self, per_element: float, fixed: int) -> None:
        self.per_element = per_element
        self.fixed = fixed

    def bytes_for(self, elements: int) -> int:
        return round(self.per_element * elements) + self.fixed


ADAM_MEMORY = OptimizerMemory(8.0, 0)
"""Two fp32 numbers per parameter."""

_AVERAGE_BYTES = 4.0
"""A moving average keeps one fp32 number per parameter."""


def measure_optimizer(optimizer: Optimizer, *, averaged: bool = False) -> OptimizerMemory:
    """What `optimizer` will keep. One that cannot be copied is taken to keep two elements each, as Adam does.

    `averaged`: a moving average of the parameters is kept, too, of their size.
    """
    twin, [probe] = _copy_optimizer(optimizer, 256)
    average = float(probe.element_size()) if averaged else 0.0
    try:
        twin.step()
    except _COPY_ERRORS as error:
        _log.warning("optimizer state size is not known", optimizer=type(optimizer).__name__, error=str(error))
        return OptimizerMemory(2.0 * probe.element_size() + average, 0)
    state = twin.state.get(probe, {})
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    sized = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim() > 0)
    fixed = sum(tensor.element_size() for tensor in tensors if tensor.dim() == 0)
    return OptimizerMemory(sized / probe.numel() + average, fixed)


@dataclass(frozen=True)
class HostCopies:
    """The time in which one element moves between the device and the host."""

    gradient_us: float
    """To the host."""
    parameter_us: float
    """Back to the device."""


@dataclass(frozen=True)
class OptimizerTime:
    """The time of a step."""

    tensor_us: float
    """For each parameter of any size."""
    element_us: float

    def scale_times(self, factor: float) -> OptimizerTime:
        return OptimizerTime(self.tensor_us * factor, self.element_us * factor)

    def add_copies(self, copies: HostCopies, *, in_parts: bool) -> OptimizerTime:
        """The time of a step on the host with what it moves.

        `in_parts`: the gradients of one part of the parameters move while those of the part before are stepped, as in
        training (`varuna.optim.host_parameters`).
        """
        step_us = self.element_us
        stepped_us = max(copies.gradient_us, step_us) if in_parts else copies.gradient_us + step_us
        return replace(self, element_us=stepped_us + copies.parameter_us)

    def us_for(self, tensors: int, elements: int) -> float:
        return self.tensor_us * tensors + self.element_us * elements


@dataclass(frozen=True)
class OptimizerCosts:
    """The costs of all optimizers of a script. A parameter that none of them holds counts as the first one's."""

    optimizers: Sequence[Optimizer]
    memory: Sequence[OptimizerMemory]
    """Of each optimizer; at least one."""
    step: Sequence[OptimizerTime]
    """Of each optimizer."""
    step_bytes: Sequence[float] = ()
    """Of each optimizer, per element: what its step takes on the device for a while. Empty: nothing."""

    def scale_times(self, factor: float) -> OptimizerCosts:
        """Multiplies the time of each step with `factor`."""
        return replace(self, step=[each.scale_times(factor) for each in self.step])

    def to_json(self) -> dict[str, Any]:
        """The numbers, for other ranks, which have optimizers of their own."""
        return {
            "memory": [[each.per_element, each.fixed] for each in self.memory],
            "step": [[each.tensor_us, each.element_us] for each in self.step],
            "step_bytes": list(self.step_bytes),
        }

    @classmethod
    def from_json(cls, optimizers: Sequence[Optimizer], numbers: dict[str, Any]) -> OptimizerCosts:
        return cls(
            optimizers,
            [OptimizerMemory(per_element, fixed) for per_element, fixed in numbers["memory"]],
            [OptimizerTime(tensor_us, element_us) for tensor_us, element_us in numbers["step"]],
            numbers["step_bytes"],
        )

    def step_bytes_for(self, parameters: Iterable[Tensor]) -> int:
        if not self.step_bytes:
            return 0
        holder = number_holders(self.optimizers)
        return round(sum(self.step_bytes[holder.get(id(p), 0)] * p.numel() for p in parameters))

    def bytes_for(self, parameters: Iterable[Tensor]) -> int:
        holder = number_holders(self.optimizers)
        return sum(self.memory[holder.get(id(p), 0)].bytes_for(p.numel()) for p in parameters)

    def us_for(self, parameters: Iterable[Tensor]) -> float:
        holder = number_holders(self.optimizers)
        return sum((self.step[holder.get(id(p), 0)].us_for(1, p.numel()) for p in parameters), 0.0)


@dataclass(frozen=True)
class OptimizerSetup:
    """The optimizer, or several, that training will use, and where it keeps its state."""

    optimizers: Optimizers = ()
    """Empty: not known yet. Then its memory is taken to be Adam's, and its step counts as free."""
    on_device: bool = True
    """Whether the state is on the device; else it is on the host."""
    averaged: bool = False
    """Whether a moving average of the parameters is kept beside the state."""

    def measure_memory(self) -> list[OptimizerMemory]:
        """Of each optimizer, in the device's memory; of one where none is known."""
        optimizers = self.list_known()
        if not self.on_device:
            return [OptimizerMemory(0.0, 0) for _ in optimizers or (None,)]
        if not optimizers:
            average = _AVERAGE_BYTES if self.averaged else 0.0
            return [OptimizerMemory(ADAM_MEMORY.per_element + average, ADAM_MEMORY.fixed)]
        return [measure_optimizer(each, averaged=self.averaged) for each in optimizers]

    def list_known(self) -> tuple[Optimizer, ...]:
        return () if self.optimizers == () else list_optimizers(self.optimizers)

    def measure_costs(self, device: torch.device, clock: ComputeClock) -> OptimizerCosts:
        """As on cores that no other rank uses."""
        memory = self.measure_memory()
        stepped_on = device if self.on_device else torch.device("cpu")
        optimizers = self.list_known()
        times = [time_optimizer(each, stepped_on, clock) for each in optimizers]
        if not self.on_device:
            times = [
                time.add_copies(time_host_copies(each, device, clock), in_parts=steps_each_by_itself(each))
                for time, each in zip(times, optimizers, strict=True)
            ]
        temporary = [measure_step_bytes(each, stepped_on) for each in optimizers]
        return OptimizerCosts(optimizers, memory, times or [OptimizerTime(0.0, 0.0)], temporary)


def number_holders(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """The number of the optimizer that holds a parameter, by the parameter's id."""
    return {
        id(parameter): number
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def time_optimizer(optimizer: Optimizer, device: torch.device, clock: ComputeClock) -> OptimizerTime:
    """Times a step of `optimizer` on `device`. An optimizer that cannot be copied counts as free."""
    try:
        small_us, large_us = (_time_step(optimizer, elements, device, clock) for elements in (1, _LARGE))
    except _COPY_ERRORS as error:
        _log.warning("optimizer time is not known", optimizer=type(optimizer).__name__, error=str(error))
        return OptimizerTime(0.0, 0.0)
    return OptimizerTime(small_us, max(0.0, large_us - small_us) / _LARGE)


def time_host_copies(optimizer: Optimizer, device: torch.device, clock: ComputeClock) -> HostCopies:
    """Times what a step of `optimizer` on the host moves from and to `device`."""
    (small_out, small_back), (large_out, large_back) = (
        _time_copies(elements, _find_example(optimizer).dtype, device, clock) for elements in (1, _LARGE)
    )
    return HostCopies(max(0.0, large_out - small_out) / _LARGE, max(0.0, large_back - small_back) / _LARGE)


def _time_copies(elements: int, dtype: torch.dtype, device: torch.device, clock: ComputeClock) -> tuple[float, float]:
    """The medians in microseconds of some copies to the host and back, after the first."""
    on_device = torch.ones(elements, dtype=dtype, device=device)
    if is_accelerator(device):
        on_host = PinnedArena().make_tensor((elements,), (1,), dtype)
    else:
        on_host = torch.empty(elements, dtype=dtype)
    times_us = []
    with clock.watch_sharing():
        for _ in range(_STEPS + 1):
            started_us = clock.now_us()
            on_host.copy_(on_device, non_blocking=True)
            arrived_us = clock.now_us()
            on_device.copy_(on_host, non_blocking=True)
            times_us.append((arrived_us - started_us, clock.now_us() - arrived_us))
    out_us, back_us = zip(*times_us[1:], strict=True)
    return statistics.median(out_us), statistics.median(back_us)


def measure_step_bytes(optimizer: Optimizer, device: torch.device) -> float:
    """Bytes per element that a step takes on an accelerator beside the state, for a while; 0 elsewhere.

    One that goes through all parameters at once (`foreach`) has temporaries of all their elements, one that goes
    through one after the other of a part of them only.
    """
    if not is_accelerator(device):
        return 0.0
    try:
        twin, probes = _copy_optimizer(optimizer, _LARGE // _PROBES, device, count=_PROBES)
        twin.step()
        before = reset_peak_memory(device)
        twin.step()
    except _COPY_ERRORS as error:
        _log.warning("optimizer temporaries are not known", optimizer=type(optimizer).__name__, error=str(error))
        return 0.0
    return (peak_memory_bytes(device) - before) / sum(probe.numel() for probe in probes)


def _time_step(optimizer: Optimizer, elements: int, device: torch.device, clock: ComputeClock) -> float:
    """The median in microseconds of some steps after the first, which makes the state."""
    twin, _ = _copy_optimizer(optimizer, elements, device)
    times_us = []
    with clock.watch_sharing():
        for _ in range(_STEPS + 1):
            started_us = clock.now_us()
            twin.step()
            times_us.append(clock.now_us() - started_us)
    return statistics.median(times_us[1:])


def _find_example(optimizer: Optimizer) -> Tensor:
    """One of its parameters, or a tensor of the default type."""
    parameters = optimizer.param_groups[0]["params"]
    return parameters[0] if parameters else torch.empty(0)


_COPY_ERRORS = (AttributeError, KeyError, RuntimeError, TypeError)


def _copy_optimizer(
    optimizer: Optimizer, elements: int, device: torch.device | None = None, count: int = 1
) -> tuple[Optimizer, list[nn.Parameter]]:
    """A copy without state, with parameters of its own that have gradients, of so many elements each."""
    group, like = optimizer.param_groups[0], _find_example(optimizer)
    probes = [
        nn.Parameter(torch.zeros(elements, 1, dtype=like.dtype, device=device or like.device)) for _ in range(count)
    ]
    for probe in probes:
        probe.grad = torch.ones_like(probe)
    twin = copy.copy(optimizer)
    # Not through add_param_group, which optimizers may override: `step` reads these two attributes only.
    twin.param_groups = [{**group, "params": probes}]
    twin.state = defaultdict(dict)
    return twin, probes
