"""Documents as text: no state is shown by colour alone, and no value breaks a table."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from job_documents import JOB
from varuna_client.commands.options import render_plain
from varuna_client.text import render
from varuna_client.text.pages import JobParts, job_page, render_keepers
from varuna_manager.domain.states import TERMINAL_JOB_STATES, GenerationState, JobState, VmState
from varuna_proto.rest import (
    END_STATES,
    EventDocument,
    GenerationDocument,
    JobDocument,
    JobTimeDocument,
    MetricBucketsDocument,
    PlanRecordDocument,
    StepMetricsDocument,
)
from varuna_proto.rest_fleet import VmDocument

GENERATION = GenerationDocument(  # type: ignore[typeddict-item] # what is shown of it
    number=2,
    kind="training",
    state="ended",
    p=2,
    d=2,
    micro_batch=1,
    plan={"predicted_minibatch_s": 0.25, "global_batch": 24, "micro_batch": 1},
    candidates=[],
    placement=[],
    workers=[],
    reason="best of 7 candidates",
    created_at="2026-01-01T00:00:01+00:00",
    started_at="2026-01-01T00:00:02+00:00",
    ended_at=None,
    end_reason=None,
    resumed_step=0,
    last_step=7,
    seconds_without_progress=None,
    steps_redone=None,
    phases=[{"name": "first_step", "start": "", "end": None, "seconds": 3.2}],
)
PLAN = PlanRecordDocument(
    generation=2,
    at="2026-01-01T00:00:01+00:00",
    reason="best of 7 candidates",
    plan=GENERATION["plan"],
    candidates=[
        {"p": 2, "d": 2, "micro_batch": 1, "predicted_minibatch_s": 0.25, "fits": True, "reason": "the fastest"},
        {"p": 1, "d": 4, "micro_batch": 1, "predicted_minibatch_s": None, "fits": False, "reason": "needs 9 GiB"},
    ],
    predicted_step_s=0.25,
    actual_step_s=0.8,
    between_s=0.5,
    actual_examples_per_s=33.0,
    steps=7,
    error=0.2,
)
TIME = JobTimeDocument(
    start="2026-01-01T00:00:00+00:00",
    end="2026-01-01T00:00:10+00:00",
    total_s=10.0,
    elapsed_s=10.0,
    useful_s=7.5,
    goodput=0.75,
    causes=[
        {"cause": "training", "seconds": 7.5, "share": 0.75, "text": "steps that counted"},
        {"cause": "redone_steps", "seconds": 0.0, "share": 0.0, "text": "nothing"},
        {"cause": "morphs", "seconds": 2.5, "share": 0.25, "text": "workers started"},
    ],
    generations=[],
)
COURSE = MetricBucketsDocument(
    from_step=1,
    to_step=40,
    steps=40,
    bucket_steps=30,
    first_step=[1, 31],
    last_step=[30, 40],
    count=[30, 10],
    at_unix_s=[1.0, 2.0],
    generation=[2, 3],
    loss={"min": [1.0, 1.0], "mean": [2.0, 1.5], "max": [3.0, 2.0]},
    step_s={"min": [0.5, 5.0], "mean": [1.0, 5.0], "max": [1.5, 5.0]},
    examples_per_s={"min": [16.0, 4.8], "mean": [24.0, 4.8], "max": [48.0, 4.8]},
    gradient_norm={"min": [None, 1.0], "mean": [None, 1.0], "max": [None, 1.0]},
    learning_rate={"min": [0.1, 0.1], "mean": [0.1, 0.1], "max": [0.1, 0.1]},
)
"""30 steps of 24 examples in 1 s each, then 10 in 5 s each."""
NOW = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)


def text_of(renderable: RenderableType, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_the_step_time_has_its_parts_and_only_the_part_within_steps_was_predicted() -> None:
    figures = {"state": "running", "step_s": 0.8, "between_s": 0.5, "examples_per_s": 30.0, "rate_steps": 7}
    job = JobDocument(**{**JOB, **figures})  # type: ignore[typeddict-item]
    shown = text_of(job_page(JobParts(job=job, plan=PLAN, course=COURSE), NOW))
    assert "  30 examples/s over the last 7 steps" in shown
    assert "over all" not in shown, "of a running job, only the newest steps"
    assert "0.800 s, 0.500 s of it between steps (predicted for the rest 0.250 s, +20%)" in shown
    busy = JobDocument(**{**job, "step_s": 0.3, "between_s": 0.001})  # type: ignore[typeddict-item]
    shown = text_of(job_page(JobParts(job=busy, plan=PlanRecordDocument(**{**PLAN, "actual_step_s": 0.3})), NOW))  # type: ignore[typeddict-item]
    assert "0.300 s (predicted 0.250 s, +20%)" in shown
    alone = JobDocument(**{**job, "rate_steps": 1})  # type: ignore[typeddict-item]
    assert "30 examples/s over the last step " in text_of(job_page(JobParts(job=alone), NOW))


def test_a_job_that_is_over_has_the_figures_of_all_its_steps_beside_those_of_the_last() -> None:
    figures = {"state": "succeeded", "step_s": 0.8, "between_s": 0.0, "examples_per_s": 30.0, "rate_steps": 7}
    job = JobDocument(**{**JOB, **figures})  # type: ignore[typeddict-item]
    shown = text_of(job_page(JobParts(job=job, course=COURSE), NOW))
    assert "12 examples/s over all 40 steps; 30 examples/s over the last 7 steps" in shown
    assert "2.000 s over all 40 steps; the last 7 steps: 0.800 s" in shown


def test_steps_without_a_time_give_no_rate() -> None:
    assert render.whole_rate(COURSE) == render.WholeRate(40, 2.0, 12.0)
    unknown: list[float | None] = [None, None]
    empty = {"step_s": {"min": [0.0, 0.0], "mean": [0.0, 0.0], "max": [0.0, 0.0]}}
    none = {**empty, "examples_per_s": {"min": unknown, "mean": unknown, "max": unknown}}
    assert render.whole_rate(MetricBucketsDocument(**{**COURSE, **none})) is None  # type: ignore[typeddict-item]


@pytest.mark.parametrize("states", [JobState, GenerationState, VmState])
def test_every_state_has_a_sign_beside_its_word(states: type[StrEnum]) -> None:
    for state in states:
        assert render.STATE_SIGNS[state.value]
        assert state.value in render.state(state.value).plain


def test_the_client_and_the_manager_agree_on_when_a_job_is_over() -> None:
    assert {state.value for state in TERMINAL_JOB_STATES} == END_STATES


def test_a_failed_jobs_page_shows_the_traceback_word_for_word() -> None:
    event = EventDocument(
        id=1,
        at="2026-01-01T00:00:03+00:00",
        job_id="j-1",
        job_name=None,
        generation=2,
        vm_id=None,
        kind="job_failed",
        message="the script raised",
        data={},
    )
    parts = JobParts(job=JOB, generations=[GENERATION], plan=PLAN, time=TIME, events=[event])
    text = text_of(job_page(parts, NOW))
    assert "RuntimeError: no such [file]" in text
    assert "2×2" in text
    assert "best of 7 candidates" in text
    assert "first step 3.2 s" in text
    assert "the script raised" in text
    assert "needs 9 GiB" in text
    assert "redone" not in text.partition("WHERE THE TIME WENT")[2], "no line for what cost nothing"
    assert "goodput 75%" in text
    assert all(len(line) <= 80 for line in text_of(job_page(parts, NOW), 80).splitlines())


def test_a_page_shows_where_the_state_of_a_generation_comes_from() -> None:
    def page(kind: str, redone: int | None = None, **sources: int) -> str:
        state_from = {"kept": 0, "peers": 0, "store": 0} | sources
        came = {"kind_of_morph": kind, "state_from": state_from, "micro_batches_redone": redone}
        one = GenerationDocument(**{**GENERATION, **came})  # type: ignore[typeddict-item]
        return text_of(job_page(JobParts(job=JOB, generations=[one]), NOW))

    assert "in place, 22.0 MiB of state kept in memory" in page("reshape", kept=22 * 2**20)
    assert "in place, 6 of 24 micro-batches run again, 1.0 MiB of" in page("reshape", redone=6, kept=2**20)
    assert "in place, 0 of 24 micro-batches run again" in page("reshape", redone=0)
    given = page("restart", peers=22 * 2**20, store=2**20)
    assert "restart, 22.0 MiB of state from memory, 1.0 MiB of state from a checkpoint" in given
    assert "of state" not in page("restart")


def test_steps_that_are_not_finite_are_marked_beside_the_loss_and_in_the_state() -> None:
    changes = {"state": "running", "loss": None, "not_finite_from": 2, "steps_skipped": 1, "error": None}
    job = JobDocument(**{**JOB, **changes})  # type: ignore[typeddict-item]
    shown = text_of(job_page(JobParts(job=job), NOW))
    assert "loss   not finite  no finite loss or gradient since step 2, 1 step skipped" in shown
    assert render.job_loss(job).style == "red"
    assert "not finite" in text_of(render.jobs_table([job], NOW))
    assert "▶ running" in shown
    over = JobDocument(**{**job, "state": "succeeded", "loss": 0.5, "not_finite_from": None})  # type: ignore[typeddict-item]
    shown = text_of(job_page(JobParts(job=over), NOW))
    assert "! succeeded" in shown
    assert "0.5000  1 step skipped" in shown
    assert "! succeeded" in text_of(render.jobs_table([over], NOW))


def test_a_page_says_where_a_job_began_that_found_a_checkpoint() -> None:
    calibration = GenerationDocument(**{**GENERATION, "number": 1, "kind": "calibration", "resumed_step": None})  # type: ignore[typeddict-item]
    begun = GenerationDocument(**{**GENERATION, "resumed_step": 8, "last_step": None})  # type: ignore[typeddict-item]
    shown = text_of(job_page(JobParts(job=JOB, generations=[calibration, begun]), NOW))
    assert ", begun at step 8 from a checkpoint, global batch" in shown
    assert "begun" not in text_of(job_page(JobParts(job=JOB, generations=[calibration, GENERATION]), NOW))


def test_a_page_of_a_job_of_which_nothing_is_known_yet() -> None:
    fresh = JobDocument(**{**JOB, "plan": None, "loss": None, "generation": None, "error": None, "step": 0})  # type: ignore[typeddict-item]
    text = text_of(job_page(JobParts(job=fresh), NOW))
    assert "submitted 4 m ago" in text
    assert "GENERATIONS" not in text


def test_plain_output_is_neither_folded_nor_padded() -> None:
    long = JobDocument(**{**JOB, "name": "n" * 63})  # type: ignore[typeddict-item]
    lines = render_plain(render.jobs_table([long, JOB], NOW)).splitlines()
    assert len(lines) == 3
    assert "n" * 63 in lines[1]
    assert all(line == line.rstrip() for line in lines)
    words = "why " * 500
    event = EventDocument(
        id=1,
        at=JOB["created_at"],
        job_id=None,
        job_name=None,
        generation=None,
        vm_id=None,
        kind="x",
        message=words,
        data={},
    )
    assert len(render_plain(render.event_row(event)).splitlines()) == 1


@pytest.mark.parametrize(("data", "style"), [({"exit_code": 0}, "green"), ({"note": "but ran no step"}, "yellow")])
def test_a_success_with_a_but_is_not_green(data: dict[str, object], style: str) -> None:
    event: Any = {"at": NOW.isoformat(), "kind": "job_succeeded", "message": "job 'gpt' succeeded", "data": data}
    assert style in [span.style for span in render.event_line(event).spans]


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ({"run": "python train.py"}, None),
        ({"run": "python train.py --steps 120"}, (120, "--steps in run")),
        ({"run": "python train.py --max_steps=7 --steps-per-epoch 5"}, (7, "--max_steps in run")),
        ({"run": "python train.py --steps $STEPS"}, None),
        ({"run": "python train.py --steps 120", "steps": 9}, (9, "steps in the job file")),
    ],
)
def test_how_many_steps_there_are_and_how_that_is_known(spec: dict[str, object], steps: object) -> None:
    assert render.total_steps(spec) == steps


def test_tables_take_what_is_not_known_yet() -> None:
    fresh = JobDocument(**{**JOB, "plan": None, "loss": None, "generation": None, "error": None})  # type: ignore[typeddict-item]
    vm = VmDocument(  # type: ignore[typeddict-item] # what is shown of it
        id="vm-1",
        provider="local",
        state="requested",
        gpus=1,
        device_memory_bytes=0,
        host="",
        ref={},
        last_heard_s=None,
        created_at="2026-01-01T00:00:01+00:00",
        reason=None,
        slow_ratio=None,
        slow_reason=None,
        quarantined_until=None,
    )
    assert "gpt" in text_of(render.jobs_table([fresh], NOW))
    assert "requested" in text_of(render.vms_table([vm]))
    slow = VmDocument(**{**vm, "slow_ratio": 1.5, "slow_reason": "rank 1 lags"})  # type: ignore[typeddict-item]
    assert "slow: rank 1 lags" in text_of(render.vms_table([slow]))
    until = VmDocument(**{**vm, "quarantined_until": "2026-01-01T00:00:01+00:00"})  # type: ignore[typeddict-item]
    assert "quarantined until" in text_of(render.vms_table([until]))


STEP = StepMetricsDocument(
    step=7,
    loss=0.25,
    step_s=0.5,
    between_s=0.125,
    examples=64,
    generation=2,
    at="2026-01-01T00:00:01+00:00",
    gradient_norm=None,
    learning_rate=0.1,
)


def test_steps_as_a_table_and_as_comma_separated_values() -> None:
    strange = StepMetricsDocument(**{**STEP, "step": 8, "loss": None, "step_s": 0.0})  # type: ignore[typeddict-item]
    logged = {"top 1": {8: 0.71234567}, "accuracy": {7: 0.5, 8: 1e-9}, "empty": {}}
    heads, *rows = render_plain(render.steps_table([STEP, strange], {})).splitlines()
    assert heads.split() == ["STEP", "TIME", "LOSS", "EX/S", "SECONDS", "BETWEEN", "GEN"]
    clock = render.clock(STEP["at"])
    assert [row.split() for row in rows] == [
        ["7", clock, "0.2500", "128", "0.500", "0.125", "2"],
        ["8", clock, "-", "-", "0.000", "0.125", "2"],
    ]
    heads, *rows = render_plain(render.steps_table([STEP, strange], logged)).splitlines()
    assert heads.endswith("GEN     top 1  accuracy  empty")
    assert [row.split()[7:] for row in rows] == [["0.5"], ["0.712346", "1e-09"]]
    assert render.steps_csv([STEP, strange], logged).splitlines() == [
        "step,time,loss,examples_per_s,step_s,between_s,examples,generation,top 1,accuracy,empty",
        "7,2026-01-01T00:00:01+00:00,0.25,128.0,0.5,0.125,64,2,,0.5,",
        "8,2026-01-01T00:00:01+00:00,,,0.0,0.125,64,2,0.71234567,1e-09,",
    ]


def test_brackets_and_colons_in_what_others_have_named_are_shown_as_they_are() -> None:
    logged = {"acc[top1]": {7: 0.5}, "acc[top5]": {}, "x[/y]": {}, ":warning:": {}}
    assert render_plain(render.steps_table([STEP], logged)).splitlines()[0].split()[7:] == list(logged)


def test_no_text_commands_the_terminal() -> None:
    assert render_plain("title \x1b]0;mine\x07, red \x1b[31m\x9b31m") == "title ]0;mine, red [31m31m\n"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1), st.integers(1, 60))
def test_a_sparkline_fits_its_width_and_ends_with_the_newest_value(values: list[float], width: int) -> None:
    line = render.sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(render.SPARKS)


def test_sizes_and_times_for_people() -> None:
    assert [render.size(count) for count in (0, 17, 2048, 28 * 1024**2, 80 * 1024**3)] == [
        "-",
        "17 B",
        "2.0 KiB",
        "28.0 MiB",
        "80.0 GiB",
    ]
    seconds = (0.04, 9.96, 59.4, 61, 3599, 7260, 200_000)
    texts = ["0.0 s", "10 s", "59 s", "1 m 01 s", "59 m 59 s", "2 h 01 m", "2 d 7 h"]
    assert [render.duration(each) for each in seconds] == texts
    assert [render.rate(each) for each in (None, 0.1234, 19.27, 4123.4)] == ["-", "0.123", "19.3", "4,123"]
    assert render.clock(None) == "-"
    assert render.clock("2023-11-14T22:13:20+00:00") == render.clock("2023-11-14T23:13:20+01:00")


def test_it_says_why_a_generation_keeps_copies() -> None:
    why = "no copies are kept: about 0.4 VMs are lost an hour"
    generation = GenerationDocument(**{**GENERATION, "copies_reason": why})  # type: ignore[typeddict-item]
    assert why in " ".join(text_of(job_page(JobParts(job=JOB, generations=[generation]), NOW)).split())


def test_it_says_which_copies_the_workers_cannot_keep() -> None:
    found = {"keepers": [1, 0], "copies_obstacle": "rank 1: no room", "marks_obstacle": "rank 0: none"}
    generation = GenerationDocument(**{**GENERATION, **found})  # type: ignore[typeddict-item]
    text = " ".join(text_of(job_page(JobParts(job=JOB, generations=[generation]), NOW)).split())
    assert "no copies of states are kept: rank 1: no room" in text
    assert "no marks are kept: rank 0: none" in text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"keepers": []}, ""),
        ({"copied_step": None}, "copies of stages 0 (a → b), 1 (b → a): none is whole yet"),
        ({"copied_step": 41}, "copies of stages 0 (a → b), 1 (b → a): whole at step 41 of 43"),
        ({"copies_obstacle": "rank 1: no room"}, ""),
        ({"copied_step": 41, "state": "ended"}, "copies of stages 0 (a → b), 1 (b → a): whole at step 41"),
    ],
)
def test_it_says_who_keeps_which_copy_and_of_which_step(found: dict[str, Any], text: str) -> None:
    placement = [{"rank": rank, "vm_id": vm_id, "local_rank": 0} for rank, vm_id in enumerate("ab")]
    generation = {"state": "running", "placement": placement, "keepers": [1, 0], "copied_step": None, "last_step": 43}
    assert render_keepers({**generation, **found}) == text
