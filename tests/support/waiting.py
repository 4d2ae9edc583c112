"""The one way in which tests wait: for a condition, with a deadline that only what hangs can miss.

No test says anything about time. A machine that runs much else, or stands still for half a minute, makes a test
slow, never red. What is measured is in benchmarks/.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 600.0
"""For every wait of every test: for conditions, processes, answers."""


def wait_until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait for the first true value of `condition`, and return it. Fails after the deadline."""
    give_up = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {DEADLINE_S:.0f} s"
        time.sleep(0.02)
    return value


async def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait as `wait_until` does, while other tasks run. `condition` may be a coroutine function."""
    value: Any = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {DEADLINE_S:.0f} s; last seen: {value!r}") from None
