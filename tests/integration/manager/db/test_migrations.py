"""Migrations from every earlier version to this one, with a full store, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    Connection,
    Engine,
    LargeBinary,
    MetaData,
    Table,
    event,
    func,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.types import Boolean, Float, Integer

from varuna_manager.db import schema
from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, JobProgressRow, JobVmRow
from varuna_manager.history.job_cost import read_job_bill
from varuna_manager.history.step_metrics import StepMetrics

pytestmark = pytest.mark.xdist_group("postgres")

_SCRIPT = ScriptDirectory.from_config(schema.migration_config())
REVISIONS = [revision.revision for revision in reversed(list(_SCRIPT.walk_revisions()))]
NEWEST = 3
"""A new migration has all of these, and the first, before it in `make test`."""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'manager.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


def value_for(column_type: Any) -> Any:
    """Something that the column holds; the same in all columns of a kind, so that rows point to each other."""
    if isinstance(column_type, Boolean):
        return True
    if isinstance(column_type, Integer):
        return 7
    if isinstance(column_type, Float):
        return 1.5
    if isinstance(column_type, LargeBinary):
        return b"bytes"
    return {"a": 1} if isinstance(column_type, JSON) else "word"


def tables_of(connection: Connection) -> list[Table]:
    metadata = MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def content(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    return {
        table.name: [dict(row._mapping) for row in connection.execute(select(table))] for table in tables_of(connection)
    }


def fill(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """One row in every table that has none, every column filled in; the content of all tables."""
    for table in tables_of(connection):
        if not connection.scalar(select(func.count()).select_from(table)):
            connection.execute(insert(table).values({c.name: value_for(c.type) for c in table.columns}))
    return content(connection)


async def as_of(database: Database, revision: str) -> dict[str, list[dict[str, Any]]]:
    """Make the store of this revision. Returns its content."""
    async with database.engine.begin() as connection:
        await connection.run_sync(schema.upgrade, revision)
        return await connection.run_sync(fill)


@pytest.mark.parametrize(
    "revision",
    [REVISIONS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in REVISIONS[1:-NEWEST]), *REVISIONS[-NEWEST:]],
)
async def test_what_an_earlier_version_stored_is_kept(url: str, revision: str) -> None:
    database = Database(url)
    before = await as_of(database, revision)
    await database.migrate_schema()
    await database.migrate_schema()  # again: nothing to do
    async with database.engine.connect() as connection:
        after = await connection.run_sync(content)
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), Base.metadata)
        )
        assert differences == []
    for name, rows in before.items():
        kept = [{column: row[column] for column in old} for old, row in zip(rows, after[name], strict=True)]
        assert kept == rows, f"rows of {name} from revision {revision}"
    async with database.read() as session:
        for mapper in Base.registry.mappers:  # and the code of this version can read all of it
            loaded = (await session.scalars(select(mapper.class_))).all()
            assert len(loaded) == len(after[mapper.class_.__tablename__])
    await database.close()


async def test_steps_that_an_earlier_version_stored_are_summed_up_for_charts(url: str) -> None:
    database = Database(url)
    before = await as_of(database, "0009")
    async with database.engine.begin() as connection:
        metrics = (await connection.run_sync(lambda sync: Table("metrics", MetaData(), autoload_with=sync))).insert()
        one = before["metrics"][0]
        steps = [{**one, "step": step, "loss": float(step) if step % 2 else None} for step in range(8, 301)]
        await connection.execute(metrics, steps)
        await connection.execute(text("UPDATE generations SET last_step = 300"))
    await database.migrate_schema()
    async with database.engine.begin() as connection:
        await connection.execute(text("DELETE FROM metrics WHERE step < 300"))  # their figures come from blocks
    chart = await StepMetrics(database).read_buckets(one["job_id"], 3, 1, None)
    assert (chart["first_step"], chart["count"]) == ([7, 101, 201], [94, 100, 100])
    assert (chart["loss"]["min"], chart["loss"]["max"]) == ([1.5, 101.0, 201.0], [99.0, 199.0, 299.0])
    assert chart["loss"]["mean"][1:] == [150.0, 250.0]
    assert chart["step_s"]["mean"] == [one["step_s"]] * 3
    assert chart["examples_per_s"]["max"] == [one["examples"] / one["step_s"]] * 3
    await database.close()


async def test_what_jobs_of_an_earlier_version_used_is_billed(url: str) -> None:
    database = Database(url)
    before = await as_of(database, "0016")
    async with database.engine.begin() as connection:
        of_these = {name: await connection.run_sync(_table, name) for name in ("generations", "workers")}
        first, rank = before["generations"][0], before["workers"][0]
        lives = [(8, 10.0, 110.0), (9, 200.0, None)]  # behind number 7, which lasted no time
        rows = [{**first, "id": n, "number": n, "created_at": at, "ended_at": ended} for n, at, ended in lives]
        await connection.execute(of_these["generations"].insert(), rows)
        ranks = [{**rank, "generation": number, "rank": each} for number, each in ((8, 0), (8, 1), (9, 0))]
        await connection.execute(of_these["workers"].insert(), ranks)
    await database.migrate_schema()
    async with database.read() as session:
        bill = await read_job_bill(session, first["job_id"], 300.0)
        assert (await session.scalars(select(JobProgressRow.billed))).all() == [8]
        billed = (await session.scalars(select(JobVmRow.gpu_seconds))).all()
    assert (billed, bill["gpu_hours"]) == ([200.0], pytest.approx(300.0 / 3600))
    assert bill["cost"] == pytest.approx(1.5 * bill["vm_hours"]), "at the VM's present price"
    await database.close()


def _table(connection: Connection, name: str) -> Table:
    return Table(name, MetaData(), autoload_with=connection)


async def test_a_migration_that_breaks_off_leaves_the_store_as_it_was(url: str) -> None:
    database = Database(url)
    before = await as_of(database, REVISIONS[0])

    def break_off(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "stacks" in statement:  # late: most is done
            raise InterruptedError("here")

    event.listen(Engine, "before_cursor_execute", break_off)
    try:
        with pytest.raises(InterruptedError):
            await database.migrate_schema()
    finally:
        event.remove(Engine, "before_cursor_execute", break_off)
    async with database.engine.connect() as connection:
        assert await connection.run_sync(content) == before
    await database.migrate_schema()
    await database.close()


async def test_a_store_of_a_later_version_is_refused_and_left_alone(url: str) -> None:
    database = Database(url)
    await database.migrate_schema()
    async with database.engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(schema.TooNewError, match=rf"revision 9999, and this version .* up to {REVISIONS[-1]}: start"):
        await database.migrate_schema()
    async with database.engine.connect() as connection:
        assert await connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    await database.close()


async def test_of_managers_that_migrate_at_once_one_does_and_the_others_find_it_done(postgres_url: str) -> None:
    databases = [Database(postgres_url) for _ in range(4)]
    await asyncio.gather(*(database.migrate_schema() for database in databases))
    async with databases[0].engine.connect() as connection:
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        assert set(Base.metadata.tables) <= set(names)
    for database in databases:
        await database.close()
