"""Processes that are started ahead for a generation to come: the agent's decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from agent_vm import LEASE_S, PORT, QUIET, Vm, exits, key, killed, launch, leave, of, sent
from varuna_agent.state import WorkerKey
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.state.hosted_worker import WorkerPhase
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w

AHEAD = 2
"""The generation for which newcomers are started, while 1 trains."""


def training(device: str = "cpu", ranks: Iterable[int] = (1,), **options: Any) -> Vm:
    """A VM whose workers of generation 1 train."""
    vm = Vm(device=device, timings=QUIET, **options)
    vm.receive_message(launch=launch(1, ranks=ranks))
    for rank in ranks:
        vm.ready(key(1, rank))
        vm.step(key(1, rank), 1)
    return vm


def expected(generation: int = AHEAD, ranks: Iterable[int] = (3,), **changes: Any) -> pb.Launch:
    """Without what is known only when the generation starts."""
    return launch(generation, ranks=ranks, **{"rendezvous_host": "", "rendezvous_port": 0, **changes})


def ask(vm: Vm, request: str = "r", ahead: pb.Launch | None = None) -> list[ins.Instruction]:
    command = pb.StartNewcomers(request=request, launch=ahead or expected())
    return vm.receive_message(start_newcomers=command)


def reach_door(vm: Vm, newcomer: WorkerKey, *read: str, obstacle: str = "") -> list[ins.Instruction]:
    vm.handle(ev.WorkerConnected(newcomer, 5))
    return vm.receive_worker_message(newcomer, at_door=w.AtDoor(read_variables=read, obstacle=obstacle))


def statuses(instructions: Iterable[ins.Instruction]) -> list[tuple[str, int, bool, str]]:
    """Of the last heartbeat."""
    heartbeat = sent(instructions, "heartbeat")[-1]
    return [(one.request, one.local_rank, one.at_door, one.fault) for one in heartbeat.newcomers]


def prepare(vm: Vm, *read: str, request: str = "r", **changes: Any) -> list[WorkerKey]:
    """Newcomers at the door."""
    newcomers = [start.key for start in of(ins.StartWorker, ask(vm, request, expected(**changes)))]
    for newcomer in newcomers:
        reach_door(vm, newcomer, *read)
    return newcomers


def stop(vm: Vm, mode: pb.StopMode.ValueType = pb.STOP_MODE_HOLD_FIRST, **changes: Any) -> list[ins.Instruction]:
    return vm.receive_message(stop=pb.Stop(job_id="job", generation=1, mode=mode, grace_s=30.0, **changes))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_newcomer_starts_beside_the_worker_whose_device_it_is_to_get(device: str) -> None:
    vm = training(device)
    (start,) = of(ins.StartWorker, ask(vm))
    assert (start.key.job_id, start.key.generation, start.key.rank) == ("job", AHEAD, 3)
    assert start.environment.newcomer == start.key.newcomer > 0
    assert (start.environment.secret, start.rendezvous_port) == ("", 0)
    assert vm.phases() == {key(1, 1): WorkerPhase.READY}
    assert statuses(vm.instructions) == [("r", 0, False, "")]
    assert statuses(reach_door(vm, start.key)) == [("r", 0, True, "")]
    assert not of(ins.StartWorker, ask(vm))  # repeated, as after a reconnection


def test_a_newcomer_is_no_worker_for_the_manager() -> None:
    vm = training()
    prepare(vm)
    vm.handle(ev.StreamClosed("gone"))
    vm.connect()
    assert [worker.rank for worker in sent(vm.instructions, "hello")[-1].workers] == [1]
    assert sent(vm.instructions, "hello")[-1].seen_generations[0].generation == 1
    assert {health.generation for health in sent(vm.instructions, "heartbeat")[-1].workers} == {1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_launch_gives_the_newcomer_its_rank_once_the_device_is_free(device: str) -> None:
    vm = training(device)
    (newcomer,) = prepare(vm, "RANK", "WORLD_SIZE", "VARUNA_CHUNK_SIZE")
    stop(vm, keep_state=True)
    leave(vm, key(1, 1), 75)
    instructions = vm.receive_message(
        launch=launch(AHEAD, ranks=(3,), secret="s", holders_generation=1, holders=[1], committed_step=9)
    )
    if device == "cuda":
        assert not of(ins.AssignWorker, instructions)
        instructions = vm.receive_worker_message(key(1, 1), giving_state=w.GivingState(host_bytes=1))
    (assign,) = of(ins.AssignWorker, instructions)
    assert (assign.survivor, assign.key, assign.start.environment.secret) == (newcomer, key(AHEAD, 3), "s")
    assert assign.start.environment.newcomer == 0
    assert not killed(instructions)
    assert not of(ins.AdmitWorker, vm.handle(ev.WorkerConnected(key(AHEAD, 3), 5)))  # it has the secret
    ready = vm.receive_worker_message(key(AHEAD, 3), ready=w.WorkerReady())
    assert [started.rank for started in sent(ready, "worker_started")] == [3]
    assert vm.state.newcomers == ()


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        ("WORLD_SIZE", {"world_size": 4, "plan": pb.PlanSpec(p=2, d=2, micro_batch=2, global_batch=16)}),
        ("RANK", {"ranks": (5,)}),
        ("VARUNA_HOLDERS", {"holders_generation": 1, "holders": [1]}),
    ],
)
def test_a_newcomer_that_has_seen_something_else_is_ended(read: str, changes: dict[str, Any]) -> None:
    vm = training()
    (newcomer,) = prepare(vm, read)
    instructions = vm.receive_message(launch=launch(AHEAD, **{"ranks": (3,), **changes}))
    assert killed(instructions) == [newcomer]
    (start,) = of(ins.StartWorker, [*instructions, *vm.ended(key(1, 1), 75)])
    assert start.key.newcomer == 0


@pytest.mark.parametrize(
    "changes", [{"command": "python other.py"}, {"environment": {"A": "2"}}, {"secrets": {"S": "2"}}]
)
def test_a_newcomer_of_another_command_is_ended(changes: dict[str, Any]) -> None:
    vm = training()
    (newcomer,) = prepare(vm)
    assert killed(vm.receive_message(launch=launch(AHEAD, ranks=(3,), **changes))) == [newcomer]


def test_a_newcomer_that_has_read_nothing_takes_any_rank_of_a_later_generation() -> None:
    vm = training()
    (newcomer,) = prepare(vm)
    vm.ended(key(1, 1), 76)
    instructions = vm.receive_message(launch=launch(AHEAD + 3, ranks=(6,), committed_step=4))
    assert [(one.survivor, one.key) for one in of(ins.AssignWorker, instructions)] == [(newcomer, key(AHEAD + 3, 6))]


def test_one_that_is_not_there_yet_is_ended_and_its_rank_starts_a_process() -> None:
    vm = training()
    (start,) = of(ins.StartWorker, ask(vm))
    instructions = [*vm.receive_message(launch=launch(AHEAD, ranks=(3,))), *vm.ended(key(1, 1), 75)]
    assert killed(instructions) == [start.key]
    assert [one.key for one in of(ins.StartWorker, instructions)] == [key(AHEAD, 3)]
    assert not exits(vm.ended(start.key, -9))
    assert vm.state.newcomers == ()


def test_a_launch_in_place_ends_newcomers_of_its_job() -> None:
    vm = training()
    (newcomer,) = prepare(vm, ranks=(3, 4))[1:]
    leave(vm, key(1, 1), 76)
    instructions = vm.receive_message(launch=launch(AHEAD, ranks=(1,), in_place=True))
    assert newcomer in killed(instructions)
    assert [one.survivor for one in of(ins.AssignWorker, instructions)] == [key(1, 1)]


def test_another_request_keeps_the_newcomers_that_fit_it() -> None:
    vm = training()
    first, second = prepare(vm, "RANK", ranks=(3, 4))
    instructions = ask(vm, "s", expected(ranks=(3, 6)))
    (start,) = of(ins.StartWorker, instructions)
    assert (killed(instructions), start.key.rank) == ([second], 6)
    assert set(statuses(instructions)) == {("s", 0, True, ""), ("s", 1, False, "")}
    assert first in [one.key for one in vm.state.newcomers]


def test_newcomers_end_with_their_job_and_stay_when_it_goes_on() -> None:
    vm = training()
    (newcomer,) = prepare(vm)
    assert not killed(stop(vm, keep_state=True))
    assert newcomer in killed(stop(vm, pb.STOP_MODE_LEAVE_NOW))


def test_newcomers_end_when_the_manager_no_longer_wants_them() -> None:
    vm = training()
    (newcomer,) = prepare(vm)
    assert not killed(vm.receive_message(end_newcomers=pb.EndNewcomers(job_id="other")))
    assert killed(vm.receive_message(end_newcomers=pb.EndNewcomers(job_id="job"))) == [newcomer]
    vm.ended(newcomer, -9)
    assert statuses(vm.tick(vm.now + 1)) == []
    assert [one.key.newcomer > newcomer.newcomer for one in of(ins.StartWorker, ask(vm))] == [True]


def test_another_job_gets_the_device_of_a_newcomer() -> None:
    vm = Vm(device="cpu", timings=QUIET)
    (newcomer,) = prepare(vm)
    instructions = vm.receive_message(launch=launch(1, ranks=(0,), job_id="other"))
    assert killed(instructions) == [newcomer]
    assert [start.key.job_id for start in of(ins.StartWorker, instructions)] == ["other"]


def test_no_newcomer_starts_on_the_device_of_another_job() -> None:
    vm = training()
    instructions = ask(vm, "r", expected(job_id="other"))
    assert not of(ins.StartWorker, instructions)
    ((_, _, at_door, fault),) = statuses(instructions)
    assert not at_door
    assert "device 0 is in use by job/g1/rank1" in fault


def test_no_newcomer_starts_for_a_generation_that_is_over() -> None:
    vm = training()
    ((_, _, _, fault),) = statuses(ask(vm, "r", expected(1)))
    assert "generation 1 is over" in fault
    assert [one.phase for one in vm.state.newcomers] == ["failed"]
    assert vm.receive_message(end_newcomers=pb.EndNewcomers(job_id="job")) == []
    assert vm.state.newcomers == ()


def test_a_newcomer_that_ends_before_the_door_is_said_in_one_line() -> None:
    vm = training()
    (start,) = of(ins.StartWorker, ask(vm))
    instructions = vm.ended(start.key, 1, "Traceback\nKeyError: 'x'\n")
    assert statuses(instructions) == [("r", 0, False, "it ended with exit code 1 before Varuna(): KeyError: 'x'")]
    assert not exits(instructions)
    assert vm.phases() == {key(1, 1): WorkerPhase.READY}


def test_a_newcomer_that_cannot_be_started_is_said_too() -> None:
    vm = training()
    (start,) = of(ins.StartWorker, ask(vm))
    assert statuses(vm.handle(ev.ProcessNotStarted(start.key, "no such folder")))[0][3] == "no such folder"


def test_a_newcomer_that_can_take_no_rank_is_ended() -> None:
    vm = training()
    (start,) = of(ins.StartWorker, ask(vm))
    instructions = reach_door(vm, start.key, obstacle="the script uses the GPU")
    assert killed(instructions) == [start.key]
    assert statuses(instructions) == [("r", 0, False, "the script uses the GPU")]
    assert not killed(vm.receive_message(launch=launch(AHEAD, ranks=(), in_place=True))), "it was killed before"
    assert not [*vm.ended(start.key, -9), *statuses(vm.tick(vm.now + 1))]


def test_a_newcomer_that_can_take_no_rank_is_named_until_the_next_generation() -> None:
    vm = training()
    (start,) = of(ins.StartWorker, ask(vm))
    reach_door(vm, start.key, obstacle="the script uses the GPU")
    assert statuses([*vm.ended(start.key, -9), *vm.tick(vm.now + 1)])[0][3] == "the script uses the GPU"


def test_a_newcomer_takes_a_rank_beside_survivors() -> None:
    """Rank 1 trains on device 0, and its process is rank 0 then; the newcomer on device 1 is rank 2."""
    vm = training(gpus=2)
    both = expected(ranks=(0, 2))
    del both.workers[0]
    (newcomer,) = of(ins.StartWorker, ask(vm, ahead=both))
    reach_door(vm, newcomer.key)
    leave(vm, key(1, 1), 75)
    started = vm.receive_message(launch=launch(AHEAD, ranks=(0, 2), in_place=True, holders=[0, 1]))
    assert [(one.survivor, one.key) for one in of(ins.AssignWorker, started)] == [
        (key(1, 1), key(AHEAD, 0)),
        (newcomer.key, key(AHEAD, 2)),
    ]
    environments = [one.start.environment for one in of(ins.AssignWorker, started)]
    assert [(one.survivors, one.joins_survivors, one.holders) for one in environments] == [
        ((0, 1), False, ()),
        ((0, 1), True, ()),
    ]
    assert not killed(started)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_new_rank_beside_survivors_ends_the_one_on_its_own_device(device: str) -> None:
    vm = training(device)
    leave(vm, key(1, 1), 75)
    started = vm.receive_message(launch=launch(AHEAD, ranks=(3,), in_place=True, holders=[0, 1]))
    assert killed(started) == [key(1, 1)]
    started += vm.ended(key(1, 1), -9)
    assert [one.key for one in of(ins.StartWorker, started)] == [key(AHEAD, 3)]


def test_a_process_that_does_not_take_its_rank_is_killed_and_the_launch_refused() -> None:
    vm = training()
    prepare(vm)
    vm.ended(key(1, 1), 75)
    vm.receive_message(launch=launch(AHEAD, ranks=(3,)))
    assert killed(vm.tick(vm.now + QUIET.assignment_s)) == [key(AHEAD, 3)]
    assert exits(vm.ended(key(AHEAD, 3), -9)) == [(AHEAD, 3, "LAUNCH_REFUSED")]


def test_a_rank_whose_newcomer_has_just_ended_is_refused() -> None:
    vm = training()
    prepare(vm)
    vm.ended(key(1, 1), 75)
    vm.receive_message(launch=launch(AHEAD, ranks=(3,)))
    assert exits(vm.handle(ev.ProcessNotStarted(key(AHEAD, 3), "it has ended"))) == [(AHEAD, 3, "LAUNCH_REFUSED")]


@pytest.mark.parametrize("how", ["lease", "drain", "termination"])
def test_no_newcomer_outlives_lease_drain_or_agent(how: str) -> None:
    vm = Vm(device="cpu", timings=QUIET)
    (newcomer,) = prepare(vm)
    if how == "lease":
        deadline = vm.state.next_deadline()
        assert deadline is not None
        assert deadline <= vm.now + LEASE_S
        instructions = vm.tick(vm.now + LEASE_S + 0.1)
    elif how == "drain":
        instructions = vm.receive_message(drain=pb.Drain())
    else:
        instructions = vm.handle(ev.TerminationRequested("upgrade"))
    assert killed(instructions) == [newcomer]
    assert not of(ins.ExitAgent, instructions)
    ended = vm.ended(newcomer, -9)
    assert vm.state.newcomers == ()
    assert bool(of(ins.ExitAgent, ended)) == (how != "lease")


def test_a_rank_zero_that_was_a_newcomer_holds_the_rendezvous_port() -> None:
    vm = training()
    prepare(vm, ranks=(0,))
    vm.ended(key(1, 1), 75)
    (assign,) = of(ins.AssignWorker, vm.receive_message(launch=launch(AHEAD, ranks=(0,))))
    assert assign.start.rendezvous_port == PORT


def send_ahead(*ranks: int, request: str = "r") -> pb.SendAhead:
    """Ranks 1 and 3 of the next generation are to be on devices 0 and 1 of the VM."""
    workers = [pb.WorkerAssignment(rank=rank, local_rank=number) for number, rank in enumerate(ranks)]
    return pb.SendAhead(job_id="job", generation=1, request=request, workers=workers)


def parts(instructions: Iterable[ins.Instruction]) -> dict[WorkerKey, tuple[int | None, int]]:
    """What each process is told: its rank in the next generation, and how many processes share the VM."""
    return {
        one.key: (one.part.rank if one.part.HasField("rank") else None, one.part.processes)
        for one in of(ins.SendAheadPart, instructions)
    }


def test_workers_and_newcomers_are_told_their_parts_in_sending_the_state_ahead() -> None:
    vm = training(ranks=(0,), gpus=2)
    workers = [pb.WorkerAssignment(rank=3, local_rank=1)]
    (start,) = of(ins.StartWorker, ask(vm, ahead=expected(workers=workers)))
    assert parts(vm.receive_message(send_ahead=send_ahead(1, 3))) == {key(1, 0): (1, 1)}, "it is not at the door"
    reach_door(vm, start.key)
    told = vm.receive_message(send_ahead=send_ahead(1, 3))
    assert parts(told) == {key(1, 0): (1, 2), start.key: (3, 2)}
    assert parts(vm.receive_message(send_ahead=send_ahead(1, 3, request="other"))) == {key(1, 0): (1, 1)}
    assert parts(vm.receive_message(send_ahead=send_ahead())) == {key(1, 0): (None, 2)} | {start.key: (None, 2)}


def test_a_heartbeat_says_at_once_what_a_worker_has_sent() -> None:
    vm = training(ranks=(0,))
    vm.receive_worker_message(key(1, 0), sent_ahead=w.SentAhead(request="r", step=7))
    (health,) = sent(vm.tick(vm.now + 0.5), "heartbeat")[-1].workers
    assert (health.ahead_request, health.ahead_step) == ("r", 7)
