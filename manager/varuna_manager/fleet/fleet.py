"""The fleet as its users see it, and the admission of agents."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.agents.reports import ReportService, note_notice
from varuna_manager.agents.request_batcher import RequestBatcher
from varuna_manager.answers.errors import ConflictError, MissingError, UnavailableError
from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import FleetRow, GenerationRow, JobProgressRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.fitting import may_fit_job
from varuna_manager.domain.fleet_decision import JobDemand, VmRange
from varuna_manager.domain.spec import read_spec
from varuna_manager.domain.states import (
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    VmState,
)
from varuna_manager.jobs.jobs import ALIVE
from varuna_manager.providers.base import (
    EmulatedProvider,
    Provider,
    ProviderPartlyAwayError,
    ProviderRefusedError,
    ProviderVm,
    UnknownVmError,
    UnsupportedByProviderError,
    VmOffer,
)
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.reading import IS_LIVE, NOT_GONE
from varuna_manager.world.vm_registry import VmRegistry
from varuna_proto.names import clean_gpu_type
from varuna_proto.rest_fleet import FleetDocument, PoolDocument, PreemptionDocument
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.wording import count_are, count_of

_LISTED_WITHIN_S = 120.0
"""How long after its first Hello a VM may be missing from its provider's list, which may be older than the VM."""


class _Admission(NamedTuple):
    """The answer to a Hello from the store alone."""

    has_row: bool
    refusal: str | None = None


