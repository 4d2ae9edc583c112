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
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import structlog

from varuna_agent import logs
from varuna_agent.isolation import JobUser
from varuna_agent.spawn import ProcessNotStartedError, spawn
from varuna_agent.state import Workdir

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_UNPACKED_BYTES = 4 * 1024**3
"""A small archive can unpack to any size."""
_TRIES_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_KEPT = 8
"""Folders of contents that no job has used since this agent started."""

Fetch = Callable[[str], AsyncIterator[bytes]]
"""The bytes of the archive with this SHA-256. Raises WorkdirError."""


class WorkdirError(ProcessNotStartedError):
    """The folder could not be made ready; says why."""

    def __init__(self, text: str, exit_code: int = 0) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        """Of the setup; 0: it did not come to that."""


class Workdirs:
    """All of this VM.

    Args:
        folder: theirs alone.
        fetch: asks the manager for an archive.
        user: as whom setups run, and whose the unpacked files are; None: as the agent.
    """

    def __init__(self, folder: Path, fetch: Fetch, user: JobUser | None = None) -> None:
        self._folder = folder
        self._fetch = fetch
        self._user = user
        self._making: dict[str, asyncio.Task[str]] = {}
        self._used: set[str] = set()

    async def ready(self, wanted: Workdir, environment: Mapping[str, str]) -> str:
        """The path to run in, once all is done; callers that come meanwhile wait for the same. Raises WorkdirError.

        What has failed is tried anew by the next caller. `environment`: of the setup.
        """
        key = wanted.key(environment)
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(self._make(wanted, environment, key), name=f"workdir {key}")
            task.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(task)  # a worker that is killed meanwhile leaves it to the next

    async def close(self) -> None:
        """End what is being done, and wait for that."""
        for task in tuple(self._making.values()):
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)

    def _made(self, key: str, task: asyncio.Task[str]) -> None:
        self._making.pop(key, None)
        if not task.cancelled():
            task.exception()  # nobody may be waiting any more

    async def _make(self, wanted: Workdir, environment: Mapping[str, str], key: str) -> str:
        self._used.add(key)
        place = self._folder / key
        path = str(place / "files") if wanted.archive else wanted.path
        try:
            if await asyncio.to_thread(self._is_ready, place):
                return path
            await asyncio.to_thread(self._begin, place)
            if wanted.archive:
                await self._unpack(wanted.archive, place)
            if wanted.setup:
                await self._set_up(wanted.setup, path, environment, place / "setup.log")
            await asyncio.to_thread((place / "ready").touch)
        except OSError as error:
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
        self._folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        unused = [(_used_at(other), other) for other in self._folder.iterdir() if other.name not in self._used]
        for _, other in sorted(unused, reverse=True)[_KEPT:]:
            shutil.rmtree(other, ignore_errors=True)
        place.mkdir(mode=0o711)

    async def _unpack(self, sha256: str, place: Path) -> None:
        """Raises WorkdirError, OSError."""
        if not _SHA256.fullmatch(sha256):
            raise WorkdirError(f"archive {sha256[:80]!r} is not a SHA-256 in hexadecimal")
        with tempfile.TemporaryFile(dir=place) as file:
            await self._download(sha256, file)
            await asyncio.to_thread(_extract, file, place / "files", self._user)

    async def _download(self, sha256: str, file: IO[bytes]) -> None:
        """Raises WorkdirError when the manager does not send it, after some tries: it may just be restarted."""
        for wait_s in (*_TRIES_AFTER_S, None):
            file.seek(0)
            file.truncate()
            digest = hashlib.sha256()
            try:
                async for chunk in self._fetch(sha256):
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
                if digest.hexdigest() != sha256:
                    raise WorkdirError(f"archive {sha256[:12]}: what the manager sent has another SHA-256")
                file.seek(0)
                return
            except WorkdirError:
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)

    async def _set_up(self, setup: str, path: str, environment: Mapping[str, str], log: Path) -> None:
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
                user=self._user,
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


def _used_at(place: Path) -> float:
    """0 for one that was never finished."""
    try:
        return (place / "ready").stat().st_mtime
    except OSError:
        return 0.0


def _extract(file: IO[bytes], folder: Path, user: JobUser | None) -> None:
    """Raises WorkdirError for an archive that is none, is too large, or would leave the folder."""
    folder.mkdir(mode=0o700 if user is not None else 0o755)
    try:
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            total = 0
            for member in archive:
                total += member.size
                if total > _MOST_UNPACKED_BYTES:
                    raise WorkdirError(f"the archive unpacks to more than {_MOST_UNPACKED_BYTES} bytes")
                archive.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise WorkdirError(f"the archive cannot be unpacked: {error}") from error
    if user is not None:
        user.own(folder)
        for root, folders, files in os.walk(folder):
            for name in (*folders, *files):
                user.own(Path(root, name))
