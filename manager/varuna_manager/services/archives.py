"""The packed workdirs of jobs, by the SHA-256 of their bytes: in the store, so that every manager has them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import ArchiveChunkRow, ArchiveRow, JobRow
from varuna_manager.services.errors import NotFoundError

CHUNK_BYTES = 1024 * 1024
MOST_BYTES = 256 * 1024 * 1024
_UNUSED_LIFE_S = 24 * 3600.0
"""What no job names goes after this: its submit was given up."""


class ArchiveService:
    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

    async def size(self, sha256: str) -> int | None:
        """Bytes; None when it is not there."""
        async with self._database.read() as session:
            return await session.scalar(select(ArchiveRow.total_bytes).where(ArchiveRow.sha256 == sha256))

    async def store(self, sha256: str, file: Path) -> None:
        """Keep the file, whose SHA-256 the caller has verified; nothing happens when it is there already."""
        async with self._database.write() as session:
            await self._discard_unused(session)
            if await session.get(ArchiveRow, sha256) is not None:
                return
            total = 0
            with file.open("rb") as data:
                while chunk := data.read(CHUNK_BYTES):
                    number = total // CHUNK_BYTES
                    session.add(ArchiveChunkRow(sha256=sha256, number=number, data=chunk))
                    total += len(chunk)
                    await session.flush()
            session.add(ArchiveRow(sha256=sha256, total_bytes=total, created_at=self._now()))

    async def _discard_unused(self, session: AsyncSession) -> None:
        named = select(JobRow.archive).where(JobRow.archive.is_not(None))
        old = (ArchiveRow.created_at < self._now() - _UNUSED_LIFE_S) & ArchiveRow.sha256.not_in(named)
        gone = (await session.scalars(select(ArchiveRow.sha256).where(old))).all()
        for table in (ArchiveChunkRow, ArchiveRow):
            await session.execute(delete(table).where(table.sha256.in_(gone)))

    async def chunks(self, sha256: str) -> AsyncIterator[bytes]:
        """Its bytes, in pieces. Raises NotFoundError."""
        if await self.size(sha256) is None:
            raise NotFoundError(f"there is no archive {sha256[:80]!r}: submit the job again")
        number = 0
        while True:
            key = (ArchiveChunkRow.sha256 == sha256) & (ArchiveChunkRow.number == number)
            async with self._database.read() as session:
                chunk = await session.scalar(select(ArchiveChunkRow.data).where(key))
            if chunk is None:
                return
            yield chunk
            number += 1
