"""The agent's smaller pure parts: outbox, backoff, notices, settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from varuna_agent.link.manager_link import Backoff
from varuna_agent.notices.notices import Notice, parse_notice
from varuna_agent.settings import AgentSettings
from varuna_agent.state.messages import make_report_message
from varuna_agent.state.report_outbox import ReportOutbox
from varuna_proto.bounds import LOGGED_NAME_CHARS, MOST_REPORT_BYTES
from varuna_proto.v1 import agent_pb2 as pb


def steps_of(reports: tuple[pb.Report, ...]) -> list[int]:
    return [step.step for report in reports for step in report.steps_completed.steps]


def add_steps(outbox: ReportOutbox, steps: range) -> None:
    for step in steps:
        outbox.add_step("job", 1, pb.StepResult(step=step))


def test_waiting_steps_become_one_report() -> None:
    outbox = ReportOutbox()
    add_steps(outbox, range(1, 6))
    assert not outbox.is_empty
    reports = outbox.take_steps()
    assert [r.number for r in reports] == [1]
    assert steps_of(reports) == [1, 2, 3, 4, 5]
    assert outbox.take_steps() == ()
    outbox.discard_through(1)
    assert outbox.is_empty
    assert outbox.first_report == 2


def test_a_full_window_holds_steps_back_unless_something_must_follow_them() -> None:
    outbox = ReportOutbox(window=2)
    outbox.add_report(pb.Report())
    outbox.add_report(pb.Report())
    add_steps(outbox, range(1, 4))
    assert outbox.take_steps() == ()
    assert steps_of(outbox.take_steps(even_if_full=True)) == [1, 2, 3]


def logged(step: int, value: float, name: str = "accuracy", rank: int = 0) -> pb.LoggedValue:
    return pb.LoggedValue(name=name, step=step, value=value, rank=rank)


def test_logged_values_become_one_report_in_which_the_lowest_rank_counts_and_of_its_calls_the_last() -> None:
    outbox = ReportOutbox()
    for one in (logged(1, 0.1, rank=2), logged(1, 0.2, rank=1), logged(1, 0.3, rank=2), logged(1, 0.4, rank=1)):
        outbox.add_value("job", 1, one)
    outbox.add_value("job", 1, logged(2, 0.5, "f1", rank=2))
    assert not outbox.is_empty
    add_steps(outbox, range(1, 3))
    steps, values = outbox.take_steps()
    assert steps_of((steps,)) == [1, 2]
    fact = values.values_logged
    assert (fact.job_id, fact.generation) == ("job", 1)
    assert [(one.name, one.step, one.value, one.rank) for one in fact.values] == [
        ("accuracy", 1, 0.4, 1),
        ("f1", 2, 0.5, 2),
    ]
    assert outbox.take_steps() == ()


def test_the_values_that_wait_are_bounded_and_the_newest_stay() -> None:
    outbox = ReportOutbox(max_waiting_values=10)
    for step in range(1000):
        outbox.add_value("job", 1, logged(step, 0.5))
    (report,) = outbox.take_steps()
    steps = [one.step for one in report.values_logged.values]
    assert len(steps) <= 10
    assert steps[-3:] == [997, 998, 999]


@pytest.mark.parametrize("names", [2, 3, 8])
def test_each_name_loses_as_many_of_the_values_that_wait(names: int) -> None:
    outbox = ReportOutbox(max_waiting_values=50 * names)
    for step in range(500):
        for name in range(names):
            outbox.add_value("job", 1, logged(step, 0.5, f"n{name}"))
    (report,) = outbox.take_steps()
    steps: dict[str, list[int]] = {f"n{name}": [] for name in range(names)}
    for one in report.values_logged.values:
        steps[one.name].append(one.step)
    assert {tuple(kept[:1] + kept[-1:]) for kept in steps.values()} == {(0, 499)}
    counts = [len(kept) for kept in steps.values()]
    assert max(counts) - min(counts) <= 10


def test_more_names_than_can_wait_are_bounded_too() -> None:
    outbox = ReportOutbox(max_waiting_values=10)
    for number in range(1000):
        outbox.add_value("job", 1, logged(1, 0.5, f"n{number}"))
    (report,) = outbox.take_steps()
    assert len(report.values_logged.values) <= 10


def test_what_waited_for_long_goes_into_reports_that_the_manager_takes() -> None:
    outbox = ReportOutbox()
    for step in range(1, 20_001):
        full = pb.StepResult(step=step, loss=0.1, step_us=10**9, gradient_norm=0.1, learning_rate=0.1, copied_step=step)
        full.between.script_us = 10**9
        outbox.add_step("job", 1, full)
        if step <= 5_000:
            outbox.add_value("job", 1, logged(step, 0.1, "\N{GREEK SMALL LETTER ALPHA}" * LOGGED_NAME_CHARS, rank=9))
    reports = outbox.take_steps()
    assert steps_of(reports) == list(range(1, 20_001))
    values = [one.step for report in reports for one in report.values_logged.values]
    assert values == list(range(1, 5_001))
    assert max(make_report_message(report).ByteSize() for report in reports) < MOST_REPORT_BYTES
    assert [report.number for report in reports] == list(range(1, len(reports) + 1))
    assert len(reports) < 10


@given(count=some.integers(0, 500), bound=some.integers(4, 50))
def test_the_outbox_is_bounded_and_keeps_the_ends_of_the_curve(count: int, bound: int) -> None:
    outbox = ReportOutbox(max_waiting_steps=bound)
    add_steps(outbox, range(1, count + 1))
    assert outbox.waiting_steps <= bound
    steps = steps_of(outbox.take_steps())
    assert steps == sorted(set(steps))
    assert steps[:1] + steps[-1:] == ([1, count] if count else [])
    if count <= bound:
        assert len(steps) == count


@given(acknowledged=some.lists(some.integers(0, 30)))
def test_acknowledgements_in_any_order_drop_only_what_they_cover(acknowledged: list[int]) -> None:
    outbox = ReportOutbox()
    for _ in range(20):
        outbox.add_report(pb.Report())
    for through in acknowledged:
        outbox.discard_through(through)
    newest = max(acknowledged, default=0)
    assert [r.number for r in outbox.unacknowledged] == list(range(newest + 1, 21))
    assert outbox.first_report == min(newest + 1, 21)


@given(seed=some.integers(), failures=some.integers(1, 2000))
def test_backoff_doubles_to_its_bound_and_starts_anew(seed: int, failures: int) -> None:
    backoff = Backoff(0.1, 5.0, random.Random(seed))
    for failure in range(failures):
        expected = min(5.0, 0.1 * 2.0 ** min(failure, 32))
        assert expected / 2 <= backoff.next_s() <= expected
    backoff.reset_wait()
    assert backoff.next_s() <= 0.1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"id": "x"}', '{"id": "x", "deadline_unix_s": "soon"}'])
def test_half_a_notice_is_none(text: str) -> None:
    assert parse_notice(text, source="test") is None


def test_a_notice_counts_down_to_nothing() -> None:
    notice = parse_notice('{"id": 7, "deadline_unix_s": 1000}', source="test")
    assert notice == Notice("7", 1000.0, "test")
    assert notice.seconds_left(970.0) == 30.0
    assert notice.seconds_left(1001.0) == 0.0


@pytest.mark.parametrize("manager", ["127.0.0.1:80", "127.9.9.9:1", "localhost:7443", "[::1]:7443"])
def test_managers_on_this_machine_are_taken(manager: str) -> None:
    AgentSettings(manager=manager, vm_id="v", vm_dir=Path())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"manager": "10.0.0.1:80"}, "loopback"),
        ({"manager": "example.com:80"}, "loopback"),
        ({"manager": "127.0.0.1"}, "expected host:port"),
        ({"manager": "127.0.0.1:0"}, "expected host:port"),
        ({"manager": "127.0.0.1:http"}, "expected host:port"),
        ({"vm_id": ""}, "--vm-id"),
        ({"gpus": 0}, "--gpus 0"),
        ({"device": "tpu"}, "--device 'tpu'"),
        ({"reconnect_first_s": 9.0}, "first <= most"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AgentSettings(**{"manager": "127.0.0.1:80", "vm_id": "v", "vm_dir": Path(), **changes})
