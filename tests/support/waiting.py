"""The one way in which tests wait: for a condition, with a deadline that only a hang can miss.

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
"""The limit of every wait in every test: for conditions, processes, answers."""

POLL_S = 0.02
"""The pause between two looks: at a condition, and of a test's HTTP server at whether to end (0.5 s by default)."""


def wait_until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait for the first true value of `condition`, and return it. Fails after the deadline."""
    give_up = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {DEADLINE_S:.0f} s"
        time.sleep(POLL_S)
    return value


async def until(
    condition: Callable[[], Any], what: str = "the condition", *, beside: asyncio.Task[Any] | None = None
) -> Any:
    """Wait as `wait_until` does, while other tasks run. `condition` may be a coroutine function.

    `beside`: a task that must not end before the condition holds.
    """
    value: Any = None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                may_go_on = beside is None or not beside.done()
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return value
                assert may_go_on, f"{what}: {beside} has ended"
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {DEADLINE_S:.0f} s; last seen: {value!r}") from None
