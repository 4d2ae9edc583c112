"""The Unix socket on which workers talk to their agent (worker.proto)."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from google.protobuf.message import DecodeError

from varuna_agent.isolation import JobUser
from varuna_agent.state import WorkerKey
from varuna_proto import framing
from varuna_proto.v1 import agent_pb2, worker_pb2

_HELLO_WITHIN_S = 10.0
_MAX_SOCKET_PATH_CHARS = 100
"""sun_path has 108 bytes on Linux, 104 elsewhere."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class WorkerListener(Protocol):
    def connected(self, key: WorkerKey, pid: int) -> bool:
        """Whether the worker is one of ours; if not, its connection is closed, and it ends."""

    def said(self, key: WorkerKey, message: worker_pb2.WorkerMessage) -> None: ...

    def disconnected(self, key: WorkerKey) -> None: ...


@dataclass
class _Connection:
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)


def socket_path(vm_dir: Path) -> Path:
    """Inside vm_dir where the name is short enough for a Unix socket, else in a new folder for temporary files."""
    path = vm_dir.resolve() / "agent.sock"
    if len(str(path).encode()) <= _MAX_SOCKET_PATH_CHARS:
        return path
    return Path(tempfile.mkdtemp(prefix="varuna-")) / "agent.sock"


class WorkerLink:
    """Accepts workers, passes on what they say, tells them to leave.

    Args:
        user: as whom workers run: the socket is theirs alone; None: as this process.
    """

    def __init__(self, path: Path, listener: WorkerListener, user: JobUser | None = None) -> None:
        self.path = path
        self._listener = listener
        self._user = user
        self._server: asyncio.Server | None = None
        self._connections: dict[WorkerKey, _Connection] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._nameless: set[asyncio.Event] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        self.path.chmod(0o600)
        if self._user is not None:
            self._user.own(self.path)
            if self.path.parent.name.startswith("varuna-"):
                self.path.parent.chmod(0o711)

    def admit(self, key: WorkerKey, secret: str) -> None:
        self._send(key, worker_pb2.AgentToWorker(admitted=worker_pb2.Admitted(secret=secret)))

    def leave(self, key: WorkerKey, mode: agent_pb2.StopMode.ValueType) -> None:
        self._send(key, worker_pb2.AgentToWorker(leave=worker_pb2.Leave(mode=mode)))

    def _send(self, key: WorkerKey, message: worker_pb2.AgentToWorker) -> None:
        connection = self._connections.get(key)
        if connection is not None:
            connection.writer.write(framing.frame(message))

    async def drained(self, key: WorkerKey, timeout_s: float) -> None:
        """Wait until all that an ended worker has said is handled; its end of the socket is closed already."""
        for _ in range(3):  # for the loop to accept a connection that waits in the socket's queue
            await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for hello in tuple(self._nameless):
                    await hello.wait()
                connection = self._connections.get(key)
                if connection is not None:
                    await connection.closed.wait()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self.path.unlink(missing_ok=True)
        if self.path.parent.name.startswith("varuna-"):
            with suppress(OSError):
                self.path.parent.rmdir()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = asyncio.Event()
        self._nameless.add(hello)
        task = asyncio.create_task(self._serve(reader, writer, hello), name="worker connection")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: asyncio.Event) -> None:
        key: WorkerKey | None = None
        try:
            key = await self._greet(reader, writer)
            hello.set()
            while key is not None and (message := await framing.read(reader, worker_pb2.WorkerMessage)) is not None:
                self._listener.said(key, message)
        except (DecodeError, ValueError) as error:
            _log.warning(
                "what a worker says is not our protocol; its connection is closed",
                error=str(error),
                **(key.fields() if key is not None else {}),
            )
        finally:
            hello.set()
            self._nameless.discard(hello)
            writer.close()
            if key is not None:
                self._connections.pop(key).closed.set()
                self._listener.disconnected(key)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> WorkerKey | None:
        """Who is there; None when it is nobody of ours."""
        try:
            async with asyncio.timeout(_HELLO_WITHIN_S):
                message = await framing.read(reader, worker_pb2.WorkerMessage)
        except TimeoutError:
            return None
        if message is None or message.WhichOneof("body") != "hello":
            return None
        key = WorkerKey(message.hello.job_id, message.hello.generation, message.hello.rank)
        self._connections.setdefault(key, _Connection(writer))
        if self._connections[key].writer is writer and self._listener.connected(key, message.hello.pid):
            return key
        if self._connections[key].writer is writer:
            del self._connections[key]
        _log.warning("a worker that is not expected was turned away", **key.fields(), pid=message.hello.pid)
        return None
