"""The stream to the manager, or to the leading one of several. The agent redials it with jittered backoff."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio
import structlog

from varuna_agent.folders.workdirs import WorkdirError
from varuna_agent.link.backoff import Backoff
from varuna_agent.link.channels import open_channel, raise_if_cancelled
from varuna_proto.names import is_plain
from varuna_proto.v1 import agent_pb2, agent_pb2_grpc

if TYPE_CHECKING:  # an agent without TLS starts sooner
    from varuna_agent.identity.certificate import AgentIdentity

__all__ = ["Backoff", "ManagerLink", "ManagerListener"]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_CHUNK_LIMIT_S = 30.0
"""How long a manager may send nothing of an archive. That its host is gone, TCP notices after a quarter of an hour."""

_Stream = grpc.aio.StreamStreamCall[agent_pb2.AgentMessage, agent_pb2.ManagerMessage]


def _find_unsafe_job_id(message: agent_pb2.ManagerMessage) -> str | None:
    """The message's job id, if it must not become a part of paths on this VM; None: it is safe."""
    kind = message.WhichOneof("body")
    job = getattr(getattr(message, kind), "job_id", None) if kind is not None else None
    return job if isinstance(job, str) and not is_plain(job) else None


class ManagerListener(Protocol):
    """Receives what happens on the stream."""

    def handle_stream_open(self) -> None: ...

    def receive_manager_message(self, message: agent_pb2.ManagerMessage) -> None: ...

    def handle_stream_close(self, reason: str) -> None: ...


class ManagerLink:
    """Keeps a stream to the manager open for as long as `run` runs.

    Args:
        addresses: host:port of each manager, separated by commas. The agent goes to the next one at once when a
            manager does not lead or does not answer, and waits after each round.
        identity: the VM's certificate, which this link also renews; None: no TLS.
    """

    def __init__(
        self, addresses: str, backoff: Backoff, listener: ManagerListener, identity: AgentIdentity | None = None
    ) -> None:
        self._addresses = [address.strip() for address in addresses.split(",")]
        self._next = 0
        self._backoff = backoff
        self._listener = listener
        self._identity = identity
        self._outgoing: asyncio.Queue[agent_pb2.AgentMessage] | None = None
        self._call: _Stream | None = None
        self._has_message = False
        self._hung_up = False

    def send_message(self, message: agent_pb2.AgentMessage) -> None:
        """Queue for the stream; dropped when none is open (reports are sent again after a reconnection)."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    def hang_up(self) -> None:
        if self._call is not None:
            self._hung_up = True
            self._call.cancel()

    async def fetch_archive(self, vm_id: str, sha256: str) -> AsyncIterator[bytes]:
        """Fetch the bytes of a packed workdir from the current manager. Raises WorkdirError."""
        try:
            async with self._channel(self._addresses[self._next]) as channel:
                stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)
                chunks = aiter(stub.FetchArchive(agent_pb2.ArchiveRequest(vm_id=vm_id, sha256=sha256)))
                while True:
                    async with asyncio.timeout(_CHUNK_LIMIT_S):
                        chunk = await anext(chunks, None)
                    if chunk is None:
                        return
                    yield chunk.data
        except TimeoutError as error:
            reason = f"nothing came for {_CHUNK_LIMIT_S:g} s"
            raise WorkdirError(f"archive {sha256[:12]} does not come from the manager: {reason}") from error
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            reason = f"{error.code().name}: {error.details()}"
            raise WorkdirError(f"archive {sha256[:12]} does not come from the manager: {reason}") from error

    async def run(self) -> None:
        renewing = None
        if self._identity is not None:
            renewing = asyncio.create_task(self._identity.keep_renewed(self._addresses), name="renews the certificate")
        try:
            await self._keep_connected()
        finally:
            if renewing is not None:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)

    async def _keep_connected(self) -> None:
        silent_addresses = 0
        while True:
            address = self._addresses[self._next]
            began = time.monotonic()
            reason = await self._hold_stream(address)
            raise_if_cancelled()
            # Not at the Welcome: a whole fleet must not dial ten times a second a manager that welcomes agents and then
            # drops them, because its disk is full.
            if time.monotonic() - began >= self._backoff.most_s:
                self._backoff.reset_wait()
            wait_s = 0.0
            silent_addresses = 0 if self._has_message else silent_addresses + 1
            if self._has_message:
                wait_s = self._backoff.next_s()  # it was the leader: it probably still is
            else:
                self._next = (self._next + 1) % len(self._addresses)
                if silent_addresses % len(self._addresses) == 0:
                    wait_s = self._backoff.next_s()
            _log.info("no stream to the manager", manager=address, reason=reason, next_try_s=round(wait_s, 3))
            await asyncio.sleep(wait_s)

    async def _hold_stream(self, address: str) -> str:
        """Hold one stream until it ends; returns why it ended."""
        async with self._channel(address) as channel:
            stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)
            call: _Stream = stub.Connect(None)
            self._call, self._outgoing, self._has_message, self._hung_up = call, asyncio.Queue(), False, False
            reason = "cancelled"
            self._listener.handle_stream_open()
            writer = asyncio.create_task(self._write(call, self._outgoing), name="writes to the manager")
            try:
                reason = await self._read(call)
            finally:
                self._call = self._outgoing = None
                writer.cancel()
                call.cancel()
                await asyncio.wait([writer])  # `await writer` with suppression would swallow this task's own end
                self._listener.handle_stream_close(reason)
        return reason

    def _channel(self, address: str) -> grpc.aio.Channel:
        credentials = None if self._identity is None else self._identity.certificate.channel_credentials()
        return open_channel(address, credentials)

    async def _read(self, call: _Stream) -> str:
        try:
            while True:
                message = await call.read()
                if not isinstance(message, agent_pb2.ManagerMessage):
                    return "the manager closed the stream"
                if (job := _find_unsafe_job_id(message)) is not None:
                    return f"the manager named a job {job[:80]!r}, which is no plain name and would become a path"
                self._has_message = True
                self._listener.receive_manager_message(message)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}{self._hint(error.details() or '')}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._hung_up or task is None or task.cancelling():
                raise  # this task was cancelled, not only the stream
            self._hung_up = False
            return "hung up"

    def _hint(self, details: str) -> str:
        """What a failed handshake may mean, as text to append."""
        if self._has_message:
            return ""
        if self._identity is None:
            text = "; if this manager is a secure one, give this agent a --join-token-file"
            return text if "Socket closed" in details or "Connection reset" in details else ""
        if "WRONG_VERSION_NUMBER" in details:
            return "; this manager speaks no TLS: it is another one, or was started without --secure"
        if "CERTIFICATE_VERIFY_FAILED" in details:
            return "; its certificate is not from the authority that this VM joined, or not for this address"
        if "Socket closed" in details or "Connection reset" in details:
            until = self._identity.certificate.not_after.isoformat()
            return f"; it may refuse the certificate of this VM (good until {until})"
        return ""

    async def _write(self, call: _Stream, outgoing: asyncio.Queue[agent_pb2.AgentMessage]) -> None:
        # A write fails only when the stream is over; the reader learns why.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outgoing.get())
