"""The pipeline of the newest mini-batch that was traced, as the stages of replica 0 reported it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, GenerationRow, TraceRow, WorkerRow
from varuna_manager.services.documents import Document, iso
from varuna_manager.services.errors import NotFoundError
from varuna_manager.services.jobs import find
from varuna_proto.v1 import agent_pb2 as pb

_TRACES = Base.metadata.tables[TraceRow.__tablename__]
_OPS = {pb.TRACE_OP_FORWARD: "F", pb.TRACE_OP_RECOMPUTE: "R", pb.TRACE_OP_BACKWARD: "B"}
MOST_SPANS = 20_000
"""Of a rank: beyond that there is nothing to see."""


async def keep(session: AsyncSession, fact: pb.StepTraced, now: float) -> None:
    """Store what a rank did in a mini-batch, in place of what it did in an earlier one."""
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

    async def newest(self, id_or_name: str, generation: int | None) -> Document:
        """Of a generation; None: of the newest that has one. Raises NotFoundError."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(TraceRow.generation).where(TraceRow.job_id == job.id)
            if generation is not None:
                query = query.where(TraceRow.generation == generation)
            number = await session.scalar(query.order_by(TraceRow.generation.desc()).limit(1))
            if number is None:
                of = "" if generation is None else f" of generation {generation}"
                raise NotFoundError(
                    f"no mini-batch{of} of job {id_or_name!r} was traced yet: the third step of each generation is, "
                    "and then every hundredth"
                )
            plan = await session.scalar(
                select(GenerationRow.plan).where(GenerationRow.job_id == job.id, GenerationRow.number == number)
            )
            assert plan is not None, "a trace is of a generation"
            rows = await _rows(session, job.id, number)
        # Not all stages may have told of the newest step yet.
        steps = [row.step for row in rows]
        step = max(set(steps), key=lambda one: (steps.count(one), one))
        return _document(plan, number, step, [row for row in rows if row.step == step])


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


def _document(plan: Document, number: int, step: int, rows: Sequence[Row[*tuple[Any, ...]]]) -> Document:
    begin_us = min(row.begin_us for row in rows)
    stages = []
    for row in rows:
        later_us = row.begin_us - begin_us
        stages.append(
            {
                "stage": row.rank % plan["p"],
                "rank": row.rank,
                "vm_id": row.vm_id,
                "ops": [[op, micro_batch, at + later_us, us] for op, micro_batch, at, us in row.spans["ops"]],
                "all_reduce": [[name, at + later_us, us] for name, at, us in row.spans["all_reduce"]],
            }
        )
    spans = [span for stage in stages for span in (*stage["ops"], *stage["all_reduce"])]
    return {
        "generation": number,
        "step": step,
        "p": plan["p"],
        "d": plan["d"],
        "at": iso(max(row.at for row in rows)),
        "span_us": max((span[-2] + span[-1] for span in spans), default=0.0),
        "stages": stages,
    }
