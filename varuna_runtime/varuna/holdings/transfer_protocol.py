"""The messages between a holder and those that take its state, which follow the handshake on each connection.

    taker:  request: the rank and the step of a state, a file's name, the offset to begin at
    holder: done: the file's size; then its chunks from there on, each after its length and its checksum
            refused: the reason

    owner:  copy: the number of its rounds of copies, the step that stays, the inventory; then its files' chunks
    keeper: done: it has all of them
            refused: the reason

    owner:  sums: the number of its series, how many micro-batches are in the sums that stay, the bytes of the file, the
            mark; then the file's chunks
    keeper: as above

    taker:  inputs: the step, and the number of a micro-batch in the global batch
    giver:  done: the size of its inputs; then their chunks
            refused: the reason

A connection serves one request after the other. The messages are packed as those of the rendezvous store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

__all__ = [
    "CHUNK_BYTES",
    "CHUNK_HEADER",
    "COPY",
    "FETCH",
    "INPUTS",
    "LARGEST_MESSAGE_BYTES",
    "NUMBER",
    "SILENCE_S",
    "SUMS",
    "sum_chunk",
]

FETCH = 1
COPY = 2
SUMS = 3
INPUTS = 4
CHUNK_BYTES = 1 << 20
"""Large enough that its header costs nothing, small enough to be in the processor's cache for the checksum."""
CHUNK_HEADER = struct.Struct("!I16s")
NUMBER = struct.Struct("!Q")
SILENCE_S = 10.0
"""A side that sends nothing, or takes nothing, for so long is taken for gone."""
LARGEST_MESSAGE_BYTES = 1 << 16
"""Chunks are no messages."""


def sum_chunk(parts: Iterable[memoryview]) -> bytes:
    """The checksum of a chunk: against harm on the way, as `varuna.checkpoint.format.checksum` has it for files."""
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    return checksum.digest()
