"""What the dashboard shows while a request waits, after it failed and where nothing is, and what its badge says."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from dashboard_world import JOB, SHAPES, fill_job
from rest_world import RestWorld, vm, worker
from varuna_manager.db.models import JobRow

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
MAY_FAIL = ("/logs", "status of 503", "ERR_FAILED")


@pytest_asyncio.fixture(loop_scope="session")
async def world(world: RestWorld) -> RestWorld:
    await fill_job(world, 600)
    await world.add(*(vm(f"vm-{number:05}") for number in range(1, 13)))
    return world


def region(page: Page, title: str) -> Any:
    return page.get_by_role("region", name=title, exact=True)


async def refuse(route: Route) -> None:
    await route.fulfill(status=503, content_type="application/problem+json", body='{"detail": "the store is away"}')


def badge(page: Page) -> Any:
    return page.locator("#connection")


async def test_a_panel_whose_request_failed_says_so_and_tries_again(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    async with open_page("about:blank", may_fail=MAY_FAIL, leads_to=world.url) as page:
        await page.route("**/api/v1/jobs/*/time", refuse)
        await page.goto(f"{world.url}/#/jobs/{JOB}")
        panel = region(page, "Where the time went")
        await expect(panel.get_by_role("status")).to_contain_text("Not loaded: the store is away. Trying again in")
        await expect(panel.get_by_role("table")).to_have_count(0)  # a failure does not look like an empty panel
        await expect(badge(page)).to_have_text(re.compile("1 panel is not current"))
        await expect(region(page, "Checkpoints").get_by_role("table")).to_be_visible()  # the others are there
        await screenshot(page, "job-panel-failed")
        await page.unroute("**/api/v1/jobs/*/time")
        await expect(panel.get_by_role("table")).to_be_visible()  # by itself
        await expect(panel.locator(".panel-state")).to_be_empty()
        await expect(badge(page)).to_have_text(re.compile("live"))


async def test_a_panel_keeps_what_it_shows_and_says_that_it_is_old(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/fleet", may_fail=MAY_FAIL) as page:
        rows = region(page, "VMs").locator("tbody tr")
        await expect(rows).to_have_count(12)
        await page.route("**/api/v1/fleet/overview*", lambda route: route.abort())
        await world.emit_event("vm_ready", "VM vm-00013 is ready", vm_id="vm-00013")
        old = page.get_by_text("Not current, shown as of")
        await expect(old).to_have_count(1)
        await expect(rows).to_have_count(12)
        await expect(badge(page)).not_to_contain_text("live")
        await page.get_by_role("button", name="Try now").click()  # in vain
        await page.unroute("**/api/v1/fleet/overview*")
        await expect(old).to_have_count(0)
        await expect(badge(page)).to_contain_text("live")


async def test_loading_does_not_look_like_empty(world: RestWorld, open_page: Any) -> None:
    released = asyncio.Event()

    async def hold(route: Route) -> None:
        await released.wait()
        await route.continue_()

    async with open_page("about:blank", may_fail=MAY_FAIL, leads_to=world.url) as page:
        await page.route("**/api/v1/fleet/overview*", hold)
        await page.goto(f"{world.url}/#/fleet")
        panel = region(page, "Quarantines")
        await expect(panel).to_contain_text("Loading…")
        await expect(panel.get_by_text("No VM is quarantined.")).to_be_hidden()
        released.set()
        await expect(panel.get_by_text("No VM is quarantined.")).to_be_visible()
        await expect(panel).not_to_contain_text("Loading…")


async def test_charts_come_once_their_library_does(world: RestWorld, open_page: Any) -> None:
    async with open_page("about:blank", may_fail=MAY_FAIL, leads_to=world.url) as page:
        await page.route("**/static/plotly.min.js", lambda route: route.abort())
        await page.goto(f"{world.url}/#/jobs/{JOB}")
        for title in ("Throughput", "Loss", "Step time", "Pipeline"):
            await expect(region(page, title)).to_contain_text("the chart library could not be fetched")
            await expect(region(page, title).locator("figcaption")).not_to_be_empty()
        await page.unroute("**/static/plotly.min.js")
        await expect(page.locator(".chart.plotted")).to_have_count(4)
        await expect(page.get_by_text("could not be fetched")).to_have_count(0)


async def test_tiles_chips_and_rows_come_from_one_answer(world: RestWorld, open_page: Any) -> None:
    asked: list[str] = []
    async with open_page("about:blank", may_fail=MAY_FAIL, leads_to=world.url) as page:
        page.on("request", lambda request: asked.append(request.url.partition("/api/v1/")[2].partition("?")[0]))
        await page.goto(f"{world.url}/#/fleet")
        await expect(region(page, "VMs").locator("tbody tr")).to_have_count(12)
        await expect(page.locator("dt:text-is('VMs') + dd")).to_have_text("12")
        await expect(page.get_by_role("button", name="ready")).to_have_text(re.compile("12"))
        assert not {"vms", "vms/summary", "fleet"} & set(asked)
        await page.goto(f"{world.url}/#/jobs/{JOB}")
        await expect(page.get_by_role("table", name="Ranks by stage and replica")).to_be_visible()
        assert not {"vms", f"jobs/{JOB}"} & set(asked)


async def test_a_filter_can_be_lifted_when_no_vm_is_left_in_it(world: RestWorld, open_page: Any) -> None:
    await world.add(vm("vm-00099", state="requested"))
    async with open_page(f"{world.url}/#/fleet", may_fail=MAY_FAIL) as page:
        rows = region(page, "VMs").locator("tbody tr")
        chip = page.get_by_role("button", name="requested")
        await chip.click()
        await expect(rows).to_have_count(1)
        await world.change_vm("vm-00099", state="ready")
        await world.emit_event("vm_ready", vm_id="vm-00099")
        await expect(chip).to_have_text(re.compile("0"))
        await chip.click()
        await expect(rows).to_have_count(13)
        await expect(chip).to_have_count(0)


async def test_what_more_has_brought_stays_when_a_job_changes(world: RestWorld, open_page: Any) -> None:
    now = time.time()
    await world.add(
        *(
            JobRow(id=f"old-{number}", name=f"old-{number}", state="succeeded", history=[], created_at=now - number,
                   spec={"name": f"old-{number}", "workdir": "/srv", "run": "true", "global_batch": 8})
            for number in range(150)
        )
    )  # fmt: skip
    async with open_page(f"{world.url}/#/jobs", may_fail=MAY_FAIL) as page:
        rows = region(page, "All jobs").locator("tbody tr")
        more = page.get_by_role("button", name="More")
        await expect(rows).to_have_count(100)
        await more.click()
        await expect(rows).to_have_count(151)
        await expect(more).to_be_hidden()
        await world.change(JOB, reason="it has another shape")
        await world.emit_event("job_morphed", job_id=JOB)
        await expect(rows.last).to_contain_text("it has another shape")
        await expect(rows).to_have_count(151)
        await page.get_by_label("Name contains").fill("old-1")
        await expect(rows).to_have_count(61)


async def test_the_drain_of_a_vm_says_what_runs_there_by_now(world: RestWorld, open_page: Any) -> None:
    await world.add(vm("vm-00099"))
    async with open_page(f"{world.url}/#/vms/vm-00099", may_fail=MAY_FAIL) as page:
        await expect(page.get_by_text("No worker runs there.")).to_be_visible()
        await world.add(worker(JOB, len(SHAPES) + 1, 12, "vm-00099", "running"))
        await world.emit_event("worker_started", vm_id="vm-00099")
        await expect(region(page, "Workers").get_by_role("link", name="gpt-2b")).to_be_visible()
        await page.get_by_role("button", name="Drain…").click()
        await expect(page.get_by_role("dialog")).to_contain_text("Its workers leave after a checkpoint")


async def test_jobs_have_names_and_times_their_date_and_zone(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/fleet", may_fail=MAY_FAIL) as page:
        await expect(region(page, "VMs").get_by_role("link", name="gpt-2b").first).to_be_visible()
        await page.goto(f"{world.url}/#/vms/vm-00012")
        await expect(region(page, "Workers").get_by_role("link", name="gpt-2b").first).to_be_visible()
        await page.goto(f"{world.url}/#/events")
        row = page.get_by_role("row").filter(has_text="job morphed").first
        await expect(row.get_by_role("link", name="gpt-2b")).to_be_visible()
        moment = row.locator("time")
        await expect(moment).to_have_attribute("title", re.compile(r"^\w+, \d+ \w+ 20\d\d at \d\d:\d\d:\d\d \S+$"))


async def test_events_are_searched_and_coloured_by_how_bad_they_are(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    for number in range(40):
        await world.emit_event("vm_ready", f"VM vm-{number} is ready")
    await world.emit_event("vm_lost", "VM vm-00003 is lost: silent for 10 s", vm_id="vm-00003")
    await world.emit_event("preemption_notice", "30 s are left", vm_id="vm-00004")
    async with open_page(f"{world.url}/#/events", may_fail=MAY_FAIL) as page:
        rows = region(page, "All events").locator("tbody tr")
        await expect(rows).not_to_have_count(0)
        await expect(rows.filter(has_text="is lost")).to_have_class("row-bad")
        await expect(rows.filter(has_text="30 s are left")).to_have_class("row-warn")
        is_whole = "it => it.scrollHeight <= it.clientHeight"
        assert await region(page, "All events").locator(".scroll").evaluate(is_whole)
        await screenshot(page, "events-severity")
        await page.get_by_label("Text contains").fill("SILENT for")
        await expect(rows).to_have_count(1)
        await world.emit_event("vm_lost", "VM vm-00005 is lost: silent for 11 s", vm_id="vm-00005")
        await world.emit_event("vm_ready", "VM vm-00006 is ready", vm_id="vm-00006")
        await expect(rows).to_have_count(2)  # live, and only what matches


async def test_on_a_phone_no_text_is_squeezed_into_a_narrow_column(world: RestWorld, open_page: Any) -> None:
    await world.emit_event("decision", "why nothing is done: " + "a plan that is not worth its morph, " * 8, job_id=JOB)
    lines = "all => Math.max(...all.map(it => it.clientHeight / parseFloat(getComputedStyle(it).lineHeight)))"
    async with open_page(f"{world.url}/#/jobs/{JOB}", may_fail=MAY_FAIL) as page:
        await page.set_viewport_size({"width": 390, "height": 844})
        for title in ("Events", "Generations", "Plan candidates", "Where the time went"):
            texts = region(page, title).locator("td.wide .clamp:visible")
            await expect(texts).not_to_have_count(0)
            assert await texts.evaluate_all(lines) < 5, title
        await region(page, "Events").get_by_label("routine ones too").check()
        long = region(page, "Events").locator(".clamp").filter(has_text="why nothing is done")
        cut = await long.evaluate("it => it.clientHeight")
        await long.click()
        assert await long.evaluate("it => it.clientHeight") > cut  # a touch shows the rest
