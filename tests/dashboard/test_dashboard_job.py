"""A job, seen through the dashboard from its submission to its cancellation, and while the manager is away."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from manager_world import all_ready
from repository import WORKERS
from restartable_manager import RestartableManager
from scripted_manager import profile_json
from varuna_client.demo.processes import DemoProcesses
from waiting import wait_until

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
WORKER = WORKERS / "counting_worker.py"
VMS = 2
NOT_YET = ("/pipeline", "/logs", "/plans/newest")
AWAY = ("ERR_CONNECTION", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE", "ERR_SOCKET")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[RestartableManager]:
    folder = tmp_path / "manager"
    folder.mkdir()
    with DemoProcesses(folder) as processes:
        manager = RestartableManager(processes, folder, "--vms", str(VMS), "--growth-settle-s", "0.5")
        manager.start()
        with manager.client() as client:
            wait_until(lambda: all_ready(client, VMS), "the VMs")
        yield manager


def part(page: Page, title: str) -> Any:
    return page.get_by_role("region", name=title, exact=True)


async def test_a_job_is_submitted_morphs_live_is_cancelled_and_stays_there_while_the_manager_is_away(
    manager: RestartableManager, tmp_path: Path, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    (tmp_path / "profile.json").write_text(profile_json())
    # Run by a shell, so that no process is warmed for it: warming would take longer than the worker itself.
    run = f"echo 'a line of the log' && exec {sys.executable} {WORKER} {tmp_path / 'profile.json'}"
    spec = {"name": "counting", "workdir": str(tmp_path), "run": run, "global_batch": 8}
    async with open_page(f"{manager.url}/", may_fail=(*NOT_YET, *AWAY, "status of 422")) as page:
        await page.get_by_role("button", name="Submit a job…").click()
        await page.get_by_label("Job document").fill(json.dumps({**spec, "global_batch": 0}))
        await page.get_by_role("button", name="Submit", exact=True).click()
        await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("global_batch")
        await page.get_by_label("Job document").fill(json.dumps(spec))
        await page.get_by_role("button", name="Submit", exact=True).click()

        await expect(page.get_by_role("heading", level=1)).to_have_text("counting")
        await expect(page.locator(".head .state")).to_contain_text("running")
        ranks = page.get_by_role("table", name="Ranks by stage and replica").locator("tbody td")
        await expect(ranks.filter(has_text="running")).to_have_count(VMS)
        await expect(ranks.filter(has_text=re.compile(r"step \d"))).to_have_count(VMS)
        throughput, steps = part(page, "Throughput"), page.locator("dt:text-is('Step') + dd")
        await expect(throughput.locator(".chart.plotted")).to_be_visible()
        log = part(page, "Logs").get_by_label("Log", exact=True)
        await expect(log).to_contain_text("a line of the log")
        before = await steps.inner_text()
        await expect(steps).not_to_have_text(before)  # live

        with manager.client() as client:
            placed = client.generations("counting")[-1]["placement"]
            client.preempt(placed[-1]["vm_id"], notice_s=0)
        await expect(throughput.locator("figcaption")).to_contain_text("→")
        morphs = await throughput.locator(".chart .annotation-text").all_text_contents()
        assert all("×" in text for text in morphs), morphs
        assert len(morphs) >= 1
        await expect(part(page, "Events")).to_contain_text("is gone")
        await expect(log).to_contain_text(re.compile(r"—— generation \d+ ——\s+a line of the log"))  # followed into it
        await part(page, "Logs").get_by_label("Search this log").fill("LINE OF")
        await part(page, "Logs").get_by_role("button", name="Search").click()
        await expect(page.get_by_label("Lines found")).to_contain_text("1: a line of the log")
        await screenshot(page, "job-running")

        await page.get_by_role("button", name="Cancel…").click()
        await page.get_by_role("button", name="Cancel the job").click()
        await expect(page.locator(".head .state")).to_contain_text("cancelled")
        await expect(page.get_by_role("button", name="Retry…")).to_be_visible()
        with manager.client() as client:
            assert client.job("counting")["state"] == "cancelled"
            newest = client.checkpoints("counting")[-1]["step"]
        await expect(part(page, "Checkpoints").locator("tbody tr").first).to_contain_text(f"{newest:,}")

        manager.kill()
        await expect(page.locator("#banner")).to_contain_text("cannot be reached")
        await expect(page.get_by_role("heading", level=1)).to_have_text("counting")
        manager.start()
        await expect(page.locator("#banner")).to_be_empty()
        await expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
