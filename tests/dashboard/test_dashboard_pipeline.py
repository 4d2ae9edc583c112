"""The pipeline chart of a job that real workers train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from restartable_manager import RestartableManager
from small_training import SmallTraining
from varuna_client.demo.processes import DemoProcesses

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_the_pipeline_of_real_workers_is_drawn(
    tmp_path: Path, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    """Each stage does every micro-batch, forward and then backward."""
    folder = tmp_path / "managers"
    folder.mkdir()
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, folder, "--vms", "2")
        training = SmallTraining([manager], folder / "vms", tmp_path / "work")
        manager.start()
        training.begin()
        await look_at_its_pipeline(manager.url, open_page, screenshot)
        training.end()


async def look_at_its_pipeline(url: str, open_page: Any, screenshot: Callable[[Page, str], Any]) -> None:
    async with open_page(f"{url}/#/jobs") as page:
        await page.get_by_role("link", name="small").click()
        pipeline = page.get_by_role("region", name="Pipeline", exact=True)
        await expect(pipeline.locator(".chart.plotted")).to_be_visible()
        await expect(pipeline.locator("header")).to_contain_text("of generation 2, 2×1, replica 0")
        drawn = await pipeline.locator(".chart").evaluate(
            "chart => Object.fromEntries(chart.data.map(ops => [ops.name, ops.y.map((stage, i) =>"
            " [stage, ops.text[i], ops.base[i], ops.base[i] + ops.x[i]])]))"
        )
        forward = {(stage, int(op[1:])): end for stage, op, _, end in drawn["forward"]}
        backward = {(stage, int(op[1:])): begin for stage, op, begin, _ in drawn["backward"]}
        assert set(forward) == {(f"stage {s}", batch) for s in range(2) for batch in range(4)} == set(backward)
        assert all(end <= backward[which] for which, end in forward.items())
        await pipeline.locator("summary").click()
        rows = pipeline.get_by_role("table").locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("local-")
        await screenshot(page, "job-real-workers")
