"""What the records of a training around a kill say: when steps ended, and when no micro-batch ran anywhere."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "Gap",
    "StepLine",
    "Wait",
    "find_gap",
    "find_idle",
    "measure_turn",
    "median_step_s",
    "parse_activity",
    "parse_record",
]

_STEP_SAMPLE = 10
"""The median of this many steps is the duration of a step."""


class StepLine(NamedTuple):
    """One worker has ended one step."""

    step: int
    at: float


class Gap(NamedTuple):
    """The longest time without a step after a kill."""

    seconds: float
    last_step: int
    """The newest step before it."""
    next_step: int
    """The first step after it."""
    ended_at: float

    @property
    def steps_redone(self) -> int:
        return max(0, self.last_step - self.next_step + 1)


class Wait(NamedTuple):
    """A layer of a micro-batch has waited, as if a device computed it."""

    began: float
    ended: float


def parse_record(text: str) -> list[StepLine]:
    """All whole lines, by time."""
    lines = (line.split() for line in _list_whole_lines(text))
    return sorted((StepLine(int(step), float(at)) for _, step, at in lines), key=lambda line: line.at)


def parse_activity(text: str) -> list[Wait]:
    """All whole lines, by when they began."""
    lines = (line.split() for line in _list_whole_lines(text))
    return sorted(Wait(float(began), float(ended)) for began, ended in lines)


def _list_whole_lines(text: str) -> list[str]:
    return text[: text.rfind("\n") + 1].splitlines()


def find_gap(lines: Sequence[StepLine], killed_at: float, recovered_step: int) -> Gap:
    """The longest time without a step between a kill and the end of `recovered_step`, the first step after it that
    training went on with: a machine that stands still in a later step says nothing about the kill.

    Raises ValueError if there is no step before the kill, or that step has not ended after it.
    """
    before = [line for line in lines if line.at <= killed_at]
    after = [line for line in lines if line.at > killed_at]
    # The last worker's line: the first may be of workers that ended this step without the lost one, and do it again.
    end = max((index for index, line in enumerate(after, 1) if line.step == recovered_step), default=0)
    if not before or not end:
        raise ValueError("no steps on both sides of the kill")
    around = [before[-1], *after[:end]]
    at = max(range(1, len(around)), key=lambda index: around[index].at - around[index - 1].at)
    last_step = max(line.step for line in [*before, *around[:at]])
    return Gap(around[at].at - around[at - 1].at, last_step, around[at].step, around[at].at)


def find_idle(waits: Sequence[Wait], since: float, until: float) -> float:
    """The longest time from `since` to `until` in which no layer waited in any process. `waits` are in order."""
    longest, busy_until = 0.0, since
    for wait in waits[: bisect.bisect_left(waits, (until,))]:
        longest = max(longest, wait.began - busy_until)
        busy_until = max(busy_until, wait.ended)
    return max(longest, until - busy_until)


def measure_turn(lines: Sequence[StepLine], first: int, last: int) -> float:
    """The mean duration of the steps after the first of a turn, from when the first worker ended each.

    The mean: what readiness costs may come in a few steps only, as the copy of a state does.
    """
    ends: dict[int, float] = {}
    for line in lines:
        ends.setdefault(line.step, line.at)
    return (ends[last] - ends[first]) / (last - first)


def median_step_s(lines: Sequence[StepLine]) -> float:
    """The duration of the newest steps of these, from when the first worker ended each."""
    ends: dict[int, float] = {}
    for line in lines:
        ends.setdefault(line.step, line.at)
    times = sorted(ends.values())[-_STEP_SAMPLE - 1 :]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
