"""What follows when a device has no memory left: a more careful plan, or the job's end with the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, decide, devices, generation, job, kinds, proposal, stopping, vm, worker
from varuna_manager.domain.actions import EndGeneration, FinishJob, RaiseMargin, StartGeneration, StopGeneration
from varuna_manager.domain.memory_margin import (
    MOST_LESSONS,
    NO_MARGIN,
    MemoryLesson,
    MemoryMargin,
    MemoryShortage,
    learn_margin,
)
from varuna_manager.domain.observed import GenerationView, Proposal, WorkerView
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.states import EndCause, ExitCause, GenerationKind, GenerationState, StopMode
from varuna_planner.memory import usable_bytes
from varuna_proto.plan import Plan

GIB = 1 << 30
SHORT = MemoryShortage(asked_bytes=3 * GIB, free_bytes=GIB, limit_bytes=16 * GIB, peak_bytes=12 * GIB)
FIGURES = "of 16.0 GiB on its device 1.0 GiB were free when it asked for 3.0 GiB"
PLAN = Plan(p=2, d=1, micro_batch=4, global_batch=8, memory_bytes=(10 * GIB, 12 * GIB))


def short(rank: int, shortage: MemoryShortage = SHORT) -> WorkerView:
    return worker(rank, "ab"[rank], ExitCause.OUT_OF_MEMORY, shortage=shortage, error="Traceback\nfull", exit_code=1)


def ended_short(*workers: WorkerView, **changes: object) -> GenerationView:
    """Every rank has left after one of them had no memory."""
    every = workers or (worker(0, "a", ExitCause.PEER_LOST), short(1))
    return replace(stopping(StopMode.LEAVE_NOW, EndCause.OUT_OF_MEMORY, *every), plan=PLAN, **changes)


def find_lesson(view: GenerationView, margin: MemoryMargin = NO_MARGIN) -> MemoryLesson:
    _, raised = decide(job(view, margin=margin), vm("a"), vm("b")).actions
    assert isinstance(raised, RaiseMargin)
    return raised.lesson


def test_a_rank_without_memory_stops_its_generation_with_the_figures() -> None:
    view = generation(worker(0, "a"), short(1), plan=PLAN)
    (stop,) = decide(job(view), vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.cause, stop.mode) == (EndCause.OUT_OF_MEMORY, StopMode.LEAVE_NOW)
    assert stop.reason == f"rank 1 on VM b ran out of memory: {FIGURES}"


def test_it_waits_for_all_ranks_which_may_leave_their_state() -> None:
    view = replace(stopping(StopMode.LEAVE_NOW, EndCause.OUT_OF_MEMORY, worker(0, "a"), short(1)), plan=PLAN)
    assert kinds(decide(job(view), vm("a"), vm("b"))) == []


def test_the_next_plans_allow_for_what_was_lacking() -> None:
    end, raised = decide(job(ended_short()), vm("a"), vm("b")).actions
    assert isinstance(end, EndGeneration)
    assert isinstance(raised, RaiseMargin)
    lesson = raised.lesson
    assert (lesson.rank, lesson.stage, lesson.planned_bytes, lesson.shortfall_bytes) == (1, 1, 12 * GIB, 6 * GIB)
    assert lesson.margin == MemoryMargin(factor=1.5, device_bytes=16 * GIB, lessons=1)
    assert raised.reason.endswith(
        "; stage 2 of 2 needs at least 18.0 GiB where 12.0 GiB were planned: stages count 1.50 times what the profile "
        "says from now on"
    )
    assert end.reason == raised.reason


def test_the_rank_that_lacked_most_counts() -> None:
    little = replace(SHORT, asked_bytes=2 * GIB)
    lesson = find_lesson(ended_short(short(0), short(1, little)))
    assert (lesson.rank, lesson.margin.factor) == (0, 1.8)


def test_where_the_device_is_smaller_than_the_planner_knew_the_profile_may_be_right() -> None:
    large = replace(PLAN, memory_bytes=(40 * GIB, 20 * GIB))
    lesson = find_lesson(replace(ended_short(), plan=large))
    assert lesson.margin == MemoryMargin(factor=1.0, device_bytes=16 * GIB, lessons=1)
    assert lesson.render(2) == (
        "stage 2 of 2 was planned with 20.0 GiB, because nobody knew how little memory its device has"
    )


@given(
    planned=st.integers(1, 1 << 45),
    limit=st.integers(1 << 20, 1 << 40),
    free=st.integers(0, 1 << 40),
    asked=st.integers(0, 1 << 40),
    factor=st.floats(1.0, 100.0),
)
def test_the_plan_that_failed_does_not_fit_any_longer(
    planned: int, limit: int, free: int, asked: int, factor: float
) -> None:
    shortage = MemoryShortage(asked_bytes=asked, free_bytes=min(free, limit), limit_bytes=limit)
    plan = replace(PLAN, memory_bytes=(planned, planned))
    lesson = learn_margin(replace(ended_short(short(0, shortage), short(1)), plan=plan), MemoryMargin(factor=factor))
    assert lesson is not None
    usable = usable_bytes(lesson.margin.limit_device(limit))
    assert planned > usable
    assert usable < usable_bytes(MemoryMargin(factor=factor).limit_device(limit)) or planned > limit


def test_it_does_not_count_against_the_job() -> None:
    past = [
        PastGeneration(cause=EndCause.OUT_OF_MEMORY, reason="x", last_step=None, ended_at=at) for at in (1.0, 2.0, 3.0)
    ]
    assert count_setbacks(past) == Setbacks()


def test_it_ends_the_job_when_plans_have_been_changed_often() -> None:
    margin = MemoryMargin(factor=3.0, lessons=MOST_LESSONS)
    end, finish = decide(job(ended_short(), margin=margin, max_restarts_on_errors=9), vm("a"), vm("b")).actions
    assert isinstance(end, EndGeneration)
    assert isinstance(finish, FinishJob)
    first, _, last = (finish.error or "").partition("\n")
    assert (first, finish.exit_code) == ("Traceback", 1)
    assert last == (
        "full\nbecause, after 8 plans that each allowed for more: make "
        "micro-batches smaller (plan.micro_batch), or give it GPUs with more memory"
    )


def test_a_calibration_without_memory_ends_the_job_with_the_way_out() -> None:
    view = ended_short(kind=GenerationKind.CALIBRATION, last_step=None)
    _, finish = decide(job(view, profiled_at=None), vm("a"), vm("b")).actions
    assert isinstance(finish, FinishJob)
    assert (finish.error or "").endswith(
        "because, while it calibrated: give it GPUs with more memory, more "
        "cut-points, or an optimizer that takes less (fused=True)"
    )


def test_processes_that_cannot_go_on_in_place_give_way_to_new_ones() -> None:
    (end,) = decide(job(ended_short(in_place=True, last_step=None)), vm("a"), vm("b")).actions
    assert isinstance(end, EndGeneration)
    assert end.reason == "because; new processes have the memory that it held"


@pytest.mark.parametrize("in_place", [False, True])
def test_what_follows_is_never_in_place(in_place: bool) -> None:
    """All stages have survivors, which would go on as they are after the loss of a VM."""
    left = [worker(rank, name, ExitCause.PEER_LOST, held_step=5) for rank, name in enumerate("abc")]
    failed = worker(3, "d", ExitCause.OUT_OF_MEMORY, held_step=5, shortage=SHORT)
    over = generation(
        *left,
        failed,
        state=GenerationState.ENDED,
        plan=replace(PLAN, d=2),
        ended_at=NOW,
        end_cause=EndCause.OUT_OF_MEMORY,
        end_reason="rank 3 ran out of memory",
        in_place=in_place,
        last_step=None if in_place else 5,
    )
    there = devices(*"abcd")
    view = job(over, devices=there, survivors=frozenset(there), proposal=proposal(there))
    (start,) = decide(view, *(vm(name) for name in "abcd")).actions
    assert isinstance(start, StartGeneration)
    assert not start.in_place
    assert start.holders is not None, "the state in memory is sound, also where it did no step"
    assert start.plan.p == 1
    assert start.reason == "rank 3 ran out of memory"


def test_a_job_that_no_plan_fits_any_longer_fails_with_the_figures() -> None:
    over = generation(short(0), state=GenerationState.ENDED, end_cause=EndCause.OUT_OF_MEMORY, end_reason="short")
    none = Proposal(plan=None, possible=False, reason="the model does not fit; stages count 1.50 times")
    (finish,) = decide(job(over, devices=devices("a"), proposal=none), vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.error == "no plan can ever fit: the model does not fit; stages count 1.50 times (short)"
