"""Calls of a cloud's client that blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

__all__ = ["BlockingCalls"]

_Answer = TypeVar("_Answer")
_BESIDE_LONG = 4
"""Threads for calls that end soon."""


class BlockingCalls:
    """Makes them in threads of its own, because those of the event loop also serve the planner and other clouds.

    `long_calls`: how many at a time may each hold a thread for a minute; others need not wait for them.
    """

    def __init__(self, name: str, long_calls: int) -> None:
        self._threads = ThreadPoolExecutor(long_calls + _BESIDE_LONG, thread_name_prefix=name)
        self._under_way: set[asyncio.Future[Any]] = set()

    async def call(self, function: Callable[..., _Answer], *arguments: Any, **named: Any) -> _Answer:
        """A call goes on if its caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments, **named))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Wait for the calls under way, because a thread cannot be stopped."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._threads.shutdown(wait=False)
