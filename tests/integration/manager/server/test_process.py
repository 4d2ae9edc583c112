"""The whole manager as a process, and agents that send what the test wants; at the end, real ones."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from typing import Any

import grpc
import psutil
import pytest

from forked_manager import ForkedManager
from scripted_manager import ScriptedAgent, ScriptedManager, profile_json, start_training
from varuna_manager.db.engine import Database
from varuna_manager.world.pasts import read_lives_summary
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import DEADLINE_S, until


async def test_a_job_calibrates_then_trains_by_the_planners_plan_and_succeeds(manager: ScriptedManager) -> None:
    await manager.start("--vms", "2")
    await manager.submit(env={"A": "b"}, run="python train.py")
    agents = await manager.connect_vms(2)
    calibration = [await agent.launch(1) for agent in agents]
    assert {m.kind for m in calibration} == {pb.GENERATION_KIND_CALIBRATION}
    assert {(m.plan.p, m.plan.d, m.plan.micro_batch, m.world_size) for m in calibration} == {(1, 2, 1, 2)}
    assert sorted(worker.rank for m in calibration for worker in m.workers) == [0, 1]
    assert calibration[0].command == "python train.py"
    assert dict(calibration[0].environment) == {"A": "b"}
    assert calibration[0].checkpoint_url.startswith("file://")
    assert calibration[0].profile_cache_url == (manager.data_dir / "profiles").as_uri()
    missing = await manager.rest.get("jobs/train/profile")
    assert missing.status_code == 404
    assert "has no profile" in missing.json()["detail"]
    launches = await manager.calibrate()
    assert await manager.get("jobs/train/profile") == json.loads(profile_json())
    assert {m.kind for m in launches} == {pb.GENERATION_KIND_TRAINING}
    plan = launches[0].plan
    assert plan.p * plan.d == 2
    assert len(plan.stage_starts) == plan.p
    assert plan.global_batch == 8
    port = launches[0].rendezvous_port
    assert port not in {m.rendezvous_port for m in calibration}, "a rendezvous port is used once"
    rank0 = next(a for a, m in zip(agents, launches, strict=True) if m.workers[0].rank == 0)
    for agent, launch in zip(agents, launches, strict=True):
        agent.started(launch)
    rank0.steps(launches[0], 1, 2)
    rank0.steps(launches[0], 2, 3)
    committed = pb.CheckpointCommitted(job_id=launches[0].job_id, generation=2, step=3, url="file:///x", total_bytes=9)
    rank0.report(checkpoint_committed=committed)
    for agent, launch in zip(agents, launches, strict=True):
        agent.exited(launch, pb.EXIT_CAUSE_FINISHED)
    job = await manager.job_in("succeeded")
    assert (job["step"], job["generation"], job["error"]) == (3, 2, None)
    metrics = await manager.get("jobs/train/metrics?after_step=1")
    assert [(m["step"], m["loss"], m["generation"]) for m in metrics] == [(2, 0.5, 2), (3, 1 / 3, 2)]
    assert [c["step"] for c in await manager.get("jobs/train/checkpoints")] == [3]
    generations = await manager.get("jobs/train/generations")
    assert [(g["kind"], g["state"]) for g in generations] == [("calibration", "ended"), ("training", "ended")]
    assert generations[1]["candidates"]
    assert generations[1]["seconds_without_progress"] > 0
    assert generations[1]["steps_redone"] == 0
    logs = await manager.rest.get("jobs/train/logs?generation=2&rank=0")
    assert logs.content == b"a line\n"


async def test_a_vm_that_is_killed_costs_a_generation_and_no_more(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 3)
    await manager.rest.put("providers/local", json={"capacity": 2})
    victim, survivors = pairs[0], pairs[1:]
    assert (await manager.rest.post(f"vms/{victim[0].vm_id}/preempt", json={"notice_s": 0})).status_code == 200
    await victim[0].close()
    relaunched = [await agent.launch(3) for agent, _ in survivors]
    assert {m.world_size for m in relaunched} <= {1, 2}
    for (agent, old), new in zip(survivors, relaunched, strict=True):
        agent.exited(old, pb.EXIT_CAUSE_PEER_LOST)  # comes late: the new generation did not wait for it for long
        agent.started(new, resumed_step=2)
    rank0 = next(a for (a, _), m in zip(survivors, relaunched, strict=True) if m.workers[0].rank == 0)
    rank0.steps(relaunched[0], 3)
    await until(lambda: not rank0.unacked, "the step to be stored")
    _, second, third = await manager.get("jobs/train/generations")
    assert victim[0].vm_id in second["end_reason"]
    assert victim[0].vm_id not in {place["vm_id"] for place in third["placement"]}
    assert (third["resumed_step"], third["steps_redone"]) == (2, 1)
    assert third["seconds_without_progress"] > 0
    events = [event["kind"] for event in await manager.get("jobs/train/events")]
    assert events.count("generation_started") == 3


async def test_survivors_of_a_lost_vm_go_on_in_place_and_lose_no_step(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 3)
    await manager.rest.put("providers/local", json={"capacity": 2})
    plan = pairs[0][1].plan
    assert (plan.p, plan.d) == (1, 3)
    for agent, launch in pairs:
        agent.running = [pb.RunningWorker(job_id=launch.job_id, generation=2, rank=launch.workers[0].rank, step=3)]
    victim, survivors = pairs[-1], pairs[:-1]
    await victim[0].close()
    for agent, old in survivors:
        agent.exited(old, pb.EXIT_CAUSE_PEER_LOST, held=pb.HeldState(step=3, bytes=1000))
        agent.running = []
    # Only now: after a VM's end the manager waits for survivors for two seconds, which is short on a busy machine.
    await until(lambda: not any(agent.unacked for agent, _ in survivors), "the survivors to be stored")
    assert (await manager.rest.post(f"vms/{victim[0].vm_id}/preempt", json={"notice_s": 0})).status_code == 200
    launches = [await agent.launch(3) for agent, _ in survivors]
    for (agent, old), new in zip(survivors, launches, strict=True):
        assert new.in_place
        assert new.workers[0].local_rank == old.workers[0].local_rank
        assert (new.plan.p, new.plan.d, new.plan.micro_batch) == (1, 2, plan.micro_batch)
        assert all(stop.keep_state for stop in agent.commands("stop") if stop.generation == 2)
        # As a new process reports beside survivors, which knows of nothing that is run again.
        redone = 6 if agent is survivors[0][0] else 0
        agent.started(new, resumed_step=3, kept_bytes=1000, micro_batches_redone=redone)
    rank0 = next(a for (a, _), m in zip(survivors, launches, strict=True) if m.workers[0].rank == 0)
    rank0.steps(launches[0], 4)
    await until(lambda: not any(agent.unacked for agent, _ in survivors), "the reports to be stored")
    _, second, third = await manager.get("jobs/train/generations")
    assert (second["kind_of_morph"], second["state_from"]) == (None, None)
    assert (third["kind_of_morph"], third["state_from"]) == ("reshape", {"kept": 2000, "peers": 0, "store": 0})
    assert (third["resumed_step"], third["steps_redone"], third["last_step"]) == (3, 0, 4)
    assert (second["micro_batches_redone"], third["micro_batches_redone"]) == (None, 6), "once, not for each rank"
    (*_, goes_on) = [e for e in await manager.get("jobs/train/events") if e["kind"] == "first_step"]
    assert goes_on["data"]["micro_batches_redone"] == 6
    assert goes_on["message"].endswith("0 steps were lost, 6 micro-batches of the step under way were run again")
    started = [e for e in await manager.get("jobs/train/events") if e["kind"] == "generation_started"]
    assert "generation 3 (training) starts in place as 1×2" in started[-1]["message"]
    assert (await manager.rest.post("jobs/train/cancel")).status_code in (200, 202)
    stops = [await agent.stop(3) for agent, _ in survivors]
    assert not any(stop.keep_state for stop in stops)


async def test_survivors_that_cannot_go_on_in_place_give_their_state_to_new_workers(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 3)
    await manager.rest.put("providers/local", json={"capacity": 2})
    first, second, last = pairs
    await last[0].close()
    held = pb.HeldState(step=3, bytes=1000, gives_only=True)
    for agent, old in (first, second):
        agent.exited(old, pb.EXIT_CAUSE_PEER_LOST, held=held)
    await until(lambda: not (first[0].unacked or second[0].unacked), "the holders to be stored")  # as above
    assert (await manager.rest.post(f"vms/{last[0].vm_id}/preempt", json={"notice_s": 0})).status_code == 200
    launches = [await agent.launch(3) for agent, _ in (first, second)]
    ranks = sorted(old.workers[0].rank for _, old in (first, second))
    for (agent, _), new in zip((first, second), launches, strict=True):
        assert (new.in_place, new.holders_generation, list(new.holders)) == (False, 2, ranks)
        assert all(stop.keep_state for stop in agent.commands("stop") if stop.generation == 2)

    await manager.rest.put("providers/local", json={"capacity": 1})
    await manager.rest.post(f"vms/{second[0].vm_id}/preempt", json={"notice_s": 0})
    await second[0].close()
    agent, old = first
    agent.exited(launches[0], pb.EXIT_CAUSE_PEER_LOST)
    again = await agent.launch(4)
    assert (again.in_place, again.holders_generation) == (False, 2), "what was held is not gone"
    assert list(again.holders) == [old.workers[0].rank]
    assert all(stop.keep_state for stop in agent.commands("stop") if stop.generation > 1)
    agent.started(again, resumed_step=3, peer_bytes=1000)
    agent.steps(again, 4)
    await until(lambda: not agent.unacked, "the reports to be stored")
    fourth = (await manager.get("jobs/train/generations"))[3]
    assert (fourth["kind_of_morph"], fourth["state_from"]) == ("restart", {"kept": 0, "peers": 1000, "store": 0})
    assert (fourth["resumed_step"], fourth["steps_redone"], fourth["last_step"]) == (3, 0, 4)
    assert fourth["micro_batches_redone"] is None, "a restart does not know"
    (*_, started) = [e for e in await manager.get("jobs/train/events") if e["kind"] == "generation_started"]
    assert "with the state of 1 process of generation 2" in started["message"]
    assert (started["data"]["holders_generation"], started["data"]["holders"]) == (2, list(again.holders))


@pytest.mark.slow
async def test_growth_is_decided_by_what_the_running_workers_take(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 2)
    plan = pairs[0][1].plan
    bounds = [*plan.stage_starts, 8]
    for agent, launch in pairs:
        rank = launch.workers[0].rank
        stage = rank % plan.p
        sections = bounds[stage + 1] - bounds[stage]
        agent.micro_batch_us[rank] = 2 * 3000 * plan.micro_batch * sections  # twice what was profiled
        agent.running = [pb.RunningWorker(job_id=launch.job_id, generation=2, rank=rank, step=3)]

    async def drifts() -> list[Any]:
        return [event for event in await manager.get("jobs/train/events") if event["kind"] == "profile_drift"]

    (drift,) = await until(drifts, "the drift to be seen")
    assert "2.00 times as long as profiled" in drift["message"].replace("2.00, 2.00", "2.00")
    await manager.rest.put("fleet", json={"target": 4})
    await manager.connect_vms(2)
    await pairs[0][0].stop(2)
    _, generation = await manager.get("jobs/train/generations")
    stopping = [e for e in await manager.get("jobs/train/events") if e["kind"] == "generation_stopping"]
    rates = re.search(r"([0-9.]+) to ([0-9.]+) examples/s predicted", stopping[-1]["message"])
    assert rates is not None, stopping
    before, after = map(float, rates.groups())
    promised = generation["plan"]["examples_per_s"]
    assert before == pytest.approx(promised / 2, rel=0.1)
    assert before < after < 1.2 * promised, "four VMs at half the speed"


@pytest.mark.slow
async def test_a_slow_vm_is_left_out_for_a_while(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 3, flags=("--slow-looks", "1"))
    p = pairs[0][1].plan.p
    bounds = [*pairs[0][1].plan.stage_starts, 8]
    for agent, launch in pairs:
        rank = launch.workers[0].rank
        sections = bounds[rank % p + 1] - bounds[rank % p]
        agent.micro_batch_us[rank] = 3000 * launch.plan.micro_batch * sections * (5 if rank == 1 else 1)
        agent.running = [pb.RunningWorker(job_id=launch.job_id, generation=2, rank=rank, step=3)]
    slow = next(agent for agent, launch in pairs if launch.workers[0].rank == 1)
    for agent, launch in pairs:
        stop = await agent.stop(2)
        assert (stop.mode, stop.keep_state) == (pb.STOP_MODE_HOLD_FIRST, True)
        agent.running, agent.micro_batch_us = [], {}
        agent.exited(launch, pb.EXIT_CAUSE_GENERATION_ENDED, held=pb.HeldState(step=3, bytes=1000))
    others = [agent for agent, _ in pairs if agent is not slow]
    launches = [await agent.launch(3) for agent in others]
    assert {(launch.world_size, launch.in_place) for launch in launches} == {(2, True)}
    events = {event["kind"]: event for event in await manager.get("jobs/train/events")}
    assert events["vm_slow"]["vm_id"] == slow.vm_id
    assert events["vm_slow"]["data"]["ratio"] == pytest.approx(5, rel=0.01)
    # Of 600 s, when it is written: it was decided on a moment before.
    left_s = re.search(r"quarantined for ([0-9]+) s", events["vm_quarantined"]["message"])
    assert left_s is not None, events["vm_quarantined"]
    assert 300 < int(left_s[1]) <= 600
    (vm,) = [vm for vm in await manager.get("vms") if vm["id"] == slow.vm_id]
    assert vm["quarantined_until"] is not None
    assert vm["slow_ratio"] is None
    await others[0].close()
    await manager.rest.post(f"vms/{others[0].vm_id}/preempt", json={"notice_s": 0})
    await others[1].launch(4)


@pytest.mark.slow
async def test_a_long_evaluation_is_no_hang(manager: ScriptedManager) -> None:
    # Heartbeats come every 0.1 s at most, so three times the limit goes by.
    flags, beats = ("--hang-minimum-s", "2.5"), 75
    ((agent, launch),) = await start_training(manager, 1, flags=flags)
    agent.evaluating = True
    agent.running = [pb.RunningWorker(job_id=launch.job_id, generation=2, rank=0, step=3)]
    before = agent.beats_acked
    await until(lambda: agent.beats_acked >= before + beats, "a long evaluation")
    assert not agent.commands("stop")
    agent.evaluating = False
    await agent.stop(2)
    stopping = [e for e in await manager.get("jobs/train/events") if e["kind"] == "generation_stopping"]
    assert "hang: no step after 3" in stopping[-1]["message"]


async def test_a_script_that_raises_fails_the_job_with_its_traceback(manager: ScriptedManager) -> None:
    (first, launch), (second, other) = await start_training(manager, 2)
    traceback = "Traceback (most recent call last):\n  train.py\nValueError: my own bug"
    second.exited(other, pb.EXIT_CAUSE_PEER_LOST)
    first.exited(launch, pb.EXIT_CAUSE_SCRIPT_FAILED, traceback)
    job = await manager.job_in("failed")
    assert job["error"] == traceback
    assert job["generation"] == 2
    generations = await manager.get("jobs/train/generations")
    assert "my own bug" in generations[1]["end_reason"]


@pytest.mark.parametrize("restarts", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["is restarted", "fails"])
async def test_after_an_error_on_one_rank_the_others_hold_the_state_if_the_job_is_restarted(
    manager: ScriptedManager, restarts: int
) -> None:
    (first, launch), (second, other) = await start_training(manager, 2, job={"max_restarts_on_errors": restarts})
    first.exited(launch, pb.EXIT_CAUSE_SCRIPT_FAILED, "RuntimeError: CUDA error: an illegal memory access")
    stop = await second.stop(2)
    assert stop.keep_state
    assert stop.store_state is not bool(restarts), "the processes of a job that is over end, and leave it in memory"
    second.exited(other, pb.EXIT_CAUSE_PEER_LOST, held=pb.HeldState(step=3, bytes=1000) if restarts else None)
    if not restarts:
        await manager.job_in("failed")
        return
    for again in [await first.launch(3), await second.launch(3)]:
        assert (again.in_place, again.holders_generation) == (False, 2)
        assert list(again.holders) == [other.workers[0].rank]


async def test_a_killed_manager_adopts_its_vms_and_the_running_generation(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 2)
    pids = {vm["id"]: vm["ref"]["pid"] for vm in await manager.get("vms")}
    manager.kill()
    for agent, launch in pairs:
        await agent.close()
        agent.running = [
            pb.RunningWorker(job_id=launch.job_id, generation=2, rank=w.rank, step=3) for w in launch.workers
        ]
    rank0 = next(pair for pair in pairs if pair[1].workers[0].rank == 0)
    rank0[0].steps(rank0[1], 4)  # done while nobody listened
    await manager.start()
    for agent, _ in pairs:
        assert agent.address == manager.grpc, "agents redial the port that they know"
        await agent.connect()
    await until(lambda: not rank0[0].unacked, "the report to be stored")
    beats = [agent.beats_acked for agent, _ in pairs]
    await until(lambda: all(a.beats_acked > b for (a, _), b in zip(pairs, beats, strict=True)), "heartbeats")
    job = await manager.job_in("running")
    assert (job["step"], job["generation"]) == (4, 2)
    assert {vm["id"]: vm["ref"]["pid"] for vm in await manager.get("vms")} == pids
    for agent, launch in pairs:
        assert not agent.commands("launch")
        assert not agent.commands("stop")
        agent.exited(launch, pb.EXIT_CAUSE_FINISHED)
    await manager.job_in("succeeded")


@pytest.mark.slow
async def test_a_launch_that_a_killed_manager_had_not_sent_is_sent_again(manager: ScriptedManager) -> None:
    await manager.start("--vms", "1")
    await manager.submit()
    (agent,) = await manager.connect_vms(1)
    await agent.launch(1)
    manager.kill()
    await agent.close()
    agent.seen = []  # as if it had never arrived
    await manager.start()
    await agent.connect()
    again = await agent.launch(1)
    assert again.kind == pb.GENERATION_KIND_CALIBRATION
    assert len(await manager.get("jobs/train/generations")) == 1


async def test_a_zombie_worker_is_told_to_stop(manager: ScriptedManager) -> None:
    await manager.start("--vms", "1")
    await until(lambda: list(manager.data_dir.glob("vms/*/vm.json")), "a VM")
    zombie = ScriptedAgent(manager.grpc, "local-1", 20_000)
    manager.agents["local-1"] = zombie
    zombie.running = [pb.RunningWorker(job_id="job-unknown", generation=7, rank=0, step=1)]
    await zombie.connect()
    stop = await zombie.stop(7)
    assert (stop.job_id, stop.mode) == ("job-unknown", pb.STOP_MODE_LEAVE_NOW)


@pytest.mark.parametrize(
    "held", [pytest.param(None, marks=pytest.mark.slow), pb.HeldState(step=3, bytes=1000)], ids=["saved", "held"]
)
async def test_a_notice_leaves_the_vm_out(manager: ScriptedManager, held: pb.HeldState | None) -> None:
    """The other VM holds all that the leaving one does: no rank need save unless it cannot go on in place."""
    pairs = await start_training(manager, 2)
    await manager.rest.put("providers/local", json={"capacity": 0})
    (leaver, _), (stayer, _) = pairs
    leaver.report(preemption_notice=pb.PreemptionNotice(notice_id="n1", seconds_left=29, source="test"))
    for agent, launch in pairs:
        stop = await agent.stop(2)
        assert (stop.mode, stop.keep_state, stop.in_place) == (pb.STOP_MODE_HOLD_FIRST, True, True)
        assert stop.spare is (agent is leaver)
        assert (0 < stop.grace_s < 29) is (agent is leaver), "the other one is not killed because this one goes"
        agent.exited(launch, pb.EXIT_CAUSE_GENERATION_ENDED, held=held if agent is stayer else None)
    launch = await stayer.launch(3)
    assert (launch.world_size, launch.plan.p, launch.plan.d) == (1, 1, 1)
    assert launch.in_place is (held is not None)
    await until(lambda: leaver.commands("drain"), "a drain")
    assert not [m for m in leaver.commands("launch") if m.generation == 3]
    reason = (await manager.get("jobs/train/generations"))[1]["end_reason"]
    assert leaver.vm_id in reason
    assert "notice" in reason


@pytest.mark.parametrize(
    "held", [pytest.param(None, marks=pytest.mark.slow), pb.HeldState(step=3, bytes=1000)], ids=["saved", "held"]
)
async def test_a_new_vm_makes_the_job_grow_with_the_state_that_is_held(
    manager: ScriptedManager, held: pb.HeldState | None
) -> None:
    ((first, launch),) = await start_training(manager, 1)
    await manager.rest.put("fleet", json={"target": 2})
    (second,) = await manager.connect_vms(1)
    stop = await first.stop(2)
    assert (stop.mode, stop.keep_state) == (pb.STOP_MODE_HOLD_FIRST, True)
    assert stop.grace_s > 30, "it may have to save"
    first.exited(launch, pb.EXIT_CAUSE_GENERATION_ENDED, held=held)
    grown = [await first.launch(3), await second.launch(3)]
    assert {(m.world_size, m.in_place) for m in grown} == {(2, held is not None)}
    assert {(m.holders_generation, *m.holders) for m in grown} == {(0,) if held is None else (3, 0)}
    assert [len(agent.commands("start_newcomers")) for agent in (first, second)] == [0, 1]
    assert "growth" in (await manager.get("jobs/train/generations"))[2]["reason"]


async def grow(manager: ScriptedManager, *flags: str) -> list[tuple[ScriptedAgent, pb.StartNewcomers]]:
    """A job on one VM that is to grow into a second one, with new processes on both: the agents, with what they are to
    start ahead."""
    ((first, _),) = await start_training(manager, 1, flags=flags, job={"env": {"VARUNA_IN_PLACE": "0"}})
    first.starts_ahead = False
    await manager.rest.put("fleet", json={"target": 2})
    (second,) = await manager.connect_vms(1)
    second.starts_ahead = False
    return [(agent, await agent.start_ahead(3)) for agent in (first, second)]


async def test_a_job_trains_on_until_the_processes_of_its_next_generation_are_there(manager: ScriptedManager) -> None:
    (first, here), (second, there) = await grow(manager)
    assert here.request == there.request
    ranks = [worker.rank for ahead in (here, there) for worker in ahead.launch.workers]
    assert sorted(ranks) == [0, 1]
    assert (here.launch.world_size, here.launch.secret, here.launch.rendezvous_port) == (2, "", 0)
    first.reach_door(here)
    beats = first.beats_acked
    await until(lambda: first.beats_acked > beats + 3, "some heartbeats")
    assert not first.commands("stop"), "one of the processes is not there yet"
    second.reach_door(there)
    assert (await first.stop(2)).mode == pb.STOP_MODE_HOLD_FIRST
    assert not second.commands("end_newcomers")


@pytest.mark.slow
async def test_processes_that_do_not_come_do_not_keep_a_job_from_growing(manager: ScriptedManager) -> None:
    (first, here), (second, there) = await grow(manager)
    first.reach_door(here)
    second.reach_door(there, fault="it ended with exit code 1 before Varuna(): KeyError: 'x'")
    await first.stop(2)
    (event,) = [e for e in await manager.get("jobs/train/events") if e["kind"] == "generation_stopping"][-1:]
    assert event["message"].endswith(
        f"; its processes start after the stop: the process for rank {there.launch.workers[0].rank} on VM "
        f"{second.vm_id}: it ended with exit code 1 before Varuna(): KeyError: 'x'"
    )


@pytest.mark.slow
async def test_a_process_that_hangs_before_its_door_is_waited_for_only_so_long(manager: ScriptedManager) -> None:
    (first, here), (second, _) = await grow(manager, "--newcomers-wait-s", "0.5")
    first.reach_door(here)
    await first.stop(2)
    (event,) = [e for e in await manager.get("jobs/train/events") if e["kind"] == "generation_stopping"][-1:]
    assert f"1 of 2 processes had not reached Varuna() after 0.5 s (first: on VM {second.vm_id})" in event["message"]


async def test_processes_that_are_no_longer_wanted_end(manager: ScriptedManager) -> None:
    (first, here), (second, _) = await grow(manager)
    first.reach_door(here)
    await manager.rest.post(f"vms/{second.vm_id}/drain")
    await until(lambda: first.commands("end_newcomers"), "the end of the processes that were started ahead")
    assert not first.commands("stop")


@pytest.mark.slow
async def test_a_manager_that_starts_again_finds_the_processes_that_were_started_ahead(
    manager: ScriptedManager,
) -> None:
    (first, here), (second, there) = await grow(manager)
    first.reach_door(here)
    manager.kill()
    for agent in (first, second):
        await agent.close()
    first.running = [pb.RunningWorker(job_id=here.launch.job_id, generation=2, rank=0, step=3)]
    await manager.start()
    for agent in (first, second):
        await agent.connect()
    assert (await second.start_ahead(3)).request == there.request
    assert not first.commands("end_newcomers")
    second.reach_door(there)
    await first.stop(2)


async def test_cancel_stops_the_workers_and_ends_the_job(manager: ScriptedManager) -> None:
    ((agent, launch),) = await start_training(manager, 1)
    assert (await manager.rest.post("jobs/train/cancel")).json()["state"] == "cancelling"
    stop = await agent.stop(2)
    assert stop.mode == pb.STOP_MODE_LEAVE_NOW
    agent.exited(launch, pb.EXIT_CAUSE_GENERATION_ENDED)
    await manager.job_in("cancelled")


async def test_secrets_are_read_for_each_launch_and_go_nowhere_else(
    manager: ScriptedManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VARUNA_MANAGER_SECRET_WANDB", "of-a-variable-zebra-sesame")
    file = manager.data_dir / "secrets" / "hf-token"
    file.parent.mkdir(parents=True)
    file.write_text("of-a-file-zebra-sesame\n")
    references = {"HF_TOKEN": "file:hf-token", "WANDB_API_KEY": "env:WANDB"}
    await manager.start("--vms", "2")
    spec = {"name": "train", "workdir": "/tmp", "run": "true", "global_batch": 8}
    refused = await manager.rest.post("jobs", json={**spec, "secrets": {"A": "file:other"}})
    assert (refused.status_code, "secrets/other" in refused.json()["detail"]) == (422, True)
    written_out = await manager.rest.post("jobs", json={**spec, "secrets": {"A": "of-a-file-zebra-sesame"}})
    assert (written_out.status_code, "of-a-file-zebra-sesame" in written_out.text) == (422, False)
    await manager.submit(secrets=references, resources={"max_gpus": 1})
    agents = await manager.connect_vms(2)
    agent = await until(lambda: next((one for one in agents if one.commands("launch")), None), "a launch")
    (first,) = agent.commands("launch")
    assert first.secrets == {"HF_TOKEN": "of-a-file-zebra-sesame", "WANDB_API_KEY": "of-a-variable-zebra-sesame"}
    assert "of-a-file-zebra-sesame" not in first.environment.values()
    (other,) = (one for one in agents if one is not agent)
    await until(lambda: other.commands("prepare"), "the idle VM's command to prepare")

    file.unlink()
    agent.exited(first, pb.EXIT_CAUSE_KILLED)  # its calibration is to be repeated

    async def waits() -> bool:
        return "secret 'file:hf-token'" in ((await manager.get("jobs/train"))["reason"] or "")

    await until(waits, "the job to wait for its secret")
    file.with_name("part").write_text("rotated-zebra-sesame")
    file.with_name("part").rename(file)  # the manager never reads half of it
    launches = await until(
        lambda: [each for one in agents for each in one.commands("launch") if each.generation == 2], "the next launch"
    )
    assert launches[0].secrets["HF_TOKEN"] == "rotated-zebra-sesame"
    assert (await manager.get("jobs/train"))["spec"]["secrets"] == references

    other_messages = [m for one in agents for m in one.received if m.WhichOneof("body") != "launch"]
    shown = [message.SerializeToString() for message in other_messages]
    for path in ("jobs", "events?limit=10000", "vms", "jobs/train/generations", "../../metrics"):
        shown.append((await manager.rest.get(path)).content)
    shown += [path.read_bytes() for path in manager.data_dir.rglob("*") if path.is_file() and path != file]
    shown.append((manager.data_dir.parent / "manager.log").read_bytes())
    assert not [text for text in shown if b"zebra-sesame" in text]


async def test_a_vm_that_is_not_listed_yet_is_to_dial_again(manager: ScriptedManager) -> None:
    await manager.start()
    hello = pb.AgentMessage(hello=pb.Hello(vm_id="stranger", incarnation="first", host="127.0.0.1", gpus=1))
    async with grpc.aio.insecure_channel(manager.grpc) as channel:
        call = agent_pb2_grpc.AgentServiceStub(channel).Connect(iter([hello]))
        with pytest.raises(grpc.aio.AioRpcError, match="no provider lists VM 'stranger' yet") as raised:
            await anext(aiter(call))
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_events_stream_from_where_the_reader_was(manager: ScriptedManager) -> None:
    await manager.start()
    await manager.submit()
    events = await manager.get("events")
    seen = []
    headers = {"Last-Event-ID": str(events[0]["id"] - 1)}
    async with manager.rest.stream("GET", "events/stream", headers=headers) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if len(seen) == 1:
                    # A reader that stays does not keep the manager from ending at a signal. One signal: another may
                    # come when it has given up its handler.
                    assert manager.process is not None
                    manager.process.terminate()
    assert seen[0]["id"] == events[0]["id"]
    assert await asyncio.to_thread(manager.process.wait, DEADLINE_S) == 0
    log = (manager.data_dir.parent / "manager.log").read_text()
    assert "Traceback" not in log
    assert "left running" in log


@pytest.mark.parametrize(
    ("number", "flags", "vms_stay"),
    [
        (signal.SIGINT, (), False),
        (signal.SIGINT, ("--keep-vms",), True),
        (signal.SIGTERM, (), True),
        (signal.SIGTERM, ("--no-keep-vms",), False),
    ],
)
async def test_local_vms_end_with_ctrl_c_and_stay_when_a_service_is_stopped(
    manager: ScriptedManager, number: signal.Signals, flags: tuple[str, ...], vms_stay: bool
) -> None:
    await manager.start("--vms", "2", *flags)
    await manager.connect_vms(2)
    processes = [psutil.Process(vm["ref"]["pid"]) for vm in await manager.get("vms")]
    assert isinstance(manager.process, ForkedManager)
    manager.process.send_signal(number)
    assert await asyncio.to_thread(manager.process.wait, DEADLINE_S) == 0
    assert [_lives(process) for process in processes] == [vms_stay] * 2
    last = json.loads((manager.data_dir.parent / "manager.log").read_text().splitlines()[-1])
    assert last["event"] == "the manager ended"
    assert last["vms"].startswith("left running" if vms_stay else "local ones ended too")


async def test_vms_that_end_with_their_manager_are_no_losses_for_the_next_one(manager: ScriptedManager) -> None:
    await manager.start("--vms", "2")
    await manager.connect_vms(2)

    async def are_ready() -> bool:
        return len(await manager.get("vms?state=ready")) == 2

    await until(are_ready, "the VMs to be ready")
    assert isinstance(manager.process, ForkedManager)
    manager.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(manager.process.wait, DEADLINE_S) == 0
    await manager.start("--vms", "2")
    old = {*manager.agents}

    async def are_gone() -> bool:
        return old == {vm["id"] for vm in await manager.get("vms?state=gone")}

    await until(are_gone, "the VMs of the first manager to be gone")
    database = Database(f"sqlite:///{manager.data_dir / 'manager.db'}")
    try:
        async with database.read() as session:
            past = await read_lives_summary(session, time.time())
    finally:
        await database.close()
    assert past.joins_s, "they had been there"
    assert not past.losses_at


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


# ---------------------------------------------------------------- with the real agent


async def test_a_command_that_fails_under_a_real_agent_fails_the_job_with_what_it_said(
    manager: ScriptedManager,
) -> None:
    manager.real_agents = True
    await manager.start("--vms", "1")
    await manager.submit(run="echo 'no such model' >&2; exit 3")
    job = await manager.job_in("failed")
    assert "no such model" in job["error"]
    logs = await manager.rest.get("jobs/train/logs")
    assert b"no such model" in logs.content
    generations = await manager.get("jobs/train/generations")
    assert [g["end_cause"] for g in generations] == ["script_failed"], "it is not started again"


async def test_real_workers_outlive_the_manager_and_are_adopted(manager: ScriptedManager) -> None:
    manager.real_agents = True
    await manager.start("--vms", "1")
    pid_file = manager.data_dir / "worker.pid"
    await manager.submit(run=f"echo $$ > {pid_file}; exec sleep 300")
    pid = int(await until(lambda: pid_file.exists() and pid_file.read_text().strip(), "the worker"))
    manager.kill()
    await manager.start()

    async def adopted() -> Any:
        (vm,) = await manager.get("vms")
        return vm["state"] == "ready" and vm["last_heard_s"] is not None

    await until(adopted, "the agent to come back")
    assert psutil.pid_exists(pid)
    assert len(await manager.get("jobs/train/generations")) == 1
    assert (await manager.rest.post("jobs/train/cancel")).status_code == 200
    await manager.job_in("cancelled")
    await until(lambda: not psutil.pid_exists(pid), "the worker to be gone")


async def test_a_real_vm_with_notice_leaves_and_its_worker_with_it(manager: ScriptedManager) -> None:
    manager.real_agents = True
    await manager.start("--vms", "1", "--capacity", "1")
    pid_file = manager.data_dir / "worker.pid"
    await manager.submit(run=f"echo $$ > {pid_file}; exec sleep 300")
    pid = int(await until(lambda: pid_file.exists() and pid_file.read_text().strip(), "the worker"))
    await manager.rest.put("providers/local", json={"capacity": 0})
    (vm,) = await manager.get("vms")
    agent = psutil.Process(vm["ref"]["pid"])
    agent.suspend()  # so that the VM is still there when it is asked again
    for notice_s in (300, 600):  # asked again, the first notice stands
        assert (await manager.rest.post("vms/local-1/preempt", json={"notice_s": notice_s})).status_code == 200
    agent.resume()

    async def gone() -> Any:
        (vm,) = await manager.get("vms")
        return vm if vm["state"] == "gone" else None

    vm = await until(gone, "the VM to leave")
    assert "notice" in vm["reason"]
    assert not psutil.pid_exists(pid)

    async def waits() -> bool:
        job = await manager.get("jobs/train")
        assert job["state"] == "running"
        return "waiting for more" in job["reason"]

    await until(waits, "the job to wait for another VM")
    notices = [e for e in await manager.get("events") if e["kind"] == "preemption_notice"]
    assert len(notices) == 1


async def test_a_generation_has_a_secret_that_its_workers_alone_are_told(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 2)
    (second,) = {launch.secret for _, launch in pairs}
    assert len(second) == 64
    for agent, launch in pairs:
        agent.exited(launch, pb.EXIT_CAUSE_KILLED)
    third = (await pairs[0][0].launch(3)).secret
    assert len({first.secret for agent, _ in pairs for first in agent.commands("launch")} | {second, third}) == 3
    shown = [await manager.rest.get(path) for path in ("jobs", "jobs/train", "jobs/train/generations", "events", "vms")]
    assert all(answer.status_code == 200 for answer in shown)
    everything = "".join(answer.text for answer in shown) + (manager.data_dir.parent / "manager.log").read_text()
    assert second not in everything
    assert third not in everything


async def test_a_job_must_find_the_checkpoints_that_were_recorded(manager: ScriptedManager) -> None:
    pairs = await start_training(manager, 2)
    rank0, first = next((a, m) for a, m in pairs if m.workers[0].rank == 0)
    assert first.committed_step == 0
    for step, url in ((3, first.checkpoint_url), (9, "file:///elsewhere")):
        fact = pb.CheckpointCommitted(
            job_id=first.job_id, generation=2, step=step, url=f"{url}/varuna_ckpt_{step}", total_bytes=9
        )
        rank0.report(checkpoint_committed=fact)
    await until(lambda: not rank0.unacked, "the checkpoints to be stored")
    for agent, launch in pairs:
        agent.exited(launch, pb.EXIT_CAUSE_KILLED)
    again = [(agent, await agent.launch(3)) for agent, _ in pairs]
    assert {launch.committed_step for _, launch in again} == {3}
    for agent, launch in again:
        agent.started(launch, resumed_step=2)
    [event] = await until(
        lambda: manager.get("events?kind=checkpoint_passed_over"), "the event that a checkpoint was passed over"
    )
    assert event["data"] == {"resumed_step": 2, "committed_step": 3}
    assert "goes on from step 2, although step 3 was saved" in event["message"]
