"""Where a job's time went: every second has one cause, and what the script did between steps has its own."""

from __future__ import annotations

import pytest

from varuna_manager.domain.accounting import BETWEEN_STEPS, GenerationTimes, TimeOfGeneration, account_time
from varuna_manager.domain.states import GenerationKind


def train(steps: int, redone: int = 0, bubble_share: float = 0.0, **between_s: float) -> TimeOfGeneration:
    """100 s from the first step to the last one."""
    past = GenerationTimes(
        number=1,
        kind=GenerationKind.TRAINING,
        created_at=0.0,
        first_step_at=10.0,
        last_step_at=110.0,
        ended_at=115.0,
        steps=steps,
        redone=redone,
        bubble_share=bubble_share,
        between_s=between_s,
    )
    found = account_time(0.0, 115.0, [past])
    (spent,) = found.generations
    parts = [spent.morph_s, spent.redone_s, spent.bubbles_s, spent.training_s]
    parts += [found.sum_between_steps(cause) for cause in BETWEEN_STEPS]
    assert sum(parts) == pytest.approx(115.0)
    assert min(parts) >= 0.0
    return spent


def test_a_script_that_sleeps_between_its_steps_is_no_bubble() -> None:
    spent = train(101, bubble_share=0.25, script=70.0, evaluation=10.0)
    assert dict(spent.between_s) == {"script": 70.0, "evaluation": 10.0}
    assert (spent.bubbles_s, spent.training_s) == pytest.approx((5.0, 15.0))


def test_between_steps_that_are_redone_counts_as_redone() -> None:
    spent = train(101, redone=51, data=40.0)
    assert spent.redone_s == pytest.approx(50.0)
    assert dict(spent.between_s) == pytest.approx({"data": 20.0})
    assert spent.training_s == pytest.approx(30.0)


def test_a_rank_whose_clock_runs_fast_does_not_make_a_job_longer() -> None:
    spent = train(101, redone=51, script=190.0, data=10.0)
    assert dict(spent.between_s) == pytest.approx({"script": 47.5, "data": 2.5})
    assert spent.training_s == pytest.approx(0.0)
