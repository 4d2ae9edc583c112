"""The steps of a job: each one, and so many together that a chart of millions has a few thousand points.

Blocks of BLOCK steps are summed up when the job has passed them (`roll_up`), so that a chart over a million steps reads
ten thousand rows. A generation that does steps again sums up their blocks again as it passes them; until then a block
beyond its newest step may be of steps of which some are overwritten, and the chart takes the steps themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, case, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, GenerationRow, MetricBlockRow, MetricRow
from varuna_manager.services import documents
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import InvalidError
from varuna_manager.services.jobs import find

BLOCK = 100
_BLOCKS = Base.metadata.tables[MetricBlockRow.__tablename__]
_PARTS = (
    "first_step",
    "last_step",
    "steps",
    "at",
    "generation",
    "losses",
    "loss_sum",
    "loss_min",
    "loss_max",
    "step_s_sum",
    "step_s_min",
    "step_s_max",
    "examples",
    "rate_min",
    "rate_max",
)
"""Columns of a block, and of a bucket."""


class StepMetrics:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def steps(self, id_or_name: str, after_step: int, limit: int) -> list[Document]:
        """The steps after `after_step`, in order."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            columns = (MetricRow.step, MetricRow.loss, MetricRow.step_s, MetricRow.examples, MetricRow.generation)
            query = select(*columns, MetricRow.at).where(MetricRow.job_id == job.id, MetricRow.step > after_step)
            rows = (await session.execute(query.order_by(MetricRow.step).limit(limit))).all()
        return [documents.metric_document(row) for row in rows]

    async def buckets(self, id_or_name: str, points: int, from_step: int, to_step: int | None) -> Document:
        """The steps from `from_step` to `to_step` (None: the newest), in at most `points` buckets of equal width.

        Raises InvalidError when they are the wrong way round.
        """
        if to_step is not None and to_step < from_step:
            raise InvalidError(f"to_step {to_step} is before from_step {from_step}: swap them")
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            newest = await session.scalar(select(func.max(MetricRow.step)).where(MetricRow.job_id == job.id))
            last = min(to_step or newest or 0, newest or 0)
            wide = -(-max(last - from_step + 1, 1) // points)
            if wide >= BLOCK // 4:  # rather fewer points than very many steps
                wide = -(-wide // BLOCK) * BLOCK
                from_step = (from_step - 1) // BLOCK * BLOCK + 1
            rows = await _bucket_rows(session, job.id, from_step, last, wide) if last >= from_step else []
        return _columns(rows, from_step, last, wide)


async def roll_up(session: AsyncSession, job_id: str, first: int, last: int) -> None:
    """Sum up the blocks that end among the steps `first` to `last`, which were just stored."""
    begin, end = (first - 1) // BLOCK, last // BLOCK  # the blocks from `begin` on, before `end`
    if end <= begin:
        return
    block = (MetricRow.step - 1) // BLOCK
    found = select(MetricRow.job_id, block.label("block"), *_sums_of_steps()).where(
        MetricRow.job_id == job_id, MetricRow.step > begin * BLOCK, MetricRow.step <= end * BLOCK
    )
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(_BLOCKS).from_select(["job_id", "block", *_PARTS], found.group_by(MetricRow.job_id, block))
    new = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=["job_id", "block"], set_={name: new[name] for name in _PARTS}
    )
    await session.execute(statement)


async def _bucket_rows(
    session: AsyncSession, job_id: str, from_step: int, last: int, wide: int
) -> Sequence[Row[*tuple[Any, ...]]]:
    if wide < BLOCK:
        return await _grouped_steps(session, job_id, from_step, from_step, last, wide)
    passed = select(GenerationRow.last_step).where(GenerationRow.job_id == job_id, GenerationRow.last_step.is_not(None))
    through = await session.scalar(passed.order_by(GenerationRow.number.desc()).limit(1)) or 0
    # Whole buckets of blocks that are passed for good, and the rest from the steps.
    whole = (min(through, last) - from_step + 1) // wide
    border = from_step + max(whole, 0) * wide
    number = (MetricBlockRow.block * BLOCK + 1 - from_step) // wide
    query = select(number.label("bucket"), *_sums_of_blocks()).where(
        MetricBlockRow.job_id == job_id,
        MetricBlockRow.block >= (from_step - 1) // BLOCK,
        MetricBlockRow.block < (border - 1) // BLOCK,
    )
    blocks = (await session.execute(query.group_by(number).order_by(number))).all()
    return [*blocks, *await _grouped_steps(session, job_id, from_step, border, last, wide)]


async def _grouped_steps(
    session: AsyncSession, job_id: str, origin: int, first: int, last: int, wide: int
) -> Sequence[Row[*tuple[Any, ...]]]:
    number = (MetricRow.step - origin) // wide
    query: Select[*tuple[Any, ...]] = select(number.label("bucket"), *_sums_of_steps()).where(
        MetricRow.job_id == job_id, MetricRow.step >= first, MetricRow.step <= last
    )
    return (await session.execute(query.group_by(number).order_by(number))).all()


def _sums_of_steps() -> list[ColumnElement[Any]]:
    """By _PARTS."""
    rate = MetricRow.examples / func.nullif(MetricRow.step_s, 0.0)
    found: dict[str, ColumnElement[Any]] = {
        "first_step": func.min(MetricRow.step),
        "last_step": func.max(MetricRow.step),
        "steps": func.count(),
        "at": func.max(MetricRow.at),
        "generation": func.max(MetricRow.generation),
        "losses": func.count(MetricRow.loss),
        "loss_sum": func.sum(MetricRow.loss),
        "loss_min": func.min(MetricRow.loss),
        "loss_max": func.max(MetricRow.loss),
        "step_s_sum": func.sum(MetricRow.step_s),
        "step_s_min": func.min(MetricRow.step_s),
        "step_s_max": func.max(MetricRow.step_s),
        "examples": func.sum(case((MetricRow.step_s > 0.0, MetricRow.examples), else_=0)),
        "rate_min": func.min(rate),
        "rate_max": func.max(rate),
    }
    return [found[part].label(part) for part in _PARTS]


def _sums_of_blocks() -> list[ColumnElement[Any]]:
    """By _PARTS."""
    columns = _BLOCKS.c
    least = {"first_step"}
    most = {"last_step", "at", "generation"}
    found: list[ColumnElement[Any]] = []
    for part in _PARTS:
        if part in least or part.endswith("_min"):
            column: ColumnElement[Any] = func.min(columns[part])
        elif part in most or part.endswith("_max"):
            column = func.max(columns[part])
        else:
            column = func.sum(columns[part])
        found.append(column.label(part))
    return found


def _columns(rows: Sequence[Row[*tuple[Any, ...]]], from_step: int, last: int, wide: int) -> Document:
    return {
        "from_step": from_step,
        "to_step": last,
        "steps": int(sum(row.steps for row in rows)),
        "bucket_steps": wide,
        "first_step": [row.first_step for row in rows],
        "last_step": [row.last_step for row in rows],
        "count": [int(row.steps) for row in rows],
        "at_unix_s": [row.at for row in rows],
        "generation": [row.generation for row in rows],
        "loss": {
            "min": [row.loss_min for row in rows],
            "mean": [row.loss_sum / int(row.losses) if row.losses else None for row in rows],
            "max": [row.loss_max for row in rows],
        },
        "step_s": {
            "min": [row.step_s_min for row in rows],
            "mean": [row.step_s_sum / int(row.steps) for row in rows],
            "max": [row.step_s_max for row in rows],
        },
        "examples_per_s": {
            "min": [row.rate_min for row in rows],
            "mean": [float(row.examples) / row.step_s_sum if row.step_s_sum else None for row in rows],
            "max": [row.rate_max for row in rows],
        },
    }
