"""How much of the machine's processor time goes to other programs while the demo runs.

The demo compares step times with predictions from measurements made minutes before. On a busy machine the two may
differ for that reason alone; the report then says so instead of blaming the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

_SAMPLE_EVERY_S = 1.0


@dataclass(frozen=True)
class _LoadSample:
    at: float
    ours_s: float
    all_s: float


class OtherLoad:
    """Samples the processor time of all processes and of the demo's own."""

    def __init__(self, find_ours: Callable[[], Iterable[psutil.Process]]) -> None:
        """`find_ours` lists the demo's living processes, without this one."""
        self._find_ours = find_ours
        self._seen_s: dict[int, float] = {}
        """By process id: the processor time at the last sample. Processes that have ended keep their last value."""
        self._samples: list[_LoadSample] = []

    def add_sample(self, now: float) -> None:
        """Read the processor times, unless the last sample was just before `now` (on the monotonic clock)."""
        if self._samples and now - self._samples[-1].at < _SAMPLE_EVERY_S:
            return
        for process in [psutil.Process(), *self._find_ours()]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._seen_s[process.pid] = times.user + times.system
        self._samples.append(_LoadSample(now, sum(self._seen_s.values()), _busy_s()))

    def compute_share(self, begin: float, end: float) -> float | None:
        """The share of all processors, from 0 to 1, that other programs used from `begin` to `end`.

        None when there are not two samples in that time.
        """
        samples = [sample for sample in self._samples if begin <= sample.at <= end]
        if len(samples) < 2:
            return None
        first, last = samples[0], samples[-1]
        others_s = (last.all_s - first.all_s) - (last.ours_s - first.ours_s)
        return min(max(others_s / ((last.at - first.at) * (psutil.cpu_count() or 1)), 0.0), 1.0)


def _busy_s() -> float:
    """The processor time that all programs of this machine have used since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)
