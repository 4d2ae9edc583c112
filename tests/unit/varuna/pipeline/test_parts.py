"""Forecasts and timelines, in one process."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from varuna.diagnostics.timeline import ALL_REDUCE, OPS, Timeline, merge_ranks
from varuna.pipeline.gradient_forecast import GradientForecast
from varuna.pipeline.pass_timer import OpTimes

MS = 1_000_000


USUAL = OpTimes(forward_us=1000, recompute_us=1000, backward_us=2000)


def test_nothing_is_forecast_before_a_first_pass() -> None:
    forecast = GradientForecast(stages_after=3)
    forecast.begin_pass(OpTimes())
    forecast.record_first_forward(0)
    assert forecast.due_us(5) == -1.0


def test_the_first_gradient_is_due_when_the_stages_after_could_have_made_it() -> None:
    forecast = GradientForecast(stages_after=3)
    forecast.begin_pass(USUAL)
    forecast.record_first_forward(100 * MS)
    # There is nothing to prepare for before the next stage should have begun it.
    assert forecast.due_us(100 * MS) == -1.0
    assert forecast.changes_in_s(100 * MS) == pytest.approx(0.007)
    assert forecast.due_us(107 * MS) == 2000.0
    assert forecast.due_us(108 * MS) == 1000.0
    assert forecast.changes_in_s(108 * MS) == pytest.approx(0.001)
    assert forecast.changes_in_s(110 * MS) == math.inf
    assert forecast.due_us(110 * MS) == 0.0


def test_each_other_gradient_is_due_a_backward_after_the_one_before_it() -> None:
    forecast = GradientForecast(stages_after=3)
    forecast.begin_pass(USUAL)
    forecast.record_first_forward(100 * MS)
    forecast.record_arrivals(1, 115 * MS)
    assert forecast.due_us(116 * MS) == 1000.0
    forecast.record_arrivals(1, 116 * MS)  # nothing new
    assert forecast.due_us(116 * MS) == 1000.0
    forecast.record_arrivals(3, 130 * MS)
    assert forecast.due_us(130 * MS) == 2000.0
    forecast.begin_pass(USUAL)
    forecast.record_first_forward(200 * MS)
    assert forecast.due_us(200 * MS) == -1.0
    assert forecast.due_us(208 * MS) == 1000.0


def test_only_chosen_steps_are_written(tmp_path: Path) -> None:
    environ = {"VARUNA_TRACE_STEPS": "2,4", "VARUNA_TRACE_DIR": str(tmp_path / "traces")}
    timeline = Timeline.from_environ(environ, rank=3, p=2)
    for step in range(1, 6):
        timeline.begin_step(step)
        timeline.add_span(OPS, "F0", 1000, 3000, micro_batch=0)
        timeline.add_span("activations to rank 4", "send 0", 3000, 4000, micro_batch=0)
        timeline.add_span(ALL_REDUCE, "bucket 0", 5000, 6000)
        timeline.end_step()
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {"step2-rank3.json", "step4-rank3.json"}
    events = merge_ranks(tmp_path / "traces", 2)["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [
        "ops",
        "activations to rank 4",
        "all-reduce",
    ]
    assert "rank 3: stage 1, replica 1" in json.dumps(events)
    done = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["dur"], event["args"]["step"]) for event in done] == [
        ("F0", 2.0, 2),
        ("send 0", 1.0, 2),
        ("bucket 0", 1.0, 2),
    ]


def test_a_timeline_takes_spans_from_many_threads(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, [1])
    timeline.begin_step(1)

    def add() -> None:
        for number in range(200):
            timeline.add_span(OPS, f"F{number}", number, number + 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.end_step()
    assert sum(event["ph"] == "X" for event in merge_ranks(tmp_path, 1)["traceEvents"]) == 800


def test_no_trace_unless_asked_for(tmp_path: Path) -> None:
    timeline = Timeline.from_environ({}, rank=0, p=1)
    timeline.begin_step(1)
    assert not timeline.recording
    timeline.add_span(OPS, "F0", 0, 1)
    timeline.end_step()
    with pytest.raises(FileNotFoundError, match="VARUNA_TRACE_STEPS"):
        merge_ranks(tmp_path, 1)


@pytest.mark.parametrize("environ", [{"VARUNA_TRACE_STEPS": "3"}, {"VARUNA_TRACE_STEPS": "x", "VARUNA_TRACE_DIR": "y"}])
def test_a_bad_wish_for_traces_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="VARUNA_TRACE"):
        Timeline.from_environ(environ, rank=0, p=1)