class FleetService:
    """`emulated`: the provider, if its market can be changed here."""

    def __init__(
        self,
        database: Database,
        events: EventLog,
        registry: VmRegistry,
        provider: Provider,
        reports: ReportService,
        bell: Bell,
        now: Callable[[], float] = time.time,
        emulated: EmulatedProvider | None = None,
    ) -> None:
        self._database = database
        self._events = events
        self._registry = registry
        self.provider = provider
        self._emulated = emulated
        self._reports = reports
        self._bell = bell
        self._now = now
        self._admissions = RequestBatcher(self._admit_known)
        self._admissions_by_list = RequestBatcher(self._admit_listed)
        self._unlisted: dict[str, float] = {}
        """VMs that no list has had yet, and when they first sent Hello."""
        self.market_changed = False
        """Called when the emulated market was changed, because it may now grant what it refused before."""
        self.pools: Sequence[PoolDocument] = ()
        """As the fleet's controller last saw them."""
        self.pools_reason: str | None = None

    @property
    def keeps_drained_vms(self) -> bool:
        """Whether a drained VM stays, because a host of the user's own is not given back."""
        return not self.provider.is_elastic

    # ------------------------------------------------------------ for users

    async def describe_fleet(self) -> FleetDocument:
        async with self._database.read() as session:
            return await self.read_fleet(session)

    async def read_fleet(self, session: AsyncSession) -> FleetDocument:
        """As `describe_fleet`, with the caller's session."""
        query = select(VmRow.state, func.count(), func.sum(VmRow.gpus)).where(NOT_GONE).group_by(VmRow.state)
        wants = await session.get(FleetRow, self.provider.name)
        counts = {state: (vms, int(gpus)) for state, vms, gpus in await session.execute(query)}
        return {
            "provider": self.provider.name,
            "target": wants.target if wants is not None else 0,
            "min_vms": wants.min_vms if wants is not None else None,
            "max_vms": wants.max_vms if wants is not None else None,
            "capacity": None if self._emulated is None else self._emulated.capacity,
            "vms": {state.value: counts.get(state.value, (0, 0))[0] for state in VmState if state is not VmState.GONE},
            "gpus": counts.get(VmState.READY.value, (0, 0))[1],
            "pools": [*self.pools],
            "pools_reason": self.pools_reason,
        }

    async def set_target(self, target: int) -> FleetDocument:
        """Set a fixed target."""
        async with self._database.write() as session:
            row = await self._fleet_row(session)
            if row.target != target or row.max_vms is not None:
                text = f"{count_are(target, 'VM')} wanted instead of {_wanted(row)}"
                self._events.emit_event(session, "fleet_target", text)
            row.target, row.min_vms, row.max_vms = target, None, None
            after_commit(session, self._bell.notify_listeners)
        self.market_changed = True
        return await self.describe_fleet()

    async def follow_jobs(self, vms: VmRange) -> FleetDocument:
        """Let the target follow the jobs' wants, within the range."""
        async with self._database.write() as session:
            row = await self._fleet_row(session)
            if (row.min_vms, row.max_vms) != (vms.min_vms, vms.max_vms):
                text = f"as many VMs as the jobs want, {vms.min_vms} to {vms.max_vms}, instead of {_wanted(row)}"
                self._events.emit_event(session, "fleet_target", text)
            row.min_vms, row.max_vms = vms.min_vms, vms.max_vms
            after_commit(session, self._bell.notify_listeners)
        self.market_changed = True
        return await self.describe_fleet()

    async def _fleet_row(self, session: AsyncSession) -> FleetRow:
        row = await session.get(FleetRow, self.provider.name)
        if row is None:
            row = FleetRow(provider=self.provider.name, target=0)
            session.add(row)
        return row

    async def set_capacity(self, capacity: int | None) -> FleetDocument:
        """Set how many VMs the emulated market grants. Raises ConflictError if there is no emulated market."""
        if self._emulated is None:
            raise ConflictError(
                f"the {self.provider.name} provider's market is not the manager's to change: only local and replay "
                "emulate one"
            )
        await self._emulated.set_capacity(capacity)
        async with self._database.write() as session:
            many = "any number of VMs" if capacity is None else count_of(capacity, "VM")
            self._events.emit_event(session, "capacity", f"the local market grants {many}")
        self.market_changed = True
        self._bell.notify_listeners()
        return await self.describe_fleet()

    async def preempt_vm(self, vm_id: str, notice_s: float) -> PreemptionDocument:
        """Take a VM away as a spot market would. Raises MissingError, ConflictError, UnavailableError."""
        async with self._database.read() as session:
            row = await session.get(VmRow, vm_id)
        if row is None:
            raise MissingError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
        try:
            await self.provider.preempt_vm(vm_id, notice_s)
        except UnknownVmError as error:
            raise ConflictError(f"VM {vm_id!r} no longer runs: {error}") from error
        except UnsupportedByProviderError as error:
            raise ConflictError(f"VM {vm_id!r} cannot be preempted: {error}") from error
        except ProviderRefusedError as error:
            raise UnavailableError(f"VM {vm_id!r} was not preempted: {error}") from error
        self._bell.notify_listeners()
        return {"id": vm_id, "notice_s": notice_s}

    # ------------------------------------------------------------ for agents

    async def admit_agent(self, hello: pb.Hello) -> str | None:
        """Take the VM that sent the Hello into the store. Returns the reason when it is never taken. Raises
        UnavailableError while a list of its provider may be older than the VM."""
        has_row, refusal = await self._admissions.add_request(hello)
        if not has_row:
            refusal = await self._admissions_by_list.add_request(hello)
        since = self._unlisted.get(hello.vm_id)
        if since is not None and self._now() < since + _LISTED_WITHIN_S:
            raise UnavailableError(f"no provider lists VM {hello.vm_id!r} yet: dial again")
        self._unlisted.pop(hello.vm_id, None)
        return refusal

    async def _admit_known(self, hellos: Sequence[pb.Hello]) -> list[_Admission]:
        """Admit the VMs that have rows, without asking the provider: while it thinks, no lease of theirs may run out.

        Writes nothing for most VMs after a restart of the manager, because the store has them already.
        """
        rows = {row.id: row for row in await self._admitted(hellos)}
        news = [hello for hello in hellos if hello.vm_id in rows and _is_news(rows[hello.vm_id], hello)]
        refusals: dict[str, str | None] = {}
        if news:
            async with self._database.write() as session:
                for hello in news:
                    refusals[hello.vm_id] = await self._admit_one(session, hello, {})
        return [_Admission(hello.vm_id in rows, refusals.get(hello.vm_id)) for hello in hellos]

    async def _admit_listed(self, hellos: Sequence[pb.Hello]) -> list[str | None]:
        """Admit the VMs without rows that the provider lists."""
        listed = await self._find_listed({hello.vm_id for hello in hellos})
        async with self._database.write() as session:
            return [await self._admit_one(session, hello, listed) for hello in hellos]

    async def _find_listed(self, vm_ids: set[str]) -> Mapping[str, ProviderVm]:
        """Those of the VMs that the provider has."""
        try:
            vms = await self.provider.list()
        except ProviderPartlyAwayError as error:
            if not vm_ids <= {vm.id for vm in error.vms}:
                raise  # the others may be of the pools that do not answer: their agents try again
            vms = error.vms
        return {vm.id: vm for vm in vms}

    async def _admitted(self, hellos: Sequence[pb.Hello]) -> Sequence[Row[*tuple[Any, ...]]]:
        query = select(
            VmRow.id,
            VmRow.state,
            VmRow.incarnation,
            VmRow.gpus,
            VmRow.host,
            VmRow.device_memory_bytes,
            VmRow.gpu_type,
        ).where(VmRow.id.in_([hello.vm_id for hello in hellos]))
        async with self._database.read() as session:
            return (await session.execute(query)).all()

    async def _admit_one(self, session: AsyncSession, hello: pb.Hello, listed: Mapping[str, ProviderVm]) -> str | None:
        row = await session.get(VmRow, hello.vm_id)
        if row is None and hello.vm_id not in listed:
            if self.provider.is_elastic:
                self._note_unlisted(hello.vm_id)
            return f"VM {hello.vm_id!r} is none of this manager's: no provider of it has such a VM"
        self._unlisted.pop(hello.vm_id, None)
        if row is None:
            row = self.add_vm(session, listed[hello.vm_id])
        elif row.state == VmState.GONE:
            return f"VM {hello.vm_id!r} is gone: its provider gave it up"
        if row.incarnation not in (None, hello.incarnation):
            await self._drop_forgotten_workers(session, hello)
            if self.keeps_drained_vms:
                why = "it was drained" if row.notice_deadline is None else "it had notice to leave"
                # A reboot ends a notice, also before the deadline, because an agent that has left lets the cloud begin.
                # The new agent reports a notice again that is still in force.
                row.drained_at = row.notice_id = row.notice_deadline = None
                if row.state == VmState.DRAINING:
                    await self.move_vm(session, row, VmState.READY, f"{why}, and its agent has started again")
        row.incarnation, row.gpus, row.host = hello.incarnation, hello.gpus, hello.host
        row.device_memory_bytes, row.gpu_type = hello.device_memory_bytes or None, _gpu_type(hello)
        return None

    def _note_unlisted(self, vm_id: str) -> None:
        now = self._now()
        recent = {each: since for each, since in self._unlisted.items() if now < since + 2 * _LISTED_WITHIN_S}
        self._unlisted = {vm_id: now, **recent}

    async def _drop_forgotten_workers(self, session: AsyncSession, hello: pb.Hello) -> None:
        """The agent has restarted: workers that it does not name ended with its previous process."""
        running = {(worker.job_id, worker.generation, worker.rank) for worker in hello.workers}
        for worker in await live_workers(session, hello.vm_id):
            if (worker.job_id, worker.generation, worker.rank) not in running:
                text = f"the agent of VM {hello.vm_id} restarted and does not have this worker"
                self._reports.stop_worker(session, worker, ExitCause.AGENT_ENDED, exit_code=None, error_text=text)

    # ------------------------------------------------------------ for the fleet controller

    def add_vm(self, session: AsyncSession, vm: ProviderVm) -> VmRow:
        """Add a row for a VM that the provider has and the store does not."""
        now = self._now()
        row = VmRow(
            id=vm.id,
            provider=self.provider.name,
            state=VmState.REQUESTED.value,
            history=[{"at": now, "state": VmState.REQUESTED.value, "reason": "the provider has it"}],
            gpus=vm.gpus,
            device_memory_bytes=vm.device_memory_bytes,
            host=vm.host,
            ref=vm.ref,
            request=vm.request,
            price_per_hour=vm.price_per_hour,
            pool=vm.pool or None,
            zone=vm.zone or None,
            machine_type=vm.machine_type or None,
            created_at=vm.created_at,
            reason=vm.reason_before_hello,
        )
        session.add(row)
        status = "starting" if self.provider.is_elastic else vm.reason_before_hello
        self._events.emit_event(session, "vm_requested", f"VM {vm.id} is {status}", vm_id=vm.id, data={"ref": vm.ref})
        return row

    async def move_vm(self, session: AsyncSession, row: VmRow, state: VmState, reason: str) -> None:
        """Change the VM's state. When it is gone, its workers are, too."""
        was_there = row.vm_state in (VmState.READY, VmState.SUSPECT)
        was_lost = row.vm_state is VmState.LOST and state is VmState.GONE
        row.move_to_state(state, now=self._now(), reason=reason)
        row.reason = reason
        if state is VmState.READY:
            row.drain_deadline = None  # that drain is over
        data: dict[str, Any] = {"silent_s": self._registry.silence_s(row.id)} if was_there else {}
        data |= {"was_lost": True} if was_lost else {}
        self._events.emit_event(
            session, f"vm_{state.value}", f"VM {row.id} is {state.value}: {reason}", vm_id=row.id, data=data
        )
        if state is VmState.GONE:
            for worker in await live_workers(session, row.id):
                text = f"VM {row.id} is gone: {reason}"
                self._reports.stop_worker(session, worker, ExitCause.VM_GONE, exit_code=None, error_text=text)

    async def give_up_vms(self) -> None:
        """All VMs are about to end with this manager: the next one must not take them for losses of the market."""
        async with self._database.write() as session:
            for row in (await session.scalars(select(VmRow).where(NOT_GONE))).all():
                if row.vm_state is not VmState.DRAINING:
                    await self.move_vm(session, row, VmState.DRAINING, "it ends with its manager")

    async def note_notice(self, session: AsyncSession, vm_id: str, notice_id: str, deadline: float) -> None:
        await note_notice(session, self._events, vm_id, notice_id, deadline, source=self.provider.name)


