"""Keeps every job in the shape that `decide_job` wants, and every agent told.

Each look loads a snapshot, goes through the jobs by age (later ones get what is left), applies what was decided in one
short transaction per job, and at last compares what each agent should have been told with what it was told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError

from varuna_manager.controllers import messages
from varuna_manager.controllers.job_view import LoadedJob, Snapshot, SnapshotLoader, previous_placement, with_devices
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.commands import LaunchKey, Presence, StopKey, wanted_commands
from varuna_manager.domain.job_decision import decide_job, next_devices, wants_plan
from varuna_manager.domain.observed import (
    Action,
    Decision,
    Device,
    EndGeneration,
    FinishJob,
    JobView,
    LiftQuarantine,
    Plan,
    Quarantine,
    Rules,
    StartGeneration,
    StopGeneration,
)
from varuna_manager.domain.states import GenerationState, JobState, VmState, WorkerState
from varuna_manager.services.events import EventLog
from varuna_manager.services.planning import PlanningService, Question
from varuna_manager.services.sessions import AgentSession, AgentSessions
from varuna_manager.services.vm_registry import VmRegistry


class JobController:
    name = "jobs"

    def __init__(
        self,
        database: Database,
        loader: SnapshotLoader,
        registry: VmRegistry,
        sessions: AgentSessions,
        planning: PlanningService,
        events: EventLog,
        rules: Rules,
        data_dir: Path,
        profile_cache_url: str,
        period_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._loader = loader
        self._registry = registry
        self._sessions = sessions
        self._planning = planning
        self._events = events
        self._rules = rules
        self._data_dir = data_dir
        self._profile_cache_url = profile_cache_url
        self._period_s = period_s
        self._now = now
        self._log = structlog.get_logger("varuna.controller").bind(controller=self.name)
        self._defects: dict[str, str] = {}

    async def reconcile(self) -> float:
        snapshot = await self._loader.load()
        claimed: frozenset[Device] = frozenset()
        changed = False
        for job in snapshot.jobs:
            try:
                view = await self._complete_view(job, snapshot, claimed)
                decision = decide_job(self._now(), view, snapshot.vms, self._rules)
                changed |= await self._apply(job, decision)
                claimed |= decision.claims
            except StaleDataError:
                changed = True  # decided on what is no longer so: look again
            except Exception as error:
                # A defect that one job brings to light must not keep the others waiting, or their agents untold.
                self._log_defect(job.row.id, error)
        if changed:
            return 0.0
        self._tell_agents(snapshot)
        return self._period_s

    def _log_defect(self, job_id: str, error: Exception) -> None:
        """Once for each job and error: it comes again with every look."""
        if self._defects.get(job_id) != repr(error):
            self._defects[job_id] = repr(error)
            self._log.error("no decision about a job", job=job_id, exc_info=error)

    async def _complete_view(self, job: LoadedJob, snapshot: Snapshot, claimed: frozenset[Device]) -> JobView:
        """The view with the devices that the older jobs left, and the planner's proposal for them."""
        view = with_devices(job, *snapshot.devices_for(job, claimed))
        devices = next_devices(view, snapshot.vms, self._rules)
        if not wants_plan(view, devices, snapshot.vms):
            return view
        vms = [snapshot.vms[vm_id] for vm_id in {device.vm_id for device in devices}]
        memories = [vm.device_memory_bytes for vm in vms if vm.device_memory_bytes]
        previous, previous_p = previous_placement(job)
        question = Question(
            profile_json=job.row.profile_json or "",
            spec=job.spec,
            devices=devices,
            device_memory_bytes=min(memories, default=None),
            gpus_per_vm=min(vm.gpus for vm in vms),
            previous=previous,
            previous_p=previous_p,
            present=job.view.generation.plan if job.view.generation and job.view.generation.live else None,
        )
        return replace(view, proposal=await self._planning.propose(question))

    # ------------------------------------------------------------ apply

    async def _apply(self, job: LoadedJob, decision: Decision) -> bool:
        """Write what was decided; whether anything but the reason changed. A stale decision is dropped."""
        if not decision.actions and decision.reason == job.row.reason:
            return False
        async with self._database.write() as session:
            row = await session.get_one(JobRow, job.row.id)
            if row.version != job.version:
                return True  # decided on what is no longer so: look again
            if row.reason != decision.reason:
                row.reason = decision.reason
                if not decision.actions and decision.notable:
                    self._events.add(session, "decision", decision.reason, job_id=row.id, generation=_number(job))
            for action in decision.actions:
                await self._apply_action(session, row, job, action)
        for action in decision.actions:
            if isinstance(action, StartGeneration):
                self._use_port(action)
        return bool(decision.actions)

    async def _apply_action(self, session: AsyncSession, row: JobRow, job: LoadedJob, action: Action) -> None:
        match action:
            case StartGeneration():
                await self._start(session, row, job, action)
            case StopGeneration():
                await self._stop(session, row, action)
            case EndGeneration():
                await self._end(session, row, action)
            case FinishJob():
                self._finish(session, row, action)
            case Quarantine() | LiftQuarantine():
                await self._quarantine(session, row, action)

    async def _start(self, session: AsyncSession, row: JobRow, job: LoadedJob, action: StartGeneration) -> None:
        now = self._now()
        first = action.placement[0].vm_id
        port = self._registry.rendezvous_port(first)
        assert port is not None, f"decided to start on VM {first} without a rendezvous port"
        host = await self._host_of(session, first)
        generation = GenerationRow(
            job_id=row.id,
            number=action.number,
            kind=action.kind.value,
            state=GenerationState.LAUNCHING.value,
            history=[{"at": now, "state": GenerationState.LAUNCHING.value, "reason": action.reason}],
            plan=action.plan.to_document(),
            candidates=[dict(candidate) for candidate in action.candidates],
            rendezvous_host=host,
            rendezvous_port=port,
            reason=action.reason,
            created_at=now,
        )
        session.add(generation)
        for rank, device in enumerate(action.placement):
            session.add(
                WorkerRow(
                    job_id=row.id,
                    generation=action.number,
                    rank=rank,
                    vm_id=device.vm_id,
                    local_rank=device.local_rank,
                    state=WorkerState.ASSIGNED.value,
                    history=[{"at": now, "state": WorkerState.ASSIGNED.value, "reason": action.reason}],
                )
            )
        if row.job_state is JobState.QUEUED:
            row.move(JobState.RUNNING, now=now, reason=action.reason)
            row.started_at = now
        plan = action.plan
        self._events.add(
            session,
            "generation_started",
            f"generation {action.number} ({action.kind.value}) starts as {plan.p}×{plan.d}, micro-batch "
            f"{plan.micro_batch}: {action.reason}",
            job_id=row.id,
            generation=action.number,
            data={
                "kind": action.kind.value,
                "p": plan.p,
                "d": plan.d,
                "micro_batch": plan.micro_batch,
                "reason": action.reason,
            },
        )

    async def _host_of(self, session: AsyncSession, vm_id: str) -> str:
        vm = await session.get_one(VmRow, vm_id)
        return vm.host or "127.0.0.1"

    def _use_port(self, action: StartGeneration) -> None:
        first = action.placement[0].vm_id
        port = self._registry.rendezvous_port(first)
        if port is not None:
            self._registry.use_rendezvous_port(first, port)

    async def _stop(self, session: AsyncSession, row: JobRow, action: StopGeneration) -> None:
        now = self._now()
        generation = await _generation(session, row.id, action.number)
        if generation.generation_state is not GenerationState.STOPPING:
            generation.move(GenerationState.STOPPING, now=now, reason=action.reason)
        generation.stop_mode, generation.stop_cause = action.mode.value, action.cause.value
        generation.stop_reason, generation.stop_requested_at = action.reason, now
        self._events.add(
            session,
            "generation_stopping",
            f"generation {action.number} is to stop ({action.mode.value}): {action.reason}",
            job_id=row.id,
            generation=action.number,
            data={"mode": action.mode.value, "cause": action.cause.value},
        )

    async def _end(self, session: AsyncSession, row: JobRow, action: EndGeneration) -> None:
        now = self._now()
        generation = await _generation(session, row.id, action.number)
        generation.move(GenerationState.ENDED, now=now, reason=action.reason)
        generation.ended_at, generation.end_cause, generation.end_reason = now, action.cause.value, action.reason
        self._events.add(
            session,
            "generation_ended",
            f"generation {action.number} ended: {action.reason}",
            job_id=row.id,
            generation=action.number,
            data={"cause": action.cause.value},
        )

    def _finish(self, session: AsyncSession, row: JobRow, action: FinishJob) -> None:
        now = self._now()
        first_line = (action.error or "").strip().splitlines()[-1:]
        reason = "".join(first_line) or action.state.value
        row.move(action.state, now=now, reason=reason)
        row.error, row.finished_at, row.active_name = action.error, now, None
        suffix = f": {reason}" if action.error else ""
        kind = f"job_{action.state.value}"
        self._events.add(session, kind, f"job {row.name!r} {_VERBS[action.state]}{suffix}", job_id=row.id)

    async def _quarantine(self, session: AsyncSession, row: JobRow, action: Quarantine | LiftQuarantine) -> None:
        for vm_id in action.vm_ids:
            vm = await session.get_one(VmRow, vm_id)
            if isinstance(action, Quarantine):
                vm.quarantined_until, vm.quarantines = action.until, vm.quarantines + 1
                vm.slow_ratio = vm.slow_reason = None
                text = f"VM {vm_id} is quarantined for {action.until - self._now():.0f} s: {action.reason}"
                self._events.add(session, "vm_quarantined", text, job_id=row.id, vm_id=vm_id)
            elif vm.quarantined_until is not None:
                vm.quarantined_until = None
                text = f"VM {vm_id} is out of quarantine: it is needed, since {action.reason}"
                self._events.add(session, "vm_released", text, job_id=row.id, vm_id=vm_id)

    # ------------------------------------------------------------ tell

    def _tell_agents(self, snapshot: Snapshot) -> None:
        """Send each agent what it should have been told and was not, on its present stream."""
        jobs = {job.row.id: job for job in snapshot.jobs}
        for session in self._sessions.all():
            vm = snapshot.vms.get(session.vm_id)
            if vm is None:
                continue
            running = {(health.job_id, health.generation) for health in self._registry.workers(session.vm_id)}
            wanted = wanted_commands(
                snapshot.presence.get(session.vm_id, ()),
                running,
                session.seen,
                draining=vm.state is VmState.DRAINING,
            )
            for key in wanted:
                if key not in session.told:
                    self._tell(session, key, jobs, snapshot)
                    session.told.add(key)

    def _tell(self, session: AgentSession, key: object, jobs: dict[str, LoadedJob], snapshot: Snapshot) -> None:
        if isinstance(key, LaunchKey):
            url = f"file://{self._data_dir}/checkpoints/{key.job_id}"
            session.send(messages.launch_message(jobs[key.job_id], session.vm_id, url, self._profile_cache_url))
        elif isinstance(key, StopKey):
            deadlines = {
                vm.id: vm.notice_deadline
                for vm in snapshot.vms.values()
                if vm.notice_deadline is not None and _takes_part(key, snapshot.presence.get(vm.id, ()))
            }
            minibatch_s = _minibatch_s(jobs.get(key.job_id), key.generation)
            message = messages.stop_message(
                key, self._rules, now=self._now(), minibatch_s=minibatch_s, deadlines=deadlines
            )
            session.send(message)
        else:
            session.send(messages.drain_message(snapshot.vms[session.vm_id].reason))


_VERBS = {JobState.SUCCEEDED: "succeeded", JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}


def _takes_part(key: StopKey, parts: Sequence[Presence]) -> bool:
    return any((part.job_id, part.generation) == (key.job_id, key.generation) for part in parts)


def _minibatch_s(job: LoadedJob | None, generation: int) -> float:
    """As predicted; 0 for a generation that is not the job's newest any more."""
    if job is None or job.generation is None or job.generation.number != generation:
        return 0.0
    return Plan.from_document(job.generation.plan).predicted_minibatch_s


def _number(job: LoadedJob) -> int | None:
    return None if job.generation is None else job.generation.number


async def _generation(session: AsyncSession, job_id: str, number: int) -> GenerationRow:
    query = select(GenerationRow).where(GenerationRow.job_id == job_id, GenerationRow.number == number)
    return (await session.scalars(query)).one()
