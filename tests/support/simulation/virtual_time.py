"""A clock that stands still until there is nothing left to do at its time."""

from __future__ import annotations

import heapq
import inspect
import itertools
from collections.abc import Awaitable, Callable

Action = Callable[[], Awaitable[None] | None]


class VirtualTime:
    """`at` and `after` enter actions; `step` does the next one, whole, before any other."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Action]] = []

    def read(self) -> float:
        return self.now

    def at(self, when: float, action: Action) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float:
        return self._queue[0][0] if self._queue else float("inf")

    async def step(self) -> None:
        self.now, _, action = heapq.heappop(self._queue)
        result = action()
        if inspect.isawaitable(result):
            await result
