"""States that workers leave in memory which outlives them: the agent's decisions, and the files."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_vm import QUIET, Vm, key, killed, launch, leave, of, sent
from varuna_agent.state import WorkerKey
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.workers.memory_files import KeptFile, MemoryFiles, NoRoomError
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2

KEEP_S = 50.0
TIMINGS = replace(QUIET, keep_memory_s=KEEP_S)


def training(*, ranks: tuple[int, ...] = (1,), **options: Any) -> Vm:
    vm = Vm(timings=TIMINGS, **options)
    vm.receive_message(launch=launch(ranks=ranks, secret="5ec3e7"))
    for rank in ranks:
        vm.ready(key(1, rank))
    return vm


def fail(vm: Vm, worker: WorkerKey, step: int = 7) -> list[ins.Instruction]:
    """Its script raises an exception, and it leaves its state."""
    vm.handle(ev.StateStored(worker, step, 100))
    return vm.ended(worker, 1)


def freed(instructions: list[ins.Instruction]) -> list[WorkerKey]:
    return [free.key for free in of(ins.FreeMemory, instructions)]


def kept(vm: Vm) -> list[WorkerKey]:
    return [memory.key for memory in vm.state.memories]


def stop(generation: int = 1, **fields: bool) -> pb.Stop:
    return pb.Stop(job_id="job", generation=generation, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=5, **fields)


# ---------------------------------------------------------------- leaving


def test_the_exit_of_a_failed_rank_says_what_it_has_left() -> None:
    vm = training()
    (exited,) = sent(fail(vm, key(1)), "worker_exited")
    assert exited.cause == pb.EXIT_CAUSE_SCRIPT_FAILED
    assert (exited.held.step, exited.held.bytes, exited.held.gives_only) == (7, 100, True)
    assert kept(vm) == [key(1)]
    (heartbeat,) = sent(vm.tick(at=101.5), "heartbeat")
    assert heartbeat.held_bytes == 100


def test_only_the_generations_own_workers_may_leave_something() -> None:
    vm = training()
    assert vm.state.may_store(key(1), "5ec3e7")
    assert not vm.state.may_store(key(1), "other")
    assert not vm.state.may_store(key(1, rank=2), "5ec3e7")
    assert not vm.state.may_store(key(2), "5ec3e7")


def test_a_stop_may_ask_for_the_state_to_be_left_in_memory() -> None:
    vm = training()
    (command,) = of(ins.SendLeave, vm.receive_message(stop=stop(keep_state=True, store_state=True)))
    assert (command.keep_state, command.store_state) == (True, True)
    instructions = leave(vm, key(1))
    assert of(ins.SendStore, instructions) == [ins.SendStore(key(1))]
    assert (sent(instructions, "worker_exited"), vm.state.survivors) == ([], ()), "the process is about to end"
    vm.handle(ev.StateStored(key(1), 7, 100))
    (exited,) = sent(vm.ended(key(1), 75), "worker_exited")
    assert (exited.cause, exited.exit_code) == (pb.EXIT_CAUSE_PEER_LOST, 76)
    assert (exited.held.step, exited.held.gives_only) == (7, True)


def test_a_worker_that_does_not_leave_its_state_in_time_is_killed() -> None:
    vm = training()
    vm.receive_message(stop=stop(keep_state=True, store_state=True))
    leave(vm, key(1))
    assert killed(vm.tick(at=129.9)) == []
    assert killed(vm.tick(at=130.0)) == [key(1)]
    (exited,) = sent(vm.ended(key(1), -9), "worker_exited")
    assert not exited.HasField("held")


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_workers_leave_their_state_where_another_process_of_the_agent_follows(keeps_memory: bool) -> None:
    vm = training()
    (command,) = of(ins.SendLeave, vm.handle(ev.TerminationRequested("SIGUSR2", keeps_memory)))
    assert (command.keep_state, command.store_state) == (keeps_memory, keeps_memory)
    instructions = leave(vm, key(1), code=75)
    assert bool(of(ins.SendStore, instructions)) is keeps_memory
    if keeps_memory:
        vm.handle(ev.StateStored(key(1), 7, 100))
    instructions = vm.ended(key(1), 75)
    (exited,) = sent(instructions, "worker_exited")
    assert (exited.cause, exited.HasField("held")) == (pb.EXIT_CAUSE_AGENT_ENDED, keeps_memory)
    assert freed(instructions) == []


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_a_process_that_waits_for_its_job_leaves_its_state_to_the_agents_next_process(keeps_memory: bool) -> None:
    """Agents are replaced one after the other: its generation has ended because another VM's agent did."""
    vm = training()
    leave(vm, key(1))
    instructions = vm.handle(ev.TerminationRequested("SIGUSR2", keeps_memory))
    assert of(ins.SendStore, instructions) == ([ins.SendStore(key(1))] if keeps_memory else [])
    assert killed(instructions) == ([] if keeps_memory else [key(1)])
    vm.receive_message(ack=pb.Ack(reports_through=99))
    if keeps_memory:
        assert vm.state.may_store(key(1), "5ec3e7")
        vm.handle(ev.StateStored(key(1), 7, 100))
    instructions = vm.ended(key(1), 75)
    assert freed(instructions) == []
    assert len(of(ins.ExitAgent, instructions)) == 1
    assert kept(vm) == ([key(1)] if keeps_memory else [])


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_process_that_gives_its_state_leaves_it_there_too(has_answered: bool) -> None:
    """The generation that was to take it may have ended with this agent."""
    vm = training()
    leave(vm, key(1))
    vm.receive_message(launch=launch(2, ranks=(0,), holders=[1], holders_generation=1, secret="later"))
    if has_answered:
        vm.receive_worker_message(key(1), giving_state=worker_pb2.GivingState(host_bytes=1))
    instructions = vm.handle(ev.TerminationRequested("SIGUSR2", keeps_memory=True))
    assert of(ins.SendStore, instructions) == [ins.SendStore(key(1))]
    assert vm.state.may_store(key(1), "5ec3e7")
    assert killed(vm.tick(at=140.0)) == [key(1)], "it has not left it in time"


