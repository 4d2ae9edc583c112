"""A job whose loss is not finite, seen through the dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from rest_world import RestWorld, generation
from varuna_manager.db.models import JobRow

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
REASON = "succeeded, but the loss or gradient of its last 7 steps was not finite (7 skipped in all)"


@pytest_asyncio.fixture(loop_scope="session")
async def world(world: RestWorld) -> RestWorld:
    now = time.time()
    spec = {"name": "nan", "workdir": "/w", "run": "python train.py --steps 8", "global_batch": 8}
    await world.add(
        JobRow(
            id="job-nan", name="nan", state="succeeded", history=[], spec=spec, reason=REASON, exit_code=0,
            created_at=now - 60, started_at=now - 50, finished_at=now,
        )
    )  # fmt: skip
    steps = {"resumed_step": 0, "last_step": 8, "last_loss": None, "not_finite_from": 2, "steps_skipped": 7}
    await world.add(generation("job-nan", 1, now - 40, started_at=now - 30, ended_at=now, **steps))
    text = f"job 'nan' {REASON}"
    await world.emit_event("job_succeeded", text, job_id="job-nan", data={"note": REASON})
    return world


async def test_a_loss_that_is_not_finite_is_red_and_the_success_does_not_look_like_another(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    async with open_page(f"{world.url}/#/jobs/job-nan", may_fail=("/pipeline", "/logs")) as page:
        loss = page.locator("dt:text-is('Loss') + dd")
        await expect(loss.locator(".wrong")).to_have_text("not finite")
        note = page.locator("dt:text-is('Loss') ~ dd.note .wrong")
        await expect(note).to_have_text("no finite loss or gradient since step 2, 7 steps skipped")
        await expect(page.locator(".head .state.warn")).to_contain_text("succeeded")
        await expect(page.locator(".reason").first).to_have_text(REASON)
        await expect(page.locator("tr.row-warn").filter(has_text=f"job 'nan' {REASON}")).to_be_visible()
        await screenshot(page, "job-not-finite")
        await page.goto(f"{world.url}/#/jobs")
        row = page.get_by_role("row").filter(has_text=REASON)
        await expect(row.locator(".state.warn")).to_contain_text("succeeded")
        await expect(row.locator(".wrong")).to_have_text("not finite")
        for column in ("Examples/s", "Per GPU", "Step time"):
            await expect(row.locator(f"[data-label='{column}']")).to_have_text("–")  # it does not run


CUTS_A_BODY_SHORT = """() => new Promise((resolve) => {
    Response.prototype.json = async () => { setTimeout(resolve); throw new DOMException("aborted", "AbortError"); };
    document.dispatchEvent(new Event("visibilitychange"));
})"""


async def test_an_answer_that_ends_half_way_is_no_mistake_of_the_page(world: RestWorld, open_page: Any) -> None:
    """As when a page is left while it reads one."""
    async with open_page(f"{world.url}/#/jobs/job-nan", may_fail=("/pipeline", "/logs")) as page:
        await expect(page.locator(".head .state.warn")).to_contain_text("succeeded")
        await page.evaluate(CUTS_A_BODY_SHORT)
        await expect(page.locator(".head .state.warn")).to_contain_text("succeeded")
