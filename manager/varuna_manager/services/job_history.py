"""What a job has behind it: its generations, its plans and what they were worth, its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.engine import Database
from varuna_manager.db.models import CheckpointRow, GenerationRow, JobRow, MetricRow, WorkerRow
from varuna_manager.domain.states import GenerationKind
from varuna_manager.services import documents
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import NotFoundError
from varuna_manager.services.jobs import find
from varuna_manager.services.paging import Order, Page
from varuna_manager.services.vm_registry import VmRegistry

_JUDGED_STEPS = 100
"""Of a generation, the newest: by them its plan is judged."""
_BY_NUMBER = Order[GenerationRow]((GenerationRow.number,), lambda row: (row.number,), (int,))
_BY_STEP = Order[CheckpointRow](
    (CheckpointRow.generation, CheckpointRow.step), lambda row: (row.generation, row.step), (int, int)
)


class JobHistory:
    def __init__(self, database: Database, registry: VmRegistry, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._registry = registry
        self._now = now

    async def generations(
        self, id_or_name: str, *, brief: bool, descending: bool, limit: int, cursor: str | None
    ) -> Page:
        """The job's generations by number. The `brief` ones are without candidates and workers."""
        order = replace(_BY_NUMBER, descending=descending)
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(GenerationRow).where(GenerationRow.job_id == job.id)
            if brief:
                query = query.options(defer(GenerationRow.candidates))
            rows, following = order.cut((await session.scalars(order.of(query, cursor, limit))).all(), limit)
            workers = [] if brief or not rows else await _workers(session, job, [row.number for row in rows])
        by_number: dict[int, list[WorkerRow]] = {}
        for worker in workers:
            by_number.setdefault(worker.generation, []).append(worker)
        return Page([self._document(row, by_number.get(row.number, []), brief=brief) for row in rows], following)

    async def generation(self, id_or_name: str, number: int) -> Document:
        """Raises NotFoundError."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(GenerationRow).where(GenerationRow.job_id == job.id, GenerationRow.number == number)
            row = await session.scalar(query)
            if row is None:
                raise _no_generation(id_or_name, number, job)
            workers = await _workers(session, job, [number])
        return self._document(row, workers, brief=False)

    def _document(self, row: GenerationRow, workers: Sequence[WorkerRow], *, brief: bool) -> Document:
        places = {} if row.ended_at is not None else {(w.job_id, w.generation, w.rank): w.vm_id for w in workers}
        healths = [
            health
            for vm_id in set(places.values())
            for health in self._registry.workers(vm_id)
            if places.get(health.key) == vm_id  # an agent speaks for its own workers only
        ]
        return documents.generation_document(row, workers, healths, brief=brief, now=self._now())

    async def plans(self, id_or_name: str, *, limit: int, cursor: str | None) -> Page:
        """The plans by which the job trained, newest first, without what else was considered."""
        order = replace(_BY_NUMBER, descending=True)
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = _training(job).options(defer(GenerationRow.candidates), defer(GenerationRow.history))
            rows, following = order.cut((await session.scalars(order.of(query, cursor, limit))).all(), limit)
            times = await _typical_step_s(session, job, [row.number for row in rows])
        return Page([_plan_document(row, times.get(row.number), candidates=[]) for row in rows], following)

    async def plan(self, id_or_name: str, number: int | None) -> Document:
        """One of them, with what else was considered; None: the newest. Raises NotFoundError."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = _training(job).order_by(GenerationRow.number.desc()).limit(1)
            if number is not None:
                query = query.where(GenerationRow.number == number)
            row = await session.scalar(query)
            if row is None and number is not None:
                raise _no_generation(id_or_name, number, job)
            if row is None:
                raise NotFoundError(
                    f"job {id_or_name!r} has no plan yet: it is {job.state}"
                    f"{f' ({job.reason})' if job.reason else ''}; its profile is measured first"
                )
            times = await _typical_step_s(session, job, [row.number])
        return _plan_document(row, times.get(row.number), candidates=row.candidates)

    async def checkpoints(self, id_or_name: str, *, descending: bool, limit: int, cursor: str | None) -> Page:
        """What was committed, by generation and step."""
        order = replace(_BY_STEP, descending=descending)
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(CheckpointRow).where(CheckpointRow.job_id == job.id)
            rows, following = order.cut((await session.scalars(order.of(query, cursor, limit))).all(), limit)
        return Page([documents.checkpoint_document(row) for row in rows], following)


async def _workers(session: AsyncSession, job: JobRow, numbers: Sequence[int]) -> Sequence[WorkerRow]:
    query = select(WorkerRow).where(
        WorkerRow.job_id == job.id, WorkerRow.generation >= min(numbers), WorkerRow.generation <= max(numbers)
    )
    query = query.options(defer(WorkerRow.history))
    return (await session.scalars(query.order_by(WorkerRow.generation, WorkerRow.rank))).all()


def _training(job: JobRow) -> Select[GenerationRow]:
    return select(GenerationRow).where(
        GenerationRow.job_id == job.id, GenerationRow.kind == GenerationKind.TRAINING.value
    )


def _plan_document(row: GenerationRow, typical: tuple[float, int] | None, candidates: list[Document]) -> Document:
    """`typical`: the time of its steps, and of how many."""
    actual_s, steps = typical or (None, 0)
    predicted_s = row.plan["predicted_minibatch_s"]
    return {
        "generation": row.number,
        "at": documents.iso(row.created_at),
        "reason": row.reason,
        "plan": row.plan,
        "candidates": candidates,
        "predicted_step_s": predicted_s,
        "actual_step_s": actual_s,
        "actual_examples_per_s": row.plan["global_batch"] / actual_s if actual_s else None,
        "steps": steps,
        "error": (actual_s - predicted_s) / predicted_s if actual_s is not None and predicted_s else None,
    }


async def _typical_step_s(
    session: AsyncSession, job: JobRow, numbers: Sequence[int]
) -> Mapping[int, tuple[float, int]]:
    """By generation, if it has steps: the median of its newest ones, and how many they are. Its very first is not among
    them, if it has others: it is where everything warms up."""
    steps = select(GenerationRow.number, GenerationRow.resumed_step, MetricRow.step, MetricRow.step_s).join(
        MetricRow,
        (MetricRow.job_id == GenerationRow.job_id)
        & (MetricRow.step > GenerationRow.last_step - _JUDGED_STEPS)
        & (MetricRow.step <= GenerationRow.last_step)
        & (MetricRow.generation == GenerationRow.number),
    )
    first: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    of_these = steps.where(GenerationRow.job_id == job.id, GenerationRow.number.in_(numbers))
    for number, resumed_step, step, step_s in await session.execute(of_these):
        if step == (resumed_step or 0) + 1:
            first[number] = step_s
        else:
            times.setdefault(number, []).append(step_s)
    alone = {number: (step_s, 1) for number, step_s in first.items()}
    return alone | {number: (median(each), len(each)) for number, each in times.items()}


def _no_generation(id_or_name: str, number: int, job: JobRow) -> NotFoundError:
    return NotFoundError(
        f"job {id_or_name!r} has no such generation {number}: "
        f"varuna show {job.name} (GET /api/v1/jobs/{job.id}/generations) has those there are"
    )
