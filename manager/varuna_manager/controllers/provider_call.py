"""One call of a provider at a time, which a look at the fleet waits for only so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

__all__ = ["PATIENCE_S", "ProviderCall"]

PATIENCE_S = 0.3
"""How long a look waits for a cloud, which may take minutes: VMs are lost and have notices meanwhile."""

_Answer = TypeVar("_Answer")


class ProviderCall(Generic[_Answer]):
    """`ring`: called when the provider answers after a look has stopped waiting."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._pending: asyncio.Task[_Answer] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether an answer is still to be taken."""
        return self._pending is not None

    async def ask(self, call: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer | None:
        """The answer; None: there is none yet. Makes no call while an earlier one is pending, whose answer it returns.
        Raises what the call raises."""
        if self._pending is None:
            self._pending = asyncio.create_task(call())
        pending = self._pending
        await asyncio.wait({pending}, timeout=PATIENCE_S)
        if not pending.done():
            pending.remove_done_callback(self._answered)  # once is enough
            pending.add_done_callback(self._answered)
            return None
        self._pending = None
        return pending.result()

    async def close(self) -> None:
        """Stop waiting."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait({self._pending})

    def _answered(self, answer: asyncio.Task[_Answer]) -> None:
        self._ring()
