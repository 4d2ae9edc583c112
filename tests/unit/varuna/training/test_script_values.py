"""What a script logs by `varuna.log`: what is passed on, what is left out, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import varuna
from training_roles import training_role
from varuna.roles.meeting import Meeting
from varuna.roles.reshaping import SettledSums
from varuna.worker.script_values import ScriptValues
from varuna_proto.bounds import MOST_LOGGED_NAMES

Sent = list[tuple[int, Mapping[str, float]]]


@pytest.fixture
def sent() -> Sent:
    return []


@pytest.fixture
def values(sent: Sent) -> ScriptValues:
    values = ScriptValues()
    values.send_to(lambda step, found: sent.append((step, found)))
    return values


def test_numbers_of_any_kind_are_passed_on(values: ScriptValues, sent: Sent) -> None:
    values.log_values({"accuracy": 0.5, "tokens": 7, "norm": torch.tensor([0.25])}, 3)
    values.log_values({}, 4)
    assert sent == [(3, {"accuracy": 0.5, "tokens": 7.0, "norm": 0.25})]


def test_what_is_not_finite_is_left_out_with_one_line_for_each_name(
    values: ScriptValues, sent: Sent, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(3):
        values.log_values({"perplexity": math.inf, "accuracy": 0.5}, step)
    values.log_values({"perplexity": math.nan}, 3)
    assert sent == [(step, {"accuracy": 0.5}) for step in range(3)]
    assert capsys.readouterr().out.count("leaves out 'perplexity', because it is inf") == 1


def test_names_are_bounded(values: ScriptValues, sent: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(2):
        values.log_values({f"name {number}": 1.0 for number in range(MOST_LOGGED_NAMES + 2)}, step)
    assert [len(found) for _, found in sent] == [MOST_LOGGED_NAMES] * 2
    assert capsys.readouterr().out.count(f"a job may log under {MOST_LOGGED_NAMES} names") == 2


@pytest.mark.parametrize(
    ("given", "step", "match"),
    [
        ({"accuracy": 0.5}, -1, r"log\(…, -1\) at .*test_script_values.py.*: a step is a whole number from 0"),
        ({"accuracy": 0.5}, 1.5, "a step is a whole number"),
        ({"accuracy": 0.5}, True, "a step is a whole number"),
        ({"": 0.5}, 1, "the name '' is empty"),
        ({" x": 0.5}, 1, "begins or ends with a space"),
        ({"x" * 101: 0.5}, 1, "has more than 100 characters"),
        ({"a\nb": 0.5}, 1, "cannot be printed"),
        ({7: 0.5}, 1, "the name 7 is no text"),
        ({"accuracy": "high"}, 1, "'accuracy' is a str: give a number, or a tensor with one element"),
        ({"accuracy": None}, 1, "'accuracy' is a NoneType"),
        ({"accuracy": torch.ones(2)}, 1, "'accuracy' is a Tensor: give a number, or a tensor with one element"),
    ],
)
def test_what_is_of_no_use_is_refused_with_its_place(
    values: ScriptValues, given: Mapping[str, float], step: int, match: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        values.log_values(given, step)


def test_before_varuna_nobody_takes_values() -> None:
    with pytest.raises(RuntimeError, match=r"call it after Varuna\(model, ...\)"):
        ScriptValues().log_values({"accuracy": 0.5}, 1)


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def test_a_plain_process_only_checks_them() -> None:
    varuna.Varuna(Squared(), get_batch_fn={"x": torch.ones(2, 2)})
    varuna.log({"accuracy": 0.5}, 0)
    with pytest.raises(ValueError, match="a step is"):
        varuna.log({"accuracy": 0.5}, -1)


def test_values_go_to_the_curves_of_the_newest_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_TENSORBOARD", str(tmp_path))
    batch = {"x": torch.ones(2, 2)}
    model = varuna.Varuna(Squared(), get_batch_fn=batch)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    meeting = Meeting(SettledSums([], [], [], None))
    for step in (1, 2):
        model.step(batch)
        varuna.log({"accuracy": 0.5}, step)
        training_role(model)._membership._follow_generation(meeting)
    files = [EventAccumulator(str(file)).Reload() for file in tmp_path.iterdir()]
    found = [[[point.step for point in one.Scalars(tag)] for tag in ("train/loss", "script/accuracy")] for one in files]
    assert sorted(found) == [[[1], [1]], [[2], [2]]]
