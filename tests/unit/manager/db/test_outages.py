"""The log says once that the store is away, and once that it is back."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from varuna_manager.db.engine import Database, Outage, StoreAwayError


async def test_what_began_before_an_outage_does_not_end_it(tmp_path: Path) -> None:
    outage = Outage()
    there = Database(f"sqlite:///{tmp_path / 'there.db'}", outage=outage)
    away = Database("postgresql://nobody@127.0.0.1:1/none", outage=outage)

    async def fail() -> None:
        with pytest.raises(StoreAwayError):
            async with away.read():
                pass

    with capture_logs() as log:
        async with there.read():  # its answer is on the way already
            await fail()
        await fail()
        async with there.read():
            pass
    assert [line["event"] for line in log] == ["the store is away: trying again", "the store is back"]
    await there.close()
    await away.close()
