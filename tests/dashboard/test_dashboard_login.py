"""A secure manager: nothing without a token, and no more than its role allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from secure_world import IDLE_VM, SecureManager, secure_manager
from waiting import wait_until

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[SecureManager]:
    flags = ("--vms", "1", "--agent-command", IDLE_VM, "--request-timeout-s", "3600")  # its agent never comes
    with secure_manager(tmp_path / "secure", *flags) as manager:
        wait_until(lambda: len(manager.vms()) == 1, "a VM")
        yield manager


async def sign_in(page: Page, token: str) -> None:
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Sign in").click()


async def test_who_signs_in_sees_what_the_role_allows(manager: SecureManager, open_page: Any) -> None:
    viewer = manager.token(name="vera", role="viewer")
    async with open_page(f"{manager.url}/", may_fail=("/api/v1/whoami",)) as page:
        await sign_in(page, "vt1.nobody.knows")
        await expect(page.get_by_role("alert").filter(has_text="token")).to_be_visible()
        await sign_in(page, viewer)
        await expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")
        await expect(page.locator("#who")).to_have_text("vera (viewer)")
        await expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        await expect(page.get_by_role("button", name="Submit a job…")).to_have_count(0)
        await page.reload()  # the tab keeps it
        await expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")

        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        assert await page.evaluate("() => sessionStorage.length") == 0
        await sign_in(page, manager.admin_token)
        await page.get_by_role("link", name="Fleet").click()
        vm_id = manager.vms()[0]
        row = page.get_by_role("row").filter(has_text=vm_id)
        await row.get_by_role("button", name="Drain…").click()
        await page.get_by_role("button", name="Drain the VM").click()
        await expect(row.get_by_role("button", name="Drain…")).to_have_count(0)
