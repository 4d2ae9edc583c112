"""The memory of emulated VMs over time: how much more a survivor's VM takes at a morph than in undisturbed training."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["MemorySample", "VmMemory", "find_extra_bytes"]

_EVERY_S = 0.1
_SAMPLES_BETWEEN_LISTINGS = 5
"""Listing the processes reads much of /proc, so it happens only every half second."""
_COUNTED = ("RssAnon:", "RssShmem:")
"""What processes do not share with files. Pages that a forked process has not written to count in each process."""


class MemorySample(NamedTuple):
    at: float
    bytes_by_vm: Mapping[str, int]


class VmMemory:
    """Samples the memory of each VM's processes, in a thread of its own, during a `with` block."""

    def __init__(self, agents: Mapping[str, int]) -> None:
        """`agents`: the process of each VM's agent."""
        self._agents = agents
        self._samples: list[MemorySample] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> VmMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def copy_samples(self) -> list[MemorySample]:
        return list(self._samples)

    def _run(self) -> None:
        processes: dict[str, list[int]] = {}
        number = 0
        while not self._ends.wait(_EVERY_S):
            if number % _SAMPLES_BETWEEN_LISTINGS == 0:
                processes = {vm: _list_tree(pid) for vm, pid in self._agents.items()}
            number += 1
            used = {vm: sum(map(_read_bytes, pids)) for vm, pids in processes.items()}
            self._samples.append(MemorySample(time.time(), used))


def _list_tree(pid: int) -> list[int]:
    """The process and all that it has started; none if it is gone."""
    with suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _read_bytes(pid: int) -> int:
    with suppress(OSError), Path(f"/proc/{pid}/status").open() as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(_COUNTED))
    return 0


def find_extra_bytes(samples: Sequence[MemorySample], killed_at: float, survivors: Sequence[str]) -> int | None:
    """By how much the peak of a survivor's VM after the kill exceeds its peak before, at most.

    None if no survivor has samples of both.
    """
    extra = []
    for vm in survivors:
        before = [sample.bytes_by_vm.get(vm, 0) for sample in samples if sample.at <= killed_at]
        after = [sample.bytes_by_vm.get(vm, 0) for sample in samples if sample.at > killed_at]
        if before and after:
            extra.append(max(after) - max(before))
    return max(extra, default=None)
