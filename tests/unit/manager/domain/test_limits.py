"""A job over a limit is saved and ended. The reason names the limit and the value that exceeded it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from decision_views import NOW, decide, devices, generation, job, kinds, stopping, vm, worker
from varuna_manager.domain.actions import EndGeneration, FinishJob, StopGeneration
from varuna_manager.domain.limits import JobLimitsView, find_reached_limit
from varuna_manager.domain.observed import JobView
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import EndCause, ExitCause, GenerationKind, GenerationState, JobState, StopMode

SPENT = JobLimitsView(max_cost=40.0, run_since=0.0, cost=40.0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (
            JobLimitsView(max_duration_s=900.0, run_since=NOW - 900.0),
            "it started 900 s ago (limits.max_duration_s 900)",
        ),
        (JobLimitsView(max_duration_s=900.0, run_since=NOW - 899.0), ""),
        (JobLimitsView(max_duration_s=900.0, run_since=None), ""),
        (SPENT, "it has cost 40.00 (limits.max_cost 40)"),
        (replace(SPENT, cost=39.9), ""),
        (JobLimitsView(queue_timeout_s=60.0, waits_since=NOW - 60.0), "it has waited for 60 s to start"),
        (JobLimitsView(queue_timeout_s=60.0, waits_since=NOW - 60.0, run_since=NOW - 10.0), ""),
        (JobLimitsView(waits_since=0.0, run_since=0.0, cost=1e9), ""),
    ],
)
def test_the_limit_that_is_reached_is_named(limits: JobLimitsView, reason: str) -> None:
    found = find_reached_limit(NOW, JobState.RUNNING, limits)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_job_that_is_being_cancelled_has_no_limits() -> None:
    assert find_reached_limit(NOW, JobState.CANCELLING, SPENT) == ""


def running(**changes: object) -> JobView:
    return job(generation(worker(0, "a"), worker(1, "b")), limits=SPENT, **changes)


def test_a_running_job_over_its_limit_saves_first() -> None:
    decision = decide(running(devices=devices("a", "b")), vm("a"), vm("b"))
    (stop,) = decision.actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, EndCause.LIMIT)
    assert stop.reason == "over its limit: it has cost 40.00 (limits.max_cost 40)"


@pytest.mark.parametrize("changes", [{"kind": GenerationKind.CALIBRATION, "last_step": None}, {"last_step": None}])
def test_what_has_nothing_to_save_leaves_at_once(changes: dict[str, object]) -> None:
    view = job(generation(worker(0, "a"), **changes), limits=SPENT, profiled_at=None)
    (stop,) = decide(view, vm("a")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.LEAVE_NOW, EndCause.LIMIT)


def test_it_is_not_told_to_stop_twice_and_all_ranks_may_save() -> None:
    left = worker(1, "b", ExitCause.GENERATION_ENDED)
    view = job(stopping(StopMode.SAVE_FIRST, EndCause.LIMIT, worker(0, "a"), left), limits=SPENT)
    assert decide(view, vm("a"), vm("b")).actions == ()


def test_it_ends_when_all_have_left_and_then_the_job_fails_by_its_limit() -> None:
    left = [worker(rank, name, ExitCause.GENERATION_ENDED) for rank, name in enumerate("ab")]
    view = job(stopping(StopMode.SAVE_FIRST, EndCause.LIMIT, *left), limits=SPENT)
    decision = decide(view, vm("a"), vm("b"))
    assert kinds(decision) == [EndGeneration]
    assert decision.actions[0].cause is EndCause.LIMIT
    ended = generation(*left, state=GenerationState.ENDED, end_reason="over its limit")
    finish = decide(replace(view, generation=ended), vm("a"), vm("b")).actions[0]
    assert finish == FinishJob(
        state=JobState.FAILED, error="over its limit: it has cost 40.00 (limits.max_cost 40)", exit_code=None
    )


def test_a_job_that_finishes_while_it_is_told_to_stop_has_succeeded() -> None:
    done = [worker(rank, name, ExitCause.FINISHED) for rank, name in enumerate("ab")]
    decision = decide(job(stopping(StopMode.SAVE_FIRST, EndCause.LIMIT, *done), limits=SPENT), vm("a"), vm("b"))
    assert decision.actions[-1] == FinishJob(state=JobState.SUCCEEDED, exit_code=0)


def test_a_job_that_waits_too_long_to_start_fails_although_gpus_have_just_come() -> None:
    limits = JobLimitsView(queue_timeout_s=60.0, waits_since=NOW - 61.0)
    (finish,) = decide(job(limits=limits, devices=devices("a")), vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.error == "over its limit: it has waited for 61 s to start (limits.queue_timeout_s 60)"


# ---------------------------------------------------------------- what may be asked for


def spec(**changes: object) -> JobSpec:
    return JobSpec.model_validate({"name": "n", "workdir": "/w", "run": "r", "global_batch": 8, **changes})


@pytest.mark.parametrize("name", ["max_duration_s", "max_cost", "queue_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_a_number_above_0(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        spec(limits={name: value})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({'a"b': "c"}, "key 'a\"b' must be"),
        ({"": "c"}, "key '' must be"),
        ({"k" * 64: "c"}, "must be 1 to 63"),
        ({"team": "a\0b"}, "team: its value"),
        ({"team": "\ud800"}, "team: its value"),
        ({"team": "x" * 256}, "at most 255"),
        ({str(n): "x" for n in range(33)}, "at most 32"),
    ],
)
def test_labels_that_a_store_or_a_page_could_not_hold_are_refused(labels: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(labels=labels)


def test_labels_of_other_peoples_tools_are_taken() -> None:
    labels = {"app.kubernetes.io/name": "gpt", "Team": "Sprache & Bild", "empty": ""}
    assert spec(labels=labels).labels == labels
