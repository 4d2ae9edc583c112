"""How the time without progress before a generation's first step was spent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from varuna_manager.domain.downtime import (
    DowntimePart,
    MorphMoments,
    choose_slower_start,
    render_longest_parts,
    split_downtime,
)

START = [
    DowntimePart(name="wait", seconds=0.5, rank=3),
    DowntimePart(name="process", seconds=2.0, rank=3),
    DowntimePart(name="load", seconds=1.0),
]
MORPH = MorphMoments(
    last_progress_at=10.0, stop_sent_at=12.0, ended_at=12.5, created_at=13.5, ready_at=17.25, first_step_at=18.0
)


def test_the_parts_of_a_morph_are_all_of_it() -> None:
    parts = split_downtime(MORPH, START)
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
    assert render_longest_parts(parts) == "until the stop 2.0 s, process 2.0 s of rank 3, plan 1.0 s"


def test_the_time_in_which_survivors_end_their_shares_is_not_the_planners() -> None:
    parts = split_downtime(replace(MORPH, left_at=13.25), START)
    times = {part.name: part.seconds for part in parts}
    assert (times["stop"], times["share"], times["plan"]) == (0.5, 0.75, 0.25)
    assert sum(times.values()) == MORPH.first_step_at - MORPH.last_progress_at
    assert render_longest_parts(parts[1:4]) == "survivors' shares 0.8 s, stop 0.5 s, plan 0.2 s"


def test_what_a_rank_waited_before_the_generation_was_decided_is_no_part_of_it() -> None:
    """A survivor that leaves first waits for its rank while others end their shares."""
    parts = split_downtime(replace(MORPH, left_at=13.25), [replace(START[0], seconds=3.0), *START[1:]])
    times = {part.name: part.seconds for part in parts}
    assert (times["launch"], times["wait"], times["process"], times["load"]) == (0.0, 0.75, 2.0, 1.0)
    assert sum(times.values()) == MORPH.first_step_at - MORPH.last_progress_at


def test_a_jobs_first_generation_has_nothing_to_stop() -> None:
    parts = split_downtime(MorphMoments(last_progress_at=10.0, created_at=11.0, first_step_at=14.0), [])
    assert [(part.name, part.seconds) for part in parts] == [("plan", 1.0), ("launch", 3.0), ("step", 0.0)]


def test_the_time_of_a_calibration_is_not_that_of_a_stop() -> None:
    moments = MorphMoments(
        last_progress_at=10.0, is_calibrated=True, stop_sent_at=45.0, ended_at=46.0, created_at=47.0, first_step_at=49.0
    )
    parts = split_downtime(moments, [])
    assert [(part.name, part.seconds) for part in parts] == [
        ("calibration", 36.0),
        ("plan", 1.0),
        ("launch", 2.0),
        ("step", 0.0),
    ]


def test_a_step_that_was_heard_of_late_takes_no_time_away() -> None:
    """A step that ends while the generation is being stopped is reported afterwards."""
    late = MorphMoments(last_progress_at=12.25, stop_sent_at=12.0, ended_at=12.5, created_at=12.5, first_step_at=13.0)
    first, *_ = split_downtime(late, [])
    assert (first.name, first.seconds) == ("stop", 0.25)


def test_the_rank_that_begins_last_is_the_one_that_all_wait_for() -> None:
    other = [DowntimePart(name="process", seconds=0.25, rank=0), DowntimePart(name="meet", seconds=60.0, rank=0)]
    assert choose_slower_start(other, START) == choose_slower_start(START, other) == START
    assert choose_slower_start([], other) == other


@pytest.mark.parametrize(
    "part", [DowntimePart(name="stop", seconds=1.25), DowntimePart(name="load", seconds=0.5, rank=2)]
)
def test_parts_survive_the_store(part: DowntimePart) -> None:
    assert DowntimePart.from_document(part.to_document()) == part
