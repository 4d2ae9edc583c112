"""Jobs as their users see them: submit, look, cancel."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from pydantic import ValidationError
from sqlalchemy import and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import ArchiveRow, GenerationRow, JobRow, MetricRow, WorkerRow
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    TERMINAL_JOB_STATES,
    GenerationKind,
    JobState,
    WorkerState,
)
from varuna_manager.services import documents
from varuna_manager.services.bell import Bell
from varuna_manager.services.documents import Document, JobProgress
from varuna_manager.services.errors import ChangedError, ConflictError, InvalidError, NotFoundError
from varuna_manager.services.events import EventLog
from varuna_manager.services.paging import Order, Page

KEY_LIFE_S = 24 * 3600.0
"""After that an Idempotency-Key means nothing any more, and may come with another job."""
ALIVE = [state.value for state in WorkerState if state not in STOPPED_WORKER_STATES]
"""States of workers that have not stopped."""
_NEWEST_FIRST = Order[JobRow](
    (JobRow.created_at, JobRow.id), lambda job: (job.created_at, job.id), (float, str), descending=True
)


class JobService:
    """`checkpoint_root`: a folder's or a store's URL, for the checkpoints of jobs that name none.

    `needs_checkpoint_url`: such jobs are refused, for there is no place that every manager reaches.
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
        new_id: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._database = database
        self._events = events
        self._bell = bell
        self._now = now
        self._checkpoint_root = checkpoint_root
        self._needs_checkpoint_url = needs_checkpoint_url
        self._new_id = new_id

    async def submit(self, spec: JobSpec, idempotency_key: str | None) -> Document:
        """Queue the job. The same key with the same spec gives the same job again, for KEY_LIFE_S.

        Raises ConflictError when the key came with another spec, or the name is that of a job that is not over;
        InvalidError when the job must name a place for its checkpoints and does not.
        """
        self._check_checkpoint_url(spec)
        document = spec.model_dump()
        async with self._database.write() as session:
            if idempotency_key is not None:
                before = await session.scalar(select(JobRow).where(JobRow.idempotency_key == idempotency_key))
                if before is not None and self._now() - before.created_at >= KEY_LIFE_S:
                    before.idempotency_key = None
                    await session.flush()
                    before = None
                # Compared as specs: one that was stored by an earlier version lacks what has come since.
                if before is not None and JobSpec.model_validate(before.spec) != spec:
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
        limit: int,
        cursor: str | None = None,
    ) -> Page:
        """The jobs, newest first: those in one of the states, with `name` in their names, submitted since then."""
        query = select(JobRow).options(defer(JobRow.profile_json), defer(JobRow.history))
        if states:
            query = query.where(JobRow.state.in_(states))
        if name is not None:
            query = query.where(JobRow.name.contains(name, autoescape=True))
        if since is not None:
            query = query.where(JobRow.created_at >= since)
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
            was = "failed" if job.state == JobState.FAILED else "was cancelled"
            job.move(JobState.QUEUED, now=self._now(), reason="retried by the user")
            job.active_name, job.reason, job.cancel_saves = job.name, None, False
            job.error, job.exit_code, job.finished_at, job.profile_error = None, None, None, None
            job.setup_error, job.setup_exit_code = None, None
            newest = select(func.max(GenerationRow.number)).where(GenerationRow.job_id == job.id)
            job.retried_after = await session.scalar(newest) or 0
            text = f"job {job.name!r}, which {was}, is retried"
            self._events.add(session, "job_retried", text, job_id=job.id)
            after_commit(session, self._bell.ring)
            return await _told(session, job)

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


async def find(session: AsyncSession, id_or_name: str) -> JobRow:
    """The job of this id; else the newest of this name. Raises NotFoundError."""
    is_id = JobRow.id == id_or_name
    query = select(JobRow).where(or_(is_id, JobRow.name == id_or_name))
    job = await session.scalar(query.order_by(case((is_id, 0), else_=1), JobRow.created_at.desc()).limit(1))
    if job is None:
        raise NotFoundError(f"job {id_or_name!r} does not exist: varuna ps (GET /api/v1/jobs) lists those that do")
    return job


async def progress(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, JobProgress]:
    """How far each of the jobs is: a few queries, however many jobs and generations there are."""
    row = GenerationRow
    has_stepped, trains = row.last_step.is_not(None), row.kind == GenerationKind.TRAINING.value
    newest = (
        select(
            row.job_id,
            func.max(row.number).label("newest"),
            func.max(row.last_step).label("step"),
            func.max(case((has_stepped, row.number))).label("stepped"),
            func.max(case((trains, row.number))).label("trained"),
        )
        .where(row.job_id.in_(job_ids))
        .group_by(row.job_id)
        .subquery()
    )
    of = {each.job_id: each for each in await session.execute(select(newest))}
    # By joins: neither store finds pairs of values by an index.
    columns = (row.job_id, row.number, row.plan, row.last_step, row.last_loss, row.last_step_at)
    is_wanted = or_(row.number == newest.c.stepped, row.number == newest.c.trained)
    rows = await session.execute(select(*columns).join(newest, and_(row.job_id == newest.c.job_id, is_wanted)))
    generations = {(each.job_id, each.number): each for each in rows}
    is_last = and_(MetricRow.job_id == newest.c.job_id, MetricRow.step == newest.c.step)
    measured = await session.execute(
        select(MetricRow.job_id, MetricRow.step_s, MetricRow.examples).join(newest, is_last)
    )
    metrics = {each.job_id: each for each in measured}
    alive = select(WorkerRow.job_id, func.count().label("gpus")).where(
        WorkerRow.job_id.in_(job_ids), WorkerRow.state.in_(ALIVE)
    )
    gpus = {each.job_id: each.gpus for each in await session.execute(alive.group_by(WorkerRow.job_id))}
    found = dict.fromkeys(job_ids, JobProgress())
    for job_id, each in of.items():
        stepped, trained = generations.get((job_id, each.stepped)), generations.get((job_id, each.trained))
        metric = metrics.get(job_id)
        found[job_id] = JobProgress(
            step=each.step or 0,
            loss=stepped.last_loss if stepped is not None else None,
            last_step_at=stepped.last_step_at if stepped is not None else None,
            generation=each.newest,
            plan=trained.plan if trained is not None else None,
            gpus=gpus.get(job_id, 0),
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
