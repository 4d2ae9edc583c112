"""A warmed process for the next generation's workers (see `zygote.py`): what they import is imported already."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from varuna_agent.state import WorkerKey

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_ANSWER_S = 5.0
"""For a fork, which takes milliseconds; a machine that swaps may need longer, but a new process there would, too."""

_ZYGOTE = Path(__file__).with_name("zygote.py")
_FOR_THE_SHELL = re.compile(r"[$`\\*?\[~#!\n;&|<>(){}]")
_PYTHON = re.compile(r"(.*/)?python(3(\.\d+)?)?")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What workers that one warmed process can start have in common."""

    interpreter: str
    arguments: tuple[str, ...]
    """SCRIPT ARGUMENTS... or -m MODULE ARGUMENTS..."""
    workdir: str
    environment: Mapping[str, str]

    @classmethod
    def of(cls, command: str, workdir: str, environment: Mapping[str, str]) -> Recipe | None:
        """None for a command that is more than one Python script with its arguments: the shell must run that."""
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
        return cls(interpreter=interpreter, arguments=tuple(arguments), workdir=workdir, environment=dict(environment))

    def command(self, socket_fd: int) -> list[str]:
        return [self.interpreter, str(_ZYGOTE), str(socket_fd), *self.arguments]


class WarmProcess:
    """The agent's end of one warmed process. The process itself runs under a guard, like a worker."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.life_read, self._life_write = os.pipe()
        self.is_over = False
        """It has ended, or does not answer: it forks no more workers."""
        self._is_closed = False
        self._one_at_a_time = asyncio.Lock()
        self.is_ready = False
        self.workers: set[WorkerKey] = set()
        """Forked from it and not ended: they would be killed with it."""

    async def wait_ready(self) -> bool:
        """True once workers can be forked from it; False when it has ended instead."""
        self._ours.setblocking(False)
        with suppress(OSError):
            is_there = bool(await asyncio.get_running_loop().sock_recv(self._ours, 16))
            self.is_ready = is_there and not self.is_over
        return self.is_ready

    async def fork(self, environment: Mapping[str, str], fds: Sequence[int]) -> bool:
        """Have it fork a worker with this environment. False when it has ended: start the worker otherwise.

        Args:
            fds: life, status, log and perhaps the rendezvous; duplicates go over, these stay open here.
        """
        request = json.dumps(dict(environment)).encode()
        try:
            async with self._one_at_a_time:
                await asyncio.to_thread(self._ask, request, fds)
        except OSError as error:
            _log.warning("no worker from the warmed process: it starts without", error=str(error))
            self.is_ready, self.is_over = False, True  # not closed: it may have workers
        return self.is_ready

    def _ask(self, request: bytes, fds: Sequence[int]) -> None:
        """Raises OSError when there is no answer."""
        self._ours.settimeout(_ANSWER_S)
        socket.send_fds(self._ours, [len(request).to_bytes(8, "big")], list(fds))
        self._ours.sendall(request)
        if not self._ours.recv(1):
            raise ConnectionError("it has ended")

    def close(self) -> None:
        """Let go of its guard's pipe: SIGKILL to it and its workers. Idempotent."""
        self.is_ready, self.is_over = False, True
        if not self._is_closed:
            self._is_closed = True
            os.close(self._life_write)

    def release(self) -> None:
        """After its end."""
        self.close()
        self._ours.close()
        self.theirs.close()


async def read_end(status_fd: int) -> bytes:
    """All that a guard writes, until it ends. The descriptor is closed."""
    loop = asyncio.get_running_loop()
    os.set_blocking(status_fd, False)
    with os.fdopen(status_fd, "rb", buffering=0) as pipe:
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            return await reader.read()
        finally:
            transport.close()
