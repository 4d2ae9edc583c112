"""A dry run says what is wrong with a job's text, or what it would get; it changes nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from migrated_stores import migrated
from rest_world import SPEC, RestWorld, generation, rest_world, vm, worker
from scripted_manager import profile_json
from varuna_manager.domain.spec import JobSpec
from varuna_manager.planning.planning import GpuOfVm, PlanningService, PlanQuestion
from varuna_planner.profile.document import GpuTypeSpeeds, Profile
from varuna_proto.plan import Device

pytestmark = [pytest.mark.asyncio, pytest.mark.xdist_group("rest")]
TEXT = "name: gpt\nworkdir: /w\nrun: 'true'\nglobal_batch: 8\n"


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as made:
        yield made


async def try_job(world: RestWorld, text: str) -> Any:
    answer = await world.ask("POST", "/api/v1/jobs/dry-run", json={"text": text})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_mistakes_and_a_name_that_is_taken_are_problems(world: RestWorld) -> None:
    found = await try_job(world, TEXT.replace("global_batch", "global_bach"))
    assert [(one["line"], one["field"]) for one in found["problems"]] == [(1, "global_batch"), (4, "global_bach")]
    assert (await try_job(world, TEXT))["problems"] == []
    await world.ask("POST", "/api/v1/jobs", json=SPEC)
    found = await try_job(world, "run: 'true'\n" + TEXT.replace("run: 'true'\n", ""))
    assert [(one["line"], one["field"]) for one in found["problems"]] == [(2, "name")]
    assert "already queued" in found["problems"][0]["text"]


async def test_a_job_that_has_no_place_for_its_checkpoints_is_a_problem_where_it_is_refused(world: RestWorld) -> None:
    world.services.jobs._no_root_because = "its VMs are other machines"
    (problem,) = (await try_job(world, TEXT))["problems"]
    assert (problem["line"], problem["field"]) == (1, "checkpoint.url")
    assert problem["text"] == (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["detail"]
    assert (await try_job(world, TEXT + "checkpoint: {url: s3://bucket/x}\n"))["problems"] == []


async def test_it_plans_for_the_free_gpus_by_an_earlier_profile_and_changes_nothing(world: RestWorld) -> None:
    memory = {"device_memory_bytes": 16 << 30, "price_per_hour": 0.5}
    await world.add(*(vm(f"vm-{number}", **memory) for number in range(5)), vm("vm-5", cordoned_at=1.0, **memory))
    earlier = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["id"]
    await world.change(earlier, state="succeeded", active_name=None)
    found = await try_job(world, TEXT)
    assert (found["free_gpus"], found["all_gpus"], found["plan"]) == (5, 5, None)
    assert "not profiled yet" in found["reason"]
    assert found["document"] == SPEC
    await world.change(earlier, profile_json=profile_json())
    await world.add(generation(earlier, 1, 1.0), worker(earlier, 1, 0, "vm-0", "running"))
    found = await try_job(world, TEXT + "resources: {max_gpus: 2}\n")
    assert (found["free_gpus"], found["all_gpus"]) == (4, 5)
    gpus = found["plan"]["p"] * found["plan"]["d"]
    assert gpus <= 2
    assert found["cost_per_hour"] == gpus * 0.5
    assert [job["id"] for job in (await world.ask("GET", "/api/v1/jobs")).json()] == [earlier]


async def test_types_of_gpu_are_mixed_as_they_would_be(world: RestWorld) -> None:
    await world.add(*(vm(f"vm-{number}", gpu_type="V100" if number else "A100") for number in range(3)))
    earlier = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["id"]
    await world.change(earlier, state="succeeded", active_name=None, profile_json=profile_json())
    found = await try_job(world, TEXT)
    assert found["free_gpus"] == 3
    assert sorted(found["plan"]["gpu_types"]) == ["A100", "V100", "V100"]
    one_type = await try_job(world, TEXT + "resources: {mix_gpu_types: false}\n")
    assert (one_type["free_gpus"], one_type["plan"]["gpu_types"]) == (2, [])
    few = await try_job(world, TEXT + "resources: {max_gpus: 1}\n")
    assert (few["all_gpus"], few["plan"]["p"]) == (1, 1), "of equally many that it uses, the first by name"
    await world.change(earlier, state="running")
    assert (await try_job(world, TEXT))["free_gpus"] == 2, "another job shares the fleet"


@pytest.mark.parametrize("unnamed", [0, 1])
async def test_gpus_of_one_other_type_than_the_profiles_have_the_speed_of_that_type(
    world: RestWorld, unnamed: int
) -> None:
    """A VM whose type is not known gets no part, as for the job itself."""
    names, memory = ("vm-0", "vm-1"), {"device_memory_bytes": 16 << 30}
    await world.add(*(vm(name, gpu_type="V100", **memory) for name in names))
    await world.add(*(vm(f"vm-x{number}", **memory) for number in range(unnamed)))
    speeds = GpuTypeSpeeds(gpu_type="V100", section_speeds=(0.2,) * 8)
    profile = Profile.from_json(profile_json())
    profile = profile.model_copy(update={"gpu_type": "A100", "other_gpu_types": (speeds,)})
    earlier = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["id"]
    await world.change(earlier, state="succeeded", active_name=None, profile_json=profile.to_json())
    question = PlanQuestion(
        profile_json=profile.to_json(),
        spec=JobSpec(**SPEC),
        devices=tuple(Device(name, 0) for name in names),
        device_memory_bytes=16 << 30,
        gpus_per_vm=1,
        gpu_types=tuple(GpuOfVm(name, "V100", 16 << 30) for name in names),
    )
    real = (await PlanningService().propose_plan(question)).plan
    assert real is not None
    found = (await try_job(world, TEXT))["plan"]
    assert (found["examples_per_s"], found["gpu_types"]) == (real.examples_per_s, [*real.gpu_types])


async def test_a_vm_whose_memory_is_not_known_has_as_much_as_the_smallest(world: RestWorld) -> None:
    """As for the job itself."""
    await world.add(*(vm(f"vm-{number}", device_memory_bytes=1000 if number else None) for number in range(2)))
    earlier = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["id"]
    await world.change(earlier, state="succeeded", active_name=None, profile_json=profile_json())
    found = await try_job(world, TEXT)
    assert (found["plan"], found["reason"]) == (None, "no plan fits 2 GPUs now: the job waits for more")


async def test_stages_in_two_zones_have_the_link_between_zones(world: RestWorld) -> None:
    await world.add(*(vm(f"vm-{number}", zone=f"zone-{number}") for number in range(2)))
    profile = json.loads(profile_json())
    profile["links"]["other_zone"] = {**profile["links"]["other_vm"], "latency_us": 50_000.0}
    earlier = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["id"]
    await world.change(earlier, state="succeeded", active_name=None, profile_json=json.dumps(profile))
    found = await try_job(world, TEXT + "plan: {p: 2}\n")
    assert found["reason"].endswith("some replicas cross from one zone to another")


async def test_what_is_typed_is_neither_audited_nor_limited_as_a_change(world: RestWorld) -> None:
    for _ in range(3):
        await try_job(world, TEXT)
    await world.ask("POST", "/api/v1/jobs", json=SPEC)
    actions = [entry["action"] for entry in (await world.ask("GET", "/api/v1/audit")).json()]
    assert actions == ["POST /api/v1/jobs"]
