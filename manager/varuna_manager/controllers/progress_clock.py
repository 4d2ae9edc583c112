"""How long each job has made no progress, by a clock that cannot be set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

_JUMP_S = 0.5
"""The wall clock was set if it differs from the monotonic one by more than this."""


@dataclass
class _SeenProgress:
    mark: Hashable
    at: float
    """When there was progress, by the monotonic clock."""
    wall_at: float
    looked_at: float


class ProgressClock:
    """Remembers, from look to look, what changed when.

    A stored time is right only if the wall clock was not set since. So it counts only within the time since the last
    look, and the time before this manager's start does not count.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._started_at = monotonic()
        self._seen: dict[str, _SeenProgress] = {}

    def keep_only(self, job_ids: Collection[str]) -> None:
        self._seen = {job_id: seen for job_id, seen in self._seen.items() if job_id in job_ids}

    def progress_at(self, job_id: str, mark: Hashable, at: float, now: float) -> float:
        """When the job last made progress, by the present wall clock.

        Args:
            mark: changes with every progress.
            at: when the progress that made this mark was stored, by the wall clock at that time.
            now: the wall clock.
        """
        monotonic_s = self._monotonic()
        seen = self._seen.get(job_id)
        if seen is None or seen.mark != mark:
            since_s = monotonic_s - (self._started_at if seen is None else seen.looked_at)
            ago_s = min(max(now - at, 0.0), since_s)
            self._seen[job_id] = seen = _SeenProgress(mark, monotonic_s - ago_s, now - ago_s, monotonic_s)
        seen.looked_at = monotonic_s
        wall_at = now - (monotonic_s - seen.at)
        if abs(wall_at - seen.wall_at) > _JUMP_S:
            seen.wall_at = wall_at
        return seen.wall_at

    def begin_again(self, job_id: str, now: float) -> float:
        """Progress could not be observed until now, so the time without it counts from here. Returns `now`."""
        seen = self._seen[job_id]
        seen.at, seen.wall_at = self._monotonic(), now
        return now
