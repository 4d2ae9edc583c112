"""One gRPC stream over a connection of its own, as bytes: the least that a client can do.

grpc.aio takes some 150 KB and much of the processor for each connection: ten thousand of them do not
fit beside the manager that is measured. This speaks HTTP/2 as far as one stream needs it (RFC 9113; headers without
compression, RFC 7541 6.2.2); the manager sees what it sees of any agent.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from typing import Protocol, cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 0x1
_END_HEADERS = 0x4
_INITIAL_WINDOW_SIZE, _WINDOW = 4, 2**30
"""So large that it need not be opened again: acknowledgements are small."""
_HEADER = struct.Struct(">BHBBL")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is not indexed; both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class StreamListener(Protocol):
    def opened(self) -> None: ...

    def received(self, message: bytes) -> None: ...

    def closed(self, reason: str) -> None:
        """Called once, whatever ended the stream."""


class GrpcStream(asyncio.Protocol):
    """`path`: /package.Service/Method."""

    def __init__(self, path: str, authority: str, scheme: str, listener: StreamListener) -> None:
        headers = {":method": "POST", ":scheme": scheme, ":path": path, ":authority": authority}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        self._headers = b"".join(_literal(name, value) for name, value in headers.items())
        self._listener = listener
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._message = bytearray()
        self._ended = ""

    def send(self, message: bytes) -> None:
        self._write(frame(_DATA, 0, 1, struct.pack(">BL", 0, len(message)) + message))

    def _write(self, data: bytes) -> None:
        """Data that comes too late is dropped: the listener already has the end."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def hang_up(self, reason: str) -> None:
        self._ended = self._ended or reason
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        settings = struct.pack(">HL", _INITIAL_WINDOW_SIZE, _WINDOW)
        opening = (frame(_SETTINGS, 0, 0, settings), frame(_WINDOW_UPDATE, 0, 0, struct.pack(">L", _WINDOW - 65_535)))
        self._write(_PREFACE + b"".join(opening) + frame(_HEADERS, _END_HEADERS, 1, self._headers))
        self._listener.opened()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size and not self._ended:
            high, low, kind, flags, _ = _HEADER.unpack_from(self._buffer)
            size = _HEADER.size + (high << 16 | low)
            if len(self._buffer) < size:
                return
            payload = bytes(self._buffer[_HEADER.size : size])
            del self._buffer[:size]
            self._take(kind, flags, payload)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.closed(self._ended or (f"{type(error).__name__}: {error}" if error else "the connection ended"))

    # ------------------------------------------------------------ frames

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _DATA:
            self._message += payload
            for message in self._messages():
                self._listener.received(message)
        elif kind == _SETTINGS and not flags & _ACK:
            self._write(frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._write(frame(_PING, _ACK, 0, payload))
        ends = kind in (_DATA, _HEADERS) and flags & _END_STREAM
        if ends or kind in (_RST_STREAM, _GOAWAY):
            self._ended = f"the manager ended the stream (frame {kind}: {payload[8:].decode(errors='replace')})"
            assert self._transport is not None
            self._transport.close()

    def _messages(self) -> Iterable[bytes]:
        """The whole ones that have come."""
        while len(self._message) >= 5:
            size = 5 + struct.unpack_from(">L", self._message, 1)[0]
            if len(self._message) < size:
                return
            message = bytes(self._message[5:size])
            del self._message[:size]
            yield message
