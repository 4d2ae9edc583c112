"""Why and how a worker leaves its generation.

A worker never sits in a call that cannot be left: whatever waits, waits on `Departure.condition` and looks at
`Departure` each time it is woken. The two ways out are `SystemExit`s, so that a script's `except Exception` does not
swallow them and `finally` blocks still run; a watchdog ends the process when they take longer than a grace period.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST

__all__ = ["Departure", "GenerationEnded", "PeerLost", "RanksDifferError", "end_process"]

_log = structlog.get_logger("varuna")

LEAVE_GRACE_S = 0.5
"""How long a script's `finally` blocks may run before the process is ended."""

_RECHECK_S = 1.0
"""Every wait checks again after this long, so that a lost wake-up costs time and not the job."""
_LONG_WAIT_S = 0.5
"""A wait that has lasted this long is reported: shorter ones are part of every step."""


class GenerationEnded(SystemExit):
    """This worker leaves because its generation is over. The process exits with code 75."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_GENERATION_ENDED)
        self.reason = reason


class PeerLost(SystemExit):
    """Another rank of the generation is gone, so no further step can finish. The process exits with code 76.

    `unreached`: that rank, when its machine cannot be reached from here.
    `suspects`: one of these ranks may be gone; empty if all that left announced it; None if it may be any rank.
    """

    def __init__(self, reason: str, unreached: int | None = None, *, suspects: Collection[int] | None = None) -> None:
        super().__init__(EXIT_PEER_LOST)
        self.reason = reason
        self.unreached = unreached
        self.suspects = suspects


class RanksDifferError(RuntimeError):
    """The script makes different calls on two ranks, which would wait for each other for ever."""


def end_process(code: int) -> None:
    """Ends this process at once. Interpreter shutdown would wait for threads that sit inside gloo."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the log's reader is gone or the script closed the stream
    os._exit(code)


