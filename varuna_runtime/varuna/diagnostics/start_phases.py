"""The durations of the parts of a worker's start, reported to the agent so that users see where a morph's time goes."""

from __future__ import annotations

import time
from collections.abc import Mapping

__all__ = ["StartPhases"]


class StartPhases:
    """Phases that follow one another; the first starts when this object is made."""

    def __init__(self) -> None:
        self.started_at = time.time()
        """Seconds since the epoch."""
        self._since_s = time.monotonic()
        self._durations_s: dict[str, float] = {}

    def end_phase(self, name: str) -> None:
        """Ends the current phase, which was `name`, and starts the next. A name may be used several times."""
        now_s = time.monotonic()
        self._durations_s[name] = self._durations_s.get(name, 0.0) + now_s - self._since_s
        self._since_s = now_s

    @property
    def durations_s(self) -> Mapping[str, float]:
        """Seconds by phase, in the order in which they first ended."""
        return self._durations_s
