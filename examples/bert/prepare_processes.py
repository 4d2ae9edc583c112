"""Work spread over processes, with results in the order of the work whatever the number of processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def process_pool(processes: int) -> Iterator[Executor | None]:
    """A pool of `processes`, or None for one: the work is then done in this process."""
    # The tokenizer's own threads would work against the processes, and the number of processes should be exact.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if processes == 1:
        yield None
        return
    # Spawned: a fork would copy the locks of the threads that loaded libraries have here.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ordered_map(
    executor: Executor | None, work: Callable[[Item], Result], items: Iterable[Item], *, ahead: int
) -> Iterator[Result]:
    """`map(work, items)` over the pool, taking at most `ahead` items before their results are asked for."""
    if executor is None:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(executor.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
