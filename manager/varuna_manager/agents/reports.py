"""Stores the reports of agents, which are acknowledged only after their transaction's commit.

Reports that several VMs send meanwhile share a transaction, because all VMs of a job report a step at about the same
time. Agents repeat reports after every reconnection, so each is applied idempotently: a repeated one changes nothing.

An agent may be hostile, or a job may control its VM. So each report is first checked against the (job, generation, VM)
that it names, and its numbers and texts are brought within bounds (`report_bounds`). One that makes no sense (an
unknown job, a worker that was never launched there) is logged and dropped; if it were refused, the agent would send it
for ever. An exit is never dropped because of its worker's message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import func, select
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.agents import report_bounds
from varuna_manager.agents.request_batcher import RequestBatcher
from varuna_manager.agents.sessions import AgentSessions
from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import CheckpointRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.causes import extract_last_line
from varuna_manager.domain.memory_margin import MemoryShortage
from varuna_manager.domain.reshaping import HOLDING_EXITS, SURVIVABLE_EXITS
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    TERMINAL_JOB_STATES,
    ExitCause,
    IllegalTransitionError,
    VmState,
    WorkerState,
)
from varuna_manager.history import traces
from varuna_manager.history.live import ProgressBoard
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.jobs.logged_values import record_values
from varuna_manager.jobs.placements import Placements
from varuna_manager.jobs.progress import Progress
from varuna_manager.planning.planning import PlanningService
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_proto.bounds import ERROR_CHARS, clean_text
from varuna_proto.state_use import OTHER_STAGES
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.wording import render_bytes

_EXIT_CAUSES = {
    pb.EXIT_CAUSE_FINISHED: ExitCause.FINISHED,
    pb.EXIT_CAUSE_GENERATION_ENDED: ExitCause.GENERATION_ENDED,
    pb.EXIT_CAUSE_PEER_LOST: ExitCause.PEER_LOST,
    pb.EXIT_CAUSE_SCRIPT_FAILED: ExitCause.SCRIPT_FAILED,
    pb.EXIT_CAUSE_OUT_OF_MEMORY: ExitCause.OUT_OF_MEMORY,
    pb.EXIT_CAUSE_KILLED: ExitCause.KILLED,
    pb.EXIT_CAUSE_LAUNCH_FAILED: ExitCause.LAUNCH_FAILED,
    pb.EXIT_CAUSE_LAUNCH_REFUSED: ExitCause.LAUNCH_REFUSED,
    pb.EXIT_CAUSE_LEASE_OVER: ExitCause.LEASE_OVER,
    pb.EXIT_CAUSE_AGENT_ENDED: ExitCause.AGENT_ENDED,
}
_PROBLEM_CHARS = 2000
"""Of the text on what is wrong with a profile: any of its numbers may be."""
_EVENT_CAUSES = frozenset(
    {
        ExitCause.SCRIPT_FAILED,
        ExitCause.OUT_OF_MEMORY,
        ExitCause.KILLED,
        ExitCause.LAUNCH_FAILED,
        ExitCause.LAUNCH_REFUSED,
        ExitCause.LEASE_OVER,
        ExitCause.AGENT_ENDED,
    }
)
"""Exits that get an event of their own."""
_SETUP_FAILURES_KEPT = 64
"""VMs, the newest failures."""

_MOST_OBSTACLES = 16
"""Of one job: a script may name any number of them."""
_MOST_COPIES = 4096
"""Of one process: two of each rank for which it keeps them."""
_EARLIER_S = 1.0
"""Reports of the same deadline differ by less."""
_LONGEST_SAVE_S = 86_400.0
"""Longer times are not believed."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Reports of one VM, in their order."""

    vm_id: str
    reports: Sequence[pb.Report]
    bad_profiles: Mapping[int, str]
    """By report: what is wrong with the profile in it."""


