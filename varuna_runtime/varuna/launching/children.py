"""Processes that live and end together: the first to fail ends all, and a signal ends all."""

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

__all__ = ["Children", "Ended", "Said", "Stop", "dies_with_parent", "exit_code"]

_BLAME_S = 2.0
"""How long a process that fails by itself may take longer to end than one that fails because of it."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """A child has ended."""

    name: str
    code: int


@dataclass(frozen=True)
class Stop:
    """All must end, and this process with `code`."""

    code: int
    reason: str


@dataclass(frozen=True)
class Said:
    """A child has told something."""

    text: str


Event = Ended | Stop | Said


class Children:
    """Child processes, each the leader of a process group of its own.

    `events` may be fed by others, from any thread and from signal handlers. Start all children before the first thread
    of this process: some are given a hook that runs between fork and exec.
    """

    def __init__(self, *, grace_s: float, ask: Callable[[subprocess.Popen[bytes]], None] | None = None) -> None:
        """`ask` tells a child to end (default: SIGTERM to its group); after `grace_s` it is killed."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._grace_s = grace_s
        self._ask = ask or (lambda process: _signal_group(process, signal.SIGTERM))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._watched = False

    def start(self, name: str, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Raises OSError when it cannot be started."""
        process: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **options)  # type: ignore[call-overload]
        self._running[name] = process
        if self._watched:
            self._watch(name, process)
        return process

    def watch(self) -> None:
        """From now on children's ends are told in `events`, also of those started later."""
        self._watched = True
        for name, process in self._running.items():
            self._watch(name, process)

    def stop_on_signals(self) -> None:
        """Ctrl-C and the like become a `Stop` with the shell's exit code for them."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, _: self.events.put(Stop(128 + n, signal.Signals(n).name)))

    def next_event(self) -> Event:
        event = self.events.get()
        if isinstance(event, Ended):
            del self._running[event.name]
        return event

    def wait(self) -> Ended | Stop | None:
        """Waits until all have ended well (None), or what ended them all: a failure or a Stop. None runs after that."""
        try:
            while self._running:
                event = self.next_event()
                if isinstance(event, Stop):
                    return event
                if isinstance(event, Ended) and event.code != 0:
                    return self._culprit(event)
            return None
        finally:
            self.end()

    def end(self) -> None:
        """Ends all that run: asks them to, and kills what has not ended after the grace period."""
        for process in self._running.values():
            self._ask(process)
        self._collect(self._grace_s)
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)
        self._collect(self._grace_s)

    def _collect(self, within_s: float) -> list[Ended]:
        """Those that end in that time; returns as soon as nothing runs."""
        collected = []
        ends_s = time.monotonic() + within_s
        while self._running and (left_s := ends_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                event = self.events.get(timeout=left_s)
                if isinstance(event, Ended):
                    del self._running[event.name]
                    collected.append(event)
        return collected

    def _culprit(self, first: Ended) -> Ended:
        """Who is to blame: a rank whose peer is gone may be seen to end before that peer."""
        if first.code != EXIT_PEER_LOST:
            return first
        others = self._collect(_BLAME_S)
        return next((ended for ended in others if ended.code not in (0, EXIT_PEER_LOST)), first)

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        threading.Thread(target=self._await, args=(name, process), name=f"await-{name}", daemon=True).start()

    def _await(self, name: str, process: subprocess.Popen[bytes]) -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # Before it is reaped, its number cannot become another group's.
        _signal_group(process, signal.SIGKILL)
        self.events.put(Ended(name, exit_code(process.wait())))


def exit_code(code: int) -> int:
    """As a shell says it: 128 and the signal's number for a process that a signal ended."""
    return code if code >= 0 else 128 - code


def dies_with_parent() -> Callable[[], None] | None:
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
    with suppress(ProcessLookupError, PermissionError):  # it is gone, which was the aim
        os.killpg(process.pid, number)
