"""Host memory for copies: whether a VM has enough for them, and memory that is used again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from varuna.checkpoint.storage.store import allocate_aligned
from varuna.worker.worker import WorkerProcess
from varuna_proto.group_memory import read_group_memory

__all__ = ["MemorySharers", "SpareMemory", "count_available_bytes", "describe_shortage"]


class SpareMemory:
    """Memory of copies that are no longer needed, for the next ones: fresh pages cost more than what goes into them.

    Not safe with threads: a lock of whoever has it guards it.
    """

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    def add(self, memory: memoryview) -> None:
        self._spare.append(memory)

    def clear(self) -> None:
        self._spare = []

    def take(self, size: int, dropped: Sequence[memoryview]) -> memoryview:
        """Returns memory of at least `size` bytes. `dropped`: memory of the copies that the new one replaces."""
        self._spare += dropped
        fitting = next((memory for memory in self._spare if len(memory) >= size), None)
        if fitting is None:
            self._spare = self._spare[len(dropped) :]  # copies have grown: these are too small from now on
            return allocate_aligned(size)
        self._spare = [memory for memory in self._spare if memory is not fitting]
        return fitting


class MemorySharers:
    """The ranks of a generation that share this machine's memory: those with the same address."""

    def __init__(self, worker: WorkerProcess, name: str) -> None:
        """All ranks make one of the same name in the same step, and wait for one another. Raises as a worker that
        leaves."""
        own = worker.rendezvous.own_address()
        hosts = worker.rendezvous.exchange_values(f"{name}/host", worker.topology.everyone, own)
        self.count = hosts.count(own)
        """This rank is one of them."""


def describe_shortage(needed: int, largest_part: float) -> str:
    """Why `needed` bytes are too much, which may be `largest_part` of the host memory that is available; empty: there
    is room, as also where nobody knows what is available."""
    available = count_available_bytes()
    if available is None or needed <= largest_part * available:
        return ""
    return (
        f"there is not enough host memory on this VM: {needed / 2**30:.3g} GiB are needed, and {largest_part:.0%} of "
        f"the {available / 2**30:.3g} GiB that are free may be used"
    )


def count_available_bytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Host memory that this process can get without swapping, in what its control groups leave to it; None: not
    known."""
    group = read_group_memory()
    known = [] if group is None else [group.available]
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                known.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    return min(known, default=None)
