"""The lease and its fence, on a real PostgreSQL: each candidate has connections of its own, as another manager has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import make_url, select, text, update

from cuttable_postgres import PostgresLine, postgres_line
from migrated_stores import migrated_postgres
from varuna_manager.db.engine import Database, NotLeaderError, StoreAwayError, StoreReadOnlyError
from varuna_manager.db.models import EventRow, LeadershipRow
from varuna_manager.world.events import EventLog
from varuna_manager.world.leadership import Candidate, Leader, Leadership, Standing, Term, connection_name
from waiting import DEADLINE_S, until

pytestmark = pytest.mark.xdist_group("postgres")

LEASE_S = 60.0
"""Longer than any pause of a busy machine: leases lapse when a test says so."""


class Clock:
    """Seconds of one manager's own clock."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rivals:
    """Candidates over one store."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.clock = Clock()
        self._stack = stack

    def database(self, **options: Any) -> Database:
        database = Database(self.url, **options)
        self._stack.push_async_callback(database.close)
        return database

    def candidate(self, name: str, lease_s: float = LEASE_S) -> Leadership:
        me = Candidate(holder=name, http_url=f"http://{name}", grpc_address=f"{name}:1")
        return Leadership(self.database(application_name="varuna/candidate"), me, lease_s, self.clock)

    async def leads(self, leadership: Leadership) -> tuple[Term, Database]:
        """Its term, and the store as it writes to it."""
        term = await leadership.run_for_leader()
        assert isinstance(term, Term)
        name = connection_name(leadership.me.holder, term.epoch)
        return term, self.database(fence=term.hold_lease, application_name=name)

    async def lapse(self) -> None:
        """By the store's clock."""
        async with self.database().write() as session:
            await session.execute(update(LeadershipRow).values(expires_at=0.0))

    async def make_read_only(self, value: bool) -> None:
        """As a managed server does when its disk is nearly full: connections that are made from now on cannot write."""
        name = make_url(self.url).database
        async with self.database().write() as session:
            await session.execute(text("SET TRANSACTION READ WRITE"))
            await session.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}"))

    async def end_connections(self) -> None:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        async with self.database().read() as session:
            await session.execute(text(f"{query} AND pid <> pg_backend_pid()"))


@pytest.fixture
async def rivals(postgres_server: Any) -> AsyncIterator[Rivals]:
    async with AsyncExitStack() as stack:
        yield Rivals(migrated_postgres(postgres_server), stack)


async def messages(database: Database) -> list[str]:
    async with database.read() as session:
        return [row.message for row in await session.scalars(select(EventRow).order_by(EventRow.id))]


async def note(database: Database, message: str) -> None:
    async with database.write() as session:
        EventLog(database).emit_event(session, "test", message)


async def test_one_leads_and_the_other_is_told_who(rivals: Rivals) -> None:
    first, second = rivals.candidate("first"), rivals.candidate("second")
    term, store = await rivals.leads(first)
    leader = await second.run_for_leader()
    assert leader == Leader(holder="first", http_url="http://first", grpc_address="first:1", epoch=term.epoch)
    assert "http://first" in Standing(leader=leader).describe_leader()
    await note(store, "written")
    await rivals.lapse()
    later, _ = await rivals.leads(second)
    assert later.epoch == term.epoch + 1
    assert isinstance(await first.run_for_leader(), Leader)


async def test_of_many_that_find_a_lapsed_lease_at_once_one_leads(rivals: Rivals) -> None:
    candidates = [rivals.candidate(f"manager-{number}") for number in range(6)]
    found = await asyncio.gather(*(candidate.run_for_leader() for candidate in candidates))
    assert sum(isinstance(one, Term) for one in found) == 1


async def test_whoever_starts_again_takes_its_own_lease_at_once_and_its_former_self_writes_no_more(
    rivals: Rivals,
) -> None:
    before, store = await rivals.leads(rivals.candidate("same"))
    after, _ = await rivals.leads(rivals.candidate("same"))
    assert after.epoch == before.epoch + 1
    with pytest.raises(NotLeaderError, match="nothing was written"):
        await note(store, "late")


async def test_every_write_of_a_leader_whose_lease_was_taken_is_refused(rivals: Rivals) -> None:
    first, second = rivals.candidate("first"), rivals.candidate("second")
    term, store = await rivals.leads(first)
    await note(store, "before")
    await rivals.lapse()
    _, successor = await rivals.leads(second)
    for _ in range(2):
        with pytest.raises(NotLeaderError):
            await note(store, "late")
    assert not term.is_held()
    with pytest.raises(NotLeaderError):
        await term.keep_lease()
    await note(successor, "after")
    assert await messages(successor) == ["before", "after"]


async def test_a_lapsed_lease_ends_the_term_also_when_nobody_has_taken_it(rivals: Rivals) -> None:
    term, store = await rivals.leads(rivals.candidate("alone"))
    await rivals.lapse()
    with pytest.raises(NotLeaderError):
        await note(store, "late")
    assert not term.is_held()


async def test_a_leader_whose_own_clock_has_passed_the_lease_does_not_even_ask_the_store(rivals: Rivals) -> None:
    term, store = await rivals.leads(rivals.candidate("stopped"))
    rivals.clock.now += LEASE_S
    assert not term.is_held()
    with pytest.raises(NotLeaderError):
        await note(store, "late")


