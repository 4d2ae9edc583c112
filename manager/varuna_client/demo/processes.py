"""The processes that the demo starts, and how all of them end: also those that they started in turn.

Managers, agents and workers live in sessions and process groups of their own, so that one can be killed without the
others; what they share is a mark in their environment, which every child inherits. By that mark they are found.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

import psutil

from varuna_client.errors import UserError, VarunaError

MARK = "X_VARUNA_DEMO"
"""Not VARUNA_...: agents start workers without the variables that are Varuna's own."""
_OURS = ".varuna-demo"
"""A file that says that a folder was made by a demo, and may be emptied by the next."""


class DemoProcesses:
    """Starts processes with the demo's mark and ends everything that carries it, whatever happens in between."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(ValueError):  # not in the main thread: the signals are someone else's then
                self._handlers[number] = signal.signal(number, _leave)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.end_all()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def start(
        self, arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A Python program of ours in a session of its own, its output in `log`."""
        programs = str(Path(sys.executable).parent)
        path = programs + os.pathsep + os.environ.get("PATH", os.defpath)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), "PATH": path, MARK: self.mark},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def marked(self) -> list[psutil.Process]:
        """Every living process with our mark, and what these have started: agents warm workers up without the mark."""
        living: dict[int, psutil.Process] = {}
        parents: dict[int, int] = {}
        ours: set[int] = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                living[process.pid], parents[process.pid] = process, process.ppid()
                if process.environ().get(MARK) == self.mark:
                    ours.add(process.pid)
        return [process for pid, process in living.items() if any(each in ours for each in _line(pid, parents))]

    def end_all(self, *, grace_s: float = 5.0, deadline_s: float = 10.0) -> None:
        """Ask the started ones to end, then kill what is left. Raises VarunaError when something survives."""
        for process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
        give_up = time.monotonic() + grace_s
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up - time.monotonic()))
        give_up = time.monotonic() + deadline_s
        # Again and again: a process may start another between our looking and our killing.
        while left := self.marked():
            if time.monotonic() > give_up:
                raise VarunaError(f"these processes of the demo would not end: {[process.pid for process in left]}")
            for survivor in left:
                with suppress(psutil.NoSuchProcess):
                    survivor.kill()
            psutil.wait_procs(left, timeout=1.0)
        for process in self._started:
            process.wait()


def _line(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """A process, its parent, and so on."""
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        yield pid
        seen.add(pid)
        pid = parents[pid]


def fresh_folder(folder: Path) -> None:
    """An empty folder for this run. Only what an earlier demo made is removed; anything else raises UserError."""
    if folder.exists():
        if not (folder / _OURS).exists() and any(folder.iterdir()):
            raise UserError(f"{folder} holds files that are not a demo's: pass an empty folder with --dir")
        pid = _living_demo(folder)
        if pid is not None:
            raise UserError(
                f"a demo (pid {pid}) is running in {folder}: wait for it, or pass another folder with --dir"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _OURS).write_text(str(os.getpid()))


def kill_group(pid: int) -> None:
    """SIGKILL to the whole process group of a VM's agent: the VM is gone without a word."""
    with suppress(ProcessLookupError):
        os.killpg(os.getpgid(pid), signal.SIGKILL)


def _living_demo(folder: Path) -> int | None:
    """The demo that runs in a folder now, if any."""
    try:
        pid = int((folder / _OURS).read_text())
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return None
    return pid if pid != os.getpid() and "demo" in command else None


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """A signal ends the demo in order, as Ctrl-C does."""
    raise SystemExit(128 + number)
