"""What scripts log beside the losses of their steps, by name and step.

The newest MOST_POINTS values of a name stay; beyond that, old ones are thinned to the last in each run of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import structlog
from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import Base, GenerationRow, LoggedValueRow
from varuna_proto.bounds import MOST_LOGGED_NAMES
from varuna_proto.v1 import agent_pb2 as pb

MOST_POINTS = 4096
"""Values of one name of a job."""
_VALUES = Base.metadata.tables[LoggedValueRow.__tablename__]

_log = structlog.get_logger("varuna.reports")


async def record_values(session: AsyncSession, fact: pb.ValuesLogged, now: float) -> None:
    """Stores what ranks of a generation on one VM have logged.

    A later generation replaces what earlier ones logged at the steps that it does again. Of several ranks of a
    generation, the lowest counts.
    """
    counts = await _count_values(session, fact.job_id, {one.name for one in fact.values})
    values = [one for one in fact.values if one.name in counts]
    resumed_step = await session.scalar(
        select(GenerationRow.resumed_step).where(
            GenerationRow.job_id == fact.job_id, GenerationRow.number == fact.generation
        )
    )
    if not values:
        return
    if resumed_step is not None:
        await _delete_redone(session, fact, values, resumed_step)
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(_VALUES)
    new, row = statement.excluded, LoggedValueRow
    statement = statement.on_conflict_do_update(
        index_elements=["job_id", "name", "step"],
        set_={name: new[name] for name in ("value", "generation", "rank", "at")},
        where=(new.generation > row.generation) | ((new.generation == row.generation) & (new.rank <= row.rank)),
    )
    rows = [
        {
            "job_id": fact.job_id,
            "name": one.name,
            "step": one.step,
            "value": one.value,
            "generation": fact.generation,
            "rank": one.rank,
            "at": now,
        }
        for one in values
    ]
    await session.execute(statement, rows)
    for one in values:
        counts[one.name] += 1
    for name in (name for name, count in counts.items() if count > MOST_POINTS):
        await _thin_out(session, fact.job_id, name)


async def _count_values(session: AsyncSession, job_id: str, names: Collection[str]) -> dict[str, int]:
    """Of each of these names under which the job may log: how many values are stored."""
    row = LoggedValueRow
    query = select(row.name, func.count()).where(row.job_id == job_id, row.name.in_(names)).group_by(row.name)
    counts = {name: int(count) for name, count in await session.execute(query)}
    if len(counts) == len(names):
        return counts
    known = await session.scalar(select(func.count(row.name.distinct())).where(row.job_id == job_id)) or 0
    for name in sorted(set(names) - counts.keys()):
        if known >= MOST_LOGGED_NAMES:
            _log.warning("a job logs under too many names: left out", job=job_id, name=name, most=MOST_LOGGED_NAMES)
            continue
        counts[name] = 0
        known += 1
    return counts


async def _delete_redone(
    session: AsyncSession, fact: pb.ValuesLogged, values: Iterable[pb.LoggedValue], resumed_step: int
) -> None:
    """Deletes what earlier generations logged at steps that this one has done again, up to the newest value."""
    newest: dict[str, int] = {}
    for one in values:
        newest[one.name] = max(newest.get(one.name, 0), one.step)
    row = LoggedValueRow
    for name, step in newest.items():
        await session.execute(
            delete(row).where(
                row.job_id == fact.job_id,
                row.name == name,
                row.step > resumed_step,
                row.step <= step,
                row.generation < fact.generation,
            )
        )


async def _thin_out(session: AsyncSession, job_id: str, name: str) -> None:
    """Keeps the last value in each run of steps, as many as MOST_POINTS / 2 runs at most."""
    row = LoggedValueRow
    of_name = (row.job_id == job_id) & (row.name == name)
    first, last = (await session.execute(select(func.min(row.step), func.max(row.step)).where(of_name))).one()
    steps = 1
    while last // steps - first // steps + 1 > MOST_POINTS // 2:
        steps *= 2
    kept = select(func.max(row.step)).where(of_name).group_by(row.step // steps)
    await session.execute(
        delete(row).where(of_name, row.step.not_in(kept)), execution_options={"synchronize_session": False}
    )
