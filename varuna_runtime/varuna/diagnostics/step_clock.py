"""How long each step takes, from the end of the step before, and what the script does between the two.

A script that evaluates, waits for data or sleeps between its steps trains as slowly as its steps follow each other, so
the time of a step includes what lies before it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

__all__ = ["STEP_CLOCK", "Activity", "StepClock", "StepTimes"]


class Activity(Enum):
    """What a script does between two steps, where the library takes part in it."""

    DATA = "data"
    """It makes a batch in `Batches`."""
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    """Its own, or an automatic one: training waits for the snapshot."""


class StepTimes(NamedTuple):
    """The time of one step and its parts that lie before the passes."""

    whole_ns: int
    """From the end of the step before. The first step of a process counts from its own beginning."""
    data_ns: int = 0
    evaluation_ns: int = 0
    checkpoint_ns: int = 0
    script_ns: int = 0
    """All else that the script did."""

    @property
    def between_ns(self) -> int:
        return self.data_ns + self.evaluation_ns + self.checkpoint_ns + self.script_ns

    @property
    def call_ns(self) -> int:
        """The passes, the sums over ranks and the update."""
        return self.whole_ns - self.between_ns


class StepClock:
    """Measures steps and what lies between them, on the thread that calls `step`."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self.restart()

    def restart(self) -> None:
        """The next step is the first one."""
        self._spent_ns: Counter[Activity] = Counter()
        self._thread = 0
        self._last_end_ns: int | None = None
        self._began_ns: int | None = None
        self._is_measuring = False

    def begin_step(self) -> None:
        """The passes begin. A step that begins again in the next generation keeps its first beginning."""
        if self._began_ns is None:
            self._began_ns = self._now_ns()

    def end_step(self) -> StepTimes:
        now_ns = self._now_ns()
        began_ns = now_ns if self._began_ns is None else self._began_ns
        last_end_ns = began_ns if self._last_end_ns is None else self._last_end_ns
        spent_ns = self._spent_ns
        times = StepTimes(
            now_ns - last_end_ns,
            data_ns=spent_ns[Activity.DATA],
            evaluation_ns=spent_ns[Activity.EVALUATION],
            checkpoint_ns=spent_ns[Activity.CHECKPOINT],
            script_ns=began_ns - last_end_ns - spent_ns.total(),
        )
        self._spent_ns, self._began_ns = Counter(), None
        self._last_end_ns, self._thread = now_ns, threading.get_ident()
        return times

    @contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Around what a script does between two steps.

        Within a step, before the first one, and on another thread, for which the script does not wait here, it does
        not count.
        """
        is_between = self._last_end_ns is not None and self._began_ns is None
        if not is_between or self._is_measuring or threading.get_ident() != self._thread:
            yield
            return
        self._is_measuring, began_ns = True, self._now_ns()
        try:
            yield
        finally:
            self._is_measuring = False
            self._spent_ns[activity] += self._now_ns() - began_ns


STEP_CLOCK = StepClock()
"""Of this process. `Batches` measures by it without knowing the training that it feeds."""
