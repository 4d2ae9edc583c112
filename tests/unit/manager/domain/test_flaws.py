"""A job that cannot be handled ends after a while, for the reason that its event states."""

from __future__ import annotations

import pytest

from decision_views import decide, generation, job, stopping, vm, worker
from varuna_manager.domain.actions import EndGeneration, FinishJob, StopGeneration
from varuna_manager.domain.states import EndCause, ExitCause, GenerationState, JobState, StopMode

FLAW = "its stored spec is invalid: global_batch is 5000000000"


def test_one_that_has_not_begun_fails() -> None:
    decision = decide(job(flaw=FLAW), vm("a"))
    assert decision.actions == (FinishJob(state=JobState.FAILED, error=FLAW),)
    ended = generation(worker(0, "a", ExitCause.KILLED), state=GenerationState.ENDED)
    assert decide(job(ended, flaw=FLAW), vm("a")).actions == (FinishJob(state=JobState.FAILED, error=FLAW),)


def test_one_that_runs_is_stopped_first() -> None:
    decision = decide(job(generation(worker(0, "a"), worker(1, "b")), flaw=FLAW), vm("a"), vm("b"))
    (stop,) = decision.actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.reason) == (StopMode.LEAVE_NOW, FLAW)


def test_it_waits_until_its_workers_have_stopped() -> None:
    stops = stopping(StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, worker(0, "a"), worker(1, "b", ExitCause.KILLED))
    decision = decide(job(stops, flaw=FLAW), vm("a"), vm("b"))
    assert decision.actions == ()
    assert not decision.notable
    stops = stopping(StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, worker(0, "a", ExitCause.GENERATION_ENDED))
    (end,) = decide(job(stops, flaw=FLAW), vm("a")).actions
    assert isinstance(end, EndGeneration)


def test_one_that_has_finished_meanwhile_has_succeeded() -> None:
    decision = decide(job(generation(worker(0, "a", ExitCause.FINISHED)), flaw=FLAW), vm("a"))
    assert FinishJob(state=JobState.SUCCEEDED, exit_code=0) in decision.actions


@pytest.mark.parametrize("current", [None, generation(worker(0, "a"))])
def test_one_that_is_cancelled_is_cancelled(current: object) -> None:
    decision = decide(job(current, flaw=FLAW, state=JobState.CANCELLING), vm("a"))
    assert all(action != FinishJob(state=JobState.FAILED, error=FLAW) for action in decision.actions)
    assert "cancelled" in decision.reason
