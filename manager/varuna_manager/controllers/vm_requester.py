"""Asks one pool, or a provider without pools, for VMs.

A request is written to the store before the provider is called, and its VMs carry its tag. If a manager dies in
between, the next one repeats the request, which makes no VM twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import FleetRow, PoolRow, VmRow
from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, RefusalStreak
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.providers.base import CreatedVms
from varuna_manager.world.events import EventLog
from varuna_manager.world.facts import VmFacts
from varuna_proto.wording import count_are

__all__ = ["CreateVms", "OpenRequest", "RequestParts", "VmRequester"]

CreateVms = Callable[[int, str], Coroutine[Any, Any, CreatedVms]]
"""The provider's call: takes the number of VMs and the tag of the request."""


@dataclass(frozen=True, kw_only=True)
class RequestParts:
    """What all requesters of a manager share."""

    database: Database
    fleet: FleetService
    events: EventLog
    now: Callable[[], float]
    chance: Random
    ring: Callable[[], None]
    """Called when the provider answers after a look has stopped waiting."""


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A request that is in the store."""

    tag: str
    count: int
    made: int
    """Its VMs that the store knows and that are not gone."""


@dataclass(frozen=True, kw_only=True)
class _PendingCreate:
    """A request that the provider is working on."""

    answer: asyncio.Task[CreatedVms]
    missing: int
    made: int
    """VMs of the request that existed before the call."""


class VmRequester:
    """`pool`: its name; empty: the whole provider. `create`: the provider's call."""

    def __init__(self, pool: str, create: CreateVms, parts: RequestParts) -> None:
        self.pool = pool
        self.refusals: RefusalStreak | None = None
        self._create = create
        self._parts = parts
        self._pending: _PendingCreate | None = None
        self._log = structlog.get_logger("varuna.fleet")

    @property
    def answer(self) -> asyncio.Task[CreatedVms] | None:
        """What is waited for; None: nothing is asked."""
        return None if self._pending is None else self._pending.answer

    def count_coming(self, request: OpenRequest | None) -> int:
        """How many VMs the provider is working on that the store does not know yet."""
        if self._pending is None:
            return 0
        seen = 0 if request is None else request.made - self._pending.made
        return max(self._pending.missing - seen, 0)

    async def close(self) -> None:
        """Stop waiting for requested VMs: the request is in the store, and is repeated."""
        if self._pending is not None:
            self._pending.answer.cancel()
            await asyncio.wait({self._pending.answer})

    async def load_request(self, session: AsyncSession, rows: Iterable[VmFacts]) -> OpenRequest | None:
        """The request that may be under way."""
        row = await self._load_row(session)
        if row is None or row.request is None:
            return None
        made = sum(vm.request == row.request for vm in rows)
        return OpenRequest(tag=row.request, count=row.request_count or 0, made=made)

    async def ask(self, missing: int, request: OpenRequest | None) -> None:
        """Request so many more VMs. `request`: the one that may be under way, which is repeated."""
        if request is None:
            request = OpenRequest(tag=f"{self._parts.chance.getrandbits(128):032x}", count=missing, made=0)
            await self._note_request(request)
        count = min(request.count, request.made + missing)
        answer = asyncio.create_task(self._create(count, request.tag))
        self._pending = _PendingCreate(answer=answer, missing=missing, made=request.made)

    async def take_answer(self) -> int:
        """How many VMs were made, if the provider has answered."""
        pending = self._pending
        if pending is None:
            return 0
        if not pending.answer.done():
            pending.answer.remove_done_callback(self._answered)  # once is enough
            pending.answer.add_done_callback(self._answered)
            return 0
        self._pending = None
        try:
            created = pending.answer.result()
        except Exception as error:
            # The outcome is not known: the same request is repeated, after a pause.
            self._log.exception("the provider failed to make VMs", count=pending.missing, pool=self.pool)
            refusal = Refusal(kind=RefusalKind.FAILED, reason=f"{type(error).__name__}: {error}")
            await self._note_refusal(refusal, pending.missing, 0)
            return 0
        async with self._parts.database.write() as session:
            for vm in created.vms:
                if await session.get(VmRow, vm.id) is None:
                    self._parts.fleet.add_vm(session, vm)
            row = await self._load_row(session)
            if row is not None:
                row.request = row.request_count = None
        new = max(len(created.vms) - pending.made, 0)
        if created.refusal is None:
            self.refusals = None
        else:
            await self._note_refusal(created.refusal, pending.missing - new, new)
        return new

    def _answered(self, answer: asyncio.Task[CreatedVms]) -> None:
        self._parts.ring()

    async def _load_row(self, session: AsyncSession) -> FleetRow | PoolRow | None:
        if self.pool:
            return await session.get(PoolRow, self.pool)
        return await session.get(FleetRow, self._parts.fleet.provider.name)

    async def _note_request(self, request: OpenRequest) -> None:
        async with self._parts.database.write() as session:
            row = await self._load_row(session)
            if row is None:
                assert self.pool, "a fleet without a row has no target, so nothing is asked"
                row = PoolRow(name=self.pool)
                session.add(row)
            row.request, row.request_count = request.tag, request.count

    async def _note_refusal(self, refusal: Refusal, missing: int, new: int) -> None:
        before, parts = self.refusals, self._parts
        in_a_row = 1 if before is None or new else before.count + 1
        streak = RefusalStreak(count=in_a_row, last=refusal, last_at=parts.now(), jitter=parts.chance.random())
        self.refusals = streak
        if before is not None and (before.last.kind, before.last.reason) == (refusal.kind, refusal.reason):
            return
        who = f"pool {self.pool}" if self.pool else "the provider"
        message = f"{count_are(missing, 'VM')} missing and {who} refused ({refusal.kind}): {refusal.reason}"
        data = {"missing": missing, "kind": refusal.kind.value, "pause_s": streak.pause_s}
        async with parts.database.write() as session:
            parts.events.emit_event(
                session, "provider_refused", message, data=data | ({"pool": self.pool} if self.pool else {})
            )
