"""The dialog that submits a job: checked while it is typed, with a dry run, and filled from a job to clone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from rest_world import SPEC, RestWorld, vm
from scripted_manager import profile_json

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
MAY_FAIL = ("/logs", "/pipeline", "/plans/newest")
VALID = "name: gpt  # again\nworkdir: /w\nrun: python train.py\nglobal_batch: 8\nresources:\n  max_gpus: 2\n"


@pytest_asyncio.fixture(loop_scope="session")
async def world(world: RestWorld) -> RestWorld:
    await world.add(*(vm(f"vm-{number}", device_memory_bytes=16 << 30) for number in range(4)))
    return world


def dialog(page: Page) -> Any:
    return page.get_by_role("dialog")


async def test_a_job_is_checked_while_it_is_typed_and_planned_before_it_is_submitted(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    earlier = (await world.ask("POST", "/api/v1/jobs", json={**SPEC, "run": "python train.py"})).json()
    await world.change(earlier["id"], profile_json=profile_json(), state="succeeded", active_name=None)
    async with open_page(f"{world.url}/#/jobs", may_fail=MAY_FAIL) as page:
        await page.get_by_role("button", name="Submit a job…").click()
        document, check = page.get_by_label("Job document"), dialog(page).locator("#document-check")
        await document.fill(VALID.replace("global_batch: 8", "global_bach: 8"))
        await expect(check).to_contain_text("line 4 global_bach: unknown; did you mean global_batch?")
        await expect(check).to_contain_text("global_batch: is missing")
        await screenshot(page, "submit-problems")
        await check.get_by_role("button", name="line 4").click()
        chosen = "it => it.value.slice(it.selectionStart, it.selectionEnd)"
        assert await document.evaluate(chosen) == "global_bach: 8"
        await document.fill("name: [")
        await expect(check).to_contain_text("not valid YAML")
        await document.fill(VALID)
        await expect(check).to_contain_text("valid 4 of 4 GPUs are free.")
        await expect(check).to_contain_text("examples/s")
        await screenshot(page, "submit-valid")
        await dialog(page).get_by_role("button", name="Submit", exact=True).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("gpt")
        newest = (await world.ask("GET", "/api/v1/jobs")).json()[0]
        assert (newest["spec"]["global_batch"], newest["spec"]["resources"]["max_gpus"]) == (8, 2)


async def test_the_dialog_says_what_a_setting_means_and_closes_when_the_page_is_left(
    world: RestWorld, open_page: Any
) -> None:
    async with open_page(f"{world.url}/#/jobs", may_fail=MAY_FAIL) as page:
        await page.goto(f"{world.url}/#/fleet")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Fleet")
        await page.goto(f"{world.url}/#/jobs")
        await page.get_by_role("button", name="Submit a job…").click()
        await page.get_by_label("Job document").fill(VALID)
        await page.get_by_label("Job document").press("ArrowUp")
        await expect(dialog(page)).to_contain_text("resources.max_gpus: ")
        await page.go_back()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Fleet")
        await expect(dialog(page)).to_have_count(0)


async def test_a_job_is_cloned_and_edited(world: RestWorld, open_page: Any) -> None:
    env = {"LR": "0.1", "NOTE": "yes: it # is", "EMPTY": ""}
    spec = {**SPEC, "run": 'python train.py --name "a: b"', "env": env, "labels": {"team": "x"}, "priority": 3}
    job = (await world.ask("POST", "/api/v1/jobs", json=spec)).json()
    async with open_page(f"{world.url}/#/jobs/{job['id']}", may_fail=MAY_FAIL) as page:
        await page.get_by_role("button", name="Clone…").click()
        document = page.get_by_label("Job document")
        text = await document.input_value()
        assert "name: gpt-2\n" in text
        assert "checkpoint" not in text, "what is the default is left out"
        await document.fill(text.replace("global_batch: 8", "global_batch: 16"))
        await dialog(page).get_by_role("button", name="Submit", exact=True).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("gpt-2")
    clone = (await world.ask("GET", "/api/v1/jobs/gpt-2")).json()["spec"]
    assert clone == {**job["spec"], "name": "gpt-2", "global_batch": 16}
