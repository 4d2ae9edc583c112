"""Processes that give the state of their generation to the new processes of the next one: the agent's decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from agent_vm import LEASE_S, QUIET, Vm, exits, held, key, killed, launch, leave, of, sent, survive
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.state.hosted_worker import WorkerPhase
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w

DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])


def asked(instructions: Iterable[ins.Instruction]) -> list[Any]:
    return [ask.key for ask in of(ins.AskToGive, instructions)]


def started(instructions: Iterable[ins.Instruction]) -> list[Any]:
    return [start.key for start in of(ins.StartWorker, instructions)]


def with_holders(
    generation: int = 2, ranks: Iterable[int] = (1,), holders: Iterable[int] = (1,), of_generation: int = 1, **more: Any
) -> pb.Launch:
    return launch(generation, ranks=ranks, holders=holders, holders_generation=of_generation, **more)


def answer(vm: Vm, holder: Any) -> list[ins.Instruction]:
    return vm.receive_worker_message(holder, giving_state=w.GivingState(host_bytes=90))


def give(device: str = "cuda", **options: Any) -> Vm:
    """A VM with a holder of generation 1 that gives to generation 2, whose rank 1 has started."""
    vm = survive(device, **options)
    vm.receive_message(launch=with_holders())
    answer(vm, key(1))
    return vm


def stop(
    generation: int, *, keep_state: bool, mode: pb.StopMode.ValueType = pb.STOP_MODE_LEAVE_NOW, **fields: bool
) -> pb.Stop:
    return pb.Stop(job_id="job", generation=generation, mode=mode, grace_s=5, keep_state=keep_state, **fields)


def stay_in_touch(vm: Vm, until: float) -> None:
    """The lease is renewed until then."""
    while vm.now < until:
        vm.now = min(vm.now + LEASE_S / 2, until)
        for heartbeat in sent(vm.handle(ev.Tick()), "heartbeat"):
            vm.receive_message(ack=pb.Ack(heartbeat_sequence=heartbeat.sequence))


# ---------------------------------------------------------------- being asked


@pytest.mark.parametrize("gives_only", [True, False])
def test_a_rank_that_leaves_reports_whether_its_process_can_only_give(gives_only: bool) -> None:
    vm = survive(gives_only=gives_only)
    (exited,) = sent(vm.instructions, "worker_exited")
    assert (exited.held.step, exited.held.bytes, exited.held.gives_only) == (7, 100, gives_only)
    assert held(vm) == [key(1)]


def test_a_process_that_can_only_give_takes_no_rank() -> None:
    vm = survive(gives_only=True)
    assert exits(vm.receive_message(launch=launch(2, in_place=True))) == [(2, 1, "LAUNCH_REFUSED")]
    assert held(vm) == [key(1)]


def test_the_survivors_that_a_launch_names_are_asked_and_the_others_of_the_job_end() -> None:
    vm = survive("cpu", ranks=(1, 2, 3))
    instructions = vm.receive_message(launch=with_holders(ranks=[0, 1], holders=[3, 1, 7], secret="5ec3e7"))
    assert (asked(instructions), killed(instructions)) == ([key(1, 1), key(1, 3)], [key(1, 2)])
    assert started(instructions) == [key(2, 0), key(2, 1)]
    for start in of(ins.StartWorker, instructions):
        assert start.environment.holders == (3, 1, 7)
    _, third = of(ins.AskToGive, instructions)
    assert (third.environment.job_id, third.environment.generation) == ("job", 2)
    assert (third.environment.rank, third.environment.local_rank, third.environment.world_size) == (3, 2, 8)
    assert (third.environment.secret, third.environment.holders) == ("5ec3e7", (3, 1, 7))
    assert "5ec3e7" not in repr(third)


def test_holders_of_another_generation_or_job_are_not_meant() -> None:
    for changes in ({"of_generation": 0}, {"of_generation": 2}, {"job_id": "other"}):
        vm = survive()
        instructions = vm.receive_message(launch=with_holders(**changes))
        assert (asked(instructions), killed(instructions)) == ([], [key(1)])


def test_a_launch_whose_holders_are_all_elsewhere() -> None:
    vm = Vm()
    (start,) = of(ins.StartWorker, vm.receive_message(launch=with_holders(holders=[4, 5])))
    assert start.environment.holders == (4, 5)


def test_a_vm_without_ranks_of_the_generation_can_give() -> None:
    vm = survive()
    assert asked(vm.receive_message(launch=with_holders(workers=[]))) == [key(1)]


def test_a_launch_in_place_has_no_holders() -> None:
    vm = survive()
    instructions = vm.receive_message(launch=with_holders(in_place=True))
    (assign,) = of(ins.AssignWorker, instructions)
    assert (asked(instructions), assign.start.environment.holders) == ([], ())


def test_a_killed_survivor_is_not_asked() -> None:
    vm = survive("cpu")
    vm.handle(ev.WorkerDisconnected(key(1)))
    instructions = vm.receive_message(launch=with_holders())
    assert (asked(instructions), killed(instructions), started(instructions)) == ([], [], [key(2)])


def test_a_launch_with_a_stale_port_leaves_the_holders_where_they_are() -> None:
    vm = survive()
    instructions = vm.receive_message(launch=with_holders(ranks=[0], rendezvous_port=1))
    assert (asked(instructions), killed(instructions), exits(instructions)) == ([], [], [(2, 0, "LAUNCH_REFUSED")])
    assert asked(vm.receive_message(launch=with_holders(3))) == [key(1)]


# ---------------------------------------------------------------- devices


def test_on_the_cpu_new_workers_start_beside_their_holders() -> None:
    vm = survive("cpu")
    assert started(vm.receive_message(launch=with_holders())) == [key(2)]
    assert started(answer(vm, key(1))) == []
    assert held(vm) == [key(1)]


def test_on_a_gpu_a_worker_starts_when_the_holder_has_freed_the_device() -> None:
    vm = survive(ranks=(1, 2))
    instructions = vm.receive_message(launch=with_holders(ranks=[3, 4], holders=[1, 2]))
    assert (asked(instructions), started(instructions)) == ([key(1, 1), key(1, 2)], [])
    assert started(answer(vm, key(1, 1))) == []
    assert started(answer(vm, key(1, 2))) == [key(2, 3), key(2, 4)]
    assert held(vm) == [key(1, 1), key(1, 2)]


def test_on_a_gpu_a_worker_starts_when_the_holder_has_ended_instead() -> None:
    vm = survive()
    vm.receive_message(launch=with_holders())
    assert started(vm.ended(key(1), -9)) == [key(2)]


def test_a_holder_on_a_device_that_no_worker_needs_delays_none() -> None:
    vm = survive(ranks=(1, 2))
    elsewhere = [pb.WorkerAssignment(rank=1, local_rank=3)]
    instructions = vm.receive_message(launch=with_holders(workers=elsewhere, holders=[1, 2]))
    assert (asked(instructions), started(instructions)) == ([key(1, 1), key(1, 2)], [key(2)])


@DEVICES
def test_another_job_that_needs_the_device_ends_the_holder(device: str) -> None:
    vm = survive(device, ranks=(1, 2))
    vm.receive_message(launch=with_holders(workers=[pb.WorkerAssignment(rank=1, local_rank=3)], holders=[1, 2]))
    answer(vm, key(1, 1))
    answer(vm, key(1, 2))
    instructions = vm.receive_message(launch=launch(1, job_id="other"))
    assert (killed(instructions), started(instructions)) == ([key(1, 1)], [key(1, job_id="other")])
    assert held(vm) == [key(1, 2)]


# ---------------------------------------------------------------- while they give


def test_a_holder_that_does_not_answer_is_killed() -> None:
    vm = survive()
    vm.receive_message(launch=with_holders())
    stay_in_touch(vm, 159.9)
    assert held(vm) == [key(1)]
    assert killed(vm.tick(at=160.0)) == [key(1)]
    assert answer(vm, key(1)) == [], "too late"
    assert started(vm.ended(key(1), -9)) == [key(2)]
    assert exits(vm.instructions) == [(1, 1, "PEER_LOST")]


def test_a_holder_gives_for_as_long_as_the_generation_has_workers_here() -> None:
    """They may need its state hours later: it comes when the script has prepared everything."""
    vm = give("cpu")
    stay_in_touch(vm, 5000.0)
    assert held(vm) == [key(1)]
    vm.ended(key(2), 1)
    stay_in_touch(vm, 5119.0)
    assert held(vm) == [key(1)]
    vm.tick(at=5120.0)
    assert key(1) in killed(vm.instructions)


def test_a_holder_gives_to_other_vms_for_as_long_as_a_survivor_waits() -> None:
    vm = survive()
    stay_in_touch(vm, 150.0)
    vm.receive_message(launch=with_holders(workers=[]))
    vm.now = 159.0
    answer(vm, key(1))
    stay_in_touch(vm, 269.9)
    assert held(vm) == [key(1)]
    assert killed(vm.tick(at=270.0)) == [key(1)]
    reason = of(ins.KillWorker, vm.instructions)[-1].reason
    assert reason == "its state was not taken within 120 s"


@pytest.mark.parametrize("is_asked", [True, False])
def test_only_a_holder_that_was_asked_can_answer(is_asked: bool) -> None:
    vm = survive()
    if is_asked:
        vm.receive_message(launch=with_holders())
        answer(vm, key(1))
    deadline = vm.state.next_deadline()
    vm.now += 0.5
    assert answer(vm, key(1)) == []
    assert vm.state.next_deadline() == deadline


def test_a_worker_has_nothing_to_give() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    assert answer(vm, key()) == []
    assert vm.phases() == {key(): WorkerPhase.READY}


def test_where_the_state_came_from_is_reported() -> None:
    vm = give()
    vm.handle(ev.WorkerConnected(key(2), 77))
    ready = w.WorkerReady(resumed_step=7, peer_bytes=60, late_bytes=20, store_bytes=40)
    (fact,) = sent(vm.receive_worker_message(key(2), ready=ready), "worker_started")
    assert (fact.kept_bytes, fact.peer_bytes, fact.late_bytes, fact.store_bytes) == (0, 60, 20, 40)


@DEVICES
def test_the_first_step_of_the_generation_ends_its_holders(device: str) -> None:
    vm = give(device, ranks=(1,))
    vm.ready(key(2))
    assert held(vm) == [key(1)], "others may still load"
    assert killed(vm.step(key(2), 8)) == [key(1)]
    assert killed(vm.step(key(2), 9)) == []
    assert vm.ended(key(1), -9) == []


def test_a_survivor_without_a_rank_ends_with_the_first_step_of_the_generation() -> None:
    vm = survive(ranks=(1, 2))
    vm.receive_message(launch=launch(2, in_place=True))
    vm.ready(key(2))
    assert held(vm) == [key(1, 2)]
    assert killed(vm.step(key(2), 8)) == [key(1, 2)]


def test_a_step_of_its_own_generation_does_not_end_a_survivor() -> None:
    vm = Vm()
    vm.receive_message(launch=launch(1, ranks=[1, 2]))
    vm.ready(key(1, 1))
    vm.ready(key(1, 2))
    leave(vm, key(1, 1))
    assert killed(vm.step(key(1, 2), 8)) == []


def test_steps_of_another_generation_or_job_end_no_holder() -> None:
    vm = survive("cpu", ranks=(1, 2))
    vm.receive_message(launch=launch(7, ranks=[1], job_id="other", workers=[pb.WorkerAssignment(rank=1, local_rank=3)]))
    vm.ready(key(7, job_id="other"))
    vm.receive_message(launch=with_holders(holders=[1, 2]))
    vm.ready(key(2))
    vm.receive_message(launch=with_holders(3, holders=[1, 2]))
    vm.step(key(7, job_id="other"), 1)
    vm.step(key(2), 8)
    assert held(vm) == [key(1, 1), key(1, 2)], "they give to generation 3 now"


def test_the_end_of_a_holder_is_not_reported() -> None:
    vm = give()
    reports = len(vm.state.unacknowledged)
    assert killed(vm.handle(ev.WorkerDisconnected(key(1)))) == [key(1)]
    assert vm.ended(key(1), 75) == []
    assert (vm.state.survivors, len(vm.state.unacknowledged)) == ((), reports)


def test_a_checkpoint_that_was_under_way_is_reported_by_a_holder() -> None:
    vm = give()
    (committed,) = sent(
        vm.receive_worker_message(key(1), checkpoint_done=w.CheckpointDone(step=5)), "checkpoint_committed"
    )
    assert (committed.generation, committed.step) == (1, 5)


# ---------------------------------------------------------------- a second loss


@DEVICES
def test_a_second_launch_asks_the_same_holders_again(device: str) -> None:
    vm = give(device)
    vm.handle(ev.WorkerConnected(key(2), 77))
    instructions = vm.receive_message(stop=stop(2, keep_state=True))
    assert killed(instructions) == []
    vm.ended(key(2), 76)
    instructions = vm.receive_message(launch=with_holders(3))
    assert (asked(instructions), killed(instructions), started(instructions)) == ([key(1)], [], [key(3)]), (
        "its device is free already"
    )
    assert of(ins.AskToGive, instructions)[0].environment.generation == 3
    stay_in_touch(vm, 105.0)
    assert killed(answer(vm, key(1))) == []
    vm.ready(key(3))
    assert killed(vm.step(key(3), 8)) == [key(1)]


def test_a_second_launch_while_the_device_is_in_use_waits_for_it() -> None:
    vm = survive()
    vm.receive_message(launch=with_holders())
    instructions = vm.receive_message(launch=with_holders(3))
    assert (asked(instructions), started(instructions), exits(instructions)) == (
        [key(1)],
        [],
        [(2, 1, "GENERATION_ENDED")],
    )
    assert started(answer(vm, key(1))) == [key(3)]


def test_a_holder_that_does_not_answer_the_second_time_is_killed() -> None:
    vm = give("cpu")
    vm.now = 105.0
    vm.receive_message(launch=with_holders(3))
    stay_in_touch(vm, 164.9)
    assert held(vm) == [key(1)]
    assert key(1) in killed(vm.tick(at=165.0))


@pytest.mark.parametrize(
    "again", [launch(3), launch(3, in_place=True), with_holders(3, of_generation=2), with_holders(3, holders=[2])]
)
def test_a_second_launch_that_does_not_name_them_ends_its_holders(again: pb.Launch) -> None:
    vm = give()
    vm.ended(key(2), 76)
    instructions = vm.receive_message(launch=again)
    assert (asked(instructions), killed(instructions)) == ([], [key(1)])


def test_a_worker_that_leaves_beside_a_holder_takes_the_next_rank() -> None:
    vm = give("cpu")
    vm.ready(key(2))
    leave(vm, key(2))
    assert held(vm) == [key(1), key(2)]
    instructions = vm.receive_message(launch=launch(3, in_place=True))
    (assign,) = of(ins.AssignWorker, instructions)
    assert (assign.survivor, killed(instructions)) == (key(2), [key(1)])


def test_a_worker_that_leaves_beside_a_holder_can_give_itself() -> None:
    vm = give("cpu")
    vm.ready(key(2))
    leave(vm, key(2))
    instructions = vm.receive_message(launch=with_holders(3, of_generation=2))
    assert (asked(instructions), killed(instructions)) == ([key(2)], [key(1)])


# ---------------------------------------------------------------- ends


@DEVICES
@pytest.mark.parametrize(
    ("generation", "keep_state", "ends"), [(2, False, True), (3, False, True), (2, True, False), (1, False, False)]
)
def test_a_stop_after_which_the_job_does_not_go_on_ends_holders(
    device: str, generation: int, keep_state: bool, ends: bool
) -> None:
    vm = give(device)
    instructions = vm.receive_message(stop=stop(generation, keep_state=keep_state))
    assert (key(1) in killed(instructions)) is ends


@DEVICES
def test_a_stop_that_waits_for_a_save_lets_holders_give_what_is_to_be_saved(device: str) -> None:
    vm = give(device)
    vm.ready(key(2))
    assert killed(vm.receive_message(stop=stop(2, keep_state=False, mode=pb.STOP_MODE_SAVE_FIRST))) == []
    assert key(1) in killed(vm.step(key(2), 8))


def test_a_save_of_a_later_generation_needs_no_holders_of_an_earlier_one() -> None:
    instructions = give().receive_message(stop=stop(3, keep_state=False, mode=pb.STOP_MODE_SAVE_FIRST))
    assert key(1) in killed(instructions)


def test_whoever_gives_ends_when_the_save_is_given_up() -> None:
    vm = give()
    vm.receive_message(stop=stop(2, keep_state=False, mode=pb.STOP_MODE_SAVE_FIRST))
    assert key(1) in killed(vm.receive_message(stop=stop(2, keep_state=False)))


def test_holders_end_with_the_lease() -> None:
    vm = give()
    vm.handle(ev.StreamClosed("gone"))
    assert vm.state.next_deadline() == 100.0 + LEASE_S
    assert set(killed(vm.tick(at=160.0))) == {key(1), key(2)}


@pytest.mark.parametrize("is_drained", [True, False])
def test_holders_end_when_the_agent_leaves(is_drained: bool) -> None:
    vm = give()
    vm.receive_message(ack=pb.Ack(reports_through=99))
    instructions = vm.receive_message(drain=pb.Drain()) if is_drained else vm.handle(ev.TerminationRequested("SIGTERM"))
    assert key(1) in killed(instructions)
    vm.ended(key(2), 75)
    vm.receive_message(ack=pb.Ack(reports_through=99))
    assert of(ins.ExitAgent, vm.instructions) == []
    assert len(of(ins.ExitAgent, vm.ended(key(1), -9))) == 1


# ---------------------------------------------------------------- leaving with the state


def leaves(instructions: Iterable[ins.Instruction]) -> list[tuple[int, bool]]:
    return [(leave.mode, leave.keep_state) for leave in of(ins.SendLeave, instructions)]


def ready_vm(**options: Any) -> Vm:
    vm = Vm(timings=QUIET, **options)
    vm.receive_message(launch=launch())
    vm.ready(key())
    return vm


def test_a_worker_may_leave_with_its_state_instead_of_saving_it() -> None:
    vm = ready_vm()
    assert leaves(vm.receive_message(stop=stop(1, keep_state=True, mode=pb.STOP_MODE_HOLD_FIRST))) == [
        (pb.STOP_MODE_HOLD_FIRST, True)
    ]
    vm.now += 2.0
    (exited,) = sent(leave(vm, key(), 75), "worker_exited")
    assert (exited.held.step, exited.save_s) == (7, 0.0)


def test_the_time_of_a_save_is_reported_of_a_worker_that_could_not_hold() -> None:
    vm = ready_vm()
    vm.receive_message(stop=stop(1, keep_state=True, mode=pb.STOP_MODE_HOLD_FIRST))
    vm.now += 2.0
    (exited,) = sent(vm.ended(key(), 75), "worker_exited")
    assert (exited.HasField("held"), exited.save_s) == (False, 2.0)


def test_a_worker_that_has_not_connected_has_time_to_leave_with_its_state() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    assert killed(vm.receive_message(stop=stop(1, keep_state=True, mode=pb.STOP_MODE_HOLD_FIRST))) == []
    assert leaves(vm.handle(ev.WorkerConnected(key(), 77))) == [(pb.STOP_MODE_HOLD_FIRST, True)]


def test_a_worker_whose_process_may_not_stay_saves() -> None:
    vm = ready_vm()
    assert leaves(vm.receive_message(stop=stop(1, keep_state=False, mode=pb.STOP_MODE_HOLD_FIRST))) == [
        (pb.STOP_MODE_SAVE_FIRST, False)
    ]


def test_a_worker_saves_where_no_process_is_kept() -> None:
    vm = ready_vm()
    vm.receive_message(drain=pb.Drain())
    assert leaves(vm.receive_message(stop=stop(1, keep_state=True, mode=pb.STOP_MODE_HOLD_FIRST))) == [
        (pb.STOP_MODE_SAVE_FIRST, True)
    ]


def test_a_drain_has_workers_save_that_were_to_leave_with_their_state() -> None:
    vm = ready_vm()
    vm.receive_message(stop=stop(1, keep_state=True, mode=pb.STOP_MODE_HOLD_FIRST))
    vm.now += 1.0
    assert leaves(vm.receive_message(drain=pb.Drain())) == [(pb.STOP_MODE_SAVE_FIRST, True)]
    assert killed(vm.tick(at=104.9)) == []
    assert killed(vm.tick(at=105.0)) == [key()]


@pytest.mark.parametrize("drained_first", [True, False])
def test_a_worker_whose_state_others_hold_ends_without_a_save(drained_first: bool) -> None:
    vm = ready_vm()
    if drained_first:
        vm.receive_message(drain=pb.Drain())
    spare = stop(1, keep_state=True, mode=pb.STOP_MODE_HOLD_FIRST, in_place=True, spare=True)
    (command,) = of(ins.SendLeave, vm.receive_message(stop=spare))
    assert (command.mode, command.in_place) == (pb.STOP_MODE_HOLD_FIRST, True)
    if not drained_first:
        assert leaves(vm.receive_message(drain=pb.Drain())) == []
    vm.now += 2.0
    assert killed(leave(vm, key(), 75)) == [key()]
    (exited,) = sent(vm.ended(key(), -9), "worker_exited")
    assert (exited.HasField("held"), exited.cause, exited.save_s) == (False, pb.EXIT_CAUSE_GENERATION_ENDED, 0.0)


def test_a_worker_saves_after_all_when_the_others_that_hold_its_state_leave_too() -> None:
    vm = ready_vm()
    vm.receive_message(drain=pb.Drain())
    hold = pb.STOP_MODE_HOLD_FIRST
    vm.receive_message(stop=stop(1, keep_state=True, mode=hold, in_place=True, spare=True))
    repeated = vm.receive_message(stop=stop(1, keep_state=True, mode=hold, in_place=True))
    assert leaves(repeated) == [(pb.STOP_MODE_SAVE_FIRST, True)]


def test_a_worker_saves_that_was_to_leave_with_its_state_when_another_job_needs_its_device() -> None:
    vm = ready_vm()
    vm.receive_message(stop=stop(1, keep_state=True, mode=pb.STOP_MODE_HOLD_FIRST))
    assert leaves(vm.receive_message(launch=launch(1, job_id="other"))) == [(pb.STOP_MODE_SAVE_FIRST, True)]
    assert leaves(vm.receive_message(launch=launch(2, job_id="third", ranks=()))) == []


def test_a_later_command_to_leave_is_only_followed_if_it_is_more_urgent() -> None:
    hold, save, now = pb.STOP_MODE_HOLD_FIRST, pb.STOP_MODE_SAVE_FIRST, pb.STOP_MODE_LEAVE_NOW
    vm = ready_vm()
    for mode in (hold, hold, save, hold, now, save, hold):
        vm.receive_message(stop=stop(1, keep_state=True, mode=mode))
    assert [mode for mode, _ in leaves(vm.instructions)] == [hold, save, now]
