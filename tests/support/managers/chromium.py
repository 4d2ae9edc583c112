"""A real Chromium, and pages in it that must be clean: no error in the console, no request to another host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, Page, async_playwright, expect

from browsers import chromium
from repository import ROOT
from waiting import DEADLINE_S

SCREENSHOTS = ROOT / "test-artifacts" / "dashboard"
DEADLINE_MS = DEADLINE_S * 1000
expect.set_options(timeout=DEADLINE_MS)


@asynccontextmanager
async def launched() -> AsyncIterator[BrowserContext]:
    """One person's browser: its tabs share what is cached, and no tab has the session of another."""
    flags = ["--no-sandbox", "--disable-dev-shm-usage", "--ignore-certificate-errors"]  # the tests' own authority
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=flags, timeout=DEADLINE_MS)
        context = await browser.new_context(viewport={"width": 1360, "height": 900}, reduced_motion="reduce")
        context.set_default_timeout(DEADLINE_MS)
        yield context
        await browser.close()


@asynccontextmanager
async def clean_page(
    browser: BrowserContext, url: str, *, may_fail: tuple[str, ...] = (), leads_to: str = ""
) -> AsyncIterator[Page]:
    """A new page at an address.

    `may_fail`: parts of expected error messages; `leads_to`: another address that a link may lead to.
    """
    page = await browser.new_page()
    hosts = {"", urlsplit(url).netloc, urlsplit(leads_to).netloc}
    wrong: list[str] = []

    def note(message: Any) -> None:
        text = f"{message.text} ({message.location.get('url', '')})"
        if message.type == "error" and not any(part in text for part in may_fail):
            wrong.append(f"console: {text}")

    def check_host(request: Any) -> None:
        if urlsplit(request.url).netloc not in hosts:
            wrong.append(f"asked another host: {request.url}")

    page.on("console", note)
    page.on("pageerror", lambda error: wrong.append(f"not caught: {error}"))
    page.on("request", check_host)
    try:
        await page.goto(url)
        yield page
    finally:
        await page.close()
    assert not wrong, "\n".join(wrong)
