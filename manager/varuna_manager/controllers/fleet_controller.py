"""Keeps the VMs' states true and their number at what is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.controllers.fleet_size import FleetSize
from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow
from varuna_manager.domain.fleet_decision import Limits, decide_vm
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.states import VmState
from varuna_manager.providers.base import Notice, Provider, ProviderVm
from varuna_manager.services.bell import Bell
from varuna_manager.services.events import EventLog
from varuna_manager.services.fleet import FleetService, workers_by_vm
from varuna_manager.services.vm_registry import VmRegistry

_BROKEN_STREAM_S = 2.0
"""For so long after a stream broke, the provider is asked often: it may take a moment to see that the VM is gone."""
_BROKEN_STREAM_PERIOD_S = 0.1
_VMS = select(VmRow).where(VmRow.state != VmState.GONE.value)


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
        )
        self._log = structlog.get_logger("varuna.controller").bind(controller=self.name)
        self._trouble = ""
        """Of the provider, when it was asked last; empty: it answered."""

    async def reconcile(self) -> float:
        answer = await self._ask_provider()
        changed, alive = await self._note(answer)
        for row in alive:
            if row.vm_state is VmState.GONE:
                self._registry.forget(row.id)
        if answer is not None and self._provider.grows:
            staying = [row for row in alive if row.vm_state is not VmState.GONE]
            changed |= await self._size.resize(staying, self._registry)
        if changed:
            self._bell.ring()
            return 0.0
        hurried = self._registry.just_disconnected(_BROKEN_STREAM_S)
        return min(_BROKEN_STREAM_PERIOD_S, self._period_s) if hurried else self._period_s

    async def _ask_provider(self) -> tuple[dict[str, ProviderVm], Sequence[Notice]] | None:
        """What it lists; None when it does not answer: then silence alone tells which VMs are lost."""
        try:
            listed = {vm.id: vm for vm in await self._provider.list()}
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
        return listed, notices

    async def _tell(self, kind: str, message: str) -> None:
        async with self._database.write() as session:
            self._events.add(session, kind, message, data={"provider": self._provider.name})

    async def _note(
        self, answer: tuple[dict[str, ProviderVm], Sequence[Notice]] | None
    ) -> tuple[bool, Sequence[VmRow]]:
        """Bring the store up to date; whether anything changed, and the VMs that were not gone before."""
        changed = False
        async with self._database.write() as session:
            rows = (await session.scalars(_VMS)).all()
            alive = {row.id: row for row in rows}
            if answer is not None:
                listed, notices = answer
                for vm_id in sorted(listed.keys() - alive.keys()):
                    row = await self._adopt(session, listed[vm_id])
                    changed = True
                    if row is not None:
                        alive[vm_id] = row
                for notice in notices:
                    await self._fleet.note_notice(session, notice.vm_id, notice.id, notice.deadline_unix_s)
                for vm_id in alive:
                    self._registry.set_listed(vm_id, vm_id in listed)
            busy = await workers_by_vm(session)
            for row in alive.values():
                view = self._registry.view(row, now=self._now(), workers=busy[row.id])
                verdict = decide_vm(self._now(), view, self._rules)
                if verdict is not None:
                    await self._fleet.move_vm(session, row, verdict.state, verdict.reason)
                    changed = True
                changed |= self._end_quarantine(session, row)
        return changed, list(alive.values())

    async def _adopt(self, session: AsyncSession, vm: ProviderVm) -> VmRow | None:
        """A VM of ours that the store does not know, or gave up: the one is taken, the other is given back again."""
        row = await session.get(VmRow, vm.id)
        if row is None:
            return self._fleet.add_vm(session, vm)
        self._size.reap(vm.id)
        return None

    def _end_quarantine(self, session: AsyncSession, row: VmRow) -> bool:
        """Probation: what was slow once may be well again; whether it is shows when it works."""
        if row.quarantined_until is None or self._now() < row.quarantined_until:
            return False
        row.quarantined_until = None
        self._events.add(session, "vm_released", f"VM {row.id} is out of quarantine, on probation", vm_id=row.id)
        return True
