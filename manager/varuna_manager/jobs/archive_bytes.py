"""Stores the bytes of packed workdirs: files of the manager, or rows of a store that several managers share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from sqlalchemy import delete, func, select

from varuna_manager.db.engine import Database
from varuna_manager.db.models import ArchiveChunkRow

CHUNK_BYTES = 1024 * 1024
PART = ".part"
"""The suffix of files that are not complete yet."""


class ArchiveBytes(Protocol):
    async def has_archive(self, sha256: str) -> bool: ...

    async def store_archive(self, sha256: str, part: Path) -> None:
        """Store the complete file `part`. Storing the same again is harmless. Raises OSError."""

    def read_archive(self, sha256: str) -> AsyncIterator[bytes]:
        """The bytes in pieces of at most CHUNK_BYTES."""

    async def discard_archive(self, sha256: str) -> None:
        """Delete an archive, if it is here. Raises OSError."""

    async def list_archives(self) -> set[str]:
        """The SHA-256 of every archive that is here, complete or not."""


class ArchiveFiles:
    """One file for each archive in the manager's data directory. It needs neither the store's lock nor its space."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def has_archive(self, sha256: str) -> bool:
        return await asyncio.to_thread(self._path(sha256).exists)

    async def store_archive(self, sha256: str, part: Path) -> None:
        await asyncio.to_thread(_move, part, self._path(sha256))

    async def read_archive(self, sha256: str) -> AsyncIterator[bytes]:
        with await asyncio.to_thread(self._path(sha256).open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk

    async def discard_archive(self, sha256: str) -> None:
        await asyncio.to_thread(self._path(sha256).unlink, missing_ok=True)

    async def list_archives(self) -> set[str]:
        return {path.name for path in await asyncio.to_thread(lambda: list(self._folder.iterdir()))}

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256


class ArchiveChunks:
    """Rows of the store, each written in a transaction of its own, so that reports can be written in between.

    Managers that share a store keep archives here, because the next leader may run on another machine and must give
    them to the agents at once. The store is the one place that all managers reach.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def has_archive(self, sha256: str) -> bool:
        key = (ArchiveChunkRow.sha256 == sha256) & (ArchiveChunkRow.number == 0)
        async with self._database.read() as session:
            return await session.scalar(select(ArchiveChunkRow.number).where(key)) is not None

    async def store_archive(self, sha256: str, part: Path) -> None:
        await self.discard_archive(sha256)  # what an interrupted upload has left
        number = 0
        with part.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                async with self._database.write() as session:
                    session.add(ArchiveChunkRow(sha256=sha256, number=number, data=chunk))
                number += 1

    async def read_archive(self, sha256: str) -> AsyncIterator[bytes]:
        number = 0
        while True:
            key = (ArchiveChunkRow.sha256 == sha256) & (ArchiveChunkRow.number == number)
            async with self._database.read() as session:
                chunk = await session.scalar(select(ArchiveChunkRow.data).where(key))
            if chunk is None:
                return
            yield chunk
            number += 1

    async def discard_archive(self, sha256: str) -> None:
        while (last := await self._last(sha256)) is not None:
            key = (ArchiveChunkRow.sha256 == sha256) & (ArchiveChunkRow.number == last)
            async with self._database.write() as session:
                await session.execute(delete(ArchiveChunkRow).where(key))

    async def _last(self, sha256: str) -> int | None:
        """The number of its last chunk. Chunks are deleted from the last on, so that the rest can be read from its
        start."""
        async with self._database.read() as session:
            newest = select(func.max(ArchiveChunkRow.number)).where(ArchiveChunkRow.sha256 == sha256)
            return await session.scalar(newest)

    async def list_archives(self) -> set[str]:
        async with self._database.read() as session:
            return set(await session.scalars(select(ArchiveChunkRow.sha256).distinct()))


def _move(part: Path, path: Path) -> None:
    """Rename the part so that a file with the final name is complete, even after a loss of power."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
