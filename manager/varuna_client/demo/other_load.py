"""How much of the machine's processor time goes to other programs while the demo runs.

The demo compares step times with predictions that were measured minutes before. On a machine that does much else, both
are times of that machine then; the report says so instead of passing such a difference off as the planner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class _Look:
    at: float
    ours_s: float
    all_s: float


class OtherLoad:
    """Samples the processor time of all processes and of the demo's own ones."""

    def __init__(self, find_ours: Callable[[], Iterable[psutil.Process]]) -> None:
        """`find_ours` lists the demo's living processes, this one aside."""
        self._find_ours = find_ours
        self._seen_s: dict[int, float] = {}
        """By process id: its processor time when it was last seen. Those that have ended keep what they had used."""
        self._looks: list[_Look] = []

    def sample(self, now: float) -> None:
        """Look at the processor times, unless the last look was just before `now` (on the monotonic clock)."""
        if self._looks and now - self._looks[-1].at < _LOOK_EVERY_S:
            return
        for process in [psutil.Process(), *self._find_ours()]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._seen_s[process.pid] = times.user + times.system
        self._looks.append(_Look(now, sum(self._seen_s.values()), _busy_s()))

    def share(self, begin: float, end: float) -> float | None:
        """The share of all processors, from 0 to 1, that other programs used from `begin` to `end`.

        None when there were no two looks in that time.
        """
        looks = [look for look in self._looks if begin <= look.at <= end]
        if len(looks) < 2:
            return None
        first, last = looks[0], looks[-1]
        others_s = (last.all_s - first.all_s) - (last.ours_s - first.ours_s)
        return min(max(others_s / ((last.at - first.at) * (psutil.cpu_count() or 1)), 0.0), 1.0)


def _busy_s() -> float:
    """The processor time that all programs of this machine have used since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)
