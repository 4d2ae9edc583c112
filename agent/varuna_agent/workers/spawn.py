"""Starts commands under a guard (see `guard.py`)."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from varuna_agent.logs import log_files
from varuna_agent.workers.isolation import JobUser

_GUARD = Path(__file__).with_name("guard.py")


class ProcessNotStartedError(Exception):
    """The worker could not be started; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """The user and the limits with which a job's processes run. The guard itself runs as the agent's user."""

    user: JobUser | None = None
    """None: the agent's own user."""
    group: Path | None = None
    """The folder of the control group; None: the agent's own."""

    @property
    def guard_arguments(self) -> list[str]:
        """The form in which `guard.py` takes it."""
        return ["-" if self.user is None else self.user.guard_argument, "-" if self.group is None else str(self.group)]


UNCONFINED = Confinement()


async def spawn_guarded(
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
    """Start a command under a guard; returns the guard. Raises ProcessNotStartedError.

    Args:
        inherited: the descriptors that the command gets besides its output; it gets no others.
    """
    if not Path(workdir).is_dir():
        raise ProcessNotStartedError(f"workdir {workdir!r} is not a folder on this VM")
    environment_fd = _make_unnamed_file(_encode(environment))
    try:
        folder = str(Path(workdir).absolute())  # the agent's may be relative; the guard runs in /
        arguments = [*confinement.guard_arguments, folder, str(environment_fd), *command]
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
    """Start a guard that runs this script, in a fixed environment. Raises ProcessNotStartedError.

    `user`: the owner of the log.
    """
    log_fd = await open_log(log, user)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *["-I", "-S", str(script), str(life_read), str(status_write), *arguments],
            cwd="/",
            env=_make_guard_environment(),
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
    """Open a log for appending. Raises ProcessNotStartedError."""
    try:
        return await asyncio.to_thread(log_files.open_log, path, user)
    except OSError as error:
        raise ProcessNotStartedError(f"cannot open the log {path}: {error}") from error


def _make_guard_environment() -> dict[str, str]:
    """Fixed, because guards may run as root; it adds only what the agent's Python may need to find its libraries."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return {"PATH": os.defpath, "LC_ALL": "C.UTF-8"} | ({"LD_LIBRARY_PATH": libraries} if libraries else {})


def _encode(environment: Mapping[str, str]) -> bytes:
    """The form in which `guard.py` takes it. Raises ProcessNotStartedError for a variable that no process can have."""
    variables = []
    for name, value in environment.items():
        try:
            if not name or "=" in name or "\0" in name + value:
                raise ValueError("a name must not be empty or contain '=', and neither name nor value may contain NUL")
            variables.append(os.fsencode(f"{name}={value}"))
        except ValueError as error:
            raise ProcessNotStartedError(f"cannot set the environment variable {name!r}: {error}") from error
    return b"\0".join(variables)


def _make_unnamed_file(data: bytes) -> int:
    """A descriptor of an unnamed file with this data, in memory if possible. Raises ProcessNotStartedError."""
    try:
        with _open_unnamed_file() as file:
            file.write(data)
            file.seek(0)
            return os.dup(file.fileno())
    except OSError as error:
        raise ProcessNotStartedError(f"cannot pass on the environment: {error}") from error


def _open_unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("environment"), "w+b")
    return tempfile.TemporaryFile()
