"""Where a job's time went: every second has one cause, and what the script did between steps has its own."""

from __future__ import annotations

import pytest

from varuna_manager.domain.accounting import BETWEEN_STEPS, GenerationTimes, TimeOfGeneration, account_time, list_pauses
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


HOUR_S = 3600.0


def train_from(number: int, start: float) -> GenerationTimes:
    """Two hours."""
    return GenerationTimes(
        number=number,
        kind=GenerationKind.TRAINING,
        created_at=start,
        first_step_at=start + 10.0,
        last_step_at=start + 2 * HOUR_S,
        ended_at=start + 2 * HOUR_S,
        steps=1000,
        redone=0,
        bubble_share=0.0,
    )


def test_the_time_from_an_end_to_a_retry_is_no_time_of_the_job() -> None:
    """It is cancelled and retried once more while it waits for VMs."""
    retried_at, submitted_at = 75 * HOUR_S, HOUR_S
    states = [
        ("running", submitted_at + 60.0),
        ("failed", submitted_at + 60.0 + 2 * HOUR_S),
        ("queued", 50 * HOUR_S),
        ("cancelled", 50 * HOUR_S + 100.0),
        ("queued", retried_at),
        ("running", retried_at + 20.0),
    ]
    pauses = list_pauses({"state": state, "at": at, "reason": ""} for state, at in states)
    generations = [train_from(1, submitted_at + 60.0), train_from(2, retried_at + 20.0)]
    found = account_time(submitted_at, retried_at + 20.0 + 2 * HOUR_S, generations, pauses)
    assert found.waiting_s == pytest.approx(60.0 + 100.0 + 20.0)
    assert found.elapsed_s == pytest.approx(4 * HOUR_S + 100.0 + 20.0)
    assert found.total_s == pytest.approx(found.elapsed_s + 60.0)
    assert found.goodput > 0.9


def test_a_job_that_waits_after_its_retry_has_only_waited_since() -> None:
    pauses = list_pauses([{"state": "failed", "at": 2 * HOUR_S}, {"state": "queued", "at": 70 * HOUR_S}])
    found = account_time(0.0, 70 * HOUR_S + 30.0, [train_from(1, 0.0)], pauses)
    assert (found.waiting_s, found.elapsed_s) == pytest.approx((30.0, 2 * HOUR_S + 30.0))
