"""Limits on how often a caller may do something."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

_MOST_KEYS = 10_000


class RateLimiter:
    """A token bucket per key (the name of a token, an address): `burst` calls at once, and `per_s` on average.

    Beyond 10,000 keys, the least recently used are forgotten; their buckets are full again, or almost.
    """

    def __init__(self, per_s: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._now = now
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def count_call(self, key: str) -> float:
        """Count a call and return 0; if there is no room for it, return the seconds until there is."""
        level = self._level(key)
        if level < 1.0:
            return (1.0 - level) / self._per_s
        self._levels[key] = (level - 1.0, self._now())
        self._levels.move_to_end(key)
        if len(self._levels) > _MOST_KEYS:
            self._levels.popitem(last=False)
        return 0.0

    def _level(self, key: str) -> float:
        level, at = self._levels.get(key, (float(self._burst), self._now()))
        return min(float(self._burst), level + (self._now() - at) * self._per_s)
