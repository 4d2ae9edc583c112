"""Which of several managers leads: a lease in the store, by the store's clock.

The lease is one row: the leader, its epoch, and the lease's end. The leader renews it each third of its length. A
candidate that finds it lapsed takes it, and with it the next epoch. Each transaction of a leader begins with its fence:
the row must still have the leader's epoch and not have lapsed, and is locked (FOR KEY SHARE, which renewals do not wait
for) until the transaction's end. Taking the lease locks the row (FOR UPDATE), so it waits for open transactions.
Because a leader that hangs in one could block it for ever, it first ends the connections of the previous epoch.
Therefore nothing of an epoch is committed once the next has begun, wherever and however long its leader hangs.

What the store cannot fence is fenced by the clock: a manager whose own lease has lapsed, counted from before it
requested the lease, does not acknowledge heartbeats, so it renews no agent's lease (`Term.is_held`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from sqlalchemy import ColumnElement, Float, cast, column, extract, func, or_, select, table, update
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database, NotLeaderError, StoreAwayError
from varuna_manager.db.models import LeadershipRow

_THE_ROW = LeadershipRow.id == 1
_STORE_NOW = cast(extract("epoch", func.clock_timestamp()), Float(53))
"""The store's clock now, not at the transaction's start."""
_SESSIONS = table("pg_stat_activity", column("pid"), column("application_name"), column("datname"))
_RETRY_S = 0.5


def boot_time() -> float:
    """Seconds since boot; counts while this machine is suspended, and cannot be set."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A manager that takes part in the election."""

    holder: str
    """The same after every start on the same data directory, so that it may take its own lease at once."""
    http_url: str
    grpc_address: str


@dataclass(frozen=True, kw_only=True)
class Leader:
    """The leader, according to the store."""

    holder: str
    http_url: str
    grpc_address: str
    epoch: int


@dataclass(kw_only=True)
class Standing:
    """What a waiting manager knows about the leader."""

    leader: Leader | None = None
    """None: nobody leads, or it is not known."""
    away: str = ""
    """Why the store cannot be reached; empty if it can be."""

    def describe_leader(self) -> str:
        if self.away:
            return f"this manager does not lead: {self.away}"
        if self.leader is None or not self.leader.http_url:
            return "this manager does not lead, and no other does at this moment: try again"
        return f"this manager does not lead: the leader is {self.leader.http_url} (agents: {self.leader.grpc_address})"


def connection_name(holder: str, epoch: int) -> str:
    """The name of an epoch's connections in PostgreSQL (at most 63 characters)."""
    return f"varuna/{epoch}/{holder}"[:63]


class Leadership:
    """A candidate's part in the election. `database`: one of its own, without a fence."""

    def __init__(
        self, database: Database, me: Candidate, lease_s: float, monotonic: Callable[[], float] = boot_time
    ) -> None:
        self.me = me
        self.lease_s = lease_s
        self._database = database
        self._monotonic = monotonic

    async def run_for_leader(self) -> Term | Leader:
        """Take the lease when it has lapsed, or was ours before a restart; else return its holder.

        Raises StoreAwayError.
        """
        asked_at = self._monotonic()
        row = LeadershipRow
        async with self._database.write() as session:
            query = select(row.holder, row.http_url, row.grpc_address, row.epoch, row.expires_at - _STORE_NOW)
            holder, http_url, grpc_address, epoch, left_s = (await session.execute(query.where(_THE_ROW))).one()
            leader = Leader(holder=holder, http_url=http_url, grpc_address=grpc_address, epoch=epoch)
            if left_s > 0 and holder != self.me.holder:
                return leader
            await _end_connections(session, connection_name(holder, epoch))
            still = (_THE_ROW, row.epoch == epoch, or_(row.expires_at <= _STORE_NOW, row.holder == self.me.holder))
            if await session.scalar(select(row.epoch).where(*still).with_for_update()) is None:
                return leader  # it was renewed, or another candidate was faster: the next attempt shows which
            await session.execute(
                update(row)
                .where(_THE_ROW)
                .values(
                    holder=self.me.holder,
                    http_url=self.me.http_url,
                    grpc_address=self.me.grpc_address,
                    epoch=epoch + 1,
                    expires_at=_STORE_NOW + self.lease_s,
                )
            )
        return Term(self._database, epoch + 1, self.lease_s, asked_at, self._monotonic)


