"""Keeps the VMs' states true and their number at what is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.controllers.fleet_size import FleetSize
from varuna_manager.controllers.store_rows import BusyVms
from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow
from varuna_manager.domain.fleet_decision import Limits, decide_vm
from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.silence import silent_together
from varuna_manager.domain.states import VmState
from varuna_manager.providers.base import Notice, Provider, ProviderVm
from varuna_manager.services.bell import Bell
from varuna_manager.services.events import EventLog
from varuna_manager.services.fleet import FleetService
from varuna_manager.services.vm_registry import VmRegistry
from varuna_manager.services.vm_rows import VmFacts, VmRows
from varuna_manager.services.vm_views import VmViews

_BROKEN_STREAM_S = 2.0
"""For so long after a stream broke, the provider is asked often: it may take a moment to see that the VM is gone."""
_BROKEN_STREAM_PERIOD_S = 0.1


class FleetController:
    """`spare_after_s`: how long a VM has no worker before a fleet that follows the jobs gives it up."""

    name = "fleet"

    def __init__(
        self,
        database: Database,
        registry: VmRegistry,
        provider: Provider,
        fleet: FleetService,
        events: EventLog,
        bell: Bell,
        rules: Rules,
        period_s: float,
        now: Callable[[], float] = time.time,
        *,
        limits: Limits | None = None,
        spare_after_s: float = 300.0,
        chance: Random | None = None,
    ) -> None:
        self._database = database
        self._registry = registry
        self._provider = provider
        self._fleet = fleet
        self._events = events
        self._bell = bell
        self._rules = rules
        self._period_s = period_s
        self._now = now
        self._size = FleetSize(
            database=database,
            provider=provider,
            fleet=fleet,
            events=events,
            rules=rules,
            now=now,
            limits=limits or Limits(),
            spare_after_s=spare_after_s,
            chance=chance or Random(),
            ring=bell.ring,
        )
        self._rows, self._busy, self._views = VmRows(), BusyVms(), VmViews(registry, now)
        self._log = structlog.get_logger("varuna.controller").bind(controller=self.name)
        self._going: Sequence[ProviderVm] = ()
        """VMs that the provider is still deleting: gone, but paid for."""
        self._trouble = ""
        """Of the provider, when it was asked last; empty: it answered."""

    async def reconcile(self) -> float:
        answer = await self._ask_provider()
        changed = await self._take_in(answer)
        rows, views = await self._look()
        if await self._note(rows, views):
            changed = True
            rows, views = await self._look()
        if answer is not None and self._provider.grows:
            changed |= await self._size.resize(rows, views, self._registry, self._going)
        if changed:
            self._bell.ring()
            return 0.0
        hurried = self._registry.just_disconnected(_BROKEN_STREAM_S)
        return min(_BROKEN_STREAM_PERIOD_S, self._period_s) if hurried else self._period_s

    async def _ask_provider(self) -> tuple[dict[str, ProviderVm], Sequence[Notice]] | None:
        """What it lists; None when it does not answer: then silence alone tells which VMs are lost."""
        try:
            vms = await self._provider.list()
            notices = await self._provider.notices()
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                self._trouble = trouble
                self._log.exception("the provider does not answer", provider=self._provider.name)
                await self._tell("provider_away", f"the provider does not answer ({trouble}): its VMs are left alone")
            return None
        if self._trouble:
            self._trouble = ""
            await self._tell("provider_back", "the provider answers again")
        self._going = [vm for vm in vms if vm.going]
        return {vm.id: vm for vm in vms if not vm.going}, notices

    async def close(self) -> None:
        """Wait for nothing that the provider was asked for."""
        await self._size.close()

    async def _tell(self, kind: str, message: str) -> None:
        async with self._database.write() as session:
            self._events.add(session, kind, message, data={"provider": self._provider.name})

    async def _look(self) -> tuple[Mapping[str, VmFacts], Mapping[str, VmView]]:
        """All VMs that are not gone, by id."""
        async with self._database.read() as session:
            rows, busy = await self._rows.read(session), await self._busy.read(session)
        return rows, await self._views.look(rows, busy)

    async def _take_in(self, answer: tuple[dict[str, ProviderVm], Sequence[Notice]] | None) -> bool:
        """Put down what the provider says; whether that changed which VMs there are."""
        if answer is None:
            return False
        listed, notices = answer
        async with self._database.read() as session:
            rows = await self._rows.read(session)
        unknown = sorted(listed.keys() - rows.keys())
        for vm_id in rows:
            self._registry.set_listed(vm_id, vm_id in listed)
        prices = {vm_id: vm.price_per_hour for vm_id, vm in listed.items() if vm.price_per_hour is not None}
        other = [vm_id for vm_id, row in rows.items() if prices.get(vm_id, row.price_per_hour) != row.price_per_hour]
        adopted = False
        if unknown or notices or other:
            async with self._database.write() as session:
                for vm_id in unknown:
                    if await self._adopt(session, listed[vm_id]):
                        self._registry.set_listed(vm_id, True)
                        adopted = True
                for vm_id in other:
                    (await session.get_one(VmRow, vm_id)).price_per_hour = prices[vm_id]
                for notice in notices:
                    await self._fleet.note_notice(session, notice.vm_id, notice.id, notice.deadline_unix_s)
        return adopted

    async def _note(self, rows: Mapping[str, VmFacts], views: Mapping[str, VmView]) -> bool:
        """Bring the VMs' states up to date; whether anything changed."""
        now = self._now()
        together = silent_together(views.values(), self._rules)
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
            for vm_id in to_change:
                row, verdict = await session.get_one(VmRow, vm_id), verdicts[vm_id]
                if row.version != rows[vm_id].version:
                    continue  # decided on what is no longer so: the next look is at once
                if verdict is not None:
                    await self._fleet.move_vm(session, row, verdict.state, verdict.reason)
                    gone += [vm_id] if verdict.state is VmState.GONE else []
                if vm_id in released:
                    self._end_quarantine(session, row)
        for vm_id in gone:
            self._registry.forget(vm_id)
        return True

    async def _adopt(self, session: AsyncSession, vm: ProviderVm) -> bool:
        """A VM of ours that the store does not know, or gave up: the one is taken, the other is given back again.
        Whether it is taken."""
        if await session.get(VmRow, vm.id) is None:
            self._fleet.add_vm(session, vm)
            return True
        self._size.reap(vm.id)
        return False

    def _end_quarantine(self, session: AsyncSession, row: VmRow) -> None:
        """Probation: what was slow once may be well again; whether it is shows when it works."""
        row.quarantined_until = None
        self._events.add(session, "vm_released", f"VM {row.id} is out of quarantine, on probation", vm_id=row.id)
