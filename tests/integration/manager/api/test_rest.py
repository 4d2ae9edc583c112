"""The REST API: problems, logs in parts, the stream of what happens."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from migrated_stores import migrated
from rest_world import SPEC, RestWorld, generation, report, rest_world, vm, worker
from varuna_client import AsyncClient
from varuna_manager.jobs.line_search import LineSearch
from waiting import DEADLINE_S


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as made:
        yield made


@pytest.fixture
async def client(world: RestWorld) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(world.url, timeout_s=DEADLINE_S) as made:
        yield made


# ---------------------------------------------------------------- problems


PROBLEMS = [
    ("GET", "/api/v1/nothing", 404, "not-found", "nothing at /api/v1/nothing"),
    ("DELETE", "/api/v1/jobs", 405, "method-not-allowed", "does not take DELETE"),
    ("GET", "/api/v1/jobs/nobody", 404, "not-found", "job 'nobody' does not exist"),
    ("GET", "/api/v1/vms/nobody", 404, "not-found", "VM 'nobody' does not exist"),
    ("GET", "/api/v1/jobs?limit=0", 422, "invalid", "query.limit is '0'"),
    ("GET", "/api/v1/jobs?cursor=bad!", 422, "invalid", "cursor 'bad!' does not belong to this list"),
    ("GET", "/api/v1/jobs?state=odd", 422, "invalid", "state"),
    ("GET", "/api/v1/jobs?name=a%00b", 422, "invalid", "NUL"),
    ("POST", "/api/v1/jobs", 422, "invalid", "the body is missing"),
    ("POST", "/api/v1/tokens", 422, "invalid", "the body is missing"),
    ("GET", "/api/v1/tokens", 409, "conflict", "start it with --secure"),
    ("GET", "/api/v1/fleet/history?since=2999-01-01", 422, "invalid", "since is not before until"),
]
"""A call, the status and the kind of its answer, and words of it."""


async def test_every_error_is_a_problem_with_a_type_that_stays(world: RestWorld) -> None:
    for method, path, status, slug, words in PROBLEMS:
        answer = await world.ask(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), path
        problem = answer.json()
        assert problem["type"] == f"urn:varuna:problem:{slug}"
        assert problem["status"] == status
        assert problem["title"]
        assert words in problem["detail"]
        assert "\n" not in problem["detail"]


@pytest.mark.parametrize("seconds", ["1e12", "604801", "Infinity", "-Infinity", "NaN", "-1"])
async def test_a_notice_of_no_real_length_is_refused(world: RestWorld, seconds: str) -> None:
    """It becomes a time, and one beyond the calendar could not be shown."""
    await world.add(vm("vm-1"))
    json = {"Content-Type": "application/json"}
    for path, field in (("preempt", "notice_s"), ("drain", "deadline_s")):
        body = f'{{"{field}": {seconds}}}'
        answer = await world.ask("POST", f"/api/v1/vms/vm-1/{path}", content=body, headers=json)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert (await world.ask("GET", "/api/v1/vms/vm-1")).json()["notice_deadline"] is None


async def test_no_market_grants_more_vms_than_a_fleet_may_have(world: RestWorld) -> None:
    for path, field in (("providers/local", "capacity"), ("fleet", "target")):
        answer = await world.ask("PUT", f"/api/v1/{path}", json={field: 10**30})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00%2B14:00", "0001-01-01", "9999-12-31T23:59:59-14:00"])
async def test_any_moment_of_the_calendar_may_be_asked_for(world: RestWorld, at: str) -> None:
    await world.add(vm("vm-1"))
    for path in ("fleet/cost", "jobs", "events"):
        answer = await world.ask("GET", f"/api/v1/{path}?since={at}")
        assert answer.status_code == 200, (path, answer.text)
    history = await world.ask("GET", f"/api/v1/fleet/history?since=1970-01-01&until={at}")
    assert history.status_code in (200, 422), history.text
    assert (await world.ask("GET", f"/api/v1/events?until={at}")).status_code == 200


async def test_a_wrong_job_is_told_field_by_field(world: RestWorld) -> None:
    answer = await world.ask("POST", "/api/v1/jobs", json={**SPEC, "global_batch": 0, "colour": "red"})
    assert {entry["field"] for entry in answer.json()["errors"]} == {"global_batch", "colour"}


# ---------------------------------------------------------------- logs


async def test_a_log_is_read_in_parts_followed_and_searched(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(generation(job_id, 1, 10.0), vm("vm-0"))
    await world.add(worker(job_id, 1, 0, "vm-0"))
    path = world.provider.log_path("vm-0", job_id, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"line {number} says Hé\n" for number in range(1000)))
    size = path.stat().st_size
    assert await client.logs("gpt", offset=-5) == path.read_bytes()[-5:]
    part = await client.log_chunk("gpt", offset=-100, limit=40)
    assert (part.offset, part.next_offset, part.size, part.generation) == (size - 100, size - 60, size, 1)
    rest = await client.log_chunk("gpt", offset=part.next_offset)
    assert part.data + rest.data == path.read_bytes()[-100:]
    nothing = await client.log_chunk("gpt", offset=rest.next_offset, wait_s=0.1)
    assert (nothing.data, nothing.next_offset) == (b"", size)
    found = await client.search_log("gpt", "LINE 99")
    assert [match["line_number"] for match in found["matches"]][:2] == [100, 991]
    assert (found["complete"], found["searched_bytes"]) == (True, size)
    first = found["matches"][0]
    assert path.read_bytes()[first["offset"] :].decode().startswith(first["text"])
    assert (await client.search_log("gpt", "LINE 99", ignore_case=False))["matches"] == []
    cut = await client.search_log("gpt", "line", limit=3)
    assert (len(cut["matches"]), cut["complete"]) == (3, False)


async def test_logs_are_searched_beside_the_thread_that_answers_heartbeats(
    world: RestWorld, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(generation(job_id, 1, 10.0), vm("vm-0"))
    await world.add(worker(job_id, 1, 0, "vm-0"))
    path = world.provider.log_path("vm-0", job_id, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 3_000_000 + b" here\n")
    search, threads = LineSearch.add_part, set()

    def add(self: LineSearch, data: bytes) -> None:
        threads.add(threading.get_ident())
        search(self, data)

    monkeypatch.setattr(LineSearch, "add_part", add)
    found = await client.search_log("gpt", "here")
    assert [match["line_number"] for match in found["matches"]] == [1]
    assert threads
    assert threading.get_ident() not in threads


# ---------------------------------------------------------------- the stream


async def test_a_stream_tells_of_past_and_present_and_how_far_jobs_are(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await client.submit({**SPEC, "name": "other"})
    await world.add(generation(job_id, 1, 10.0, state="running"))
    await world.add(worker(job_id, 1, 0, "vm", "running"))
    stream = client.stream("gpt")
    assert (await anext(stream))[1]["kind"] == "job_submitted"  # type: ignore[typeddict-item]
    await world.emit_event("elsewhere", job_id="other")
    await world.emit_event("here", job_id=job_id)
    assert (await anext(stream))[1]["kind"] == "here"  # type: ignore[typeddict-item]
    await world.reports.apply_reports("vm", [report(job_id, 1, range(1, 8), 1.0)])
    messages = [await anext(stream), await anext(stream)]
    kinds = {kind for kind, _ in messages}
    assert kinds == {"event", "progress"}
    progress: Any = next(document for kind, document in messages if kind == "progress")
    # The mean of steps 2 to 7.
    assert (progress["step"], progress["job_id"], progress["examples_per_s"]) == (7, job_id, 8.0), (
        "the mean of steps 2 to 7"
    )
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_stream_that_breaks_goes_on_where_it_was(world: RestWorld, client: AsyncClient) -> None:
    for number in range(3):
        await world.emit_event("test", str(number))
    stream = client.stream(after=1)
    assert [(await anext(stream))[1]["id"] for _ in range(2)] == [2, 3]  # type: ignore[typeddict-item]
    for connection in list(world.server.server_state.connections):
        connection.transport.abort()  # type: ignore[union-attr]
    await world.emit_event("test", "after it broke")
    assert (await anext(stream))[1]["id"] == 4  # type: ignore[typeddict-item]
    await stream.aclose()  # type: ignore[attr-defined]


async def test_who_falls_behind_misses_nothing(world: RestWorld) -> None:
    world.live._queue = 3
    following = world.live.stream_messages(0)
    await world.emit_event("test", "0")
    assert (await anext(following)).id == 1  # type: ignore[union-attr]
    for number in range(20):
        await world.emit_event("test", str(number))
    ids: list[int | None] = []
    while len(ids) < 20:
        one = await anext(following)
        ids += [] if one is None else [one.id]  # None: nothing came for long
    assert ids == list(range(2, 22))
    assert all(len(follower.queue) <= 3 for follower in world.live._followers)
    await following.aclose()  # type: ignore[attr-defined]
    assert not world.live._tasks


async def test_a_stream_ends_with_the_term_of_its_manager(world: RestWorld) -> None:
    async with (
        httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http,
        http.stream("GET", f"{world.url}/api/v1/events/stream") as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == "retry: 2000"
        world.events.close()
        assert [line async for line in lines if line and not line.startswith(": keep-alive")] == []
