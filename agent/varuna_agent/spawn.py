"""Starts a command under a guard (see `guard.py`)."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from varuna_agent import logs
from varuna_agent.isolation import JobUser

_GUARD = Path(__file__).with_name("guard.py")


class ProcessNotStartedError(Exception):
    """The worker could not be started; says why."""


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """As whom, and within which limits, a job's processes run. The guard itself runs as the agent does."""

    user: JobUser | None = None
    """None: as the agent."""
    group: Path | None = None
    """The folder of the control group; None: the agent's own."""

    @property
    def for_guard(self) -> list[str]:
        """As `guard.py` takes it."""
        return ["-" if self.user is None else self.user.for_guard, "-" if self.group is None else str(self.group)]


UNCONFINED = Confinement()


async def spawn(
    command: Sequence[str],
    *,
    workdir: str,
    environment: Mapping[str, str],
    log: Path,
    life_read: int,
    status_write: int,
    inherited: Sequence[int],
    confinement: Confinement,
) -> asyncio.subprocess.Process:
    """A guard with its command. Raises ProcessNotStartedError.

    Args:
        inherited: the descriptors of this process that the command gets besides its output; it gets no others.
    """
    if not Path(workdir).is_dir():
        raise ProcessNotStartedError(f"workdir {workdir!r} is not a folder on this VM")
    environment_fd = _file_with(_encoded(environment))
    try:
        folder = str(Path(workdir).absolute())  # the agent's may be relative; the guard is elsewhere
        arguments = [*confinement.for_guard, folder, str(environment_fd), *command]
        return await start_guard(
            _GUARD,
            arguments,
            log=log,
            life_read=life_read,
            status_write=status_write,
            inherited=[environment_fd, *inherited],
            user=confinement.user,
        )
    finally:
        os.close(environment_fd)


async def start_guard(
    script: Path,
    arguments: Sequence[str],
    *,
    log: Path,
    life_read: int,
    status_write: int,
    inherited: Sequence[int],
    user: JobUser | None,
) -> asyncio.subprocess.Process:
    """A guard that is this script of ours, in an environment that is nobody's choice but this VM's.

    `user`: whose the log is. Raises ProcessNotStartedError.
    """
    log_fd = await open_log(log, user)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *["-I", "-S", str(script), str(life_read), str(status_write), *arguments],
            cwd="/",
            env=_guards_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=[life_read, status_write, *inherited],
            start_new_session=True,  # out of reach of signals to the agent's group
        )
    except (OSError, ValueError) as error:
        raise ProcessNotStartedError(f"cannot start the worker: {error}") from error
    finally:
        os.close(log_fd)


async def open_log(path: Path, user: JobUser | None) -> int:
    """A descriptor that appends. Raises ProcessNotStartedError."""
    try:
        return await asyncio.to_thread(logs.open_log, path, user)
    except OSError as error:
        raise ProcessNotStartedError(f"cannot open the log {path}: {error}") from error


def _guards_environment() -> dict[str, str]:
    """Fixed: guards may run as root. Of the agent's own only what its Python may need to find its libraries."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return {"PATH": os.defpath, "LC_ALL": "C.UTF-8"} | ({"LD_LIBRARY_PATH": libraries} if libraries else {})


def _encoded(environment: Mapping[str, str]) -> bytes:
    """As `guard.py` takes it. Raises ProcessNotStartedError for a variable that no process can have."""
    variables = []
    for name, value in environment.items():
        try:
            if not name or "=" in name or "\0" in name + value:
                raise ValueError("a name has no '=' and is not empty, and nothing has a NUL in it")
            variables.append(os.fsencode(f"{name}={value}"))
        except ValueError as error:
            raise ProcessNotStartedError(f"cannot set the environment variable {name!r}: {error}") from error
    return b"\0".join(variables)


def _file_with(data: bytes) -> int:
    """A descriptor of a file without a name, in memory where the system can. Raises ProcessNotStartedError."""
    try:
        with _nameless_file() as file:
            file.write(data)
            file.seek(0)
            return os.dup(file.fileno())
    except OSError as error:
        raise ProcessNotStartedError(f"cannot pass on the environment: {error}") from error


def _nameless_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("environment"), "w+b")
    return tempfile.TemporaryFile()
