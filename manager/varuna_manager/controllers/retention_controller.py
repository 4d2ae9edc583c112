"""Deletes what is over and was kept for long enough, a batch at a time with pauses for whoever else writes."""

from __future__ import annotations

from varuna_manager.services.retention import Retention

_PAUSE_S = 0.25
"""Between batches of some 50 ms: the writer is everybody else's for most of the time."""
_EVERY_S = 600.0


class RetentionController:
    name = "retention"

    def __init__(self, retention: Retention) -> None:
        self._retention = retention

    async def reconcile(self) -> float:
        return _PAUSE_S if await self._retention.delete_some() else _EVERY_S
