"""Worker processes: each under a guard of its own (see `guard.py`), from a warmed process where there is one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from varuna_agent import logs
from varuna_agent.state import WorkerKey
from varuna_agent.warm import Recipe, WarmProcess, read_end

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    key: WorkerKey
    command: str
    """Run by /bin/sh -c."""
    workdir: str
    environment: Mapping[str, str]
    """What all workers of the job on this VM have in common."""
    contract: Mapping[str, str] = field(default_factory=dict)
    """What this worker has for itself, on top of it."""
    log: Path
    may_warm: bool = True
    """Whether a process may be warmed beside it: not while it measures what the machine can do."""
    rendezvous: socket.socket | None = None
    """Inherited by the worker (VARUNA_RENDEZVOUS_FD says where); closed here once it has started."""

    @property
    def recipe(self) -> Recipe | None:
        """How to warm a process for workers like this one; None: it cannot be done."""
        return Recipe.of(self.command, self.workdir, self.environment)


@dataclass(frozen=True)
class ProcessEnd:
    exit_code: int
    """Negative: the signal."""
    log_tail: str


class ProcessNotStartedError(Exception):
    """The worker could not be started; says why."""


class WorkerProcesses:
    """Starts and kills workers, and tells the end of each exactly once.

    Args:
        on_end: awaited with the key and how it ended, when nothing of the worker's group runs any more.
        keep_warm_s: how long a warmed process is kept for a job that has no worker here; 0: there are none.
    """

    def __init__(
        self,
        on_end: Callable[[WorkerKey, ProcessEnd | ProcessNotStartedError], Awaitable[None]],
        keep_warm_s: float = 120.0,
    ) -> None:
        self._on_end = on_end
        self._keep_warm_s = keep_warm_s
        self._keeps_warm = keep_warm_s > 0
        self._life: dict[WorkerKey, int] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._specs: dict[WorkerKey, ProcessSpec] = {}
        self._warm: WarmProcess | None = None
        self._warming: asyncio.Task[None] | None = None
        self._cooling: asyncio.TimerHandle | None = None

    def start(self, spec: ProcessSpec) -> None:
        """Returns at once; also when it cannot be started, its end is told later."""
        self._keep_warm()
        self._specs[spec.key] = spec
        life_read, self._life[spec.key] = os.pipe()
        self._tasks[spec.key] = asyncio.create_task(self._run(spec, life_read), name=f"worker {spec.key}")

    @property
    def job_ids(self) -> set[str]:
        """The jobs that have workers here."""
        return {key.job_id for key in self._specs}

    def kill(self, key: WorkerKey) -> None:
        """SIGKILL everything that belongs to the worker, by letting go of its guard's pipe. Idempotent."""
        life_write = self._life.pop(key, None)
        if life_write is not None:
            os.close(life_write)

    async def close(self) -> None:
        """Kill all that still runs and wait until it is gone."""
        for key in tuple(self._life):
            self.kill(key)
        await asyncio.gather(*self._tasks.values())
        await self._cool()

    # ------------------------------------------------------------ warmed processes

    def warm_up(self, key: WorkerKey) -> None:
        """Have a process at hand from which the next workers like this one start. Idempotent; returns at once."""
        spec = self._specs.get(key)
        recipe = None if spec is None else spec.recipe
        if spec is None or recipe is None or not spec.may_warm or not self._keeps_warm:
            return
        warm = self._warm
        if warm is not None and (warm.workers or (warm.recipe == recipe and not warm.is_over)):
            return  # there is one, or another whose workers would end with it
        old, self._warm = (self._warm, self._warming), WarmProcess(recipe)
        log = spec.log.parents[1] / "warm.log"
        self._warming = asyncio.create_task(self._run_warm(self._warm, log, old), name="warmed process")

    @property
    def is_warm(self) -> bool:
        """Whether there is a warmed process to start workers from."""
        return self._warm is not None and self._warm.is_ready

    async def _run_warm(
        self, warm: WarmProcess, log: Path, old: tuple[WarmProcess | None, asyncio.Task[None] | None]
    ) -> None:
        """From its start to its end; after that of the one before it."""
        await _cooled(*old)
        status_read, status_write = os.pipe()
        try:
            try:
                guard = await _spawn(
                    warm.recipe.command(warm.theirs.fileno()),
                    workdir=warm.recipe.workdir,
                    environment=warm.recipe.environment,
                    log=log,
                    life_read=warm.life_read,
                    status_write=status_write,
                    inherited=[warm.theirs.fileno()],
                )
            finally:
                os.close(warm.life_read)
                os.close(status_write)
                warm.theirs.close()
            if await warm.wait_ready():
                _log.info("the next workers start from a warmed process", pid=guard.pid)
            await guard.wait()
        except ProcessNotStartedError as error:
            _log.warning("no warmed process", reason=str(error))
        finally:
            warm.release()
            os.close(status_read)

    def _keep_warm(self) -> None:
        if self._cooling is not None:
            self._cooling.cancel()
            self._cooling = None

    def _cool_later(self) -> None:
        """When no worker runs: the job may be over, and memory is not to be held for ever."""
        self._keep_warm()
        if self._warm is not None and not self._tasks:
            warm = self._warm
            self._cooling = asyncio.get_running_loop().call_later(self._keep_warm_s, warm.close)

    async def _cool(self) -> None:
        self._keep_warm()
        await _cooled(self._warm, self._warming)
        self._warm = self._warming = None

    # ------------------------------------------------------------ one worker

    async def _run(self, spec: ProcessSpec, life_read: int) -> None:
        end: ProcessEnd | ProcessNotStartedError
        try:
            exit_code = await self._run_guard(spec, life_read)
            quiet = exit_code == 0
            end = ProcessEnd(exit_code, "" if quiet else await asyncio.to_thread(logs.tail, spec.log))
        except ProcessNotStartedError as error:
            end = error
        finally:
            self.kill(spec.key)
        await self._on_end(spec.key, end)
        del self._tasks[spec.key], self._specs[spec.key]
        if self._warm is not None:
            self._warm.workers.discard(spec.key)
        self._cool_later()

    async def _run_guard(self, spec: ProcessSpec, life_read: int) -> int:
        """The worker's exit code. Raises ProcessNotStartedError."""
        status_read, status_write = os.pipe()
        guard: asyncio.subprocess.Process | None = None
        try:
            if not await self._fork(spec, life_read, status_write):
                guard = await _spawn(
                    ["/bin/sh", "-c", spec.command],
                    workdir=spec.workdir,
                    environment={**spec.environment, **spec.contract},
                    log=spec.log,
                    life_read=life_read,
                    status_write=status_write,
                    inherited=[] if spec.rendezvous is None else [spec.rendezvous.fileno()],
                )
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(life_read)
            os.close(status_write)
            if spec.rendezvous is not None:
                spec.rendezvous.close()
        group, *exit_codes = (await read_end(status_read)).split()[:2] or [b""]
        if guard is not None:
            await guard.wait()
        if not exit_codes:  # it was the guard that was killed
            _kill_group(group)
            return -signal.SIGKILL
        return int(exit_codes[0])

    async def _fork(self, spec: ProcessSpec, life_read: int, status_write: int) -> bool:
        """Whether the worker was started from the warmed process."""
        warm = self._warm
        if warm is None or not warm.is_ready or warm.recipe != spec.recipe:
            return False
        log = await _open_log(spec.log)
        fds = [life_read, status_write, log, *([] if spec.rendezvous is None else [spec.rendezvous.fileno()])]
        warm.workers.add(spec.key)
        try:
            is_forked = await warm.fork({**spec.environment, **spec.contract}, fds)
        finally:
            os.close(log)
        if not is_forked:
            warm.workers.discard(spec.key)
        return is_forked


