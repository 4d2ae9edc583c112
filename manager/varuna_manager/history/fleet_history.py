"""The fleet's history: the number of VMs over time, what happened to them, and what they cost.

The store counts and adds up, so that years of history need no rows in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Integer, and_, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.answers.documents import format_time
from varuna_manager.answers.errors import InvalidError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import EventRow, FleetDayRow, VmPriceRow, VmRow
from varuna_manager.db.vm_prices import sum_price_changes
from varuna_manager.domain.retention import DAY_S, KeepDays, find_horizon
from varuna_manager.world.reading import NOT_GONE
from varuna_proto.rest_fleet import FleetCostDocument, FleetHistoryDocument

_ORDER_SLACK_S = 60.0
"""Events get their numbers at commit, so an event may be older by this much than one with a smaller number."""
_KINDS = {
    "vm_requested": "added",
    "vm_gone": "gone",
    "vm_lost": "lost",
    "vm_ready": "ready",
    "preemption_notice": "notices",
    "vm_quarantined": "quarantines",
}


class FleetHistoryService:
    def __init__(self, database: Database, keep: KeepDays, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._keep = keep
        self._now = now

    async def read_history(self, since: float | None, until: float | None, points: int) -> FleetHistoryDocument:
        """The number of VMs, and what happened to them, in `points` buckets.

        `since` None: a day before the end. It is never earlier than the oldest kept event.

        Raises InvalidError.
        """
        end = self._now() if until is None else min(until, self._now())
        start = end - DAY_S if since is None else since
        kept_since = find_horizon(self._now(), self._keep.events)
        if kept_since is not None and start < kept_since:
            async with self._database.read() as session:
                oldest = await session.scalar(select(func.min(EventRow.at)))
            # A day of slack: events are deleted a little later than they are due.
            start = kept_since if oldest is None or oldest >= kept_since - DAY_S else start
        if start >= end:
            raise InvalidError("since is not before until (or lies in the future): give an earlier one")
        width_s = (end - start) / points
        async with self._database.read() as session:
            counts = await _count(session, start, width_s, points)
            present_now = await session.scalar(select(func.count()).select_from(VmRow).where(NOT_GONE)) or 0
        # Count backwards from now, without the VMs that came after a bucket's end and with those that went after it.
        grown_by = counts["added"] - counts["gone"]
        after = grown_by.sum() - np.cumsum(grown_by[:points])
        inside = {name: each[:points] for name, each in counts.items()}
        return {
            "bucket_s": width_s,
            "at_unix_s": np.linspace(start, end, points + 1)[1:].tolist(),
            "present": np.maximum(present_now - after, 0).tolist(),
            "ready": inside["ready"].tolist(),
            "lost": (inside["lost"] + inside["gone"] - inside["gone_after_loss"]).tolist(),
            "notices": inside["notices"].tolist(),
            "quarantines": inside["quarantines"].tolist(),
        }

    async def read_cost(self, since: float | None) -> FleetCostDocument:
        """The cost of the fleet since then, whether jobs ran or not. None: since its first VM.

        Deleted VMs are in sums by day. Of the first day, the fraction after `since` counts.
        """
        now = self._now()
        async with self._database.read() as session:
            start = min(await _first_vm_at(session) if since is None else since, now)
            ended = case((NOT_GONE, now), else_=func.coalesce(VmRow.gone_at, VmRow.created_at))
            begins = case((VmRow.created_at > start, VmRow.created_at), else_=start)
            hours = (ended - begins) / 3600.0
            kind = (VmRow.gpus, VmRow.price_per_hour)
            uses = select(*kind, func.count(), func.sum(hours)).where(hours > 0).group_by(*kind)
            rows = [(gpus, price, vms, float(h)) for gpus, price, vms, h in await session.execute(uses)]
            changes = select(func.sum(sum_price_changes(begins, ended))).where(VmRow.id.in_(select(VmPriceRow.vm_id)))
            price_changes = await session.scalar(changes)
            cost_per_hour = await session.scalar(select(func.sum(VmRow.price_per_hour)).where(NOT_GONE))
            days = (await session.scalars(select(FleetDayRow).where((FleetDayRow.day + 1) * DAY_S > start))).all()
        parts = [(day, min((day.day + 1) * DAY_S - start, DAY_S) / DAY_S) for day in days]
        known = [vm_hours * price for _, price, _, vm_hours in rows if price is not None]
        known += [day.cost * part for day, part in parts if day.cost]
        known += [price_changes / 3600.0] if price_changes else []
        return {
            "since": format_time(start),
            "vms": sum(vms for _, _, vms, _ in rows) + sum(day.gone for day in days),
            "vm_hours": sum(vm_hours for *_, vm_hours in rows) + sum(day.vm_hours * part for day, part in parts),
            "gpu_hours": sum(vm_hours * gpus for gpus, _, _, vm_hours in rows)
            + sum(day.gpu_hours * part for day, part in parts),
            "cost": sum(known) if known else None,
            "cost_per_hour": cost_per_hour,
            "vms_without_price": sum(vms for _, price, vms, _ in rows if price is None)
            + sum(day.gone - day.gone_with_price for day in days),
        }


async def _count(session: AsyncSession, start: float, width_s: float, points: int) -> Mapping[str, Any]:
    """The number of events of each kind in each bucket, followed by the number of all later ones."""
    counts = {name: np.zeros(points + 1, dtype=np.int64) for name in (*_KINDS.values(), "gone_after_loss")}
    # There is an index by kind and number, and none by kind and time.
    at_start = select(EventRow.id).where(EventRow.at >= start - _ORDER_SLACK_S).order_by(EventRow.at).limit(1)
    first = await session.scalar(at_start)
    if first is None:
        return counts
    bucket = _whole(session, (EventRow.at - start) / width_s)
    was_lost = and_(EventRow.kind == "vm_gone", EventRow.data["was_lost"].as_boolean())
    query = select(EventRow.kind, bucket, func.count(), func.sum(case((was_lost, 1), else_=0))).where(
        EventRow.kind.in_(_KINDS), EventRow.id >= first, EventRow.at >= start
    )
    for kind, place, count, lost_before in await session.execute(query.group_by(EventRow.kind, bucket)):
        counts[_KINDS[kind]][min(int(place), points)] += count
        counts["gone_after_loss"][min(int(place), points)] += lost_before
    return counts


def _whole(session: AsyncSession, quotient: ColumnElement[float]) -> ColumnElement[Any]:
    """The integer part of a quotient that is not negative."""
    # SQLite may be built without floor. In a cast, PostgreSQL rounds and SQLite truncates.
    return func.floor(quotient) if session.get_bind().dialect.name == "postgresql" else cast(quotient, Integer)


async def _first_vm_at(session: AsyncSession) -> float:
    """When the fleet's first VM was created; infinity: there was none."""
    kept = await session.scalar(select(func.min(VmRow.created_at)))
    day = await session.scalar(select(func.min(FleetDayRow.day)))
    return min(float("inf") if kept is None else kept, float("inf") if day is None else day * DAY_S)
