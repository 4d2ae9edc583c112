"""What the REST API shows of the store, on SQLite and PostgreSQL: pages, filters, versions, charts, accounts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event, insert, select

from migrated_stores import migrated_url
from rest_world import SPEC, RestWorld, generation, report, rest_world, vm, worker
from scripted_manager import profile_json
from varuna_client import AsyncClient, NotFoundError, RefusedError
from varuna_manager.db.models import CheckpointRow, EventRow, GenerationRow, MetricRow
from varuna_manager.domain.states import VmState
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S

# All tests of a store share one server: to start it takes longer than most of them.
pytestmark = pytest.mark.asyncio(loop_scope="module")
STORES = [
    pytest.param("sqlite", marks=pytest.mark.xdist_group("rest")),
    pytest.param("postgresql", marks=pytest.mark.xdist_group("postgres")),
]


@pytest.fixture(scope="module", params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return migrated_url(request, tmp_path_factory.mktemp("store"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(store_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestWorld]:
    async with rest_world(tmp_path_factory.mktemp("data"), store_url) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: RestWorld) -> AsyncIterator[RestWorld]:
    yield shared
    await shared.empty()


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: RestWorld) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(world.url, timeout_s=DEADLINE_S) as made:
        yield made


# ---------------------------------------------------------------- jobs


async def test_jobs_come_in_pages_newest_first_and_filtered(world: RestWorld, client: AsyncClient) -> None:
    ids = []
    for number in range(5):
        job = await client.submit({**SPEC, "name": f"gpt-{number}"})
        await world.change(job["id"], created_at=1000.0 + number // 2)  # two by two at once
        ids.append(job["id"])
    await client.cancel("gpt-3")
    first = await world.ask("GET", "/api/v1/jobs?limit=2")
    assert 'rel="next"' in first.headers["link"]
    found = await client.jobs(limit=2)
    assert sorted(job["id"] for job in found) == sorted(ids)
    assert [job["created_at"] for job in found] == sorted((job["created_at"] for job in found), reverse=True)
    assert [job["name"] for job in await client.jobs(state=["cancelling"])] == ["gpt-3"]
    assert [job["name"] for job in await client.jobs(name="t-4")] == ["gpt-4"]
    assert await client.jobs(name="%") == []
    assert {job["name"] for job in await client.jobs(since="1970-01-01T00:16:41Z")} == {"gpt-2", "gpt-3", "gpt-4"}


async def test_a_job_is_changed_by_whoever_has_seen_it_as_it_is(world: RestWorld, client: AsyncClient) -> None:
    job = await client.submit(SPEC)
    tag = (await world.ask("GET", "/api/v1/jobs/gpt")).headers["etag"]
    assert tag == f'"{job["version"]}"'
    changed = await client.change("gpt", {"priority": 7, "max_gpus": 4}, version=job["version"])
    assert changed["spec"]["priority"] == 7
    assert {"min_gpus": 1, "max_gpus": 4}.items() <= changed["spec"]["resources"].items()
    assert changed["version"] > job["version"]
    with pytest.raises(RefusedError, match="has changed since it was read") as refused:
        await client.change("gpt", {"priority": 1}, version=job["version"])
    assert refused.value.status == 412
    weak = await world.ask("PATCH", "/api/v1/jobs/gpt", json={"priority": 1}, headers={"If-Match": f"W/{tag}"})
    assert weak.status_code == 412
    with pytest.raises(RefusedError, match="max_gpus 4 is below min_gpus 9"):
        await client.change("gpt", {"min_gpus": 9})
    same = await client.change("gpt", {"priority": 7})
    assert same["version"] == changed["version"]
    await client.cancel("gpt")
    with pytest.raises(RefusedError, match="only one that is not over can be changed"):
        await client.change("gpt", {"priority": 1})
    assert [event["kind"] for event in await client.events("gpt")].count("job_changed") == 1


async def test_generations_say_how_they_came_about(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(
        generation(job_id, 1, 10.0, kind="calibration"),
        generation(job_id, 2, 20.0),
        generation(job_id, 3, 30.0, in_place=True),
        generation(job_id, 4, 40.0),
        generation(job_id, 5, 50.0, in_place=True, state="launching"),
    )
    ranks = [worker(job_id, number, rank, f"vm-{rank}") for number in (3, 4, 5) for rank in (0, 1)]
    for one in ranks:
        one.kept_bytes = {3: 2**50, 4: 0, 5: None}[one.generation]
        one.peer_bytes, one.store_bytes = {3: (0, 0), 4: (2**50, 3), 5: (None, None)}[one.generation]
    await world.add(*ranks)
    kept, given, unknown = (
        {"kept": kept, "peers": peers, "store": store}
        for kept, peers, store in ((2**51, 0, 0), (0, 2**51, 6), (0, 0, 0))
    )
    expected = [(None, None), (None, None), ("reshape", kept), ("restart", given), ("reshape", unknown)]
    for brief in (False, True):
        found = await client.generations("gpt", brief=brief)
        assert [(one["kind_of_morph"], one["state_from"]) for one in found] == expected
    assert (await client.generation("gpt", 3))["state_from"] == kept


async def test_a_job_tells_how_far_it_is(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(
        generation(job_id, 1, 10.0, kind="calibration"),
        generation(job_id, 2, 20.0, last_step=204, last_loss=1.5, last_step_at=30.0, resumed_step=0),
        generation(job_id, 3, 40.0, state="launching"),
    )
    await world.add(
        worker(job_id, 3, 0, "vm-0", "running"),
        worker(job_id, 3, 1, "vm-1", "assigned"),
        *(
            MetricRow(
                job_id=job_id, step=step, loss=1.5, step_s=took, between_s=between, examples=8, generation=2, at=30.0
            )
            for step, took, between in [
                *((old, 99.0, 0.0) for old in range(1, 105)),
                *((new, 0.5, 0.25) for new in range(105, 204)),
                (204, 50.5, 50.25),  # it evaluated before
            ]
        ),
    )
    job = await client.job("gpt")
    assert (job["step"], job["loss"], job["generation"], job["gpus"]) == (204, 1.5, 3, 2)
    assert (job["step_s"], job["between_s"], job["examples_per_s"]) == (1.0, 0.75, 8.0)
    assert job["rate_steps"] == 100
    assert job["plan"] is not None
    assert (await client.jobs())[0] == job


# ---------------------------------------------------------------- history


async def test_generations_have_phases_and_come_in_pages(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    history = [{"at": 12.0, "state": "running", "reason": "every rank has started"}]
    await world.add(
        generation(job_id, 1, 10.0, history=history, started_at=13.0, stop_requested_at=20.0, ended_at=21.5),
        generation(job_id, 2, 22.0, state="launching"),
    )
    await world.add(worker(job_id, 1, 0, "vm-0"), worker(job_id, 1, 1, "vm-1"), worker(job_id, 2, 0, "vm-0"))
    first, second = await client.generations("gpt")
    assert [(phase["name"], phase["seconds"]) for phase in first["phases"]] == [
        ("launching", 2.0),
        ("first_step", 1.0),
        ("training", 7.0),
        ("stopping", 1.5),
    ]
    assert [phase["name"] for phase in second["phases"]] == ["launching"]
    assert second["phases"][0]["end"] is None
    assert [place["vm_id"] for place in first["placement"]] == ["vm-0", "vm-1"]
    assert len(first["candidates"]) == 2
    brief = (await client.generations("gpt", brief=True))[0]
    assert (brief["candidates"], brief["workers"], brief["placement"]) == ([], [], [])
    newest = await world.ask("GET", f"/api/v1/jobs/{job_id}/generations?order=desc&limit=1")
    assert [one["number"] for one in newest.json()] == [2]
    following = await world.ask("GET", newest.links["next"]["url"])
    assert [one["number"] for one in following.json()] == [1]
    assert "link" not in following.headers
    assert (await client.generation("gpt", 1)) == first
    with pytest.raises(NotFoundError, match="no such generation 9"):
        await client.generation("gpt", 9)


async def test_a_plan_is_compared_with_what_it_turned_out_to_be(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    with pytest.raises(NotFoundError, match="has no plan yet: it is queued"):
        await client.plan("gpt")
    await world.add(generation(job_id, 1, 10.0, resumed_step=0, last_step=5), generation(job_id, 2, 30.0))
    times = {1: 9.0, 2: 0.6, 3: 0.7, 4: 0.8, 5: 0.7}  # the first is where all warms up
    await world.add(
        *(
            MetricRow(job_id=job_id, step=step, loss=1.0, step_s=took, between_s=0.2, examples=8, generation=1, at=20.0)
            for step, took in times.items()
        )
    )
    plan = await client.plan("gpt", 1)
    assert (plan["predicted_step_s"], plan["actual_step_s"], plan["steps"]) == (0.5, 0.7, 4)
    assert plan["actual_examples_per_s"] == pytest.approx(8 / 0.7)
    assert (plan["between_s"], plan["error"]) == (pytest.approx(0.2), pytest.approx(0.0)), "between steps is no error"
    assert [candidate["reason"] for candidate in plan["candidates"]] == ["the fastest", "too large"]
    newest = await client.plan("gpt")
    assert (newest["generation"], newest["actual_step_s"], newest["error"]) == (2, None, None)
    assert [(one["generation"], one["candidates"]) for one in await client.plans("gpt")] == [(2, []), (1, [])]


async def test_all_plans_of_a_page_are_judged_by_one_look(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    asked: list[str] = []

    def ask(*call: Any) -> None:
        asked.append(call[2])

    event.listen(world.database.engine.sync_engine, "before_cursor_execute", ask)
    looks = []
    for number in (1, 2, 3, 4):
        first = 200 * (number - 1)
        await world.add(generation(job_id, number, float(number), resumed_step=first, last_step=first + 200))
        steps = range(first + 1, first + 201)
        await world.add(
            *(
                MetricRow(
                    job_id=job_id,
                    step=step,
                    loss=1.0,
                    step_s=number + step / 1e6,
                    examples=8,
                    generation=number,
                    at=2.0,
                )
                for step in steps
            )
        )
        asked.clear()
        plans = await client.plans("gpt")
        looks.append(len([text for text in asked if text.lstrip().startswith("SELECT")]))
        assert [plan["steps"] for plan in plans] == [100] * number, "the newest hundred of each"
        assert plans[0]["actual_step_s"] == pytest.approx(number, abs=1e-3)
    event.remove(world.database.engine.sync_engine, "before_cursor_execute", ask)
    assert len(set(looks)) == 1, f"as many plans, as many queries: {looks}"


async def test_a_chart_of_many_steps_is_the_same_from_blocks_as_from_steps(
    world: RestWorld, client: AsyncClient
) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(generation(job_id, 1, 10.0, state="running"), generation(job_id, 2, 20.0, state="running"))
    await world.add(worker(job_id, 1, 0, "vm", "running"), worker(job_id, 2, 0, "vm", "running"))
    for first in range(1, 1001, 37):
        await world.reports.apply_reports("vm", [report(job_id, 1, range(first, min(first + 37, 1001)), 100.0)])
    # The second one goes back to step 551 and has come to 720: blocks of the first one are overwritten half-way.
    await world.reports.apply_reports("vm", [report(job_id, 2, range(551, 721), 200.0)])
    steps = {metric["step"]: metric for metric in await client.metrics("gpt")}
    assert len(steps) == 1000
    for points, from_step, to_step in ((10, 1, None), (3, 1, None), (2000, 1, None), (5, 101, 900), (7, 540, 730)):
        chart = await client.metric_buckets("gpt", points=points, from_step=from_step, to_step=to_step)
        assert len(chart["count"]) <= points
        assert chart["steps"] == sum(chart["count"]) == chart["to_step"] - chart["from_step"] + 1
        for place, (first, last) in enumerate(zip(chart["first_step"], chart["last_step"], strict=True)):
            inside = [steps[step] for step in range(first, last + 1)]
            losses = [one["loss"] for one in inside if one["loss"] is not None]
            rates = [one["examples"] / one["step_s"] for one in inside]
            assert chart["loss"]["min"][place] == min(losses)
            assert chart["loss"]["max"][place] == max(losses)
            assert chart["loss"]["mean"][place] == pytest.approx(sum(losses) / len(losses))
            assert chart["generation"][place] == max(one["generation"] for one in inside)
            assert chart["examples_per_s"]["max"][place] == pytest.approx(max(rates))
            assert chart["examples_per_s"]["mean"][place] == pytest.approx(
                sum(one["examples"] for one in inside) / sum(one["step_s"] for one in inside)
            )
    with pytest.raises(RefusedError, match="to_step 3 is before from_step 9"):
        await client.metric_buckets("gpt", from_step=9, to_step=3)


async def test_what_lies_between_steps_is_stored_and_added_up(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(generation(job_id, 1, 10.0, state="running"), worker(job_id, 1, 0, "vm", "running"))

    async def send(*steps: int) -> None:
        between = pb.BetweenSteps(data_us=100_000, evaluation_us=200_000, checkpoint_us=0, script_us=300_000)
        results = [pb.StepResult(step=step, loss=1.0, step_us=1_000_000, examples=8, between=between) for step in steps]
        fact = pb.StepsCompleted(job_id=job_id, generation=1, steps=results)
        await world.reports.apply_reports("vm", [pb.Report(number=1, steps_completed=fact)])

    await send(1, 2)
    await send(2, 3, 4)
    await send(3, 4)  # again, and nothing new
    assert [one["between_s"] for one in await client.metrics("gpt")] == pytest.approx([0.6] * 4)
    job = await client.job("gpt")
    assert (job["step_s"], job["examples_per_s"], job["rate_steps"]) == (1.0, 8.0, 3)
    async with world.database.read() as session:
        stored = await session.scalar(select(GenerationRow.between_s).where(GenerationRow.job_id == job_id))
    sums = {"data": 0.3, "evaluation": 0.6, "checkpoints": 0.0, "script": 0.9}  # of steps 2 to 4
    assert stored == pytest.approx(sums)


async def test_what_a_script_logs_is_listed_by_name(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    assert await client.logged_values("gpt") == []
    await world.add(generation(job_id, 1, 10.0), worker(job_id, 1, 0, "vm", "running"))
    values = [pb.LoggedValue(name=name, step=step, value=step / 8) for name in ("b/f1", "a") for step in (2, 1)]
    fact = pb.ValuesLogged(job_id=job_id, generation=1, values=values)
    await world.reports.apply_reports("vm", [pb.Report(number=1, values_logged=fact)])
    found = await client.logged_values("gpt")
    assert [one["name"] for one in found] == ["a", "b/f1"]
    assert (found[0]["step"], found[0]["value"], found[0]["generation"]) == ([1, 2], [0.125, 0.25], [1, 1])
    (one,) = await client.logged_values("gpt", names=["b/f1"], points=1)
    assert one["step"] == [2]
    with pytest.raises(NotFoundError):
        await client.logged_values("other")


async def test_time_and_cost_add_up(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.change(job_id, created_at=0.0, finished_at=7200.0, profile_json=profile_json(8), state="succeeded")
    await world.add(vm("vm-0", 0.0, price_per_hour=2.0), vm("vm-1", 0.0, gpus=4), vm("vm-2", 0.0, price_per_hour=1.0))
    await world.add(
        generation(job_id, 1, 100.0, kind="calibration", ended_at=160.0),
        # 100 steps of 10 s after its first one. In each, a stage computes 4 micro-batches of 4 sections.
        generation(
            job_id, 2, 160.0, started_at=200.0, last_step_at=1200.0, ended_at=1210.0, resumed_step=0, last_step=101
        ),
        generation(
            job_id,
            3,
            1300.0,
            started_at=1350.0,
            last_step_at=2350.0,
            ended_at=7200.0,
            resumed_step=50,
            last_step=151,
            steps_redone=51,
            between_s={"script": 600.0, "evaluation": 0.0},
        ),
    )
    await world.add(
        worker(job_id, 1, 0, "vm-0"),
        worker(job_id, 2, 0, "vm-0"),
        worker(job_id, 2, 1, "vm-1"),
        worker(job_id, 3, 0, "vm-2"),
    )
    found = await client.time("gpt")
    spent = {cause["cause"]: cause["seconds"] for cause in found["causes"]}
    assert sum(spent.values()) == pytest.approx(7200.0) == pytest.approx(found["total_s"])
    assert spent["waiting_for_vms"] == pytest.approx(100.0 + 90.0)
    assert spent["calibration"] == pytest.approx(60.0)
    assert spent["morphs"] == pytest.approx(40.0 + 10.0 + 50.0 + (7200.0 - 2350.0))
    assert spent["redone_steps"] == pytest.approx(1000.0 / 2)
    busy_s = 4 * 4 * 0.006  # micro-batches, sections, and forward and backward of two examples
    assert spent["script"] == pytest.approx(600.0 / 2)
    bubbles_s = 1000.0 * (1 - busy_s / 10.0) + 200.0 * (1 - busy_s / 4.0)
    assert spent["bubbles"] == pytest.approx(bubbles_s)
    assert sum(one["between_s"] for one in found["generations"]) == pytest.approx(spent["script"])
    assert found["elapsed_s"] == pytest.approx(7100.0), "since its first start"
    assert found["useful_s"] == pytest.approx(spent["training"] + spent["bubbles"])
    assert found["useful_s"] == pytest.approx(found["goodput"] * 7100.0)
    cost = await client.cost("gpt")
    hours = {one["vm_id"]: one["hours"] for one in cost["by_vm"]}
    assert hours == pytest.approx({"vm-0": 1110 / 3600, "vm-1": 1050 / 3600 / 4, "vm-2": 5900 / 3600})
    assert cost["cost"] == pytest.approx(2.0 * 1110 / 3600 + 5900 / 3600)
    assert (cost["vms_without_price"], cost["cost_per_hour"]) == (1, 0.0)


async def test_one_worker_waits_for_nobody(world: RestWorld, client: AsyncClient) -> None:
    """However far its steps are from its profile: a slow machine is no bubble."""
    job_id = (await client.submit(SPEC))["id"]
    await world.change(job_id, created_at=0.0, finished_at=1200.0, profile_json=profile_json(8), state="succeeded")
    plan = Plan(p=1, d=1, micro_batch=2, global_batch=8, stage_starts=(0,), recompute=(False,)).to_document()
    moments = {"started_at": 100.0, "last_step_at": 1100.0, "ended_at": 1200.0, "resumed_step": 0, "last_step": 101}
    await world.add(generation(job_id, 1, 0.0, plan=plan, **moments), worker(job_id, 1, 0, "vm-0"))
    spent = {cause["cause"]: cause["seconds"] for cause in (await client.time("gpt"))["causes"]}
    assert (spent["training"], spent["bubbles"]) == (1000.0, 0.0)


async def test_the_pipeline_of_the_newest_traced_mini_batch(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(generation(job_id, 1, 10.0, state="running"))
    await world.add(worker(job_id, 1, 0, "vm-0", "running"), worker(job_id, 1, 1, "vm-1", "running"))
    with pytest.raises(NotFoundError, match="was traced yet"):
        await client.pipeline("gpt")

    async def trace(rank: int, vm_id: str, step: int, begin_us: float, start_us: float = 0.0) -> None:
        ops = [pb.TracedOp(op=pb.TRACE_OP_FORWARD, micro_batch=1, start_us=start_us, duration_us=4.0)]
        sums = [pb.TracedSum(name="bucket 0", start_us=8.0, duration_us=2.0)]
        fact = pb.StepTraced(
            job_id=job_id, generation=1, rank=rank, step=step, begin_us=begin_us, ops=ops, all_reduce=sums
        )
        await world.reports.apply_reports(vm_id, [pb.Report(number=1, step_traced=fact)])

    await trace(0, "vm-0", 3, 1e15)
    await trace(1, "vm-1", 3, 1e15 + 100)
    await trace(1, "vm-0", 100, 1e15)  # not its VM
    await trace(0, "vm-0", 99, 1e15, start_us=float("nan"))
    found = await client.pipeline("gpt")
    assert (found["step"], found["span_us"]) == (3, 110.0)
    assert [(stage["stage"], stage["vm_id"]) for stage in found["stages"]] == [(0, "vm-0"), (1, "vm-1")]
    assert found["stages"][1]["ops"] == [["F", 1, 100.0, 4.0]]
    assert found["stages"][1]["all_reduce"] == [["bucket 0", 108.0, 2.0]]


async def test_checkpoints_come_in_pages_both_ways(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    rows = [
        {"job_id": job_id, "generation": 1, "step": step, "url": "u", "total_bytes": 5, "at": 1.0} for step in range(9)
    ]
    async with world.database.write() as session:
        await session.execute(insert(CheckpointRow), rows)
    assert [one["step"] for one in await client.checkpoints("gpt")] == list(range(9))
    page = await world.ask("GET", "/api/v1/jobs/gpt/checkpoints?order=desc&limit=4")
    assert [one["step"] for one in page.json()] == [8, 7, 6, 5]
    page = await world.ask("GET", page.links["next"]["url"])
    assert [one["step"] for one in page.json()] == [4, 3, 2, 1]


# ---------------------------------------------------------------- events, fleet


async def test_events_are_filtered_and_paged_both_ways(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    for number in range(6):
        await world.emit_event("odd" if number % 2 else "even", str(number), job_id=job_id, vm_id=f"vm-{number // 3}")
    everything = await client.events()
    assert [event["id"] for event in everything] == sorted(event["id"] for event in everything)
    assert [event["message"] for event in await client.events("gpt", kind=["odd"])] == ["1", "3", "5"]
    assert [event["message"] for event in await client.events(vm="vm-1")] == ["3", "4", "5"]
    assert await client.events(until="1999-01-01") == []
    assert len(await client.events(since="1999-01-01")) == len(everything)
    newest = await client.newest_events("gpt", limit=2)
    assert [event["message"] for event in newest] == ["5", "4"]
    older = await world.ask("GET", "/api/v1/jobs/gpt/events?order=desc&limit=2&kind=odd&kind=even")
    older = await world.ask("GET", older.links["next"]["url"])
    assert [event["message"] for event in older.json()] == ["3", "2"]
    kinds = (await world.ask("GET", "/api/v1/events/kinds")).json()
    assert kinds == sorted({event["kind"] for event in everything}) == ["even", "job_submitted", "odd"]
    assert (await world.ask("GET", "/api/v1/events?job=nobody")).status_code == 404


async def test_vms_are_filtered_counted_and_told_with_their_past(world: RestWorld, client: AsyncClient) -> None:
    job_id = (await client.submit(SPEC))["id"]
    await world.add(
        generation(job_id, 1, 10.0, state="running"),
        vm("vm-0", 1000.0, price_per_hour=1.5),
        vm("vm-1", 1001.0, host="10.0.0.9", quarantined_until=9e9, slow_ratio=1.4),
        vm("vm-2", 1002.0, state="draining", notice_deadline=9e9),
        vm("vm-3", 1003.0, state="gone", history=[{"at": 4600.0, "state": "gone", "reason": "taken"}]),
    )
    await world.add(worker(job_id, 1, 0, "vm-0", "running"))

    async def ids(**wanted: Any) -> list[str]:
        return [one["id"] for one in await client.vms(**wanted)]

    assert await ids() == ["vm-0", "vm-1", "vm-2"]
    assert await ids(gone=True) == ["vm-0", "vm-1", "vm-2", "vm-3"]
    assert await ids(state=["draining", "lost"]) == ["vm-2"]
    assert await ids(quarantined=True) == ["vm-1"]
    assert await ids(quarantined=False) == ["vm-0", "vm-2"]
    assert await ids(job="gpt") == ["vm-0"]
    assert await ids(text="0.9") == ["vm-1"]
    page = await world.ask("GET", "/api/v1/vms?limit=3&gone=true")
    assert [one["id"] for one in (await world.ask("GET", page.links["next"]["url"])).json()] == ["vm-3"]
    summary = await client.vm_summary()
    assert (summary["total"], summary["gone"], summary["by_state"]["ready"], summary["gpus"]) == (3, 1, 2, 2)
    assert (summary["workers"], summary["quarantined"], summary["slow"], summary["noticed"]) == (1, 1, 1, 1)
    assert summary["cost_per_hour"] == 1.5
    fleet = await client.fleet()
    assert (fleet["vms"]["ready"], fleet["vms"]["draining"], fleet["vms"]["lost"], fleet["gpus"]) == (2, 1, 0, 2)
    detail = await client.vm("vm-3")
    assert [entry["reason"] for entry in detail["history"]] == ["taken"]
    cost = await client.fleet_cost(since="1970-01-01T00:16:43Z")
    gone_hours = (4600.0 - 1003.0) / 3600
    assert cost["vm_hours"] > gone_hours
    assert (cost["vms"], cost["vms_without_price"], cost["cost_per_hour"]) == (4, 3, 1.5)
    assert cost["cost"] == pytest.approx(cost["gpu_hours"] / 3 * 1.5, rel=1e-4)


async def test_a_vm_that_is_lost_and_then_gone_counts_once(world: RestWorld, client: AsyncClient) -> None:
    async with world.database.write() as session:
        for name in ("silent", "back", "returned"):
            row = vm(name, state="requested")
            session.add(row)
            await session.flush()
            lost = () if name == "returned" else (VmState.LOST,)
            again = (VmState.READY,) if name == "back" else ()
            for state in (VmState.READY, *lost, *again, VmState.GONE):
                await world.services.fleet.move_vm(session, row, state, "test")
    found = await client.fleet_history(points=1)
    assert found["lost"] == [1 + 2 + 1], "one came back, and went later"


async def test_the_fleet_over_time(world: RestWorld, client: AsyncClient) -> None:
    await world.add(vm("vm-0"), vm("vm-1"), vm("vm-2", state="gone"))
    for kind in ("vm_requested", "vm_requested", "vm_requested", "vm_ready", "preemption_notice", "vm_gone"):
        await world.emit_event(kind, vm_id="vm-0")
    found = await client.fleet_history(points=4)
    assert (found["present"][0], found["present"][-1]) == (0, 2)
    assert [sum(found[name]) for name in ("ready", "lost", "notices", "quarantines")] == [1, 1, 1, 0]  # type: ignore[literal-required]
    # Seven days in which a VM came on each, and went two days later; looked at when they are long gone.
    day = 86_400.0
    for number in range(7):
        for kind, at in (("vm_requested", number * day + 9.0), ("vm_gone", (number + 2) * day + 9.0)):
            await world.add(EventRow(at=at, kind=kind, vm_id=f"vm-{number}", message="", data={}))
    since, until = "1970-01-01T00:00:00Z", "1970-01-08T00:00:00Z"
    week = await client.fleet_history(since=since, until=until, points=7)
    assert (week["bucket_s"], week["at_unix_s"][-1]) == (day, 7 * day)
    assert week["lost"] == [0, 0, 1, 1, 1, 1, 1]
    assert [number - week["present"][0] for number in week["present"]] == [0, 1, 1, 1, 1, 1, 1]
