"""10,000 VMs and a job of a million steps; every page by keyboard, on a phone, in the dark, and to a screen reader."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, ViewportSize, expect

from dashboard_world import JOB, SHAPES, fill_fleet, fill_job
from migrated_stores import migrated
from rest_world import RestWorld, generation, rest_world
from varuna_manager.api.http.app import make_app
from varuna_manager.api.http.roles import StandbyApp
from varuna_manager.world.leadership import Leader, Standing
from waiting import DEADLINE_S

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
VMS, STEPS = 10_000, 1_000_000
NO_AGENTS = ("/logs",)  # nobody has the logs of this world's workers
PAGES = ["jobs", "fleet", "events", f"jobs/{JOB}", "vms/vm-00007"]
RICHEST = ["fleet", f"jobs/{JOB}"]
"""The pages with charts and tables of all kinds."""
DESK, PHONE = ViewportSize(width=1360, height=900), ViewportSize(width=390, height=844)
NOTHING_IS_WIDER = "() => document.documentElement.scrollWidth <= innerWidth"
CHARTS_HAVE_ROOM = """() => [...document.querySelectorAll("figure")].every((figure) => {
    const plot = figure.querySelector(".main-svg"), words = figure.querySelector("figcaption");
    return !plot || plot.getBoundingClientRect().bottom <= words.getBoundingClientRect().top + 1;
})"""
EVIL = "<img src=x onerror=alert(1)> of <b>vm</b>"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestWorld]:
    folder: Path = tmp_path_factory.mktemp("dashboard")
    migrated(folder / "manager.db")
    async with rest_world(folder) as world:
        await fill_fleet(world, VMS)
        await fill_job(world, STEPS)
        yield world


async def settled(page: Page, where: str) -> None:
    """Waits until the page has drawn everything."""
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    charts = {"jobs/": 4, "fleet": 1, "vms/v": 3}.get(where[:5], 0)
    await expect(page.locator(".chart.plotted")).to_have_count(charts)


@pytest.mark.slow
async def test_a_fleet_of_ten_thousand_is_counted_paged_and_searched(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/fleet") as page:
        await expect(page.locator("dt:text-is('VMs') + dd")).to_have_text("10,000")
        rows = page.get_by_role("region", name="VMs", exact=True).locator("tbody tr")
        await expect(rows).to_have_count(100)
        await page.get_by_role("button", name="Next").click()
        await expect(page.get_by_text("101–200")).to_be_visible()
        await page.get_by_role("button", name="lost").click()
        await expect(page.get_by_text("1–78")).to_be_visible()
        await expect(rows).to_have_count(78)
        await page.get_by_role("button", name="lost").click()
        await page.get_by_label("Id or host contains").fill("vm-04999")
        await expect(rows).to_have_count(1)
        quarantines = page.get_by_role("table", name="Quarantined VMs")
        await expect(quarantines.locator("tbody tr").first).to_contain_text("its 3 peers")
        await page.get_by_text("As a table", exact=True).click()
        await expect(page.get_by_role("table", name="VMs over time, as a table")).to_be_visible()


@pytest.mark.slow
async def test_a_job_of_a_million_steps_is_drawn_with_its_morphs(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/jobs/{JOB}", may_fail=NO_AGENTS) as page:
        await settled(page, f"jobs/{JOB}")
        throughput = page.get_by_role("region", name="Throughput", exact=True)
        labels = await throughput.locator(".annotation-text").all_text_contents()
        assert sorted(labels) == sorted(f"{p}×{d}" for p, d in SHAPES)
        points = await page.evaluate(
            "() => Math.max(...[...document.querySelectorAll('.chart')]"
            ".flatMap(chart => chart.data.map(trace => trace.x?.length ?? 0)))"
        )
        assert 500 <= points <= 2000
        await expect(page.get_by_role("region", name="Plan candidates")).to_contain_text("needs 33.9 GiB of 15.8 GiB")
        await expect(page.get_by_role("region", name="Pipeline", exact=True)).to_contain_text("6×2, replica 0")
        await expect(page.locator(".grid td.warn")).to_contain_text("quarantined")
        rows = page.get_by_role("region", name="Generations", exact=True).locator("tbody tr")
        await expect(rows.filter(has_text="(in place, 8 of 24 micro-batches run again)")).to_have_count(1)


@asynccontextmanager
async def standby(world: RestWorld) -> AsyncIterator[str]:
    """The address of a manager beside the one of the world, which leads."""
    leader = Leader(holder="first", http_url=world.url, grpc_address="127.0.0.1:1", epoch=1)
    app = StandbyApp(make_app(world.services), Standing(leader=leader))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


async def test_a_standby_shows_what_there_is_and_where_the_leader_is(world: RestWorld, open_page: Any) -> None:
    async with (
        standby(world) as url,
        open_page(f"{url}/#/vms/vm-00007", may_fail=("status of 503",), leads_to=world.url) as page,
    ):
        banner = page.locator("#banner")
        await expect(banner).to_contain_text(f"this manager does not lead: the leader is {world.url} ")
        await expect(page.get_by_role("status").filter(has_text="stands by")).to_be_visible()
        await expect(page.get_by_role("heading", level=1)).to_have_text("vm-00007")
        await expect(page.locator(".head")).to_contain_text("quarantined")
        await page.get_by_role("button", name="Drain…").click()
        await page.get_by_role("button", name="Drain the VM").click()
        await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("does not lead")
        await page.keyboard.press("Escape")
        await banner.get_by_role("link", name="Go to the leader").click()
        await expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        await expect(banner).to_be_empty()
        await expect(page.get_by_role("heading", level=1)).to_have_text("vm-00007")  # the same page
        assert page.url == f"{world.url}/#/vms/vm-00007"


@pytest.mark.slow
async def test_generations_come_page_by_page_and_older_ones_once(tmp_path: Path, open_page: Any) -> None:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as small:
        await fill_job(small, 600)
        newest, many = len(SHAPES) + 1, 250
        await small.add(*(generation(JOB, number, 1000.0 + number) for number in range(newest + 1, many + 1)))
        asked: list[str] = []
        async with open_page("about:blank", may_fail=NO_AGENTS, leads_to=small.url) as page:
            page.on("request", lambda request: asked.append(request.url) if "/generations?" in request.url else None)
            await page.goto(f"{small.url}/#/jobs/{JOB}")
            part = page.get_by_role("region", name="Generations", exact=True)
            await expect(part.locator("header")).to_contain_text(f"{many - 2} morphs")
            rows = part.locator("tbody tr")
            await expect(rows).to_have_count(200)  # what it shows of them
            assert all("limit=50" in url for url in asked)
            assert {"cursor=" in url for url in asked} == {False, True}
            asked.clear()
            await small.add(generation(JOB, many + 1, 2000.0))
            await small.emit_event("generation_started", "test", job_id=JOB, generation=many + 1)
            await expect(rows.first.locator("td").first).to_have_text(str(many + 1))
            assert not [url for url in asked if "cursor=" in url], "the older ones are known"


async def test_an_event_is_seen_as_it_happens_and_as_text(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/events") as page:
        await expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        rows = page.get_by_role("region", name="All events").locator("tbody tr")
        await expect(rows).not_to_have_count(0)
        await world.emit_event("vm_lost", EVIL, vm_id="vm-00001")
        await expect(rows.first).to_contain_text(EVIL)
        assert await page.locator("main img").count() == 0
        count = await rows.count()
        await page.get_by_role("button", name="Older").click()
        await expect(rows.nth(count + 10)).to_be_visible()


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=() if where in RICHEST else pytest.mark.slow) for where in PAGES]
)
async def test_pages_have_no_barriers(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any], where: str
) -> None:
    """By axe-core, light and dark; on a phone nothing is wider than the screen."""
    name = f"{where.partition('/')[0]}{'-one' if '/' in where else ''}"
    async with open_page(f"{world.url}/#/{where}", may_fail=NO_AGENTS) as page:
        if where == "fleet":  # a few rows stand for all
            await page.get_by_label("Id or host contains").fill("vm-0000")
            await expect(page.get_by_role("table", name="VMs", exact=True).locator("tbody tr")).to_have_count(10)
        for look in ("light", "dark", "phone"):
            await page.emulate_media(color_scheme="dark" if look == "dark" else "light")
            await page.set_viewport_size(PHONE if look == "phone" else DESK)
            await settled(page, where)
            # A chart takes its new width some moments after the window.
            for fits in (NOTHING_IS_WIDER, CHARTS_HAVE_ROOM):
                await page.wait_for_function(fits, timeout=1000 * DEADLINE_S)
            await screenshot(page, f"{name}-{look}")
            if look == "phone":
                break
            # What is inside a chart is one image to a screen reader.
            only = {"runOnly": ["color-contrast"]} if look == "dark" else {"resultTypes": ["violations"]}
            found = await Axe().run(page, context={"exclude": [".chart"]}, options=only)
            assert found.violations_count == 0, f"{look}: {found.generate_report()}"


async def test_the_keyboard_is_enough(world: RestWorld, open_page: Any) -> None:
    async with open_page(f"{world.url}/#/jobs") as page:
        await expect(page.get_by_role("link", name="gpt-2b")).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        for _ in range(12):
            await page.keyboard.press("Tab")
            if await page.get_by_role("button", name="Submit a job…").evaluate("it => it === document.activeElement"):
                break
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await page.get_by_role("link", name="gpt-2b").focus()
        outline = await page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
