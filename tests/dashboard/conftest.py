"""One Chromium for all tests of the dashboard, the manager that they ask, and pictures of its pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import BrowserContext, Page

from chromium import SCREENSHOTS, clean_page, launched
from migrated_stores import migrated
from rest_world import RestWorld, rest_world

OpenPage = Callable[..., AbstractAsyncContextManager[Page]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[BrowserContext]:
    async with launched() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    """Its store is empty; modules fill it by a fixture of the same name."""
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        yield world


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
