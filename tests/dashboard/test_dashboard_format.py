"""Numbers, times and sizes as the dashboard writes them."""

from __future__ import annotations

from typing import Any

import pytest

from rest_world import RestWorld

pytestmark = [
    pytest.mark.xdist_group("dashboard"),
    pytest.mark.needs("chromium"),
    pytest.mark.asyncio(loop_scope="session"),
]
MIB = 2**20
WRITE = """async ([name, values]) => {
    const format = await import("/js/format.js");
    return values.map((value) => format[name](value));
}"""


async def written(world: RestWorld, open_page: Any, name: str, values: list[float]) -> dict[float, str]:
    """What the function of that name in format.js makes of each value."""
    async with open_page(f"{world.url}/#/compare") as page:
        return dict(zip(values, await page.evaluate(WRITE, [name, values]), strict=True))


async def test_a_size_has_no_exponent_and_no_1024_of_a_unit(world: RestWorld, open_page: Any) -> None:
    wanted = {
        0: "0 B",
        999: "999 B",
        1023: "1023 B",
        1024: "1.00 KiB",
        999.4 * MIB: "999 MiB",
        1010 * MIB: "1010 MiB",
        1023.4 * MIB: "1023 MiB",
        1023.6 * MIB: "1.00 GiB",
        24_800_000_000: "23.1 GiB",
    }
    assert await written(world, open_page, "bytes", list(wanted)) == wanted


async def test_a_time_has_no_exponent_and_no_sixty_of_a_smaller_unit(world: RestWorld, open_page: Any) -> None:
    wanted = {
        0.0004: "400 µs",
        0.0009996: "1.00 ms",
        0.0419: "41.9 ms",
        0.9994: "999 ms",
        0.9996: "1.00 s",
        59.94: "59.9 s",
        59.97: "1 min 0 s",
        119.4: "1 min 59 s",
        119.7: "2 min 0 s",
        3599.7: "1 h 0 min",
        7169: "1 h 59 min",
        7190: "2 h 0 min",
        86_390: "1 d 0 h",
        86_400 + 23.4 * 3600: "1 d 23 h",
        86_400 + 23.6 * 3600: "2 d 0 h",
    }
    assert await written(world, open_page, "seconds", list(wanted)) == wanted


async def test_money_is_rounded_before_its_digits_are_chosen(world: RestWorld, open_page: Any) -> None:
    wanted = {0.62: "0.620", 0.9996: "1.00", 12.3: "12.30", 999.99: "999.99", 999.996: "1,000", 1234.5: "1,235"}
    assert await written(world, open_page, "money", list(wanted)) == wanted
