"""A fleet that dials again, all at once, while the manager's event loop does something else."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import grpc

from varuna_manager.api.grpc.limits import SERVER_OPTIONS, STREAMS_PER_CONNECTION
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import DEADLINE_S

CONNECTIONS = 20
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
FRAME = struct.Struct(">BHBBL")


class WelcomingManager(agent_pb2_grpc.AgentServiceServicer):
    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ManagerMessage]:  # noqa: N802
        async for _ in request_iterator:
            yield pb.ManagerMessage(welcome=pb.Welcome())

    async def FetchArchive(self, request: pb.ArchiveRequest, context: Any) -> AsyncIterator[pb.ArchiveChunk]:  # noqa: N802
        """Serves no archive."""
        await context.abort(grpc.StatusCode.NOT_FOUND, "no archive")
        yield pb.ArchiveChunk()


def make_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def make_opening(address: str) -> bytes:
    """As many streams as a connection may have, each with a Hello, and a ping, which is answered after they are there
    (RFC 9113; headers that are not compressed, RFC 7541 6.2.2)."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/varuna.v1.AgentService/Connect",
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    hello = pb.AgentMessage(hello=pb.Hello(vm_id="vm-1")).SerializeToString()
    streams = b"".join(
        make_frame(HEADERS, END_HEADERS, 2 * number + 1, block)
        + make_frame(DATA, END_STREAM, 2 * number + 1, struct.pack(">BL", 0, len(hello)) + hello)
        for number in range(STREAMS_PER_CONNECTION)
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + make_frame(SETTINGS, 0, 0)
    return preface + streams + make_frame(PING, 0, 0, b"12345678")


class Connection:
    """What the server has sent on one connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        self.socket.sendall(make_opening(address))
        self.answered: set[int] = set()
        """Streams with a message."""
        self.ended: set[int] = set()
        self.has_all_streams = False

    def receive_frame(self) -> None:
        high, low, kind, flags, stream = FRAME.unpack(self._receive(FRAME.size))
        self._receive(high << 16 | low)
        if kind == SETTINGS and not flags & ACK:
            self.socket.sendall(make_frame(SETTINGS, ACK, 0))
        elif kind == PING and flags & ACK:
            self.has_all_streams = True
        elif kind == DATA:
            self.answered.add(stream)
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the server has ended the connection"
            data += part
        return data

    def wait_for_end(self) -> None:
        while len(self.ended) < STREAMS_PER_CONNECTION:
            self.receive_frame()


async def test_every_stream_that_waits_for_the_event_loop_is_answered() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(WelcomingManager(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with ExitStack() as stack:
            connections = [Connection(address) for _ in range(CONNECTIONS)]
            for connection in connections:
                stack.enter_context(connection.socket)
                while not connection.has_all_streams:  # this thread is the event loop's, which takes none meanwhile
                    connection.receive_frame()
            await asyncio.gather(*(asyncio.to_thread(connection.wait_for_end) for connection in connections))
    finally:
        await server.stop(None)
    assert sum(len(connection.answered) for connection in connections) == CONNECTIONS * STREAMS_PER_CONNECTION
