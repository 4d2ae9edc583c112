"""A job's history: its generations, its plans with their predicted and measured times, its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.answers.documents import format_time
from varuna_manager.answers.errors import MissingError
from varuna_manager.answers.paging import Order, Page
from varuna_manager.db.engine import Database
from varuna_manager.db.models import CheckpointRow, GenerationRow, JobRow, WorkerRow
from varuna_manager.domain.states import GenerationKind
from varuna_manager.history.documents import MorphFacts, make_checkpoint_document, make_generation_document
from varuna_manager.jobs.documents import make_plan_document
from varuna_manager.jobs.jobs import find_job_row
from varuna_manager.jobs.step_rates import StepRate, read_generation_rates
from varuna_manager.world.vm_registry import VmRegistry
from varuna_proto.rest import (
    CandidateDocument,
    CheckpointDocument,
    GenerationDocument,
    PlanRecordDocument,
)

_BY_NUMBER = Order[GenerationRow]((GenerationRow.number,), lambda row: (row.number,), (int,))
_BY_STEP = Order[CheckpointRow](
    (CheckpointRow.generation, CheckpointRow.step), lambda row: (row.generation, row.step), (int, int)
)


class JobHistory:
    def __init__(self, database: Database, registry: VmRegistry, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._registry = registry
        self._now = now

    async def list_generations(
        self, id_or_name: str, *, brief: bool, descending: bool, limit: int, cursor: str | None
    ) -> Page[GenerationDocument]:
        """The job's generations by number. `brief` leaves out candidates and workers."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            return await self.read_generations(
                session, job, brief=brief, descending=descending, limit=limit, cursor=cursor
            )

    async def read_generations(
        self,
        session: AsyncSession,
        job: JobRow,
        *,
        brief: bool,
        descending: bool,
        limit: int,
        cursor: str | None = None,
    ) -> Page[GenerationDocument]:
        """Like `list_generations`."""
        order = replace(_BY_NUMBER, descending=descending)
        query = select(GenerationRow).where(GenerationRow.job_id == job.id)
        if brief:
            query = query.options(defer(GenerationRow.candidates))
        rows, following = await order.read_page(session, query, cursor, limit)
        workers = [] if brief or not rows else await _workers(session, job, [row.number for row in rows])
        morphs = await _read_morph_facts(session, job, rows)
        by_number: dict[int, list[WorkerRow]] = {}
        for worker in workers:
            by_number.setdefault(worker.generation, []).append(worker)
        documents = [
            self._document(job, row, by_number.get(row.number, []), morphs=morphs, brief=brief) for row in rows
        ]
        return Page(documents, following)

    async def find_generation(self, id_or_name: str, number: int) -> GenerationDocument:
        """Raises MissingError."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            found = await self.read_generation(session, job, GenerationRow.number == number)
            if found is None:
                raise _no_generation(id_or_name, number, job)
            return found

    async def read_generation(
        self, session: AsyncSession, job: JobRow, *conditions: ColumnElement[bool]
    ) -> GenerationDocument | None:
        """The newest generation of the job that satisfies all conditions; None: there is none."""
        query = select(GenerationRow).where(GenerationRow.job_id == job.id, *conditions)
        row = await session.scalar(query.order_by(GenerationRow.number.desc()).limit(1))
        if row is None:
            return None
        workers = await _workers(session, job, [row.number])
        morphs = await _read_morph_facts(session, job, [row])
        return self._document(job, row, workers, morphs=morphs, brief=False)

    def _document(
        self, job: JobRow, row: GenerationRow, workers: Sequence[WorkerRow], *, morphs: MorphFacts, brief: bool
    ) -> GenerationDocument:
        places = {} if row.ended_at is not None else {(w.job_id, w.generation, w.rank): w.vm_id for w in workers}
        healths = [
            health
            for vm_id in set(places.values())
            for health in self._registry.list_workers(vm_id)
            if places.get(health.key) == vm_id  # an agent speaks for its own workers only
        ]
        return make_generation_document(
            row, workers, healths, job_name=job.name, morphs=morphs, brief=brief, now=self._now()
        )

    async def list_plans(self, id_or_name: str, *, limit: int, cursor: str | None) -> Page[PlanRecordDocument]:
        """The plans with which the job trained, newest first, without the other candidates."""
        order = replace(_BY_NUMBER, descending=True)
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            query = _training(job).options(defer(GenerationRow.candidates), defer(GenerationRow.history))
            rows, following = await order.read_page(session, query, cursor, limit)
            rates = await read_generation_rates(session, job.id, [row.number for row in rows])
        return Page([_make_plan_record(row, rates.get(row.number), candidates=[]) for row in rows], following)

    async def find_plan(self, id_or_name: str, number: int | None) -> PlanRecordDocument:
        """The plan of a generation (None: the newest one), with the other candidates. Raises MissingError."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            found = await self.read_plan(session, job, number)
        if found is None and number is not None:
            raise _no_generation(id_or_name, number, job)
        if found is None:
            raise MissingError(
                f"job {id_or_name!r} has no plan yet: it is {job.state}"
                f"{f' ({job.reason})' if job.reason else ''}; its profile is measured first"
            )
        return found

    async def read_plan(self, session: AsyncSession, job: JobRow, number: int | None) -> PlanRecordDocument | None:
        """The plan of a generation (None: the newest one), with the other candidates; None: there is none."""
        query = _training(job).order_by(GenerationRow.number.desc()).limit(1)
        if number is not None:
            query = query.where(GenerationRow.number == number)
        row = await session.scalar(query)
        if row is None:
            return None
        rates = await read_generation_rates(session, job.id, [row.number])
        return _make_plan_record(row, rates.get(row.number), cast(list[CandidateDocument], row.candidates))

    async def list_checkpoints(
        self, id_or_name: str, *, descending: bool, limit: int, cursor: str | None
    ) -> Page[CheckpointDocument]:
        """The committed checkpoints, by generation and step."""
        order = replace(_BY_STEP, descending=descending)
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            query = select(CheckpointRow).where(CheckpointRow.job_id == job.id)
            rows, following = await order.read_page(session, query, cursor, limit)
        return Page([make_checkpoint_document(row) for row in rows], following)

    async def read_newest_checkpoint(self, session: AsyncSession, job: JobRow) -> CheckpointDocument | None:
        """The one with the newest generation, and there the newest step; None: there is none."""
        query = select(CheckpointRow).where(CheckpointRow.job_id == job.id)
        query = query.order_by(CheckpointRow.generation.desc(), CheckpointRow.step.desc()).limit(1)
        row = await session.scalar(query)
        return None if row is None else make_checkpoint_document(row)


