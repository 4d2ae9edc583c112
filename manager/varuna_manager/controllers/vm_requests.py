"""Brings the number of VMs to what is wanted: requests more from the provider, or gives some back.

A request is written to the store before the provider is called, and its VMs carry its tag. If a manager dies in
between, the next one repeats the request, which makes no VM twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import FleetRow, VmRow
from varuna_manager.domain.fleet_decision import (
    FleetDecision,
    FleetLimits,
    FleetView,
    Refusal,
    RefusalKind,
    RefusalStreak,
    VmRange,
    count_wanted_vms,
    decide_fleet,
)
from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.fleet import FleetService, job_wants
from varuna_manager.providers.base import CreatedVms, ProviderVm, VmOffer
from varuna_manager.world.events import EventLog
from varuna_manager.world.facts import VmFacts
from varuna_manager.world.vm_registry import VmRegistry
from varuna_proto.wording import count_are, count_of

_ENOUGH_FOR_S = 3600.0
"""VMs that jobs left idle are worth another try after this time, because the jobs' shapes and profiles change."""
_PATIENCE_S = 0.3
"""How long a look waits for requested VMs: a cloud may take a minute, and VMs are lost meanwhile."""


@dataclass(frozen=True, kw_only=True)
class _PendingCreate:
    """A request that the provider is working on."""

    answer: asyncio.Task[CreatedVms]
    missing: int
    made: int
    """VMs of the request that existed before the call."""


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    rules: Rules = field(default_factory=Rules)
    limits: FleetLimits = field(default_factory=FleetLimits)
    period_s: float = 0.5
    """Seconds between looks when nothing wakes the controller."""
    spare_after_s: float = 300.0
    """How long a VM must have no worker before a fleet that follows the jobs gives it back."""


