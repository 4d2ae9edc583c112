"""Processes that leave their generation with its state, and take a rank in the next one: the agent's decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from agent_vm import (
    LEASE_S,
    PORT,
    QUIET,
    Vm,
    exits,
    held,
    key,
    killed,
    launch,
    leave,
    of,
    sent,
    survive,
)
from varuna_agent.state import Timings
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.state.hosted_worker import WorkerPhase
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w


def assigned(instructions: Iterable[ins.Instruction]) -> list[tuple[Any, Any]]:
    return [(assign.survivor, assign.key) for assign in of(ins.AssignWorker, instructions)]


def in_place(generation: int = 2, ranks: Iterable[int] = (1,), **changes: Any) -> pb.Launch:
    return launch(generation, ranks=ranks, in_place=True, **changes)


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize(("code", "cause"), [(75, "GENERATION_ENDED"), (76, "PEER_LOST")])
def test_a_rank_whose_process_stays_is_reported_as_ended_after_its_steps(code: int, cause: str) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.step(key(), 6)
    vm.step(key(), 7)
    instructions = leave(vm, key(), code)
    facts = [m.message.report.WhichOneof("fact") for m in of(ins.SendMessage, instructions)]
    assert facts == ["steps_completed", "worker_exited"]
    assert exits(instructions) == [(1, 1, cause)]
    (exited,) = sent(instructions, "worker_exited")
    assert (exited.exit_code, exited.held.step, exited.held.bytes) == (code, 7, 100)
    assert (vm.phases(), held(vm)) == ({}, [key()])
    vm.handle(ev.StreamClosed("gone"))
    vm.connect()
    assert list(sent(vm.instructions, "hello")[-1].workers) == []


def test_a_survivor_names_the_peer_that_it_could_not_reach() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_worker_message(key(), unreached=pb.Unreached(rank=3, error="timed out"))
    (exited,) = sent(leave(vm, key()), "worker_exited")
    assert exited.unreached.rank == 3


@pytest.mark.parametrize("stays", [True, False])
def test_a_worker_is_reported_with_what_its_script_does_against_going_on_in_place(stays: bool) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_worker_message(key(), script_obstacle=w.ScriptObstacle(reason="it accumulates\0"))
    (exited,) = sent(leave(vm, key()) if stays else vm.ended(key(), 76), "worker_exited")
    assert (exited.script_obstacle, exited.HasField("held")) == ("it accumulates\N{REPLACEMENT CHARACTER}", stays)


@pytest.mark.parametrize("code", [0, 1, -9, 255])
def test_only_the_codes_of_leaving_are_taken(code: int) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    assert leave(vm, key(), code) == []
    assert exits(vm.ended(key(), 0)) == [(1, 1, "FINISHED")]


def test_a_worker_that_is_to_be_killed_does_not_stay() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_message(stop=pb.Stop(job_id="job", generation=1, grace_s=0, keep_state=True))
    assert leave(vm, key(), 75) == []
    assert exits(vm.ended(key(), -9)) == [(1, 1, "KILLED")]


@pytest.mark.parametrize("keep_state", [True, False])
def test_a_stop_says_whether_processes_may_stay(keep_state: bool) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    stop = pb.Stop(job_id="job", generation=1, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=5, keep_state=keep_state)
    assert of(ins.SendLeave, vm.receive_message(stop=stop))[0].keep_state is keep_state
    instructions = leave(vm, key(), 75)
    assert killed(instructions) == ([] if keep_state else [key()])
    ended = vm.ended(key(), -9)
    (exited,) = sent([*instructions, *ended], "worker_exited")
    assert (exited.HasField("held"), exited.cause) == (keep_state, pb.EXIT_CAUSE_GENERATION_ENDED)
    assert bool(sent(instructions, "worker_exited")) is keep_state, (
        "a process that may not stay has ended before its exit"
    )


def test_a_second_stop_can_only_forbid_staying() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    for keep_state in (True, False, True):
        vm.receive_message(stop=pb.Stop(job_id="job", generation=1, mode=1, grace_s=5, keep_state=keep_state))
    assert killed(leave(vm, key(), 75)) == [key()]


def test_a_checkpoint_that_was_under_way_is_reported_after_all() -> None:
    vm = survive()
    (committed,) = sent(
        vm.receive_worker_message(key(), checkpoint_done=w.CheckpointDone(step=5)), "checkpoint_committed"
    )
    assert (committed.generation, committed.step) == (1, 5)
    assert vm.step(key(), 8) == []


def test_a_survivors_rendezvous_port_is_given_back() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1, ranks=[0]))
    vm.ready(key(1, 0))
    assert of(ins.ReleaseRendezvousPort, leave(vm, key(1, 0))) == [ins.ReleaseRendezvousPort(PORT)]


# ---------------------------------------------------------------- the next rank


def test_a_launch_in_place_gives_each_survivor_its_rank() -> None:
    vm = survive(ranks=(1, 2))
    instructions = vm.receive_message(launch=in_place(ranks=[5, 3], secret="5ec3e7"))
    assert assigned(instructions) == [(key(1, 1), key(2, 5)), (key(1, 2), key(2, 3))]
    assert of(ins.StartWorker, instructions) == killed(instructions) == held(vm) == []
    (first, _) = of(ins.AssignWorker, instructions)
    assert (first.start.environment.rank, first.start.environment.device) == (5, "cuda:0")
    assert vm.state.is_expected(key(2, 5))
    assert of(ins.AdmitWorker, vm.handle(ev.WorkerConnected(key(2, 5), 77))) == [], "it has the secret"
    ready = w.WorkerReady(resumed_step=7, kept_bytes=100)
    (started,) = sent(vm.receive_worker_message(key(2, 5), ready=ready), "worker_started")
    assert (started.generation, started.rank, started.resumed_step, started.kept_bytes) == (2, 5, 7, 100)
    assert exits(vm.ended(key(2, 5), 1)) == [(2, 5, "SCRIPT_FAILED")]
    assert exits(vm.instructions).count((1, 1, "PEER_LOST")) == 1


def test_a_rank_0_in_place_claims_its_port() -> None:
    vm = survive()
    instructions = vm.receive_message(launch=in_place(ranks=[0]))
    assert [type(i) for i in instructions[-2:]] == [ins.ClaimRendezvousPort, ins.AssignWorker]
    assert instructions[-1].start.rendezvous_port == PORT  # type: ignore[union-attr]


def test_a_process_can_go_on_again_and_again() -> None:
    vm = survive()
    for generation in range(2, 5):
        vm.receive_message(launch=in_place(generation))
        vm.ready(key(generation))
        leave(vm, key(generation))
    assert exits(vm.instructions) == [(generation, 1, "PEER_LOST") for generation in range(1, 5)]
    assert held(vm) == [key(4)]


def test_a_loss_during_a_reshape_keeps_what_is_held() -> None:
    vm = survive()
    vm.receive_message(launch=in_place())
    vm.handle(ev.WorkerConnected(key(2), 77))
    assert sent(leave(vm, key(2)), "worker_exited")[0].HasField("held"), "before it was ready"
    assert assigned(vm.receive_message(launch=in_place(3))) == [(key(2), key(3))]


def test_a_rank_without_a_survivor_is_refused_and_the_others_go_on() -> None:
    vm = survive(ranks=(1, 2))
    vm.ended(key(1, 1), -9)
    instructions = vm.receive_message(launch=in_place(ranks=[0, 3]))
    assert exits(instructions) == [(2, 0, "LAUNCH_REFUSED")]
    assert "no process on device 0 holds the state of job job" in sent(instructions, "worker_exited")[0].error_text
    assert of(ins.ReleaseRendezvousPort, instructions) == [ins.ReleaseRendezvousPort(PORT)]
    assert assigned(instructions) == [(key(1, 2), key(2, 3))]


def test_a_stale_port_leaves_the_survivors_where_they_are() -> None:
    vm = survive()
    instructions = vm.receive_message(launch=in_place(ranks=[0], rendezvous_port=1))
    (exited,) = sent(instructions, "worker_exited")
    assert (exited.cause, exited.held.step) == (pb.EXIT_CAUSE_LAUNCH_REFUSED, 7)
    assert held(vm) == [key(1)]


def test_another_jobs_survivor_is_no_help() -> None:
    vm = survive()
    instructions = vm.receive_message(launch=in_place(1, job_id="other"))
    assert exits(instructions) == [(1, 1, "LAUNCH_REFUSED")]
    assert held(vm) == [key(1)]


def test_a_survivor_that_does_not_answer_is_killed_and_its_rank_refused() -> None:
    vm = survive()
    vm.receive_message(launch=in_place())
    assert vm.state.next_deadline() is not None
    assert killed(vm.tick(at=109.9)) == []
    assert killed(vm.tick(at=110.0)) == [key(2)]
    (exited,) = sent(vm.ended(key(2), -9), "worker_exited")
    assert (exited.cause, exited.HasField("held")) == (pb.EXIT_CAUSE_LAUNCH_REFUSED, False)
    assert exited.error_text == "its process did not take the rank within 10 s"


def test_a_survivor_that_answers_has_all_the_time_to_start() -> None:
    vm = survive()
    vm.receive_message(launch=in_place())
    vm.handle(ev.WorkerConnected(key(2), 77))
    assert killed(vm.tick(at=111.0)) == []


@pytest.mark.parametrize("code", [-9, 1, 75])
def test_a_survivor_that_ends_before_it_takes_its_rank_has_that_rank_refused(code: int) -> None:
    vm = survive()
    vm.receive_message(launch=in_place())
    (exited,) = sent(vm.ended(key(2), code, "last words"), "worker_exited")
    assert exited.cause == pb.EXIT_CAUSE_LAUNCH_REFUSED
    assert exited.error_text == f"last words\nits process ended with exit code {code} before it took the rank"


def test_a_survivor_that_had_ended_when_it_was_assigned() -> None:
    vm = survive()
    vm.receive_message(launch=in_place())
    assert exits(vm.handle(ev.ProcessNotStarted(key(2), "it has ended"))) == [(2, 1, "LAUNCH_REFUSED")]
    assert vm.ended(key(1), -9) == []
    assert vm.phases() == {}


def test_a_stop_that_overtakes_the_answer_keeps_the_state() -> None:
    vm = survive()
    vm.receive_message(launch=in_place())
    stop = pb.Stop(job_id="job", generation=2, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=5, keep_state=True)
    assert killed(vm.receive_message(stop=stop)) == []
    (command,) = of(ins.SendLeave, vm.handle(ev.WorkerConnected(key(2), 77)))
    assert (command.key, command.keep_state) == (key(2), True)
    assert sent(leave(vm, key(2), 75), "worker_exited")[0].held.step == 7


def test_a_launch_in_place_waits_for_the_worker_that_is_about_to_leave() -> None:
    vm = Vm(timings=QUIET)
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    instructions = vm.receive_message(launch=in_place())
    assert [(command.key, command.keep_state) for command in of(ins.SendLeave, instructions)] == [(key(1), True)]
    assert vm.phases() == {key(1): WorkerPhase.LEAVING, key(2): WorkerPhase.WAITING}
    instructions = leave(vm, key(1), 75)
    assert exits(instructions) == [(1, 1, "GENERATION_ENDED")]
    assert assigned(instructions) == [(key(1), key(2))]


def test_a_launch_in_place_does_not_wait_for_ever() -> None:
    vm = Vm(timings=replace(QUIET, supersede_in_place_grace_s=2.0))
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    vm.receive_message(launch=in_place())
    assert killed(vm.tick(at=101.0)) == [], "it may be finishing its share of the step"
    instructions = vm.tick(at=102.0)
    assert (killed(instructions), exits(instructions)) == ([key(1)], [(2, 1, "LAUNCH_REFUSED")])
    assert exits(vm.ended(key(1), -9)) == [(1, 1, "KILLED")]


def test_survivors_wait_longer_where_others_may_take_long_to_leave() -> None:
    vm = survive()
    release_at = vm.state.survivors[0].release_at
    for _ in range(2):  # a repetition adds nothing
        vm.receive_message(stop=pb.Stop(job_id="job", generation=1, grace_s=50.0, keep_state=True))
        assert vm.state.survivors[0].release_at == release_at + 50.0
    vm.receive_message(stop=pb.Stop(job_id="job", generation=1, grace_s=5.0, keep_state=True))
    assert vm.state.survivors[0].release_at == release_at + 50.0


# ---------------------------------------------------------------- ends of survivors


def test_a_survivor_ends_in_silence() -> None:
    vm = survive()
    assert vm.ended(key(1), 1) == []
    assert vm.state.survivors == ()


def test_a_survivor_without_a_connection_is_of_no_use() -> None:
    vm = survive()
    assert killed(vm.handle(ev.WorkerDisconnected(key(1)))) == [key(1)]
    assert exits(vm.receive_message(launch=in_place())) == [(2, 1, "LAUNCH_REFUSED")]


@pytest.mark.parametrize("job", ["job", "other"])
def test_on_a_gpu_a_new_process_starts_when_the_survivor_is_gone(job: str) -> None:
    vm = survive("cuda")
    instructions = vm.receive_message(launch=launch(2, job_id=job))
    assert (killed(instructions), of(ins.StartWorker, instructions)) == ([key(1)], [])
    assert [start.key for start in of(ins.StartWorker, vm.ended(key(1), -9))] == [key(2, job_id=job)]


@pytest.mark.parametrize("job", ["job", "other"])
def test_on_the_cpu_a_new_process_starts_beside_the_end_of_the_survivor(job: str) -> None:
    vm = survive("cpu")
    instructions = vm.receive_message(launch=launch(2, job_id=job))
    assert killed(instructions) == [key(1)]
    assert [start.key for start in of(ins.StartWorker, instructions)] == [key(2, job_id=job)]
    assert vm.ended(key(1), -9) == []


def test_a_device_that_is_not_needed_keeps_another_jobs_survivor() -> None:
    vm = survive(ranks=(1, 2))
    assert killed(vm.receive_message(launch=launch(1, job_id="other"))) == [key(1, 1)]
    assert held(vm) == [key(1, 2)]
    elsewhere = launch(2, workers=[pb.WorkerAssignment(rank=1, local_rank=3)])
    assert killed(vm.receive_message(launch=elsewhere)) == [key(1, 2)], "its job starts from a checkpoint"


def test_a_worker_does_not_stay_on_a_device_for_which_another_waits() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    vm.receive_message(stop=pb.Stop(job_id="job", generation=1, mode=1, grace_s=5, keep_state=True))
    vm.receive_message(launch=launch(1, job_id="other"))
    assert killed(leave(vm, key(1), 75)) == [key(1)]
    ended = vm.ended(key(1), -9)
    (exited,) = sent(ended, "worker_exited")
    assert not exited.HasField("held")
    assert [start.key.job_id for start in of(ins.StartWorker, ended)] == ["other"]


def test_on_the_cpu_a_worker_starts_beside_the_end_of_one_that_may_not_stay() -> None:
    vm = Vm(device="cpu")
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    vm.receive_message(
        stop=pb.Stop(job_id="job", generation=1, mode=pb.STOP_MODE_SAVE_FIRST, grace_s=5, keep_state=True)
    )
    assert of(ins.StartWorker, vm.receive_message(launch=launch(1, job_id="other"))) == []
    instructions = leave(vm, key(1), 75)
    assert killed(instructions) == [key(1)]
    assert [start.key.job_id for start in of(ins.StartWorker, instructions)] == ["other"]


@pytest.mark.parametrize("mode", [pb.STOP_MODE_SAVE_FIRST, pb.STOP_MODE_LEAVE_NOW])
def test_on_the_cpu_a_worker_starts_when_another_is_to_leave_at_once_or_is_killed(mode: pb.StopMode.ValueType) -> None:
    vm = Vm(device="cpu")
    vm.receive_message(launch=launch(1))
    vm.ready(key(1))
    vm.receive_message(stop=pb.Stop(job_id="job", generation=1, mode=pb.STOP_MODE_SAVE_FIRST, grace_s=5))
    vm.receive_message(launch=launch(1, job_id="other"))
    instructions = vm.receive_message(stop=pb.Stop(job_id="job", generation=1, mode=mode, grace_s=5))
    if mode == pb.STOP_MODE_SAVE_FIRST:
        instructions = vm.tick(at=105.0)
    assert [start.key.job_id for start in of(ins.StartWorker, instructions)] == ["other"]


def test_a_survivor_waits_only_so_long() -> None:
    vm = survive()
    vm.now = 159.0
    (heartbeat,) = sent(vm.handle(ev.Tick()), "heartbeat")
    vm.receive_message(ack=pb.Ack(heartbeat_sequence=heartbeat.sequence))
    vm.now = 218.0
    (heartbeat,) = sent(vm.handle(ev.Tick()), "heartbeat")
    vm.receive_message(ack=pb.Ack(heartbeat_sequence=heartbeat.sequence))
    assert of(ins.SendStore, vm.tick(at=219.9)) == []
    assert of(ins.SendStore, vm.tick(at=220.0)) == [ins.SendStore(key(1))]
    assert killed(vm.tick(at=249.9)) == []
    assert killed(vm.tick(at=250.0)) == [key(1)], "it has not stored its state in time"
    assert killed(vm.tick(at=251.0)) == []


def test_a_survivor_that_may_leave_nothing_in_memory_is_killed() -> None:
    vm = survive(timings=replace(QUIET, keep_memory_s=0.0))
    for at in (159.0, 200.0):
        instructions = vm.tick(at=at)
        assert killed(instructions) == []
        (heartbeat,) = sent(instructions, "heartbeat")
        vm.receive_message(ack=pb.Ack(heartbeat_sequence=heartbeat.sequence))
    instructions = vm.tick(at=220.0)
    assert (killed(instructions), of(ins.SendStore, instructions)) == ([key(1)], [])


def test_a_survivor_whose_end_cannot_be_read_is_forgotten_as_any_other() -> None:
    vm = survive()
    vm.receive_message(launch=launch(2, job_id="other"))
    assert vm.handle(ev.ProcessNotStarted(key(1), "Too many open files"))[0] == vm.state.workers[0].start
    assert vm.state.survivors == ()
    assert vm.handle(ev.ProcessNotStarted(key(1), "Too many open files")) == [], "it has no such worker any longer"


def test_no_process_stays_where_none_is_to_be_kept() -> None:
    vm = Vm(timings=Timings(keep_survivors_s=0.0))
    vm.receive_message(launch=launch())
    vm.ready(key())
    assert killed(leave(vm, key())) == [key()]
    (exited,) = sent(vm.ended(key(), -9), "worker_exited")
    assert (exited.HasField("held"), exited.cause) == (False, pb.EXIT_CAUSE_PEER_LOST)


@pytest.mark.parametrize(
    ("generation", "keep_state", "ends"), [(1, False, True), (2, False, True), (1, True, False), (0, False, False)]
)
def test_a_stop_after_which_the_job_does_not_go_on_ends_survivors(
    generation: int, keep_state: bool, ends: bool
) -> None:
    vm = survive()
    instructions = vm.receive_message(
        stop=pb.Stop(job_id="job", generation=generation, mode=1, grace_s=5, keep_state=keep_state)
    )
    assert killed(instructions) == ([key(1)] if ends else [])


def test_survivors_end_with_the_lease() -> None:
    vm = survive()
    vm.handle(ev.StreamClosed("gone"))
    assert vm.state.next_deadline() == 100.0 + LEASE_S
    assert killed(vm.tick(at=160.0)) == [key(1)]


def test_a_drained_agent_ends_its_survivors_and_waits_for_their_ends() -> None:
    vm = survive()
    vm.receive_message(ack=pb.Ack(reports_through=99))
    instructions = vm.receive_message(drain=pb.Drain())
    assert (killed(instructions), of(ins.ExitAgent, instructions)) == ([key(1)], [])
    assert len(of(ins.ExitAgent, vm.ended(key(1), -9))) == 1


def test_no_process_stays_on_a_drained_vm() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_message(drain=pb.Drain())
    assert killed(leave(vm, key())) == [key()]
    (exited,) = sent(vm.ended(key(), -9), "worker_exited")
    assert (exited.HasField("held"), exited.cause) == (False, pb.EXIT_CAUSE_PEER_LOST)


def test_an_agent_that_is_asked_to_end_ends_its_survivors() -> None:
    vm = survive()
    assert killed(vm.handle(ev.TerminationRequested("SIGTERM"))) == [key(1)]
    assert of(ins.ExitAgent, vm.tick(at=105.0)) == []
    vm.ended(key(1), -9)
    assert len(of(ins.ExitAgent, vm.tick(at=106.0))) == 1
