"""Worker processes: each under a guard of its own (see `guard.py`)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from varuna_agent import logs
from varuna_agent.state import WorkerKey

_GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    key: WorkerKey
    command: str
    """Run by /bin/sh -c."""
    workdir: str
    environment: Mapping[str, str]
    log: Path
    rendezvous: socket.socket | None = None
    """Inherited by the worker under the same number; closed here once it has started."""


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
    """

    def __init__(self, on_end: Callable[[WorkerKey, ProcessEnd | ProcessNotStartedError], Awaitable[None]]) -> None:
        self._on_end = on_end
        self._life: dict[WorkerKey, int] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}

    def start(self, spec: ProcessSpec) -> None:
        """Returns at once; also when it cannot be started, its end is told later."""
        life_read, self._life[spec.key] = os.pipe()
        self._tasks[spec.key] = asyncio.create_task(self._run(spec, life_read), name=f"worker {spec.key}")

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
        del self._tasks[spec.key]

    async def _run_guard(self, spec: ProcessSpec, life_read: int) -> int:
        """The worker's exit code. Raises ProcessNotStartedError."""
        status_read, status_write = os.pipe()
        try:
            guard = await self._spawn(spec, life_read, status_write)
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(life_read)
            os.close(status_write)
            if spec.rendezvous is not None:
                spec.rendezvous.close()
        try:
            exit_code = await guard.wait()
            if exit_code < 0:
                _kill_group(os.read(status_read, 32))  # should it have been the guard that was killed
        finally:
            os.close(status_read)
        return exit_code

    async def _spawn(self, spec: ProcessSpec, life_read: int, status_write: int) -> asyncio.subprocess.Process:
        if not Path(spec.workdir).is_dir():
            raise ProcessNotStartedError(f"workdir {spec.workdir!r} is not a folder on this VM")
        passed = [life_read, status_write]
        if spec.rendezvous is not None:
            passed.append(spec.rendezvous.fileno())
        try:
            log = await asyncio.to_thread(logs.open_log, spec.log)
        except OSError as error:
            raise ProcessNotStartedError(f"cannot open the log {spec.log}: {error}") from error
        arguments = ["-I", "-S", str(_GUARD), str(life_read), str(status_write), "/bin/sh", "-c", spec.command]
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                cwd=spec.workdir,
                env=dict(spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=passed,
                start_new_session=True,  # out of reach of signals to the agent's group
            )
        except (OSError, ValueError) as error:
            raise ProcessNotStartedError(f"cannot start the worker: {error}") from error
        finally:
            os.close(log)


def _kill_group(group: bytes) -> None:
    if group:
        with suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


def worker_environ(
    base: Mapping[str, str], extra: Mapping[str, str], contract: Mapping[str, str], *, on_cpu: bool
) -> dict[str, str]:
    """The environment of a worker: the agent's without Varuna's settings, then the job's, then Varuna's for it."""
    environ = {name: value for name, value in base.items() if not name.startswith("VARUNA_")}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    environ["PYTHONUNBUFFERED"] = "1"  # a log that is read while the worker runs, and after it was killed
    if on_cpu:
        environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    return {**environ, **extra, **contract}
