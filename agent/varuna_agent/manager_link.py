"""The stream to the manager, of several to the one that leads: dialled again and again, with jittered backoff."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio
import structlog

from varuna_agent.backoff import Backoff
from varuna_agent.channels import open_channel
from varuna_agent.workdirs import WorkdirError
from varuna_proto.names import is_plain
from varuna_proto.v1 import agent_pb2, agent_pb2_grpc

if TYPE_CHECKING:  # an agent without TLS starts sooner
    from varuna_agent.identity import AgentIdentity

__all__ = ["Backoff", "ManagerLink", "ManagerListener"]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_Stream = grpc.aio.StreamStreamCall[agent_pb2.AgentMessage, agent_pb2.ManagerMessage]


def _unsafe_job(message: agent_pb2.ManagerMessage) -> str | None:
    """The id of the message's job, when it may not become a part of paths on this VM."""
    kind = message.WhichOneof("body")
    job = getattr(getattr(message, kind), "job_id", None) if kind is not None else None
    return job if isinstance(job, str) and not is_plain(job) else None


class ManagerListener(Protocol):
    def opened(self) -> None: ...

    def received(self, message: agent_pb2.ManagerMessage) -> None: ...

    def closed(self, reason: str) -> None: ...


class ManagerLink:
    """Keeps a stream to the manager open for as long as `run` runs.

    Args:
        addresses: host:port of the manager, or of each, separated by commas. One that does not lead is passed over at
            once, and so is one that does not answer; after a round of them comes a wait.
        identity: presented to the manager, and renewed; None: without TLS.
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
        self._heard = False
        self._hung_up = False

    def send(self, message: agent_pb2.AgentMessage) -> None:
        """Queue for the stream; dropped when there is none (what must arrive is sent again after a reconnection)."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    def hang_up(self) -> None:
        if self._call is not None:
            self._hung_up = True
            self._call.cancel()

    async def fetch_archive(self, vm_id: str, sha256: str) -> AsyncIterator[bytes]:
        """The bytes of a packed workdir, from the manager that this VM converses with. Raises WorkdirError."""
        try:
            async with self._channel(self._addresses[self._next]) as channel:
                stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)
                async for chunk in stub.FetchArchive(agent_pb2.ArchiveRequest(vm_id=vm_id, sha256=sha256)):
                    yield chunk.data
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            raise WorkdirError(f"archive {sha256[:12]} does not come from the manager: {reason}") from error

    async def run(self) -> None:
        renewing = None
        if self._identity is not None:
            renewing = asyncio.create_task(self._identity.keep_renewed(self._addresses), name="renews the certificate")
        try:
            await self._keep_conversing()
        finally:
            if renewing is not None:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)

    async def _keep_conversing(self) -> None:
        passed_over = 0
        while True:
            address = self._addresses[self._next]
            began = time.monotonic()
            reason = await self._converse(address)
            # Not at the Welcome: a manager that takes us and drops us again (its disk is full) must not be dialled
            # ten times a second by a whole fleet.
            if time.monotonic() - began >= self._backoff.most_s:
                self._backoff.reset()
            wait_s = 0.0
            passed_over = 0 if self._heard else passed_over + 1
            if self._heard:
                wait_s = self._backoff.next_s()  # it was the leader: it most likely is again
            else:
                self._next = (self._next + 1) % len(self._addresses)
                if passed_over % len(self._addresses) == 0:
                    wait_s = self._backoff.next_s()
            _log.info("no stream to the manager", manager=address, reason=reason, next_try_s=round(wait_s, 3))
            await asyncio.sleep(wait_s)

    async def _converse(self, address: str) -> str:
        """One stream from its beginning to its end; returns why it ended."""
        async with self._channel(address) as channel:
            stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)
            call: _Stream = stub.Connect(None)
            self._call, self._outgoing, self._heard = call, asyncio.Queue(), False
            reason = "cancelled"
            self._listener.opened()
            writer = asyncio.create_task(self._write(call, self._outgoing), name="writes to the manager")
            try:
                reason = await self._read(call)
            finally:
                self._call = self._outgoing = None
                writer.cancel()
                call.cancel()
                with suppress(asyncio.CancelledError):
                    await writer
                self._listener.closed(reason)
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
                if (job := _unsafe_job(message)) is not None:
                    return f"the manager named a job {job[:80]!r}, which is no plain name and would become a path"
                self._heard = True
                self._listener.received(message)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}{self._hint(error.details() or '')}"
        except asyncio.CancelledError:
            if not self._hung_up:
                raise  # it is this task that was cancelled, not the stream
            self._hung_up = False
            return "hung up"

    def _hint(self, details: str) -> str:
        """What a failed handshake means."""
        if self._heard:
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
