"""For how long each job has made no progress, by a clock that nobody can set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

_JUMP_S = 0.5
"""The wall clock was set when it has gone so much more, or less, than the monotonic one."""


@dataclass
class _Seen:
    mark: Hashable
    at: float
    """When there was progress, by the monotonic clock."""
    wall_at: float
    looked_at: float


class ProgressClock:
    """Remembers, from look to look, what changed when.

    Stored times tell when a step was reported, and only as far as the wall clock was not set since. So they are
    believed within the time since the last look, and what went before this manager's start does not count.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._started_at = monotonic()
        self._seen: dict[str, _Seen] = {}

    def keep_only(self, job_ids: Collection[str]) -> None:
        self._seen = {job_id: seen for job_id, seen in self._seen.items() if job_id in job_ids}

    def progress_at(self, job_id: str, mark: Hashable, at: float, now: float) -> float:
        """When the job last got on, as a time of the wall clock as it goes now.

        Args:
            mark: another one with every progress.
            at: when the progress that made this mark was stored, by the wall clock of then.
            now: the wall clock.
        """
        monotonic_s = self._monotonic()
        seen = self._seen.get(job_id)
        if seen is None or seen.mark != mark:
            since_s = monotonic_s - (self._started_at if seen is None else seen.looked_at)
            ago_s = min(max(now - at, 0.0), since_s)
            self._seen[job_id] = seen = _Seen(mark, monotonic_s - ago_s, now - ago_s, monotonic_s)
        seen.looked_at = monotonic_s
        wall_at = now - (monotonic_s - seen.at)
        if abs(wall_at - seen.wall_at) > _JUMP_S:
            seen.wall_at = wall_at
        return seen.wall_at

    def begin_again(self, job_id: str, now: float) -> float:
        """Nothing could be heard of its progress until now: when it last got on counts from here. It returns `now`."""
        seen = self._seen[job_id]
        seen.at, seen.wall_at = self._monotonic(), now
        return now