class ReportService:
    def __init__(
        self,
        database: Database,
        events: EventLog,
        planning: PlanningService,
        bell: Bell,
        now: Callable[[], float] = time.time,
        board: ProgressBoard | None = None,
        spans: MorphSpans | None = None,
        sessions: AgentSessions | None = None,
    ) -> None:
        """`board`: receives the newest step of every job; `spans`: the first step of every generation.

        `sessions`: hold the jobs that each VM was sent to prepare for; None: no VM was.
        """
        self._database = database
        self._events = events
        self._planning = planning
        self._bell = bell
        self._now = now
        self._sessions = sessions or AgentSessions()
        self._progress = Progress(events, board, spans)
        self._batches = RequestBatcher(self._store)
        self._log = structlog.get_logger("varuna.reports")

    async def apply_reports(self, vm_id: str, reports: Sequence[pb.Report]) -> None:
        """Store the reports of one VM, in their order; when this returns they are committed."""
        reports = [report for report in reports if self._makes_sense(vm_id, report)]
        if reports:
            await self._apply(vm_id, reports)

    def _makes_sense(self, vm_id: str, report: pb.Report) -> bool:
        report_bounds.tidy(report)
        flaw = report_bounds.flaw_of(report)
        if flaw is not None:
            kind = report.WhichOneof("fact")
            self._log.warning("a report makes no sense: dropped", vm=vm_id, kind=kind, reason=flaw)
        return flaw is None

    async def _apply(self, vm_id: str, reports: Sequence[pb.Report]) -> None:
        bad_profiles = {
            report.number: problem
            for report in reports
            if report.WhichOneof("fact") == "profile_measured"
            and (problem := await self._planning.check_profile(report.profile_measured.profile_json)) is not None
        }
        try:
            await self._batches.add_request(_Batch(vm_id=vm_id, reports=reports, bad_profiles=bad_profiles))
        except Exception as error:
            if not _lies_in_the_report(error):
                raise
            if len(reports) > 1:
                for report in reports:
                    await self._apply(vm_id, [report])
                return
            kind, exited = reports[0].WhichOneof("fact"), reports[0].worker_exited
            if kind == "worker_exited" and exited.error_text:
                # The stop must be recorded in any case, or the job would wait for the worker for ever.
                self._log.error("a worker's last words cannot be stored", vm=vm_id, exc_info=error)
                exited.error_text = ""
                await self._apply(vm_id, reports)
                return
            self._log.error("a report cannot be stored: dropped", vm=vm_id, kind=kind, exc_info=error)

    async def _store(self, batches: Sequence[_Batch]) -> Sequence[None]:
        async with self._database.write() as session:
            rings, places = False, Placements()
            done: dict[tuple[str, int], dict[int, pb.StepResult]] = {}
            for batch in batches:
                for report in batch.reports:
                    if report.WhichOneof("fact") == "steps_completed":
                        fact = report.steps_completed
                        if not await self._is_of(session, places, batch.vm_id, fact):
                            continue
                        steps = done.setdefault((fact.job_id, fact.generation), {})
                        steps.update({step.step: step for step in fact.steps})
                        continue
                    if report.WhichOneof("fact") == "values_logged":
                        logged = report.values_logged
                        if await self._is_of(session, places, batch.vm_id, logged):
                            await record_values(session, logged, self._now())
                        continue
                    rings |= report.WhichOneof("fact") != "step_traced"
                    await self._apply_one(session, places, batch, report)
            for (job_id, number), steps in done.items():
                rings |= await self._progress.record_steps(session, job_id, number, steps, self._now())
            if rings:
                after_commit(session, self._bell.notify_listeners)
        return [None] * len(batches)

    async def _apply_one(self, session: AsyncSession, places: Placements, batch: _Batch, report: pb.Report) -> None:
        vm_id = batch.vm_id
        match report.WhichOneof("fact"):
            case "worker_started":
                await self._started(session, vm_id, report.worker_started)
            case "worker_exited":
                await self._exited(session, vm_id, report.worker_exited)
            case "checkpoint_committed":
                if await self._is_of(session, places, vm_id, report.checkpoint_committed):
                    await self._checkpoint(session, report.checkpoint_committed)
            case "preemption_notice":
                fact = report.preemption_notice
                deadline = self._now() + fact.seconds_left
                await note_notice(session, self._events, vm_id, fact.notice_id, deadline, source=fact.source)
            case "profile_measured":
                if await self._is_of(session, places, vm_id, report.profile_measured):
                    await self._profile(session, report.profile_measured, batch.bad_profiles.get(report.number))
            case "setup_failed":
                await self._setup_failed(session, vm_id, report.setup_failed, report.number)
            case "step_traced":
                if await self._worker(session, vm_id, report.step_traced) is not None:
                    await traces.store_trace(session, report.step_traced, self._now())
            case "command_refused":
                await self._refused(session, vm_id, report.command_refused)
            case unknown:
                self._log.warning("report of an unknown kind", vm=vm_id, number=report.number, kind=unknown)

    async def _setup_failed(self, session: AsyncSession, vm_id: str, fact: pb.SetupFailed, number: int) -> None:
        job = await session.get(JobRow, fact.job_id)
        if job is None or job.job_state in TERMINAL_JOB_STATES:
            return
        if not self._sessions.is_entrusted(vm_id, job.id):
            self._log.warning("report of a setup that was not asked for there", vm=vm_id, job=job.id)
            return
        failures = dict(job.setup_failures or {})
        known = failures.pop(vm_id, {"times": 0, "report": None})
        if known["report"] == number:
            return
        failures[vm_id] = {"times": known["times"] + 1, "exit_code": fact.exit_code or None, "report": number}
        job.setup_failures = dict(list(failures.items())[-_SETUP_FAILURES_KEPT:])
        job.setup_error, job.setup_exit_code = f"on VM {vm_id}: {fact.error_text}", fact.exit_code or None
        text = f"the workdir cannot be made ready on VM {vm_id}: {extract_last_line(fact.error_text)}"
        data = {"exit_code": fact.exit_code, "error": fact.error_text}
        self._events.emit_event(session, "setup_failed", text, job_id=job.id, vm_id=vm_id, data=data)

    async def _is_of(
        self,
        session: AsyncSession,
        places: Placements,
        vm_id: str,
        fact: pb.StepsCompleted | pb.CheckpointCommitted | pb.ProfileMeasured | pb.ValuesLogged,
    ) -> bool:
        """Whether the generation that the agent names runs on its VM.

        A report's exits there are recorded last, because a VM that has left a generation can no longer report on it.
        """
        is_of = await places.runs_on(session, vm_id, fact.job_id, fact.generation)
        if not is_of:
            kind, about = fact.DESCRIPTOR.name, {"job": fact.job_id, "generation": fact.generation}
            self._log.warning("report of a generation that is not there", vm=vm_id, kind=kind, **about)
        return is_of

    # ------------------------------------------------------------ workers

    async def _worker(
        self, session: AsyncSession, vm_id: str, fact: pb.WorkerStarted | pb.WorkerExited | pb.StepTraced
    ) -> WorkerRow | None:
        worker = await session.get(WorkerRow, (fact.job_id, fact.generation, fact.rank))
        if worker is None or worker.vm_id != vm_id:
            self._log.warning(
                "report of a worker that was not launched there",
                vm=vm_id,
                job=fact.job_id,
                generation=fact.generation,
                rank=fact.rank,
            )
            return None
        return worker

    async def _started(self, session: AsyncSession, vm_id: str, fact: pb.WorkerStarted) -> None:
        worker = await self._worker(session, vm_id, fact)
        if worker is None or worker.worker_state is not WorkerState.ASSIGNED:
            return
        worker.pid, worker.resumed_step = fact.pid, fact.resumed_step
        worker.kept_bytes, worker.peer_bytes, worker.store_bytes = fact.kept_bytes, fact.peer_bytes, fact.store_bytes
        worker.late_bytes = fact.late_bytes
        worker.move_to_state(WorkerState.RUNNING, now=self._now(), reason="its agent reported its start")
        await session.flush()
        await self._progress.record_start(session, fact, self._now())

    async def _exited(self, session: AsyncSession, vm_id: str, fact: pb.WorkerExited) -> None:
        worker = await self._worker(session, vm_id, fact)
        if worker is not None:
            cause = _EXIT_CAUSES.get(fact.cause, ExitCause.KILLED)
            worker.unreached = _unreached(fact)
            if cause is ExitCause.OUT_OF_MEMORY and worker.worker_state not in STOPPED_WORKER_STATES:
                worker.shortage = _read_shortage(fact.shortage).to_document()
            if 0.0 < fact.save_s < _LONGEST_SAVE_S:
                await self._progress.record_save_time(session, fact)
            if cause in HOLDING_EXITS and fact.HasField("held") and worker.worker_state not in STOPPED_WORKER_STATES:
                worker.held_step, worker.held_bytes = fact.held.step, fact.held.bytes
                worker.held_gives_only = fact.held.gives_only or cause not in SURVIVABLE_EXITS
                copies = [[copy.rank, copy.step] for copy in fact.held.copies[:_MOST_COPIES]]
                worker.held_copies = copies or None
            self.stop_worker(session, worker, cause, exit_code=fact.exit_code, error_text=fact.error_text)
            if fact.script_obstacle:
                await self._note_obstacle(session, fact)

    async def _note_obstacle(self, session: AsyncSession, fact: pb.WorkerExited) -> None:
        """Emit an event for what keeps a job's workers from going on in place, once for each reason."""
        job, reason = await session.get_one(JobRow, fact.job_id), fact.script_obstacle
        known = job.script_obstacles or []
        if reason in known or len(known) >= _MOST_OBSTACLES:
            return
        job.script_obstacles = [*known, reason]
        when = "for another shape" if reason.startswith(OTHER_STAGES) else "after a loss"
        text = f"{when} this job restarts, because its workers cannot go on in place: {reason}"
        self._events.emit_event(
            session,
            "reshape_not_possible",
            text,
            job_id=fact.job_id,
            generation=fact.generation,
            data={"reason": reason},
        )

    def stop_worker(
        self, session: AsyncSession, worker: WorkerRow, cause: ExitCause, *, exit_code: int | None, error_text: str
    ) -> None:
        """Record that a worker has stopped; nothing happens if that is recorded already."""
        if worker.worker_state in STOPPED_WORKER_STATES:
            return
        worker.cause, worker.exit_code, worker.error_text = cause.value, exit_code, error_text
        worker.stopped_at = self._now()
        new = WorkerState.LOST if cause is ExitCause.VM_GONE else WorkerState.EXITED
        worker.move_to_state(new, now=self._now(), reason=cause.value)
        if cause in _EVENT_CAUSES:
            detail = extract_last_line(error_text) or f"exit code {exit_code}"
            self._events.emit_event(
                session,
                "worker_exited",
                f"rank {worker.rank} on VM {worker.vm_id}: {cause.value.replace('_', ' ')}: {detail}",
                job_id=worker.job_id,
                generation=worker.generation,
                vm_id=worker.vm_id,
                data={"rank": worker.rank, "cause": cause.value, "exit_code": exit_code},
            )

    async def _refused(self, session: AsyncSession, vm_id: str, fact: pb.CommandRefused) -> None:
        """The agent refused a Launch: its workers never started."""
        workers = await session.scalars(
            select(WorkerRow).where(
                WorkerRow.job_id == fact.job_id,
                WorkerRow.generation == fact.generation,
                WorkerRow.vm_id == vm_id,
                WorkerRow.state == WorkerState.ASSIGNED.value,
            )
        )
        for worker in workers.all():
            text = f"the agent refused the command: {fact.reason}"
            self.stop_worker(session, worker, ExitCause.LAUNCH_REFUSED, exit_code=None, error_text=text)

    # ------------------------------------------------------------ what was made

    async def _checkpoint(self, session: AsyncSession, fact: pb.CheckpointCommitted) -> None:
        key = (fact.job_id, fact.generation, fact.step)
        if await session.get(JobRow, fact.job_id) is None or await session.get(CheckpointRow, key) is not None:
            return
        of_generation = (CheckpointRow.job_id == fact.job_id, CheckpointRow.generation == fact.generation)
        earlier = await session.scalar(select(func.count()).where(*of_generation))
        session.add(
            CheckpointRow(
                job_id=fact.job_id,
                generation=fact.generation,
                step=fact.step,
                url=fact.url,
                total_bytes=fact.total_bytes,
                at=self._now(),
            )
        )
        if earlier:
            return  # a long job saves often: the table has all checkpoints, the log only the first of each generation
        self._events.emit_event(
            session,
            "checkpoint",
            f"step {fact.step} is saved ({render_bytes(fact.total_bytes)}), the first of generation {fact.generation}",
            job_id=fact.job_id,
            generation=fact.generation,
            data={"step": fact.step, "url": fact.url, "total_bytes": fact.total_bytes},
        )

    async def _profile(self, session: AsyncSession, fact: pb.ProfileMeasured, problem: str | None) -> None:
        job = await session.get(JobRow, fact.job_id)
        if job is None or job.profile_json is not None:
            return
        if problem is not None:
            message = f"the measured profile cannot be used: {clean_text(_shortened(problem), ERROR_CHARS)}"
            if job.profile_error == message:
                return
            job.profile_error, kind = message, "profile_rejected"
        else:
            job.profile_json, job.profiled_at, job.profile_error = fact.profile_json, self._now(), None
            message = _from_cache(fact.profile_json) if fact.from_cache else "the job's profile is measured"
            kind = "profile_measured"
        self._events.emit_event(session, kind, message, job_id=job.id, generation=fact.generation)


