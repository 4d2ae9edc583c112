"""The manager's tables, commands, accounting and specs."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from varuna_manager.domain import states
from varuna_manager.domain.accounting import count_seconds_without_progress, count_steps_redone
from varuna_manager.domain.commands import DrainKey, GenerationOnVm, LaunchKey, StopKey, list_commands
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import (
    GenerationState,
    IllegalTransitionError,
    JobState,
    StopMode,
    VmState,
    WorkerState,
)


@pytest.mark.parametrize(
    ("table", "machine"),
    [
        (states.JOB_TRANSITIONS, JobState),
        (states.GENERATION_TRANSITIONS, GenerationState),
        (states.VM_TRANSITIONS, VmState),
        (states.WORKER_TRANSITIONS, WorkerState),
    ],
)
def test_every_state_has_a_row_and_every_successor_is_a_state(table: states.Table, machine: type[StrEnum]) -> None:
    assert set(table) == set(machine)
    assert {new for successors in table.values() for new in successors} <= set(machine)


def test_an_illegal_transition_tells_the_story() -> None:
    history = states.advance(
        states.JOB_TRANSITIONS, "job x", JobState.QUEUED, JobState.FAILED, [], now=1.0, reason="no"
    )
    with pytest.raises(IllegalTransitionError, match=r"job x cannot go from failed to running.*1.000 failed \(no\)"):
        states.advance(states.JOB_TRANSITIONS, "job x", JobState.FAILED, JobState.RUNNING, history, now=2.0, reason="?")


def test_agents_are_told_what_they_lack() -> None:
    running = GenerationOnVm(
        job_id="j",
        generation=3,
        state=GenerationState.LAUNCHING,
        stop_mode=None,
        worker_states=(WorkerState.ASSIGNED,),
    )
    old = GenerationOnVm(
        job_id="j", generation=2, state=GenerationState.ENDED, stop_mode=None, worker_states=(WorkerState.RUNNING,)
    )
    saving = replace(running, state=GenerationState.STOPPING, stop_mode=StopMode.SAVE_FIRST)
    stop_old = StopKey(job_id="j", generation=2, mode=StopMode.LEAVE_NOW)
    launch = LaunchKey(job_id="j", generation=3)
    assert list_commands([running, old], [], frozenset(), draining=False) == (stop_old, launch)
    assert list_commands([running], [], frozenset({("j", 3)}), draining=True) == (DrainKey(),)
    stop_saving = StopKey(job_id="j", generation=3, mode=StopMode.SAVE_FIRST)
    assert list_commands([saving], [("j", 3)], frozenset(), draining=False) == (stop_saving,)
    stray = StopKey(job_id="x", generation=1, mode=StopMode.LEAVE_NOW)
    assert list_commands([], [("x", 1)], frozenset(), draining=False) == (stray,)


def test_the_cost_of_a_morph() -> None:
    assert count_seconds_without_progress(last_progress_at=10.0, first_step_at=14.5) == 4.5
    assert count_steps_redone([(0, 12)], 10) == 2
    assert count_steps_redone([], 0) == 0


def test_a_step_that_is_lost_counts_once_however_quick_the_next_morph_is() -> None:
    assert count_steps_redone([(0, 100)], 60) == 40
    assert count_steps_redone([(0, 100), (60, 65)], 60) == 5, "66 to 100 were lost before"
    assert count_steps_redone([(0, 100), (60, 65)], 65) == 0
    assert count_steps_redone([(0, 100), (60, 65)], 50) == 15, "and 51 to 60 are lost only now"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_all_steps_that_are_lost_are_those_that_were_done_too_often(lives: list[tuple[int, int]]) -> None:
    generations: list[tuple[int, int]] = []
    best = lost = 0
    for saved, steps in lives:
        resumed = min(saved, best)
        lost += count_steps_redone(generations, resumed)
        generations.append((resumed, resumed + steps))
        best = resumed + steps
    done = sum(last - resumed for resumed, last in generations)
    assert done - lost == best


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"global_batch": 0}, "greater than or equal to 1"),
        ({"plan": {"d": 9}}, "plan.d 9 is more than the 8 micro-batches"),
        ({"plan": {"micro_batch": 9}}, "plan.micro_batch 9 is more than global_batch 8"),
        ({"plan": {"p": 2, "d": 2}, "resources": {"max_gpus": 3}}, "needs 4 GPUs but resources.max_gpus is 3"),
        ({"resources": {"min_gpus": 3, "max_gpus": 2}}, "max_gpus 2 is below min_gpus 3"),
        ({"workdir": "here"}, "absolute path"),
        ({"name": "a b"}, "1 to 63 letters"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_a_bad_spec_is_refused_with_the_way_out(changes: dict[str, object], text: str) -> None:
    spec = {"name": "n", "workdir": "/w", "run": "true", "global_batch": 8, **changes}
    with pytest.raises(ValidationError, match=text):
        JobSpec.model_validate(spec)
