"""Jobs as their users see them: submitted, listed, changed, cancelled, retried, deleted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import token_hex

from pydantic import ValidationError
from sqlalchemy import and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.answers.errors import ChangedError, ConflictError, InvalidError, MissingError
from varuna_manager.answers.paging import Order, Page
from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import ArchiveRow, GenerationRow, JobProgressRow, JobRow, WorkerRow
from varuna_manager.domain.spec import JobSpec, is_label_key, read_spec
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    TERMINAL_JOB_STATES,
    JobState,
    WorkerState,
)
from varuna_manager.jobs.documents import JobProgress, make_job_document, make_plan_document
from varuna_manager.jobs.secrets import Secrets
from varuna_manager.jobs.step_rates import read_job_rates
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_proto.rest import DeletedJobDocument, JobDocument, JobSpecDocument

KEY_LIFE_S = 24 * 3600.0
"""After this time an Idempotency-Key may be used for another job."""
ALIVE = [state.value for state in WorkerState if state not in STOPPED_WORKER_STATES]
"""States of workers that have not stopped."""
OVER = [state.value for state in TERMINAL_JOB_STATES]
"""States of jobs that have ended."""
JOB_DELETED = "job_deleted"
"""The event that outlives its job."""
IS_KEPT = JobRow.deleted_at.is_(None)
_NEWEST_FIRST = Order[JobRow](
    (JobRow.created_at, JobRow.id), lambda job: (job.created_at, job.id), (float, str), descending=True
)


class JobService:
    """`checkpoint_root`: the URL of a folder or store for the checkpoints of jobs that name none.

    `no_root_because`: why there is none, so that such jobs are refused; empty: they are taken.
    `secrets`: those that jobs may name; None: none.
    `new_id`: makes the part of a job's id after `job-`.
    """

    def __init__(
        self,
        database: Database,
        events: EventLog,
        bell: Bell,
        now: Callable[[], float] = time.time,
        *,
        checkpoint_root: str | None = None,
        no_root_because: str = "",
        secrets: Secrets | None = None,
        new_id: Callable[[], str] = lambda: token_hex(4),
    ) -> None:
        self._database = database
        self._events = events
        self._bell = bell
        self._now = now
        self._checkpoint_root = checkpoint_root
        self._no_root_because = no_root_because
        self._secrets = secrets or Secrets({})
        self._new_id = new_id

    async def submit_job(self, spec: JobSpec, idempotency_key: str | None) -> JobDocument:
        """Queue the job. The same key with the same spec returns the same job, for KEY_LIFE_S.

        Raises ConflictError when the key was used with another spec, or a job that has not ended has the name;
        InvalidError when the job must name a place for its checkpoints and does not, or names an unknown secret.
        """
        if placeless := self.explain_no_place(spec):
            raise InvalidError(placeless)
        if missing := await self._secrets.explain_refusal(spec.secrets):
            raise InvalidError(missing)
        document = spec.model_dump()
        async with self._database.write() as session:
            if idempotency_key is not None:
                before = await session.scalar(select(JobRow).where(JobRow.idempotency_key == idempotency_key))
                if before is not None and self._now() - before.created_at >= KEY_LIFE_S:
                    before.idempotency_key = None
                    await session.flush()
                    before = None
                # Compared as specs, because one stored by an earlier version lacks newer fields.
                if before is not None and read_spec(before.spec)[0] != spec:
                    raise ConflictError(
                        f"Idempotency-Key {idempotency_key!r} was used for job {before.id} with another spec: "
                        "send a new key with a new job"
                    )
                if before is not None:
                    return await make_whole_document(session, before)
            rival = await session.scalar(select(JobRow).where(JobRow.active_name == spec.name))
            if rival is not None:
                raise ConflictError(
                    f"job {spec.name!r} is already {rival.state} ({rival.id}): choose another name or cancel it first"
                )
            if spec.archive is not None and await session.get(ArchiveRow, spec.archive) is None:
                raise InvalidError(
                    f"archive {spec.archive} is not here: upload it with PUT /api/v1/archives/{{sha256}}"
                )
            job = self._new_row(spec, document, idempotency_key)
            session.add(job)
            self._events.emit_event(session, "job_submitted", f"job {spec.name!r} was submitted", job_id=job.id)
            after_commit(session, self._bell.notify_listeners)
            await session.flush()
        return make_job_document(job, JobProgress())

    def explain_no_place(self, spec: JobSpec) -> str:
        """Why the job is refused that has no place for its checkpoints; empty: it has one."""
        if not self._no_root_because or spec.checkpoint.url is not None or spec.profile_only:
            return ""
        return (
            f"job {spec.name!r} names no place for its checkpoints, and a folder of this manager will not do, "
            f"because {self._no_root_because}: give checkpoint.url, or start the manager with --default-checkpoint-url"
        )

    def _new_row(self, spec: JobSpec, document: JobSpecDocument, idempotency_key: str | None) -> JobRow:
        now = self._now()
        job_id = f"job-{self._new_id()}"
        default_url = self._checkpoint_root and f"{self._checkpoint_root.rstrip('/')}/{job_id}"
        return JobRow(
            id=job_id,
            checkpoint_url=spec.checkpoint.url or default_url,
            name=spec.name,
            active_name=spec.name,
            idempotency_key=idempotency_key,
            spec=document,
            archive=spec.archive,
            state=JobState.QUEUED.value,
            history=[{"at": now, "state": JobState.QUEUED.value, "reason": "submitted"}],
            created_at=now,
        )

    async def list_jobs(
        self,
        *,
        states: Sequence[str] = (),
        name: str | None = None,
        since: float | None = None,
        labels: Sequence[str] = (),
        limit: int,
        cursor: str | None = None,
    ) -> Page[JobDocument]:
        """The jobs in one of the states, with `name` in their names, submitted at or after `since`; newest first.

        `labels`: every job has all of them, as KEY=VALUE, or KEY for any value. Raises InvalidError.
        """
        query = select(JobRow).options(defer(JobRow.profile_json), defer(JobRow.history)).where(IS_KEPT)
        if states:
            query = query.where(JobRow.state.in_(states))
        if name is not None:
            query = query.where(JobRow.name.contains(name, autoescape=True))
        if since is not None:
            query = query.where(JobRow.created_at >= since)
        for label in labels:
            key, has_value, value = label.partition("=")
            if not is_label_key(key):
                raise InvalidError(f"label {label!r}: expected KEY=VALUE, or KEY for any value")
            found_value = JobRow.spec["labels"][key].as_string()
            query = query.where(found_value == value if has_value else found_value.is_not(None))
        async with self._database.read() as session:
            jobs, following = await _NEWEST_FIRST.read_page(session, query, cursor, limit)
            found = await read_progress(session, [job.id for job in jobs])
        return Page([make_job_document(job, found[job.id]) for job in jobs], following)

    async def find_job(self, id_or_name: str) -> JobDocument:
        """Raises MissingError."""
        async with self._database.read() as session:
            return await make_whole_document(session, await find_job_row(session, id_or_name))

    async def cancel_job(self, id_or_name: str, *, save: bool = False) -> JobDocument:
        """Request the job's end, after a last checkpoint if `save`. A second call without `save` ends a job that is
        still saving at once; otherwise it changes nothing.

        Raises ConflictError when the job has succeeded or failed.
        """
        async with self._database.write() as session:
            job = await find_job_row(session, id_or_name)
            if job.state == JobState.SUCCEEDED or job.state == JobState.FAILED:
                raise ConflictError(f"job {id_or_name!r} has {job.state} already: there is nothing to cancel")
            if job.job_state not in TERMINAL_JOB_STATES:
                if job.state != JobState.CANCELLING:
                    job.move_to_state(JobState.CANCELLING, now=self._now(), reason="cancelled by the user")
                    job.cancel_saves = save
                    text = f"job {job.name!r} is being cancelled{', with a last checkpoint' if save else ''}"
                    self._events.emit_event(session, "job_cancelling", text, job_id=job.id, data={"save": save})
                elif not save:
                    job.cancel_saves = False
                after_commit(session, self._bell.notify_listeners)
            return await make_whole_document(session, job)

    async def retry_job(self, id_or_name: str) -> JobDocument:
        """Queue a job again that failed or was cancelled. It goes on from its newest checkpoint, with its profile, and
        its earlier failures no longer count. A second call before it has ended again changes nothing.

        Raises ConflictError when it neither failed nor was cancelled, or another job has its name by now.
        """
        async with self._database.write() as session:
            job = await find_job_row(session, id_or_name)
            if job.state in (JobState.QUEUED, JobState.RUNNING) and job.retried_after is not None:
                return await make_whole_document(session, job)
            if job.state not in (JobState.FAILED, JobState.CANCELLED):
                raise ConflictError(
                    f"job {id_or_name!r} is {job.state}: only one that failed or was cancelled is retried"
                )
            rival = await session.scalar(select(JobRow).where(JobRow.active_name == job.name))
            if rival is not None:
                raise ConflictError(
                    f"another job {job.name!r} is {rival.state} by now ({rival.id}): cancel it, then retry {job.id}"
                )
            if job.archive is not None and await session.get(ArchiveRow, job.archive) is None:
                raise ConflictError(
                    f"the workdir of job {id_or_name!r} is no longer kept (--keep-archives-days): submit it again "
                    "with the same checkpoint.url, and it goes on from its newest checkpoint"
                )
            was = "failed" if job.state == JobState.FAILED else "was cancelled"
            job.move_to_state(JobState.QUEUED, now=self._now(), reason="retried by the user")
            job.active_name, job.reason, job.cancel_saves = job.name, None, False
            job.error, job.exit_code, job.finished_at, job.profile_error = None, None, None, None
            job.setup_error, job.setup_exit_code, job.setup_failures = None, None, None
            job.retried_at, job.run_since = self._now(), None
            if job.memory_margin is not None:
                job.memory_margin = {**job.memory_margin, "lessons": 0}
            progress_row = await session.get(JobProgressRow, job.id)
            job.retried_after = 0 if progress_row is None else progress_row.newest
            text = f"job {job.name!r}, which {was}, is retried"
            self._events.emit_event(session, "job_retried", text, job_id=job.id)
            after_commit(session, self._bell.notify_listeners)
            return await make_whole_document(session, job)

    async def delete_job(self, id_or_name: str) -> DeletedJobDocument:
        """Hide a job that has ended; `Retention` deletes its rows. Its checkpoints stay where they are.

        A repeated call by id changes nothing. Raises MissingError; ConflictError when the job has not ended, or some of
        its workers may still run.
        """
        async with self._database.write() as session:
            before = await session.get(JobRow, id_or_name)
            if before is not None and before.deleted_at is not None:
                return _deleted_document(before)
            job = await find_job_row(session, id_or_name)
            if job.job_state not in TERMINAL_JOB_STATES:
                raise ConflictError(
                    f"job {id_or_name!r} is {job.state}: only one that is over is deleted (varuna cancel {job.name})"
                )
            alive = select(WorkerRow.vm_id).where(WorkerRow.job_id == job.id, WorkerRow.state.in_(ALIVE)).limit(1)
            vm_id = await session.scalar(alive)
            if vm_id is not None:
                raise ConflictError(
                    f"job {id_or_name!r} may still have workers on VM {vm_id}: delete it when they have stopped"
                )
            mark_deleted(session, self._events, job, self._now(), "by a user")
            return _deleted_document(job)

    async def change_job(
        self, id_or_name: str, changes: Mapping[str, int | None], versions: Collection[int] | None = None
    ) -> JobDocument:
        """Set the job's `priority`, `min_gpus` and `max_gpus`, as far as `changes` has them. It goes on meanwhile, and
        morphs if it must. `versions`: the job must have one of these; None: any.

        Raises ChangedError when it has another version, ConflictError when it has ended, InvalidError for limits that
        contradict each other.
        """
        async with self._database.write() as session:
            job = await find_job_row(session, id_or_name)
            if versions is not None and job.version not in versions:
                raise ChangedError(
                    f"job {id_or_name!r} has changed since it was read (its version is {job.version} now): read it "
                    "again, and then decide"
                )
            if job.job_state in TERMINAL_JOB_STATES or job.job_state is JobState.CANCELLING:
                raise ConflictError(f"job {id_or_name!r} is {job.state}: only one that is not over can be changed")
            spec = _changed(job.spec, changes)
            if spec != job.spec:
                words = ", ".join(f"{name} {'any' if value is None else value}" for name, value in changes.items())
                job.spec = spec
                self._events.emit_event(session, "job_changed", f"job {job.name!r} was given {words}", job_id=job.id)
                after_commit(session, self._bell.notify_listeners)
                await session.flush()
            return await make_whole_document(session, job)

    async def find_profile(self, id_or_name: str) -> str:
        """The job's profile (JSON), as corrected by heartbeats. Raises MissingError before there is one."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            if job.profile_json is None:
                raise MissingError(
                    f"job {id_or_name!r} has no profile: it is {job.state}, and its calibration has not measured one "
                    f"(varuna show {job.name})"
                )
            return job.profile_json


