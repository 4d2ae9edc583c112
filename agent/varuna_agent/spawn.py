"""Starts a command under a guard (see `guard.py`)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from varuna_agent import logs
from varuna_agent.isolation import JobUser

_GUARD = Path(__file__).with_name("guard.py")


class ProcessNotStartedError(Exception):
    """The worker could not be started; says why."""


async def spawn(
    command: Sequence[str],
    *,
    workdir: str,
    environment: Mapping[str, str],
    log: Path,
    life_read: int,
    status_write: int,
    inherited: Sequence[int],
    user: JobUser | None,
) -> asyncio.subprocess.Process:
    """A guard with its command. Raises ProcessNotStartedError.

    Args:
        inherited: the descriptors of this process that the command gets besides its output; it gets no others.
        user: as whom the command runs, under a guard that runs as the agent does.
    """
    if not Path(workdir).is_dir():
        raise ProcessNotStartedError(f"workdir {workdir!r} is not a folder on this VM")
    log_fd = await open_log(log, user)
    as_user = "-" if user is None else user.for_guard
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *["-I", "-S", str(_GUARD), str(life_read), str(status_write), as_user, *command],
            cwd=workdir,
            env=dict(environment),
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
