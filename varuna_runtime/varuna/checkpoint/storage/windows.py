"""Processes items in threads, with a bound on the results that wait in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["map_ahead"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(work: Callable[[Item], Result], items: Iterable[Item], *, ahead: int) -> Generator[Result]:
    """The result of `work` for each item, in order. At most `ahead` results are in the making or wait to be taken.

    Raises what `work` raises, at its item. Close or exhaust the iterator to end its threads.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(ahead, thread_name_prefix="checkpoint-read") as pool:
        try:
            for item in items:
                if len(waiting) == ahead:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(work, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