def _wanted(row: FleetRow) -> str:
    return str(row.target) if row.max_vms is None else f"{row.min_vms} to {row.max_vms}, by the jobs"


def _is_news(row: Row[*tuple[Any, ...]], hello: pb.Hello) -> bool:
    """Whether the row differs from the Hello, or is of a VM that is not taken."""
    memory = hello.device_memory_bytes or None
    known = (row.incarnation, row.gpus, row.host, row.device_memory_bytes, row.gpu_type)
    return row.state == VmState.GONE or known != (
        hello.incarnation,
        hello.gpus,
        hello.host,
        memory,
        _gpu_type(hello),
    )


def _gpu_type(hello: pb.Hello) -> str | None:
    return clean_gpu_type(hello.gpu_type) or None


async def live_workers(session: AsyncSession, vm_id: str) -> Sequence[WorkerRow]:
    """The workers on the VM that have not stopped."""
    query = select(WorkerRow).where(WorkerRow.state.in_(ALIVE), WorkerRow.vm_id == vm_id)
    return (await session.scalars(query.order_by(WorkerRow.job_id, WorkerRow.generation, WorkerRow.rank))).all()


async def workers_by_vm(session: AsyncSession) -> Mapping[str, int]:
    """How many workers have not stopped, by VM; 0 for any other VM."""
    query = select(WorkerRow.vm_id, func.count()).where(WorkerRow.state.in_(ALIVE)).group_by(WorkerRow.vm_id)
    return Counter(dict((await session.execute(query)).all()))


