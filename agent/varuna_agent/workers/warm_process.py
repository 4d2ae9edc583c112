"""A warmed process: it has done the imports of a job's workers, and forks them (see `zygote.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from varuna_agent.state import WorkerKey
from varuna_agent.workers.spawn import UNCONFINED, Confinement, ProcessNotStartedError, spawn_guarded
from varuna_proto.environment import is_read_early

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_ANSWER_S = 5.0
"""Limit for a fork, which takes milliseconds. A machine that swaps needs longer, but also for a new process."""

_ZYGOTE = Path(__file__).with_name("zygote.py")
_FOR_THE_SHELL = re.compile(r"[$`\\*?\[~#!\n;&|<>(){}]")
_PYTHON = re.compile(r"(.*/)?python(3(\.\d+)?)?")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all workers have in common that one warmed process can start."""

    interpreter: str
    arguments: tuple[str, ...]
    """SCRIPT ARGUMENTS... or -m MODULE ARGUMENTS..."""
    workdir: str
    environment: Mapping[str, str]
    """The variables that are read before a script begins. Each worker gets its whole environment when it is forked, so
    the process never has a job's secrets."""
    confinement: Confinement = UNCONFINED

    @classmethod
    def from_command(
        cls, command: str, workdir: str, environment: Mapping[str, str], confinement: Confinement = UNCONFINED
    ) -> Recipe | None:
        """None for a command that needs a shell, because it is more than one Python script with its arguments."""
        if _FOR_THE_SHELL.search(command):
            return None
        try:
            interpreter, *arguments = shlex.split(command)
        except ValueError:
            return None
        if not _PYTHON.fullmatch(interpreter):
            return None
        if arguments[:1] == ["-u"]:  # workers are unbuffered anyway
            del arguments[0]
        names_code = len(arguments) >= 2 if arguments[:1] == ["-m"] else bool(arguments) and arguments[0][:1] != "-"
        if not names_code:
            return None
        early = {name: value for name, value in environment.items() if is_read_early(name)}
        return cls(
            interpreter=interpreter,
            arguments=tuple(arguments),
            workdir=workdir,
            environment=early,
            confinement=confinement,
        )

    def make_command(self, socket_fd: int) -> list[str]:
        return [self.interpreter, str(_ZYGOTE), str(socket_fd), *self.arguments]


class WarmProcess:
    """The agent's end of one warmed process. The process itself runs under a guard, like a worker."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises OSError."""
        self.recipe = recipe
        self.job_ids: set[str] = set()
        """The jobs whose workers it can fork: jobs may have the same command."""
        self.is_ready = False
        """It can fork workers."""
        self.is_over = False
        """It has ended or does not answer, and forks no more workers."""
        self.has_failed = False
        """It ended by itself before it was ready."""
        self.workers: set[WorkerKey] = set()
        """The workers that it forked or is about to fork and that have not ended. They die with it."""
        self.idle_timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._life_read, self._life_write = os.pipe()
        try:
            self._socket, self._child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            os.close(self._life_read)
            os.close(self._life_write)
            raise
        self._is_closed = False
        self._one_at_a_time = asyncio.Lock()

    async def run(self, log: Path, on_ready: Callable[[], None]) -> None:
        """Run the process to its end. `on_ready` is called when it can fork workers."""
        status_read = -1
        try:
            status_read, status_write = os.pipe()
            try:
                guard = await spawn_guarded(
                    self.recipe.make_command(self._child_socket.fileno()),
                    workdir=self.recipe.workdir,
                    environment=self.recipe.environment,
                    log=log,
                    life_read=self._life_read,
                    status_write=status_write,
                    inherited=[self._child_socket.fileno()],
                    confinement=self.recipe.confinement,
                )
            finally:
                os.close(self._life_read)
                os.close(status_write)
                self._child_socket.close()
            if await self._receive_ready():
                _log.info("workers start from a warmed process from now on", jobs=sorted(self.job_ids), pid=guard.pid)
                on_ready()
            self.has_failed = not self.is_ready and not self._is_closed
            self._settled.set()
            await guard.wait()
        except (ProcessNotStartedError, OSError) as error:
            _log.warning("no warmed process", reason=str(error))
        finally:
            self.close()
            async with self._one_at_a_time:  # a thread may still be using its number
                self._socket.close()
            if status_read >= 0:
                os.close(status_read)

    async def _receive_ready(self) -> bool:
        self._socket.setblocking(False)
        with suppress(OSError):
            is_there = bool(await asyncio.get_running_loop().sock_recv(self._socket, 16))
            self.is_ready = is_there and not self.is_over
        return self.is_ready

    async def wait_ready(self) -> bool:
        """Wait until it can fork workers (True) or never will (False)."""
        await self._settled.wait()
        return self.is_ready

    async def fork_worker(self, environment: Mapping[str, str], fds: Sequence[int]) -> bool:
        """Let it fork a worker with this environment. False: it has not, and the worker must start in another way.

        Args:
            fds: life, status, log and stacks; the process gets duplicates, and these stay open here.
        """
        request = json.dumps(dict(environment)).encode()
        try:
            async with self._one_at_a_time:
                obstacle = await asyncio.to_thread(self._request_fork, request, fds)
        except OSError as error:
            obstacle = str(error)
            self.is_ready, self.is_over = False, True  # not closed: it may have workers
        if obstacle:
            _log.warning("no worker from the warmed process: it starts without", error=obstacle)
        return self.is_ready and not obstacle

    def _request_fork(self, request: bytes, fds: Sequence[int]) -> str:
        """Why it cannot fork now; empty: it has. Raises OSError when there is no answer."""
        go_read, go_write = os.pipe()
        try:
            self._socket.settimeout(_ANSWER_S)
            socket.send_fds(self._socket, [len(request).to_bytes(8, "big")], [*fds, go_read])
            self._socket.sendall(request)
            answer = self._socket.recv(1)
            if not answer:
                raise ConnectionError("it has ended")
            if answer != b"\n":
                return f"it cannot fork: {os.strerror(answer[0])}"
            os.write(go_write, b"\n")  # without it, a fork that comes too late ends: there must not be two workers
            return ""
        finally:
            os.close(go_read)
            os.close(go_write)

    def close(self) -> None:
        """Close its guard's pipe, which kills it and its workers. Idempotent."""
        self.is_ready, self.is_over = False, True
        self._settled.set()
        if self.idle_timer is not None:
            self.idle_timer.cancel()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._life_write)
