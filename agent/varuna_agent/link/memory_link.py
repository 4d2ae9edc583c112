"""The Unix socket on which workers get memory files (worker.proto), for what they leave and for what they take."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog
from google.protobuf.message import DecodeError

from varuna_agent.state import WorkerKey
from varuna_agent.workers.isolation import JobUser
from varuna_agent.workers.memory_files import MemoryFiles, NoRoomError
from varuna_proto import framing
from varuna_proto.v1 import worker_pb2

_REQUEST_WITHIN_S = 10.0
_STORE_WITHIN_S = 120.0
"""An agent kills a worker that takes longer, but one whose script has failed."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class MemoryListener(Protocol):
    """Knows which worker may have which file."""

    def may_store(self, key: WorkerKey, secret: str) -> bool: ...

    def list_memories(self, key: WorkerKey, secret: str) -> list[WorkerKey]: ...

    def handle_state_stored(self, key: WorkerKey, step: int, size: int) -> None: ...


class MemoryLink:
    """Args:
    user: the user of the workers, who owns the socket; None: the agent's own user.
    """

    def __init__(self, path: Path, files: MemoryFiles, listener: MemoryListener, user: JobUser | None = None) -> None:
        self._path = path
        self._files = files
        self._listener = listener
        self._user = user
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        self._path.chmod(0o600)
        if self._user is not None:
            self._user.take_path(self._path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="memory of a worker")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_WITHIN_S):
                request = await framing.read(reader, worker_pb2.MemoryRequest)
            if request is None:
                return
            key = WorkerKey(request.job_id, request.generation, request.rank)
            if request.store_bytes:
                await self._store(key, request, reader, writer)
            else:
                kept = self._listener.list_memories(key, request.secret)
                files = [file for each in kept if (file := self._files.get_file(each)) is not None]
                _send_grant(writer, files)
        except (TimeoutError, DecodeError, ValueError, OSError) as error:
            _log.warning("a worker's request for memory failed", error=str(error) or type(error).__name__)
        finally:
            writer.close()

    async def _store(
        self,
        key: WorkerKey,
        request: worker_pb2.MemoryRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Raises TimeoutError, ValueError, OSError."""
        if not self._listener.may_store(key, request.secret):
            _send_grant(writer, [], "this agent expects nothing of that worker")
            return
        try:
            file = self._files.make_file(request.store_bytes)
        except NoRoomError as error:
            _log.warning("a worker's state is not kept", **key.log_fields, reason=str(error))
            _send_grant(writer, [], str(error))
            return
        stored: worker_pb2.StateStored | None = None
        try:
            _send_grant(writer, [file])
            async with asyncio.timeout(_STORE_WITHIN_S):
                stored = await framing.read(reader, worker_pb2.StateStored)
        finally:
            if stored is None:
                self._files.drop_file(file)
        if stored is not None:
            size = self._files.keep_file(file, key, stored.step)
            self._listener.handle_state_stored(key, stored.step, size)
            _send_grant(writer, [])


def _send_grant(writer: asyncio.StreamWriter, files: list[int], refusal: str = "") -> None:
    """Answers, if the worker is still there: a byte that carries the descriptors, then the message."""
    answer = framing.frame(worker_pb2.MemoryGranted(refusal=refusal))
    with suppress(OSError), socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
        # Nothing waits in the stream, so that this is not blocked, nor overtakes anything.
        socket.send_fds(connection, [b"\0"], files)
        writer.write(answer)
