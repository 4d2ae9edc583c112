"""The usage of VMs over time: points of their agents' samples, in memory until a few VMs at a time are written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sqlalchemy.orm import load_only

from varuna_manager.answers.errors import MissingError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow, VmUsageRow
from varuna_manager.domain.vm_usage import POINT_S, UsagePoint, add_points, average, pack_point, unpack_points
from varuna_proto.rest_fleet import VmUsageDocument
from varuna_proto.v1 import agent_pb2 as pb

_WRITE_EACH_S = 60.0
"""The least time between two writes for one VM."""
_AT_ONCE = 50
"""VMs of one transaction: a few milliseconds."""
_PAUSE_S = 2.0
_QUIET_S = 300.0
"""A VM without a sample for this long has ended, or is out of reach: nothing stays in memory for it."""
_MOST_PENDING = 64 * 1024
"""Bytes of points of a VM that wait. More are only there while the store is away; the oldest go."""


class UsageBoard:
    """Samples of all VMs that are not written yet."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._open: dict[str, list[UsagePoint]] = {}
        """The samples of the newest point."""
        self._pending: dict[str, bytes] = {}
        self._written_at: dict[str, float] = {}

    def record_sample(self, vm_id: str, usage: pb.MachineUsage) -> None:
        point = _make_point(usage, self._now())
        samples = self._open.setdefault(vm_id, [])
        if samples and point.at - samples[0].at >= POINT_S:
            self._add_pending(vm_id, pack_point(average(samples)))
            samples.clear()
        samples.append(point)

    def peek_points(self, vm_id: str) -> bytes:
        """All that is not written, the newest point included."""
        samples = self._open.get(vm_id)
        return self._pending.get(vm_id, b"") + (pack_point(average(samples)) if samples else b"")

    def pop_due(self) -> dict[str, bytes]:
        """Points of a few VMs to write, of those first that have waited longest."""
        now = self._now()
        self._close_quiet(now)
        due = [vm_id for vm_id in self._pending if now - self._written_at.get(vm_id, 0.0) >= _WRITE_EACH_S]
        due.sort(key=lambda vm_id: self._written_at.get(vm_id, 0.0))
        for vm_id in due[:_AT_ONCE]:
            if vm_id in self._open:
                self._written_at[vm_id] = now
            else:
                self._written_at.pop(vm_id, None)
        return {vm_id: self._pending.pop(vm_id) for vm_id in due[:_AT_ONCE]}

    def put_back(self, points: dict[str, bytes]) -> None:
        """These could not be written."""
        for vm_id, packed in points.items():
            newer = self._pending.pop(vm_id, b"")
            self._add_pending(vm_id, packed + newer)

    def forget_vm(self, vm_id: str) -> None:
        for known in (self._open, self._pending, self._written_at):
            known.pop(vm_id, None)

    def _close_quiet(self, now: float) -> None:
        """Without new samples, the last ones are a point."""
        for vm_id in [vm_id for vm_id, samples in self._open.items() if now - samples[-1].at >= _QUIET_S]:
            self._add_pending(vm_id, pack_point(average(self._open.pop(vm_id))))

    def _add_pending(self, vm_id: str, packed: bytes) -> None:
        joined = self._pending.get(vm_id, b"") + packed
        size = len(packed) or 1
        self._pending[vm_id] = joined if len(joined) <= _MOST_PENDING else joined[-(_MOST_PENDING // size) * size :]


class UsageKeeper:
    """Writes what the board has. It is a controller of the leader."""

    name = "usage"

    def __init__(self, database: Database, board: UsageBoard) -> None:
        self._database = database
        self._board = board

    async def reconcile_once(self) -> float:
        if due := self._board.pop_due():
            try:
                await self._write(due)
            except BaseException:
                self._board.put_back(due)
                raise
        return _PAUSE_S

    async def _write(self, due: dict[str, bytes]) -> None:
        unknown = []
        async with self._database.write() as session:
            for vm_id, packed in due.items():
                vm = await session.get(VmRow, vm_id, options=[load_only(VmRow.id)])
                if vm is None:
                    unknown.append(vm_id)
                    continue
                row = await session.get(VmUsageRow, vm_id)
                if row is None:
                    session.add(VmUsageRow(vm_id=vm_id, points=add_points(b"", packed)))
                else:
                    row.points = add_points(row.points, packed)
        for vm_id in unknown:
            self._board.forget_vm(vm_id)


class UsageList:
    """The usage of VMs for users. `board`: None where no agent connects, as in a manager that stands by."""

    def __init__(self, database: Database, board: UsageBoard | None) -> None:
        self._database = database
        self._board = board

    async def read_usage(self, vm_id: str) -> VmUsageDocument:
        """Raises MissingError."""
        async with self._database.read() as session:
            if await session.get(VmRow, vm_id, options=[load_only(VmRow.id)]) is None:
                raise MissingError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
            row = await session.get(VmUsageRow, vm_id)
        stored = b"" if row is None else row.points
        points = list(unpack_points(stored + (b"" if self._board is None else self._board.peek_points(vm_id))))

        def column(name: str) -> list[float | None]:
            return [None if math.isnan(value := getattr(point, name)) else value for point in points]

        return {
            "at_unix_s": [point.at for point in points],
            "cpu_share": column("cpu_share"),
            "memory_used_bytes": column("memory_used_bytes"),
            "memory_bytes": column("memory_bytes"),
            "received_bytes_per_s": column("received_bytes_per_s"),
            "sent_bytes_per_s": column("sent_bytes_per_s"),
            "gpu_share": column("gpu_share"),
            "gpu_memory_used_bytes": column("gpu_memory_used_bytes"),
            "gpu_memory_bytes": column("gpu_memory_bytes"),
        }


def _make_point(usage: pb.MachineUsage, at: float) -> UsagePoint:
    busy = [_bound(gpu.busy_share, 1.0) for gpu in usage.gpus if gpu.HasField("busy_share")]
    return UsagePoint(
        at=at,
        cpu_share=_bound(usage.cpu_share, 1.0),
        memory_used_bytes=_bound(usage.memory_used_bytes),
        memory_bytes=_bound(usage.memory_bytes),
        received_bytes_per_s=_bound(usage.received_bytes_per_s),
        sent_bytes_per_s=_bound(usage.sent_bytes_per_s),
        gpu_share=sum(busy) / len(busy) if busy else math.nan,
        gpu_memory_used_bytes=_bound(sum(gpu.memory_used_bytes for gpu in usage.gpus)) if usage.gpus else math.nan,
        gpu_memory_bytes=_bound(sum(gpu.memory_bytes for gpu in usage.gpus)) if usage.gpus else math.nan,
    )


def _bound(value: float, most: float = 2.0**60) -> float:
    """An agent may send anything; a NaN says that it does not know."""
    return value if math.isnan(value) else min(max(float(value), 0.0), most)
