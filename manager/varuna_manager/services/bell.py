"""How one part of the manager tells the reconcile loops that there may be something to do."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes every listener. A ring that nobody hears costs time only: the loops also look by themselves."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Event] = set()

    def listen(self) -> asyncio.Event:
        """A new listener's event; the listener clears it before it looks."""
        event = asyncio.Event()
        self._listeners.add(event)
        return event

    def leave(self, event: asyncio.Event) -> None:
        self._listeners.discard(event)

    def ring(self) -> None:
        for event in self._listeners:
            event.set()


async def wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, but no longer than `timeout_s`; whether it came."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