def _deleted_document(job: JobRow) -> DeletedJobDocument:
    return {"id": job.id, "name": job.name, "deleted": True}


def mark_deleted(session: AsyncSession, events: EventLog, job: JobRow, now: float, why: str) -> None:
    """Hide the job, which has ended."""
    job.deleted_at, job.idempotency_key = now, None
    data = {"name": job.name, "state": job.state}
    events.emit_event(session, JOB_DELETED, f"job {job.name!r} ({job.id}) was deleted {why}", job_id=job.id, data=data)


async def find_job_row(session: AsyncSession, id_or_name: str) -> JobRow:
    """The job with this id, or else the newest with this name. Raises MissingError."""
    is_id = JobRow.id == id_or_name
    query = select(JobRow).where(or_(is_id, JobRow.name == id_or_name), IS_KEPT)
    job = await session.scalar(query.order_by(case((is_id, 0), else_=1), JobRow.created_at.desc()).limit(1))
    if job is None:
        raise MissingError(f"job {id_or_name!r} does not exist: varuna ps (GET /api/v1/jobs) lists those that do")
    return job


async def read_progress(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, JobProgress]:
    """The progress of each job, in a few queries for any number of jobs and generations."""
    row, whole = GenerationRow, JobProgressRow
    of = {each.job_id: each for each in await session.scalars(select(whole).where(whole.job_id.in_(job_ids)))}
    # By joins: neither store finds pairs of values by an index.
    steps = (row.last_step, row.last_loss, row.last_step_at, row.not_finite_from, row.steps_skipped)
    is_wanted = row.number.in_([whole.stepped, whole.trained])
    query = select(row.job_id, row.number, row.plan, *steps).join(whole, and_(row.job_id == whole.job_id, is_wanted))
    rows = await session.execute(query.where(whole.job_id.in_(job_ids)))
    generations = {(each.job_id, each.number): each for each in rows}
    rates = await read_job_rates(session, job_ids)
    # By state first, as the index is: grouped by job alone, SQLite goes through the workers of all generations.
    alive = select(WorkerRow.state, WorkerRow.job_id, func.count().label("gpus"))
    alive = alive.where(WorkerRow.state.in_(ALIVE), WorkerRow.job_id.in_(job_ids))
    gpus: Counter[str] = Counter()
    for counted in await session.execute(alive.group_by(WorkerRow.state, WorkerRow.job_id)):
        gpus[counted.job_id] += counted.gpus
    found = dict.fromkeys(job_ids, JobProgress())
    for job_id, each in of.items():
        stepped, trained = generations.get((job_id, each.stepped)), generations.get((job_id, each.trained))
        found[job_id] = JobProgress(
            step=each.step,
            loss=stepped.last_loss if stepped is not None else None,
            last_step_at=stepped.last_step_at if stepped is not None else None,
            generation=each.newest,
            plan=make_plan_document(trained.plan) if trained is not None else None,
            not_finite_from=trained.not_finite_from if trained is not None else None,
            steps_skipped=trained.steps_skipped if trained is not None else 0,
            gpus=gpus[job_id],
            rate=rates.get(job_id),
        )
    return found


async def make_whole_document(session: AsyncSession, job: JobRow) -> JobDocument:
    """The job with its progress."""
    await session.flush()
    return make_job_document(job, (await read_progress(session, [job.id]))[job.id])


def _changed(spec: JobSpecDocument, changes: Mapping[str, int | None]) -> JobSpecDocument:
    """Raises InvalidError."""
    document = {**spec, "resources": {**spec.get("resources", {})}}
    for name, value in changes.items():
        (document if name == "priority" else document["resources"])[name] = value
    try:
        return JobSpec.model_validate(document).model_dump()
    except ValidationError as error:
        words = str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")
        raise InvalidError(f"the job cannot be changed so: {words}") from None
