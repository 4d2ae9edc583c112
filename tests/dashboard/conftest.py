"""A real Chromium, and pages in it that must be clean: no error in the console, no request to another host."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

SCREENSHOTS = Path(__file__).resolve().parents[2] / "test-artifacts" / "dashboard"
DEADLINE_MS = 60_000.0
expect.set_options(timeout=DEADLINE_MS)
OpenPage = Callable[..., AbstractAsyncContextManager[Page]]


def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("the dashboard's tests need Chromium: run `make chromium`, or apt-get install chromium")
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    flags = ["--no-sandbox", "--disable-dev-shm-usage", "--ignore-certificate-errors"]  # the tests' own authority
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=flags, timeout=DEADLINE_MS)
        yield browser
        await browser.close()


@pytest.fixture
def open_page(browser: Browser) -> OpenPage:
    """A new page at an address, in a window of its own. `may_fail`: parts of answers' statuses and addresses."""

    @asynccontextmanager
    async def opened(url: str, *, may_fail: tuple[str, ...] = ()) -> AsyncIterator[Page]:
        context = await browser.new_context(viewport={"width": 1360, "height": 900}, reduced_motion="reduce")
        context.set_default_timeout(DEADLINE_MS)
        page = await context.new_page()
        wrong: list[str] = []

        def note(message: Any) -> None:
            of = message.location.get("url", "")
            told = f"{message.text} ({of})"
            if message.type == "error" and not any(part in told for part in may_fail):
                wrong.append(f"console: {told}")

        def check_host(request: Any) -> None:
            if urlsplit(request.url).netloc not in ("", urlsplit(url).netloc):
                wrong.append(f"asked another host: {request.url}")

        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(f"not caught: {error}"))
        page.on("request", check_host)
        await page.goto(url)
        yield page
        await context.close()
        assert not wrong, "\n".join(wrong)

    return opened


@pytest.fixture
def screenshot() -> Callable[[Page, str], Any]:
    """Keep a picture of the whole page for people to look at."""

    async def take(page: Page, name: str) -> None:
        await page.evaluate("() => scrollTo(0, 0)")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    return take
