"""The agent's pipes to one worker and its guard, and how the agent follows and ends them."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import psutil
import structlog

from varuna_agent.workers.isolation import JobUser
from varuna_agent.workers.stacks import StackPipe

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class WorkerPipes:
    """The agent's ends of one worker's pipes: closing `life` kills the worker; its stack dumps arrive on `stacks`."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.life_read, self._life_write = os.pipe()
        try:
            self.stacks = StackPipe()
        except OSError:
            os.close(self.life_read)
            os.close(self._life_write)
            raise
        self.killed = asyncio.Event()
        self.group = 0
        """The number of its process group; 0: not started yet."""

    def kill_worker(self) -> None:
        if not self.killed.is_set():
            self.killed.set()
            os.close(self._life_write)


async def wait_done_or_killed(work: asyncio.Task[Any], pipes: WorkerPipes) -> None:
    """Wait for the work, or cancel it once the worker is killed."""
    killed = asyncio.create_task(pipes.killed.wait())
    try:
        await asyncio.wait([work, killed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        killed.cancel()
        if not work.done():
            work.cancel()


async def follow_guard(status_fd: int, pipes: WorkerPipes) -> int | None:
    """Read a guard's status pipe until the guard ends; returns the exit code, None if it wrote none. Closes the pipe.

    The guard of a worker from a warmed process belongs to the job's user, so its text cannot be trusted.
    """
    os.set_blocking(status_fd, False)
    with os.fdopen(status_fd, "rb", buffering=0) as pipe:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            pipes.group = _parse_number(await reader.readline()) or 0
            exit_code = _parse_number(await reader.readline())
            while await reader.read(65536):
                continue
        except ValueError as error:  # a line that does not end
            _log.warning("a worker's guard does not follow the protocol", error=str(error))
            pipes.kill_worker()
            exit_code = None
        finally:
            transport.close()
    return exit_code


def _parse_number(line: bytes) -> int | None:
    """None for a line that is neither a process number nor an exit code."""
    text = line.strip()
    is_number = text.removeprefix(b"-").isdigit() and len(text) <= 10
    return int(text) if is_number else None


def close_descriptor(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def kill_group(group: int, user: JobUser | None) -> None:
    """SIGKILL the group's processes. `user`: only this user's, because the group's number comes from its process."""
    if group <= 1:
        return
    if user is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.uids().real == user.uid:
                process.kill()
