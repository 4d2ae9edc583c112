"""The whole manager as a process. Agents are scripted: they speak agent.proto over real gRPC streams.

The local provider starts idle processes as VMs (`agent_command`), and the test dials in as those VMs, so that VMs come
and go for real while each agent sends exactly what the test wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx

from forked_manager import ForkedManager, ManagerZygote
from http_limits import ONE_CALL_EACH
from left_vms import kill_left_vms
from migrated_stores import migrated
from own_ports import own_ports
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import DEADLINE_S, POLL_S, until

IDLE_VM = json.dumps(["/bin/sh", "-c", "exec sleep 600", "vm"])


def profile_json(sections: int = 8) -> str:
    """A model of equal sections, quick enough that pipelines and replicas both pay."""
    measurements = [
        {
            "micro_batch": m,
            "forward_us": 1000.0 * m,
            "backward_us": 2000.0 * m,
            "recompute_us": 1000.0 * m,
            "output_bytes": 1000 * m,
            "input_bytes": 1000 * m,
            "activation_bytes": 10_000 * m,
        }
        for m in (1, 2, 4)
    ]
    return json.dumps(
        {
            "schema": "varuna.profile/1",
            "environment": {},
            "sections": [
                {
                    "index": i,
                    "name": f"block {i}",
                    "parameter_bytes": 1000,
                    "optimizer_bytes": 2000,
                    "gradient_bytes": 1000,
                    "measurements": measurements,
                }
                for i in range(sections)
            ],
            "shared_parameters": [],
            "links": {
                "same_vm": {"latency_us": 10.0, "bandwidth_bytes_per_s": 1e9, "jitter_us": 0.0},
                "other_vm": {"latency_us": 50.0, "bandwidth_bytes_per_s": 1e9, "jitter_us": 0.0},
            },
            "all_reduce": [{"ranks": 2, "bytes": 1000, "us": 100.0}],
        }
    )


class ScriptedAgent:
    """One VM's agent: connects, heartbeats, keeps every command, and reports what the test passes to `report`."""

    def __init__(self, address: str, vm_id: str, port: int, gpu_type: str = "") -> None:
        self.address, self.vm_id, self.port, self.gpu_type = address, vm_id, port, gpu_type
        self.incarnation = str(uuid.uuid4())
        self.received: list[pb.ManagerMessage] = []
        self.acked = 0
        self.beats_acked = 0
        self.running: list[pb.RunningWorker] = []
        self.micro_batch_us: dict[int, int] = {}
        """By rank: the time that every heartbeat reports. With one, each heartbeat also reports a new step."""
        self.evaluating = False
        """Whether every heartbeat reports one more evaluated micro-batch."""
        self.starts_ahead = True
        """Whether processes that are started ahead reach Varuna() at once."""
        self.newcomers: list[pb.Newcomer] = []
        self.seen: list[pb.SeenGeneration] = []
        self.unacked: list[pb.Report] = []
        self._number = 0
        self._outgoing: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._channel: grpc.aio.Channel | None = None

    @property
    def is_over(self) -> bool:
        """Whether the manager has ended the stream."""
        return bool(self._tasks) and self._tasks[0].done()

    async def connect(self) -> None:
        """Returns when the manager has answered. A stream whose Hello comes too late, on a busy machine, is over."""
        async with asyncio.timeout(DEADLINE_S):
            await self._dial()
            while not self._is_answered():
                if self.is_over:
                    await self.close()
                    await self._dial()
                await asyncio.sleep(POLL_S)

    def _is_answered(self) -> bool:
        return any(message.WhichOneof("body") in ("welcome", "refused") for message in self.received)

    async def _dial(self) -> None:
        self._outgoing = asyncio.Queue()
        hello = pb.Hello(
            vm_id=self.vm_id,
            incarnation=self.incarnation,
            host="127.0.0.1",
            gpus=1,
            device_memory_bytes=2**30,
            gpu_type=self.gpu_type,
            rendezvous_port=self.port,
            workers=self.running,
            seen_generations=self.seen,
        )
        self._outgoing.put_nowait(pb.AgentMessage(hello=hello))
        for report in self.unacked:
            self._outgoing.put_nowait(pb.AgentMessage(report=report))
        self._channel = grpc.aio.insecure_channel(self.address)
        call = agent_pb2_grpc.AgentServiceStub(self._channel).Connect(self._messages())
        self._tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._beat())]

    async def _messages(self) -> AsyncIterator[pb.AgentMessage]:
        while True:
            yield await self._outgoing.get()

    async def _read(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                self.received.append(message)
                if message.WhichOneof("body") == "ack":
                    self.acked = max(self.acked, message.ack.reports_through)
                    self.beats_acked = max(self.beats_acked, message.ack.heartbeat_sequence)
                    self.unacked = [r for r in self.unacked if r.number > self.acked]
                if message.WhichOneof("body") == "start_newcomers" and self.starts_ahead:
                    self.reach_door(message.start_newcomers)
                if message.WhichOneof("body") in ("launch", "end_newcomers"):
                    self.newcomers = []
                if message.WhichOneof("body") == "launch":
                    self.port += 1  # the old one belongs to rank 0 now
                    launch = message.launch
                    self.seen.append(pb.SeenGeneration(job_id=launch.job_id, generation=launch.generation))
                if message.WhichOneof("body") == "fetch_logs":
                    request = message.fetch_logs
                    chunk = pb.LogChunk(request_id=request.request_id, data=b"a line\n", last=True)
                    self._outgoing.put_nowait(pb.AgentMessage(log_chunk=chunk))

    async def _beat(self) -> None:
        sequence, evaluated = 0, 0
        while True:
            sequence, evaluated = sequence + 1, evaluated + self.evaluating
            workers = []
            for worker in self.running:
                took_us = self.micro_batch_us.get(worker.rank, 0)
                worker.step += 1 if took_us else 0
                health = pb.WorkerHealth(
                    job_id=worker.job_id, generation=worker.generation, rank=worker.rank, step=worker.step
                )
                health.forward_us, health.backward_us = took_us // 3, took_us - took_us // 3
                health.evaluated = evaluated
                workers.append(health)
            beat = pb.Heartbeat(sequence=sequence, rendezvous_port=self.port, workers=workers, newcomers=self.newcomers)
            self._outgoing.put_nowait(pb.AgentMessage(heartbeat=beat))
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)
        self.received = []

    def report(self, **fact: Any) -> None:
        self._number += 1
        report = pb.Report(number=self._number, **fact)
        self.unacked.append(report)
        self._outgoing.put_nowait(pb.AgentMessage(report=report))

    def commands(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.received if m.WhichOneof("body") == kind]

    def reach_door(self, ahead: pb.StartNewcomers, fault: str = "") -> None:
        """The processes that were started ahead wait for their ranks; or there are none, because of `fault`."""
        self.newcomers = [
            pb.Newcomer(
                job_id=ahead.launch.job_id,
                request=ahead.request,
                local_rank=worker.local_rank,
                at_door=not fault,
                fault=fault,
            )
            for worker in ahead.launch.workers
        ]

    async def start_ahead(self, generation: int) -> pb.StartNewcomers:
        found: list[pb.StartNewcomers] = await until(
            lambda: [m for m in self.commands("start_newcomers") if m.launch.generation == generation],
            f"newcomers of generation {generation} on {self.vm_id}",
        )
        return found[-1]

    async def launch(self, generation: int) -> pb.Launch:
        """Wait for the launch of this generation."""
        found: list[pb.Launch] = await until(
            lambda: [m for m in self.commands("launch") if m.generation == generation],
            f"a launch of generation {generation} on {self.vm_id}",
        )
        assert len(found) == 1, "sent twice on one stream"
        return found[0]

    async def stop(self, generation: int) -> pb.Stop:
        found: list[pb.Stop] = await until(
            lambda: [m for m in self.commands("stop") if m.generation == generation],
            f"a stop of generation {generation} on {self.vm_id}",
        )
        return found[0]

    def started(self, launch: pb.Launch, resumed_step: int = 0, **more: int) -> None:
        for worker in launch.workers:
            fact = pb.WorkerStarted(
                job_id=launch.job_id,
                generation=launch.generation,
                rank=worker.rank,
                pid=1,
                resumed_step=resumed_step,
                **more,
            )
            self.report(worker_started=fact)

    def exited(
        self,
        launch: pb.Launch,
        cause: pb.ExitCause,
        error: str = "",
        held: pb.HeldState | None = None,
        shortage: pb.MemoryShortage | None = None,
    ) -> None:
        for worker in launch.workers:
            fact = pb.WorkerExited(
                job_id=launch.job_id,
                generation=launch.generation,
                rank=worker.rank,
                cause=cause,
                error_text=error,
                held=held,
                shortage=shortage,
            )
            self.report(worker_exited=fact)

    def steps(self, launch: pb.Launch, *steps: int) -> None:
        results = [pb.StepResult(step=step, loss=1.0 / step, step_us=1000, examples=8) for step in steps]
        fact = pb.StepsCompleted(job_id=launch.job_id, generation=launch.generation, steps=results)
        self.report(steps_completed=fact)


