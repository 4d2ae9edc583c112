"""The gradient norm and the learning rate of steps: stored, in buckets from steps and from blocks, and bounded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from migrated_stores import migrated
from rest_world import SPEC, generation, rest_world, worker
from varuna_proto.v1 import agent_pb2 as pb

pytestmark = [pytest.mark.asyncio, pytest.mark.xdist_group("rest")]


async def test_they_are_stored_and_summed_up_where_they_are_known(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        job = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["id"]
        await world.add(generation(job, 1, 1.0, state="running"), worker(job, 1, 0, "vm-1", "running"))
        done = []
        for step in range(1, 401):
            result = pb.StepResult(step=step, loss=1.0, step_us=1000, examples=8)
            if step > 100:  # an older agent does not say
                result.gradient_norm = math.inf if step == 102 else float(step)
                result.learning_rate = 0.1
            done.append(result)
        steps = pb.StepsCompleted(job_id=job, generation=1, steps=done)
        await world.reports.apply_reports("vm-1", [pb.Report(number=1, steps_completed=steps)])

        rows = (await world.ask("GET", "/api/v1/jobs/gpt/metrics")).json()
        assert [rows[index]["gradient_norm"] for index in (0, 100, 101, 102)] == [None, 101.0, None, 103.0]
        for points in (4, 400):  # from blocks, and from steps
            found = (await world.ask("GET", f"/api/v1/jobs/gpt/metrics/buckets?points={points}")).json()
            norms, rates = found["gradient_norm"], found["learning_rate"]
            assert (norms["mean"][0], rates["mean"][0]) == (None, None)
            assert (norms["mean"][-1], rates["mean"][-1]) == (
                (350.5, pytest.approx(0.1)) if points == 4 else (400.0, 0.1)
            )
        four = (await world.ask("GET", "/api/v1/jobs/gpt/metrics/buckets?points=4")).json()["gradient_norm"]
        assert (four["min"][1], four["max"][1]) == (101.0, 200.0)
        assert four["mean"][1] == pytest.approx((sum(range(101, 201)) - 102) / 99)
