"""Which marks a replica makes: its ranks say so over the store of their generation.

The last stage ends each backward first. It announces a mark before the backward that leads to it, so every other stage
finds the announcement when it comes to the mark. It announces the next one when all stages have said what became of
this one: however far the first stage is behind, a mark that all have stays until they have a newer one.

A stage that gets no gradients waits for none, and may be far past a mark when the last one decides it. It trains
nothing, so its ranks make no marks: the last stage reports for them.

A series is what passes of a generation have in common until one does not count; the same mark may come again then.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from varuna.copies.share_marks import MarkKey
from varuna.distributed.rendezvous_store import read_values
from varuna.distributed.topology import Topology

__all__ = ["ReplicaMarks"]

_NOT_KEPT = "-"


class ReplicaMarks:
    """The part of one rank. Once rank 0 and its store are gone, which ranks learn otherwise, there are no marks."""

    def __init__(self, store: Store, topology: Topology) -> None:
        self._store, self._topology = store, topology
        self._written: list[tuple[int, str]] = []
        """This rank's keys, each with the step of its mark."""
        self._writing = threading.Lock()

    @property
    def announces(self) -> bool:
        """Whether this rank decides which marks there are."""
        return self._topology.stage == self._topology.p - 1

    def announce(self, series: int, mark: MarkKey) -> None:
        """All ranks of the replica are to make the mark. By the one that `announces`, before its backward."""
        self._write(mark.step, _announcement(series, mark), "")

    def is_announced(self, series: int, mark: MarkKey) -> bool:
        """The same on all ranks, each after its backward."""
        with suppress(dist.DistError):
            return bool(self._store.check([_announcement(series, mark)]))
        return False

    def report(self, series: int, mark: MarkKey, copy_s: float | None) -> None:
        """The keeper of this rank's sums has them; training waited so long for their copy. None: it has not, and will
        not. From any thread."""
        self._write(mark.step, _report(series, mark, self._topology.stage), _pack(copy_s))

    def report_empty(self, series: int, mark: MarkKey, stages: int) -> None:
        """The first `stages` of the replica have no sums. By the rank that `announces`."""
        for stage in range(stages):
            self._write(mark.step, _report(series, mark, stage), _pack(0.0))

    def read_reports(self, series: int, mark: MarkKey) -> list[float | None] | None:
        """What all stages have reported of the mark, in order; None while one has not."""
        keys = [_report(series, mark, stage) for stage in range(self._topology.p)]
        values = read_values(self._store, keys)
        return None if values is None else [_unpack(value) for value in values]

    def have_all_kept(self, series: int, mark: MarkKey) -> bool:
        """Whether there is a copy of each stage's sums at the mark."""
        reports = self.read_reports(series, mark)
        return reports is not None and None not in reports

    def _write(self, step: int, key: str, value: str) -> None:
        with self._writing, suppress(dist.DistError):
            for earlier in [one for one in self._written if one[0] < step]:
                self._written.remove(earlier)
                self._store.delete_key(earlier[1])
            self._store.set(key, value)
            self._written.append((step, key))


def _announcement(series: int, mark: MarkKey) -> str:
    return f"shares/{series}/{'/'.join(map(str, mark))}"


def _report(series: int, mark: MarkKey, stage: int) -> str:
    return f"{_announcement(series, mark)}/{stage}"


def _pack(copy_s: float | None) -> str:
    return _NOT_KEPT if copy_s is None else str(copy_s)


def _unpack(value: str) -> float | None:
    return None if value == _NOT_KEPT else float(value)