# ---------------------------------------------------------------- taking and freeing


def test_the_first_worker_of_the_generation_that_takes_it_gives_it() -> None:
    vm = training(ranks=(1, 2))
    fail(vm, key(1, 1))
    fail(vm, key(1, 2))
    instructions = vm.receive_message(launch=launch(2, ranks=(3, 0), holders=[2], holders_generation=1, secret="later"))
    assert freed(instructions) == [key(1, 1)], "the generation starts without it"
    assert vm.state.list_memories(key(2, 0), "later") == [key(1, 2)]
    assert vm.state.list_memories(key(2, 0), "5ec3e7") == []
    assert vm.state.list_memories(key(2, 3), "later") == []
    vm.ready(key(2, 0))
    assert freed(vm.step(key(2, 0), 8)) == [key(1, 2)], "the generation has moved on"
    assert kept(vm) == []


def test_it_is_kept_for_a_generation_that_is_to_save_it() -> None:
    vm = training()
    fail(vm, key(1))
    vm.receive_message(launch=launch(2, holders=[1], holders_generation=1))
    vm.ready(key(2))
    save = pb.Stop(job_id="job", generation=2, mode=pb.STOP_MODE_SAVE_FIRST, grace_s=5)
    assert freed(vm.receive_message(stop=save)) == []
    save.mode = pb.STOP_MODE_LEAVE_NOW
    assert freed(vm.receive_message(stop=save)) == [key(1)]


def test_it_waits_only_so_long_but_as_long_as_its_taker_prepares() -> None:
    vm = training()
    fail(vm, key(1))
    assert freed(vm.tick(at=149.9)) == []
    vm.receive_message(launch=launch(2, holders=[1], holders_generation=1))
    for heartbeat in sent(vm.tick(at=151.0), "heartbeat"):
        vm.receive_message(ack=pb.Ack(heartbeat_sequence=heartbeat.sequence))
    assert freed(vm.tick(at=202.0)) == []
    vm.ended(key(2), 1)
    assert freed(vm.tick(at=251.9)) == []
    assert freed(vm.tick(at=252.0)) == [key(1)]


def test_a_job_that_ends_frees_what_an_earlier_generation_has_left() -> None:
    vm = training()
    fail(vm, key(1))
    vm.receive_message(launch=launch(2, holders=[1], holders_generation=1))
    assert freed(vm.receive_message(stop=stop(1))) == [], "a late stop of its own generation"
    assert freed(vm.receive_message(stop=stop(2, keep_state=True))) == []
    assert freed(vm.receive_message(stop=stop(2))) == [key(1)]


