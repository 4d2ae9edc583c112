"""The bytes of files in host memory, their checksums and their entries in manifests."""

from __future__ import annotations

from collections.abc import Iterator

from varuna.checkpoint.format.checksum import Checksum
from varuna.checkpoint.format.manifest import FileEntry
from varuna.checkpoint.format.tensor_file import iterate_pieces
from varuna.checkpoint.saving.snapshot import HostFile

__all__ = ["iterate_parts", "make_entry", "sum_file"]

_PIECE_BYTES = 64 * 1024 * 1024
"""Handed to the store at a time: a kernel writes large pieces several times as fast as small ones."""


def iterate_parts(file: HostFile) -> Iterator[memoryview]:
    for piece in iterate_pieces(file.tensors, file.metadata):
        for start in range(0, len(piece), _PIECE_BYTES):
            yield piece[start : start + _PIECE_BYTES]


def sum_file(file: HostFile) -> tuple[Checksum, int]:
    """The checksum and the bytes of a file that is not written yet."""
    checksum, size = Checksum(), 0
    for part in iterate_parts(file):
        checksum.update(part)
        size += len(part)
    return checksum, size


def make_entry(file: HostFile, checksum: Checksum, size: int, copies: str = "") -> FileEntry:
    return FileEntry(
        name=file.name,
        kind=file.kind,
        section=file.section,
        holds=file.holds,
        bytes=size,
        checksum=str(checksum),
        local=copies,
    )
