"""The device of a worker, and the memory that it uses there."""

from __future__ import annotations

import psutil
import torch

from varuna.devices.accelerator import is_accelerator, peak_memory_bytes
from varuna_proto.environment import WorkerEnvironment

__all__ = ["choose_device", "make_device_current", "measure_memory_bytes"]


def choose_device(
    environment: WorkerEnvironment, device: int | str | torch.device | None, local_rank: int
) -> torch.device:
    """The device of this worker: of the launcher's kind, with the script's index (else the local rank).

    torchrun and its like name no device: there the script's kind counts.

    Raises ValueError when the script asks for another kind of device than the launcher gave it.
    """
    given = torch.device(environment.device)
    index: int | None
    if isinstance(device, str | torch.device):
        requested = torch.device(device)
        if environment.launcher_map and requested.type == "cpu":
            given = requested
        if requested.type != given.type:
            raise ValueError(
                f"device={str(requested)!r}, but the launcher gave this worker a {given.type!r} device: leave it out"
            )
        index = requested.index if ":" in str(requested) else None
    else:
        index = device if device is not None and device >= 0 else None
    if not is_accelerator(given):
        return given
    if index is None and ":" in environment.device:
        index = given.index
    if index is None:
        index = local_rank if local_rank >= 0 else environment.local_rank
    return torch.device(given.type, index)


def make_device_current(device: torch.device) -> torch.device:
    """Makes `device` the target of calls that name no device, and returns it."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    return device


def measure_memory_bytes(device: torch.device) -> int:
    """The most of an accelerator's memory that this process has used; on the CPU, its resident memory now."""
    if is_accelerator(device):
        return peak_memory_bytes(device)
    resident: int = psutil.Process().memory_info().rss
    return resident
