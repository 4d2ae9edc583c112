"""The stream to the manager: dialled again and again, with jittered backoff."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from typing import Protocol

import grpc
import grpc.aio
import structlog

from varuna_proto.v1 import agent_pb2, agent_pb2_grpc

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_Stream = grpc.aio.StreamStreamCall[agent_pb2.AgentMessage, agent_pb2.ManagerMessage]

_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel shares the backoff of the one before
    ("grpc.enable_http_proxy", 0),  # the manager is on this machine or in our own network
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class Backoff:
    """Waiting times that double up to a bound, each shortened by up to a half at random, so that a fleet spreads."""

    def __init__(self, first_s: float, most_s: float, chance: random.Random) -> None:
        self._first_s = first_s
        self.most_s = most_s
        self._chance = chance
        self._failures = 0

    def next_s(self) -> float:
        wait_s = min(self.most_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return wait_s * self._chance.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0


class ManagerListener(Protocol):
    def opened(self) -> None: ...

    def received(self, message: agent_pb2.ManagerMessage) -> None: ...

    def closed(self, reason: str) -> None: ...


class ManagerLink:
    """Keeps a stream to the manager open for as long as `run` runs."""

    def __init__(self, address: str, backoff: Backoff, listener: ManagerListener) -> None:
        self._address = address
        self._backoff = backoff
        self._listener = listener
        self._outgoing: asyncio.Queue[agent_pb2.AgentMessage] | None = None
        self._call: _Stream | None = None
        self._hung_up = False

    def send(self, message: agent_pb2.AgentMessage) -> None:
        """Queue for the stream; dropped when there is none (what must arrive is sent again after a reconnection)."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    def hang_up(self) -> None:
        if self._call is not None:
            self._hung_up = True
            self._call.cancel()

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            reason = await self._converse()
            # Not at the Welcome: a manager that takes us and drops us again (its disk is full) must not be dialled
            # ten times a second by a whole fleet.
            if time.monotonic() - began >= self._backoff.most_s:
                self._backoff.reset()
            wait_s = self._backoff.next_s()
            _log.info("no stream to the manager", manager=self._address, reason=reason, next_try_s=round(wait_s, 3))
            await asyncio.sleep(wait_s)

    async def _converse(self) -> str:
        """One stream from its beginning to its end; returns why it ended."""
        async with grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
            stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)
            call: _Stream = stub.Connect(None)
            self._call, self._outgoing = call, asyncio.Queue()
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

    async def _read(self, call: _Stream) -> str:
        try:
            while True:
                message = await call.read()
                if not isinstance(message, agent_pb2.ManagerMessage):
                    return "the manager closed the stream"
                self._listener.received(message)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            if not self._hung_up:
                raise  # it is this task that was cancelled, not the stream
            self._hung_up = False
            return "hung up"

    async def _write(self, call: _Stream, outgoing: asyncio.Queue[agent_pb2.AgentMessage]) -> None:
        # A write fails only when the stream is over; the reader learns why.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outgoing.get())
