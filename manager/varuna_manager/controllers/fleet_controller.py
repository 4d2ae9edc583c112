"""Keeps the VMs' states up to date and their number as wanted."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.controllers.provider_call import ProviderCall
from varuna_manager.controllers.vm_requests import FleetSettings, FleetSize
from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow
from varuna_manager.db.vm_prices import change_price
from varuna_manager.domain.fleet_decision import decide_vm
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.silence import find_silent_together
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.providers.base import ProviderNotice, ProviderPartlyAwayError, ProviderVm
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.facts import VmFacts
from varuna_manager.world.reading import split_keys
from varuna_manager.world.world import World

_BROKEN_STREAM_S = 2.0
"""For so long after a stream broke, the provider is queried often: it may need a moment to see that the VM is gone."""
_BROKEN_STREAM_PERIOD_S = 0.1


class _Answer(NamedTuple):
    """What the provider says of its VMs."""

    known: Collection[str]
    """The VMs that were in the store before the provider was asked. The answer may be older than others."""
    vms: Sequence[ProviderVm]
    notices: Sequence[ProviderNotice]
    pools_away: frozenset[str]
    """Pools that do not answer."""
    trouble: str
    """Their errors."""


class FleetController:
    name = "fleet"

    def __init__(
        self,
        database: Database,
        world: World,
        fleet: FleetService,
        events: EventLog,
        bell: Bell,
        settings: FleetSettings,
        *,
        now: Callable[[], float] = time.time,
        chance: Random | None = None,
    ) -> None:
        self._database = database
        self._world = world
        self._registry = world.registry
        self._provider = fleet.provider
        self._fleet = fleet
        self._events = events
        self._bell = bell
        self._rules = settings.rules
        self._period_s = settings.period_s
        self._now = now
        self._size = FleetSize(
            database=database,
            fleet=fleet,
            events=events,
            settings=settings,
            now=now,
            chance=chance or Random(),
            ring=bell.notify_listeners,
        )
        self._call: ProviderCall[_Answer] = ProviderCall(bell.notify_listeners)
        self._log = structlog.get_logger("varuna.controller").bind(controller=self.name)
        self._going: Sequence[ProviderVm] = ()
        """VMs that the provider is still deleting: gone, but paid for."""
        self._ends: Mapping[str, str] = {}
        """Why VMs have ended, as the provider said at its last query."""
        self._trouble = ""
        """The provider's error at its last query; empty: it answered."""

    async def reconcile_once(self) -> float:
        known = frozenset((await self._world.load_view()).vms)
        answer = await self._ask_provider(known)
        changed = await self._take_in(answer)
        world = await self._world.load_view()
        if await self._note(world.vms, world.vm_views):
            changed = True
            world = await self._world.load_view()
        if answer is not None and self._provider.is_elastic:
            changed |= await self._size.resize_fleet(world, self._registry, self._going)
        if changed:
            self._bell.notify_listeners()
            return 0.0
        hurried = self._registry.just_disconnected(_BROKEN_STREAM_S)
        return min(_BROKEN_STREAM_PERIOD_S, self._period_s) if hurried else self._period_s

    async def _ask_provider(self, known: Collection[str]) -> _Answer | None:
        """What it lists; None when it does not answer, or not yet: then only silence shows which VMs are lost, and
        agents' notices count all the same."""
        try:
            answer = await self._call.ask(lambda: self._list_vms(known))
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                self._trouble = trouble
                self._log.exception("the provider does not answer", provider=self._provider.name)
                await self._emit_provider_event(
                    "provider_away", f"the provider does not answer ({trouble}): its VMs are left alone"
                )
            return None
        if answer is None:
            return None
        trouble = answer.trouble
        if trouble and trouble != self._trouble:
            self._trouble = trouble
            self._log.warning("a pool does not answer", error=trouble)
            await self._emit_provider_event("provider_away", f"{trouble}: its VMs are left alone")
        elif self._trouble and not trouble:
            self._trouble = ""
            await self._emit_provider_event("provider_back", "the provider answers again")
        self._going = [vm for vm in answer.vms if vm.going]
        self._ends = {vm.id: vm.ended for vm in answer.vms if vm.ended is not None}
        return answer

    async def _list_vms(self, known: Collection[str]) -> _Answer:
        pools_away, trouble = frozenset[str](), ""
        try:
            vms = await self._provider.list()
        except ProviderPartlyAwayError as error:
            vms, pools_away, trouble = error.vms, frozenset(error.pools), str(error)
        return _Answer(known, vms, await self._provider.list_notices(), pools_away, trouble)

    async def close(self) -> None:
        """Stop waiting for calls of the provider."""
        await self._call.close()
        await self._size.close()

    async def _emit_provider_event(self, kind: str, message: str) -> None:
        async with self._database.write() as session:
            self._events.emit_event(session, kind, message, data={"provider": self._provider.name})

    async def _take_in(self, answer: _Answer | None) -> bool:
        """Record what the provider reports. Returns whether the set of VMs changed."""
        if answer is None:
            return False
        listed = {vm.id: vm for vm in answer.vms if not vm.going and vm.ended is None}
        rows = (await self._world.load_view()).vms
        unknown = sorted(listed.keys() - rows.keys())
        for vm_id, row in rows.items():
            if row.pool in answer.pools_away or (vm_id not in answer.known and vm_id not in listed):
                continue
            reason = self._ends.get(vm_id) or self._size.describe_return(vm_id)
            self._registry.set_listed(vm_id, vm_id in listed, reason)
        prices = {vm_id: vm.price_per_hour for vm_id, vm in listed.items() if vm.price_per_hour is not None}
        other = [vm_id for vm_id, row in rows.items() if prices.get(vm_id, row.price_per_hour) != row.price_per_hour]
        found = [vm_id for vm_id, vm in listed.items() if vm_id in rows and _says_more(vm, rows[vm_id])]
        waiting = [vm_id for vm_id, row in rows.items() if vm_id in listed and row.vm_state is VmState.REQUESTED]
        waits = {vm_id: listed[vm_id].reason_before_hello for vm_id in waiting}
        news = {vm_id: reason for vm_id, reason in waits.items() if reason != rows[vm_id].reason}
        adopted = False
        if unknown or answer.notices or other or found or news:
            async with self._database.write() as session:
                for vm_id in unknown:
                    if await self._adopt(session, listed[vm_id]):
                        self._registry.set_listed(vm_id, True)
                        self._registry.expect_hello(vm_id)
                        adopted = True
                async for stored in _read_rows(session, other):
                    change_price(session, stored, prices[stored.id], self._now())
                async for stored in _read_rows(session, found):
                    vm = listed[stored.id]
                    stored.zone, stored.machine_type = vm.zone or stored.zone, vm.machine_type or stored.machine_type
                    stored.ref = vm.ref
                async for stored in _read_rows(session, [*news]):
                    stored.reason = news[stored.id]
                for notice in answer.notices:
                    await self._fleet.note_notice(session, notice.vm_id, notice.id, notice.deadline_unix_s)
        return adopted

    async def _note(self, rows: Mapping[str, VmFacts], views: Mapping[str, VmView]) -> bool:
        """Bring the VMs' states up to date. Returns whether anything changed."""
        now = self._now()
        together = find_silent_together(now, views.values(), self._rules)
        verdicts = {
            vm_id: decide_vm(now, view, self._rules, together=vm_id in together) for vm_id, view in views.items()
        }
        until = {vm_id: row.quarantined_until for vm_id, row in rows.items() if row.quarantined_until is not None}
        released = {vm_id for vm_id, at in until.items() if not self._registry.is_quarantined(vm_id, at, now)}
        to_change = [vm_id for vm_id in rows if verdicts[vm_id] is not None or vm_id in released]
        if not to_change:
            return False
        gone = []
        async with self._database.write() as session:
            async for row in _read_rows(session, to_change):
                vm_id, verdict = row.id, verdicts[row.id]
                if row.version != rows[vm_id].version:
                    self._world.check_version(rows[vm_id], row.version)
                    continue  # the decision is stale: look again at once
                if verdict is not None:
                    await self._fleet.move_vm(session, row, verdict.state, verdict.reason)
                    gone += [vm_id] if verdict.state is VmState.GONE else []
                if vm_id in released:
                    self._end_quarantine(session, row)
        for vm_id in gone:
            self._registry.forget_vm(vm_id)
        return True

    async def _adopt(self, session: AsyncSession, vm: ProviderVm) -> bool:
        """Take a VM of ours that the store does not know; give one back that the store has given up. Returns whether it
        was taken."""
        if await session.get(VmRow, vm.id) is None:
            self._fleet.add_vm(session, vm)
            return True
        self._size.reap_vm(vm.id)
        return False

    def _end_quarantine(self, session: AsyncSession, row: VmRow) -> None:
        """Probation: a slow VM may have recovered, which shows when it works."""
        row.quarantined_until = None
        self._events.emit_event(session, "vm_released", f"VM {row.id} is out of quarantine, on probation", vm_id=row.id)


def _says_more(vm: ProviderVm, row: VmFacts) -> bool:
    """Whether the list now says where the VM is, or on what. A cloud may list a VM some time after it has made it."""
    return (vm.zone or row.zone, vm.machine_type or row.machine_type) != (row.zone, row.machine_type)


async def _read_rows(session: AsyncSession, vm_ids: Sequence[str]) -> AsyncIterator[VmRow]:
    """Rows of VMs, in the order of their ids, by few queries: all VMs of a fleet may change at once."""
    for ids in split_keys(vm_ids):
        found = {row.id: row for row in await session.scalars(select(VmRow).where(VmRow.id.in_(ids)))}
        for vm_id in ids:
            yield found[vm_id]
