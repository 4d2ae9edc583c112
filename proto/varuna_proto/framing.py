"""Length-framed protobuf messages over a byte stream: four bytes of length, big-endian, then the message."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TypeVar

from google.protobuf.message import Message

MAX_FRAME_BYTES = 12 * 1024 * 1024
"""A profile of a large model takes a few megabytes; an agent must be able to forward it in a message of 16 MiB."""
_LENGTH = struct.Struct(">I")

M = TypeVar("M", bound=Message)


def frame(message: Message) -> bytes:
    """The message with its length, as sent over the wire."""
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(body)} bytes is over the frame limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket, kind: type[M]) -> M | None:
    """The next message from a blocking socket; None when the other end has closed."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _checked_length(head))
    return None if body is None else kind.FromString(body)


async def read(stream: asyncio.StreamReader, kind: type[M]) -> M | None:
    """The next message from an asyncio stream; None when the other end has closed."""
    try:
        head = await stream.readexactly(_LENGTH.size)
        return kind.FromString(await stream.readexactly(_checked_length(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _checked_length(head: bytes) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}: not our protocol")
    return length


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(count - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
