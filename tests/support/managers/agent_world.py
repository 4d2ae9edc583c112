"""An agent process between a manager that speaks agent.proto and workers that speak worker.proto."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar

import grpc
import grpc.aio
import psutil

from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import DEADLINE_S

__all__ = ["PREAMBLE", "FakeManager", "StandbyManager", "ended", "launch", "runs", "start_agent"]


T = TypeVar("T")

PATIENT_AGENT = Path(__file__).with_name("patient_agent.py")


PREAMBLE = """
import os, socket, subprocess, sys
from varuna_proto import framing
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.v1 import worker_pb2 as w

env = WorkerEnvironment.from_environ(os.environ)
agent = socket.socket(socket.AF_UNIX)
agent.connect(env.agent_socket)

def send(**body):
    agent.sendall(framing.frame(w.WorkerMessage(**body)))

def wait_for_leave():
    message = framing.receive(agent, w.AgentToWorker)
    if message is None:
        os._exit(1)
    return message.leave.mode

def step(number):
    send(step_done=w.StepDone(step=number, loss=1.0 / number, step_us=1000, examples=8, forward_us=11, backward_us=22))

send(hello=w.WorkerHello(job_id=env.job_id, generation=env.generation, rank=env.rank, pid=os.getpid()))
"""


class FakeManager(agent_pb2_grpc.AgentServiceServicer):
    """Welcomes agents, acknowledges while `acks` is set, and keeps the messages that it receives."""

    def __init__(self, *, lease_s: float = 60.0, heartbeat_interval_s: float = 0.1) -> None:
        self.welcome = pb.Welcome(lease_s=lease_s, heartbeat_interval_s=heartbeat_interval_s)
        self.refuse = ""
        self.acks = True
        self.received: list[pb.AgentMessage] = []
        self._news = asyncio.Condition()
        self._outgoing: asyncio.Queue[pb.ManagerMessage | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ManagerMessage]:  # noqa: N802
        outgoing: asyncio.Queue[pb.ManagerMessage | None] = asyncio.Queue()
        self._outgoing = outgoing
        reader = asyncio.create_task(self._read(request_iterator, outgoing))
        try:
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def FetchArchive(self, request: pb.ArchiveRequest, context: Any) -> AsyncIterator[pb.ArchiveChunk]:  # noqa: N802
        """Serves no archive."""
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no archive {request.sha256}")
        yield pb.ArchiveChunk()

    async def _read(self, messages: AsyncIterator[pb.AgentMessage], outgoing: asyncio.Queue[Any]) -> None:
        sequence = 0
        async for message in messages:
            match message.WhichOneof("body"):
                case "hello":
                    if self.refuse:
                        outgoing.put_nowait(pb.ManagerMessage(refused=pb.Refused(reason=self.refuse)))
                    else:
                        outgoing.put_nowait(pb.ManagerMessage(welcome=self.welcome))
                case "heartbeat":
                    sequence = message.heartbeat.sequence
            async with self._news:
                self.received.append(message)
                self._news.notify_all()
            if self.acks and message.WhichOneof("body") in ("heartbeat", "report"):
                through = max((r.number for r in self.reports), default=0)
                outgoing.put_nowait(pb.ManagerMessage(ack=pb.Ack(heartbeat_sequence=sequence, reports_through=through)))

    def send_message(self, **body: Any) -> None:
        self._outgoing.put_nowait(pb.ManagerMessage(**body))

    def hang_up(self) -> None:
        self._outgoing.put_nowait(None)

    @property
    def reports(self) -> list[pb.Report]:
        return [m.report for m in self.received if m.WhichOneof("body") == "report"]

    @property
    def hellos(self) -> list[pb.Hello]:
        return [m.hello for m in self.received if m.WhichOneof("body") == "hello"]

    @property
    def heartbeats(self) -> list[pb.Heartbeat]:
        return [m.heartbeat for m in self.received if m.WhichOneof("body") == "heartbeat"]

    def facts(self, kind: str) -> list[Any]:
        """Each report once, however often it was sent."""
        by_number = {r.number: getattr(r, kind) for r in self.reports if r.WhichOneof("fact") == kind}
        return [by_number[number] for number in sorted(by_number)]

    async def until(self, probe: Callable[[], T]) -> T:
        """Wait until `probe` returns something true for the messages received so far, and return that."""
        async with asyncio.timeout(DEADLINE_S), self._news:
            while not (result := probe()):
                await self._news.wait()
        return result

    async def fact(self, kind: str, count: int = 1) -> list[Any]:
        def enough() -> list[Any]:
            facts = self.facts(kind)
            return facts if len(facts) >= count else []

        return await self.until(enough)


class StandbyManager(FakeManager):
    """Refuses agents, as a manager that does not lead."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = 0

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ManagerMessage]:  # noqa: N802
        self.connections += 1
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not the leader")
        yield pb.ManagerMessage()


def launch(tmp_path: Path, script: str, *, ranks: int = 1, generation: int = 1, **changes: Any) -> pb.Launch:
    name = f"worker-{generation}.py"
    (tmp_path / name).write_text(PREAMBLE + dedent(script))
    # An empty package stands for the real one, whose imports take seconds.
    (tmp_path / "varuna" / "worker").mkdir(parents=True, exist_ok=True)
    (tmp_path / "varuna" / "__init__.py").touch()
    (tmp_path / "varuna" / "worker" / "__init__.py").touch()
    (tmp_path / "varuna" / "worker" / "preload.py").touch()
    fields: dict[str, Any] = {
        "job_id": "job",
        "generation": generation,
        "kind": pb.GENERATION_KIND_TRAINING,
        "workers": [pb.WorkerAssignment(rank=rank + 1, local_rank=rank) for rank in range(ranks)],
        "plan": pb.PlanSpec(p=1, d=ranks + 1, micro_batch=2, global_batch=8),
        "command": f"python {name}",
        "workdir": str(tmp_path),
        "rendezvous_host": "127.0.0.1",
        "rendezvous_port": 9,
        "world_size": ranks + 1,
    }
    return pb.Launch(**{**fields, **changes})


async def start_agent(
    agents: list[asyncio.subprocess.Process],
    manager: str,
    vm_dir: Path,
    *more: str,
    environ: dict[str, str] | None = None,
    timings: Mapping[str, float] | None = None,
) -> asyncio.subprocess.Process:
    """`timings`: in seconds, those that are not the product's."""
    program = ["-m", "varuna_agent.main"] if timings is None else [str(PATIENT_AGENT), json.dumps({**timings})]
    arguments = ["--manager", manager, "--vm-id", "vm-1", "--vm-dir", str(vm_dir), "--gpus", "4", *more]
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=environ,
    )
    agents.append(agent)
    return agent


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended: a zombie that nobody has reaped yet has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def ended(agent: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(DEADLINE_S):
        _, errors = await agent.communicate()
    assert agent.returncode is not None
    return agent.returncode, errors.decode()
