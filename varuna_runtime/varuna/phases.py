"""How long each part of a worker's start took: told to the agent, so that users see where a morph's time went."""

from __future__ import annotations

import time
from collections.abc import Mapping

__all__ = ["Phases"]


class Phases:
    """Follows one another from the making of this object on."""

    def __init__(self) -> None:
        self.begun_at = time.time()
        """Seconds since the epoch."""
        self._since_s = time.monotonic()
        self._took_s: dict[str, float] = {}

    def done(self, name: str) -> None:
        """What came after the phase before was `name`; a name may come again."""
        now_s = time.monotonic()
        self._took_s[name] = self._took_s.get(name, 0.0) + now_s - self._since_s
        self._since_s = now_s

    @property
    def took_s(self) -> Mapping[str, float]:
        """Seconds by phase, in the order in which they were first done."""
        return self._took_s
