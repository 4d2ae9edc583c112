"""Starts the demo's processes, and ends them together with all their descendants.

Managers, agents and workers live in sessions and process groups of their own, so that one can be killed without the
others. They are found by a mark in their environment, which every child inherits.
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
"""Not VARUNA_...: agents remove those variables before they start workers."""
_DEMO_FILE = ".varuna-demo"
"""The file that marks a folder as made by a demo, which the next demo may empty."""


class DemoProcesses:
    """Starts processes with the demo's mark, and in any case ends all that carry it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(ValueError):  # only the main thread may set handlers
                self._handlers[number] = signal.signal(number, _handle_signal)
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
        """Start a Python program of Varuna in its own session, with its output in `log`."""
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

    def list_marked(self) -> list[psutil.Process]:
        """Every living process with the mark, and its descendants: agents start warm workers without the mark."""
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
        return [
            process for pid, process in living.items() if any(each in ours for each in _iterate_ancestors(pid, parents))
        ]

    def end_all(self, *, grace_s: float = 5.0, deadline_s: float = 10.0) -> None:
        """Terminate the started processes, then kill what is left. Raises VarunaError when a process survives."""
        for process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
        give_up = time.monotonic() + grace_s
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up - time.monotonic()))
        give_up, is_last = time.monotonic() + deadline_s, False
        # In a loop: a process may start another one after it was listed and before it is killed.
        while left := self.list_marked():
            if is_last:
                raise VarunaError(f"these processes of the demo would not end: {[process.pid for process in left]}")
            for survivor in left:
                with suppress(psutil.NoSuchProcess):
                    survivor.kill()
            # A machine that stood still has used the time up: after this SIGKILL they have it once more.
            is_last = time.monotonic() > give_up
            psutil.wait_procs(left, timeout=deadline_s if is_last else 1.0)
        for process in self._started:
            process.wait()


def _iterate_ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """The process, its parent, and so on."""
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        yield pid
        seen.add(pid)
        pid = parents[pid]


def fresh_folder(folder: Path) -> None:
    """An empty folder for this run. Only what an earlier demo made is removed; anything else raises UserError."""
    if folder.exists():
        if not (folder / _DEMO_FILE).exists() and any(folder.iterdir()):
            raise UserError(f"{folder} holds files that are not a demo's: pass an empty folder with --dir")
        pid = _living_demo(folder)
        if pid is not None:
            raise UserError(
                f"a demo (pid {pid}) is running in {folder}: wait for it, or pass another folder with --dir"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _DEMO_FILE).write_text(str(os.getpid()))


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group of a VM's agent: the VM vanishes without notice."""
    with suppress(ProcessLookupError):
        os.killpg(os.getpgid(pid), signal.SIGKILL)


def _living_demo(folder: Path) -> int | None:
    """The demo that runs in the folder now, if any."""
    try:
        pid = int((folder / _DEMO_FILE).read_text())
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return None
    return pid if pid != os.getpid() and "demo" in command else None


def _handle_signal(number: int, frame: FrameType | None) -> NoReturn:
    """End the demo in order at a signal, as Ctrl-C does."""
    raise SystemExit(128 + number)