def _unreached(fact: pb.WorkerExited) -> int | None:
    return fact.unreached.rank if fact.HasField("unreached") else None


def _read_shortage(fact: pb.MemoryShortage) -> MemoryShortage:
    return MemoryShortage(
        asked_bytes=fact.asked_bytes,
        free_bytes=fact.free_bytes,
        limit_bytes=fact.limit_bytes,
        peak_bytes=fact.peak_bytes,
    )


def _shortened(problem: str) -> str:
    return " ".join(problem[:_PROBLEM_CHARS].split())


def _from_cache(profile_json: str) -> str:
    measured = json.loads(profile_json).get("environment", {})
    at, ranks, device = (measured.get(name, "?") for name in ("measured_at", "ranks", "device"))
    return f"profile taken from the cache (measured {at} on {ranks} × {device})"


def _lies_in_the_report(error: Exception) -> bool:
    """Whether the report itself causes the error; otherwise (the database is away) the agent must send it again."""
    if isinstance(error, IntegrityError | DataError):
        return True
    if isinstance(error, DBAPIError):  # asyncpg's errors for a value that no column holds: class 22, or of its own
        code = getattr(error.orig, "sqlstate", None)
        return type(error) is DBAPIError and not error.connection_invalidated and (code is None or code[:2] == "22")
    return isinstance(error, OverflowError | ValueError | TypeError | IllegalTransitionError)


async def note_notice(
    session: AsyncSession, events: EventLog, vm_id: str, notice_id: str, deadline: float, *, source: str
) -> None:
    """Record that the provider will take the VM at `deadline`. The first to come due counts, wherever it comes from."""
    vm = await session.get(VmRow, vm_id)
    if vm is None or vm.state == VmState.GONE:
        return
    message = f"VM {vm_id} has notice to leave ({source})"
    if vm.notice_deadline is not None:
        if not deadline < vm.notice_deadline - _EARLIER_S:
            return
        message = f"VM {vm_id} is to leave earlier than it had notice of ({source})"
    vm.notice_id, vm.notice_deadline = notice_id, deadline
    events.emit_event(
        session,
        "preemption_notice",
        message,
        vm_id=vm_id,
        data={"notice_id": notice_id, "deadline_unix_s": deadline},
    )
