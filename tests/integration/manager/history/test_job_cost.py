"""What a job cost is the sum over all its generations, however much of it was billed as they ended."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, func, select

from migrated_stores import migrated_url
from rest_world import SPEC, generation, vm, worker
from varuna_manager.db.changes import name_changes
from varuna_manager.db.engine import Database
from varuna_manager.db.job_progress import sum_up_all
from varuna_manager.db.models import GenerationRow, JobProgressRow, JobRow, JobVmRow, VmPriceRow, VmRow, WorkerRow
from varuna_manager.db.vm_prices import change_price
from varuna_manager.domain.retention import DAY_S, KeepDays
from varuna_manager.domain.spec import JobSpec
from varuna_manager.history.fleet_history import FleetHistoryService
from varuna_manager.history.job_cost import read_job_bill
from varuna_manager.history.retention import Retention
from varuna_manager.history.spending import Spending
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.world.events import EventLog

BEGIN = 1000.0
PRICES = (1.5, None, 0.25, 3.0)
GPUS = (1, 4, 2, 1)


@dataclass(frozen=True)
class Life:
    """A generation: seconds from the end of the one before, and of its own; negative where a clock was set back."""

    gap_s: float
    life_s: float
    places: tuple[int, ...]
    """By rank: which VM."""
    is_behind: bool
    """It is stored as ended, and the bill is not updated for it."""
    price: float | None
    """Which the first VM has from then on; None: it keeps what it has."""


_SECONDS = st.floats(-50, 5000)
_LIVES = st.builds(
    Life,
    gap_s=_SECONDS,
    life_s=_SECONDS,
    places=st.lists(st.integers(0, len(PRICES) - 1), min_size=1, max_size=5).map(tuple),
    is_behind=st.booleans(),
    price=st.sampled_from((None, 1.5, 9.0)),
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.xdist_group("postgres"))])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    store = Database(migrated_url(request, tmp_path))
    async with store.write() as session:
        session.add_all(
            vm(f"vm-{place}", gpus=gpus, price_per_hour=price)
            for place, (gpus, price) in enumerate(zip(GPUS, PRICES, strict=True))
        )
    yield store
    await store.close()


async def add_job(database: Database, name: str) -> None:
    spec = JobSpec(**{**SPEC, "name": name}).model_dump()
    async with database.write() as session:
        session.add(JobRow(id=name, name=name, state="running", spec=spec, history=[], created_at=BEGIN))


async def start(database: Database, name: str, number: int, at: float, life: Life, **changes: Any) -> None:
    async with database.write() as session:
        session.add(generation(name, number, at, **changes))
        session.add_all(worker(name, number, rank, f"vm-{place}") for rank, place in enumerate(life.places))
        if life.price is not None:
            times = select(func.max(GenerationRow.created_at), func.max(GenerationRow.ended_at))
            now = max(at, *(each or 0.0 for each in (await session.execute(times)).one()))
            change_price(session, await session.get_one(VmRow, "vm-0"), life.price, now)


async def end(database: Database, name: str, number: int, at: float) -> None:
    async with database.write() as session:
        query = select(GenerationRow).where(GenerationRow.job_id == name, GenerationRow.number == number)
        row = (await session.scalars(query)).one()
        row.state, row.ended_at = "ended", at


async def play(database: Database, name: str, lives: list[Life], *, ends: bool = True) -> float:
    """The job's generations, one after the other; the bill is compared at every step. When the last one ends."""
    await add_job(database, name)
    at = BEGIN
    for number, life in enumerate(lives, start=1):
        at += life.gap_s
        ended_at = at + life.life_s
        if life.is_behind:
            await start(database, name, number, at, life, ended_at=ended_at)
        else:
            await start(database, name, number, at, life, state="running")
            await compare(database, name, at + 17.0)
            await compare(database, name, at - 17.0)
            if ends or number < len(lives):
                await end(database, name, number, ended_at)
        await compare(database, name, ended_at + 5.0)
        at = ended_at
    return at


