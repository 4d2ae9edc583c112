"""Worker processes: each under its own guard (see `guard.py`), from a warmed process where that is possible."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from varuna_agent.folders.workdirs import WorkdirError, Workdirs
from varuna_agent.logs import log_files
from varuna_agent.state import NO_LIMITS, ProcessLimits, Workdir, WorkerKey
from varuna_agent.state.hosted_worker import KERNEL_KILL
from varuna_agent.workers.control_groups import JobGroups
from varuna_agent.workers.isolation import JobUser
from varuna_agent.workers.spawn import Confinement, ProcessNotStartedError, open_log, spawn_guarded
from varuna_agent.workers.stacks import NoStacksError
from varuna_agent.workers.warm_pool import WarmPool
from varuna_agent.workers.warm_process import Recipe
from varuna_agent.workers.worker_pipes import (
    WorkerPipes,
    close_descriptor,
    follow_guard,
    kill_group,
    wait_done_or_killed,
)

__all__ = ["PreparationSpec", "ProcessEnd", "ProcessNotStartedError", "ProcessSpec", "WorkerProcesses"]

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_GUARD_PATIENCE_S = 15.0
"""Time for a guard to end its worker; the guard gives up by itself after ten seconds."""


@dataclass(frozen=True, kw_only=True)
class PreparationSpec:
    """A folder to make ready and a process to warm for the workers of a job."""

    job_id: str
    command: str
    workdir: Workdir
    environment: Mapping[str, str] = field(repr=False)
    log: Path
    """The warmed process's log."""
    limits: ProcessLimits = NO_LIMITS


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One worker process to start."""

    key: WorkerKey
    command: str
    """Run by /bin/sh -c."""
    workdir: Workdir
    environment: Mapping[str, str] = field(repr=False)
    """The variables that all workers of the job on this VM share."""
    contract: Mapping[str, str] = field(default_factory=dict, repr=False)
    """This worker's own variables and the job's secrets, which no warmed process gets."""
    log: Path
    limits: ProcessLimits = NO_LIMITS
    """For all the job's processes on this VM together."""


@dataclass
class _RunningWorker:
    """A process, and what it runs as: `reassign_worker` changes key and log."""

    spec: ProcessSpec
    pipes: WorkerPipes


@dataclass(frozen=True)
class ProcessEnd:
    exit_code: int
    """Negative: the signal."""
    log_tail: str


