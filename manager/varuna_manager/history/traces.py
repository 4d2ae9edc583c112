"""The pipeline of the newest mini-batch that was traced, as the stages of replica 0 reported it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Row, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.answers.documents import format_time
from varuna_manager.answers.errors import MissingError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, GenerationRow, TraceRow, WorkerRow
from varuna_manager.jobs.jobs import find_job_row
from varuna_proto.rest import PipelineDocument, PlanDocument, StageTraceDocument
from varuna_proto.v1 import agent_pb2 as pb

_TRACES = Base.metadata.tables[TraceRow.__tablename__]
_OPS = {pb.TRACE_OP_FORWARD: "F", pb.TRACE_OP_RECOMPUTE: "R", pb.TRACE_OP_BACKWARD: "B"}
MOST_SPANS = 20_000
"""The most spans of a rank: a chart cannot show more."""


async def store_trace(session: AsyncSession, fact: pb.StepTraced, now: float) -> None:
    """Store what a rank did in a mini-batch. It replaces the rank's earlier trace."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    ops = [[_OPS.get(op.op, "?"), op.micro_batch, op.start_us, op.duration_us] for op in fact.ops[:MOST_SPANS]]
    sums = [[one.name, one.start_us, one.duration_us] for one in fact.all_reduce[:MOST_SPANS]]
    row = {
        "job_id": fact.job_id,
        "generation": fact.generation,
        "rank": fact.rank,
        "step": fact.step,
        "at": now,
        "begin_us": fact.begin_us,
        "spans": {"ops": ops, "all_reduce": sums},
    }
    statement = insert(_TRACES).values(row)
    new = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=["job_id", "generation", "rank"],
        set_={name: new[name] for name in ("step", "at", "begin_us", "spans")},
        where=new.step >= TraceRow.step,
    )
    await session.execute(statement)


class Traces:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find_newest_trace(self, id_or_name: str, generation: int | None) -> PipelineDocument:
        """The newest trace of a generation; None: of the newest generation that has one. Raises MissingError."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            query = select(TraceRow.generation).where(TraceRow.job_id == job.id)
            if generation is not None:
                query = query.where(TraceRow.generation == generation)
            number = await session.scalar(query.order_by(TraceRow.generation.desc()).limit(1))
            if number is None:
                of = "" if generation is None else f" of generation {generation}"
                raise MissingError(
                    f"no mini-batch{of} of job {id_or_name!r} was traced yet: the third step of each generation is, "
                    "and then every hundredth"
                )
            plan = await session.scalar(
                select(GenerationRow.plan).where(GenerationRow.job_id == job.id, GenerationRow.number == number)
            )
            assert plan is not None, "a trace is of a generation"
            rows = await _rows(session, job.id, number)
        # Some stages may not have reported the newest step yet.
        steps = [row.step for row in rows]
        step = max(set(steps), key=lambda one: (steps.count(one), one))
        newest = [row for row in rows if row.step == step]
        return _make_pipeline_document(cast(PlanDocument, plan), number, step, newest)


async def _rows(session: AsyncSession, job_id: str, number: int) -> Sequence[Row[*tuple[Any, ...]]]:
    found = await session.execute(
        select(TraceRow.rank, TraceRow.step, TraceRow.at, TraceRow.begin_us, TraceRow.spans, WorkerRow.vm_id)
        .outerjoin(
            WorkerRow,
            (WorkerRow.job_id == TraceRow.job_id)
            & (WorkerRow.generation == TraceRow.generation)
            & (WorkerRow.rank == TraceRow.rank),
        )
        .where(TraceRow.job_id == job_id, TraceRow.generation == number)
        .order_by(TraceRow.rank)
    )
    return found.all()


def _make_pipeline_document(
    plan: PlanDocument, number: int, step: int, rows: Sequence[Row[*tuple[Any, ...]]]
) -> PipelineDocument:
    begin_us = min(row.begin_us for row in rows)
    stages: list[StageTraceDocument] = []
    for row in rows:
        later_us = row.begin_us - begin_us
        stages.append(
            {
                "stage": row.rank % plan["p"],
                "rank": row.rank,
                "vm_id": row.vm_id,
                "ops": [(op, micro_batch, at + later_us, us) for op, micro_batch, at, us in row.spans["ops"]],
                "all_reduce": [(name, at + later_us, us) for name, at, us in row.spans["all_reduce"]],
            }
        )
    ends_us = [at + us for stage in stages for _, _, at, us in stage["ops"]]
    ends_us += [at + us for stage in stages for _, at, us in stage["all_reduce"]]
    return {
        "generation": number,
        "step": step,
        "p": plan["p"],
        "d": plan["d"],
        "at": format_time(max(row.at for row in rows)),
        "span_us": max(ends_us, default=0.0),
        "stages": stages,
    }
