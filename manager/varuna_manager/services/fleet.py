"""The fleet as its users see it, and the admission of agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import FleetRow, VmRow, WorkerRow
from varuna_manager.domain.states import STOPPED_WORKER_STATES, ExitCause, VmState
from varuna_manager.providers.base import EmulatedProvider, ProviderVm, UnknownVmError
from varuna_manager.services import documents
from varuna_manager.services.bell import Bell
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import ConflictError, NotFoundError
from varuna_manager.services.events import EventLog
from varuna_manager.services.reports import ReportService, note_notice
from varuna_manager.services.vm_registry import VmRegistry
from varuna_proto.v1 import agent_pb2 as pb


class FleetService:
    """`hurry` rings for the fleet controller to ask the provider at once and without backoff."""

    def __init__(
        self,
        database: Database,
        events: EventLog,
        registry: VmRegistry,
        provider: EmulatedProvider,
        reports: ReportService,
        bell: Bell,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._events = events
        self._registry = registry
        self._provider = provider
        self._reports = reports
        self._bell = bell
        self._now = now
        self.market_changed = False
        """The emulated market was changed: what it refused before, it may grant now."""

    # ------------------------------------------------------------ for users

    async def vms(self, *, with_gone: bool) -> list[Document]:
        async with self._database.read() as session:
            query = select(VmRow).order_by(VmRow.created_at)
            if not with_gone:
                query = query.where(VmRow.state != VmState.GONE.value)
            rows = (await session.scalars(query)).all()
            workers = await live_workers(session)
        return [
            documents.vm_document(row, [w for w in workers if w.vm_id == row.id], self._registry.last_heard_s(row.id))
            for row in rows
        ]

    async def fleet(self) -> Document:
        async with self._database.read() as session:
            target = await fleet_target(session, self._provider.name)
            rows = (await session.scalars(select(VmRow).where(VmRow.state != VmState.GONE.value))).all()
        by_state = {state.value: 0 for state in VmState if state is not VmState.GONE}
        for row in rows:
            by_state[row.state] += 1
        return {
            "provider": self._provider.name,
            "target": target,
            "capacity": self._provider.capacity,
            "vms": by_state,
            "gpus": sum(row.gpus for row in rows if row.state == VmState.READY),
        }

    async def set_target(self, target: int) -> Document:
        async with self._database.write() as session:
            row = await session.get(FleetRow, self._provider.name)
            before = 0 if row is None else row.target
            if row is None:
                session.add(FleetRow(provider=self._provider.name, target=target))
            else:
                row.target = target
            if before != target:
                self._events.add(session, "fleet_target", f"{target} VMs are wanted instead of {before}")
            after_commit(session, self._bell.ring)
        self.market_changed = True
        return await self.fleet()

    async def set_capacity(self, capacity: int | None) -> Document:
        await self._provider.set_capacity(capacity)
        async with self._database.write() as session:
            many = "any number of" if capacity is None else str(capacity)
            self._events.add(session, "capacity", f"the local market grants {many} VMs")
        self.market_changed = True
        self._bell.ring()
        return await self.fleet()

    async def preempt(self, vm_id: str, notice_s: float) -> Document:
        """Take a VM as a spot market would. Raises NotFoundError, ConflictError."""
        async with self._database.read() as session:
            row = await session.get(VmRow, vm_id)
        if row is None:
            raise NotFoundError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
        try:
            await self._provider.preempt(vm_id, notice_s)
        except UnknownVmError as error:
            raise ConflictError(f"VM {vm_id!r} is not running any more: {error}") from error
        self._bell.ring()
        return {"id": vm_id, "notice_s": notice_s}

    # ------------------------------------------------------------ for agents

    async def admit(self, hello: pb.Hello) -> str | None:
        """Take the VM that says Hello into the store; the reason when it is not taken."""
        listed = {vm.id: vm for vm in await self._provider.list()}
        async with self._database.write() as session:
            row = await session.get(VmRow, hello.vm_id)
            if row is None:
                if hello.vm_id not in listed:
                    return f"VM {hello.vm_id!r} is none of this manager's: no provider of it has such a VM"
                row = self.add_vm(session, listed[hello.vm_id])
            elif row.state == VmState.GONE:
                return f"VM {hello.vm_id!r} is gone: its provider gave it up"
            if row.incarnation not in (None, hello.incarnation):
                await self._drop_forgotten_workers(session, hello)
            row.incarnation, row.gpus, row.host = hello.incarnation, hello.gpus, hello.host
            row.device_memory_bytes = hello.device_memory_bytes or None
        return None

    async def _drop_forgotten_workers(self, session: AsyncSession, hello: pb.Hello) -> None:
        """The agent started anew: workers of the VM that it does not name ended with its former self."""
        running = {(worker.job_id, worker.generation, worker.rank) for worker in hello.workers}
        for worker in await live_workers(session, hello.vm_id):
            if (worker.job_id, worker.generation, worker.rank) not in running:
                text = f"the agent of VM {hello.vm_id} started anew and does not have this worker"
                self._reports.stop_worker(session, worker, ExitCause.KILLED, exit_code=None, error_text=text)

    # ------------------------------------------------------------ for the fleet controller

    def add_vm(self, session: AsyncSession, vm: ProviderVm) -> VmRow:
        """A row for a VM that the provider has and the store does not know."""
        now = self._now()
        row = VmRow(
            id=vm.id,
            provider=self._provider.name,
            state=VmState.REQUESTED.value,
            history=[{"at": now, "state": VmState.REQUESTED.value, "reason": "the provider has it"}],
            gpus=vm.gpus,
            device_memory_bytes=vm.device_memory_bytes,
            host=vm.host,
            ref=vm.ref,
            created_at=vm.created_at,
            reason="its agent is starting",
        )
        session.add(row)
        self._events.add(session, "vm_requested", f"VM {vm.id} is starting", vm_id=vm.id, data={"ref": vm.ref})
        return row

    async def move_vm(self, session: AsyncSession, row: VmRow, state: VmState, reason: str) -> None:
        """Change the VM's state; with a VM that is gone go its workers."""
        row.move(state, now=self._now(), reason=reason)
        row.reason = reason
        self._events.add(session, f"vm_{state.value}", f"VM {row.id} is {state.value}: {reason}", vm_id=row.id)
        if state is VmState.GONE:
            for worker in await live_workers(session, row.id):
                text = f"VM {row.id} is gone: {reason}"
                self._reports.stop_worker(session, worker, ExitCause.VM_GONE, exit_code=None, error_text=text)

    async def note_notice(self, session: AsyncSession, vm_id: str, notice_id: str, deadline: float) -> None:
        await note_notice(session, self._events, vm_id, notice_id, deadline, source=self._provider.name)


async def live_workers(session: AsyncSession, vm_id: str | None = None) -> Sequence[WorkerRow]:
    """The workers that have not stopped: all, or those of one VM."""
    query = select(WorkerRow).where(WorkerRow.state.not_in([state.value for state in STOPPED_WORKER_STATES]))
    if vm_id is not None:
        query = query.where(WorkerRow.vm_id == vm_id)
    return (await session.scalars(query.order_by(WorkerRow.job_id, WorkerRow.generation, WorkerRow.rank))).all()


async def fleet_target(session: AsyncSession, provider: str) -> int:
    row = await session.get(FleetRow, provider)
    return 0 if row is None else row.target