async def sum_all_generations(database: Database, name: str, now: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bill, and that of each VM, by what every rank of every generation used."""
    async with database.read() as session:
        generations = (await session.scalars(select(GenerationRow).where(GenerationRow.job_id == name))).all()
        ranks = (await session.scalars(select(WorkerRow).where(WorkerRow.job_id == name))).all()
        vms = {row.id: row for row in await session.scalars(select(VmRow))}
        past = (await session.scalars(select(VmPriceRow).order_by(VmPriceRow.until))).all()
    paid, hours = defaultdict[str, float](float), defaultdict[str, float](float)
    lasting: Counter[str] = Counter()
    for rank in ranks:
        (row,) = (row for row in generations if row.number == rank.generation)
        ended_at = now if row.ended_at is None else row.ended_at
        hours[rank.vm_id] += max(ended_at - row.created_at, 0.0) / 3600
        of_vm = [one for one in past if one.vm_id == rank.vm_id]
        bounds = [0.0, *(one.until for one in of_vm), math.inf]
        at_prices = [*(one.price_per_hour for one in of_vm), vms[rank.vm_id].price_per_hour or 0.0]
        for price, since, until in zip(at_prices, bounds, bounds[1:], strict=False):
            paid[rank.vm_id] += max(min(ended_at, until) - max(row.created_at, since), 0.0) / 3600 * price
        lasting[rank.vm_id] += row.ended_at is None
    prices = {name: vms[name].price_per_hour for name in hours}
    parts = {name: each / vms[name].gpus for name, each in hours.items()}
    costs = {name: None if price is None else paid[name] / vms[name].gpus for name, price in prices.items()}
    known = [cost for cost in costs.values() if cost is not None]
    sums = {
        "vm_hours": sum(parts.values()),
        "gpu_hours": sum(hours.values()),
        "cost": sum(known) if known else None,
        "cost_per_hour": sum(lasting[name] / vms[name].gpus * (prices[name] or 0) for name in hours) if known else None,
        "vms_without_price": list(prices.values()).count(None),
    }
    return sums, {name: (parts[name], hours[name], prices[name], costs[name]) for name in hours}


async def compare(database: Database, name: str, now: float) -> None:
    found: dict[str, Any] = {**await Spending(database, lambda: now).read_cost(name)}
    listed = found.pop("by_vm")
    sums, by_vm = await sum_all_generations(database, name, now)
    assert found == pytest.approx(sums)
    got = {one["vm_id"]: (one["hours"], one["gpu_hours"], one["price_per_hour"], one["cost"]) for one in listed}
    assert got.keys() == by_vm.keys()
    for vm_id, bill in by_vm.items():
        assert got[vm_id] == pytest.approx(bill)
    dearest = await Spending(database, lambda: now).read_cost(name, 1)
    assert dearest == {**found, "by_vm": listed[:1]}
    costs = [one["cost"] or 0.0 for one in listed]
    assert costs == sorted(costs, reverse=True), "the dearest first"


async def billed(database: Database, name: str) -> tuple[int, dict[str, float]]:
    """Up to which generation, and the GPU-seconds by VM."""
    async with database.read() as session:
        rows = await session.scalars(select(JobVmRow).where(JobVmRow.job_id == name))
        return (await session.get_one(JobProgressRow, name)).billed, {row.vm_id: row.gpu_seconds for row in rows}


async def test_a_job_costs_what_all_its_generations_used(database: Database) -> None:
    @settings(max_examples=8, deadline=None, database=None)
    @given(st.lists(_LIVES, min_size=1, max_size=6))
    def draw(lives: list[Life]) -> None:
        scripts.append(lives)

    back = Life(gap_s=5.0, life_s=-20.0, places=(0, 0, 1), is_behind=False, price=1.5)
    scripts: list[list[Life]] = [[back, back]]
    draw()
    for place, lives in enumerate(scripts):
        await play(database, f"job-{place}", lives, ends=bool(place % 2))


async def test_what_is_billed_is_not_added_up_again(database: Database) -> None:
    lives = [Life(0.0, 100.0 * number, (0, 0, 1), is_behind=number == 2, price=1.5) for number in (1, 2, 3, 4)]
    ended_at = await play(database, "j", lives, ends=False)
    assert await billed(database, "j") == (3, {"vm-0": pytest.approx(1200.0), "vm-1": pytest.approx(600.0)})
    before = await Spending(database, lambda: ended_at).read_cost("j")
    async with database.write() as session:
        await session.execute(delete(WorkerRow).where(WorkerRow.generation <= 3), execution_options=name_changes())
    assert await Spending(database, lambda: ended_at).read_cost("j") == before
    async with database.read() as session:
        since = await read_job_bill(session, "j", ended_at, after=3)
    assert since["gpu_hours"] == pytest.approx(3 * 400.0 / 3600), "after a retry only what came since"


async def test_hours_keep_the_price_that_they_had(database: Database) -> None:
    await play(database, "j", [Life(0.0, 36_000.0, (0,), is_behind=False, price=None)])
    async with database.write() as session:
        (await session.get_one(VmRow, "vm-0")).price_per_hour = 9.0
    assert (await Spending(database, lambda: BEGIN + 99_000.0).read_cost("j"))["cost"] == pytest.approx(15.0)


async def test_hours_of_a_running_generation_keep_the_price_that_they_had(database: Database) -> None:
    await play(database, "j", [Life(0.0, 0.0, (0, 0, 1), is_behind=False, price=None)], ends=False)
    for hour, price in ((2, 4.0), (3, 1.0)):
        async with database.write() as session:
            change_price(session, await session.get_one(VmRow, "vm-0"), price, BEGIN + hour * 3600.0)
    for ends in (False, True):
        bill = await Spending(database, lambda: BEGIN + 5 * 3600.0).read_cost("j")
        assert bill["cost"] == pytest.approx(2 * (2 * 1.5 + 1 * 4.0 + 2 * 1.0)), "two ranks, as there is one GPU"
        assert bill["cost_per_hour"] == (0.0 if ends else pytest.approx(2.0))
        async with database.read() as session:
            retried = await read_job_bill(session, "j", BEGIN + 5 * 3600.0, after=-1)
        assert retried["cost"] == pytest.approx(bill["cost"])
        await end(database, "j", 1, BEGIN + 5 * 3600.0)
    async with database.write() as session:
        change_price(session, await session.get_one(VmRow, "vm-0"), 50.0, BEGIN + 6 * 3600.0)
        change_price(session, await session.get_one(VmRow, "vm-1"), 2.0, BEGIN + 6 * 3600.0)
    bill = await Spending(database, lambda: BEGIN + 9 * 3600.0).read_cost("j")
    assert bill["cost"] == pytest.approx(18.0 + 5 / 4 * 2.0), "the first price of a VM is that of its hours before"


async def test_the_fleets_hours_keep_the_price_that_they_had(database: Database, tmp_path: Path) -> None:
    async with database.write() as session:
        for hour, price in ((2, 4.0), (3, 1.0)):
            change_price(session, await session.get_one(VmRow, "vm-0"), price, BEGIN + hour * 3600.0)
        for row in await session.scalars(select(VmRow)):
            row.state, row.gone_at = "gone", BEGIN + 10 * 3600.0
    now = BEGIN + 365 * DAY_S
    fleet = FleetHistoryService(database, KeepDays(vms=1), lambda: now)
    others = 10 * 0.25 + 10 * 3.0
    assert (await fleet.read_cost(None))["cost"] == pytest.approx(others + 2 * 1.5 + 1 * 4.0 + 7 * 1.0)
    since = await fleet.read_cost(BEGIN + 2.5 * 3600.0)
    assert since["cost"] == pytest.approx(0.75 * others + 0.5 * 4.0 + 7 * 1.0)
    archives = ArchiveService(database, tmp_path / "archives")
    retention = Retention(database, EventLog(database), archives, KeepDays(vms=1), now=lambda: now)
    while await retention.delete_some():
        pass
    async with database.read() as session:
        assert (await session.scalars(select(VmPriceRow))).all() == []
    assert (await fleet.read_cost(None))["cost"] == pytest.approx(others + 2 * 1.5 + 1 * 4.0 + 7 * 1.0)


async def test_bills_made_again_from_all_generations_are_the_same(database: Database) -> None:
    lives = [Life(5.0, 70.0 * number, (0, 1, 1, number % 4), is_behind=False, price=number) for number in range(1, 6)]
    await play(database, "a", lives)
    await play(database, "b", lives[:2], ends=False)
    kept = [await billed(database, name) for name in ("a", "b")]
    assert [number for number, _ in kept] == [5, 1]
    async with database.write() as session:
        await sum_up_all(session)
    for name, (number, seconds) in zip(("a", "b"), kept, strict=True):
        assert await billed(database, name) == (number, pytest.approx(seconds))
        await compare(database, name, 9000.0)


async def test_a_change_of_an_ended_generation_is_not_billed_twice(database: Database) -> None:
    ended_at = await play(database, "j", [Life(0.0, 100.0, (0, 1), is_behind=False, price=1.5)])
    before = await billed(database, "j")
    async with database.write() as session:
        (await session.scalars(select(GenerationRow))).one().end_reason = "as it is known now"
    assert await billed(database, "j") == before
    await compare(database, "j", ended_at)


async def test_what_a_job_cost_outlives_what_is_deleted_little_by_little(database: Database, tmp_path: Path) -> None:
    ended_at = await play(database, "j", [Life(0.0, 100.0, (0, 1), is_behind=False, price=1.5)] * 3, ends=False)
    async with database.write() as session:
        for row in await session.scalars(select(VmRow)):
            row.state, row.gone_at = "gone", ended_at
    now = ended_at + 365 * DAY_S
    before = await Spending(database, lambda: now).read_cost("j")
    archives = ArchiveService(database, tmp_path / "archives")
    retention = Retention(database, EventLog(database), archives, KeepDays(vms=1, logs=1), now=lambda: now)
    for _ in range(100):
        if not await retention.delete_some():
            break
    async with database.read() as session:
        assert set(await session.scalars(select(VmRow.id))) == {"vm-0", "vm-1"}, "those that no job names are deleted"
    assert await Spending(database, lambda: now).read_cost("j") == before
    await compare(database, "j", now)
