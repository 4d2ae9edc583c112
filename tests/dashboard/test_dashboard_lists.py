"""Lists that grow by more than a page while the dashboard does not look: in a hidden tab, or while it cannot ask."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from dashboard_world import JOB, SHAPES, fill_job
from rest_world import RestWorld
from varuna_manager.db.models import CheckpointRow

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
MAY_FAIL = ("/logs",)
NEWEST = len(SHAPES) + 1
"""The job's newest generation; the others have a checkpoint each, and it has one of step 600."""


@pytest_asyncio.fixture(loop_scope="session")
async def world(world: RestWorld) -> RestWorld:
    await fill_job(world, 600)
    return world


def region(page: Page, title: str) -> Any:
    return page.get_by_role("region", name=title, exact=True)


def checkpoints(steps: range) -> list[CheckpointRow]:
    about: dict[str, Any] = {"job_id": JOB, "generation": NEWEST, "total_bytes": 1 << 30, "at": time.time()}
    return [CheckpointRow(step=step, url=f"file:///c/varuna_ckpt_{step}", **about) for step in steps]


async def test_checkpoints_committed_while_nobody_looked_are_all_there(world: RestWorld, open_page: Any) -> None:
    await world.add(*checkpoints(range(601, 641)))
    async with open_page(f"{world.url}/#/jobs/{JOB}", may_fail=MAY_FAIL) as page:
        rows = region(page, "Checkpoints").locator("tbody tr")
        older = region(page, "Checkpoints").get_by_role("button", name="Older")
        await expect(rows).to_have_count(25)
        await world.add(*checkpoints(range(641, 701)))
        await world.emit_event("checkpoint", job_id=JOB)
        await expect(rows.first.locator("td").first).to_have_text("700")
        await expect(rows).to_have_count(85)
        await older.click()
        await expect(older).to_be_hidden()
        steps = await rows.locator("td:first-child").all_inner_texts()
        assert [int(step) for step in steps] == [*range(700, 599, -1), 480, 360, 240, 120]


async def test_events_that_come_while_the_list_is_asked_for_stay_in_order(world: RestWorld, open_page: Any) -> None:
    """As after a break: the stream brings more than the list has on its first page."""
    released = asyncio.Event()

    async def hold(route: Route) -> None:
        await released.wait()
        await route.continue_()

    async with open_page("about:blank", may_fail=MAY_FAIL, leads_to=world.url) as page:
        await page.route("**/api/v1/events?*limit=60*", hold)
        await page.goto(f"{world.url}/#/events")
        await expect(page.locator("#connection")).to_contain_text("live")
        names = [f"vm-{number:05}" for number in range(150)]
        for name in names[:-1]:
            await world.emit_event("vm_ready", f"{name} is ready")
        await world.emit_event("vm_lost", f"{names[-1]} is lost")
        # The kinds of what came are offered, so the page knows of them all by now.
        await expect(page.get_by_label("Kind of event").get_by_role("option", name="vm lost")).to_be_attached()
        released.set()
        rows = region(page, "All events").locator("tbody tr")
        await expect(rows.first).to_contain_text(names[-1])
        await expect(rows).to_have_count(60)
        await page.get_by_role("button", name="Older").click()
        await expect(rows).to_have_count(120)
        texts = await rows.locator("td:last-child").all_inner_texts()
        assert [text[:8] for text in texts] == names[:-121:-1]
