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

from varuna_agent.state import WorkerKey
from varuna_agent.workers.isolation import JobUser
from varuna_proto import framing
from varuna_proto.v1 import agent_pb2, worker_pb2

_HELLO_WITHIN_S = 10.0
_MAX_SOCKET_PATH_CHARS = 100
"""sun_path has 108 bytes on Linux, 104 elsewhere."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class WorkerListener(Protocol):
    """Receives what happens on the connections of workers."""

    def accept_worker(self, key: WorkerKey, pid: int) -> bool:
        """Whether this agent started the worker; if not, the link closes its connection, and the worker ends."""

    def receive_worker_message(self, key: WorkerKey, message: worker_pb2.WorkerMessage) -> None: ...

    def handle_worker_disconnection(self, key: WorkerKey) -> None: ...


@dataclass
class _WorkerConnection:
    key: WorkerKey
    writer: asyncio.StreamWriter
    successor: WorkerKey | None = None
    """The worker that its process was assigned to be, until it has sent a hello as that worker."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)


def socket_path(vm_dir: Path) -> Path:
    """Inside `vm_dir` if that path is short enough for a Unix socket, else in a new temporary folder."""
    path = vm_dir.resolve() / "agent.sock"
    if len(str(path).encode()) <= _MAX_SOCKET_PATH_CHARS:
        return path
    return Path(tempfile.mkdtemp(prefix="varuna-")) / "agent.sock"


class WorkerLink:
    """Accepts workers, passes their messages on, and sends them commands.

    Args:
        user: the user of the workers, who owns the socket; None: the agent's own user.
    """

    def __init__(self, path: Path, listener: WorkerListener, user: JobUser | None = None) -> None:
        self.path = path
        self._listener = listener
        self._user = user
        self._server: asyncio.Server | None = None
        self._connections: dict[WorkerKey, _WorkerConnection] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._unnamed: set[asyncio.Event] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        self.path.chmod(0o600)
        if self._user is not None:
            self._user.take_path(self.path)
            if self.path.parent.name.startswith("varuna-"):
                self.path.parent.chmod(0o711)

    def send_admission(self, key: WorkerKey, secret: str) -> None:
        self._send(key, worker_pb2.AgentToWorker(admitted=worker_pb2.Admitted(secret=secret)))

    def send_leave(
        self,
        key: WorkerKey,
        mode: agent_pb2.StopMode.ValueType,
        *,
        keep_state: bool = False,
        in_place: bool = False,
        within_step: bool = False,
        spare: bool = False,
        store_state: bool = False,
    ) -> None:
        leave = worker_pb2.Leave(
            mode=mode,
            keep_state=keep_state,
            in_place=in_place,
            within_step=within_step,
            spare=spare,
            store_state=store_state,
        )
        self._send(key, worker_pb2.AgentToWorker(leave=leave))

    def send_assignment(self, key: WorkerKey, successor: WorkerKey, assigned: worker_pb2.Assigned) -> None:
        """The process of `key` is to go on as `successor`: its connection is that worker's from its next hello on."""
        connection = self._connections.get(key)
        if connection is not None:
            connection.successor = successor
            self._connections[successor] = connection  # no other process may present itself as that worker
            connection.writer.write(framing.frame(worker_pb2.AgentToWorker(assigned=assigned)))

    def send_give_state(self, key: WorkerKey, give_state: worker_pb2.GiveState) -> None:
        self._send(key, worker_pb2.AgentToWorker(give_state=give_state))

    def send_ahead_part(self, key: WorkerKey, part: worker_pb2.AheadPart) -> None:
        """Tells a process its part in sending the state ahead."""
        self._send(key, worker_pb2.AgentToWorker(ahead_part=part))

    def send_store_state(self, key: WorkerKey) -> None:
        self._send(key, worker_pb2.AgentToWorker(store_state=worker_pb2.StoreState()))

    def _send(self, key: WorkerKey, message: worker_pb2.AgentToWorker) -> None:
        connection = self._connections.get(key)
        if connection is not None:
            connection.writer.write(framing.frame(message))

    async def wait_drained(self, key: WorkerKey, timeout_s: float) -> None:
        """Wait until all messages of an ended worker are handled; its end of the socket is already closed."""
        for _ in range(3):  # lets the loop accept a connection that waits in the socket's queue
            await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for hello in tuple(self._unnamed):
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
        self._unnamed.add(hello)
        task = asyncio.create_task(self._serve(reader, writer, hello), name="worker connection")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: asyncio.Event) -> None:
        own: _WorkerConnection | None = None
        try:
            own = await self._receive_hello(reader, writer)
            hello.set()
            while own is not None and (message := await framing.read(reader, worker_pb2.WorkerMessage)) is not None:
                if own.successor is not None and message.HasField("hello"):
                    self._accept_successor(own, message.hello)
                else:
                    self._listener.receive_worker_message(own.key, message)
        except (DecodeError, ValueError) as error:
            _log.warning(
                "a worker's message does not follow the protocol; its connection is closed",
                error=str(error),
                **(own.key.log_fields if own is not None else {}),
            )
        finally:
            hello.set()
            self._unnamed.discard(hello)
            writer.close()
            if own is not None:
                for key in (own.key, own.successor):
                    if key is not None:
                        del self._connections[key]
                own.closed.set()
                self._listener.handle_worker_disconnection(own.key)

    def _accept_successor(self, connection: _WorkerConnection, hello: worker_pb2.WorkerHello) -> None:
        """The process has taken the rank that it was assigned. Raises ValueError for any other."""
        key = _make_key(hello)
        if key != connection.successor or not self._listener.accept_worker(key, hello.pid):
            raise ValueError(f"it was assigned {connection.successor}, and presents itself as {key}")
        del self._connections[connection.key]
        connection.key, connection.successor = key, None

    async def _receive_hello(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _WorkerConnection | None:
        """The connection of the worker that has connected; None: none that this agent expects."""
        try:
            async with asyncio.timeout(_HELLO_WITHIN_S):
                message = await framing.read(reader, worker_pb2.WorkerMessage)
        except TimeoutError:
            return None
        if message is None or message.WhichOneof("body") != "hello":
            return None
        key = _make_key(message.hello)
        own = self._connections.setdefault(key, _WorkerConnection(key, writer))
        if own.writer is writer and self._listener.accept_worker(key, message.hello.pid):
            return own
        if own.writer is writer:
            del self._connections[key]
        _log.warning("an unexpected worker was turned away", **key.log_fields, pid=message.hello.pid)
        return None


def _make_key(hello: worker_pb2.WorkerHello) -> WorkerKey:
    return WorkerKey(hello.job_id, hello.generation, hello.rank, hello.newcomer)
