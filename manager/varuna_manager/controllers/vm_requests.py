"""Brings the number of VMs to what is wanted: requests more from the provider or its pools, or gives some back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.controllers.pool_board import FleetVms, PoolBoard
from varuna_manager.controllers.provider_call import PATIENCE_S, ProviderCall
from varuna_manager.controllers.vm_requester import CreateVms, OpenRequest, RequestParts, VmRequester
from varuna_manager.db.engine import Database
from varuna_manager.db.models import FleetRow, VmRow
from varuna_manager.domain.fleet_decision import (
    FleetDecision,
    FleetLimits,
    FleetView,
    VmRange,
    count_wanted_vms,
    decide_fleet,
)
from varuna_manager.domain.idle_vms import continue_clocks, count_enough_vms, is_idle
from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.pool_choice import PoolChoice, PoolView, choose_pools
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.fleet import FleetService, job_wants
from varuna_manager.providers.base import PooledProvider, Provider, ProviderVm, VmOffer
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import WorldView
from varuna_proto.wording import count_of

_ENOUGH_FOR_S = 3600.0
"""VMs that jobs left idle are worth another try after this time, because the jobs' shapes and profiles change."""


class _Target(NamedTuple):
    """How many VMs are wanted, and which."""

    vms: int
    why: str
    gpu_types: frozenset[str] | None
    """Types of GPUs that jobs take; None: the target does not follow the jobs."""
    mixes_types: bool = False
    """Whether one job has the fleet to itself, and may train on several types at a time."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What one look at the fleet found."""

    view: FleetView
    vms: FleetVms
    requests: Mapping[str, OpenRequest | None]
    """By pool: what may be under way."""
    offers: Mapping[str, VmOffer]
    """By pool."""
    target: _Target


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    rules: Rules = field(default_factory=Rules)
    limits: FleetLimits = field(default_factory=FleetLimits)
    period_s: float = 0.5
    """Seconds between looks when nothing wakes the controller."""
    spare_after_s: float = 300.0
    """How long a VM must be idle before a fleet that follows the jobs gives it back."""


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
        self._log = structlog.get_logger("varuna.fleet")
        provider = fleet.provider
        parts = RequestParts(database=database, fleet=fleet, events=events, now=now, chance=chance, ring=ring)
        self._pools = PoolBoard(provider.pools, now) if isinstance(provider, PooledProvider) else None
        self._requesters = _make_requesters(provider, parts)
        """By pool; of a provider without pools the only one, under an empty name."""
        self._idle_since: dict[str, float] = {}
        """By VM, by the monotonic clock."""
        self._left_since: dict[str, float] = {}
        """The same of VMs that jobs, all of which train, could have taken."""
        self._enough: tuple[frozenset[str], int, float] | None = None
        """(jobs, VMs, time): this many VMs were enough for these jobs at that time."""
        self._last_emitted: tuple[str, int, tuple[tuple[str, int], ...]] | None = None
        self._offers: ProviderCall[Mapping[str, VmOffer]] = ProviderCall(ring)
        self._deletion: ProviderCall[frozenset[str]] = ProviderCall(ring)
        self._giving_back: frozenset[str] = frozenset()
        """The VMs of that call."""
        self._to_reap: set[str] = set()
        self._deleted: frozenset[str] = frozenset()
        """VMs given back at the last look, which may take a while to go."""
        self._returns: dict[str, str] = {}
        """Why VMs have been given back whose agents are silent, until the store knows that they are gone."""

    async def close(self) -> None:
        """Stop waiting for calls of the provider."""
        await self._offers.close()
        await self._deletion.close()
        for requester in self._requesters.values():
            await requester.close()

    def reap_vm(self, vm_id: str) -> None:
        """Give the VM back at the next `resize_fleet`: it is gone in the store, but the provider still has it."""
        self._to_reap.add(vm_id)

    def describe_return(self, vm_id: str) -> str:
        """Why the VM was given back; empty: it was not, or not because its agent is silent."""
        return self._returns.get(vm_id, "")

    async def resize_fleet(
        self,
        world: WorldView,
        registry: VmRegistry,
        going: Sequence[ProviderVm] = (),
    ) -> bool:
        """Handle all VMs that are not gone. Returns whether anything changed. `going`: being deleted, but paid for."""
        if self._fleet.market_changed:
            self._fleet.market_changed = False
            for requester in self._requesters.values():
                requester.refusals = None
        offers = await self._offers.ask(self._list_offers)  # may be remote calls: not while the store is locked
        if offers is None:
            return False
        look = await self._look(world, registry, going, offers)
        views, view = world.vm_views, look.view
        decision = decide_fleet(self._now(), view, self._rules)
        asks = self._share_out(decision, look)
        if decision.is_met:
            self._last_emitted = None  # the next VM that is lost is news, also if it is one of as many as before
        if decision.drain or asks.counts:
            await self._emit_decision(decision, view, asks)
        is_draining = bool(decision.drain) and await self._drain(decision)
        deleted = frozenset((*decision.delete, *self._to_reap))
        given_back = await self._delete(deleted)
        self._note_returns([views[vm_id] for vm_id in decision.delete if vm_id in given_back], views.keys())
        is_news, self._deleted = not deleted <= self._deleted, deleted
        for pool, count in asks.counts.items():
            await self._requesters[pool].ask(count, look.requests[pool])
        created = await self._take_answers()
        if created:
            self._last_emitted = None
        return bool(is_draining or is_news or created)

    # ------------------------------------------------------------ look

    async def _look(
        self, world: WorldView, registry: VmRegistry, going: Sequence[ProviderVm], offers: Mapping[str, VmOffer]
    ) -> _Look:
        rows, views = world.vms, world.vm_views
        known = [offer.hazard_per_hour for offer in offers.values() if offer.hazard_per_hour is not None]
        registry.market_hazard = max(known, default=None)
        async with self._database.read() as session:
            idle_s = self._note_idle(world, registry)
            row = await session.get(FleetRow, self._provider.name)
            target = await self._find_target(session, row, views, registry.monotonic_s(), offers)
            requests = {
                pool: await requester.load_request(session, rows.values())
                for pool, requester in self._requesters.items()
            }
            if self._pools is not None:
                await self._pools.refresh_past(session)
        single = None if self._pools is not None else offers[""]
        view = FleetView(
            target=target.vms,
            why=target.why,
            vms=tuple(views.values()),
            refusals=None if single is None else self._requesters[""].refusals,
            limits=self._limits,
            prices={vm.id: vm.price_per_hour for vm in rows.values() if vm.price_per_hour is not None},
            price_per_hour=None if single is None else single.price_per_hour,
            idle_s=idle_s,
            spare_after_s=None if target.gpu_types is None else self._spare_after_s,
            going=tuple(vm.price_per_hour or 0.0 for vm in going),
        )
        coming = {pool: requester.count_coming(requests[pool]) for pool, requester in self._requesters.items()}
        vms = FleetVms(rows=rows, views=views, going=going, coming=coming)
        return _Look(view=view, vms=vms, requests=requests, offers=offers, target=target)

    async def _list_offers(self) -> Mapping[str, VmOffer]:
        provider = self._provider
        if isinstance(provider, PooledProvider):
            return await provider.list_pool_offers()
        return {"": await provider.get_offer()}

    async def _find_target(
        self,
        session: AsyncSession,
        row: FleetRow | None,
        views: Mapping[str, VmView],
        monotonic_s: float,
        offers: Mapping[str, VmOffer],
    ) -> _Target:
        if row is None:
            return _Target(0, "", None)
        if row.min_vms is None or row.max_vms is None:
            self._left_since = {}
            return _Target(row.target, "", None)
        jobs, unfit = await job_wants(session, offers.values())
        gpu_types = frozenset(gpu_type for job in jobs for gpu_type in job.gpu_types)
        if not jobs:
            gpu_types = frozenset(offer.gpu_type for offer in offers.values())
        ids = frozenset(job.id for job in jobs)
        if self._enough is not None and (self._enough[0] != ids or self._now() - self._enough[2] > _ENOUGH_FOR_S):
            self._enough = None
        left = [vm_id for vm_id in self._idle_since if views[vm_id].trusted] if all(job.trains for job in jobs) else []
        self._left_since = continue_clocks(self._left_since, left, monotonic_s)
        if self._enough is None:
            left_s = {vm_id: monotonic_s - since for vm_id, since in self._left_since.items()}
            enough = count_enough_vms(views.values(), left_s, self._spare_after_s)
            self._enough = None if enough is None else (ids, enough, self._now())
        target, why = count_wanted_vms(
            VmRange(min_vms=row.min_vms, max_vms=row.max_vms),
            jobs,
            gpus_per_vm=min((offer.gpus for offer in offers.values() if offer.gpu_type in gpu_types), default=1),
            enough_vms=self._enough[1] if self._enough is not None else None,
        )
        ask = "1 job asks" if unfit == 1 else f"{unfit} jobs ask"
        others = f"; {ask} for other GPUs than those on offer" if unfit else ""
        return _Target(target, why + others, gpu_types, len(jobs) + unfit == 1 and all(job.mixes_types for job in jobs))

    def _note_idle(self, world: WorldView, registry: VmRegistry) -> dict[str, float]:
        """Record how long each VM has been idle."""
        jobs = {job_id: frozenset(job.row.setup_failures or ()) for job_id, job in world.jobs.items()}
        idle = [vm.id for vm in world.vm_views.values() if is_idle(vm, jobs, _list_newcomers(registry, vm.id))]
        now = registry.monotonic_s()
        self._idle_since = continue_clocks(self._idle_since, idle, now)
        return {vm_id: now - since for vm_id, since in self._idle_since.items()}

    # ------------------------------------------------------------ act

    def _share_out(self, decision: FleetDecision, look: _Look) -> PoolChoice:
        """How many VMs to ask each pool for now."""
        if self._pools is None:
            is_free = decision.create and self._requesters[""].answer is None
            return PoolChoice(counts={"": decision.create} if is_free else {}, reason="", values={})
        views = self._pools.make_views(look.vms, look.offers, self._requesters, look.target.gpu_types)
        budget = _find_budget(look, views)
        conditions = self._pools.make_conditions(budget, mixes_types=look.target.mixes_types)
        missing = max(decision.create - sum(look.vms.coming.values()), 0)
        choice = choose_pools(self._now(), missing, views, conditions)
        self._fleet.pools = self._pools.make_documents(views, choice, conditions)
        if missing:
            self._fleet.pools_reason = choice.reason
        return choice if choice.counts else PoolChoice(counts={}, reason="", values=choice.values)

    async def _take_answers(self) -> int:
        """How many VMs were made, by the providers that have answered or do so soon."""
        waiting = {requester.answer for requester in self._requesters.values() if requester.answer is not None}
        if waiting:
            await asyncio.wait(waiting, timeout=PATIENCE_S)
        return sum([await requester.take_answer() for requester in self._requesters.values()])

    async def _emit_decision(self, decision: FleetDecision, view: FleetView, asks: PoolChoice) -> None:
        """Emit an event for each new decision, but not for a repeated one between refusals."""
        change = sum(asks.counts.values()) or -len(decision.drain)
        news = (decision.reason, change, tuple(asks.counts.items()))
        if self._last_emitted == news:
            return
        self._last_emitted = news
        what = f"asking for {count_of(change, 'VM')}" if change > 0 else f"giving up {count_of(-change, 'VM')}"
        data: dict[str, Any] = {"target": view.target, "there": len(view.vms), "change": change}
        if self._pools is not None:
            data["pools"] = dict(asks.counts)
        message = ": ".join(text for text in (what, decision.reason, asks.reason) if text)
        async with self._database.write() as session:
            self._events.emit_event(session, "fleet_decision", message, data=data)

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

    async def _delete(self, vm_ids: Collection[str]) -> Collection[str]:
        """Returns those that are given back, or are about to be. While a call goes on, others wait for the next one."""
        if not self._deletion.is_pending:
            self._giving_back = frozenset(vm_ids)
        asked = self._giving_back
        if not asked:
            return asked
        try:
            done = await self._deletion.ask(lambda: self._give_back(asked))
        except Exception:
            self._log.exception("VMs could not be given back: they will be asked for again", vms=sorted(asked))
            return ()
        self._to_reap -= done or frozenset()
        return asked

    async def _give_back(self, vm_ids: frozenset[str]) -> frozenset[str]:
        await self._provider.delete(sorted(vm_ids))
        return vm_ids

    def _note_returns(self, given_back: Sequence[VmView], there: Collection[str]) -> None:
        """The provider lists these VMs no more, and does not say why, because it did not take them."""
        now = self._now()
        for vm in given_back:
            if vm.state is VmState.LOST:
                self._returns.setdefault(vm.id, f"it was given back: it has been silent for {vm.silent_s(now):.0f} s")
            elif vm.state is VmState.REQUESTED:
                waited_s = self._rules.request_timeout_s
                text = f"it was given back: its agent has not connected within {waited_s:.0f} s (see the agent's log)"
                self._returns.setdefault(vm.id, text)
        self._returns = {vm_id: text for vm_id, text in self._returns.items() if vm_id in there}


def _list_newcomers(registry: VmRegistry, vm_id: str) -> set[str]:
    """The jobs of the processes on the VM that were started ahead, and may come to `Varuna()`."""
    return {report.job_id for report in registry.list_newcomers(vm_id) if not report.fault}


def _make_requesters(provider: Provider, parts: RequestParts) -> dict[str, VmRequester]:
    if not isinstance(provider, PooledProvider):
        return {"": VmRequester("", lambda count, request: provider.create(count, request), parts)}
    pooled = provider

    def bind(pool: str) -> CreateVms:
        return lambda count, request: pooled.create_in(pool, count, request)

    return {pool: VmRequester(pool, bind(pool), parts) for pool in provider.pools}


def _find_budget(look: _Look, pools: Sequence[PoolView]) -> float | None:
    """What may be spent in addition; None: there is no limit."""
    view, coming = look.view, look.vms.coming
    if view.limits.max_cost_per_hour is None:
        return None
    spent = sum(view.prices.get(vm.id, 0.0) for vm in view.vms) + sum(view.going)
    return view.limits.max_cost_per_hour - spent - sum(pool.price_per_hour * coming[pool.name] for pool in pools)
