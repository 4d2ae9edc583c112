"""The charts of a job's steps: their axes, smoothing, file, and several jobs in one chart."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from dashboard_world import JOB, SHAPES, fill_job
from rest_world import SPEC, RestWorld, generation, report, worker
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
MAY_FAIL = ("/logs", "/pipeline")
STEPS = 600


@pytest_asyncio.fixture(loop_scope="session")
async def world(world: RestWorld) -> RestWorld:
    await fill_job(world, STEPS)
    return world


def region(page: Page, title: str) -> Any:
    return page.get_by_role("region", name=title, exact=True)


def of_chart(expression: str) -> str:
    """JavaScript that evaluates the expression where `chart` is drawn by plotly, once it is."""
    return f"(it) => {{ const chart = it.querySelector('.chart.plotted'); return Boolean(chart) && ({expression}); }}"


async def wait_for_chart(page: Page, title: str, expression: str) -> None:
    handle = await region(page, title).element_handle()
    await page.wait_for_function(of_chart(expression), arg=handle)


async def test_the_axes_are_the_readers_and_the_figures_a_file(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any], tmp_path: Path
) -> None:
    async with open_page(f"{world.url}/#/jobs/{JOB}", may_fail=MAY_FAIL) as page:
        await wait_for_chart(page, "Loss", "chart.layout.xaxis.type !== 'date' && chart.layout.yaxis.type !== 'log'")
        await wait_for_chart(page, "Throughput", "chart.layout.xaxis.type === 'date'")
        await page.get_by_label("x-axis").select_option("time")
        await wait_for_chart(page, "Loss", "chart.layout.xaxis.type === 'date'")
        await page.get_by_label("x-axis").select_option("step")
        await wait_for_chart(page, "Throughput", "chart.layout.xaxis.type !== 'date'")
        await page.get_by_label("log scale").check()
        await wait_for_chart(page, "Loss", "chart.layout.yaxis.type === 'log'")
        raw = "chart.data.at(-1).y.filter((one, index, all) => index && one < all[index - 1]).length"
        before = await (await region(page, "Loss").element_handle()).evaluate(of_chart(raw))
        await page.get_by_label("smoothing").fill("0.9")
        await wait_for_chart(page, "Loss", "chart.data.length === 2")
        after = await (await region(page, "Loss").element_handle()).evaluate(of_chart(raw))
        assert after > before  # it falls more steadily
        await screenshot(page, "job-smoothed")
        async with page.expect_download() as download:
            await page.get_by_role("button", name="CSV").click()
        file = await download.value
        assert file.suggested_filename == "gpt-2b-steps.csv"
        await file.save_as(tmp_path / "steps.csv")
        rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
        assert (len(rows), rows[-1]["job"], rows[-1]["last_step"]) == (STEPS, "gpt-2b", str(STEPS))
        assert float(rows[0]["loss"]) > float(rows[-1]["loss"]) > 0


async def test_jobs_are_compared_in_one_chart(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    other = (await world.ask("POST", "/api/v1/jobs", json={**SPEC, "name": "other"})).json()["id"]
    await world.add(
        generation(other, 1, 1000.0, state="running", resumed_step=0), worker(other, 1, 0, "vm-1", "running")
    )
    await world.reports.apply_reports("vm-1", [report(other, 1, range(1, 101), 3.0)])
    async with open_page(f"{world.url}/#/jobs", may_fail=MAY_FAIL) as page:
        await expect(page.get_by_role("button", name="Compare")).to_be_disabled()
        await page.get_by_label("Compare gpt-2b").check()
        await page.get_by_label("Compare other").check()
        await page.get_by_role("button", name="Compare 2").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Compare jobs")
        names = "chart.data.map((one) => one.name).join() === 'gpt-2b,other'"
        for title in ("Loss", "Throughput"):
            await wait_for_chart(page, title, names)
        await expect(region(page, "Loss").locator("figcaption")).to_contain_text(re.compile("gpt-2b: .* other: "))
        await screenshot(page, "compare")


async def test_a_first_step_which_nothing_precedes_is_in_no_chart_of_times(world: RestWorld, open_page: Any) -> None:
    other = (await world.ask("POST", "/api/v1/jobs", json={**SPEC, "name": "other"})).json()["id"]
    await world.add(
        generation(other, 1, 1000.0, state="running", resumed_step=0), worker(other, 1, 0, "vm-1", "running")
    )
    await world.reports.apply_reports("vm-1", [report(other, 1, range(1, 11), 3.0)])
    async with open_page(f"{world.url}/#/jobs/{other}", may_fail=MAY_FAIL) as page:
        for title, first in (("Loss", 1), ("Throughput", 2), ("Step time", 2)):
            await expect(region(page, title).locator("figcaption")).to_contain_text(f"at step {first} to")
        # All came with one report; each has its own place in time.
        await wait_for_chart(
            page, "Throughput", "new Set(chart.data[0].x.map((at) => Number(new Date(at)))).size === 9"
        )


async def test_a_job_that_calibrates_shows_that_it_has_no_step_and_no_plan(world: RestWorld, open_page: Any) -> None:
    other = (await world.ask("POST", "/api/v1/jobs", json={**SPEC, "name": "other"})).json()["id"]
    plan = Plan(p=1, d=1, micro_batch=1, global_batch=8).to_document()
    about = {"kind": "calibration", "state": "running", "plan": plan, "candidates": []}
    await world.add(generation(other, 1, 1000.0, **about), worker(other, 1, 0, "vm-1", "running"))
    async with open_page(f"{world.url}/#/jobs/{other}", may_fail=(*MAY_FAIL, "/plans")) as page:
        await wait_for_chart(page, "Loss", "chart.layout.xaxis.visible === false")
        await expect(region(page, "Placement").locator("thead")).to_have_text("stage 0all sections")
        await expect(region(page, "Plan candidates").locator("p.empty:visible")).to_have_text("No plan yet.")


async def log_values(world: RestWorld, name: str, values: dict[int, float]) -> None:
    newest = len(SHAPES) + 1
    logged = [pb.LoggedValue(name=name, step=step, value=value, rank=0) for step, value in values.items()]
    fact = pb.ValuesLogged(job_id=JOB, generation=newest, values=logged)
    await world.reports.apply_reports("vm-00001", [pb.Report(number=1, values_logged=fact)])


@pytest.mark.slow
async def test_what_the_script_logs_has_charts_of_its_own(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any], tmp_path: Path
) -> None:
    await log_values(world, "accuracy", {step: step / 1000 for step in range(510, STEPS + 1, 10)})
    await log_values(world, "loss", {STEPS: 7.0})
    async with open_page(f"{world.url}/#/jobs/{JOB}", may_fail=MAY_FAIL) as page:
        await wait_for_chart(page, "accuracy", "chart.data.at(-1).y.length === 10 && chart.data.at(-1).y[9] === 0.6")
        await expect(region(page, "accuracy").locator("figcaption")).to_contain_text("From 0.51 at step 510 to 0.6")
        await wait_for_chart(page, "loss (script)", "chart.data.at(-1).y.join() === '7'")
        await wait_for_chart(page, "Loss", "!chart.data.some((one) => one.y.includes(7))")
        await log_values(world, "accuracy", {STEPS + 10: 0.75})
        await wait_for_chart(page, "accuracy", "chart.data.at(-1).y.length === 11 && chart.data.at(-1).y[10] === 0.75")
        await screenshot(page, "job-logged-values")
        async with page.expect_download() as download:
            await page.get_by_role("button", name="CSV").click()
        await (await download.value).save_as(tmp_path / "steps.csv")
        rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
        assert [float(row["accuracy"]) for row in rows if row["accuracy"]][-2:] == [0.6, 0.75]
