"""Jobs as their users see them: submit, look, cancel."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import CheckpointRow, EventRow, GenerationRow, JobRow, MetricRow, WorkerRow
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import TERMINAL_JOB_STATES, JobState
from varuna_manager.services import documents
from varuna_manager.services.bell import Bell
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import ConflictError, InvalidError, NotFoundError
from varuna_manager.services.events import EventLog

KEY_LIFE_S = 24 * 3600.0
"""After that an Idempotency-Key means nothing any more, and may come with another job."""


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
                    return documents.job_document(before, await _generations(session, before.id))
            rival = await session.scalar(select(JobRow).where(JobRow.active_name == spec.name))
            if rival is not None:
                raise ConflictError(
                    f"job {spec.name!r} is already {rival.state} ({rival.id}): choose another name or cancel it first"
                )
            job = self._new_row(spec, document, idempotency_key)
            session.add(job)
            self._events.add(session, "job_submitted", f"job {spec.name!r} was submitted", job_id=job.id)
            after_commit(session, self._bell.ring)
        return documents.job_document(job, ())

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
            state=JobState.QUEUED.value,
            history=[{"at": now, "state": JobState.QUEUED.value, "reason": "submitted"}],
            created_at=now,
        )

    async def all(self) -> list[Document]:
        """Every job, newest first."""
        async with self._database.read() as session:
            jobs = await session.scalars(select(JobRow).order_by(JobRow.created_at.desc()))
            return [documents.job_document(job, await _generations(session, job.id)) for job in jobs.all()]

    async def one(self, id_or_name: str) -> Document:
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            return documents.job_document(job, await _generations(session, job.id))

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
            generations = await _generations(session, job.id)
        return documents.job_document(job, generations)

    async def retry(self, id_or_name: str) -> Document:
        """Queue a job that failed or was cancelled once more: it goes on from its newest checkpoint, with its profile,
        and what failed before is not held against it. Asking again, before it has ended again, changes nothing.

        Raises ConflictError when it has not ended so, or another job has its name by now.
        """
        async with self._database.write() as session:
            job = await find(session, id_or_name)
            generations = await _generations(session, job.id)
            if job.state in (JobState.QUEUED, JobState.RUNNING) and job.retried_after is not None:
                return documents.job_document(job, generations)
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
            job.retried_after = max((generation.number for generation in generations), default=0)
            text = f"job {job.name!r}, which {was}, is retried"
            self._events.add(session, "job_retried", text, job_id=job.id)
            after_commit(session, self._bell.ring)
        return documents.job_document(job, generations)

    async def generations(self, id_or_name: str) -> list[Document]:
        """The job's generations, oldest first."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            workers = await session.scalars(
                select(WorkerRow).where(WorkerRow.job_id == job.id).order_by(WorkerRow.generation, WorkerRow.rank)
            )
            by_number: dict[int, list[WorkerRow]] = {}
            for worker in workers:
                by_number.setdefault(worker.generation, []).append(worker)
            rows = await _generations(session, job.id, whole=True)
            return [documents.generation_document(row, by_number.get(row.number, [])) for row in rows]

    async def metrics(self, id_or_name: str, after_step: int, limit: int) -> list[Document]:
        """The steps after `after_step`, in order."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(MetricRow).where(MetricRow.job_id == job.id, MetricRow.step > after_step)
            rows = await session.scalars(query.order_by(MetricRow.step).limit(limit))
            return [documents.metric_document(row) for row in rows]

    async def checkpoints(self, id_or_name: str) -> list[Document]:
        """What was committed, oldest first."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(CheckpointRow).where(CheckpointRow.job_id == job.id)
            rows = await session.scalars(query.order_by(CheckpointRow.generation, CheckpointRow.step))
            return [documents.checkpoint_document(row) for row in rows]

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

    async def events(self, id_or_name: str, after: int, limit: int) -> Sequence[EventRow]:
        async with self._database.read() as session:
            job = await find(session, id_or_name)
        return await self._events.after(after, job_id=job.id, limit=limit)


async def find(session: AsyncSession, id_or_name: str) -> JobRow:
    """The job of this id; else the newest of this name. Raises NotFoundError."""
    query = select(JobRow).where(or_(JobRow.id == id_or_name, JobRow.name == id_or_name))
    jobs = (await session.scalars(query.order_by(JobRow.created_at.desc()))).all()
    if not jobs:
        raise NotFoundError(f"job {id_or_name!r} does not exist: varuna ps (GET /api/v1/jobs) lists those that do")
    return next((job for job in jobs if job.id == id_or_name), jobs[0])


async def _generations(session: AsyncSession, job_id: str, *, whole: bool = False) -> Sequence[GenerationRow]:
    """Oldest first; only the `whole` ones can tell their candidates and history, which are long."""
    query = select(GenerationRow).where(GenerationRow.job_id == job_id).order_by(GenerationRow.number)
    if not whole:
        query = query.options(defer(GenerationRow.candidates), defer(GenerationRow.history))
    return (await session.scalars(query)).all()
