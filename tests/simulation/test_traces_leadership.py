"""Managers that want to lead, on a real PostgreSQL: one epoch after the other, whatever is repeated, late or lost.

Each candidate has connections and a clock of its own. It campaigns, renews, writes and releases at any moment; an
answer of the store may be lost (it did what was asked, and the candidate takes it to have failed), a renewal or a write
may be made long after the candidate last looked (it stood still), leases lapse, by the store's clock or by the holder's
own. Always: the leader is who took the newest epoch, and every commit belongs to the newest epoch of its moment, so
epochs never go back in the log. In the end one leads, everyone who asks learns that, and nobody else can write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sqlalchemy import delete, select, update

from traces import traces
from varuna_manager.db.engine import Database, NotLeaderError
from varuna_manager.db.models import EventRow, LeadershipRow
from varuna_manager.world import leadership
from varuna_manager.world.events import EventLog
from varuna_manager.world.leadership import Candidate, Leader, Leadership, Term, connection_name
from waiting import DEADLINE_S

pytestmark = pytest.mark.xdist_group("postgres")

LEASE_S = 600.0
"""By the store's clock leases lapse when a rule says so."""
WHO = strategies.sampled_from(["a", "b", "c"])


class Manager:
    """One candidate. Its connections serve all traces."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.now = 0.0
        self.elections = Database(url, application_name="varuna/candidate")
        me = Candidate(holder=name, http_url=f"http://{name}", grpc_address=f"{name}:1")
        self.leadership = Leadership(self.elections, me, LEASE_S, lambda: self.now)
        self.term: Term | None = None
        self.store: Database | None = None

    async def follow(self, term: Term | None, url: str) -> None:
        """Write as the leader of this term from now on; None: stand by."""
        if self.store is not None:
            await self.store.close()
        self.term, self.store = term, None
        if term is not None:
            name = connection_name(self.name, term.epoch)
            self.store = Database(url, fence=term.hold_lease, application_name=name)


class RivalManagers:
    """The store and its managers, for one trace after another."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.plain = Database(url)
        self.runner.run(self.plain.migrate_schema())
        self.managers = {name: Manager(name, url) for name in ("a", "b", "c")}

    async def begin(self) -> None:
        for manager in self.managers.values():
            manager.now = 0.0
            await manager.follow(None, self.url)
        async with self.plain.write() as session:
            await session.execute(delete(EventRow))
            nobody: dict[str, Any] = {"holder": "", "http_url": "", "grpc_address": "", "epoch": 0, "expires_at": 0.0}
            await session.execute(update(LeadershipRow).values(**nobody))

    async def lapse(self) -> None:
        async with self.plain.write() as session:
            await session.execute(update(LeadershipRow).values(expires_at=0.0))

    async def read_leadership(self) -> tuple[str, int, float]:
        row = LeadershipRow
        async with self.plain.read() as session:
            holder, epoch, expires_at = (await session.execute(select(row.holder, row.epoch, row.expires_at))).one()
        return holder, epoch, expires_at

    async def log(self) -> list[int]:
        """The epoch of each write, in the order of their commits."""
        async with self.plain.read() as session:
            return [int(at) for at in await session.scalars(select(EventRow.at).order_by(EventRow.id))]

    async def close(self) -> None:
        for manager in self.managers.values():
            await manager.follow(None, self.url)
            await manager.elections.close()
        await self.plain.close()


