"""What pages show together is of one moment, and jobs have their names beside their ids; on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import func, select

from migrated_stores import migrated_url
from rest_world import SPEC, RestWorld, generation, rest_world, vm, worker
from varuna_manager.db.models import VmRow

pytestmark = pytest.mark.asyncio
STORES = [
    pytest.param("sqlite", marks=pytest.mark.xdist_group("rest")),
    pytest.param("postgresql", marks=pytest.mark.xdist_group("postgres")),
]


@pytest_asyncio.fixture(params=STORES)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RestWorld]:
    async with rest_world(tmp_path, migrated_url(request, tmp_path)) as made:
        yield made


async def ask(world: RestWorld, path: str, **query: Any) -> Any:
    answer = await world.ask("GET", f"/api/v1/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_snapshot_does_not_see_what_is_written_meanwhile(world: RestWorld) -> None:
    count = select(func.count()).select_from(VmRow)
    async with world.database.read_snapshot() as session:
        assert await session.scalar(count) == 0
        await world.add(vm("vm-1"))
        assert await session.scalar(count) == 0
    async with world.database.read_snapshot() as session:
        assert await session.scalar(count) == 1


async def test_a_job_comes_with_its_newest_generation_and_the_vms_of_that(world: RestWorld) -> None:
    job = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()
    found = await ask(world, "jobs/gpt/overview")
    assert (found["job"]["id"], found["generation"], found["vms"]) == (job["id"], None, [])
    await world.add(
        *(vm(f"vm-{number}") for number in range(3)),
        generation(job["id"], 1, 1000.0),
        generation(job["id"], 2, 1001.0, state="running"),
        *(worker(job["id"], 2, rank, f"vm-{rank}", "running") for rank in range(2)),
    )
    found = await ask(world, "jobs/gpt/overview")
    assert (found["generation"]["number"], found["job"]["generation"]) == (2, 2)
    assert [one["id"] for one in found["vms"]] == ["vm-0", "vm-1"]
    assert {one["job_name"] for one in found["generation"]["workers"]} == {"gpt"}
    assert (await world.ask("GET", "/api/v1/jobs/nobody/overview")).status_code == 404


async def test_a_report_has_a_job_with_its_past(world: RestWorld) -> None:
    job = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()
    fresh = await ask(world, "jobs/gpt/report")
    assert (fresh["generations"], fresh["plan"], fresh["checkpoint"], fresh["course"]["steps"]) == ([], None, None, 0)
    await world.add(
        vm("vm-0"),
        generation(job["id"], 1, 1000.0),
        generation(job["id"], 2, 1001.0, state="running"),
        worker(job["id"], 2, 0, "vm-0", "running"),
    )
    for number in range(3):
        await world.emit_event("note", f"event {number}", job_id=job["id"])
    found = await ask(world, "jobs/gpt/report", events=2)
    parts = {
        "job": await ask(world, "jobs/gpt"),
        "plan": await ask(world, "jobs/gpt/plans/newest"),
        "course": await ask(world, "jobs/gpt/metrics/buckets", points=40),
    }
    assert {name: found[name] for name in parts} == parts
    assert [one["number"] for one in found["generations"]] == [1, 2]
    assert [one["message"] for one in found["events"]] == ["event 1", "event 2"]
    assert [one["cause"] for one in found["time"]["causes"]] == [
        one["cause"] for one in (await ask(world, "jobs/gpt/time"))["causes"]
    ]
    assert (found["cost"]["by_vm"], found["generations"][1]["workers"]) == ([], [])
    whole = await ask(world, "jobs/gpt/report", brief=False)
    assert [one["vm_id"] for one in whole["cost"]["by_vm"]] == ["vm-0"]
    assert [one["vm_id"] for one in whole["generations"][1]["workers"]] == ["vm-0"]
    assert (await world.ask("GET", "/api/v1/jobs/nobody/report")).status_code == 404


async def test_the_fleet_comes_with_a_page_of_its_vms(world: RestWorld) -> None:
    job = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()
    await world.add(
        *(vm(f"vm-{number}", 1000.0 + number) for number in range(3)),
        vm("vm-3", 1003.0, "gone"),
        generation(job["id"], 1, 1001.0, state="running"),
        worker(job["id"], 1, 0, "vm-0", "running"),
    )
    first = await ask(world, "fleet/overview", limit=2)
    assert [one["id"] for one in first["vms"]] == ["vm-0", "vm-1"]
    assert first["vms"][0]["workers"][0]["job_name"] == "gpt"
    assert (first["summary"]["total"], first["summary"]["workers"], first["fleet"]["provider"]) == (3, 1, "local")
    rest = await ask(world, "fleet/overview", limit=2, cursor=first["next_cursor"])
    assert ([one["id"] for one in rest["vms"]], rest["next_cursor"]) == (["vm-2"], None)
    assert [one["id"] for one in (await ask(world, "fleet/overview", gone=True, state="gone"))["vms"]] == ["vm-3"]
    assert [one["id"] for one in (await ask(world, "fleet/overview", q="m-1"))["vms"]] == ["vm-1"]


async def test_events_have_their_jobs_name_and_are_searched_by_text(world: RestWorld) -> None:
    job = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()
    await world.emit_event("vm_lost", "VM vm-1 is LOST: 100 % silent", vm_id="vm-1")
    events = await ask(world, "events")
    assert [(one["job_id"], one["job_name"]) for one in events] == [(job["id"], "gpt"), (None, None)]
    assert [one["kind"] for one in await ask(world, "events", q="is lost: 100 %")] == ["vm_lost"]
    assert await ask(world, "events", q="is_lost") == []