async def test_a_leader_renews_its_lease(rivals: Rivals) -> None:
    term, store = await rivals.leads(rivals.candidate("renews", lease_s=0.3))
    far = 1e12
    async with rivals.database().write() as session:  # it shall not lapse, however busy this machine is
        await session.execute(update(LeadershipRow).values(expires_at=far))

    async def is_renewed() -> bool:
        async with store.read() as session:
            return (await session.scalars(select(LeadershipRow.expires_at))).one() < far

    keeping = asyncio.create_task(term.keep_lease())
    await until(is_renewed, beside=keeping)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_released_lease_is_taken_at_once(rivals: Rivals, monkeypatch: pytest.MonkeyPatch) -> None:
    # To release it may take as long as this machine needs.
    monkeypatch.setattr("varuna_manager.world.leadership._RETRY_S", DEADLINE_S)
    first, second = rivals.candidate("first"), rivals.candidate("second")
    term, store = await rivals.leads(first)
    await term.release_lease()
    with pytest.raises(NotLeaderError):
        await note(store, "late")
    assert isinstance(await second.run_for_leader(), Term)


async def test_a_leader_that_stands_still_within_a_transaction_neither_delays_the_next_nor_commits(
    rivals: Rivals,
) -> None:
    first, second = rivals.candidate("first"), rivals.candidate("second")
    _, store = await rivals.leads(first)

    async def write_slowly() -> None:
        async with store.write() as session:
            EventLog(store).emit_event(session, "test", "late")
            await session.flush()
            await rivals.lapse()  # as if stopped here, by SIGSTOP, for long
            _, successor = await rivals.leads(second)
            await note(successor, "of the next leader")

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises((NotLeaderError, StoreAwayError)):
            await write_slowly()
    assert await messages(rivals.database()) == ["of the next leader"]


async def test_a_transaction_under_way_is_waited_for_where_its_connection_cannot_be_ended(rivals: Rivals) -> None:
    """The fence alone: the connection bears another name, so that whoever takes the lease finds none to end."""
    term = await rivals.candidate("first").run_for_leader()
    assert isinstance(term, Term)
    store, looking = rivals.database(fence=term.hold_lease, application_name="by another name"), rivals.database()
    second = rivals.candidate("second")

    async def is_waiting() -> bool:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        async with looking.read() as session:
            return bool(await session.scalar(text(query)))

    async with store.write() as session:
        EventLog(store).emit_event(session, "test", "in time")
        await session.flush()
        await rivals.lapse()
        taking = asyncio.create_task(rivals.leads(second))
        await until(is_waiting, beside=taking)
    _, successor = await asyncio.wait_for(taking, DEADLINE_S)
    with pytest.raises(NotLeaderError):
        await note(store, "late")
    await note(successor, "after")
    assert await messages(successor) == ["in time", "after"], "their numbers grow in the order of the commits"


async def test_a_store_that_cannot_be_written_for_a_while_is_away_for_its_leader_and_can_be_read(
    rivals: Rivals, capsys: pytest.CaptureFixture[str]
) -> None:
    leadership = rivals.candidate("patient")
    term, store = await rivals.leads(leadership)
    await note(store, "before")
    await rivals.make_read_only(True)
    await rivals.end_connections()
    with pytest.raises(StoreReadOnlyError, match="read-only transaction"):
        await note(store, "meanwhile")
    assert await messages(store) == ["before"]
    await term.release_lease()  # it lapses by itself
    with pytest.raises(StoreReadOnlyError):
        await leadership.run_for_leader()
    await rivals.make_read_only(False)
    _, successor = await rivals.leads(leadership)
    await note(successor, "after")
    assert await messages(successor) == ["before", "after"]
    output = capsys.readouterr().out
    assert "the lease is not released" in output
    assert "Traceback" not in output


async def test_a_store_that_is_away_is_told_of_once_and_the_lease_is_renewed_when_it_is_back(
    rivals: Rivals, capsys: pytest.CaptureFixture[str]
) -> None:
    with postgres_line(rivals.url) as line:
        rivals.url = line.url
        await _write_when_the_store_is_back(rivals, line)
    output = capsys.readouterr().out
    assert output.count("the store is away: trying again") == 1
    assert output.count("the store is back") == 1


async def test_a_store_that_falls_silent_keeps_no_manager_that_closes_its_connections(
    rivals: Rivals, capsys: pytest.CaptureFixture[str]
) -> None:
    with postgres_line(rivals.url) as line:
        store = Database(line.url)
        async with store.read(), store.read(), store.read():
            pass
        line.block()
        async with asyncio.timeout(DEADLINE_S):
            await store.close()
    assert "Traceback" not in capsys.readouterr().out


async def _write_when_the_store_is_back(rivals: Rivals, line: PostgresLine) -> None:
    term, store = await rivals.leads(rivals.candidate("patient"))
    await note(store, "before")
    line.cut()
    for _ in range(3):
        with pytest.raises(StoreAwayError, match="cannot be reached"):
            await note(store, "while it is away")
        with pytest.raises(StoreAwayError):
            await messages(store)
    line.mend()
    await note(store, "after")
    assert await messages(store) == ["before", "after"]
    assert term.is_held()