def test_other_jobs_leave_it_alone() -> None:
    vm = training()
    fail(vm, key(1))
    assert freed(vm.receive_message(launch=launch(job_id="other"))) == []
    assert freed(vm.receive_message(stop=pb.Stop(job_id="other", generation=5))) == []


def test_an_agent_goes_on_with_what_the_one_before_has_kept() -> None:
    vm = Vm(timings=TIMINGS, seen={"job": 1})
    vm.state.adopt_memory(key(1), 7, 100, vm.now)
    vm.receive_message(launch=launch(2, holders=[1], holders_generation=1, secret="later"))
    assert vm.state.list_memories(key(2), "later") == [key(1)]


# ---------------------------------------------------------------- files


@pytest.fixture
def files() -> Iterator[MemoryFiles]:
    files = MemoryFiles(1000)
    yield files
    files.close()


def fill(files: MemoryFiles, worker: WorkerKey, text: bytes = b"state") -> int:
    file = files.make_file(len(text))
    os.write(file, text)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return files.keep_file(file, worker, 7)


def test_files_take_no_more_than_their_part_of_the_memory(files: MemoryFiles) -> None:
    first = files.make_file(600)
    with pytest.raises(NoRoomError, match="500 bytes of state do not fit: 400 are free of the 1000"):
        files.make_file(500)
    files.drop_file(first)
    assert fill(files, key(1), b"x" * 700) == 700
    with pytest.raises(NoRoomError):
        files.make_file(301)
    files.free_file(key(1))
    assert files.bytes == 0
    files.drop_file(files.make_file(1000))


def test_a_worker_can_neither_enlarge_its_file_nor_change_it_later(files: MemoryFiles) -> None:
    file = files.make_file(5)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 6)
    with pytest.raises(ValueError, match="not sealed"):
        files.keep_file(file, key(1), 7)
    assert files.bytes == 0
    fill(files, key(1))
    kept_file = files.get_file(key(1))
    assert kept_file is not None
    with pytest.raises(PermissionError):
        os.pwrite(kept_file, b"other", 0)


def test_the_next_process_of_the_agent_gets_the_files(files: MemoryFiles) -> None:
    fill(files, WorkerKey("a.job-1", 3, 12))
    environ = {"PATH": "/bin"}
    files.leave_to_successor(environ)
    successor = MemoryFiles(1000)
    assert successor.adopt_files(environ) == [KeptFile(WorkerKey("a.job-1", 3, 12), 7, 5)]
    assert environ == {"PATH": "/bin"}, "nothing of it reaches the workers"
    assert (successor.bytes, successor.adopt_files(environ)) == (5, [])


def test_what_systemd_has_stored_is_adopted_if_it_is_a_memory_file(
    files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(files, key(1))
    kept_file = files.get_file(key(1))
    assert kept_file is not None
    # Above every open one, whatever other tests have left open in this process: two in a row are free there.
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    first = fcntl.fcntl(kept_file, fcntl.F_DUPFD_CLOEXEC, highest + 1)
    other = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, first + 1)
    assert other == first + 1
    monkeypatch.setattr("varuna_agent.workers.memory_files._FIRST_LISTEN_FD", first)
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "job.1.1.7:job.1.2.7"}
    successor = MemoryFiles(1000)
    assert successor.adopt_files(environ) == [KeptFile(key(1), 7, 5)]
    assert environ == {}
    assert successor.get_file(key(1)) == first
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(other)
    successor.close()


def test_systemd_gets_the_files_and_learns_which_it_need_not_keep(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(path)
        files = MemoryFiles(1000, path)
        fill(files, key(1))
        files.leave_to_store()
        text, (stored,), _, _ = socket.recv_fds(notified, 1000, 2)
        assert text == b"FDSTORE=1\nFDNAME=job.1.1.7"
        assert os.pread(stored, 10, 0) == b"state"
        os.close(stored)
        files.free_file(key(1))
        assert notified.recv(1000) == b"FDSTOREREMOVE=1\nFDNAME=job.1.1.7"
