"""Warmed processes, from which workers are forked (see `zygote.py`): what they import is imported already.

One for each kind of worker, from its first worker on: that one, too, is forked from it, so that nothing is ever
imported beside a worker that runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from varuna_agent.spawn import UNCONFINED, Confinement, ProcessNotStartedError, spawn
from varuna_agent.state import WorkerKey
from varuna_proto.environment import is_read_early

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
    """What is read before a script begins. Each worker gets all of its own when it is forked: the process has neither
    a job's secrets nor need of them."""
    confinement: Confinement = UNCONFINED

    @classmethod
    def of(
        cls, command: str, workdir: str, environment: Mapping[str, str], confinement: Confinement = UNCONFINED
    ) -> Recipe | None:
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
        early = {name: value for name, value in environment.items() if is_read_early(name)}
        return cls(
            interpreter=interpreter,
            arguments=tuple(arguments),
            workdir=workdir,
            environment=early,
            confinement=confinement,
        )

    def command(self, socket_fd: int) -> list[str]:
        return [self.interpreter, str(_ZYGOTE), str(socket_fd), *self.arguments]


class WarmProcess:
    """The agent's end of one warmed process. The process itself runs under a guard, like a worker."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises OSError."""
        self.recipe = recipe
        self.job_ids: set[str] = set()
        """Whose workers it is for: jobs may have the same command."""
        self.is_ready = False
        """Workers can be forked from it."""
        self.is_over = False
        """It has ended, or does not answer: it forks no more workers."""
        self.has_failed = False
        """It ended by itself before it was ready."""
        self.workers: set[WorkerKey] = set()
        """Forked from it, or about to be, and not ended: they would be killed with it."""
        self.ends: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._decided = asyncio.Event()
        self._life_read, self._life_write = os.pipe()
        try:
            self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            os.close(self._life_read)
            os.close(self._life_write)
            raise
        self._is_closed = False
        self._one_at_a_time = asyncio.Lock()

    async def run(self, log: Path, ready: Callable[[], None]) -> None:
        """From its start to its end. `ready` is called when workers can be forked from it."""
        status_read = -1
        try:
            status_read, status_write = os.pipe()
            try:
                guard = await spawn(
                    self.recipe.command(self._theirs.fileno()),
                    workdir=self.recipe.workdir,
                    environment=self.recipe.environment,
                    log=log,
                    life_read=self._life_read,
                    status_write=status_write,
                    inherited=[self._theirs.fileno()],
                    confinement=self.recipe.confinement,
                )
            finally:
                os.close(self._life_read)
                os.close(status_write)
                self._theirs.close()
            if await self._hear_ready():
                _log.info("workers start from a warmed process from now on", jobs=sorted(self.job_ids), pid=guard.pid)
                ready()
            self.has_failed = not self.is_ready and not self._is_closed
            self._decided.set()
            await guard.wait()
        except (ProcessNotStartedError, OSError) as error:
            _log.warning("no warmed process", reason=str(error))
        finally:
            self.close()
            self._ours.close()
            if status_read >= 0:
                os.close(status_read)

    async def _hear_ready(self) -> bool:
        self._ours.setblocking(False)
        with suppress(OSError):
            is_there = bool(await asyncio.get_running_loop().sock_recv(self._ours, 16))
            self.is_ready = is_there and not self.is_over
        return self.is_ready

    async def wait_ready(self) -> bool:
        """True once workers can be forked from it; False when that will never be."""
        await self._decided.wait()
        return self.is_ready

    async def fork(self, environment: Mapping[str, str], fds: Sequence[int]) -> bool:
        """Have it fork a worker with this environment. False when it has ended: start the worker otherwise.

        Args:
            fds: life, status, log, stacks and perhaps the rendezvous; duplicates go over, these stay open here.
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
        self._decided.set()
        if self.ends is not None:
            self.ends.cancel()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._life_write)


class WarmPool:
    """The warmed processes of a VM. One without workers ends after a while, or when one of another kind is wanted.

    Args:
        keep_s: how long one is kept that has no worker.
        on_preparing: called with the jobs whose workers would have to wait for one that is not ready, and those whose
            workers would start at once, when that changes.
    """

    def __init__(self, keep_s: float, on_preparing: Callable[[frozenset[str], frozenset[str]], None]) -> None:
        self._keep_s = keep_s
        self._on_preparing = on_preparing
        self._told: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._all: list[WarmProcess] = []
        self._failed: deque[Recipe] = deque(maxlen=16)
        """What could not be warmed (an import starts a thread, say), and so is not tried again."""

    @property
    def job_ids(self) -> frozenset[str]:
        """The jobs whose workers would start at once."""
        return frozenset(job_id for warm in self._all if warm.is_ready for job_id in warm.job_ids)

    @property
    def all_job_ids(self) -> frozenset[str]:
        """The jobs for which a process is kept here, ready or not."""
        return frozenset(job_id for warm in self._all for job_id in warm.job_ids)

    def get(self, job_id: str, recipe: Recipe, log: Path) -> WarmProcess | None:
        """The warmed process for such workers; is started when there is none. None when it cannot be.

        It is kept for `keep_s` from now on, or for as long as it has workers. Returns at once.
        """
        if recipe in self._failed:
            return None
        warm = next((known for known in self._all if known.recipe == recipe and not known.is_over), None)
        if warm is None:
            for other in self._all:
                if not other.workers:
                    other.close()  # two would hold twice the memory
            try:
                warm = WarmProcess(recipe)
            except OSError as error:
                _log.warning("no warmed process", job=job_id, reason=str(error))
                return None
            self._all.append(warm)
            warm.task = asyncio.create_task(self._run(warm, log), name="warmed process")
        self._keep(warm)
        warm.job_ids.add(job_id)
        self._tell()
        return warm

    def release(self, key: WorkerKey) -> None:
        """The worker has ended, or was not forked after all."""
        for warm in self._all:
            if key in warm.workers:
                warm.workers.discard(key)
                self._keep(warm)

    def end_process_of(self, key: WorkerKey) -> None:
        """End the one from which the worker was forked, and with it all that descends from it."""
        for warm in self._all:
            if key in warm.workers:
                warm.close()

    async def close(self) -> None:
        """End them all, and wait for that."""
        for warm in self._all:
            warm.close()
        await asyncio.gather(*(warm.task for warm in self._all if warm.task is not None))

    async def _run(self, warm: WarmProcess, log: Path) -> None:
        try:
            await warm.run(log, self._tell)
        finally:
            self._all.remove(warm)
            if warm.has_failed:
                _log.warning("workers cannot start from a warmed process", jobs=sorted(warm.job_ids), see=str(log))
                self._failed.append(warm.recipe)
            self._tell()

    def _tell(self) -> None:
        making = (warm for warm in self._all if not (warm.is_ready or warm.is_over))
        job_ids = frozenset(job_id for warm in making for job_id in warm.job_ids), self.job_ids
        if job_ids != self._told:
            self._told = job_ids
            self._on_preparing(*job_ids)

    def _keep(self, warm: WarmProcess) -> None:
        """Until it has been without workers for a while: the job may be over, and memory is not to be held for ever."""
        if warm.ends is not None:
            warm.ends.cancel()
        warm.ends = asyncio.get_running_loop().call_later(self._keep_s, self._end_if_idle, warm)

    def _end_if_idle(self, warm: WarmProcess) -> None:
        if warm.workers:
            return  # the end of the last one sets the time anew
        if warm.is_ready or warm.is_over:
            warm.close()
        else:
            self._keep(warm)  # a slow disk: it has not been idle yet
