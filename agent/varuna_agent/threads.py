"""The threads for what blocks: files and processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["open_thread_pool"]

_THREADS = 16
"""More than ever block at once. An idle one costs a few pages."""


def open_thread_pool() -> ThreadPoolExecutor:
    """A pool whose threads all run already: jobs that leave no thread on the VM take none from the agent.

    Raises OSError when there are too few already.
    """
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="varuna-agent")
    all_run = threading.Barrier(_THREADS)
    try:
        for started in [pool.submit(all_run.wait) for _ in range(_THREADS)]:
            started.result()
    except RuntimeError as error:
        all_run.abort()
        pool.shutdown()
        raise OSError(f"the agent needs {_THREADS} threads, and this VM has fewer left: {error}") from error
    return pool