class Term:
    """One epoch of leading, from taking the lease to losing it."""

    def __init__(
        self, database: Database, epoch: int, lease_s: float, asked_at: float, monotonic: Callable[[], float]
    ) -> None:
        self.epoch = epoch
        self._database = database
        self._lease_s = lease_s
        self._until = asked_at + lease_s
        self._monotonic = monotonic
        self._refused = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("varuna.leadership")

    def is_held(self) -> bool:
        """Whether no other manager can lead now. Does not query the store."""
        return not self._refused.is_set() and self._monotonic() < self._until

    async def hold_lease(self, session: AsyncSession) -> None:
        """Hold the lease for as long as the session's transaction lasts. Raises NotLeaderError."""
        mine = (_THE_ROW, LeadershipRow.epoch == self.epoch, LeadershipRow.expires_at > _STORE_NOW)
        query = select(LeadershipRow.epoch).where(*mine).with_for_update(read=True, key_share=True)
        if not self.is_held() or await session.scalar(query) is None:
            self._refused.set()
            raise NotLeaderError(f"this manager's lease is over (epoch {self.epoch}): nothing was written")

    def start_keeping(self) -> asyncio.Task[None]:
        """The task of `keep`. The first call starts it: before the rest of the start, which takes long."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self.keep_lease())
        return self._keeping

    async def keep_lease(self) -> None:
        """Renew the lease until it is lost, then raise NotLeaderError."""
        wait_s = self._lease_s / 3
        while True:
            try:
                async with asyncio.timeout(min(wait_s, max(self._until - self._monotonic(), 0.0))):
                    await self._refused.wait()
            except TimeoutError:
                pass
            if not self.is_held():
                raise NotLeaderError(f"the lease of epoch {self.epoch} could not be renewed within {self._lease_s:g} s")
            wait_s = self._lease_s / 3 if await self._renewed() else _RETRY_S

    async def _renewed(self) -> bool:
        """Whether the store answered in time. Sets `_refused` if the lease is over."""
        asked_at = self._monotonic()
        try:
            async with asyncio.timeout(max(self._until - asked_at, 0.0)):
                is_ours = await self._set_expiry(_STORE_NOW + self._lease_s)
        except (StoreAwayError, TimeoutError):
            return False
        if is_ours:
            self._until = asked_at + self._lease_s
        else:
            self._refused.set()
        return True

    async def release_lease(self) -> None:
        """Let the next leader take over at once. This epoch must not write again."""
        self._refused.set()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        try:
            async with asyncio.timeout(_RETRY_S * 4):
                await self._set_expiry(cast(0.0, Float(53)))
        except (StoreAwayError, TimeoutError) as error:
            self._log.warning("the lease is not released: it lapses by itself", error=str(error))

    async def _set_expiry(self, expires_at: ColumnElement[float]) -> bool:
        """Whether the lease was still ours."""
        mine = (_THE_ROW, LeadershipRow.epoch == self.epoch, LeadershipRow.expires_at > _STORE_NOW)
        async with self._database.write() as session:
            statement = update(LeadershipRow).where(*mine).values(expires_at=expires_at).returning(LeadershipRow.epoch)
            return await session.scalar(statement) is not None


async def _end_connections(session: AsyncSession, name: str) -> None:
    """End the connections of an earlier epoch, whose transactions may still be open."""
    of_epoch = (_SESSIONS.c.application_name == name, _SESSIONS.c.datname == func.current_database())
    await session.execute(select(func.pg_terminate_backend(_SESSIONS.c.pid)).where(*of_epoch))
