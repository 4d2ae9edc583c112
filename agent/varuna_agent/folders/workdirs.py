"""The folders of jobs that were submitted with their code: fetched, unpacked and set up once for each content.

`WORKDIRS/KEY/files` is the unpacked archive, `setup.log` the output of the setup, and `ready` marks a finished folder.
KEY is a hash of the archive, the setup and, if there is a setup, its environment. Jobs with the same key share a
folder.
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

from varuna_agent.folders.archives import NotUnpackedError, unpack_archive
from varuna_agent.logs import log_files
from varuna_agent.state import Workdir
from varuna_agent.workers.spawn import UNCONFINED, Confinement, ProcessNotStartedError, spawn_guarded

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{32}")
_MOST_ARCHIVE_BYTES = 1024**3
"""Four times the manager's limit."""
_PASSABLE = 0o711
"""Lets the job's user pass to its files, whatever the agent's umask is."""
_RETRY_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_KEPT_UNUSED = 8
"""Unused folders that are kept for later jobs."""

FetchArchive = Callable[[str], AsyncIterator[bytes]]
"""Fetches the bytes of the archive with this SHA-256. Raises WorkdirError."""


class WorkdirError(ProcessNotStartedError):
    """The folder could not be made ready; the text says why."""

    def __init__(self, text: str, exit_code: int = 0) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        """The setup's; 0: the setup was not run."""


@dataclass
class _FolderTask:
    """A folder that is being made ready."""

    task: asyncio.Task[str]
    callers: int = 0
    is_given_up: bool = False
    """It was cancelled and is about to end."""


