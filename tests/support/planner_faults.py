"""A planner that fails once, and a clock that a test sets forward."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

__all__ = ["DISK_FULL", "FailsOnce", "SteppedClock"]

DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


class SteppedClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FailsOnce:
    """In place of a function: its first call fails."""

    def __init__(self, call: Callable[..., Any], error: Exception) -> None:
        self._call, self._error = call, error
        self.calls = 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise self._error
        return self._call(*given)
