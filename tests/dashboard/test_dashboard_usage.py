"""How busy a VM has been, on its page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from rest_world import RestWorld, vm
from varuna_manager.db.models import VmUsageRow
from varuna_manager.domain.vm_usage import UsagePoint, pack_point

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
GIB = float(1 << 30)


@pytest_asyncio.fixture(loop_scope="session")
async def world(world: RestWorld) -> RestWorld:
    await world.add(vm("vm-1"), vm("vm-2"))
    points = (
        UsagePoint(
            at=1_795_000_000.0 + 15 * number,
            cpu_share=0.4 + 0.3 * (number % 5) / 5,
            memory_used_bytes=(20 + number / 20) * GIB,
            memory_bytes=64 * GIB,
            received_bytes_per_s=2e8 if number % 7 else 1e7,
            sent_bytes_per_s=1.5e8,
            gpu_share=0.93 if number % 11 else 0.2,
            gpu_memory_used_bytes=70 * GIB,
            gpu_memory_bytes=80 * GIB,
        )
        for number in range(200)
    )
    await world.add(VmUsageRow(vm_id="vm-1", points=b"".join(map(pack_point, points))))
    return world


async def test_a_vm_shows_how_busy_it_has_been(
    world: RestWorld, open_page: Any, screenshot: Callable[[Page, str], Any]
) -> None:
    async with open_page(f"{world.url}/#/vms/vm-1") as page:
        await expect(page.locator(".chart.plotted")).to_have_count(5)
        words = page.locator("figcaption")
        await expect(words.nth(0)).to_have_text("Newest: busy 64 %.")
        await expect(words.nth(1)).to_have_text("Newest: used 30.0 GiB of 64.0 GiB.")
        await expect(words.nth(2)).to_contain_text("received 191 MiB/s, sent 143 MiB/s")
        await expect(words.nth(3)).to_have_text("Newest: busy 93 %.")
        await screenshot(page, "vm-usage")
        await page.goto(f"{world.url}/#/vms/vm-2")
        await expect(page.get_by_text("Nothing measured yet")).to_have_count(3)
        await expect(page.get_by_role("region", name="GPUs", exact=True)).to_have_count(0)
