"""The packed workdirs of jobs, by the SHA-256 of their bytes.

A row of the store means that an archive is complete; `varuna_manager.jobs.archive_bytes` has the bytes. The row is
written last and removed first.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from sqlalchemy import ColumnElement, delete, select, true

from varuna_manager.answers.errors import InvalidError, MissingError, UnavailableError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import ArchiveRow, JobRow, WorkerRow
from varuna_manager.jobs.archive_bytes import PART, ArchiveBytes, ArchiveChunks, ArchiveFiles
from varuna_manager.jobs.jobs import ALIVE, OVER

MOST_BYTES = 256 * 1024 * 1024
_MOST_UPLOADS = 8
"""Concurrent uploads: each has a file until it is complete."""
_RESERVE_BYTES = 256 * 1024 * 1024
"""Free space to leave on the disk, because the store may be on it."""
_UNUSED_LIFE_S = 24 * 3600.0
"""An archive that no job names is deleted after this: its submit was given up."""


class ArchiveService:
    """`folder`: of this manager, for uploads under way, and for archives if no other manager shares the store."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        now: Callable[[], float] = time.time,
        *,
        reserve_bytes: int = _RESERVE_BYTES,
    ) -> None:
        self._database = database
        self._folder = folder
        self._now = now
        self._reserve_bytes = reserve_bytes
        chunks, files = ArchiveChunks(database), ArchiveFiles(folder)
        # An earlier version kept all archives in the store; they stay readable there.
        self._places: tuple[ArchiveBytes, ...] = (chunks,) if Database.is_shared(database.url) else (files, chunks)
        self._uploads = 0
        self._changing = asyncio.Lock()

    async def remove_remains(self) -> None:
        """Remove the remains of interrupted uploads and removals."""
        try:
            await asyncio.to_thread(_make_empty_of_parts, self._folder)
            async with self._changing:
                async with self._database.read() as session:
                    known = set(await session.scalars(select(ArchiveRow.sha256)))
                for place in self._places:
                    for sha256 in await place.list_archives() - known:
                        await place.discard_archive(sha256)
        except OSError as error:
            log = structlog.get_logger("varuna.archives")
            log.warning("no workdir can be uploaded until this is mended", folder=str(self._folder), error=str(error))

    async def read_size(self, sha256: str) -> int | None:
        """Bytes; None when it is not there."""
        async with self._database.read() as session:
            total = await session.scalar(select(ArchiveRow.total_bytes).where(ArchiveRow.sha256 == sha256))
        # The store may have been restored without the files: the archive must be uploaded again.
        return total if total is not None and await self._place_of(sha256) is not None else None

    async def is_for(self, job_ids: Collection[str], vm_id: str, sha256: str) -> bool:
        """Whether one of the jobs, or a job with workers on the VM, uses the archive."""
        runs = select(WorkerRow.job_id).where(WorkerRow.vm_id == vm_id, WorkerRow.state.in_(ALIVE))
        query = select(JobRow.id).where(JobRow.archive == sha256, JobRow.state.not_in(OVER))
        query = query.where(JobRow.id.in_(job_ids) | JobRow.id.in_(runs))
        async with self._database.read() as session:
            return await session.scalar(query.limit(1)) is not None

    async def receive_archive(self, sha256: str, body: AsyncIterator[bytes]) -> int:
        """Store an upload whose SHA-256 is this. Returns its size. Nothing changes when the archive is here already.

        Raises InvalidError, UnavailableError.
        """
        if self._uploads >= _MOST_UPLOADS:
            raise UnavailableError(f"{self._uploads} workdirs are being uploaded: try again in a minute")
        self._uploads += 1
        part = self._folder / f"{secrets.token_hex(8)}{PART}"
        try:
            total_bytes = await self._spool(sha256, body, part)
            await self._store(sha256, part, total_bytes)
        finally:
            self._uploads -= 1
            part.unlink(missing_ok=True)
        return total_bytes

    async def read_archive(self, sha256: str) -> AsyncIterator[bytes]:
        """The archive's bytes, in pieces. Raises MissingError."""
        place = await self._place_of(sha256) if await self.read_size(sha256) is not None else None
        if place is None:
            raise MissingError(f"there is no archive {sha256[:80]!r}: submit the job again")
        try:
            async for chunk in place.read_archive(sha256):
                yield chunk
        except FileNotFoundError:
            raise MissingError(f"archive {sha256} has just been deleted: submit the job again") from None

    async def delete_archive(self, sha256: str, *, only_if: ColumnElement[bool] | None = None) -> bool:
        """Delete an archive. Returns False, and changes nothing, when it is not here or must stay.

        It stays while a job that has not ended names it, or if the condition on its row does not hold. One transaction
        checks both: a submit that names the archive comes before and is seen, or after and is refused.
        Raises UnavailableError.
        """
        users = select(JobRow.id).where(JobRow.archive == sha256, JobRow.state.not_in(OVER)).limit(1)
        async with self._changing:
            async with self._database.write() as session:
                wanted = (ArchiveRow.sha256 == sha256, true() if only_if is None else only_if)
                row = await session.scalar(select(ArchiveRow).where(*wanted))
                if row is None or await session.scalar(users) is not None:
                    return False
                await session.delete(row)
            await self._discard(sha256)
        return True

    async def _spool(self, sha256: str, body: AsyncIterator[bytes], part: Path) -> int:
        """Write the upload to a file of its own. Returns its size."""
        digest, total_bytes = hashlib.sha256(), 0
        with self._disk_errors():
            file = await asyncio.to_thread(part.open, "xb")
        with file:
            async for chunk in body:
                digest.update(chunk)
                total_bytes += len(chunk)
                with self._disk_errors():
                    await asyncio.to_thread(self._write, file.write, chunk)
            with self._disk_errors():
                await asyncio.to_thread(file.flush)
        if digest.hexdigest() != sha256:
            raise InvalidError(f"the body's SHA-256 is {digest.hexdigest()}, not {sha256}: send the whole archive")
        return total_bytes

    def _write(self, write: Callable[[bytes], int], chunk: bytes) -> None:
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < self._reserve_bytes + len(chunk):
            raise OSError(f"only {free_bytes // 2**20} MiB of the disk are free")
        write(chunk)

    async def _store(self, sha256: str, part: Path, total_bytes: int) -> None:
        await self._discard_unused()
        async with self._changing:
            if await self.read_size(sha256) is not None:
                return
            with self._disk_errors():
                await self._places[0].store_archive(sha256, part)
            async with self._database.write() as session:
                row = ArchiveRow(sha256=sha256, total_bytes=total_bytes, created_at=self._now())
                await session.merge(row)  # it exists already if only the file was lost

    async def _discard_unused(self) -> None:
        named = select(JobRow.archive).where(JobRow.archive.is_not(None))
        old = (ArchiveRow.created_at < self._now() - _UNUSED_LIFE_S) & ArchiveRow.sha256.not_in(named)
        async with self._changing:
            async with self._database.write() as session:
                gone = (await session.scalars(select(ArchiveRow.sha256).where(old))).all()
                await session.execute(delete(ArchiveRow).where(ArchiveRow.sha256.in_(gone)))
            for sha256 in gone:
                await self._discard(sha256)

    async def _discard(self, sha256: str) -> None:
        with self._disk_errors():
            for place in self._places:
                await place.discard_archive(sha256)

    async def _place_of(self, sha256: str) -> ArchiveBytes | None:
        """Where its bytes are."""
        for place in self._places:
            if await place.has_archive(sha256):
                return place
        return None

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raises UnavailableError for errors of the disk."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnavailableError(
                f"the manager cannot keep archives in {self._folder} ({reason}): make room"
            ) from error


def _make_empty_of_parts(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for part in folder.glob(f"*{PART}"):
        part.unlink(missing_ok=True)
