"""Jobs go on in place, or take the state from processes that left, while everything is lost in any phase of that.

The manager, its store and the agents' states are real (`fleet_world`), with the invariants of `fleet_invariants` after
every commit: no second process for a rank, the right stages in the right places, no holder ended before its state is
taken, no process that nobody knows. VARUNA_FLEET_TRACES: the number of traces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disturbed_fleet import reshaped

FIRST = 5
"""It goes on in place and takes the state from processes, and its manager dies several times."""
SEEDS = range(FIRST, FIRST + int(os.environ.get("VARUNA_FLEET_TRACES", "1")))


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_job_comes_to_its_end_whatever_is_lost_in_its_reshapes(seed: int, tmp_path: Path) -> None:
    print(await reshaped(tmp_path, seed))
