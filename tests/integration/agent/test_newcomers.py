"""Processes that are started ahead, with the real library, between a manager and an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_world import FakeManager, ended, start_agent
from varuna_proto.v1 import agent_pb2 as pb

SCRIPT = """
import os
with open("began", "a") as began:
    began.write(f"{os.getpid()}\\n")
READS = [os.environ.get(name) for name in os.environ.get("READS", "RANK").split(",")]

import torch
from torch import nn
import varuna
from varuna.data import Batches

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    def forward(self, x):
        return self.layers(x).pow(2).mean()

batches = Batches(list(torch.ones(64, 4)), collate=lambda items: {"x": torch.stack(items)})
model = varuna.Varuna(Model(), get_batch_fn=lambda size, device="cpu": {"x": torch.zeros(size, 4)})
model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
print("resumed", model.resume(), flush=True)
_, batch = next(iter(batches))
model.step(batch)
now = [os.environ.get(name) for name in ("RANK", "VARUNA_GENERATION", "VARUNA_NEWCOMER", "VARUNA_COMMITTED_STEP")]
print("trained", READS, now, type(os.environ).__name__, len(batch["x"]), flush=True)
"""


class AheadWorld:
    def __init__(self, manager: FakeManager, folder: Path) -> None:
        self.manager = manager
        self.folder = folder

    def make_launch(self, generation: int, *, micro_batch: int = 2, **changes: Any) -> pb.Launch:
        return pb.Launch(
            job_id="job",
            generation=generation,
            kind=pb.GENERATION_KIND_TRAINING,
            workers=[pb.WorkerAssignment(rank=0, local_rank=0)],
            plan=pb.PlanSpec(p=1, d=1, micro_batch=micro_batch, global_batch=8, policy="work-conserving"),
            command="python train.py",
            workdir=str(self.folder),
            world_size=1,
            checkpoint_url=(self.folder / "checkpoints").as_uri(),
            **changes,
        )

    async def start_ahead(self, **changes: Any) -> pb.Newcomer:
        """The newcomer, when it is at the door or has a fault."""
        command = pb.StartNewcomers(request="r", launch=self.make_launch(2, **changes))
        self.manager.send_message(start_newcomers=command)

        def decided() -> list[pb.Newcomer]:
            return [one for one in self.manager.heartbeats[-1].newcomers if one.at_door or one.fault]

        (newcomer,) = await self.manager.until(decided)
        return newcomer

    def log_of(self, generation: int) -> str:
        return (self.folder / "jobs" / "job" / f"g{generation}" / "rank0.log").read_text()


@pytest_asyncio.fixture
async def world(tmp_path: Path, agents: list[asyncio.subprocess.Process]) -> AsyncIterator[AheadWorld]:
    manager = FakeManager(heartbeat_interval_s=10.0)
    await manager.start()
    (tmp_path / "train.py").write_text(SCRIPT)
    await start_agent(agents, f"127.0.0.1:{manager.port}", tmp_path)
    await manager.until(lambda: manager.heartbeats)
    yield AheadWorld(manager, tmp_path)
    for agent in agents:
        with suppress(ProcessLookupError):
            agent.terminate()
        await ended(agent)
    await manager.stop()


async def test_a_process_waits_in_varuna_and_goes_on_as_a_rank_of_a_later_generation(world: AheadWorld) -> None:
    newcomer = await world.start_ahead()
    assert newcomer == pb.Newcomer(job_id="job", request="r", local_rank=0, at_door=True)
    assert not world.manager.facts("worker_started")
    port = world.manager.heartbeats[-1].rendezvous_port
    launch = world.make_launch(3, micro_batch=4, secret="5ec3e7", rendezvous_port=port, rendezvous_host="127.0.0.1")
    world.manager.send_message(launch=launch)
    (started,) = await world.manager.fact("worker_started")
    (exited,) = await world.manager.fact("worker_exited")
    assert (exited.cause, exited.error_text) == (pb.EXIT_CAUSE_FINISHED, "")
    assert (world.folder / "began").read_text().split() == [str(started.pid)], "one process"
    assert "waits in Varuna() for its generation to start" in world.log_of(2)
    assert "trained ['0'] ['0', '3', None, None] _Environ 8" in world.log_of(3)
    assert "5ec3e7" not in world.log_of(2) + world.log_of(3)
    assert started.generation == 3
    assert "trace" in [phase.name for phase in started.phases]
    assert list(world.manager.heartbeats[-1].newcomers) == []


@pytest.mark.slow
async def test_a_script_that_reads_what_only_the_start_decides_cannot_be_started_ahead(world: AheadWorld) -> None:
    newcomer = await world.start_ahead(environment={"READS": "RANK,MASTER_PORT"})
    assert not newcomer.at_door
    assert newcomer.fault == (
        "the script reads MASTER_PORT before Varuna(), which only the start of the generation decides"
    )
    command = pb.EndNewcomers(job_id="job")
    world.manager.send_message(end_newcomers=command)
    await world.manager.until(lambda: not world.manager.heartbeats[-1].newcomers or None)
