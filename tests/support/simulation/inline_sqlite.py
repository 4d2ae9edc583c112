"""SQLite in the event loop's own thread: half of a simulation's time would go into waking aiosqlite's threads.

It also makes the order of everything a matter of the seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiosqlite.core


class _InlineQueue:
    """Takes the place of the queue of a connection's thread in aiosqlite, and runs what is put in at once."""

    def put_nowait(self, item: tuple[asyncio.Future[Any] | None, Callable[[], Any]]) -> None:
        future, function = item
        try:
            result = function()
        except Exception as error:
            if future is None:
                raise
            future.set_exception(error)
        else:
            if future is not None:
                future.set_result(result)

    def get(self) -> tuple[None, Callable[[], Any]]:
        """For the thread, which has nothing to do and ends."""
        return None, lambda: aiosqlite.core._STOP_RUNNING_SENTINEL


@contextmanager
def inline_sqlite() -> Iterator[None]:
    """Connections that are made inside run in their caller's thread."""
    before = aiosqlite.core.SimpleQueue
    aiosqlite.core.SimpleQueue = _InlineQueue  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        aiosqlite.core.SimpleQueue = before  # type: ignore[misc]