async def _workers(session: AsyncSession, job: JobRow, numbers: Sequence[int]) -> Sequence[WorkerRow]:
    query = select(WorkerRow).where(
        WorkerRow.job_id == job.id, WorkerRow.generation >= min(numbers), WorkerRow.generation <= max(numbers)
    )
    query = query.options(defer(WorkerRow.history))
    return (await session.scalars(query.order_by(WorkerRow.generation, WorkerRow.rank))).all()


async def _read_morph_facts(session: AsyncSession, job: JobRow, rows: Sequence[GenerationRow]) -> MorphFacts:
    first = await session.scalar(_training(job).with_only_columns(func.min(GenerationRow.number)))
    morphed = [row.number for row in rows if first is not None and row.number > first]
    if not morphed:
        return MorphFacts(first, {})
    kept, store = WorkerRow.kept_bytes, WorkerRow.store_bytes
    peers = func.coalesce(WorkerRow.peer_bytes, 0) + func.coalesce(WorkerRow.late_bytes, 0)
    query = select(WorkerRow.generation, func.sum(kept), func.sum(peers), func.sum(store))
    query = query.group_by(WorkerRow.generation).where(WorkerRow.job_id == job.id, WorkerRow.generation.in_(morphed))
    found = (await session.execute(query)).all()
    return MorphFacts(
        first,
        {
            number: {"kept": int(kept_sum or 0), "peers": int(peers_sum or 0), "store": int(store_sum or 0)}
            for number, kept_sum, peers_sum, store_sum in found
        },
    )


def _training(job: JobRow) -> Select[GenerationRow]:
    return select(GenerationRow).where(
        GenerationRow.job_id == job.id, GenerationRow.kind == GenerationKind.TRAINING.value
    )


def _make_plan_record(
    row: GenerationRow, rate: StepRate | None, candidates: list[CandidateDocument]
) -> PlanRecordDocument:
    plan = make_plan_document(row.plan)
    predicted_s = plan["predicted_minibatch_s"]
    return {
        "generation": row.number,
        "at": format_time(row.created_at),
        "reason": row.reason,
        "plan": plan,
        "candidates": candidates,
        "predicted_step_s": predicted_s,
        "actual_step_s": None if rate is None else rate.step_s,
        "between_s": None if rate is None else rate.between_s,
        "actual_examples_per_s": None if rate is None else rate.examples_per_s,
        "steps": 0 if rate is None else rate.steps,
        "error": None if rate is None or not predicted_s else (rate.step_s - rate.between_s) / predicted_s - 1,
    }


def _no_generation(id_or_name: str, number: int, job: JobRow) -> MissingError:
    return MissingError(
        f"job {id_or_name!r} has no such generation {number}: "
        f"varuna show {job.name} (GET /api/v1/jobs/{job.id}/generations) has those there are"
    )
