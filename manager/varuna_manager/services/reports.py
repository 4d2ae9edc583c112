"""What agents report, into the store: acknowledged only after the commit of the transaction that has it.

What several VMs report meanwhile shares a transaction: each step is reported by all VMs of its job at about one time.

Reports come again after every reconnection, so each is applied idempotently: what is known already changes nothing.
A report that makes no sense (an unknown job, a worker that was never launched) is logged and dropped; were it refused,
the agent would send it for ever.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import Base, CheckpointRow, GenerationRow, JobRow, MetricRow, VmRow, WorkerRow
from varuna_manager.domain import accounting
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    ExitCause,
    GenerationKind,
    GenerationState,
    IllegalTransitionError,
    VmState,
    WorkerState,
)
from varuna_manager.services.bell import Bell
from varuna_manager.services.events import EventLog
from varuna_manager.services.planning import PlanningService
from varuna_manager.services.together import Together
from varuna_proto.v1 import agent_pb2 as pb

_EXIT_CAUSES = {
    pb.EXIT_CAUSE_FINISHED: ExitCause.FINISHED,
    pb.EXIT_CAUSE_GENERATION_ENDED: ExitCause.GENERATION_ENDED,
    pb.EXIT_CAUSE_PEER_LOST: ExitCause.PEER_LOST,
    pb.EXIT_CAUSE_SCRIPT_FAILED: ExitCause.SCRIPT_FAILED,
    pb.EXIT_CAUSE_KILLED: ExitCause.KILLED,
    pb.EXIT_CAUSE_LAUNCH_FAILED: ExitCause.LAUNCH_FAILED,
}
_METRICS = Base.metadata.tables[MetricRow.__tablename__]
_TOLD = frozenset({ExitCause.SCRIPT_FAILED, ExitCause.KILLED, ExitCause.LAUNCH_FAILED})
"""Exits that are worth an event of their own."""


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
    ) -> None:
        self._database = database
        self._events = events
        self._planning = planning
        self._bell = bell
        self._now = now
        self._batches = Together(self._store)
        self._log = structlog.get_logger("varuna.reports")

    async def apply(self, vm_id: str, reports: Sequence[pb.Report]) -> None:
        """Store the reports of one VM, in their order; when this returns they are committed."""
        bad_profiles = {
            report.number: problem
            for report in reports
            if report.WhichOneof("fact") == "profile_measured"
            and (problem := await self._planning.check_profile(report.profile_measured.profile_json)) is not None
        }
        try:
            await self._batches.ask(_Batch(vm_id=vm_id, reports=reports, bad_profiles=bad_profiles))
        except Exception as error:
            if not _lies_in_the_report(error):
                raise
            if len(reports) > 1:
                for report in reports:
                    await self.apply(vm_id, [report])
                return
            kind = reports[0].WhichOneof("fact")
            self._log.error("a report cannot be stored: dropped", vm=vm_id, kind=kind, exc_info=error)

    async def _store(self, batches: Sequence[_Batch]) -> Sequence[None]:
        async with self._database.write() as session:
            rings = False
            done: dict[tuple[str, int], dict[int, pb.StepResult]] = {}
            for batch in batches:
                for report in batch.reports:
                    if report.WhichOneof("fact") == "steps_completed":
                        fact = report.steps_completed
                        steps = done.setdefault((fact.job_id, fact.generation), {})
                        steps.update({step.step: step for step in fact.steps})
                        continue
                    rings = True
                    await self._apply_one(session, batch.vm_id, report, batch.bad_profiles.get(report.number))
            for (job_id, number), steps in done.items():
                rings |= await self._steps(session, job_id, number, steps)
            if rings:
                after_commit(session, self._bell.ring)
        return [None] * len(batches)

    async def _apply_one(self, session: AsyncSession, vm_id: str, report: pb.Report, bad_profile: str | None) -> None:
        match report.WhichOneof("fact"):
            case "worker_started":
                await self._started(session, vm_id, report.worker_started)
            case "worker_exited":
                await self._exited(session, vm_id, report.worker_exited)
            case "checkpoint_committed":
                await self._checkpoint(session, report.checkpoint_committed)
            case "preemption_notice":
                fact = report.preemption_notice
                deadline = self._now() + fact.seconds_left
                await note_notice(session, self._events, vm_id, fact.notice_id, deadline, source=fact.source)
            case "profile_measured":
                await self._profile(session, report.profile_measured, bad_profile)
            case "command_refused":
                await self._refused(session, vm_id, report.command_refused)
            case unknown:
                self._log.warning("report of an unknown kind", vm=vm_id, number=report.number, kind=unknown)

    # ------------------------------------------------------------ workers

    async def _worker(
        self, session: AsyncSession, vm_id: str, fact: pb.WorkerStarted | pb.WorkerExited
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
        worker.move(WorkerState.RUNNING, now=self._now(), reason="its agent said so")
        await session.flush()
        generation = await _generation(session, fact.job_id, fact.generation)
        if generation is None:
            return
        if generation.kind == GenerationKind.TRAINING:
            await _set_progress(session, generation, resumed_step=fact.resumed_step)
        states = await session.scalars(
            select(WorkerRow.state).where(WorkerRow.job_id == fact.job_id, WorkerRow.generation == fact.generation)
        )
        if generation.state == GenerationState.LAUNCHING and set(states) == {WorkerState.RUNNING.value}:
            generation.move(GenerationState.RUNNING, now=self._now(), reason="every rank has started")

    async def _exited(self, session: AsyncSession, vm_id: str, fact: pb.WorkerExited) -> None:
        worker = await self._worker(session, vm_id, fact)
        if worker is not None:
            cause = _EXIT_CAUSES.get(fact.cause, ExitCause.KILLED)
            self.stop_worker(session, worker, cause, exit_code=fact.exit_code, error_text=fact.error_text)

    def stop_worker(
        self, session: AsyncSession, worker: WorkerRow, cause: ExitCause, *, exit_code: int | None, error_text: str
    ) -> None:
        """Note that a worker has stopped; nothing happens when that is known."""
        if worker.worker_state in STOPPED_WORKER_STATES:
            return
        worker.cause, worker.exit_code, worker.error_text = cause.value, exit_code, error_text
        worker.stopped_at = self._now()
        new = WorkerState.LOST if cause is ExitCause.VM_GONE else WorkerState.EXITED
        worker.move(new, now=self._now(), reason=cause.value)
        if cause in _TOLD:
            last_line = error_text.strip().splitlines()[-1] if error_text.strip() else f"exit code {exit_code}"
            self._events.add(
                session,
                "worker_exited",
                f"rank {worker.rank} on VM {worker.vm_id}: {cause.value}: {last_line}",
                job_id=worker.job_id,
                generation=worker.generation,
                vm_id=worker.vm_id,
                data={"rank": worker.rank, "cause": cause.value, "exit_code": exit_code},
            )

    async def _refused(self, session: AsyncSession, vm_id: str, fact: pb.CommandRefused) -> None:
        """A Launch that the agent would not run: its workers never came up."""
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
            self.stop_worker(session, worker, ExitCause.LAUNCH_FAILED, exit_code=None, error_text=text)

    # ------------------------------------------------------------ progress

    async def _steps(self, session: AsyncSession, job_id: str, number: int, steps: Mapping[int, pb.StepResult]) -> bool:
        """`steps`: by their number. Whether they are worth a look at the fleet: only a generation's first are, for the
        others decide nothing, and come all the time."""
        generation = await _generation(session, job_id, number)
        if generation is None or not steps:
            self._log.warning("steps of an unknown generation", job=job_id, generation=number)
            return False
        now = self._now()
        await _write_metrics(session, generation, steps.values(), now)
        last = steps[max(steps)]
        if generation.last_step is not None and last.step <= generation.last_step:
            return False
        is_first = generation.last_step is None
        if is_first:
            await self._first_step(session, generation, min(steps), now)
        await _set_progress(
            session, generation, last_step=last.step, last_loss=_number_or_none(last.loss), last_step_at=now
        )
        return is_first

    async def _first_step(self, session: AsyncSession, generation: GenerationRow, step: int, now: float) -> None:
        before = (
            await session.execute(
                select(func.max(GenerationRow.last_step_at), func.max(GenerationRow.last_step)).where(
                    GenerationRow.job_id == generation.job_id, GenerationRow.number < generation.number
                )
            )
        ).one()
        job = await session.get_one(JobRow, generation.job_id)
        resumed_step = generation.resumed_step if generation.resumed_step is not None else step - 1
        waited_s = accounting.seconds_without_progress(
            last_progress_at=before[0] or job.started_at or job.created_at, first_step_at=now
        )
        redone = accounting.steps_redone(last_step_before=before[1], resumed_step=resumed_step)
        await _set_progress(
            session,
            generation,
            started_at=now,
            resumed_step=resumed_step,
            seconds_without_progress=waited_s,
            steps_redone=redone,
        )
        if generation.state == GenerationState.LAUNCHING:
            generation.move(GenerationState.RUNNING, now=now, reason="its first step is done")
        self._events.add(
            session,
            "first_step",
            f"generation {generation.number} completed its first step ({step}) after {waited_s:.1f} s "
            f"without progress, {redone} steps to redo",
            job_id=generation.job_id,
            generation=generation.number,
            data={"step": step, "seconds_without_progress": waited_s, "steps_redone": redone},
        )

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
            return  # a long job saves often: the table has them all, the log the first of each generation
        self._events.add(
            session,
            "checkpoint",
            f"step {fact.step} is saved ({fact.total_bytes / 1e6:.1f} MB), the first of generation {fact.generation}",
            job_id=fact.job_id,
            generation=fact.generation,
            data={"step": fact.step, "url": fact.url, "total_bytes": fact.total_bytes},
        )

    async def _profile(self, session: AsyncSession, fact: pb.ProfileMeasured, problem: str | None) -> None:
        job = await session.get(JobRow, fact.job_id)
        if job is None or job.profile_json is not None:
            return
        if problem is not None:
            message = f"the measured profile cannot be used: {' '.join(problem.split())}"
            if job.profile_error == message:
                return
            job.profile_error, kind = message, "profile_rejected"
        else:
            job.profile_json, job.profiled_at, job.profile_error = fact.profile_json, self._now(), None
            message = _from_cache(fact.profile_json) if fact.from_cache else "the job's profile is measured"
            kind = "profile_measured"
        self._events.add(session, kind, message, job_id=job.id, generation=fact.generation)


def _from_cache(profile_json: str) -> str:
    measured = json.loads(profile_json).get("environment", {})
    at, ranks, device = (measured.get(name, "?") for name in ("measured_at", "ranks", "device"))
    return f"profile taken from the cache (measured {at} on {ranks} × {device})"


def _lies_in_the_report(error: Exception) -> bool:
    """Whether it would come again with the report; else (the database is away) the report is to be sent again."""
    if isinstance(error, IntegrityError | DataError):
        return True
    if isinstance(error, DBAPIError):  # what asyncpg says of a value that no column holds: class 22, or of its own
        code = getattr(error.orig, "sqlstate", None)
        return type(error) is DBAPIError and not error.connection_invalidated and (code is None or code[:2] == "22")
    return isinstance(error, OverflowError | ValueError | TypeError | IllegalTransitionError)


async def note_notice(
    session: AsyncSession, events: EventLog, vm_id: str, notice_id: str, deadline: float, *, source: str
) -> None:
    """Note that the provider will take the VM at `deadline`. The first word of it counts, whoever brings it."""
    vm = await session.get(VmRow, vm_id)
    if vm is None or vm.notice_id is not None or vm.state == VmState.GONE:
        return
    vm.notice_id, vm.notice_deadline = notice_id, deadline
    events.add(
        session,
        "preemption_notice",
        f"VM {vm_id} has notice to leave ({source})",
        vm_id=vm_id,
        data={"notice_id": notice_id, "deadline_unix_s": deadline},
    )


async def _generation(session: AsyncSession, job_id: str, number: int) -> GenerationRow | None:
    query = select(GenerationRow).where(GenerationRow.job_id == job_id, GenerationRow.number == number)
    query = query.options(defer(GenerationRow.plan), defer(GenerationRow.candidates))  # large, and of no use here
    row: GenerationRow | None = await session.scalar(query.execution_options(populate_existing=True))
    return row


async def _set_progress(session: AsyncSession, generation: GenerationRow, **values: float | int | None) -> None:
    """Write progress without touching the row's version: steps must not make a decision stale."""
    await session.execute(
        update(GenerationRow)
        .where(GenerationRow.id == generation.id)
        .values(**values)
        .execution_options(synchronize_session=False)
    )


async def _write_metrics(
    session: AsyncSession, generation: GenerationRow, steps: Iterable[pb.StepResult], now: float
) -> None:
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    rows = [
        {
            "job_id": generation.job_id,
            "step": step.step,
            "loss": _number_or_none(step.loss),
            "step_s": step.step_us / 1e6,
            "examples": step.examples,
            "generation": generation.number,
            "at": now,
        }
        for step in steps
    ]
    statement = insert(_METRICS)  # the rows apart from it: it is compiled once, however many they are
    new = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=["job_id", "step"],
        set_={name: new[name] for name in ("loss", "step_s", "examples", "generation", "at")},
        where=new.generation >= MetricRow.generation,
    )
    await session.execute(statement, rows)


def _number_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
