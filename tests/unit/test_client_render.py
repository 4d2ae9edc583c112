"""Documents as text: no state told by colour alone, no value that breaks a table."""

from __future__ import annotations

import io
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from varuna_client import render
from varuna_client.documents import END_STATES, Event, Generation, Job, Metric, Vm
from varuna_manager.domain.states import TERMINAL_JOB_STATES, GenerationState, JobState, VmState

JOB = Job(
    id="j-1",
    name="gpt",
    state="failed",
    spec={"run": "python train.py", "workdir": "/w", "global_batch": 10},
    error='Traceback (most recent call last):\n  File "train.py", line 3\nRuntimeError: no such [file]\n',
    created_at="2026-01-01T00:00:01+00:00",
    started_at=None,
    finished_at=None,
    step=7,
    loss=2.5,
    generation=2,
    plan={"p": 2, "d": 2, "micro_batch": 1},
)
GENERATION = Generation(
    number=2,
    kind="training",
    state="ended",
    p=2,
    d=2,
    micro_batch=1,
    plan={"predicted_minibatch_s": 0.25},
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
)


def text_of(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("states", [JobState, GenerationState, VmState])
def test_every_state_has_a_sign_beside_its_word(states: type[StrEnum]) -> None:
    for state in states:
        assert render.STATE_SIGNS[state.value]
        assert state.value in render.state(state.value).plain


def test_the_client_and_the_manager_agree_on_when_a_job_is_over() -> None:
    assert {state.value for state in TERMINAL_JOB_STATES} == END_STATES


def test_a_failed_jobs_page_shows_the_traceback_word_for_word() -> None:
    event = Event(
        id=1,
        at="2026-01-01T00:00:03+00:00",
        job_id="j-1",
        generation=2,
        vm_id=None,
        kind="job_failed",
        message="the script raised",
        data={},
    )
    metric = Metric(step=7, loss=2.5, step_s=0.3, generation=2, at="2026-01-01T00:00:03+00:00")
    text = text_of(render.job_page(JOB, [GENERATION], [metric], [event]))
    assert "RuntimeError: no such [file]" in text
    assert "2×2" in text
    assert "best of 7 candidates" in text
    assert "the script raised" in text
    assert "predicted 0.250 s" in text


def test_tables_take_what_is_not_known_yet() -> None:
    fresh = Job(**{**JOB, "plan": None, "loss": None, "generation": None, "error": None})  # type: ignore[typeddict-item]
    vm = Vm(
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
    assert "gpt" in text_of(render.jobs_table([fresh]))
    assert "requested" in text_of(render.vms_table([vm]))
    slow = Vm(**{**vm, "slow_ratio": 1.5, "slow_reason": "rank 1 lags"})  # type: ignore[typeddict-item]
    assert "slow: rank 1 lags" in text_of(render.vms_table([slow]))
    until = Vm(**{**vm, "quarantined_until": "2026-01-01T00:00:01+00:00"})  # type: ignore[typeddict-item]
    assert "quarantined as slow until" in text_of(render.vms_table([until]))


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
    assert render.clock(None) == "-"
    assert render.clock("2023-11-14T22:13:20+00:00") == render.clock("2023-11-14T23:13:20+01:00")