class ScriptedManager:
    """The manager's process, its REST, and the agents of the test."""

    def __init__(self, data_dir: Path, zygote: ManagerZygote) -> None:
        self.data_dir = data_dir
        self.real_agents = False
        self.program: tuple[str, ...] = ()
        """Another than the manager's own, with its arguments."""
        self.process: subprocess.Popen[bytes] | ForkedManager | None = None
        self._zygote = zygote
        self.rest = httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S, limits=ONE_CALL_EACH)
        self.agents: dict[str, ScriptedAgent] = {}

    async def start(self, *flags: str) -> None:
        # A manager that starts again keeps the ports of before, which nobody else may have taken meanwhile.
        http, grpc_port = (0, 0) if (self.data_dir / "manager.json").exists() else own_ports(2)
        arguments = ["--data-dir", str(self.data_dir), "--http-port", str(http), "--grpc-port", str(grpc_port)]
        # However long this machine stands still, nothing is taken for silent, late or hanging.
        arguments += ["--suspect-after-s", "3600", "--lost-after-s", "3600", "--hang-minimum-s", "600"]
        arguments += ["--first-step-timeout-s", "600", "--growth-settle-s", "0.3", "--start-settle-s", "600", *flags]
        if not self.real_agents:
            arguments += ["--agent-command", IDLE_VM]
        if "--database-url" not in flags and not (self.data_dir / "manager.db").exists():
            migrated(self.data_dir / "manager.db")
        self.process = await asyncio.to_thread(self._spawn, arguments)
        await until(self._ready, "the manager to be ready")

    def _spawn(self, arguments: list[str]) -> subprocess.Popen[bytes] | ForkedManager:
        path = self.data_dir.parent / "manager.log"
        if not self.program:
            return self._zygote.start(arguments, path)
        with path.open("ab") as log:
            return subprocess.Popen([sys.executable, *self.program, *arguments], stderr=log)

    async def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.data_dir.parent / "manager.log").read_text()
        try:
            addresses = json.loads((self.data_dir / "manager.json").read_text())
            if addresses["pid"] != self.process.pid:
                return False
            self.rest.base_url = httpx.URL(f"http://{addresses['http']}/api/v1/")
            self.grpc = addresses["grpc"]
            return (await self.rest.get("readyz")).status_code == 200
        except (FileNotFoundError, httpx.TransportError):
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)

    async def get(self, path: str) -> Any:
        response = await self.rest.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    async def connect_vms(self, count: int, *, gpu_types: Sequence[str] = ()) -> list[ScriptedAgent]:
        """Dial in as each VM that the provider has. `gpu_types`: of the first ones; "" of the others."""

        async def new() -> list[Any]:
            return [vm for vm in await self.get("vms") if vm["state"] != "gone" and vm["id"] not in self.agents]

        async def enough() -> Any:
            found = await new()
            return found if len(found) >= count else None

        agents: list[ScriptedAgent] = []
        for vm in await until(enough, f"{count} VMs"):
            gpu_type = gpu_types[len(agents)] if len(agents) < len(gpu_types) else ""
            agent = ScriptedAgent(self.grpc, vm["id"], 20_000 + 100 * len(self.agents), gpu_type)
            self.agents[vm["id"]] = agent
            agents.append(agent)
            await agent.connect()
        return agents

    async def submit(self, **changes: Any) -> Any:
        spec = {"name": "train", "workdir": "/tmp", "run": "true", "global_batch": 8, **changes}
        response = await self.rest.post("jobs", json=spec)
        assert response.status_code == 201, response.text
        return response.json()

    async def job_in(self, state: str) -> Any:
        async def there() -> Any:
            job = await self.get("jobs/train")
            return job if job["state"] == state else None

        return await until(there, f"the job to be {state}")

    async def calibrate(self) -> list[pb.Launch]:
        """Play the calibration to its end; the launches of generation 2, by agent."""
        launches = {a.vm_id: await a.launch(1) for a in self.agents.values()}
        first = next(a for a in self.agents.values() if launches[a.vm_id].workers[0].rank == 0)
        fact = pb.ProfileMeasured(job_id=launches[first.vm_id].job_id, generation=1, profile_json=profile_json())
        first.report(profile_measured=fact)
        for agent in self.agents.values():
            agent.exited(launches[agent.vm_id], pb.EXIT_CAUSE_FINISHED)
        return [await agent.launch(2) for agent in self.agents.values()]

    async def close(self) -> None:
        for agent in self.agents.values():
            await agent.close()
        await self.rest.aclose()
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=DEADLINE_S)
        kill_left_vms(self.data_dir / "vms")


async def start_training(
    manager: ScriptedManager,
    vms: int,
    *,
    first_steps: tuple[int, ...] = (1, 2, 3),
    flags: tuple[str, ...] = (),
    job: dict[str, Any] | None = None,
) -> list[Any]:
    """A job in generation 2 with some steps done: [(agent, its launch)]."""
    await manager.start("--vms", str(vms), *flags)
    await manager.submit(**(job or {}))
    agents = await manager.connect_vms(vms)
    launches = await manager.calibrate()
    pairs = list(zip(agents, launches, strict=True))
    for agent, launch in pairs:
        agent.started(launch)
    rank0 = next(pair for pair in pairs if pair[1].workers[0].rank == 0)
    rank0[0].steps(rank0[1], *first_steps)
    await until(lambda: not rank0[0].unacked, "the steps to be stored")
    return pairs
