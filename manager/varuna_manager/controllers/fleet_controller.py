"""Keeps the VMs' states true and their number at the target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow
from varuna_manager.domain.fleet_decision import FleetDecision, FleetView, decide_fleet, decide_vm
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.states import VmState
from varuna_manager.providers.base import Provider, ProviderRefusedError
from varuna_manager.services.bell import Bell
from varuna_manager.services.events import EventLog
from varuna_manager.services.fleet import FleetService, fleet_target, live_workers
from varuna_manager.services.vm_registry import VmRegistry

_BROKEN_STREAM_S = 2.0
"""For so long after a stream broke, the provider is asked often: it may take a moment to see that the VM is gone."""
_BROKEN_STREAM_PERIOD_S = 0.1


class FleetController:
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
        self._refusals = 0
        self._refused_at = 0.0
        self._refusal = ""

    async def reconcile(self) -> float:
        listed = {vm.id: vm for vm in await self._provider.list()}
        notices = await self._provider.notices()
        changed = False
        async with self._database.write() as session:
            known = {row.id: row for row in (await session.scalars(select(VmRow))).all()}
            for vm_id, vm in listed.items():
                if vm_id not in known:
                    known[vm_id] = self._fleet.add_vm(session, vm)
                    changed = True
            for notice in notices:
                await self._fleet.note_notice(session, notice.vm_id, notice.id, notice.deadline_unix_s)
            alive = [row for row in known.values() if row.vm_state is not VmState.GONE]
            workers = await live_workers(session)
            for row in alive:
                self._registry.set_listed(row.id, row.id in listed)
                count = sum(worker.vm_id == row.id for worker in workers)
                view = self._registry.view(row, now=self._now(), workers=count)
                verdict = decide_vm(self._now(), view, self._rules)
                if verdict is not None:
                    await self._fleet.move_vm(session, row, verdict.state, verdict.reason)
                    changed = True
                changed |= self._end_quarantine(session, row)
        for row in alive:
            if row.vm_state is VmState.GONE:
                self._registry.forget(row.id)
        changed |= await self._resize([row for row in alive if row.vm_state is not VmState.GONE])
        if changed:
            self._bell.ring()
            return 0.0
        hurried = self._registry.just_disconnected(_BROKEN_STREAM_S)
        return min(_BROKEN_STREAM_PERIOD_S, self._period_s) if hurried else self._period_s

    def _end_quarantine(self, session: AsyncSession, row: VmRow) -> bool:
        """Probation: what was slow once may be well again; whether it is shows when it works."""
        if row.quarantined_until is None or self._now() < row.quarantined_until:
            return False
        row.quarantined_until = None
        self._events.add(session, "vm_released", f"VM {row.id} is out of quarantine, on probation", vm_id=row.id)
        return True

    # ------------------------------------------------------------ the number of VMs

    async def _resize(self, rows: Sequence[VmRow]) -> bool:
        if self._fleet.market_changed:
            self._fleet.market_changed = False
            self._refusals = 0
        decision = decide_fleet(self._now(), await self._view(rows), self._rules)
        if decision.drain:
            await self._drain(decision)
        for vm_id in decision.delete:
            await self._provider.delete(vm_id)
        created = await self._create(decision.create)
        return bool(decision.drain or decision.delete or created)

    async def _view(self, rows: Sequence[VmRow]) -> FleetView:
        async with self._database.read() as session:
            target = await fleet_target(session, self._provider.name)
            workers = await live_workers(session)
        views = [
            self._registry.view(row, now=self._now(), workers=sum(worker.vm_id == row.id for worker in workers))
            for row in rows
        ]
        return FleetView(
            target=target,
            vms=tuple(views),
            refusals=self._refusals,
            refused_at=self._refused_at,
            refusal=self._refusal,
        )

    async def _drain(self, decision: FleetDecision) -> None:
        async with self._database.write() as session:
            for vm_id in decision.drain:
                row = await session.get_one(VmRow, vm_id)
                await self._fleet.move_vm(session, row, VmState.DRAINING, decision.reason)

    async def _create(self, count: int) -> int:
        """Ask for so many; how many were granted. The first refusal ends the asking, with a growing pause."""
        for created in range(count):
            try:
                await self._provider.create()
            except ProviderRefusedError as refused:
                await self._note_refusal(str(refused), count - created)
                return created
            self._refusals = 0
        return count

    async def _note_refusal(self, text: str, missing: int) -> None:
        self._refusals += 1
        self._refused_at = self._now()
        if text == self._refusal and self._refusals > 1:
            return
        self._refusal = text
        async with self._database.write() as session:
            message = f"{missing} VMs are missing and the provider refused: {text}"
            self._events.add(session, "provider_refused", message, data={"missing": missing})