async def job_wants(session: AsyncSession, offers: Collection[VmOffer]) -> tuple[list[JobDemand], int]:
    """What the jobs that are not over would have, of VMs as they are on offer; how many of them want other ones."""
    query = select(JobRow).where(IS_LIVE)
    jobs = (await session.scalars(query.order_by(JobRow.created_at, JobRow.id))).all()
    # Only a job's newest generation runs. There are many others, and no index finds those that run.
    newest = (GenerationRow.job_id == JobProgressRow.job_id) & (GenerationRow.number == JobProgressRow.newest)
    training = await session.scalars(
        select(GenerationRow.job_id)
        .join(JobProgressRow, newest)
        .where(
            JobProgressRow.job_id.in_([job.id for job in jobs]),
            GenerationRow.state == GenerationState.RUNNING.value,
            GenerationRow.kind == GenerationKind.TRAINING.value,
            # Before its first step, which may take long, a generation takes no more VMs.
            GenerationRow.last_step.is_not(None),
        )
    )
    trains = set(training.all())
    wants, unfit = [], 0
    for job in jobs:
        spec, flaw = read_spec(job.spec)
        if job.state == JobState.CANCELLING or flaw:  # one with a flaw is about to fail
            continue
        resources = spec.resources
        fits = [
            offer
            for offer in offers
            if may_fit_job(resources, gpu_type=offer.gpu_type, device_memory_bytes=offer.device_memory_bytes)
        ]
        if fits:
            demand = JobDemand(
                id=job.id,
                max_gpus=resources.max_gpus,
                trains=job.id in trains,
                gpu_types=frozenset(offer.gpu_type for offer in fits),
                mixes_types=resources.mix_gpu_types,
            )
            wants.append(demand)
        else:
            unfit += 1
    return wants, unfit
