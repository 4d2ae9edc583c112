"""How soon the dashboard is of use in a real Chromium: 10,000 VMs, a job of a million steps.

    python benchmarks/dashboard.py [--json] [--vms N] [--steps N] [--rounds N]
    python benchmarks/dashboard.py --pictures docs/images

Of each page, in milliseconds from the start of its load, the median of some rounds: `usable`: its head and its tables
are there and answer; `drawn`: its charts are too. `cold` has an empty cache, `warm` has been there before. `again` is a
change from another page of the dashboard. `manager` is the longest answer of the manager to it.

With --pictures nothing is measured: the pictures of docs/dashboard.md are taken of the same pages.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [
    str(Path(__file__).resolve().parents[1] / "tests" / "support" / room) for room in ("", "managers", "simulation")
]

from PIL import Image  # noqa: E402
from playwright.async_api import Browser, Page, async_playwright  # noqa: E402

from dashboard_world import JOB, fill_fleet, fill_job  # noqa: E402
from migrated_stores import migrated  # noqa: E402
from rest_world import rest_world  # noqa: E402

PAGES = {  # what is there when it is of use, and how many charts it has
    "jobs": ("tbody tr", 0),
    "fleet": ("section:has-text('VMs') tbody tr", 1),
    f"jobs/{JOB}": (".grid td", 3),
    "events": ("tbody tr", 0),
}


async def look(page: Page, url: str, where: str, *, again: bool) -> dict[str, float]:
    selector, charts = PAGES[where]
    slowest = 0.0

    def note(response: Any) -> None:
        nonlocal slowest
        if "/api/v1/" in response.url and "/stream" not in response.url and "/logs" not in response.url:
            slowest = max(slowest, response.request.timing["responseStart"])

    page.on("response", note)
    begin = time.perf_counter()
    if again:
        await page.evaluate(f"() => {{ location.hash = '#/{where}' }}")
    else:
        await page.goto(f"{url}/#/{where}", wait_until="commit")
    await page.locator(selector).first.wait_for()
    usable = time.perf_counter() - begin
    if charts:
        await page.locator(".chart.plotted").nth(charts - 1).wait_for()
    drawn = time.perf_counter() - begin
    page.remove_listener("response", note)
    return {"usable_ms": 1000 * usable, "drawn_ms": 1000 * drawn, "manager_ms": slowest}


async def rounds(browser: Browser, url: str, count: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    found: dict[str, dict[str, list[dict[str, float]]]] = {w: {"cold": [], "warm": [], "again": []} for w in PAGES}
    for _ in range(count):
        for where in PAGES:
            context = await browser.new_context(viewport={"width": 1360, "height": 900})
            for kind in ("cold", "warm", "again"):
                page = await context.new_page()
                if kind == "again":
                    await page.goto(f"{url}/#/vms/vm-00001")
                    await page.locator("dl").wait_for()
                found[where][kind].append(await look(page, url, where, again=kind == "again"))
                await page.close()
            await context.close()
    return found


@asynccontextmanager
async def filled_dashboard(vms: int, steps: int) -> AsyncIterator[tuple[Browser, str]]:
    """A browser, and the address of a manager with so many VMs and a job of so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        migrated(Path(folder) / "manager.db")
        async with rest_world(Path(folder)) as world, async_playwright() as playwright:
            await fill_fleet(world, vms)
            await fill_job(world, steps)
            browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            yield browser, world.url
            await browser.close()


async def take_pictures(vms: int, steps: int, folder: Path) -> None:
    """The upper part of a job's page by day, and of the fleet's by night, in 128 colours."""
    async with filled_dashboard(vms, steps) as (browser, url):
        for name, where, scheme, height in (("job", f"jobs/{JOB}", "light", 1240), ("fleet", "fleet", "dark", 1400)):
            context = await browser.new_context(viewport={"width": 1360, "height": height}, color_scheme=scheme)
            page = await context.new_page()
            await look(page, url, where, again=False)
            await page.locator("#connection.good").wait_for()
            picture = Image.open(io.BytesIO(await page.screenshot(animations="disabled")))
            picture.convert("RGB").quantize(128).save(folder / f"dashboard-{name}.png", optimize=True)
            await context.close()


async def measure(vms: int, steps: int, count: int) -> dict[str, Any]:
    async with filled_dashboard(vms, steps) as (browser, url):
        found = await rounds(browser, url, count)
    medians = {
        where: {
            kind: {name: round(statistics.median(one[name] for one in many)) for name in many[0]}
            for kind, many in kinds.items()
        }
        for where, kinds in found.items()
    }
    return {"vms": vms, "steps": steps, "rounds": count, "pages": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vms", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="take the pictures of docs/dashboard.md")
    arguments = parser.parse_args()
    if arguments.pictures:
        asyncio.run(take_pictures(arguments.vms, arguments.steps, arguments.pictures))
        return
    found = asyncio.run(measure(arguments.vms, arguments.steps, arguments.rounds))
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{found['vms']:,} VMs, a job of {found['steps']:,} steps; ms, median of {found['rounds']}")
    print(f"{'page':<16}{'load':<7}{'usable':>8}{'drawn':>8}{'manager':>9}")
    for where, kinds in found["pages"].items():
        for kind, one in kinds.items():
            print(f"{where:<16}{kind:<7}{one['usable_ms']:>8}{one['drawn_ms']:>8}{one['manager_ms']:>9}")


if __name__ == "__main__":
    main()
