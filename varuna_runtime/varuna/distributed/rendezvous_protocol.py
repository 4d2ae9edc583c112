"""The messages between the rendezvous store and its clients, which follow the handshake on each connection.

A message is its length, one byte for what it is, and words, each after its own length.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from enum import IntEnum

__all__ = [
    "HANDSHAKE_S",
    "LENGTH",
    "NUMBER",
    "READ_BYTES",
    "AnswerStatus",
    "StoreOperation",
    "pack_message",
    "receive_into",
    "receive_message",
    "unpack_message",
]

LENGTH = struct.Struct("!I")
NUMBER = struct.Struct("!q")
READ_BYTES = 1 << 18
_MOST_BYTES = (1 << 32) - 1
"""The largest length that fits in its field."""
HANDSHAKE_S = 10.0
"""The longest that either side waits for the other's proof."""


class StoreOperation(IntEnum):
    SET = 1
    WAIT = 2
    """Milliseconds and keys: the answer comes when all keys exist, with their values."""
    ADD = 3
    CHECK = 4
    COMPARE_SET = 5
    DELETE = 6
    COUNT = 7
    APPEND = 8


class AnswerStatus(IntEnum):
    DONE = 0
    TIMED_OUT = 1
    REFUSED = 2


def pack_message(kind: int, words: Iterable[bytes]) -> bytes:
    body = bytes([kind]) + b"".join(LENGTH.pack(len(word)) + word for word in words)
    return LENGTH.pack(len(body)) + body


def unpack_message(body: bytes) -> tuple[int, list[bytes]]:
    """The kind and the words of a message. Raises ValueError when `pack_message` has not made it."""
    if not body:
        raise ValueError("an empty message")
    words, at = [], 1
    while at < len(body):
        start = at + LENGTH.size
        at = start + int.from_bytes(body[at:start], "big")
        if start > len(body) or at > len(body):
            raise ValueError("a word ends beyond its message")
        words.append(body[start:at])
    return body[0], words


def receive_into(connection: socket.socket, buffer: memoryview, deadline_s: float | None = None) -> None:
    """Fills `buffer`. `deadline_s`: of the monotonic clock. The connection's own time limit counts for each part.

    Raises OSError when the other end is gone, or too slow.
    """
    at = 0
    while at < len(buffer):
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TimeoutError("it is too slow")
        received = connection.recv_into(buffer[at:])
        if not received:
            raise ConnectionError("it closed the connection")
        at += received


def receive_message(connection: socket.socket, most_bytes: int = _MOST_BYTES) -> tuple[int, list[bytes]]:
    """The next message. Raises OSError when the other end is gone, ValueError when it breaks the protocol or the
    message is larger than `most_bytes`."""
    header = bytearray(LENGTH.size)
    receive_into(connection, memoryview(header))
    (length,) = LENGTH.unpack(header)
    if length > most_bytes:
        raise ValueError(f"a message of {length} bytes")
    body = bytearray(length)
    receive_into(connection, memoryview(body))
    return unpack_message(bytes(body))
