"""Jobs as their users see them: submit, look, cancel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import token_hex

from pydantic import ValidationError
from sqlalchemy import and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import ArchiveRow, GenerationRow, JobProgressRow, JobRow, MetricRow, WorkerRow
from varuna_manager.domain.spec import JobSpec, is_label_key, read_spec
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    TERMINAL_JOB_STATES,
    JobState,
    WorkerState,
)
from varuna_manager.services import documents
from varuna_manager.services.bell import Bell
from varuna_manager.services.documents import Document, JobProgress
from varuna_manager.services.errors import ChangedError, ConflictError, InvalidError, NotFoundError
from varuna_manager.services.events import EventLog
from varuna_manager.services.paging import Order, Page
from varuna_manager.services.secrets import Secrets

KEY_LIFE_S = 24 * 3600.0
"""After that an Idempotency-Key means nothing any more, and may come with another job."""
ALIVE = [state.value for state in WorkerState if state not in STOPPED_WORKER_STATES]
"""States of workers that have not stopped."""
JOB_DELETED = "job_deleted"
"""The event that outlives its job."""
IS_KEPT = JobRow.deleted_at.is_(None)
_NEWEST_FIRST = Order[JobRow](
    (JobRow.created_at, JobRow.id), lambda job: (job.created_at, job.id), (float, str), descending=True
)


class JobService:
    """`checkpoint_root`: a folder's or a store's URL, for the checkpoints of jobs that name none.

    `needs_checkpoint_url`: such jobs are refused, for there is no place that every manager reaches.
    `secrets`: those that jobs may name; None: none.
    `new_id`: what is behind the `job-` of a new job's id.
    """

    def __init__(
        self,
        database: Database,
        events: EventLog,
        bell: Bell,
        now: Callable[[], float] = time.time,
        *,
        checkpoint_root: str | None = None,
        needs_checkpoint_url: bool = False,
        secrets: Secrets | None = None,
        new_id: Callable[[], str] = lambda: token_hex(4),
    ) -> None:
        self._database = database
        self._events = events
        self._bell = bell
        self._now = now
        self._checkpoint_root = checkpoint_root
        self._needs_checkpoint_url = needs_checkpoint_url
        self._secrets = secrets or Secrets({})
        self._new_id = new_id

    async def submit(self, spec: JobSpec, idempotency_key: str | None) -> Document:
        """Queue the job. The same key with the same spec gives the same job again, for KEY_LIFE_S.

        Raises ConflictError when the key came with another spec, or the name is that of a job that is not over;
        InvalidError when the job must name a place for its checkpoints and does not, or a secret of it is not here.
        """
        self._check_checkpoint_url(spec)
        if missing := await self._secrets.why_never(spec.secrets):
            raise InvalidError(missing)
        document = spec.model_dump()
        async with self._database.write() as session:
            if idempotency_key is not None:
                before = await session.scalar(select(JobRow).where(JobRow.idempotency_key == idempotency_key))
                if before is not None and self._now() - before.created_at >= KEY_LIFE_S:
                    before.idempotency_key = None
                    await session.flush()
                    before = None
                # Compared as specs: one that was stored by an earlier version lacks what has come since.
                if before is not None and read_spec(before.spec)[0] != spec:
                    raise ConflictError(
                        f"Idempotency-Key {idempotency_key!r} was used for job {before.id} with another spec: "
                        "send a new key with a new job"
                    )
                if before is not None:
                    return await _told(session, before)
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
            self._events.add(session, "job_submitted", f"job {spec.name!r} was submitted", job_id=job.id)
            after_commit(session, self._bell.ring)
            await session.flush()
        return documents.job_document(job, documents.JobProgress())

    def _check_checkpoint_url(self, spec: JobSpec) -> None:
        if self._needs_checkpoint_url and spec.checkpoint.url is None and not spec.profile_only:
            raise InvalidError(
                f"job {spec.name!r} names no place for its checkpoints, and a folder of this manager will not do, as "
                "another one may lead later: give checkpoint.url, or start the managers with --default-checkpoint-url"
            )

    def _new_row(self, spec: JobSpec, document: Document, idempotency_key: str | None) -> JobRow:
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

    async def page(
        self,
        *,
        states: Sequence[str] = (),
        name: str | None = None,
        since: float | None = None,
        labels: Sequence[str] = (),
        limit: int,
        cursor: str | None = None,
    ) -> Page:
        """The jobs, newest first: those in one of the states, with `name` in their names, submitted since then.

        `labels`: that they all have, KEY=VALUE or KEY for any value. Raises InvalidError.
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
            rows = (await session.scalars(_NEWEST_FIRST.of(query, cursor, limit))).all()
            jobs, following = _NEWEST_FIRST.cut(rows, limit)
            found = await progress(session, [job.id for job in jobs])
        return Page([documents.job_document(job, found[job.id]) for job in jobs], following)

    async def one(self, id_or_name: str) -> Document:
        """Raises NotFoundError."""
        async with self._database.read() as session:
            return await _told(session, await find(session, id_or_name))

    async def cancel(self, id_or_name: str, *, save: bool = False) -> Document:
        """Ask for the job's end, with a last checkpoint where `save`. Asking again changes nothing, but that without
        `save` a job that is still saving ends at once.

        Raises ConflictError when it has ended otherwise.
        """
        async with self._database.write() as session:
            job = await find(session, id_or_name)
            if job.state == JobState.SUCCEEDED or job.state == JobState.FAILED:
                raise ConflictError(f"job {id_or_name!r} has {job.state} already: there is nothing to cancel")
            if job.job_state not in TERMINAL_JOB_STATES:
                if job.state != JobState.CANCELLING:
                    job.move(JobState.CANCELLING, now=self._now(), reason="cancelled by the user")
                    job.cancel_saves = save
                    text = f"job {job.name!r} is being cancelled{', with a last checkpoint' if save else ''}"
                    self._events.add(session, "job_cancelling", text, job_id=job.id, data={"save": save})
                elif not save:
                    job.cancel_saves = False
                after_commit(session, self._bell.ring)
            return await _told(session, job)

    async def retry(self, id_or_name: str) -> Document:
        """Queue a job that failed or was cancelled once more: it goes on from its newest checkpoint, with its profile,
        and what failed before is not held against it. Asking again, before it has ended again, changes nothing.

        Raises ConflictError when it has not ended so, or another job has its name by now.
        """
        async with self._database.write() as session:
            job = await find(session, id_or_name)
            if job.state in (JobState.QUEUED, JobState.RUNNING) and job.retried_after is not None:
                return await _told(session, job)
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
            job.move(JobState.QUEUED, now=self._now(), reason="retried by the user")
            job.active_name, job.reason, job.cancel_saves = job.name, None, False
            job.error, job.exit_code, job.finished_at, job.profile_error = None, None, None, None
            job.setup_error, job.setup_exit_code, job.setup_failures = None, None, None
            job.retried_at, job.run_since = self._now(), None
            progress_row = await session.get(JobProgressRow, job.id)
            job.retried_after = 0 if progress_row is None else progress_row.newest
            text = f"job {job.name!r}, which {was}, is retried"
            self._events.add(session, "job_retried", text, job_id=job.id)
            after_commit(session, self._bell.ring)
            return await _told(session, job)

    async def delete(self, id_or_name: str) -> Document:
        """Forget a job that is over: nobody sees it from now on, and `Retention` deletes what belongs to it. Its
        checkpoints stay where they are. Asking again by its id changes nothing.

        Raises NotFoundError; ConflictError when it is not over, or some of its workers may still run.
        """
        async with self._database.write() as session:
            before = await session.get(JobRow, id_or_name)
            if before is not None and before.deleted_at is not None:
                return _deleted_document(before)
            job = await find(session, id_or_name)
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

    async def change(
        self, id_or_name: str, changes: Mapping[str, int | None], versions: Collection[int] | None = None
    ) -> Document:
        """Set the job's `priority`, `min_gpus` and `max_gpus`, as far as `changes` has them. It goes on meanwhile, and
        morphs where it must. `versions`: only if the job still has one of them; None: whichever it has.

        Raises ChangedError when it has another one, ConflictError when the job is over, InvalidError for limits that
        contradict each other.
        """
        async with self._database.write() as session:
            job = await find(session, id_or_name)
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
                self._events.add(session, "job_changed", f"job {job.name!r} was given {words}", job_id=job.id)
                after_commit(session, self._bell.ring)
                await session.flush()
            return await _told(session, job)

    async def profile(self, id_or_name: str) -> str:
        """The job's profile (JSON), as its heartbeats corrected it. Raises NotFoundError before there is one."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            if job.profile_json is None:
                raise NotFoundError(
                    f"job {id_or_name!r} has no profile: it is {job.state}, and its calibration has not measured one "
                    f"(varuna show {job.name})"
                )
            return job.profile_json


def _deleted_document(job: JobRow) -> Document:
    return {"id": job.id, "name": job.name, "deleted": True}


def mark_deleted(session: AsyncSession, events: EventLog, job: JobRow, now: float, why: str) -> None:
    """Hide the job, which is over, from everybody."""
    job.deleted_at, job.idempotency_key = now, None
    data = {"name": job.name, "state": job.state}
    events.add(session, JOB_DELETED, f"job {job.name!r} ({job.id}) was deleted {why}", job_id=job.id, data=data)


async def find(session: AsyncSession, id_or_name: str) -> JobRow:
    """The job of this id; else the newest of this name. Raises NotFoundError."""
    is_id = JobRow.id == id_or_name
    query = select(JobRow).where(or_(is_id, JobRow.name == id_or_name), IS_KEPT)
    job = await session.scalar(query.order_by(case((is_id, 0), else_=1), JobRow.created_at.desc()).limit(1))
    if job is None:
        raise NotFoundError(f"job {id_or_name!r} does not exist: varuna ps (GET /api/v1/jobs) lists those that do")
    return job


async def progress(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, JobProgress]:
    """How far each of the jobs is: a few queries, however many jobs and generations there are."""
    row, whole = GenerationRow, JobProgressRow
    of = {each.job_id: each for each in await session.scalars(select(whole).where(whole.job_id.in_(job_ids)))}
    # By joins: neither store finds pairs of values by an index.
    columns = (row.job_id, row.number, row.plan, row.last_step, row.last_loss, row.last_step_at)
    is_wanted = row.number.in_([whole.stepped, whole.trained])
    query = select(*columns).join(whole, and_(row.job_id == whole.job_id, is_wanted))
    rows = await session.execute(query.where(whole.job_id.in_(job_ids)))
    generations = {(each.job_id, each.number): each for each in rows}
    is_last = and_(MetricRow.job_id == whole.job_id, MetricRow.step == whole.step)
    measured = await session.execute(
        select(MetricRow.job_id, MetricRow.step_s, MetricRow.examples)
        .join(whole, is_last)
        .where(whole.job_id.in_(job_ids))
    )
    metrics = {each.job_id: each for each in measured}
    # By state first, as the index is: grouped by job alone, SQLite goes through the workers of all generations.
    alive = select(WorkerRow.state, WorkerRow.job_id, func.count().label("gpus"))
    alive = alive.where(WorkerRow.state.in_(ALIVE), WorkerRow.job_id.in_(job_ids))
    gpus: Counter[str] = Counter()
    for counted in await session.execute(alive.group_by(WorkerRow.state, WorkerRow.job_id)):
        gpus[counted.job_id] += counted.gpus
    found = dict.fromkeys(job_ids, JobProgress())
    for job_id, each in of.items():
        stepped, trained = generations.get((job_id, each.stepped)), generations.get((job_id, each.trained))
        metric = metrics.get(job_id)
        found[job_id] = JobProgress(
            step=each.step,
            loss=stepped.last_loss if stepped is not None else None,
            last_step_at=stepped.last_step_at if stepped is not None else None,
            generation=each.newest,
            plan=trained.plan if trained is not None else None,
            gpus=gpus[job_id],
            step_s=metric.step_s if metric is not None else None,
            examples=metric.examples if metric is not None else None,
        )
    return found


async def _told(session: AsyncSession, job: JobRow) -> Document:
    await session.flush()
    return documents.job_document(job, (await progress(session, [job.id]))[job.id])


def _changed(spec: Document, changes: Mapping[str, int | None]) -> Document:
    """Raises InvalidError."""
    document = {**spec, "resources": {**spec.get("resources", {})}}
    for name, value in changes.items():
        (document if name == "priority" else document["resources"])[name] = value
    try:
        return JobSpec.model_validate(document).model_dump()
    except ValidationError as error:
        words = str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")
        raise InvalidError(f"the job cannot be changed so: {words}") from None
