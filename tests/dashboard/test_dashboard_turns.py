"""The parts of a page draw themselves in turns, and leave the page as much time as they took."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page

from chromium import clean_page
from rest_world import RestWorld

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]

# Each part asks for its next call at the beginning of one, as if there were always news. `begun`: part and time in
# seconds of each call.
WATCH = """async ({takes_ms, fails, parts}) => {
    const { atMostEvery } = await import("/js/turns.js");
    window.begun = [];
    window.reported = [];
    window.reportError = (error) => window.reported.push(error.message);
    const asks = Array.from({ length: parts }, (_, part) => atMostEvery(500, async () => {
        window.begun.push([part, performance.now() / 1000]);
        asks[part]();
        await new Promise((resolve) => setTimeout(resolve, takes_ms));
        if (fails) throw new Error("it failed");
    }));
    asks.forEach((ask) => ask());
}"""


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser: BrowserContext) -> AsyncIterator[Any]:
    """Pages of a browser of its own: a clock that is taken over is so for all later pages of the same one."""
    assert browser.browser
    async with await browser.browser.new_context() as own:
        yield partial(clean_page, own)


async def watched(page: Page, seconds: int, *, takes_ms: int, fails: bool = False, parts: int = 1) -> list[Any]:
    """Which part was called, and how long after the first call, in seconds, for as long as `seconds`."""
    await page.clock.install()
    # An hour ahead, in seconds: the page's time goes on until it is paused, and its clock does not go back.
    await page.clock.pause_at(await page.evaluate("() => Date.now() / 1000 + 3600"))
    await page.evaluate(WATCH, {"takes_ms": takes_ms, "fails": fails, "parts": parts})
    for _ in range(10 * seconds):
        await page.clock.run_for(100)
    begun = await page.evaluate("() => window.begun")
    return [(part, pytest.approx(at - begun[0][1], abs=0.5)) for part, at in begun]


async def test_after_a_call_the_page_rests_for_as_long_as_it_took(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/compare") as page:
        assert await watched(page, 20, takes_ms=3000) == [(0, 0), (0, 6), (0, 12), (0, 18)]


async def test_a_quick_call_is_made_as_often_as_is_allowed(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/compare") as page:
        assert len(await watched(page, 10, takes_ms=0)) == pytest.approx(20, abs=2)


async def test_parts_take_turns_and_their_rests_are_the_whole_pages(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/compare") as page:
        begun = await watched(page, 15, takes_ms=2000, parts=2)
    assert begun == [(0, 0), (1, 4), (0, 8), (1, 12)]


async def test_a_part_that_fails_is_reported_and_keeps_no_turn(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/compare") as page:
        begun = await watched(page, 10, takes_ms=2000, fails=True, parts=2)
        assert await page.evaluate("() => window.reported") == ["it failed", "it failed"]
    assert begun == [(0, 0), (1, 4), (0, 8)]


async def test_a_call_that_never_ends_does_not_stop_the_page(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/compare") as page:
        assert await watched(page, 70, takes_ms=10**7, parts=2) == [(0, 0), (1, 60)]
