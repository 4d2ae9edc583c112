"""A worker whose device has no memory left: the job gets another plan, with room for what was lacking."""

from __future__ import annotations

from typing import Any

from scripted_manager import ScriptedManager, start_training
from varuna_proto.v1 import agent_pb2 as pb
from waiting import until

SHORT = pb.MemoryShortage(asked_bytes=1 << 20, free_bytes=0, limit_bytes=1 << 30, peak_bytes=1 << 29)
ERROR = "Traceback\ntorch.OutOfMemoryError: CUDA out of memory"


async def test_the_next_plan_is_more_careful_and_the_next_manager_knows_why(manager: ScriptedManager) -> None:
    (first, launch), (second, other) = await start_training(manager, 2)
    before = (await manager.get("jobs/train"))["plan"]
    assert (before["p"], before["d"]) == (1, 2)
    first.exited(launch, pb.EXIT_CAUSE_OUT_OF_MEMORY, ERROR, shortage=SHORT)
    assert (await second.stop(2)).keep_state
    second.exited(other, pb.EXIT_CAUSE_PEER_LOST, held=pb.HeldState(step=3, bytes=1000))
    again = [await first.launch(3), await second.launch(3)]
    assert not any(one.in_place for one in again)
    assert all(one.holders_generation == 2 for one in again), "it goes on from the state in memory"
    after = (await manager.get("jobs/train"))["plan"]
    assert (after["p"], after["d"]) == (2, 1)
    assert max(after["memory_bytes"]) < max(before["memory_bytes"])

    [event] = await find_events(manager, "out_of_memory")
    rank = launch.workers[0].rank
    assert (event["generation"], event["data"]["rank"], event["data"]["stage"]) == (2, rank, 0)
    planned = before["memory_bytes"][0]
    assert event["data"]["shortfall_bytes"] == (1 << 30) + (1 << 20) - planned
    [*_, started] = await find_events(manager, "generation_started")
    assert started["message"].startswith("generation 3 (training) starts as 2×1, micro-batch ")
    assert f"stage 1 of 1 needs at least 1.0 GiB where {planned / 1024:.1f} KiB were planned" in started["message"]
    ended = (await manager.get("jobs/train/generations"))[1]
    assert ended["end_cause"] == "out_of_memory"
    assert {worker["cause"] for worker in ended["workers"]} == {"out_of_memory", "peer_lost"}

    manager.kill()
    for agent, launched in zip((first, second), again, strict=True):
        await agent.close()
        agent.running = [pb.RunningWorker(job_id=launched.job_id, generation=3, rank=launched.workers[0].rank)]
    await manager.start()
    for agent, launched in zip((first, second), again, strict=True):
        await agent.connect()
        agent.running = []
        agent.exited(launched, pb.EXIT_CAUSE_OUT_OF_MEMORY, ERROR, shortage=SHORT)

    async def waits() -> bool:
        reason = (await manager.get("jobs/train"))["reason"] or ""
        return "no plan fits 2 GPUs, waiting for more" in reason and "it has run out of memory" in reason

    await until(waits, "the job to wait for more GPUs")
    events = await find_events(manager, "out_of_memory")
    assert [one["data"]["lessons"] for one in events] == [1, 2]
    assert events[0]["data"]["factor"] < events[1]["data"]["factor"]


async def find_events(manager: ScriptedManager, kind: str) -> list[Any]:
    """Oldest first."""
    found = await manager.get(f"events?kind={kind}&job=train")
    return sorted(found, key=lambda event: event["id"])


async def test_a_job_that_can_have_no_more_gpus_fails_with_the_figures(manager: ScriptedManager) -> None:
    [(agent, launch)] = await start_training(manager, 1, job={"resources": {"max_gpus": 1}})
    agent.exited(launch, pb.EXIT_CAUSE_OUT_OF_MEMORY, ERROR, shortage=SHORT)
    job = await manager.job_in("failed")
    assert job["error"].startswith("no plan can ever fit: the model ")
    assert "it has run out of memory, so stages count" in job["error"]
    assert "of 1.0 GiB on its device 0 B were free when it asked for 1.0 MiB" in job["error"]
