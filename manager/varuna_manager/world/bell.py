"""How parts of the manager wake the reconcile loops when there may be something to do."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes every listener. A lost call costs only time, because the loops also look periodically."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Event] = set()

    def add_listener(self) -> asyncio.Event:
        """A new listener's event. The listener clears it before each look."""
        event = asyncio.Event()
        self._listeners.add(event)
        return event

    def remove_listener(self, event: asyncio.Event) -> None:
        self._listeners.discard(event)

    def notify_listeners(self) -> None:
        for event in self._listeners:
            event.set()


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most `timeout_s`. Returns whether it was set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
