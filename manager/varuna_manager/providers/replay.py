"""A recorded trace of a spot market drives another provider: it grants and preempts VMs as the trace says.

A VM stands for a node of the trace. The market grants as many VMs as the trace has nodes at that time; when a node
goes, its VM is preempted. A file keeps the position, so that a manager that starts again goes on at the present time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from varuna_manager.providers.base import (
    CreatedVms,
    EmulatedProvider,
    ProviderNotice,
    ProviderVm,
    UnknownVmError,
    VmOffer,
)

if TYPE_CHECKING:
    from varuna_planner.liveput.spot_trace import SpotTrace

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    speed: float = 1.0
    """Seconds of the trace per second."""
    notice_s: float = 0.0
    """Notice before a VM is taken, in real seconds; 0: none."""
    start_s: float = 0.0
    """Where to start, in seconds of the trace from its beginning."""
    loop: bool = False
    """Start again at the end of the trace; otherwise its last fleet stays."""


@dataclass(kw_only=True)
class _ReplayState:
    """The position in the trace, which the file keeps."""

    began_at: float
    position: int
    """How many fleets of the trace were played, over all its rounds."""
    nodes: dict[str, str] = field(default_factory=dict)
    """The VM that stands for each node."""


class ReplayProvider:
    """`inner`: the provider that has the VMs. `memory`: the file for the position."""

    name = "replay"
    is_elastic = True

    def __init__(
        self,
        inner: EmulatedProvider,
        trace: SpotTrace,
        settings: ReplaySettings,
        memory: Path,
        now: Callable[[], float] = time.time,
    ) -> None:
        from varuna_planner.liveput.spot_trace import measure_hazard

        self._inner = inner
        self._settings = settings
        self._memory = memory
        self._now = now
        self._fleets = [(at_s - trace.starts_s, nodes) for at_s, nodes in trace.iterate_fleets()]
        self._length_s = max(trace.ends_s - trace.starts_s, 1.0)
        if not 0 <= settings.start_s <= self._length_s:
            raise ValueError(
                f"replay start {settings.start_s:g} s: the trace is {self._length_s:g} s long; start within it"
            )
        try:
            self._hazard: float | None = measure_hazard(trace).removals_per_vm_hour * settings.speed
        except ValueError:
            self._hazard = None  # a trace of a single moment has no rate of preemptions
        self._played = self._load_state()
        self._playing = asyncio.Lock()
        """Held while the position or the nodes change, because several calls may come at the same time."""
        self._log = structlog.get_logger("varuna.replay")

    # ------------------------------------------------------------ Provider

    async def list(self) -> Sequence[ProviderVm]:
        await self._play_due()
        return await self._inner.list()

    async def create(self, count: int, request: str) -> CreatedVms:
        await self._play_due()
        created = await self._inner.create(count, request)
        async with self._playing:
            await self._bind_nodes()
        return created

    async def delete(self, vm_ids: Sequence[str]) -> None:
        await self._inner.delete(vm_ids)

    async def list_notices(self) -> Sequence[ProviderNotice]:
        return await self._inner.list_notices()

    async def get_offer(self) -> VmOffer:
        offer = await self._inner.get_offer()
        return replace(offer, hazard_per_hour=self._hazard)

    # ------------------------------------------------------------ EmulatedProvider

    @property
    def capacity(self) -> int | None:
        return self._inner.capacity

    async def set_capacity(self, capacity: int | None) -> None:
        """Holds until the trace changes the fleet."""
        await self._inner.set_capacity(capacity)

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        await self._inner.preempt_vm(vm_id, notice_s)

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        return self._inner.log_path(vm_id, job_id, generation, rank)

    async def list_ended_vms(self) -> Mapping[str, float]:
        return await self._inner.list_ended_vms()

    async def forget_vm(self, vm_id: str) -> None:
        await self._inner.forget_vm(vm_id)

    async def close(self, *, end_vms: bool) -> None:
        await self._inner.close(end_vms=end_vms)

    # ------------------------------------------------------------ helpers

    def next_change_at(self) -> float | None:
        """When the trace next changes the fleet, by the clock `now`; None: never."""
        if self._played.position >= len(self._fleets) and not self._settings.loop:
            return None
        return self._due_at(self._played.position)

    def _due_at(self, position: int) -> float:
        rounds, index = divmod(position, len(self._fleets))
        at_s = rounds * self._length_s + self._fleets[index][0] - self._settings.start_s
        return self._played.began_at + at_s / self._settings.speed

    async def _play_due(self) -> None:
        """Play what is due. Each step is saved after it is done; repeating it changes nothing."""
        async with self._playing:
            while (due_at := self.next_change_at()) is not None and due_at <= self._now():
                await self._play_change()

    async def _play_change(self) -> None:
        nodes = self._fleets[self._played.position % len(self._fleets)][1]
        # Before the VMs go, so that concurrent requests do not take their places.
        await self._inner.set_capacity(len(nodes))
        await self._bind_nodes()
        for node in sorted(self._played.nodes.keys() - nodes):
            await self._preempt_node(node, self._played.nodes[node])
        self._played.nodes = {node: vm for node, vm in self._played.nodes.items() if node in nodes}
        self._played.position += 1
        self._save_state()

    async def _preempt_node(self, node: str, vm_id: str) -> None:
        try:
            await self._inner.preempt_vm(vm_id, self._settings.notice_s)
        except UnknownVmError:
            return  # it went by itself
        self._log.info("the trace takes a VM", node=node, vm=vm_id, notice_s=self._settings.notice_s)

    async def _bind_nodes(self) -> None:
        """Let every VM stand for the first free node. VMs under notice stand for none."""
        there = {vm.id for vm in await self._inner.list()}
        there -= {notice.vm_id for notice in await self._inner.list_notices()}
        bound = {node: vm_id for node, vm_id in self._played.nodes.items() if vm_id in there}
        position = max(self._played.position - 1, 0)
        nodes = self._fleets[position % len(self._fleets)][1] if self._played.position else frozenset()
        free = sorted(nodes - bound.keys(), key=lambda node: (len(node), node))
        new = sorted(there - set(bound.values()), key=lambda vm_id: (len(vm_id), vm_id))
        bound |= dict(zip(free, new, strict=False))
        if bound != self._played.nodes:
            self._played.nodes = bound
            self._save_state()

    def _load_state(self) -> _ReplayState:
        try:
            return _ReplayState(**json.loads(self._memory.read_text()))
        except FileNotFoundError:
            # The fleet at the start has all nodes that came before it.
            position = sum(at_s <= self._settings.start_s for at_s, _ in self._fleets) - 1
            played = _ReplayState(began_at=self._now(), position=position)
        return played

    def _save_state(self) -> None:
        part = self._memory.with_name(self._memory.name + ".part")
        part.write_text(json.dumps(asdict(self._played)))
        part.replace(self._memory)
