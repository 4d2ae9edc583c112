"""The logs of all generations of a job in one, and the browser's notifications."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from rest_world import SPEC, RestWorld, generation, vm, worker

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
MAY_FAIL = ("/logs", "/pipeline")
RUNTIME = "2026-11-24 03:44:12 [info     ] checkpoint committed           generation=1 rank=0 step=2\n"
UNSEEN = """() => {
    Object.defineProperty(document, "hidden", { get: () => true });
    window.shown = [];
    const Real = window.Notification;
    window.Notification = class extends Real { constructor(...all) { super(...all); window.shown.push(all); } };
}"""


async def make_job(world: RestWorld, folder: Path) -> str:
    """A job of two generations, whose logs the VM's folder has."""
    job: str = (await world.ask("POST", "/api/v1/jobs", json=SPEC)).json()["id"]
    await world.add(vm("vm-1"), *(generation(job, number, 1.0) for number in (1, 2)))
    await world.add(*(worker(job, number, 0, "vm-1") for number in (1, 2)))
    for number in (1, 2):
        file = folder / "vms" / "vm-1" / "jobs" / job / f"g{number}" / "rank0.log"
        file.parent.mkdir(parents=True)
        file.write_text(f"loss of generation {number}\n{RUNTIME}no end of line {number}")
    return job


async def test_generations_are_one_log_and_the_runtimes_lines_are_apart(
    world: RestWorld, open_page: Any, tmp_path: Path
) -> None:
    job = await make_job(world, tmp_path)
    async with open_page(f"{world.url}/#/jobs/{job}", may_fail=MAY_FAIL) as page:
        logs = page.get_by_role("region", name="Logs", exact=True)
        log = logs.get_by_label("Log", exact=True)
        whole = "".join(
            f"—— generation {number} ——\nloss of generation {number}\n{RUNTIME}no end of line {number}\n"
            for number in (1, 2)
        )
        await expect(log).to_have_text(whole.removesuffix("\n"), use_inner_text=True)
        await logs.get_by_label("lines").select_option("script")
        await expect(log.locator(".of-varuna:visible")).to_have_count(0)
        await expect(log.locator(".of-script:visible").first).to_have_text("loss of generation 1\n")
        await logs.get_by_label("lines").select_option("varuna")
        await expect(log.locator(".of-script:visible")).to_have_count(0)
        await expect(log.locator(".of-varuna:visible")).to_have_count(2)
        await logs.get_by_label("lines").select_option("all")
        await logs.get_by_label("Search this log").fill("LOSS of")
        await logs.get_by_role("button", name="Search").click()
        found = page.get_by_label("Lines found")
        await expect(found).to_contain_text("generation 1, 1: loss of generation 1")
        await expect(found).to_contain_text("generation 2, 1: loss of generation 2")
        await logs.get_by_label("generation").select_option("1")
        await expect(log).not_to_contain_text("generation 2")


async def test_the_browser_notifies_of_ends_and_faults_while_nobody_looks(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/events", may_fail=MAY_FAIL) as page:
        await page.context.grant_permissions(["notifications"], origin=world.url)
        await expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        await page.get_by_role("button", name="Notify me").click()
        await expect(page.get_by_role("button", name="Notifications on")).to_be_visible()
        rows = page.get_by_role("region", name="All events").locator("tbody tr")
        await world.emit_event("vm_lost", "VM vm-1 is lost while somebody looks", vm_id="vm-1")
        await expect(rows).to_have_count(1)
        await page.evaluate(UNSEEN)
        await world.emit_event("vm_ready", "VM vm-2 is ready", vm_id="vm-2")
        await world.emit_event("vm_lost", "VM vm-2 is lost", vm_id="vm-2")
        await expect(rows).to_have_count(3)
        await page.wait_for_function("() => window.shown.length > 0")
        shown = await page.evaluate("window.shown.map(([title, { body }]) => `${title}, ${body}`)")
        assert shown == ["vm-2: vm lost, VM vm-2 is lost"]
