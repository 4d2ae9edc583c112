"""The one interface to accelerators: CUDA, ROCm (which torch calls CUDA), XPU, and others that bring a device to torch.

Everything here exists since torch 2.6, the oldest that Varuna supports. Hence two detours: a stream of torch 2.6 is no
context manager, and `torch.accelerator` there knows nothing of memory, but the module of each kind of device does.

What only CUDA has is in `cuda_alone`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "default_device_kind",
    "find_accelerator",
    "fork_generators",
    "free_memory_bytes",
    "get_generator_state",
    "has_initialized_accelerator",
    "is_accelerator",
    "list_accelerators",
    "peak_memory_bytes",
    "record_event",
    "release_cached_memory",
    "reset_peak_memory",
    "seed_device_generator",
    "set_generator_state",
    "total_memory_bytes",
    "use_stream",
    "wait_for_device",
    "wait_for_event",
    "wait_for_stream",
]

_EVENT_POLL_S = 5e-5
"""How often a wait looks whether an event has happened: a small part of what a copy of a boundary takes."""

_WITHOUT = frozenset({"cpu", "meta", "mps"})
"""Kinds of devices that are used like a CPU, or not at all: Apple's has neither streams of ours nor float64."""


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` has memory of its own, and streams that run its work beside the host."""
    return device.type not in _WITHOUT


def find_accelerator() -> torch.device | None:
    """The kind of accelerator of this machine, without an index; None without any."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return found if found is not None and is_accelerator(found) else None


def default_device_kind() -> str:
    """The kind of device for a process whose launcher names none: its machine's accelerator, or else the CPU."""
    return str(find_accelerator() or "cpu")


def list_accelerators() -> list[torch.device]:
    """The accelerators that this process may use."""
    kind = find_accelerator()
    return [] if kind is None else [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def has_initialized_accelerator() -> bool:
    """Whether this process uses an accelerator already."""
    # Not by `find_accelerator`: children that a process forks after it has counted its GPUs cannot use them.
    kinds = ("cuda", "xpu", torch._C._get_privateuse1_backend_name())
    modules = [getattr(torch, kind, None) for kind in kinds]
    return any(module is not None and module.is_initialized() for module in modules)


# ---------------------------------------------------------------- streams and events


@contextmanager
def use_stream(stream: torch.Stream) -> Iterator[None]:
    """Work that the block launches goes to `stream`."""
    index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # and its device
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def record_event(device: torch.device, timed: bool = False) -> torch.Event:
    """An event at the end of the work that the device's current stream has now."""
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait_for_event(event: torch.Event) -> None:
    """Waits until the event has happened, asleep.

    `Event.synchronize` spins on CUDA, and so takes a processor from the threads that feed the devices. (torch 2.13
    takes `blocking=True` for an event, and ignores it.)
    """
    while not event.query():
        time.sleep(_EVENT_POLL_S)


def wait_for_stream(device: torch.device) -> None:
    """Waits until the work that the device's current stream has now is done."""
    wait_for_event(record_event(device))


def wait_for_device(device: torch.device) -> None:
    """Waits until the work that all streams of the device have now is done."""
    torch.accelerator.synchronize(device)


# ---------------------------------------------------------------- memory


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory of the device that tensors of this process have had."""
    return int(_module(device).max_memory_allocated(device))


def reset_peak_memory(device: torch.device) -> int:
    """`peak_memory_bytes` counts from now on. Returns the device's memory that tensors of this process have now."""
    _module(device).reset_peak_memory_stats(device)
    return peak_memory_bytes(device)


def free_memory_bytes(device: torch.device) -> int:
    """The device's memory that no process uses."""
    return int(_module(device).mem_get_info(device)[0])


def total_memory_bytes(device: torch.device) -> int:
    """The memory that the device has."""
    return int(_module(device).mem_get_info(device)[1])


def release_cached_memory(devices: Iterable[torch.device]) -> None:
    """Gives the memory that the allocator keeps without need back to those of `devices` that are accelerators."""
    for kind in {torch.device(device.type) for device in devices if is_accelerator(device)}:
        _module(kind).empty_cache()


# ---------------------------------------------------------------- random numbers


def seed_device_generator(device: torch.device, seed: int) -> None:
    """Seeds the global generator of an accelerator; a CPU has none of its own."""
    if is_accelerator(device):
        _module(device).default_generators[device.index or 0].manual_seed(seed)


def get_generator_state(device: torch.device) -> Tensor | None:
    """The state of the global generator of an accelerator; None for a CPU."""
    if not is_accelerator(device):
        return None
    state: Tensor = _module(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Gives the global generator of an accelerator the state that `get_generator_state` returned."""
    _module(device).set_rng_state(state, device)


def fork_generators(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Restores the global generators of the CPU, and of those of `devices` that are accelerators, after the block."""
    own = [device for device in devices if is_accelerator(device)]
    kind = own[0].type if own else "cuda"  # which torch wants to know even without devices
    return torch.random.fork_rng(devices=own, device_type=kind)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
