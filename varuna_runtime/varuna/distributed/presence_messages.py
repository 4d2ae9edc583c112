"""The messages between rank 0 and the other ranks about who is there (`presence.py`).

A message is a kind, a rank and two numbers. Its kind is that of a call (`CallKind`; number, steps), or one of those
below. The first thing on a connection is the store's token, then a hello: a byte and a rank.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

__all__ = [
    "ARE_YOU_THERE",
    "CALL_KNOWN",
    "GOODBYE",
    "HELLO_BYTES",
    "HERE",
    "RANK_LEFT",
    "RANK_LOST",
    "PresenceMessage",
    "pack_hello",
    "pack_message",
    "receive_message",
    "unpack_hello_rank",
]

GOODBYE = b"b"
"""A rank ends, and no other depends on it any longer. The number is its exit code."""
RANK_LEFT = b"g"
"""A rank leaves because another one is gone. It has ended its connections, or has no more to send on them."""
RANK_LOST = b"l"
"""The process of a rank has ended without a word."""
CALL_KNOWN = b"a"
"""The call of that number is known: to its sender, or, from rank 0, to all ranks."""

ARE_YOU_THERE = b"q"
"""From a rank that waits for others; the answer is HERE."""
HERE = b"y"

_HELLO_KIND = b"h"
_HELLO = struct.Struct("!cI")
_MESSAGE = struct.Struct("!cIQQ")
HELLO_BYTES = _HELLO.size


class PresenceMessage(NamedTuple):
    kind: bytes
    rank: int
    number: int = 0
    """Of the call; with GOODBYE the exit code."""
    steps: int = 0
    """Done before the call."""


def pack_hello(rank: int) -> bytes:
    return _HELLO.pack(_HELLO_KIND, rank)


def unpack_hello_rank(data: bytes) -> int:
    """The rank in HELLO_BYTES of data."""
    rank: int = _HELLO.unpack(data)[1]
    return rank


def pack_message(message: PresenceMessage) -> bytes:
    return _MESSAGE.pack(*message)


def receive_message(connection: socket.socket) -> PresenceMessage | None:
    """The next message; None when the other end is closed. Raises OSError when the connection is broken."""
    data = b""
    while len(data) < _MESSAGE.size:
        part = connection.recv(_MESSAGE.size - len(data))
        if not part:
            return None
        data += part
    return PresenceMessage(*_MESSAGE.unpack(data))
