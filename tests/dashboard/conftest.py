"""One Chromium for all tests of the dashboard, and pictures of its pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page

from chromium import SCREENSHOTS, clean_page, launched

OpenPage = Callable[..., AbstractAsyncContextManager[Page]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[BrowserContext]:
    async with launched() as browser:
        yield browser


@pytest.fixture
def open_page(browser: BrowserContext) -> OpenPage:
    return partial(clean_page, browser)


@pytest.fixture
def screenshot() -> Callable[[Page, str], Any]:
    """Keep a picture of the whole page for people to look at."""

    async def take(page: Page, name: str) -> None:
        await page.evaluate("() => scrollTo(0, 0)")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    return take
