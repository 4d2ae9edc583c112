"""Signs of life of a process that loads state: a large model takes minutes, in which no step is made."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["LOADING_PROGRESS", "LoadingProgress"]


class LoadingProgress:
    """Passes on that a piece of the state has arrived, from whatever thread reads it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report: Callable[[], None] = lambda: None

    def report_to(self, report: Callable[[], None]) -> None:
        """`report` is called for each piece from now on, by one thread at a time."""
        with self._lock:
            self._report = report

    def count_piece(self) -> None:
        """To be called for each piece of some megabytes."""
        with self._lock:
            self._report()


LOADING_PROGRESS = LoadingProgress()
"""Of this process: what reads files knows nothing of the agent that is to hear of it."""
