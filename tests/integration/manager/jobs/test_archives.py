"""Packed workdirs lie beside the store of one manager, and in the store of several; they never block it."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from migrated_stores import migrated
from varuna_manager.answers.errors import InvalidError, MissingError, UnavailableError
from varuna_manager.db.engine import Database
from varuna_manager.db.models import ArchiveChunkRow, ArchiveRow, JobRow
from varuna_manager.jobs.archive_bytes import ArchiveChunks
from varuna_manager.jobs.archives import ArchiveService
from waiting import until

DATA = bytes(range(256)) * 20_000  # five chunks
SHA256 = hashlib.sha256(DATA).hexdigest()
DAY_S = 86_400.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Database]:
    migrated(tmp_path / "m.db")
    store = Database(f"sqlite:///{tmp_path / 'm.db'}")
    yield store
    await store.close()


async def service(database: Database, folder: Path, clock: Clock | None = None) -> ArchiveService:
    archives = ArchiveService(database, folder / "archives", clock or Clock())
    await archives.remove_remains()
    return archives


async def body(data: bytes = DATA, piece: int = 100_000) -> AsyncIterator[bytes]:
    for first in range(0, len(data), piece):
        yield data[first : first + piece]


async def content(archives: ArchiveService, sha256: str = SHA256) -> bytes:
    return b"".join([chunk async for chunk in archives.read_archive(sha256)])


async def chunk_rows(database: Database) -> int:
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(ArchiveChunkRow)) or 0


def job(job_id: str, state: str, archive: str = SHA256) -> JobRow:
    spec = {"name": job_id, "workdir": "/w", "run": "true", "global_batch": 8, "archive": archive}
    return JobRow(id=job_id, name=job_id, spec=spec, state=state, history=[], created_at=1.0, archive=archive)


async def test_what_was_uploaded_is_there_until_it_is_deleted(database: Database, tmp_path: Path) -> None:
    archives = await service(database, tmp_path)
    assert await archives.read_size(SHA256) is None
    for _ in range(2):
        assert await archives.receive_archive(SHA256, body()) == len(DATA)
        assert await archives.read_size(SHA256) == len(DATA)
        assert await content(archives) == DATA
    is_shared = Database.is_shared(database.url)
    assert await chunk_rows(database) == (5 if is_shared else 0)
    assert [path.name for path in (tmp_path / "archives").iterdir()] == ([] if is_shared else [SHA256])
    again = await service(database, tmp_path)
    assert await content(again) == DATA, "after a restart"

    async with database.write() as session:
        session.add(job("job-1", "running"))
    assert not await archives.delete_archive(SHA256), "a job that is not over needs it"
    async with database.write() as session:
        (await session.get_one(JobRow, "job-1")).state = "succeeded"
    assert await archives.delete_archive(SHA256)
    assert not await archives.delete_archive(SHA256)
    assert not list((tmp_path / "archives").iterdir())
    assert await chunk_rows(database) == 0
    with pytest.raises(MissingError):
        await content(archives)


async def test_others_write_between_the_chunks_of_an_archive(sqlite: Database, tmp_path: Path) -> None:
    part, writes, is_kept = tmp_path / "part", 0, False
    part.write_bytes(DATA)

    async def write_all_the_time() -> None:
        nonlocal writes
        while not is_kept:
            async with sqlite.write() as session:
                session.add(ArchiveRow(sha256=str(writes), total_bytes=0, created_at=1e9))
            writes += 1

    chunks = ArchiveChunks(sqlite)
    writing = asyncio.create_task(write_all_the_time())
    await until(lambda: writes, "the first write")
    before = writes
    await chunks.store_archive(SHA256, part)
    assert writes - before >= 4, "of five chunks"
    is_kept = True
    await writing
    assert b"".join([chunk async for chunk in chunks.read_archive(SHA256)]) == DATA


async def test_the_store_of_one_manager_is_not_asked_to_write_the_bytes(sqlite: Database, tmp_path: Path) -> None:
    archives = await service(sqlite, tmp_path)
    async with sqlite.write():  # somebody else has the lock for the whole upload
        uploading = asyncio.create_task(archives.receive_archive(SHA256, body()))
        part = await until(lambda: next((tmp_path / "archives").glob("*.part"), None), "the upload")
        await until(lambda: part.exists() and part.stat().st_size == len(DATA), "all of it")
    await uploading
    assert await content(archives) == DATA


async def test_what_is_not_what_it_says_is_not_kept(database: Database, tmp_path: Path) -> None:
    archives = await service(database, tmp_path)
    with pytest.raises(InvalidError, match="send the whole archive"):
        await archives.receive_archive(SHA256, body(DATA[:-1]))
    assert await archives.read_size(SHA256) is None
    assert not list((tmp_path / "archives").iterdir())


async def test_a_broken_upload_leaves_nothing(database: Database, tmp_path: Path) -> None:
    archives = await service(database, tmp_path)

    async def broken() -> AsyncIterator[bytes]:
        yield DATA[:1000]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await archives.receive_archive(SHA256, broken())
    assert not list((tmp_path / "archives").iterdir())
    (tmp_path / "archives" / "1234.part").write_bytes(b"of a manager that was killed")
    (tmp_path / "archives" / ("0" * 64)).write_bytes(b"its row was never written")
    async with database.write() as session:
        session.add(ArchiveChunkRow(sha256="1" * 64, number=0, data=b"as this one's"))
    await service(database, tmp_path)
    if not Database.is_shared(database.url):
        assert not list((tmp_path / "archives").iterdir())
    assert await chunk_rows(database) == 0


async def test_what_no_job_names_goes_after_a_day(database: Database, tmp_path: Path) -> None:
    clock, other = Clock(), b"other"
    archives = await service(database, tmp_path, clock)
    await archives.receive_archive(SHA256, body())
    clock.now += 2 * DAY_S
    await archives.receive_archive(hashlib.sha256(other).hexdigest(), body(other))
    assert await archives.read_size(SHA256) is None
    assert SHA256 not in {path.name for path in (tmp_path / "archives").iterdir()}


async def test_an_archive_of_an_earlier_version_is_still_given_out(sqlite: Database, tmp_path: Path) -> None:
    async with sqlite.write() as session:
        session.add_all(ArchiveChunkRow(sha256=SHA256, number=n, data=DATA[n * 2**20 :][: 2**20]) for n in range(5))
        session.add(ArchiveRow(sha256=SHA256, total_bytes=len(DATA), created_at=1.0))
    archives = await service(sqlite, tmp_path)
    assert await archives.read_size(SHA256) == len(DATA)
    assert await content(archives) == DATA
    assert await archives.delete_archive(SHA256)
    assert await chunk_rows(sqlite) == 0


async def test_a_store_that_was_restored_without_the_files_takes_them_again(sqlite: Database, tmp_path: Path) -> None:
    archives = await service(sqlite, tmp_path)
    await archives.receive_archive(SHA256, body())
    (tmp_path / "archives" / SHA256).unlink()
    assert await archives.read_size(SHA256) is None
    await archives.receive_archive(SHA256, body())
    assert await content(archives) == DATA


async def test_only_so_many_upload_at_once(sqlite: Database, tmp_path: Path) -> None:
    archives, may_end = await service(sqlite, tmp_path), asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        await may_end.wait()
        yield DATA

    uploads = [asyncio.create_task(archives.receive_archive(SHA256, waiting())) for _ in range(8)]
    await until(lambda: len(list((tmp_path / "archives").glob("*.part"))) == 8, "the uploads")
    with pytest.raises(UnavailableError, match="try again"):
        await archives.receive_archive(SHA256, body())
    may_end.set()
    assert await asyncio.gather(*uploads) == [len(DATA)] * 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("reserve_bytes", [0, 2_000_000])
async def test_a_full_disk_refuses_the_upload_and_nothing_else(
    sqlite: Database, small_disk: Path, reserve_bytes: int
) -> None:
    archives = ArchiveService(sqlite, small_disk / "archives", reserve_bytes=reserve_bytes)
    await archives.remove_remains()
    with pytest.raises(UnavailableError, match=r"cannot keep archives in .*: make room"):
        await archives.receive_archive(SHA256, body())
    assert not list((small_disk / "archives").iterdir())
    small = b"x" * 100_000
    await archives.receive_archive(hashlib.sha256(small).hexdigest(), body(small))
