"""How long a generation's steps take, by what the manager's store has of it."""

from __future__ import annotations

import pytest

from varuna_manager.world.facts import GenerationProgress


def progress(**changes: float | None) -> GenerationProgress:
    first = GenerationProgress(
        last_step=8, last_step_at=130.0, resumed_step=5, started_at=100.0, not_finite_from=None, steps_skipped=0
    )
    return first._replace(**changes)


def test_the_mean_is_from_the_first_step_to_the_last() -> None:
    """Step 6 was done at 100 s, steps 7 and 8 by 130 s."""
    assert progress().mean_step_s == pytest.approx(15.0)
    assert progress(resumed_step=None, last_step=4).mean_step_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    "unknown", [{"last_step": None}, {"last_step": 6}, {"started_at": None}, {"last_step_at": None}]
)
def test_one_step_says_nothing(unknown: dict[str, float | None]) -> None:
    assert progress(**unknown).mean_step_s is None
