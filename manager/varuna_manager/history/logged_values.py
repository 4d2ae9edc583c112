"""What scripts have logged beside the losses of their steps, for charts and tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Row, select

from varuna_manager.db.engine import Database
from varuna_manager.db.models import LoggedValueRow
from varuna_manager.jobs.jobs import find_job_row
from varuna_proto.rest import LoggedSeriesDocument


class LoggedValues:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read_series(
        self, id_or_name: str, names: Collection[str] | None, *, points: int, after_step: int | None
    ) -> list[LoggedSeriesDocument]:
        """Of each of these names (None: of all), at most `points` values after that step (None: of all)."""
        row = LoggedValueRow
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            query = select(row.name, row.step, row.value, row.generation, row.at).where(row.job_id == job.id)
            if names is not None:
                query = query.where(row.name.in_(names))
            if after_step is not None:
                query = query.where(row.step > after_step)
            rows = (await session.execute(query.order_by(row.name, row.step))).all()
        return [
            _make_series(name, _thin_out(list(of_name), points))
            for name, of_name in groupby(rows, lambda one: one.name)
        ]


def _thin_out(rows: Sequence[Row[*tuple[Any, ...]]], points: int) -> Sequence[Row[*tuple[Any, ...]]]:
    """At most `points` of them, evenly spread, with the last one."""
    count = min(points, len(rows))
    return [rows[(index + 1) * len(rows) // count - 1] for index in range(count)]


def _make_series(name: str, rows: Sequence[Row[*tuple[Any, ...]]]) -> LoggedSeriesDocument:
    return {
        "name": name,
        "step": [row.step for row in rows],
        "value": [row.value for row in rows],
        "generation": [row.generation for row in rows],
        "at_unix_s": [row.at for row in rows],
    }
