"""Runs a test of the suite on a bench of its own. No plugin of pytest is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from varuna_manager.providers.conformance.bench import ProviderBench

__all__ = ["DEADLINE_S", "check_one_line", "on_bench", "wait_until"]

DEADLINE_S = 600.0
"""Only a hang misses it."""
_POLL_S = 0.01

BenchT = TypeVar("BenchT", contravariant=True)
OpenedT = TypeVar("OpenedT", covariant=True)


class _Suite(Protocol[OpenedT]):
    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[OpenedT]: ...

    async def check_end(self, bench: Any) -> None: ...


def on_bench(test: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Path], None]:
    """Make a coroutine method `test(self, bench)` a test that pytest runs."""

    async def play(suite: _Suite[Any], folder: Path) -> None:
        async with asyncio.timeout(DEADLINE_S), suite.open_bench(folder) as bench:
            await test(suite, bench)
            await suite.check_end(bench)

    def run(self: Any, tmp_path: Path) -> None:
        asyncio.run(play(self, tmp_path))

    run.__name__, run.__qualname__, run.__doc__ = test.__name__, test.__qualname__, test.__doc__
    return run


async def wait_until(bench: ProviderBench, condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Let the bench's time pass until the condition holds."""
    try:
        async with asyncio.timeout(DEADLINE_S / 2):
            while not await condition():
                await bench.advance()
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {DEADLINE_S / 2:.0f} s") from None


def check_one_line(text: str) -> None:
    """What users see of an error is one line that is not empty."""
    assert text.strip(), "the text is empty"
    assert len(text.splitlines()) == 1, f"the text has several lines: {text!r}"
