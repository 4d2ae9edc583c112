"""What the time without progress before a generation's first step went to."""

from __future__ import annotations

import pytest

from varuna_manager.domain.downtime import Moments, Part, downtime, longest, slower_start

START = [
    Part(name="wait", seconds=0.5, rank=3),
    Part(name="process", seconds=2.0, rank=3),
    Part(name="load", seconds=1.0),
]
MORPH = Moments(
    last_progress_at=10.0, told_to_stop_at=12.0, ended_at=12.5, created_at=13.5, ready_at=17.25, first_step_at=18.0
)


def test_the_parts_of_a_morph_are_all_of_it() -> None:
    parts = downtime(MORPH, START)
    assert {part.name: part.seconds for part in parts} == {
        "notice": 2.0,
        "stop": 0.5,
        "plan": 1.0,
        "launch": 0.25,
        "wait": 0.5,
        "process": 2.0,
        "load": 1.0,
        "step": 0.75,
    }
    assert sum(part.seconds for part in parts) == MORPH.first_step_at - MORPH.last_progress_at
    assert longest(parts) == "notice 2.0 s, process 2.0 s of rank 3, plan 1.0 s"


def test_a_jobs_first_generation_has_nothing_to_stop() -> None:
    parts = downtime(Moments(last_progress_at=10.0, created_at=11.0, first_step_at=14.0), [])
    assert [(part.name, part.seconds) for part in parts] == [("plan", 1.0), ("launch", 3.0), ("step", 0.0)]


def test_a_step_that_was_heard_of_late_takes_no_time_away() -> None:
    """A step that ends while the generation is being stopped is told of afterwards."""
    late = Moments(last_progress_at=12.25, told_to_stop_at=12.0, ended_at=12.5, created_at=12.5, first_step_at=13.0)
    first, *_ = downtime(late, [])
    assert (first.name, first.seconds) == ("stop", 0.25)


def test_the_rank_that_begins_last_is_the_one_that_all_wait_for() -> None:
    other = [Part(name="process", seconds=0.25, rank=0), Part(name="meet", seconds=60.0, rank=0)]
    assert slower_start(other, START) == slower_start(START, other) == START
    assert slower_start([], other) == other


@pytest.mark.parametrize("part", [Part(name="stop", seconds=1.25), Part(name="load", seconds=0.5, rank=2)])
def test_parts_survive_the_store(part: Part) -> None:
    assert Part.from_document(part.to_document()) == part
