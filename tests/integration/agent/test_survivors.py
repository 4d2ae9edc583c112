"""Workers that leave their generation and stay, on real processes, between a manager and an agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from agent_world import FakeManager, ended, launch, runs, start_agent
from varuna_agent.logs.shared_logs import SharedLogs
from varuna_agent.workers.isolation import JobUser, keep_private
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S, until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can start processes as another user")

GOES_ON = """
import json, signal
answers = True
signal.signal(signal.SIGUSR1, lambda *_: step(6))

def leave(code):
    send(generation_left=w.GenerationLeft(exit_code=code, step=5, held_bytes=1000))

def take_rank(assigned):
    log = os.open(assigned.log_path, os.O_WRONLY | os.O_APPEND)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    own = WorkerEnvironment.from_environ(assigned.environment)
    send(hello=w.WorkerHello(job_id=own.job_id, generation=own.generation, rank=own.rank, pid=os.getpid()))
    print(json.dumps([dict(assigned.environment), assigned.secret]))
    send(ready=w.WorkerReady(resumed_step=5, kept_bytes=1000))
    step(6)

print("began", flush=True)
if os.path.exists("shows"):
    names = ("VARUNA_HOLDERS", "VARUNA_GPU_TYPE", "VARUNA_ZONE")
    print("\\n".join(f"{name}={os.environ[name]}" for name in names if name in os.environ), flush=True)
send(ready=w.WorkerReady(resumed_step=3))
while True:
    message = framing.receive(agent, w.AgentToWorker)
    if message is None:
        os._exit(1)
    match message.WhichOneof("body"):
        case "leave":
            leave(75) if message.leave.keep_state else sys.exit(75)
        case "assigned" | "give_state" if os.path.exists("deaf"):
            pass
        case "assigned" if os.path.exists("crashes"):
            print("no memory left")
            sys.exit(3)
        case "assigned":
            take_rank(message.assigned)
        case "give_state":
            print(json.dumps([dict(message.give_state.environment), message.give_state.secret]), flush=True)
            send(giving_state=w.GivingState(host_bytes=1000))
            if os.path.exists("taken"):
                sys.exit(75)
