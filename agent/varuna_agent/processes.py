"""Worker processes: each under a guard of its own (see `guard.py`), from a warmed process where that is possible."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varuna_agent import logs
from varuna_agent.isolation import JobUser
from varuna_agent.spawn import ProcessNotStartedError, open_log, spawn
from varuna_agent.stacks import NoStacksError, StackPipe
from varuna_agent.state import Workdir, WorkerKey
from varuna_agent.warm import Recipe, WarmPool
from varuna_agent.workdirs import WorkdirError, Workdirs

__all__ = ["ProcessEnd", "ProcessNotStartedError", "ProcessSpec", "WorkerProcesses"]


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    key: WorkerKey
    command: str
    """Run by /bin/sh -c."""
    workdir: Workdir
    environment: Mapping[str, str]
    """What all workers of the job on this VM have in common."""
    contract: Mapping[str, str] = field(default_factory=dict)
    """What this worker has for itself, on top of it."""
    log: Path
    rendezvous: socket.socket | None = None
    """Inherited by the worker (VARUNA_RENDEZVOUS_FD says where); closed here once it has started."""


@dataclass(frozen=True)
class ProcessEnd:
    exit_code: int
    """Negative: the signal."""
    log_tail: str


class _Worker:
    """The agent's ends of what a worker has: letting go of `life` kills it, `stacks` has what it says at a signal."""

    def __init__(self) -> None:
        self.life_read, self._life_write = os.pipe()
        self.stacks = StackPipe()
        self.killed = asyncio.Event()
        self.group = 0
        """Of its processes; 0: not started yet."""

    def kill(self) -> None:
        if not self.killed.is_set():
            self.killed.set()
            os.close(self._life_write)


