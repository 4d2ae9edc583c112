"""Which errors are for want of a device's memory, and that the others are not."""

from __future__ import annotations

import pytest
import torch

from varuna.devices.out_of_memory import find_memory_error, measure_shortage
from varuna.distributed.departure import Departure
from varuna.distributed.groups import RankGroup

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError(CUBLAS),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        torch.distributed.DistBackendError(NCCL),
        RuntimeError(NCCL.replace("failure 2 ", "failure ")),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_libraries_say_it_in_words_of_their_own(error: Exception) -> None:
    assert find_memory_error(error) is error
    outer = ValueError("the script's own")
    outer.__cause__ = error
    assert find_memory_error(outer) is error
    other = ValueError("raised while the script handled the first")
    other.__context__ = error
    assert find_memory_error(other) is error


@pytest.mark.parametrize(
    "error",
    [
        None,
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError(CUBLAS),
        MemoryError(),
    ],
)
def test_other_errors_are_none(error: Exception | None) -> None:
    assert find_memory_error(error) is None


def test_an_error_that_the_script_has_put_aside_is_none() -> None:
    error = ValueError("raised from None")
    error.__context__, error.__suppress_context__ = RuntimeError(CUBLAS), True
    assert find_memory_error(error) is None


def test_errors_in_a_circle_come_to_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert find_memory_error(one) is None


def test_without_an_accelerator_there_are_no_figures() -> None:
    assert measure_shortage(torch.OutOfMemoryError("x")) is None


def test_a_collective_that_lacks_memory_is_not_a_lost_peer() -> None:
    def refuse() -> None:
        raise torch.distributed.DistBackendError(NCCL)

    departure = Departure(lambda _: None)
    group = RankGroup(None, (0, 1), departure)
    with pytest.raises(torch.distributed.DistBackendError, match="out of memory"):
        group._start([refuse])  # type: ignore[list-item]
    assert departure.exit_code is None