async def _spawn(
    command: Sequence[str],
    *,
    workdir: str,
    environment: Mapping[str, str],
    log: Path,
    life_read: int,
    status_write: int,
    inherited: Sequence[int],
) -> asyncio.subprocess.Process:
    """A guard with its command. Raises ProcessNotStartedError."""
    if not Path(workdir).is_dir():
        raise ProcessNotStartedError(f"workdir {workdir!r} is not a folder on this VM")
    log_fd = await _open_log(log)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *["-I", "-S", str(_GUARD), str(life_read), str(status_write), *command],
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


async def _open_log(path: Path) -> int:
    try:
        return await asyncio.to_thread(logs.open_log, path)
    except OSError as error:
        raise ProcessNotStartedError(f"cannot open the log {path}: {error}") from error


async def _cooled(warm: WarmProcess | None, warming: asyncio.Task[None] | None) -> None:
    """Lets the warmed process end, and waits for that."""
    if warm is not None:
        warm.close()
    if warming is not None:
        await warming


def _kill_group(group: bytes) -> None:
    if group:
        with suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


def worker_environ(base: Mapping[str, str], extra: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """What workers of a job have in common: the agent's environment without Varuna's settings, then the job's own."""
    environ = {name: value for name, value in base.items() if not name.startswith("VARUNA_")}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    environ["PYTHONUNBUFFERED"] = "1"  # a log that is read while the worker runs, and after it was killed
    if on_cpu:
        environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    return {**environ, **extra}