@dataclass(frozen=True)
class _Shield:
    """What the ranks of a replica finish before they leave."""

    mates: frozenset[int]
    """The other ranks of the replica."""
    patience_s: float
    is_worth_it: Callable[[], bool]

    def defers(self, exit_: GenerationEnded | PeerLost) -> bool:
        """Whether the replica can still finish, and is to."""
        if isinstance(exit_, PeerLost) and (exit_.suspects is None or not self.mates.isdisjoint(exit_.suspects)):
            return False
        return self.is_worth_it()


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
        self._hold_first = False
        self._goes_on_in_place = False
        self._leaves_within_step = False
        self._is_spare = False
        self._may_stay_after_save = True
        self._end_code: int | None = None
        self._on_unreached: Callable[[int, str], None] = lambda rank, reason: None
        self._on_waiting: Callable[[bool], None] = lambda waits: None
        self._try_to_stay: Callable[[GenerationEnded | PeerLost], bool] | None = None
        self._find_obstacle: Callable[[], str] = str
        self._is_leaving = False
        self._shield: _Shield | None = None
        self._deferred: GenerationEnded | PeerLost | None = None
        self._is_share_done = False
        self._stays = False
        self._breakers: list[Callable[[GenerationEnded | PeerLost], None]] = []
        self._waits = 0
        self._counting_waits = threading.Lock()

    @property
    def exit_code(self) -> int | None:
        """The code with which this worker leaves; None while it stays."""
        return None if self._exit is None else int(str(self._exit.code))

    @property
    def end_code(self) -> int | None:
        """The code with which this process ends when the script is over; None: the script's own."""
        return self._end_code if self.exit_code is None else self.exit_code

    def set_end_code(self, code: int) -> None:
        """Makes the process end with `code` when the script is over, because a save that it requested has failed."""
        self._end_code = code

    @property
    def save_first(self) -> bool:
        """Whether this worker is to leave after a save at the end of the step."""
        return self._save_first

    def request_save_first(self, *, may_stay: bool = True) -> None:
        """Makes the generation save at the end of the step and leave. `may_stay`: the job goes on afterwards."""
        with self.condition:
            self._save_first = True
            self._may_stay_after_save = may_stay
            self.condition.notify_all()

    @property
    def hold_first(self) -> bool:
        """Whether this worker is to leave at the end of the step, with its state in memory."""
        return self._hold_first

    @property
    def leaves_within_step(self) -> bool:
        """Whether this worker is to leave in the middle of a step, with what it has of it, if all ranks can."""
        return self._leaves_within_step

    @property
    def is_spare(self) -> bool:
        """Whether this worker has no part in the next generation, in which others have the state that it has."""
        return self._is_spare

    def request_hold_first(self, *, in_place: bool = False, within_step: bool = False, is_spare: bool = False) -> None:
        """Makes the generation leave at the end of the step, each rank with its state in memory.

        `in_place`: it is to go on in place; where a rank cannot, all save. `within_step`: it is to leave in the middle
        of the step, where all ranks can. `is_spare`: this rank is not to go on.
        """
        with self.condition:
            self._hold_first, self._goes_on_in_place, self._leaves_within_step = True, in_place, within_step
            self._is_spare = is_spare
            self.condition.notify_all()

    @property
    def can_stay(self) -> bool:
        """Whether this process can stay with the state after it has left."""
        return self._try_to_stay is not None

    @property
    def can_hold(self) -> bool:
        """Whether this process can stay with the state in the way that it was asked for."""
        return self.can_stay and not (self._goes_on_in_place and self._find_obstacle())

    @property
    def stays(self) -> bool:
        """Whether this process has left its generation and holds the state for the next one."""
        return self._stays

    def offer_to_stay(
        self, try_to_stay: Callable[[GenerationEnded | PeerLost], bool], find_obstacle: Callable[[], str]
    ) -> None:
        """`try_to_stay` is called when this worker leaves, from any thread; it returns whether the process stays.

        `find_obstacle`: why it cannot go on in place; empty: it can.
        """
        self._try_to_stay, self._find_obstacle = try_to_stay, find_obstacle

    @contextmanager
    def finish_first(
        self, mates: Collection[int], patience_s: float, is_worth_it: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Around work that only the ranks of one replica do: a reason to leave that does not concern it waits.

        At the end of the block this worker leaves for the first such reason, and this raises as `raise_if_leaving`. It
        leaves at once, for any reason, when one of its `mates`, the other ranks of its replica, is gone; when the
        process may not stay afterwards; when the work is not worth finishing, which `is_worth_it` says when the reason
        comes, in any thread; or when a wait in the block takes longer than `patience_s` after the first
        reason.
        """
        with self.condition:
            self._shield = _Shield(frozenset(mates), patience_s, is_worth_it)
            self._is_share_done = False
        try:
            yield
        finally:
            self._end_shield()
        self.raise_if_leaving()

    @property
    def is_deferred(self) -> bool:
        """Whether this worker leaves as soon as it has finished what it does (`finish_first`)."""
        return self._deferred is not None

    def wait_for_others(self, are_done: Callable[[], bool], patience_s: float = 0.0) -> None:
        """At the end of a block of `finish_first`, whose work is done here: waits until others have done theirs, at
        least for `patience_s`, or until there is a second reason to leave."""
        with self.condition:
            self._is_share_done = True
            if self._shield is not None:
                self._shield = replace(self._shield, patience_s=max(self._shield.patience_s, patience_s))
            self.condition.notify_all()
        self.wait_until(are_done)

    def _end_shield(self) -> None:
        with self.condition:
            self._shield, deferred = None, self._deferred
        if deferred is not None:
            self.leave_generation(deferred)

    def add_breaker(self, break_connections: Callable[[GenerationEnded | PeerLost], None]) -> None:
        """`break_connections` is called when this worker leaves and its process stays, from any thread.

        It breaks connections to other ranks, so that neither they nor this process wait for one another. The last one
        added is called first: `RankPresence` says goodbye before the connections break. If this worker has left
        already, it is called at once. It is not kept after that, because copies of states hang on it.
        """
        with self.condition:
            exit_ = self._exit if self._stays else None
            if exit_ is None:
                self._breakers.append(break_connections)
        if exit_ is not None:
            break_connections(exit_)

    def leave_after_save(self, exit_: GenerationEnded) -> None:
        """Leaves as `request_save_first` has asked, on this rank or on another one."""
        self.leave_generation(exit_, may_stay=self._may_stay_after_save)

    def set_unreached_callback(self, report: Callable[[int, str], None]) -> None:
        """`report` is called with a rank that cannot be reached, before this worker leaves because of it."""
        self._on_unreached = report

    def report_waiting_to(self, report: Callable[[bool], None]) -> None:
        """Makes `report` be called when this worker begins to wait for other ranks for long, and when it goes on."""
        self._on_waiting = report

    @contextmanager
    def report_wait(self) -> Iterator[None]:
        """Reports that this worker waits for other ranks, in whatever way, until the block ends."""
        self._count_wait(1)
        try:
            yield
        finally:
            self._count_wait(-1)

    def _count_wait(self, change: int) -> None:
        # Several threads may wait at once. The lock also keeps the reports in their order.
        with self._counting_waits:
            before, self._waits = self._waits, self._waits + change
            if (before == 0) is not (self._waits == 0):
                self._on_waiting(self._waits > 0)

    def leave_generation(
        self, exit_: GenerationEnded | PeerLost, *, may_stay: bool = True, at_once: bool = False
    ) -> None:
        """Makes every wait raise `exit_` and ends the process after the grace period. The first reason stands.

        With `may_stay`, a process that can go on in the next generation is not ended (`offer_to_stay`), and it may
        finish its share of the step before it leaves (`finish_first`), unless it is to leave `at_once`.
        """
        with self.condition:
            if self._is_leaving:
                self.condition.wait_for(lambda: self._exit is not None)  # another thread is about to set it
                if self._stays and not may_stay:
                    self._end(self.exit_code or EXIT_GENERATION_ENDED)
                return
            if isinstance(self._failure, RanksDifferError) and isinstance(exit_, PeerLost):
                return  # the peer is lost because of it, and the script's author must see the cause
            waits_for_others = self._is_share_done and self._deferred is not None  # they may never be done then
            may_finish = may_stay and not (at_once or waits_for_others)
            if may_finish and self._shield is not None and self._shield.defers(exit_):
                if self._deferred is None:
                    self._deferred = exit_
                    _log.info("leaving the generation when the share of the step is done", reason=exit_.reason)
                    self.condition.notify_all()
                return
            if self._deferred is not None and exit_ is not self._deferred:
                if not self._is_share_done:
                    _log.info("the share of the step cannot be finished", reason=exit_.reason)
                exit_ = self._deferred if may_stay else exit_
            self._is_leaving = True
        _log.warning("leaving the generation", reason=exit_.reason, exit_code=exit_.code)
        if isinstance(exit_, PeerLost) and exit_.unreached is not None:
            self._on_unreached(exit_.unreached, exit_.reason)
        stays = may_stay and self._decides_to_stay(exit_)
        with self.condition:
            self._exit, self._stays = exit_, stays
            breakers, self._breakers = self._breakers[::-1] if stays else [], []
            self.condition.notify_all()
        for break_connections in breakers:
            break_connections(exit_)
        if stays:
            return
        watchdog = threading.Timer(self._grace_s, self._end, args=(int(str(exit_.code)),))
        watchdog.daemon = True
        watchdog.start()

    def _decides_to_stay(self, exit_: GenerationEnded | PeerLost) -> bool:
        try:
            return self._try_to_stay is not None and self._try_to_stay(exit_)
        except Exception:  # the thread that is to leave must leave
            _log.exception("this process cannot say what it holds: it ends with its generation")
            return False

    def fail_waits(self, error: BaseException) -> None:
        """Makes every wait raise RuntimeError from `error`, which broke a thread of the runtime; a RanksDifferError is
        raised as it is."""
        with self.condition:
            self._failure = self._failure or error
            self.condition.notify_all()

    def raise_if_leaving(self) -> None:
        """Raises the reason for which this worker leaves, if there is one."""
        if self._exit is not None:
            raise type(self._exit)(self._exit.reason)
        if isinstance(self._failure, RanksDifferError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError(f"a thread of the Varuna runtime failed: {self._failure!r}") from self._failure

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Around work with other ranks: a fault that comes from this worker's leaving raises its reason instead."""
        try:
            yield
        except (OSError, RuntimeError):
            self.raise_if_leaving()
            raise

    def wait_until(self, ready: Callable[[], bool], recheck_s: Callable[[], float] | None = None) -> None:
        """Waits until `ready()`, which is called under `condition`. Raises as `check` does.

        `recheck_s`: for an answer that may change with time alone, in how many seconds to look again at the latest.
        """
        if self._is_ready_within(_LONG_WAIT_S, ready, recheck_s):
            return
        with self.report_wait():
            while not self._is_ready_within(self._patience_s(), ready, recheck_s):
                if self._deferred is not None:
                    self._end_shield()

    def _patience_s(self) -> float:
        """How long a wait may take until it is looked at whether another rank of the replica has gone silently."""
        return math.inf if self._shield is None else self._shield.patience_s

    def _is_ready_within(
        self, limit_s: float, ready: Callable[[], bool], recheck_s: Callable[[], float] | None
    ) -> bool:
        with self.condition:
            self.raise_if_leaving()
            if ready():
                return True
            left_s = limit_s
            while left_s > 0:
                began_s = time.monotonic()
                self.condition.wait(
                    min(_RECHECK_S, left_s) if recheck_s is None else min(left_s, _RECHECK_S, recheck_s())
                )
                self.raise_if_leaving()
                if ready():
                    return True
                left_s -= min(time.monotonic() - began_s, _RECHECK_S)  # a process that stood still has not waited
            return False
