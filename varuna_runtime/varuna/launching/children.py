"""Processes that live and end together: the first failure ends all of them, and so does a signal."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from varuna_proto.environment import EXIT_PEER_LOST

__all__ = [
    "ChildExit",
    "ChildProcesses",
    "PortAnnouncement",
    "StopRequest",
    "make_parent_death_hook",
    "shell_exit_code",
]

_BLAME_S = 2.0
"""A rank that fails may be seen to end this much later than the ranks that fail because of it."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildExit:
    """A child has ended."""

    name: str
    code: int


@dataclass(frozen=True)
class StopRequest:
    """All children must end, and this process with the exit code `code`."""

    code: int
    reason: str


@dataclass(frozen=True)
class PortAnnouncement:
    """The launcher of machine 0 has announced the port at which the ranks meet."""

    port: int


ChildEvent = ChildExit | StopRequest | PortAnnouncement


class ChildProcesses:
    """Child processes, each the leader of a process group of its own.

    Any thread may put events into `events`. Start all children before the first thread of this process, because some
    have a hook that runs between fork and exec.
    """

    def __init__(self, *, grace_s: float, request_end: Callable[[subprocess.Popen[bytes]], None] | None = None) -> None:
        """`request_end` asks a child to end (default: SIGTERM to its group); after `grace_s` it is killed."""
        self.events: queue.SimpleQueue[ChildEvent] = queue.SimpleQueue()
        self._grace_s = grace_s
        self._request_end = request_end or (lambda process: _signal_group(process, signal.SIGTERM))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._watched = False
        self._signals: int | None = None

    def start_child(self, name: str, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Raises OSError when it cannot be started."""
        process: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **options)  # type: ignore[call-overload]
        self._running[name] = process
        if self._watched:
            self._start_watching(name, process)
        return process

    def watch_exits(self) -> None:
        """From now on the exits of children, also of those started later, are put into `events`."""
        self._watched = True
        for name, process in self._running.items():
            self._start_watching(name, process)
        if self._signals is not None:
            threading.Thread(target=self._await_signals, args=(self._signals,), name="signals", daemon=True).start()

    def stop_on_signals(self) -> None:
        """Turns SIGINT, SIGTERM and SIGHUP into a `StopRequest` with the shell's exit code for them, which comes once
        exits are watched.

        Linux may give a signal to any thread, and Python's handler then waits for the main thread, which may wait in
        `receive_event` for ever. So the handlers do nothing, and a thread reads the numbers that Python writes at once.
        """
        self._signals, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def receive_event(self) -> ChildEvent:
        event = self.events.get()
        if isinstance(event, ChildExit):
            del self._running[event.name]
        return event

    def wait(self) -> ChildExit | StopRequest | None:
        """Waits until all have succeeded (None) or a failure or a stop, which is returned, has ended them all."""
        try:
            while self._running:
                event = self.receive_event()
                if isinstance(event, StopRequest):
                    return event
                if isinstance(event, ChildExit) and event.code != 0:
                    return self._find_culprit(event)
            return None
        finally:
            self.end_all()

    def end_all(self) -> None:
        """Asks all children to end, and kills those that have not after the grace period."""
        for process in self._running.values():
            self._request_end(process)
        self._collect_exits(self._grace_s)
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)
        self._collect_exits(self._grace_s)

    def _collect_exits(self, within_s: float) -> list[ChildExit]:
        """The children that end within that time; returns as soon as none runs."""
        collected = []
        ends_s = time.monotonic() + within_s
        while self._running and (left_s := ends_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                event = self.events.get(timeout=left_s)
                if isinstance(event, ChildExit):
                    del self._running[event.name]
                    collected.append(event)
        return collected

    def _find_culprit(self, first: ChildExit) -> ChildExit:
        """The child to blame: a rank whose peer is lost may be seen to end before that peer."""
        if first.code != EXIT_PEER_LOST:
            return first
        others = self._collect_exits(_BLAME_S)
        return next((ended for ended in others if ended.code not in (0, EXIT_PEER_LOST)), first)

    def _start_watching(self, name: str, process: subprocess.Popen[bytes]) -> None:
        threading.Thread(target=self._await_exit, args=(name, process), name=f"await-{name}", daemon=True).start()

    def _await_signals(self, numbers: int) -> None:
        while True:
            (number,) = os.read(numbers, 1)
            self.events.put(StopRequest(128 + number, signal.Signals(number).name))

    def _await_exit(self, name: str, process: subprocess.Popen[bytes]) -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # Before it is reaped, its number cannot become another group's.
        _signal_group(process, signal.SIGKILL)
        self.events.put(ChildExit(name, shell_exit_code(process.wait())))


def shell_exit_code(code: int) -> int:
    """The exit code as a shell has it: 128 plus the signal's number for a process that a signal ended."""
    return code if code >= 0 else 128 - code


def make_parent_death_hook() -> Callable[[], None] | None:
    """A hook for `preexec_fn`: the child is killed when this process ends, however that happens. Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return hook


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it is gone already
        os.killpg(process.pid, number)
