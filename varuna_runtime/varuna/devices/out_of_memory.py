"""Errors for want of a device's memory: which ones are, and what the device had when memory was asked of it in vain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from varuna.devices.accelerator import find_accelerator, free_memory_bytes, peak_memory_bytes, total_memory_bytes

__all__ = ["MemoryFigures", "find_memory_error", "is_memory_error", "measure_shortage", "tolerating_memory_errors"]

_ELSEWHERE = re.compile(
    r"CU[A-Z]+_STATUS_ALLOC_FAILED"  # cuBLAS, cuDNN, cuSOLVER: a handle or a workspace
    r"|(?:CUDA|HIP)(?: driver)? error: out of memory"
    r"|(?:CUDA|HIP) out of memory"
    r"|(?:Cuda|HIP) failure \d* ?'out of memory'"  # NCCL, RCCL: the last line of their error
    r"|(?:rocblas|hipblas)_status_(?:memory_error|alloc_failed)"
    r"|UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)",
    re.IGNORECASE,
)
"""How libraries that allocate beside torch's allocator say it, in a RuntimeError."""
_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class MemoryFigures(NamedTuple):
    asked_bytes: int
    """0: the error does not say."""
    free_bytes: int
    limit_bytes: int
    """All memory of the device."""
    peak_bytes: int
    """The most that tensors of this process have had."""


def is_memory_error(error: BaseException) -> bool:
    """Whether a device had no memory left, be it for a tensor or for a library beside torch."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _ELSEWHERE.search(str(error)) is not None


@contextmanager
def tolerating_memory_errors() -> Iterator[None]:
    """The block may end early for want of a device's memory."""
    try:
        yield
    except RuntimeError as error:
        if not is_memory_error(error):
            raise


def find_memory_error(error: BaseException | None) -> BaseException | None:
    """The error itself, or the one that it came of, if that is one for want of memory; None: there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if is_memory_error(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def measure_shortage(error: BaseException) -> MemoryFigures | None:
    """The figures of this process's device, if `error` came of a want of its memory; None: it did not.

    To be called while the error's traceback still holds the tensors that were there. What cannot be read any longer is
    0.
    """
    found, kind = find_memory_error(error), find_accelerator()
    if found is None or kind is None:
        return None
    asked = _ASKED.search(str(found))
    asked_bytes = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0
    try:
        device = torch.device(kind.type, torch.accelerator.current_device_index())
        there = free_memory_bytes(device), total_memory_bytes(device), peak_memory_bytes(device)
    except RuntimeError:  # the error has left the device unusable
        there = (0, 0, 0)
    return MemoryFigures(asked_bytes, *there)
