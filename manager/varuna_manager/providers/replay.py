"""The history of a spot market drives another provider: VMs can be had, and are taken, when the trace says so.

A VM stands for a node of the trace. As many VMs are granted as the trace has nodes at that time; when a node goes, its
VM is preempted. What was played is remembered in a file, so a manager that starts again goes on where time is now.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from varuna_manager.providers.base import Created, EmulatedProvider, Notice, Offer, ProviderVm, UnknownVmError

if TYPE_CHECKING:
    from varuna_planner.spot_trace import SpotTrace

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    speed: float = 1.0
    """Seconds of the trace per second."""
    notice_s: float = 0.0
    """Between the word that a VM will be taken and its end, in real seconds; 0: it goes without a word."""
    start_s: float = 0.0
    """Where in the trace to start, in its own seconds from its beginning."""
    loop: bool = False
    """Begin again at the end of the trace; else its last fleet stays."""


@dataclass(kw_only=True)
class _Played:
    """What is remembered."""

    began_at: float
    position: int
    """Fleets of the trace that were played, over all its rounds; 0: none yet."""
    nodes: dict[str, str] = field(default_factory=dict)
    """The VM that stands for each node."""


class ReplayProvider:
    """`inner`: the provider that has the VMs. `memory`: the file for what was played."""

    name = "replay"
    grows = True

    def __init__(
        self,
        inner: EmulatedProvider,
        trace: SpotTrace,
        settings: ReplaySettings,
        memory: Path,
        now: Callable[[], float] = time.time,
    ) -> None:
        from varuna_planner.spot_trace import measure_hazard

        self._inner = inner
        self._settings = settings
        self._memory = memory
        self._now = now
        self._fleets = [(at_s - trace.starts_s, nodes) for at_s, nodes in trace.fleets()]
        self._length_s = max(trace.ends_s - trace.starts_s, 1.0)
        if not 0 <= settings.start_s <= self._length_s:
            raise ValueError(
                f"replay start {settings.start_s:g} s: the trace is {self._length_s:g} s long; start within it"
            )
        try:
            self._hazard: float | None = measure_hazard(trace).removals_per_vm_hour * settings.speed
        except ValueError:
            self._hazard = None  # a trace of one moment says nothing of preemptions
        self._played = self._recall()
        self._log = structlog.get_logger("varuna.replay")

    # ------------------------------------------------------------ Provider

    async def list(self) -> Sequence[ProviderVm]:
        await self._play()
        return await self._inner.list()

    async def create(self, count: int, request: str) -> Created:
        await self._play()
        created = await self._inner.create(count, request)
        await self._bind()
        return created

    async def delete(self, vm_ids: Sequence[str]) -> None:
        await self._inner.delete(vm_ids)

    async def notices(self) -> Sequence[Notice]:
        return await self._inner.notices()

    async def offer(self) -> Offer:
        offer = await self._inner.offer()
        return replace(offer, hazard_per_hour=self._hazard)

    # ------------------------------------------------------------ EmulatedProvider

    @property
    def capacity(self) -> int | None:
        return self._inner.capacity

    async def set_capacity(self, capacity: int | None) -> None:
        """Until the trace says otherwise."""
        await self._inner.set_capacity(capacity)

    async def preempt(self, vm_id: str, notice_s: float) -> None:
        await self._inner.preempt(vm_id, notice_s)

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        return self._inner.log_path(vm_id, job_id, generation, rank)

    async def left_behind(self) -> Mapping[str, float]:
        return await self._inner.left_behind()

    async def forget(self, vm_id: str) -> None:
        await self._inner.forget(vm_id)

    async def close(self, *, end_vms: bool) -> None:
        await self._inner.close(end_vms=end_vms)

    # ------------------------------------------------------------ how

    def next_change_at(self) -> float | None:
        """When the trace changes the fleet next, on `now`'s clock; None: never."""
        if self._played.position >= len(self._fleets) and not self._settings.loop:
            return None
        return self._due_at(self._played.position)

    def _due_at(self, position: int) -> float:
        rounds, index = divmod(position, len(self._fleets))
        at_s = rounds * self._length_s + self._fleets[index][0] - self._settings.start_s
        return self._played.began_at + at_s / self._settings.speed

    async def _play(self) -> None:
        """Do what is due. Each step is remembered after it is done: done again, it changes nothing."""
        while (due_at := self.next_change_at()) is not None and due_at <= self._now():
            nodes = self._fleets[self._played.position % len(self._fleets)][1]
            # Before the VMs go: what is asked for meanwhile must not take their places.
            await self._inner.set_capacity(len(nodes))
            await self._bind()
            for node in sorted(self._played.nodes.keys() - nodes):
                await self._take(node, self._played.nodes[node])
            self._played.nodes = {node: vm for node, vm in self._played.nodes.items() if node in nodes}
            self._played.position += 1
            self._remember()

    async def _take(self, node: str, vm_id: str) -> None:
        try:
            await self._inner.preempt(vm_id, self._settings.notice_s)
        except UnknownVmError:
            return  # it went by itself
        self._log.info("the trace takes a VM", node=node, vm=vm_id, notice_s=self._settings.notice_s)

    async def _bind(self) -> None:
        """Let every VM stand for a node, the first that is free. VMs under notice stand for none any more."""
        there = {vm.id for vm in await self._inner.list()}
        there -= {notice.vm_id for notice in await self._inner.notices()}
        bound = {node: vm_id for node, vm_id in self._played.nodes.items() if vm_id in there}
        position = max(self._played.position - 1, 0)
        nodes = self._fleets[position % len(self._fleets)][1] if self._played.position else frozenset()
        free = sorted(nodes - bound.keys(), key=lambda node: (len(node), node))
        new = sorted(there - set(bound.values()), key=lambda vm_id: (len(vm_id), vm_id))
        bound |= dict(zip(free, new, strict=False))
        if bound != self._played.nodes:
            self._played.nodes = bound
            self._remember()

    def _recall(self) -> _Played:
        try:
            return _Played(**json.loads(self._memory.read_text()))
        except FileNotFoundError:
            # All that came before the start is there from the start.
            position = sum(at_s <= self._settings.start_s for at_s, _ in self._fleets) - 1
            played = _Played(began_at=self._now(), position=position)
        return played

    def _remember(self) -> None:
        part = self._memory.with_name(self._memory.name + ".part")
        part.write_text(json.dumps(asdict(self._played)))
        part.replace(self._memory)