"""


class InPlaceAgent:
    """An agent process with a manager, and a job whose workers go on in place."""

    def __init__(self, manager: FakeManager, agents: list[asyncio.subprocess.Process], folder: Path) -> None:
        self.manager = manager
        self.folder = folder
        self.agents = agents
        self.assignment_s = DEADLINE_S

    async def start(self, *more: str) -> None:
        address, timings = f"127.0.0.1:{self.manager.port}", {"assignment_s": self.assignment_s}
        await start_agent(self.agents, address, self.folder, *more, timings=timings)
        await self.manager.until(lambda: self.manager.heartbeats)

    def launch(self, generation: int = 1, **changes: Any) -> None:
        self.manager.send_message(launch=launch(self.folder, GOES_ON, generation=generation, **changes))

    def stop(self, generation: int = 1, *, keep_state: bool = True) -> None:
        command = pb.Stop(
            job_id="job", generation=generation, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=60, keep_state=keep_state
        )
        self.manager.send_message(stop=command)

    async def survive(self, *more: str, **changes: Any) -> psutil.Process:
        """A process that has left generation 1 and stays."""
        await self.start(*more)
        self.launch(**changes)
        (started,) = await self.manager.fact("worker_started")
        process = psutil.Process(started.pid)  # now: when it has left, it may be killed at any time
        self.stop()
        await self.manager.fact("worker_exited")
        return process

    def exits(self) -> list[tuple[int, int, str]]:
        return [(e.generation, e.rank, pb.ExitCause.Name(e.cause)[11:]) for e in self.manager.facts("worker_exited")]

    def log_of(self, generation: int, rank: int = 1) -> str:
        return (self.folder / "jobs" / "job" / f"g{generation}" / f"rank{rank}.log").read_text()


@pytest_asyncio.fixture
async def world(tmp_path: Path, agents: list[asyncio.subprocess.Process]) -> AsyncIterator[InPlaceAgent]:
    # An agent takes five intervals without a word for silence, and hangs up: a command on its way would be lost.
    manager = FakeManager(heartbeat_interval_s=10.0)
    await manager.start()
    yield InPlaceAgent(manager, agents, tmp_path)
    for agent in agents:
        with suppress(ProcessLookupError):
            agent.terminate()
        await ended(agent)
    await manager.stop()


@pytest.mark.parametrize("command", ["python worker-1.py", "exec python worker-1.py"], ids=["warmed", "shell"])
async def test_a_process_goes_on_as_another_rank(world: InPlaceAgent, command: str) -> None:
    process = await world.survive(command=command)
    (left,) = world.manager.facts("worker_exited")
    assert (left.cause, left.exit_code) == (pb.EXIT_CAUSE_GENERATION_ENDED, 75)
    assert (left.held.step, left.held.bytes) == (5, 1000)

    world.launch(
        2,
        in_place=True,
        workers=[pb.WorkerAssignment(rank=2, local_rank=0)],
        secret="5ec3e7",
        world_size=3,
        plan=pb.PlanSpec(p=1, d=3, micro_batch=2, global_batch=8),
    )
    _, again = await world.manager.fact("worker_started", 2)
    assert (again.generation, again.rank, again.pid) == (2, 2, process.pid)
    assert (again.resumed_step, again.kept_bytes) == (5, 1000)
    (completed,) = await world.manager.fact("steps_completed")
    assert (completed.generation, [step.step for step in completed.steps]) == (2, [6])
    environ, secret = json.loads(world.log_of(2, 2))
    assert secret == "5ec3e7"
    assert "5ec3e7" not in environ.values()
    assert {"VARUNA_SECRET", "VARUNA_SECRET_FROM_AGENT"} & environ.keys() == set()
    assert environ["VARUNA_AGENT_SOCKET"]
    assert environ["VARUNA_LOCAL_CHECKPOINT_DIR"]
    assert (environ["RANK"], environ["VARUNA_GENERATION"]) == ("2", "2")
    assert world.log_of(1) == "began\n"

    world.manager.send_message(dump_stacks=pb.DumpStacks(job_id="job", generation=2, request_id="r"))
    await world.manager.until(lambda: [m.stack_dump for m in world.manager.received if m.HasField("stack_dump")])
    process.kill()
    _, killed = await world.manager.fact("worker_exited", 2)
    assert (killed.generation, killed.rank, killed.exit_code) == (2, 2, -9)
    assert killed.error_text.splitlines()[1].startswith("[{"), "the last lines of its new log"


async def test_new_processes_and_those_that_go_on_know_their_type_of_gpu_and_their_zone(world: InPlaceAgent) -> None:
    (world.folder / "shows").touch()
    await world.survive("--gpu-type", "V100", zone="north")
    assert world.log_of(1) == "began\nVARUNA_GPU_TYPE=V100\nVARUNA_ZONE=north\n"
    world.launch(2, in_place=True, zone="north")
    await world.manager.fact("worker_started", 2)
    environ, _ = json.loads(world.log_of(2))
    assert (environ["VARUNA_GPU_TYPE"], environ["VARUNA_ZONE"]) == ("V100", "north")


async def test_a_process_that_goes_on_is_killed_as_the_rank_that_it_has(world: InPlaceAgent) -> None:
    process = await world.survive()
    world.launch(2, in_place=True)
    await world.manager.fact("worker_started", 2)
    world.manager.send_message(stop=pb.Stop(job_id="job", generation=2, mode=pb.STOP_MODE_LEAVE_NOW, grace_s=0))
    await world.manager.fact("worker_exited", 2)
    assert world.exits()[1] == (2, 1, "KILLED")
    assert not runs(process)


async def test_a_process_goes_on_often(world: InPlaceAgent) -> None:
    process = await world.survive()
    for generation in range(2, 6):
        world.launch(generation, in_place=True)
        started = await world.manager.fact("worker_started", generation)
        assert started[-1].pid == process.pid
        world.stop(generation)
        await world.manager.fact("worker_exited", generation)
    assert world.exits() == [(generation, 1, "GENERATION_ENDED") for generation in range(1, 6)]


async def test_rank_0_has_a_port_of_its_own_in_each_generation(world: InPlaceAgent) -> None:
    def at_rank_0() -> dict[str, Any]:
        port = world.manager.heartbeats[-1].rendezvous_port
        return {"workers": [pb.WorkerAssignment(rank=0, local_rank=0)], "rendezvous_port": port}

    await world.start()
    ports = [at_rank_0()["rendezvous_port"]]
    world.launch(**at_rank_0())
    await world.manager.fact("worker_started")
    for generation in (2, 3):
        await world.manager.until(lambda: at_rank_0()["rendezvous_port"] not in (0, *ports))
        ports.append(at_rank_0()["rendezvous_port"])
        world.stop(generation - 1)
        await world.manager.fact("worker_exited", generation - 1)
        world.launch(generation, in_place=True, **at_rank_0())
        await world.manager.fact("worker_started", generation)
        assert json.loads(world.log_of(generation, 0))[0]["MASTER_PORT"] == str(ports[-1])


async def test_a_launch_in_place_starts_no_process(world: InPlaceAgent) -> None:
    await world.start()
    world.launch(1, in_place=True)
    await world.manager.fact("worker_exited")
    assert world.exits() == [(1, 1, "LAUNCH_REFUSED")]


async def test_a_survivor_that_ends_when_it_is_assigned_has_its_rank_refused(world: InPlaceAgent) -> None:
    (world.folder / "crashes").touch()
    await world.survive()
    world.launch(2, in_place=True)
    _, refused = await world.manager.fact("worker_exited", 2)
    assert refused.cause == pb.EXIT_CAUSE_LAUNCH_REFUSED
    assert "its process ended with exit code 3 before it took the rank" in refused.error_text


# ---------------------------------------------------------------- ends of survivors


async def test_a_survivor_that_does_not_answer_is_killed(world: InPlaceAgent) -> None:
    world.assignment_s = 0.5
    (world.folder / "deaf").touch()
    process = await world.survive()
    world.launch(2, in_place=True)
    await world.manager.fact("worker_exited", 2)
    assert world.exits()[1] == (2, 1, "LAUNCH_REFUSED")
    assert not runs(process)


async def test_a_survivor_that_no_generation_takes_is_killed(world: InPlaceAgent) -> None:
    process = await world.survive("--keep-warm-s", "0.5", "--memory-part", "0")
    await until(lambda: not runs(process))
    assert world.exits() == [(1, 1, "GENERATION_ENDED")]


async def test_a_new_process_on_its_device_ends_a_survivor(world: InPlaceAgent) -> None:
    process = await world.survive()
    world.launch(2)
    _, started = await world.manager.fact("worker_started", 2)
    assert started.pid != process.pid
    await until(lambda: not runs(process))
    assert world.exits() == [(1, 1, "GENERATION_ENDED")]


async def test_a_stop_without_the_state_ends_a_survivor(world: InPlaceAgent) -> None:
    process = await world.survive()
    world.stop(keep_state=False)
    await until(lambda: not runs(process))
    assert world.exits() == [(1, 1, "GENERATION_ENDED")]


async def test_a_survivor_ends_with_the_lease(world: InPlaceAgent) -> None:
    process = await world.survive("--keep-warm-s", "3600")
    world.manager.welcome.lease_s, world.manager.acks = 2.0, False
    world.manager.hang_up()
    await until(lambda: not runs(process))


async def test_a_drained_agent_ends_its_survivors_and_exits(world: InPlaceAgent) -> None:
    process = await world.survive()
    world.manager.send_message(drain=pb.Drain(reason="test"))
    assert (await ended(world.agents[0]))[0] == 0
    assert not runs(process)


async def test_a_survivor_does_not_outlive_its_agent(world: InPlaceAgent) -> None:
    process = await world.survive()
    world.agents[0].kill()
    await until(lambda: not runs(process))


# ---------------------------------------------------------------- holders


async def give(world: InPlaceAgent, **changes: Any) -> tuple[psutil.Process, psutil.Process]:
    """A process that gives the state of generation 1, and one that takes it as rank 1 of generation 2."""
    holder = await world.survive()
    world.launch(2, holders=[1], holders_generation=1, **changes)
    _, started = await world.manager.fact("worker_started", 2)
    await until(lambda: len(world.log_of(1).splitlines()) == 2)
    return holder, psutil.Process(started.pid)


async def test_a_process_gives_its_state_to_the_next_generation(world: InPlaceAgent) -> None:
    holder, taker = await give(world, secret="5ec3e7", rendezvous_port=4711)
    assert runs(holder)
    assert holder.pid != taker.pid
    environ, secret = json.loads(world.log_of(1).splitlines()[1])
    assert secret == "5ec3e7"
    assert "5ec3e7" not in environ.values()
    assert {"VARUNA_SECRET", "VARUNA_SECRET_FROM_AGENT"} & environ.keys() == set()
    assert (environ["VARUNA_GENERATION"], environ["RANK"], environ["VARUNA_HOLDERS"]) == ("2", "1", "1")
    assert (environ["MASTER_PORT"], environ["WORLD_SIZE"]) == ("4711", "2")
    assert environ["VARUNA_AGENT_SOCKET"]

    taker.send_signal(signal.SIGUSR1)
    await world.manager.fact("steps_completed")
    await until(lambda: not runs(holder))
    assert runs(taker)
    assert world.exits() == [(1, 1, "GENERATION_ENDED")]
    world.stop(2)
    await world.manager.fact("worker_exited", 2)
    assert world.exits()[1] == (2, 1, "GENERATION_ENDED")


async def test_new_workers_know_their_holders(world: InPlaceAgent) -> None:
    await world.survive()
    (world.folder / "shows").touch()
    world.launch(2, holders=[1, 4], holders_generation=1)
    await world.manager.fact("worker_started", 2)
    assert "VARUNA_HOLDERS=1,4" in world.log_of(2)


async def test_a_holder_ends_by_itself_when_its_state_has_been_taken(world: InPlaceAgent) -> None:
    (world.folder / "taken").touch()
    holder, taker = await give(world)
    await until(lambda: not runs(holder))
    assert runs(taker)
    assert world.exits() == [(1, 1, "GENERATION_ENDED")]


async def test_a_holder_gives_again_after_a_second_loss(world: InPlaceAgent) -> None:
    holder, taker = await give(world)
    taker.kill()
    await world.manager.fact("worker_exited", 2)
    world.launch(3, holders=[1], holders_generation=1)
    await world.manager.fact("worker_started", 3)
    await until(lambda: len(world.log_of(1).splitlines()) == 3)
    assert json.loads(world.log_of(1).splitlines()[2])[0]["VARUNA_GENERATION"] == "3"
    assert runs(holder)
    world.launch(4)
    await world.manager.fact("worker_started", 4)
    await until(lambda: not runs(holder))


async def test_on_a_gpu_a_worker_starts_when_its_holder_has_freed_the_device(world: InPlaceAgent) -> None:
    holder = await world.survive("--device", "cuda")
    world.launch(2, holders=[1], holders_generation=1)
    await world.manager.fact("worker_started", 2)
    assert len(world.log_of(1).splitlines()) == 2
    assert runs(holder)


@pytest.mark.slow  # it is killed after a minute
async def test_on_a_gpu_a_worker_starts_when_a_holder_that_does_not_answer_is_killed(world: InPlaceAgent) -> None:
    (world.folder / "deaf").touch()
    holder = await world.survive("--device", "cuda")
    world.launch(2, holders=[1], holders_generation=1)
    await world.manager.fact("worker_started", 2)
    assert not runs(holder)


async def test_a_holder_whose_state_is_not_taken_elsewhere_is_killed(world: InPlaceAgent) -> None:
    holder = await world.survive("--keep-warm-s", "2")
    world.launch(2, workers=[], holders=[1], holders_generation=1)
    await until(lambda: not runs(holder))
    assert world.exits() == [(1, 1, "GENERATION_ENDED")]


async def test_a_holder_does_not_outlive_its_agent(world: InPlaceAgent) -> None:
    holder, taker = await give(world)
    world.agents[0].kill()
    await until(lambda: not runs(holder) and not runs(taker))


async def test_a_job_that_is_stopped_ends_its_holders(world: InPlaceAgent) -> None:
    holder, taker = await give(world)
    world.stop(2, keep_state=False)
    await until(lambda: not runs(holder) and not runs(taker))


# ---------------------------------------------------------------- another user


@needs_root
async def test_a_worker_of_another_user_can_open_its_new_log_and_no_other(folder: Path) -> None:
    nobody = JobUser.find_user("nobody")
    keep_private(folder / "vm", nobody)
    log = folder / "vm" / "jobs" / "job" / "g2" / "rank1.log"
    shared = SharedLogs(folder / "vm", nobody).make_log(log)
    commands = [f"echo hello >> {shared}", f"echo hello >> {log}", f"ls {shared.parent}"]
    shells = [await asyncio.create_subprocess_exec("/bin/sh", "-c", command, user="nobody") for command in commands]
    assert [await shell.wait() == 0 for shell in shells] == [True, False, False]
    assert log.read_text() == "hello\n"
