"""Failures in a row, restarts on errors, and the breaker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, decide, devices, generation, job, kinds, proposal, stopping, vm, worker
from varuna_manager.domain.actions import EndGeneration, FinishJob, StartGeneration
from varuna_manager.domain.observed import GenerationView
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationState,
    JobState,
    StopMode,
)


def test_five_failures_in_a_row_fail_the_job_with_their_reasons() -> None:
    over = generation(worker(0, "a", ExitCause.KILLED), state=GenerationState.ENDED, end_reason="killed")
    view = job(over, devices=devices("a"), proposal=proposal(devices("a")), setbacks=Setbacks(reasons=("killed",) * 5))
    (finish,) = decide(view, vm("a")).actions
    assert isinstance(finish, FinishJob)
    text = "5 generations in a row ended without a completed step"
    assert finish.error == f"{text}: each time because killed"
    several = replace(view, setbacks=Setbacks(reasons=(*("killed",) * 4, "hang")))
    (finish,) = decide(several, vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.error == f"{text}: 1. killed; 2. killed; 3. killed; 4. killed; 5. hang"
    stuck = replace(view, setbacks=replace(view.setbacks, best_step=7))
    (finish,) = decide(stuck, vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert "before they got beyond step 7" in (finish.error or "")
    early = replace(view, setbacks=Setbacks(reasons=("killed",) * 4, last_at=NOW - 1))
    waiting = decide(early, vm("a"))
    assert not waiting.actions
    assert "waiting 4 s before the next one (the last: killed)" in waiting.reason
    assert kinds(decide(early, vm("a"), now=NOW + 4)) == [StartGeneration]


def ended(cause: EndCause, last_step: int | None, at: float = NOW) -> PastGeneration:
    return PastGeneration(cause=cause, reason=cause.value, last_step=last_step, ended_at=at)


def test_a_job_that_dies_at_the_same_step_again_and_again_runs_into_the_breaker() -> None:
    past = [ended(EndCause.PROFILED, None), *(ended(EndCause.WORKER_FAILED, 8, at) for at in (1.0, 2.0, 3.0))]
    found = count_setbacks(past)
    assert found == Setbacks(reasons=("worker_failed",) * 2, last_at=3.0, best_step=8)


def test_a_job_that_gets_on_each_time_is_left_alone() -> None:
    past = [ended(EndCause.WORKER_FAILED, step) for step in (3, 3, 2, 4)]
    assert count_setbacks(past) == Setbacks(best_step=4)


@given(st.lists(st.tuples(st.sampled_from([EndCause.VM_LOST, EndCause.NOTICE, EndCause.GROWTH]), st.integers(0, 9))))
def test_what_vms_do_never_speaks_against_a_job(past: list[tuple[EndCause, int]]) -> None:
    assert count_setbacks(ended(cause, step or None) for cause, step in past).reasons == ()


def test_the_loss_of_a_vm_neither_counts_nor_forgives() -> None:
    killed = ended(EndCause.WORKER_FAILED, None)
    found = count_setbacks([killed, ended(EndCause.VM_LOST, None), killed])
    assert len(found.reasons) == 2


# ---------------------------------------------------------------- max_restarts_on_errors


def failed_script(rank: int = 0, exit_code: int = 3) -> GenerationView:
    error = "Traceback\nValueError: x"
    failed = worker(rank, "a", ExitCause.SCRIPT_FAILED, error=error, exit_code=exit_code)
    return stopping(StopMode.LEAVE_NOW, EndCause.SCRIPT_FAILED, failed)


def test_a_script_that_fails_ends_the_job_with_its_traceback_and_exit_code() -> None:
    end, finish = decide(job(failed_script()), vm("a")).actions
    assert isinstance(end, EndGeneration)
    assert finish == FinishJob(state=JobState.FAILED, error="Traceback\nValueError: x", exit_code=3)


def test_a_script_that_fails_is_restarted_so_often_as_the_job_says() -> None:
    view = job(failed_script(), max_restarts_on_errors=2)
    (end,) = decide(view, vm("a")).actions
    assert isinstance(end, EndGeneration)
    assert end.cause is EndCause.SCRIPT_FAILED
    assert end.reason == "the script failed on rank 0: ValueError: x: restart 1 of 2 (max_restarts_on_errors)"
    (end,) = decide(replace(view, setbacks=Setbacks(errors=1)), vm("a")).actions
    assert isinstance(end, EndGeneration)
    assert "restart 2 of 2" in end.reason
    assert kinds(decide(replace(view, setbacks=Setbacks(errors=2)), vm("a"))) == [EndGeneration, FinishJob]


def test_restarts_on_errors_back_off_while_the_job_does_not_get_on() -> None:
    over = generation(worker(0, "a"), state=GenerationState.ENDED, end_reason="the script failed on rank 0: x")
    past = Setbacks(errors=3, errors_in_a_row=3, last_at=NOW - 1)
    view = job(over, devices=devices("a"), proposal=proposal(devices("a")), setbacks=past, max_restarts_on_errors=5)
    waiting = decide(view, vm("a"))
    assert not waiting.actions
    assert waiting.reason == (
        "3 generations failed in a row: waiting 2 s before the next one (the last: the script failed on rank 0: x)"
    )
    assert kinds(decide(view, vm("a"), now=NOW + 1)) == [StartGeneration]


def test_errors_count_over_the_jobs_whole_life_but_not_in_the_breaker() -> None:
    past = [ended(EndCause.SCRIPT_FAILED, step) for step in (3, 3, 5, 5)]
    found = count_setbacks(past)
    assert (found.errors, found.errors_in_a_row, found.reasons) == (4, 1, ())


def test_what_came_before_a_retry_is_forgiven() -> None:
    past = [replace(ended(cause, 5), forgiven=True) for cause in (EndCause.SCRIPT_FAILED, EndCause.WORKER_FAILED)]
    assert count_setbacks(past) == Setbacks(best_step=5)
    found = count_setbacks([*past, ended(EndCause.SCRIPT_FAILED, 5)])
    assert (found.errors, found.errors_in_a_row) == (1, 1)


@pytest.mark.parametrize(("failures", "backoff_s"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0), (9, 30.0)])
def test_the_backoff_doubles(failures: int, backoff_s: float) -> None:
    assert Setbacks(reasons=("x",) * failures).backoff_s == backoff_s
    assert Setbacks(errors_in_a_row=failures).backoff_s == backoff_s
