"""Why and how a worker leaves its generation.

A worker never sits in a call that cannot be left: whatever waits, waits on `Departure.condition` and looks at
`Departure` each time it is woken. The two ways out are `SystemExit`s, so that a script's `except Exception` does not
swallow them and `finally` blocks still run; a watchdog ends the process when they take longer than a grace period.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import structlog

from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST

__all__ = ["Departure", "GenerationEnded", "PeerLost", "RanksDifferError", "end_process"]

_log = structlog.get_logger("varuna")

LEAVE_GRACE_S = 0.5
"""What a script's `finally` blocks have before the process is ended under them."""

_RECHECK_S = 1.0
"""Every wait looks again after this long, so that a lost wake-up would cost time and not the job."""


class GenerationEnded(SystemExit):
    """This worker was told to leave: its generation is over. The process exits with code 75."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_GENERATION_ENDED)
        self.reason = reason


class PeerLost(SystemExit):
    """Another rank of the generation is gone, so no further step can be finished. The process exits with code 76.

    `unreached`: that rank, when it is there but cannot be reached from here.
    """

    def __init__(self, reason: str, unreached: int | None = None) -> None:
        super().__init__(EXIT_PEER_LOST)
        self.reason = reason
        self.unreached = unreached


class RanksDifferError(RuntimeError):
    """The script does one thing on this rank and another on another rank, so they would wait for each other."""


def end_process(code: int) -> None:
    """Ends this process at once. Interpreter shutdown would wait for threads that sit inside gloo."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the log's reader is gone or the script closed the stream: there is nobody to tell
    os._exit(code)


class Departure:
    """Whether this worker must leave; set by any thread, watched by everything that waits.

    `condition` is the one condition variable of the worker: arriving data, finished sends and collectives notify it
    too, so a wait ends as soon as what it waits for, or a reason to leave, is there.
    """

    def __init__(self, end: Callable[[int], None] = end_process, grace_s: float = LEAVE_GRACE_S) -> None:
        self.condition = threading.Condition()
        self._end = end
        self._grace_s = grace_s
        self._exit: GenerationEnded | PeerLost | None = None
        self._failure: BaseException | None = None
        self._save_first = False
        self._end_code: int | None = None
        self._on_unreached: Callable[[int, str], None] = lambda rank, reason: None

    @property
    def exit_code(self) -> int | None:
        """The code with which this worker leaves; None while it stays."""
        return None if self._exit is None else int(str(self._exit.code))

    @property
    def end_code(self) -> int | None:
        """The code with which this process ends when the script is through; None: the script's own."""
        return self._end_code if self.exit_code is None else self.exit_code

    def end_with(self, code: int) -> None:
        """Makes the process end with `code` when the script is through: something that it asked for has failed."""
        self._end_code = code

    @property
    def save_first(self) -> bool:
        """Whether this worker was asked to leave after a save at the end of the step."""
        return self._save_first

    def ask_save_first(self) -> None:
        """Notes that the generation shall save at the end of the step and leave."""
        with self.condition:
            self._save_first = True
            self.condition.notify_all()

    def report_unreached_to(self, report: Callable[[int, str], None]) -> None:
        """Who is told of a rank that cannot be reached, before this worker leaves because of it."""
        self._on_unreached = report

    def leave(self, exit_: GenerationEnded | PeerLost) -> None:
        """Makes every wait raise `exit_` and ends the process after the grace period. The first reason stands."""
        with self.condition:
            if self._exit is not None:
                return
            if isinstance(self._failure, RanksDifferError) and isinstance(exit_, PeerLost):
                return  # the peer is lost because of it, and this is what the script's author must read
            self._exit = exit_
            self.condition.notify_all()
        _log.warning("leaving the generation", reason=exit_.reason, exit_code=exit_.code)
        if isinstance(exit_, PeerLost) and exit_.unreached is not None:
            self._on_unreached(exit_.unreached, exit_.reason)
        watchdog = threading.Timer(self._grace_s, self._end, args=(int(str(exit_.code)),))
        watchdog.daemon = True
        watchdog.start()

    def fail(self, error: BaseException) -> None:
        """Makes every wait raise RuntimeError from `error`, for a thread of the runtime itself broke; or that itself,
        when it says that ranks differ."""
        with self.condition:
            self._failure = self._failure or error
            self.condition.notify_all()

    def check(self) -> None:
        """Raises what makes this worker leave, if anything does."""
        if self._exit is not None:
            raise type(self._exit)(self._exit.reason)
        if isinstance(self._failure, RanksDifferError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError(f"a thread of the Varuna runtime failed: {self._failure!r}") from self._failure

    def wait_until(self, ready: Callable[[], bool], recheck_s: Callable[[], float] | None = None) -> None:
        """Waits until `ready()`, which is called under `condition`. Raises as `check` does.

        `recheck_s`: for an answer that may change with time alone, in how many seconds to look again at the latest.
        """
        with self.condition:
            self.check()
            while not ready():
                self.condition.wait(_RECHECK_S if recheck_s is None else min(_RECHECK_S, recheck_s()))
                self.check()
