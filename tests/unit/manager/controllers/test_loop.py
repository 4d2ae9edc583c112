"""The loop around a controller: how soon it looks again, by what its looks take and whether they change something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import pytest

from varuna_manager.controllers.loop import run_controller
from varuna_manager.world.bell import Bell


class Looks:
    """A controller whose looks take what is given; then none comes back. Pauses are noted and not made."""

    name = "test"

    def __init__(self, looks: Iterable[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
        """`looks`: seconds of processor time, and whether something is changed."""
        self._looks = iter(looks)
        self._used_s = 0.0
        self.pauses: list[float] = []
        monkeypatch.setattr(time, "thread_time", lambda: self._used_s)
        monkeypatch.setattr(asyncio, "sleep", self._pause)

    async def reconcile_once(self) -> float:
        took_s, changed = next(self._looks, (0.0, None))
        if changed is None:
            raise asyncio.CancelledError
        self._used_s += took_s
        return 0.0 if changed else 1e-3

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


async def pauses_after(looks: list[tuple[float, bool]], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    controller = Looks(looks, monkeypatch)
    with suppress(asyncio.CancelledError):
        await run_controller(controller, Bell())
    return controller.pauses


async def test_short_looks_follow_one_another_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await pauses_after([(0.04, True), (0.04, False)] * 5, monkeypatch) == [0.0] * 10


async def test_long_looks_leave_the_thread_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of the time; half of it while something has to be done."""
    found = await pauses_after([(0.2, False), (0.2, True), (0.4, True), (0.2, False)], monkeypatch)
    assert found == pytest.approx([1.8, 0.2, 0.4, 1.8])
