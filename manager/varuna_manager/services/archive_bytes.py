"""Where the bytes of packed workdirs are: files of the manager, or rows of a store that several managers share."""

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
"""Ends the names of files that are not whole."""


class ArchiveBytes(Protocol):
    async def has(self, sha256: str) -> bool: ...

    async def keep(self, sha256: str, part: Path) -> None:
        """Take the file `part`, which is whole. Keeping the same again is harmless. Raises OSError."""

    def read(self, sha256: str) -> AsyncIterator[bytes]:
        """In pieces of at most CHUNK_BYTES."""

    async def discard(self, sha256: str) -> None:
        """Nothing happens when it is not here. Raises OSError."""

    async def all(self) -> set[str]:
        """Whatever is here, wholly or in part."""


class ArchiveFiles:
    """A file for each, in a folder of the manager's data directory: it takes neither the store's lock nor its pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def has(self, sha256: str) -> bool:
        return await asyncio.to_thread(self._path(sha256).exists)

    async def keep(self, sha256: str, part: Path) -> None:
        await asyncio.to_thread(_move, part, self._path(sha256))

    async def read(self, sha256: str) -> AsyncIterator[bytes]:
        with await asyncio.to_thread(self._path(sha256).open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk

    async def discard(self, sha256: str) -> None:
        await asyncio.to_thread(self._path(sha256).unlink, missing_ok=True)

    async def all(self) -> set[str]:
        return {path.name for path in await asyncio.to_thread(lambda: list(self._folder.iterdir()))}

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256


class ArchiveChunks:
    """Rows of the store, each written in a transaction of its own: the writers of reports come in between.

    Managers that share a store keep archives here. Whichever leads next, on whatever machine, has to give them to the
    agents at once, and the store is the one place that all managers reach.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def has(self, sha256: str) -> bool:
        key = (ArchiveChunkRow.sha256 == sha256) & (ArchiveChunkRow.number == 0)
        async with self._database.read() as session:
            return await session.scalar(select(ArchiveChunkRow.number).where(key)) is not None

    async def keep(self, sha256: str, part: Path) -> None:
        await self.discard(sha256)  # what an upload that was broken off has left
        number = 0
        with part.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                async with self._database.write() as session:
                    session.add(ArchiveChunkRow(sha256=sha256, number=number, data=chunk))
                number += 1

    async def read(self, sha256: str) -> AsyncIterator[bytes]:
        number = 0
        while True:
            key = (ArchiveChunkRow.sha256 == sha256) & (ArchiveChunkRow.number == number)
            async with self._database.read() as session:
                chunk = await session.scalar(select(ArchiveChunkRow.data).where(key))
            if chunk is None:
                return
            yield chunk
            number += 1

    async def discard(self, sha256: str) -> None:
        while (last := await self._last(sha256)) is not None:
            key = (ArchiveChunkRow.sha256 == sha256) & (ArchiveChunkRow.number == last)
            async with self._database.write() as session:
                await session.execute(delete(ArchiveChunkRow).where(key))

    async def _last(self, sha256: str) -> int | None:
        """The number of its last chunk: from there on, so that what is left can always be read from its start."""
        async with self._database.read() as session:
            newest = select(func.max(ArchiveChunkRow.number)).where(ArchiveChunkRow.sha256 == sha256)
            return await session.scalar(newest)

    async def all(self) -> set[str]:
        async with self._database.read() as session:
            return set(await session.scalars(select(ArchiveChunkRow.sha256).distinct()))


def _move(part: Path, path: Path) -> None:
    """What has the name is whole, also after a loss of power."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
