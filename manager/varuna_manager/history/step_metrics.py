"""The steps of a job, one by one, and in buckets so that a chart of millions of steps has a few thousand points.

Blocks of BLOCK steps are summed up when the job has passed them (`roll_up`), so that a chart of a million steps reads
ten thousand rows. A generation that redoes steps sums up their blocks again as it passes them. Until then, a block
beyond its newest step may contain overwritten steps, so the chart reads the steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, case, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.answers.errors import InvalidError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, GenerationRow, MetricBlockRow, MetricRow
from varuna_manager.history.documents import make_step_document
from varuna_manager.jobs.jobs import find_job_row
from varuna_proto.rest import MetricBucketsDocument, StepMetricsDocument

BLOCK = 100
_BLOCKS = Base.metadata.tables[MetricBlockRow.__tablename__]
_RATE = MetricRow.examples / func.nullif(MetricRow.step_s, 0.0)
_PARTS: Mapping[str, tuple[ColumnElement[Any], Callable[[Any], ColumnElement[Any]]]] = {
    "first_step": (func.min(MetricRow.step), func.min),
    "last_step": (func.max(MetricRow.step), func.max),
    "steps": (func.count(), func.sum),
    "at": (func.max(MetricRow.at), func.max),
    "generation": (func.max(MetricRow.generation), func.max),
    "losses": (func.count(MetricRow.loss), func.sum),
    "loss_sum": (func.sum(MetricRow.loss), func.sum),
    "loss_min": (func.min(MetricRow.loss), func.min),
    "loss_max": (func.max(MetricRow.loss), func.max),
    "step_s_sum": (func.sum(MetricRow.step_s), func.sum),
    "step_s_min": (func.min(MetricRow.step_s), func.min),
    "step_s_max": (func.max(MetricRow.step_s), func.max),
    "examples": (func.sum(case((MetricRow.step_s > 0.0, MetricRow.examples), else_=0)), func.sum),
    "rate_min": (func.min(_RATE), func.min),
    "rate_max": (func.max(_RATE), func.max),
    "gradient_norms": (func.count(MetricRow.gradient_norm), func.sum),
    "gradient_norm_sum": (func.sum(MetricRow.gradient_norm), func.sum),
    "gradient_norm_min": (func.min(MetricRow.gradient_norm), func.min),
    "gradient_norm_max": (func.max(MetricRow.gradient_norm), func.max),
    "learning_rates": (func.count(MetricRow.learning_rate), func.sum),
    "learning_rate_sum": (func.sum(MetricRow.learning_rate), func.sum),
    "learning_rate_min": (func.min(MetricRow.learning_rate), func.min),
    "learning_rate_max": (func.max(MetricRow.learning_rate), func.max),
}
"""Columns of a block, and of a bucket: each over steps, and the function that combines those of blocks."""
_SUMS_OF_STEPS = [of_steps.label(part) for part, (of_steps, _) in _PARTS.items()]
_SUMS_OF_BLOCKS = [combine(_BLOCKS.c[part]).label(part) for part, (_, combine) in _PARTS.items()]


class StepMetrics:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list_steps(self, id_or_name: str, after_step: int, limit: int) -> list[StepMetricsDocument]:
        """The steps after `after_step`, in order."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            columns = (MetricRow.step, MetricRow.loss, MetricRow.step_s, MetricRow.between_s, MetricRow.examples)
            update = (MetricRow.gradient_norm, MetricRow.learning_rate)
            query = select(*columns, *update, MetricRow.generation, MetricRow.at).where(
                MetricRow.job_id == job.id, MetricRow.step > after_step
            )
            rows = (await session.execute(query.order_by(MetricRow.step).limit(limit))).all()
        return [make_step_document(row) for row in rows]

    async def read_buckets(
        self, id_or_name: str, points: int, from_step: int, to_step: int | None
    ) -> MetricBucketsDocument:
        """The steps from `from_step` to `to_step` (None: the newest), in at most `points` buckets of equal width.

        Raises InvalidError when they are the wrong way round.
        """
        if to_step is not None and to_step < from_step:
            raise InvalidError(f"to_step {to_step} is before from_step {from_step}: swap them")
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            return await collect_buckets(session, job.id, points, from_step, to_step)


async def collect_buckets(
    session: AsyncSession, job_id: str, points: int, from_step: int = 1, to_step: int | None = None
) -> MetricBucketsDocument:
    """The steps from `from_step` to `to_step` (None: the newest), in at most `points` buckets of equal width."""
    newest = await session.scalar(select(func.max(MetricRow.step)).where(MetricRow.job_id == job_id))
    last = min(to_step or newest or 0, newest or 0)
    wide = -(-max(last - from_step + 1, 1) // points)
    if wide >= BLOCK // 4:  # fewer points are better than reading very many steps
        wide = -(-wide // BLOCK) * BLOCK
        from_step = (from_step - 1) // BLOCK * BLOCK + 1
    rows = await _bucket_rows(session, job_id, from_step, last, wide) if last >= from_step else []
    return _columns(rows, from_step, last, wide)


async def roll_up(session: AsyncSession, job_id: str, first: int, last: int) -> None:
    """Sum up the blocks that end among the steps `first` to `last`, which were just stored."""
    begin, end = (first - 1) // BLOCK, last // BLOCK  # the blocks from `begin` on, before `end`
    if end <= begin:
        return
    block = (MetricRow.step - 1) // BLOCK
    found = select(MetricRow.job_id, block.label("block"), *_SUMS_OF_STEPS).where(
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
    # Buckets that lie wholly before `through` come from blocks, the rest from steps.
    whole = (min(through, last) - from_step + 1) // wide
    border = from_step + max(whole, 0) * wide
    number = (MetricBlockRow.block * BLOCK + 1 - from_step) // wide
    query = select(number.label("bucket"), *_SUMS_OF_BLOCKS).where(
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
    query: Select[*tuple[Any, ...]] = select(number.label("bucket"), *_SUMS_OF_STEPS).where(
        MetricRow.job_id == job_id, MetricRow.step >= first, MetricRow.step <= last
    )
    return (await session.execute(query.group_by(number).order_by(number))).all()


def _columns(rows: Sequence[Row[*tuple[Any, ...]]], from_step: int, last: int, wide: int) -> MetricBucketsDocument:
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
        "gradient_norm": {
            "min": [row.gradient_norm_min for row in rows],
            "mean": [row.gradient_norm_sum / int(row.gradient_norms) if row.gradient_norms else None for row in rows],
            "max": [row.gradient_norm_max for row in rows],
        },
        "learning_rate": {
            "min": [row.learning_rate_min for row in rows],
            "mean": [row.learning_rate_sum / int(row.learning_rates) if row.learning_rates else None for row in rows],
            "max": [row.learning_rate_max for row in rows],
        },
    }
