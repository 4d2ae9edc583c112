"""A clock that measures how long others were silent, and stands while it is the manager that does not listen.

When the machine of a manager is overloaded or the process is stopped, nobody's heartbeats are read. Once it goes on,
decisions may come before what has arrived meanwhile is read. That time is nobody's silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_BEAT_S = 0.1
_MOST_S = 0.3
"""The most that the clock goes on between two beats."""


class AttendedClock:
    """`keep_attending` runs in the event loop that reads the agents' streams. Without it the clock stands."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._beat_at = monotonic()
        self._attended_s = 0.0

    def read_s(self) -> float:
        return self._attended_s + min(self._monotonic() - self._beat_at, _MOST_S)

    def beat(self) -> None:
        """The event loop attends."""
        self._attended_s, self._beat_at = self.read_s(), self._monotonic()

    async def keep_attending(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(_BEAT_S)
