"""Worker processes: each under a guard of its own (see `guard.py`), from a warmed process where that is possible."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog

from varuna_agent import logs
from varuna_agent.groups import JobGroups
from varuna_agent.isolation import JobUser
from varuna_agent.spawn import Confinement, ProcessNotStartedError, open_log, spawn
from varuna_agent.stacks import NoStacksError, StackPipe
from varuna_agent.state import NO_LIMITS, JobLimits, Workdir, WorkerKey
from varuna_agent.warm import Recipe, WarmPool
from varuna_agent.workdirs import WorkdirError, Workdirs

__all__ = ["ProcessEnd", "ProcessNotStartedError", "ProcessSpec", "WorkerProcesses"]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_GUARD_PATIENCE_S = 15.0
"""For a guard to end its worker; it gives up by itself after ten seconds."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    key: WorkerKey
    command: str
    """Run by /bin/sh -c."""
    workdir: Workdir
    environment: Mapping[str, str] = field(repr=False)
    """What all workers of the job on this VM have in common."""
    contract: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What this worker has on top of it: its own settings, and the job's secrets, of which no warmed process knows."""
    log: Path
    limits: JobLimits = NO_LIMITS
    """Of all the job's processes on this VM."""
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
        groups: the jobs' control groups; None: this VM has none.
    """

    def __init__(
        self,
        on_end: Callable[[WorkerKey, ProcessEnd | ProcessNotStartedError], Awaitable[None]],
        workdirs: Workdirs,
        keep_warm_s: float = 120.0,
        user: JobUser | None = None,
        on_preparing: Callable[[frozenset[str], frozenset[str]], None] = lambda job_ids, warm: None,
        on_prepared: Callable[[str, WorkdirError | None], None] = lambda job_id, error: None,
        groups: JobGroups | None = None,
    ) -> None:
        self._on_end = on_end
        self._user = user
        self._groups = groups
        self._workers: dict[WorkerKey, _Worker] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._workdirs = workdirs
        self._on_prepared = on_prepared
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._warm = WarmPool(keep_warm_s, on_preparing) if keep_warm_s > 0 else None

    def start(self, spec: ProcessSpec) -> None:
        """Returns at once; also when it cannot be started, its end is told later. Raises OSError when the agent itself
        has no descriptor left: then there is no end to tell."""
        self._workers[spec.key] = worker = _Worker()
        self._tasks[spec.key] = asyncio.create_task(self._run(spec, worker), name=f"worker {spec.key}")

    def prepare(
        self,
        job_id: str,
        command: str,
        workdir: Workdir,
        environment: Mapping[str, str],
        log: Path,
        limits: JobLimits = NO_LIMITS,
    ) -> None:
        """Make the folder of such workers ready, then have a process at hand from which they start at once, where that
        is possible. Returns at once."""
        if not workdir.needs_work:
            self._warm_up(job_id, command, workdir.path, environment, log, limits)
        elif job_id not in self._preparing:
            work = self._prepare(job_id, command, workdir, environment, log, limits)
            task = self._preparing[job_id] = asyncio.create_task(work, name=f"prepares for {job_id}")
            task.add_done_callback(lambda done: self._prepare_ended(job_id, done))

    def cancel_prepare(self, job_id: str) -> None:
        """End the making of the job's folder, unless others wait for the same one; it is told as not made ready."""
        task = self._preparing.get(job_id)
        if task is not None:
            task.cancel()

    def keep_folders(self, job_ids: Collection[str]) -> None:
        """The folders of other jobs may go when there are many; but for those in which workers run."""
        self._workdirs.keep_only({*job_ids, *self.job_ids})

    async def _prepare(
        self,
        job_id: str,
        command: str,
        workdir: Workdir,
        environment: Mapping[str, str],
        log: Path,
        limits: JobLimits,
    ) -> None:
        path = await self._workdirs.ready(workdir, environment, self._confinement(job_id, limits), job_id=job_id)
        self._warm_up(job_id, command, path, environment, log, limits)

    def _prepare_ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        del self._preparing[job_id]
        error: BaseException | None = (
            WorkdirError("it is not wanted any more") if task.cancelled() else task.exception()
        )
        if error is not None and not isinstance(error, WorkdirError):
            error = WorkdirError(str(error) or repr(error))  # whatever it is, the next job's turn comes
        self._on_prepared(job_id, error)

    def _warm_up(
        self, job_id: str, command: str, path: str, environment: Mapping[str, str], log: Path, limits: JobLimits
    ) -> None:
        recipe = Recipe.of(command, path, environment, self._confinement(job_id, limits))
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
        with suppress(ProcessLookupError, OverflowError):  # it may have said anything
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

    def _confinement(self, job_id: str, limits: JobLimits) -> Confinement:
        """A group that cannot be made is no reason not to train."""
        if self._groups is None:
            return Confinement(user=self._user)
        try:
            self._groups.remove_unused({*self.job_ids, *self._preparing, *self._warm_job_ids, job_id})
            return Confinement(user=self._user, group=self._groups.make(job_id, limits))
        except OSError as error:
            _log.warning("the job's processes run without a control group", job=job_id, error=str(error))
            return Confinement(user=self._user)

    @property
    def _warm_job_ids(self) -> frozenset[str]:
        return frozenset() if self._warm is None else self._warm.all_job_ids

    # ------------------------------------------------------------ one worker

    async def _run(self, spec: ProcessSpec, worker: _Worker) -> None:
        end: ProcessEnd | ProcessNotStartedError
        try:
            end = await self._end_of(spec, worker)
        except ProcessNotStartedError as error:
            end = error
        except OSError as error:  # no descriptor or memory left, say: one worker's end, and not the agent's
            end = ProcessNotStartedError(f"cannot start the worker: {error}")
        finally:
            worker.kill()
            del self._workers[spec.key]
            worker.stacks.close()
            if self._warm is not None:
                self._warm.release(spec.key)
        await self._on_end(spec.key, end)
        del self._tasks[spec.key]

    async def _end_of(self, spec: ProcessSpec, worker: _Worker) -> ProcessEnd:
        """From its start to its end. Raises ProcessNotStartedError, OSError."""
        confinement = self._confinement(spec.key.job_id, spec.limits)
        kills_before = self._memory_kills(spec)
        exit_code = await self._run_guard(spec, worker, confinement)
        if exit_code == 0:
            return ProcessEnd(exit_code, "")
        tail = await asyncio.to_thread(logs.tail, spec.log)
        if spec.limits.memory_bytes and self._memory_kills(spec) > kills_before:
            tail += (
                f"\nThe kernel killed a process of the job: together they reached its memory limit of "
                f"{spec.limits.memory_bytes / 1024**3:.1f} GiB on this VM (vm_limits in the job file)."
            )
        return ProcessEnd(exit_code, tail)

    def _memory_kills(self, spec: ProcessSpec) -> int:
        return 0 if self._groups is None else self._groups.memory_kills(spec.key.job_id)

    async def _run_guard(self, spec: ProcessSpec, worker: _Worker, confinement: Confinement) -> int:
        """The worker's exit code. Raises ProcessNotStartedError, OSError."""
        guard: asyncio.subprocess.Process | None = None
        status_read = status_write = -1
        try:
            status_read, status_write = os.pipe()
            workdir = await self._ready_workdir(spec, worker, confinement)
            if not await self._fork(spec, workdir, worker, status_write, confinement):
                guard = await spawn(
                    ["/bin/sh", "-c", spec.command],
                    workdir=workdir,
                    environment={**spec.environment, **spec.contract, **worker.stacks.variable},
                    log=spec.log,
                    life_read=worker.life_read,
                    status_write=status_write,
                    inherited=[worker.stacks.theirs, *_rendezvous_fd(spec)],
                    confinement=confinement,
                )
        except BaseException:
            _close(status_read)
            raise
        finally:
            os.close(worker.life_read)
            _close(status_write)
            worker.stacks.started()
            if spec.rendezvous is not None:
                spec.rendezvous.close()
        insisting = asyncio.create_task(self._insist(spec.key, worker, guard))
        try:
            exit_code = await _follow(status_read, worker)
            if guard is not None:
                await guard.wait()
        finally:
            insisting.cancel()
        if exit_code is None:  # it was the guard that was killed
            await asyncio.to_thread(_kill_group, worker.group, self._user)
            return -signal.SIGKILL
        return exit_code

    async def _insist(self, key: WorkerKey, worker: _Worker, guard: asyncio.subprocess.Process | None) -> None:
        """End what its guard does not end. A guard that is the job's user's can be stopped by the job."""
        await worker.killed.wait()
        await asyncio.sleep(_GUARD_PATIENCE_S)
        _log.warning("a worker's guard does not end it: the agent does", **key.fields())
        if guard is not None:
            with suppress(ProcessLookupError):
                guard.kill()
        elif self._warm is not None:
            self._warm.end_process_of(key)
        await asyncio.to_thread(_kill_group, worker.group, self._user)

    async def _ready_workdir(self, spec: ProcessSpec, worker: _Worker, confinement: Confinement) -> str:
        """A worker that is killed waits no longer. Raises ProcessNotStartedError."""
        if not spec.workdir.needs_work:
            return spec.workdir.path
        wanting = self._workdirs.ready(spec.workdir, spec.environment, confinement, job_id=spec.key.job_id)
        making = asyncio.create_task(wanting)
        await _done_or_killed(making, worker)
        if making.cancelled() or not making.done():
            raise ProcessNotStartedError("it was ended before its workdir was ready")
        return making.result()

    async def _fork(
        self, spec: ProcessSpec, workdir: str, worker: _Worker, status_write: int, confinement: Confinement
    ) -> bool:
        """Whether the worker was started from a warmed process, which is warmed first when it is the job's first."""
        recipe = Recipe.of(spec.command, workdir, spec.environment, confinement)
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
    """What a guard writes, until it ends: the exit code, None when it did not come to that. Closes the descriptor.

    The guard of a worker from a warmed process is the job's user's, as is what can be written in its place.
    """
    os.set_blocking(status_fd, False)
    with os.fdopen(status_fd, "rb", buffering=0) as pipe:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            worker.group = _number(await reader.readline()) or 0
            exit_code = _number(await reader.readline())
            while await reader.read(65536):
                continue
        except ValueError as error:  # a line that does not end
            _log.warning("a worker's guard does not speak as ours do", error=str(error))
            worker.kill()
            exit_code = None
        finally:
            transport.close()
    return exit_code


def _number(line: bytes) -> int | None:
    """None for a line that is no number of a process and no exit code."""
    text = line.strip()
    is_number = text.removeprefix(b"-").isdigit() and len(text) <= 10
    return int(text) if is_number else None


def _rendezvous_fd(spec: ProcessSpec) -> list[int]:
    return [] if spec.rendezvous is None else [spec.rendezvous.fileno()]


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _kill_group(group: int, user: JobUser | None) -> None:
    """SIGKILL to the group's processes. `user`: to those of this user alone, since the group's number is its word."""
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