class FleetSize:
    """`ring`: called when the provider answers after a look has stopped waiting."""

    def __init__(
        self,
        *,
        database: Database,
        fleet: FleetService,
        events: EventLog,
        settings: FleetSettings,
        now: Callable[[], float],
        chance: Random,
        ring: Callable[[], None],
    ) -> None:
        self._database = database
        self._provider = fleet.provider
        self._fleet = fleet
        self._events = events
        self._rules = settings.rules
        self._now = now
        self._limits = settings.limits
        self._spare_after_s = settings.spare_after_s
        self._chance = chance
        self._ring = ring
        self._log = structlog.get_logger("varuna.fleet")
        self._refusals: RefusalStreak | None = None
        self._idle_since: dict[str, float] = {}
        self._enough: tuple[frozenset[str], int, float] | None = None
        """(jobs, VMs, time): this many VMs were enough for these jobs at that time."""
        self._last_emitted: tuple[str, int] | None = None
        self._to_reap: set[str] = set()
        self._deleted: frozenset[str] = frozenset()
        """VMs given back at the last look, which may take a while to go."""
        self._asked: _PendingCreate | None = None

    async def close(self) -> None:
        """Stop waiting for requested VMs: the request is in the store, and is repeated."""
        if self._asked is not None:
            self._asked.answer.cancel()
            await asyncio.wait({self._asked.answer})

    def reap_vm(self, vm_id: str) -> None:
        """Give the VM back at the next `resize_fleet`: it is gone in the store, but the provider still has it."""
        self._to_reap.add(vm_id)

    async def resize_fleet(
        self,
        rows: Mapping[str, VmFacts],
        views: Mapping[str, VmView],
        registry: VmRegistry,
        going: Sequence[ProviderVm] = (),
    ) -> bool:
        """Handle all VMs that are not gone. Returns whether anything changed. `going`: being deleted, but paid for."""
        if self._fleet.market_changed:
            self._fleet.market_changed = False
            self._refusals = None
        view, request, made = await self._view(rows, views, registry)
        view = replace(view, going=tuple(vm.price_per_hour or 0.0 for vm in going))
        decision = decide_fleet(self._now(), view, self._rules)
        if decision.drain or (decision.create and self._asked is None):
            await self._emit_decision(decision, view)
        is_draining = bool(decision.drain) and await self._drain(decision)
        deleted = frozenset((*decision.delete, *self._to_reap))
        await self._delete(sorted(deleted))
        is_news, self._deleted = not deleted <= self._deleted, deleted
        if decision.create and self._asked is None:
            self._asked = await self._ask(decision.create, request, made)
        created = 0 if self._asked is None else await self._take_answer(self._asked)
        return bool(is_draining or is_news or created)

    # ------------------------------------------------------------ look

    async def _view(
        self, rows: Mapping[str, VmFacts], views: Mapping[str, VmView], registry: VmRegistry
    ) -> tuple[FleetView, tuple[str, int] | None, int]:
        """The view; the open request with its count; how many of its VMs are known."""
        offer = await self._provider.get_offer()  # may be a remote call: not while the store is locked
        registry.market_hazard = offer.hazard_per_hour
        async with self._database.read() as session:
            idle_s = self._note_idle(views.values())
            row = await session.get(FleetRow, self._provider.name)
            target, why, follows_jobs = await self._target(session, row, views.values(), idle_s, offer)
        request = None
        if row is not None and row.request is not None:
            request = (row.request, row.request_count or 0)
        made = sum(request is not None and vm.request == request[0] for vm in rows.values())
        view = FleetView(
            target=target,
            why=why,
            vms=tuple(views.values()),
            refusals=self._refusals,
            limits=self._limits,
            prices={vm.id: vm.price_per_hour for vm in rows.values() if vm.price_per_hour is not None},
            price_per_hour=offer.price_per_hour,
            idle_s=idle_s,
            spare_after_s=self._spare_after_s if follows_jobs else None,
        )
        return view, request, made

    async def _target(
        self,
        session: AsyncSession,
        row: FleetRow | None,
        views: Iterable[VmView],
        idle_s: dict[str, float],
        offer: VmOffer,
    ) -> tuple[int, str, bool]:
        """How many VMs are wanted, why, and whether that follows the jobs."""
        if row is None:
            return 0, "", False
        if row.min_vms is None or row.max_vms is None:
            return row.target, "", False
        jobs, unfit = await job_wants(session, offer)
        ids = frozenset(job.id for job in jobs)
        if self._enough is not None and (self._enough[0] != ids or self._now() - self._enough[2] > _ENOUGH_FOR_S):
            self._enough = None
        long_idle = sum(seconds >= self._spare_after_s for seconds in idle_s.values())
        if self._enough is None and long_idle and all(job.trains for job in jobs):
            ready = sum(view.state in (VmState.READY, VmState.SUSPECT) for view in views)
            self._enough = (ids, ready - long_idle, self._now())
        target, why = count_wanted_vms(
            VmRange(min_vms=row.min_vms, max_vms=row.max_vms),
            jobs,
            gpus_per_vm=offer.gpus,
            enough_vms=self._enough[1] if self._enough is not None else None,
        )
        ask = "1 job asks" if unfit == 1 else f"{unfit} jobs ask"
        others = f"; {ask} for other GPUs than those on offer" if unfit else ""
        return target, why + others, True

    def _note_idle(self, views: Iterable[VmView]) -> dict[str, float]:
        """Record how long each VM that could work has been idle."""
        now = self._now()
        idle = {view.id for view in views if view.state is VmState.READY and view.workers == 0}
        self._idle_since = {vm_id: self._idle_since.get(vm_id, now) for vm_id in idle}
        return {vm_id: now - since for vm_id, since in self._idle_since.items()}

    # ------------------------------------------------------------ act

    async def _emit_decision(self, decision: FleetDecision, view: FleetView) -> None:
        """Emit an event for each new decision, but not for a repeated one between refusals."""
        change = decision.create or -len(decision.drain)
        if self._last_emitted == (decision.reason, change):
            return
        self._last_emitted = (decision.reason, change)
        what = f"asking for {count_of(change, 'VM')}" if change > 0 else f"giving up {count_of(-change, 'VM')}"
        data = {"target": view.target, "there": len(view.vms), "change": change}
        async with self._database.write() as session:
            self._events.emit_event(session, "fleet_decision", f"{what}: {decision.reason}", data=data)

    async def _drain(self, decision: FleetDecision) -> bool:
        """Returns whether a VM is draining now that was not."""
        moved = 0
        async with self._database.write() as session:
            for vm_id in decision.drain:
                row = await session.get_one(VmRow, vm_id)
                if row.vm_state in (VmState.REQUESTED, VmState.READY, VmState.SUSPECT):
                    await self._fleet.move_vm(session, row, VmState.DRAINING, decision.reason)
                    moved += 1
        return moved > 0

    async def _delete(self, vm_ids: Sequence[str]) -> None:
        if not vm_ids:
            return
        try:
            await self._provider.delete(vm_ids)
        except Exception:
            self._log.exception("VMs could not be given back: they will be asked for again", vms=list(vm_ids))
        else:
            self._to_reap.clear()

    async def _ask(self, missing: int, request: tuple[str, int] | None, made: int) -> _PendingCreate:
        """Request so many more VMs."""
        if request is None:
            request, made = (f"{self._chance.getrandbits(128):032x}", missing), 0
            await self._note_request(request)
        tag, count = request
        answer = asyncio.create_task(self._provider.create(min(count, made + missing), tag))
        return _PendingCreate(answer=answer, missing=missing, made=made)

    async def _take_answer(self, asked: _PendingCreate) -> int:
        """How many VMs were made, if the provider has answered."""
        done, _ = await asyncio.wait({asked.answer}, timeout=_PATIENCE_S)
        if not done:
            asked.answer.remove_done_callback(self._answered)  # once is enough
            asked.answer.add_done_callback(self._answered)
            return 0
        self._asked = None
        try:
            created = asked.answer.result()
        except Exception as error:
            # The outcome is not known: the same request is repeated, after a pause.
            self._log.exception("the provider failed to make VMs", count=asked.missing)
            refusal = Refusal(kind=RefusalKind.FAILED, reason=f"{type(error).__name__}: {error}")
            await self._note_refusal(refusal, asked.missing, 0)
            return 0
        async with self._database.write() as session:
            for vm in created.vms:
                if await session.get(VmRow, vm.id) is None:
                    self._fleet.add_vm(session, vm)
            row = await session.get_one(FleetRow, self._provider.name)
            row.request = row.request_count = None
        new = max(len(created.vms) - asked.made, 0)
        if created.refusal is None:
            self._refusals = None
        else:
            await self._note_refusal(created.refusal, asked.missing - new, new)
        return new

    def _answered(self, answer: asyncio.Task[CreatedVms]) -> None:
        self._ring()

    async def _note_request(self, request: tuple[str, int]) -> None:
        async with self._database.write() as session:
            row = await session.get_one(FleetRow, self._provider.name)
            row.request, row.request_count = request

    async def _note_refusal(self, refusal: Refusal, missing: int, new: int) -> None:
        before = self._refusals
        in_a_row = 1 if before is None or new else before.count + 1
        self._refusals = RefusalStreak(count=in_a_row, last=refusal, last_at=self._now(), jitter=self._chance.random())
        if before is not None and (before.last.kind, before.last.reason) == (refusal.kind, refusal.reason):
            return
        async with self._database.write() as session:
            message = f"{count_are(missing, 'VM')} missing and the provider refused ({refusal.kind}): {refusal.reason}"
            data = {"missing": missing, "kind": refusal.kind.value, "pause_s": self._refusals.pause_s}
            self._events.emit_event(session, "provider_refused", message, data=data)
