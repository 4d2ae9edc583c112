"""The packed workdirs of jobs, by the SHA-256 of their bytes.

A row of the store says that one is here as a whole; `varuna_manager.services.archive_bytes` has the bytes. The row is
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

from varuna_manager.db.engine import Database
from varuna_manager.db.models import ArchiveRow, JobRow, WorkerRow
from varuna_manager.domain.states import TERMINAL_JOB_STATES
from varuna_manager.services.archive_bytes import PART, ArchiveBytes, ArchiveChunks, ArchiveFiles
from varuna_manager.services.errors import InvalidError, NotFoundError, UnavailableError
from varuna_manager.services.jobs import ALIVE

MOST_BYTES = 256 * 1024 * 1024
_MOST_UPLOADS = 8
"""At once: each has a file until it is whole."""
_RESERVE_BYTES = 256 * 1024 * 1024
"""Of the disk: the store may be on it."""
_OVER = [state.value for state in TERMINAL_JOB_STATES]
_UNUSED_LIFE_S = 24 * 3600.0
"""What no job names goes after this: its submit was given up."""


class ArchiveService:
    """`folder`: of this manager, for uploads that are under way; and for archives where the store is its own."""

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
        # An earlier version kept all of them in the store; it is read on for as long as they are there.
        self._places: tuple[ArchiveBytes, ...] = (chunks,) if Database.is_shared(database.url) else (files, chunks)
        self._uploads = 0
        self._changing = asyncio.Lock()

    async def begin(self) -> None:
        """Remove what uploads and removals that were broken off have left behind."""
        try:
            await asyncio.to_thread(_make_empty_of_parts, self._folder)
            async with self._changing:
                async with self._database.read() as session:
                    known = set(await session.scalars(select(ArchiveRow.sha256)))
                for place in self._places:
                    for sha256 in await place.all() - known:
                        await place.discard(sha256)
        except OSError as error:
            log = structlog.get_logger("varuna.archives")
            log.warning("no workdir can be uploaded until this is mended", folder=str(self._folder), error=str(error))

    async def size(self, sha256: str) -> int | None:
        """Bytes; None when it is not there."""
        async with self._database.read() as session:
            total = await session.scalar(select(ArchiveRow.total_bytes).where(ArchiveRow.sha256 == sha256))
        # The store may have been restored without the files: then the archive is to be uploaded again.
        return total if total is not None and await self._place_of(sha256) is not None else None

    async def is_for(self, job_ids: Collection[str], vm_id: str, sha256: str) -> bool:
        """Whether one of the jobs, or one that has workers on the VM, is to run in what is in the archive."""
        runs = select(WorkerRow.job_id).where(WorkerRow.vm_id == vm_id, WorkerRow.state.in_(ALIVE))
        query = select(JobRow.id).where(JobRow.archive == sha256, JobRow.state.not_in(_OVER))
        query = query.where(JobRow.id.in_(job_ids) | JobRow.id.in_(runs))
        async with self._database.read() as session:
            return await session.scalar(query.limit(1)) is not None

    async def receive(self, sha256: str, body: AsyncIterator[bytes]) -> int:
        """Keep an upload, if its SHA-256 is this; its bytes. Nothing changes when the archive is here already.

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

    async def chunks(self, sha256: str) -> AsyncIterator[bytes]:
        """Its bytes, in pieces. Raises NotFoundError."""
        place = await self._place_of(sha256) if await self.size(sha256) is not None else None
        if place is None:
            raise NotFoundError(f"there is no archive {sha256[:80]!r}: submit the job again")
        try:
            async for chunk in place.read(sha256):
                yield chunk
        except FileNotFoundError:
            raise NotFoundError(f"archive {sha256} has just been deleted: submit the job again") from None

    async def delete(self, sha256: str, *, only_if: ColumnElement[bool] | None = None) -> bool:
        """Forget an archive. False, and nothing is changed, when it is not here or may not go.

        It stays while a job that is not over names it, and where the condition on its row does not hold. Both are
        asked in one transaction: a submit that names it comes before, and is seen, or after, and is refused.
        Raises UnavailableError.
        """
        users = select(JobRow.id).where(JobRow.archive == sha256, JobRow.state.not_in(_OVER)).limit(1)
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
        """Write the upload to a file of its own; its bytes."""
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
            if await self.size(sha256) is not None:
                return
            with self._disk_errors():
                await self._places[0].keep(sha256, part)
            async with self._database.write() as session:
                row = ArchiveRow(sha256=sha256, total_bytes=total_bytes, created_at=self._now())
                await session.merge(row)  # it is there already if only the file was lost

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
                await place.discard(sha256)

    async def _place_of(self, sha256: str) -> ArchiveBytes | None:
        """Where its bytes are."""
        for place in self._places:
            if await place.has(sha256):
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