class Workdirs:
    """The workdirs of all jobs on this VM.

    Args:
        folder: used for nothing else.
        fetch: fetches an archive from the manager.
    """

    def __init__(self, folder: Path, fetch: FetchArchive) -> None:
        self._folder = folder
        self._fetch = fetch
        self._tasks: dict[str, _FolderTask] = {}
        self._used: dict[str, set[str]] = {}
        """By key: the jobs that use the folder."""

    async def make_ready(
        self,
        workdir: Workdir,
        environment: Mapping[str, str],
        confinement: Confinement = UNCONFINED,
        *,
        job_id: str = "",
    ) -> str:
        """Make the folder ready; returns the path to run in. Callers with the same content share the work.

        After a failure the next caller tries again. When the last caller is cancelled, the work is cancelled, too, and
        this returns once none of it runs. Raises WorkdirError.

        Args:
            environment: the setup's.
            confinement: of the processes that unpack and set up; its user owns the files.
            job_id: the job whose workers need the folder.
        """
        key = workdir.content_key(environment)
        self._used.setdefault(key, set()).add(job_id)
        while (making := self._tasks.get(key)) is not None and making.is_given_up:
            await asyncio.wait([making.task])
        if making is None:
            work = self._make_workdir(workdir, environment, confinement, key)
            task = asyncio.create_task(work, name=f"workdir {key}")
            making = self._tasks[key] = _FolderTask(task)
            task.add_done_callback(lambda done: self._remove_task(key, done))
        making.callers += 1
        try:
            return await asyncio.shield(making.task)
        finally:
            making.callers -= 1
            if not making.callers and not making.task.done():
                making.is_given_up = True
                making.task.cancel()
                await asyncio.wait([making.task])

    def keep_only(self, job_ids: Collection[str]) -> None:
        """The folders of other jobs may be deleted when there are many."""
        used = {key: jobs & set(job_ids) for key, jobs in self._used.items()}
        self._used = {key: jobs for key, jobs in used.items() if jobs or key in self._tasks}

    async def close(self) -> None:
        """Cancel all work, and wait for its end."""
        tasks = [making.task for making in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remove_task(self, key: str, task: asyncio.Task[str]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: no caller may be left

    async def _make_workdir(
        self, workdir: Workdir, environment: Mapping[str, str], confinement: Confinement, key: str
    ) -> str:
        place = self._folder / key
        path = str(place / "files") if workdir.archive else workdir.path
        try:
            async with asyncio.timeout(workdir.timeout_s or None) as limit:
                if await asyncio.to_thread(self._is_ready, place):
                    return path
                await _wait_for_thread(asyncio.to_thread(self._make_empty, place))
                if workdir.archive:
                    await self._unpack_archive(workdir.archive, place, confinement)
                if workdir.setup:
                    await self._set_up(
                        workdir.setup, path, environment, confinement=confinement, log=place / "setup.log"
                    )
                await asyncio.to_thread((place / "ready").touch)
        except OSError as error:
            if limit.expired():
                raise await asyncio.to_thread(_make_timeout_error, workdir.timeout_s, place / "setup.log") from None
            raise WorkdirError(f"the workdir cannot be made ready in {place}: {error}") from error
        _log.info("a workdir is ready", path=path, archive=workdir.archive[:12], setup=bool(workdir.setup))
        return path

    # ------------------------------------------------------------ on the disk (called in threads)

    def _is_ready(self, place: Path) -> bool:
        with suppress(FileNotFoundError):
            os.utime(place / "ready")
            return True
        return False

    def _make_empty(self, place: Path) -> None:
        """Make an empty folder, and delete the folders unused for longest. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(_PASSABLE)
        shutil.rmtree(place, ignore_errors=True)
        others = (other for other in self._folder.iterdir() if _KEY.fullmatch(other.name))  # no other files
        unused = [(_read_last_use(other), other) for other in others if other.name not in self._used]
        for _, other in sorted(unused, reverse=True)[_KEPT_UNUSED:]:
            shutil.rmtree(other, ignore_errors=True)
        place.mkdir()
        place.chmod(_PASSABLE)

    async def _unpack_archive(self, sha256: str, place: Path, confinement: Confinement) -> None:
        """Raises WorkdirError, OSError."""
        if not _SHA256.fullmatch(sha256):
            raise WorkdirError(f"archive {sha256[:80]!r} is not a SHA-256 in hexadecimal")
        with tempfile.TemporaryFile(dir=place) as file:
            await self._download_archive(sha256, file)
            try:
                await unpack_archive(file, place / "files", confinement, place / "unpack.log")
            except NotUnpackedError as error:
                raise WorkdirError(f"archive {sha256[:12]} cannot be unpacked: {error}") from error

    async def _download_archive(self, sha256: str, file: IO[bytes]) -> None:
        """Raises WorkdirError if the manager does not send it after some tries, because it may just be restarting."""
        for wait_s in (*_RETRY_WAITS_S, None):
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
                    raise WorkdirError(f"archive {sha256[:12]}: the manager sent data with another SHA-256")
                file.seek(0)  # also flushes: another process reads the file
                return
            except WorkdirError:
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)

    async def _set_up(
        self, setup: str, path: str, environment: Mapping[str, str], *, confinement: Confinement, log: Path
    ) -> None:
        """Raises WorkdirError."""
        life_read, life_write = os.pipe()
        dev_null = os.open(os.devnull, os.O_WRONLY)
        try:
            guard = await spawn_guarded(
                ["/bin/sh", "-c", setup],
                workdir=path,
                environment=environment,
                log=log,
                life_read=life_read,
                status_write=dev_null,
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
            for descriptor in (life_read, dev_null, life_write):
                if descriptor >= 0:
                    os.close(descriptor)
        if code != 0:
            tail = await asyncio.to_thread(log_files.read_tail, log)
            raise WorkdirError(f"setup ended with exit code {code}; its last lines:\n{tail}", code)


def _make_timeout_error(timeout_s: float, log: Path) -> WorkdirError:
    """`log`: the setup's, which exists if the setup has started."""
    if not log.exists():
        return WorkdirError(f"the archive was not here and unpacked after {timeout_s:g} s (setup_timeout_s)")
    text = f"setup had not ended after {timeout_s:g} s (setup_timeout_s) and was killed; its last lines:"
    return WorkdirError(f"{text}\n{log_files.read_tail(log)}", -signal.SIGKILL)


async def _wait_for_thread(work: Coroutine[Any, Any, None]) -> None:
    """Wait for a thread even when cancelled, because no other task may use its folder before it is done."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


def _read_last_use(place: Path) -> float:
    """0 for a folder that was never ready."""
    try:
        return (place / "ready").stat().st_mtime
    except OSError:
        return 0.0