class WorkerProcesses:
    """Starts and kills workers, and reports the end of each exactly once.

    Args:
        on_end: awaited with the key and the end, when no process of the worker's group runs any longer.
        workdirs: makes the folders that workers run in.
        keep_warm_s: time for which a warmed process is kept for a job without workers here; 0: no process is warmed.
        user: the user of the workers; None: the agent's own user.
        on_warm_change: called with the jobs whose workers would have to wait for imports under way, and with the jobs
            whose workers would start at once, when these change.
        on_prepared: called when the preparation of a job's folder ends; the error is None if the folder is ready.
        groups: the jobs' control groups; None: this VM has none.
    """

    def __init__(
        self,
        *,
        on_end: Callable[[WorkerKey, ProcessEnd | ProcessNotStartedError], Awaitable[None]],
        workdirs: Workdirs,
        keep_warm_s: float = 120.0,
        user: JobUser | None = None,
        on_warm_change: Callable[[frozenset[str], frozenset[str]], None] = lambda warming, warm: None,
        on_prepared: Callable[[str, WorkdirError | None], None] = lambda job_id, error: None,
        groups: JobGroups | None = None,
    ) -> None:
        self._on_end = on_end
        self._user = user
        self._groups = groups
        self._running: dict[WorkerKey, _RunningWorker] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._workdirs = workdirs
        self._on_prepared = on_prepared
        self._preparations: dict[str, asyncio.Task[None]] = {}
        self._warm = WarmPool(keep_warm_s, on_warm_change) if keep_warm_s > 0 else None

    def start_worker(self, spec: ProcessSpec) -> None:
        """Returns at once; a failed start is reported as the worker's end.

        Raises OSError when the agent itself has no descriptor left: then no end is reported.
        """
        self._running[spec.key] = running = _RunningWorker(spec, WorkerPipes())
        self._tasks[spec.key] = asyncio.create_task(self._run_worker(running), name=f"worker {spec.key}")

    def reassign_worker(self, key: WorkerKey, successor: WorkerKey, log: Path) -> bool:
        """The process of `key` is the worker `successor` from now on, and writes to `log`; False if it has ended."""
        running = self._running.pop(key, None)
        if running is None:
            return False
        running.spec = replace(running.spec, key=successor, log=log)
        self._running[successor] = running
        self._tasks[successor] = self._tasks.pop(key)
        if self._warm is not None:
            self._warm.rename_worker(key, successor)
        return True

    def prepare_job(self, spec: PreparationSpec) -> None:
        """Make the workers' folder ready, then warm a process from which they start at once. Returns at once."""
        if not spec.workdir.needs_work:
            self._warm_up(spec, spec.workdir.path)
        elif spec.job_id not in self._preparations:
            task = asyncio.create_task(self._prepare_folder(spec), name=f"prepares for {spec.job_id}")
            self._preparations[spec.job_id] = task
            task.add_done_callback(lambda done: self._report_preparation(spec.job_id, done))

    def cancel_preparation(self, job_id: str) -> None:
        """Stop making the job's folder ready, unless other jobs wait for the same one; reported as an error."""
        task = self._preparations.get(job_id)
        if task is not None:
            task.cancel()

    def keep_folders(self, job_ids: Collection[str]) -> None:
        """Keep the folders of these jobs and of those with workers here; others may go when there are many."""
        self._workdirs.keep_only({*job_ids, *self.job_ids})

    async def _prepare_folder(self, spec: PreparationSpec) -> None:
        confinement = self._make_confinement(spec.job_id, spec.limits)
        path = await self._workdirs.make_ready(spec.workdir, spec.environment, confinement, job_id=spec.job_id)
        self._warm_up(spec, path)

    def _report_preparation(self, job_id: str, task: asyncio.Task[None]) -> None:
        del self._preparations[job_id]
        error: BaseException | None = WorkdirError("it is no longer wanted") if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, WorkdirError):
            error = WorkdirError(str(error) or repr(error))  # after any error, the next job has its turn
        self._on_prepared(job_id, error)

    def _warm_up(self, spec: PreparationSpec, path: str) -> None:
        confinement = self._make_confinement(spec.job_id, spec.limits)
        recipe = Recipe.from_command(spec.command, path, spec.environment, confinement)
        if self._warm is not None and recipe is not None:
            self._warm.keep_process(spec.job_id, recipe, spec.log)

    @property
    def job_ids(self) -> set[str]:
        """The jobs that have workers here."""
        return {key.job_id for key in self._tasks}

    @property
    def warm_job_ids(self) -> frozenset[str]:
        """The jobs whose workers would start at once."""
        return frozenset() if self._warm is None else self._warm.job_ids

    def kill_worker(self, key: WorkerKey) -> None:
        """SIGKILL all the worker's processes, by closing its guard's pipe. Idempotent."""
        running = self._running.get(key)
        if running is not None:
            running.pipes.kill_worker()

    async def read_stacks(self, key: WorkerKey, pid: int) -> str:
        """Read where all Python threads of the worker stand. Raises NoStacksError.

        Args:
            pid: as the worker reported it, trusted only within its own group; 0: it has not connected yet.
        """
        running = self._running.get(key)
        if running is None or not running.pipes.group:
            raise NoStacksError(f"worker {key} has no process")
        pipes = running.pipes
        with suppress(ProcessLookupError, OverflowError):  # the worker may have reported any number
            if pid and os.getpgid(pid) == pipes.group:
                return await pipes.stacks.read_stacks(pid)
        return await pipes.stacks.read_stacks(pipes.group)

    async def close(self) -> None:
        """Kill all workers and wait until they are gone."""
        for running in self._running.values():
            running.pipes.kill_worker()
        await self._workdirs.close()
        await asyncio.gather(*self._tasks.values())
        await asyncio.gather(*self._preparations.values(), return_exceptions=True)
        if self._warm is not None:
            await self._warm.close()

    def _make_confinement(self, job_id: str, limits: ProcessLimits) -> Confinement:
        """Without a control group if none can be made: the job trains all the same."""
        if self._groups is None:
            return Confinement(user=self._user)
        try:
            self._groups.remove_unused({*self.job_ids, *self._preparations, *self._kept_job_ids, job_id})
            return Confinement(user=self._user, group=self._groups.make_group(job_id, limits))
        except OSError as error:
            _log.warning("the job's processes run without a control group", job=job_id, error=str(error))
            return Confinement(user=self._user)

    @property
    def _kept_job_ids(self) -> frozenset[str]:
        return frozenset() if self._warm is None else self._warm.all_job_ids

    # ------------------------------------------------------------ one worker

    async def _run_worker(self, running: _RunningWorker) -> None:
        end: ProcessEnd | ProcessNotStartedError
        try:
            end = await self._run_to_end(running)
        except ProcessNotStartedError as error:
            end = error
        except (OSError, RuntimeError) as error:  # no descriptor, memory or thread left: one worker ends, not the agent
            end = ProcessNotStartedError(f"cannot start the worker: {error}")
        finally:
            key = running.spec.key
            running.pipes.kill_worker()
            del self._running[key]
            running.pipes.stacks.close()
            if self._warm is not None:
                self._warm.release_worker(key)
        await self._on_end(key, end)
        del self._tasks[key]

    async def _run_to_end(self, running: _RunningWorker) -> ProcessEnd:
        """Start the worker and wait for its end. Raises ProcessNotStartedError, OSError."""
        spec = running.spec
        confinement = self._make_confinement(spec.key.job_id, spec.limits)
        kills_before = self._count_memory_kills(spec)
        exit_code = await self._run_guard(running, confinement)
        if exit_code == 0:
            return ProcessEnd(exit_code, "")
        try:
            tail = await asyncio.to_thread(log_files.read_tail, running.spec.log)
        except (OSError, RuntimeError) as error:  # no descriptor or thread left: the worker has ended all the same
            tail = f"its log cannot be read: {error}"
        if spec.limits.memory_bytes and self._count_memory_kills(spec) > kills_before:
            tail += (
                f"\n{KERNEL_KILL}: together they reached its memory limit of "
                f"{spec.limits.memory_bytes / 1024**3:.1f} GiB on this VM (vm_limits in the job file)."
            )
        return ProcessEnd(exit_code, tail)

    def _count_memory_kills(self, spec: ProcessSpec) -> int:
        return 0 if self._groups is None else self._groups.count_memory_kills(spec.key.job_id)

    async def _run_guard(self, running: _RunningWorker, confinement: Confinement) -> int:
        """Run the worker under its guard; returns its exit code. Raises ProcessNotStartedError, OSError."""
        spec, pipes = running.spec, running.pipes
        guard: asyncio.subprocess.Process | None = None
        status_read = status_write = -1
        try:
            status_read, status_write = os.pipe()
            workdir = await self._make_workdir_ready(spec, pipes, confinement)
            if not await self._fork_worker(spec, workdir, pipes, status_write=status_write, confinement=confinement):
                close_descriptor(status_read)
                os.close(status_write)
                status_read = status_write = -1
                status_read, status_write = os.pipe()  # a warmed process that does not answer may hold the first
                guard = await spawn_guarded(
                    ["/bin/sh", "-c", spec.command],
                    workdir=workdir,
                    environment={**spec.environment, **spec.contract, **pipes.stacks.environment},
                    log=spec.log,
                    life_read=pipes.life_read,
                    status_write=status_write,
                    inherited=[pipes.stacks.worker_end],
                    confinement=confinement,
                )
        except BaseException:
            close_descriptor(status_read)
            raise
        finally:
            os.close(pipes.life_read)
            close_descriptor(status_write)
            pipes.stacks.close_worker_end()
        insistence = asyncio.create_task(self._insist_on_end(running, guard))
        try:
            exit_code = await follow_guard(status_read, pipes)
            if guard is not None:
                await guard.wait()
        finally:
            insistence.cancel()
        if exit_code is None:  # the guard itself was killed
            await asyncio.to_thread(kill_group, pipes.group, self._user)
            return -signal.SIGKILL
        return exit_code

    async def _insist_on_end(self, running: _RunningWorker, guard: asyncio.subprocess.Process | None) -> None:
        """Kill a worker that its guard does not end. A job can stop a guard that runs as the job's user."""
        await running.pipes.killed.wait()
        await asyncio.sleep(_GUARD_PATIENCE_S)
        key = running.spec.key
        _log.warning("a worker's guard does not end it: the agent does", **key.log_fields)
        if guard is not None:
            with suppress(ProcessLookupError):
                guard.kill()
        elif self._warm is not None:
            self._warm.end_process_of(key)
        await asyncio.to_thread(kill_group, running.pipes.group, self._user)

    async def _make_workdir_ready(self, spec: ProcessSpec, pipes: WorkerPipes, confinement: Confinement) -> str:
        """Make the workdir ready, unless the worker is killed meanwhile. Raises ProcessNotStartedError."""
        if not spec.workdir.needs_work:
            return spec.workdir.path
        work = self._workdirs.make_ready(spec.workdir, spec.environment, confinement, job_id=spec.key.job_id)
        making = asyncio.create_task(work)
        await wait_done_or_killed(making, pipes)
        if making.cancelled() or not making.done():
            raise ProcessNotStartedError("it was ended before its workdir was ready")
        return making.result()

    async def _fork_worker(
        self, spec: ProcessSpec, workdir: str, pipes: WorkerPipes, *, status_write: int, confinement: Confinement
    ) -> bool:
        """Fork the worker from a warmed process, which may have to be warmed first. False: it was not started."""
        recipe = Recipe.from_command(spec.command, workdir, spec.environment, confinement)
        if self._warm is None or recipe is None:
            return False
        warm = self._warm.keep_process(spec.key.job_id, recipe, spec.log.parents[1] / "warm.log")
        if warm is None:
            return False
        warm.workers.add(spec.key)
        await wait_done_or_killed(asyncio.create_task(warm.wait_ready()), pipes)
        if not warm.is_ready:
            self._warm.release_worker(spec.key)
            return False
        log = await open_log(spec.log, self._user)
        fds = [pipes.life_read, status_write, log, pipes.stacks.worker_end]
        try:
            is_forked = await warm.fork_worker({**spec.environment, **spec.contract}, fds)
        finally:
            os.close(log)
        if not is_forked:
            self._warm.release_worker(spec.key)
        return is_forked