class Election(RuleBasedStateMachine):
    world: RivalManagers

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.runner.run
        self.run(self.world.begin())
        self.newest = 0
        self.written = 0

    @initialize(who=WHO)
    def somebody_leads(self, who: str) -> None:
        self.campaigns(who, answered=True)

    @rule(who=WHO, answered=strategies.booleans())
    def campaigns(self, who: str, answered: bool) -> None:
        manager = self.world.managers[who]
        holder, epoch, expires_at = self.run(self.world.read_leadership())
        found = self.run(manager.leadership.run_for_leader())
        if isinstance(found, Leader):
            assert (holder, epoch) == (found.holder, found.epoch)
            assert holder != who, "nobody is kept from a lease that is his own"
            assert expires_at > 0.0
            return
        assert holder == who or expires_at == 0.0, f"{who} took the lease of {holder}, which stood"
        assert found.epoch == epoch + 1
        self.newest = found.epoch
        if answered:
            self.run(manager.follow(found, self.world.url))

    @rule(who=WHO, answered=strategies.booleans())
    def renews(self, who: str, answered: bool) -> None:
        """Writes at any moment, even after another has taken the lease."""
        manager = self.world.managers[who]
        if manager.term is None:
            return
        before = self.run(self.world.read_leadership())
        until = manager.term._until
        self.run(manager.term._renewed())
        if not answered:
            manager.term._until = until
        holder, epoch, expires_at = self.run(self.world.read_leadership())
        assert (holder, epoch) == before[:2], "a renewal makes nobody lead"
        assert expires_at > 0.0 or before[2] == 0.0
        assert before[2] > 0.0 or expires_at == 0.0, "what has lapsed has to be won again"
        assert not manager.term.is_held() or epoch == manager.term.epoch, (
            "it learns that another leads, or its clock says so"
        )

    @rule(who=WHO)
    def writes(self, who: str) -> None:
        manager = self.world.managers[who]
        if manager.term is None or manager.store is None:
            return
        _, epoch, expires_at = self.run(self.world.read_leadership())
        may = manager.term.epoch == epoch and expires_at > 0.0 and manager.term.is_held()
        try:
            self.run(self.note(manager.store, manager.term.epoch))
        except NotLeaderError:
            assert not may, "the leader was refused"
            assert not manager.term.is_held(), "one that was refused knows it"
        else:
            self.written += 1
            assert may, f"{who} wrote in epoch {manager.term.epoch}, when {epoch} had begun or its lease was over"

    async def note(self, store: Database, epoch: int) -> None:
        async with store.write() as session:
            EventLog(store, lambda: float(epoch)).emit_event(session, "test", "written")

    @precondition(lambda self: any(manager.term for manager in self.world.managers.values()))
    @rule(who=WHO)
    def releases(self, who: str) -> None:
        manager = self.world.managers[who]
        if manager.term is not None:
            before = self.run(self.world.read_leadership())
            self.run(manager.term.release_lease())
            holder, epoch, expires_at = self.run(self.world.read_leadership())
            assert (holder, epoch) == before[:2]
            assert expires_at == (0.0 if manager.term.epoch == epoch else before[2]), "only its own lease"
            self.run(manager.follow(None, self.world.url))

    @rule()
    def the_lease_lapses(self) -> None:
        self.run(self.world.lapse())

    @rule(who=WHO)
    def its_own_clock_runs_on(self, who: str) -> None:
        """It stood still for longer than its lease."""
        manager = self.world.managers[who]
        manager.now += LEASE_S + 1
        assert manager.term is None or not manager.term.is_held()

    def teardown(self) -> None:
        for who in ("b", "a", "c"):
            self.the_lease_lapses()
            self.campaigns(who, answered=True)
        self.writes("b")  # which does not know of the others
        self.renews("a", answered=True)  # neither has this
        self.the_lease_lapses()
        self.writes("c")  # whose epoch is the newest yet
        self.campaigns("c", answered=True)
        self.its_own_clock_runs_on("c")
        self.writes("c")
        self.the_lease_lapses()
        self.campaigns("b", answered=True)
        for who in ("a", "c"):
            self.renews(who, answered=True)
            self.writes(who)
            self.campaigns(who, answered=True)  # learns who leads
        self.writes("b")
        holder, epoch, _ = self.run(self.world.read_leadership())
        assert (holder, epoch) == ("b", self.newest)
        log = self.run(self.world.log())
        assert log == sorted(log), "an older epoch wrote after a newer one"
        assert len(log) == self.written
        assert log[-1] == epoch


@pytest.fixture
def world(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RivalManagers]:
    # A store that is slow to answer is not away: only the rules say which answers are lost.
    monkeypatch.setattr(leadership, "_RETRY_S", DEADLINE_S)
    world = RivalManagers(postgres_url)
    yield world
    world.runner.run(world.close())
    world.runner.close()


@pytest.mark.slow
def test_one_epoch_after_the_other(world: RivalManagers) -> None:
    Election.world = world
    run_state_machine_as_test(Election, settings=traces(20, steps=15))  # type: ignore[no-untyped-call]
