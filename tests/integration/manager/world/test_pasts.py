"""What a job's past morphs took, as its next decisions know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stored_job import STEP_S, make_generation, store_job
from varuna_manager.world.pasts import read_past


@pytest.mark.parametrize(
    ("redone", "left", "slower", "first_step_s"),
    [
        pytest.param(0, 4, None, STEP_S, id="between two steps"),
        pytest.param(1, 1, None, STEP_S / 4, id="after a loss"),
        pytest.param(0, 3, None, STEP_S * 3 / 4, id="within a step"),
        pytest.param(None, None, None, STEP_S, id="not known"),
        pytest.param(0, 3, 2.0, 2 * STEP_S * 3 / 4, id="steps take twice as long as predicted"),
    ],
)
async def test_the_first_step_is_no_part_of_what_a_morph_took(
    redone: int | None, left: int | None, slower: float | None, first_step_s: float, tmp_path: Path
) -> None:
    """Two seconds until all were ready, one of them until the generation before had ended."""
    database = await store_job(tmp_path)
    async with database.write() as session:
        before = make_generation(1, created_at=0.0, last_step_at=999.0, stop_requested_at=999.0, ended_at=1000.0)
        after = make_generation(
            2,
            created_at=1000.0,
            started_at=1001.0 + first_step_s,
            ended_at=2000.0,
            resumed_step=5,
            micro_batches_redone=redone,
            micro_batches_left=left,
            last_step=6 if slower is None else 8,
            last_step_at=1001.0 + first_step_s + (0.0 if slower is None else 2 * slower * STEP_S),
        )
        session.add_all([before, after])
    async with database.read() as session:
        newest = (await read_past(session, "j", None)).shapes[0]
    await database.close()
    assert newest.morph_s == pytest.approx(2.0)