class WorkerProcesses:
    """Starts and kills workers, and tells the end of each exactly once.

    Args:
        on_end: awaited with the key and how it ended, when nothing of the worker's group runs any more.
        workdirs: makes the folders that workers run in.
        on_preparing: called with the jobs whose workers would have to wait for imports that are being done, and those
            whose workers would start at once, when that changes.
        on_prepared: called with a job whose folder was made ready by `prepare`, or with the job and why it was not.
        keep_warm_s: how long a warmed process is kept for a job that has no worker here; 0: there are none.
        user: as whom workers run; None: as the agent.
    """

    def __init__(
        self,
        on_end: Callable[[WorkerKey, ProcessEnd | ProcessNotStartedError], Awaitable[None]],
        workdirs: Workdirs,
        keep_warm_s: float = 120.0,
        user: JobUser | None = None,
        on_preparing: Callable[[frozenset[str], frozenset[str]], None] = lambda job_ids, warm: None,
        on_prepared: Callable[[str, WorkdirError | None], None] = lambda job_id, error: None,
    ) -> None:
        self._on_end = on_end
        self._user = user
        self._workers: dict[WorkerKey, _Worker] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._workdirs = workdirs
        self._on_prepared = on_prepared
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._warm = WarmPool(keep_warm_s, user, on_preparing) if keep_warm_s > 0 else None

    def start(self, spec: ProcessSpec) -> None:
        """Returns at once; also when it cannot be started, its end is told later."""
        self._workers[spec.key] = worker = _Worker()
        self._tasks[spec.key] = asyncio.create_task(self._run(spec, worker), name=f"worker {spec.key}")

    def prepare(self, job_id: str, command: str, workdir: Workdir, environment: Mapping[str, str], log: Path) -> None:
        """Make the folder of such workers ready, then have a process at hand from which they start at once, where that
        is possible. Returns at once."""
        if not workdir.needs_work:
            self._warm_up(job_id, command, workdir.path, environment, log)
        elif job_id not in self._preparing:
            work = self._prepare(job_id, command, workdir, environment, log)
            self._preparing[job_id] = asyncio.create_task(work, name=f"prepares for {job_id}")

    async def _prepare(
        self, job_id: str, command: str, workdir: Workdir, environment: Mapping[str, str], log: Path
    ) -> None:
        try:
            path = await self._workdirs.ready(workdir, environment)
        except WorkdirError as error:
            self._on_prepared(job_id, error)
        else:
            self._warm_up(job_id, command, path, environment, log)
            self._on_prepared(job_id, None)
        finally:
            del self._preparing[job_id]

    def _warm_up(self, job_id: str, command: str, path: str, environment: Mapping[str, str], log: Path) -> None:
        recipe = Recipe.of(command, path, environment)
        if self._warm is not None and recipe is not None:
            self._warm.get(job_id, recipe, log)

    @property
    def job_ids(self) -> set[str]:
        """The jobs that have workers here."""
        return {key.job_id for key in self._tasks}

    @property
    def prepared_job_ids(self) -> frozenset[str]:
        """The jobs whose workers would start at once."""
        return frozenset() if self._warm is None else self._warm.job_ids

    def kill(self, key: WorkerKey) -> None:
        """SIGKILL everything that belongs to the worker, by letting go of its guard's pipe. Idempotent."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.kill()

    async def stacks(self, key: WorkerKey, pid: int) -> str:
        """Where all Python threads of the worker stand. Raises NoStacksError.

        Args:
            pid: what the worker says that it is; 0: it has said nothing yet. Believed only within its own group.
        """
        worker = self._workers.get(key)
        if worker is None or not worker.group:
            raise NoStacksError(f"worker {key} has no process")
        with suppress(ProcessLookupError):
            if pid and os.getpgid(pid) == worker.group:
                return await worker.stacks.ask(pid)
        return await worker.stacks.ask(worker.group)

    async def close(self) -> None:
        """Kill all that still runs and wait until it is gone."""
        for worker in self._workers.values():
            worker.kill()
        await self._workdirs.close()
        await asyncio.gather(*self._tasks.values())
        await asyncio.gather(*self._preparing.values(), return_exceptions=True)
        if self._warm is not None:
            await self._warm.close()

    # ------------------------------------------------------------ one worker

    async def _run(self, spec: ProcessSpec, worker: _Worker) -> None:
        end: ProcessEnd | ProcessNotStartedError
        try:
            exit_code = await self._run_guard(spec, worker)
            quiet = exit_code == 0
            end = ProcessEnd(exit_code, "" if quiet else await asyncio.to_thread(logs.tail, spec.log))
        except ProcessNotStartedError as error:
            end = error
        finally:
            worker.kill()
            del self._workers[spec.key]
            worker.stacks.close()
            if self._warm is not None:
                self._warm.release(spec.key)
        await self._on_end(spec.key, end)
        del self._tasks[spec.key]

    async def _run_guard(self, spec: ProcessSpec, worker: _Worker) -> int:
        """The worker's exit code. Raises ProcessNotStartedError."""
        status_read, status_write = os.pipe()
        guard: asyncio.subprocess.Process | None = None
        try:
            workdir = await self._ready_workdir(spec, worker)
            if not await self._fork(spec, workdir, worker, status_write):
                guard = await spawn(
                    ["/bin/sh", "-c", spec.command],
                    workdir=workdir,
                    environment={**spec.environment, **spec.contract, **worker.stacks.variable},
                    log=spec.log,
                    life_read=worker.life_read,
                    status_write=status_write,
                    inherited=[worker.stacks.theirs, *_rendezvous_fd(spec)],
                    user=self._user,
                )
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(worker.life_read)
            os.close(status_write)
            worker.stacks.started()
            if spec.rendezvous is not None:
                spec.rendezvous.close()
        exit_code = await _follow(status_read, worker)
        if guard is not None:
            await guard.wait()
        if exit_code is None:  # it was the guard that was killed
            _kill_group(worker.group)
            return -signal.SIGKILL
        return exit_code

    async def _ready_workdir(self, spec: ProcessSpec, worker: _Worker) -> str:
        """A worker that is killed waits no longer. Raises ProcessNotStartedError."""
        if not spec.workdir.needs_work:
            return spec.workdir.path
        making = asyncio.create_task(self._workdirs.ready(spec.workdir, spec.environment))
        await _done_or_killed(making, worker)
        if making.cancelled() or not making.done():
            raise ProcessNotStartedError("it was ended before its workdir was ready")
        return making.result()

    async def _fork(self, spec: ProcessSpec, workdir: str, worker: _Worker, status_write: int) -> bool:
        """Whether the worker was started from a warmed process, which is warmed first when it is the job's first."""
        recipe = Recipe.of(spec.command, workdir, spec.environment)
        if self._warm is None or recipe is None:
            return False
        warm = self._warm.get(spec.key.job_id, recipe, spec.log.parents[1] / "warm.log")
        if warm is None:
            return False
        warm.workers.add(spec.key)
        await _done_or_killed(asyncio.create_task(warm.wait_ready()), worker)
        if not warm.is_ready:
            self._warm.release(spec.key)
            return False
        log = await open_log(spec.log, self._user)
        fds = [worker.life_read, status_write, log, worker.stacks.theirs, *_rendezvous_fd(spec)]
        try:
            is_forked = await warm.fork({**spec.environment, **spec.contract}, fds)
        finally:
            os.close(log)
        if not is_forked:
            self._warm.release(spec.key)
        return is_forked


async def _done_or_killed(work: asyncio.Task[Any], worker: _Worker) -> None:
    """Wait for the work, but no longer once the worker is killed: then the work is cancelled."""
    killed = asyncio.create_task(worker.killed.wait())
    try:
        await asyncio.wait([work, killed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        killed.cancel()
        if not work.done():
            work.cancel()


async def _follow(status_fd: int, worker: _Worker) -> int | None:
    """What a guard writes, until it ends: the exit code, None when it did not come to that. Closes the descriptor."""
    os.set_blocking(status_fd, False)
    with os.fdopen(status_fd, "rb", buffering=0) as pipe:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            worker.group = int(await reader.readline() or 0)
            exit_code = await reader.readline()
            await reader.read()
        finally:
            transport.close()
    return int(exit_code) if exit_code else None


def _rendezvous_fd(spec: ProcessSpec) -> list[int]:
    return [] if spec.rendezvous is None else [spec.rendezvous.fileno()]


def _kill_group(group: int) -> None:
    if group:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
