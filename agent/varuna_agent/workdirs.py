"""The folders of jobs that were submitted with their code: fetched, unpacked and set up once for each content.

`WORKDIRS/KEY/files` is the unpacked archive, `setup.log` what the setup wrote, and `ready` stands there when all is
done. KEY stands for the archive, the setup and, where there is a setup, its environment: jobs with the same share it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import structlog

from varuna_agent import logs
from varuna_agent.archives import NotUnpackedError, unpack_archive
from varuna_agent.spawn import UNCONFINED, Confinement, ProcessNotStartedError, spawn
from varuna_agent.state import Workdir

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{32}")
_MOST_ARCHIVE_BYTES = 1024**3
"""Four times what the manager takes."""
_PASSABLE = 0o711
"""For the job's user on its way to its files, whatever the agent's umask."""
_TRIES_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_KEPT = 8
"""Folders of contents that no job uses any more."""

Fetch = Callable[[str], AsyncIterator[bytes]]
"""The bytes of the archive with this SHA-256. Raises WorkdirError."""


class WorkdirError(ProcessNotStartedError):
    """The folder could not be made ready; says why."""

    def __init__(self, text: str, exit_code: int = 0) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        """Of the setup; 0: it did not come to that."""


@dataclass
class _Making:
    task: asyncio.Task[str]
    waiting: int = 0
    """Callers."""
    is_given_up: bool = False
    """It is about to end."""


class Workdirs:
    """All of this VM.

    Args:
        folder: theirs alone.
        fetch: asks the manager for an archive.
    """

    def __init__(self, folder: Path, fetch: Fetch) -> None:
        self._folder = folder
        self._fetch = fetch
        self._making: dict[str, _Making] = {}
        self._used: dict[str, set[str]] = {}
        """By key, the jobs that use it."""

    async def ready(
        self,
        wanted: Workdir,
        environment: Mapping[str, str],
        confinement: Confinement = UNCONFINED,
        *,
        job_id: str = "",
    ) -> str:
        """The path to run in, once all is done; callers that come meanwhile wait for the same. Raises WorkdirError.

        What has failed is tried again by the next caller. What nobody waits for any longer is ended: when the last
        caller is cancelled, this returns once nothing of it runs. `environment`: of the setup; `confinement`: of the
        processes that unpack and set up, and whose the files are; `job_id`: for whose workers.
        """
        key = wanted.key(environment)
        self._used.setdefault(key, set()).add(job_id)
        while (making := self._making.get(key)) is not None and making.is_given_up:
            await asyncio.wait([making.task])
        if making is None:
            work = self._make(wanted, environment, confinement, key)
            task = asyncio.create_task(work, name=f"workdir {key}")
            making = self._making[key] = _Making(task)
            task.add_done_callback(lambda done: self._made(key, done))
        making.waiting += 1
        try:
            return await asyncio.shield(making.task)
        finally:
            making.waiting -= 1
            if not making.waiting and not making.task.done():
                making.is_given_up = True
                making.task.cancel()
                await asyncio.wait([making.task])

    def keep_only(self, job_ids: Collection[str]) -> None:
        """The folders of other jobs than these may go when there are many."""
        used = {key: jobs & set(job_ids) for key, jobs in self._used.items()}
        self._used = {key: jobs for key, jobs in used.items() if jobs or key in self._making}

    async def close(self) -> None:
        """End what is being done, and wait for that."""
        tasks = [making.task for making in self._making.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _made(self, key: str, task: asyncio.Task[str]) -> None:
        self._making.pop(key, None)
        if not task.cancelled():
            task.exception()  # nobody may be waiting any more

    async def _make(self, wanted: Workdir, environment: Mapping[str, str], confinement: Confinement, key: str) -> str:
        place = self._folder / key
        path = str(place / "files") if wanted.archive else wanted.path
        try:
            async with asyncio.timeout(wanted.timeout_s or None) as limit:
                if await asyncio.to_thread(self._is_ready, place):
                    return path
                await _to_its_end(asyncio.to_thread(self._begin, place))
                if wanted.archive:
                    await self._unpack(wanted.archive, place, confinement)
                if wanted.setup:
                    await self._set_up(wanted.setup, path, environment, confinement, place / "setup.log")
                await asyncio.to_thread((place / "ready").touch)
        except OSError as error:
            if limit.expired():
                raise await asyncio.to_thread(_overdue, wanted.timeout_s, place / "setup.log") from None
            raise WorkdirError(f"the workdir cannot be made ready in {place}: {error}") from error
        _log.info("a workdir is ready", path=path, archive=wanted.archive[:12], setup=bool(wanted.setup))
        return path

    # ------------------------------------------------------------ on the disk (called in threads)

    def _is_ready(self, place: Path) -> bool:
        with suppress(FileNotFoundError):
            os.utime(place / "ready")
            return True
        return False

    def _begin(self, place: Path) -> None:
        """An empty folder; those unused for longest go. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(_PASSABLE)
        shutil.rmtree(place, ignore_errors=True)
        others = (other for other in self._folder.iterdir() if _KEY.fullmatch(other.name))  # nothing that is not ours
        unused = [(_used_at(other), other) for other in others if other.name not in self._used]
        for _, other in sorted(unused, reverse=True)[_KEPT:]:
            shutil.rmtree(other, ignore_errors=True)
        place.mkdir()
        place.chmod(_PASSABLE)

    async def _unpack(self, sha256: str, place: Path, confinement: Confinement) -> None:
        """Raises WorkdirError, OSError."""
        if not _SHA256.fullmatch(sha256):
            raise WorkdirError(f"archive {sha256[:80]!r} is not a SHA-256 in hexadecimal")
        with tempfile.TemporaryFile(dir=place) as file:
            await self._download(sha256, file)
            try:
                await unpack_archive(file, place / "files", confinement, place / "unpack.log")
            except NotUnpackedError as error:
                raise WorkdirError(f"archive {sha256[:12]} cannot be unpacked: {error}") from error

    async def _download(self, sha256: str, file: IO[bytes]) -> None:
        """Raises WorkdirError when the manager does not send it, after some tries: it may just be restarted."""
        for wait_s in (*_TRIES_AFTER_S, None):
            file.seek(0)
            file.truncate()
            digest = hashlib.sha256()
            size = 0
            try:
                async for chunk in self._fetch(sha256):
                    digest.update(chunk)
                    size += len(chunk)
                    if size > _MOST_ARCHIVE_BYTES:
                        raise WorkdirError(f"archive {sha256[:12]} has more than {_MOST_ARCHIVE_BYTES} bytes")
                    await asyncio.to_thread(file.write, chunk)
                if digest.hexdigest() != sha256:
                    raise WorkdirError(f"archive {sha256[:12]}: what the manager sent has another SHA-256")
                file.seek(0)  # writes what is buffered, too: another process reads it
                return
            except WorkdirError:
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)

    async def _set_up(
        self, setup: str, path: str, environment: Mapping[str, str], confinement: Confinement, log: Path
    ) -> None:
        """Raises WorkdirError."""
        life_read, life_write = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            guard = await spawn(
                ["/bin/sh", "-c", setup],
                workdir=path,
                environment=environment,
                log=log,
                life_read=life_read,
                status_write=nowhere,
                inherited=(),
                confinement=confinement,
            )
            try:
                code = await guard.wait()
            except asyncio.CancelledError:
                os.close(life_write)
                life_write = -1
                await guard.wait()
                raise
        finally:
            for descriptor in (life_read, nowhere, life_write):
                if descriptor >= 0:
                    os.close(descriptor)
        if code != 0:
            tail = await asyncio.to_thread(logs.tail, log)
            raise WorkdirError(f"setup ended with exit code {code}; its last lines:\n{tail}", code)


def _overdue(timeout_s: float, log: Path) -> WorkdirError:
    """`log`: of the setup, if it came to that."""
    if not log.exists():
        return WorkdirError(f"the archive was not here and unpacked after {timeout_s:g} s (setup_timeout_s)")
    text = f"setup had not ended after {timeout_s:g} s (setup_timeout_s) and was killed; its last lines:"
    return WorkdirError(f"{text}\n{logs.tail(log)}", -signal.SIGKILL)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for a thread, also when cancelled: nobody else may begin in its folder before it is done."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


def _used_at(place: Path) -> float:
    """0 for one that was never finished."""
    try:
        return (place / "ready").stat().st_mtime
    except OSError:
        return 0.0
