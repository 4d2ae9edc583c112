"""Where a script that raises an exception has left the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varuna.roles.leaving
from training_roles import training_role
from varuna import Varuna
from varuna.checkpoint import CheckpointError
from varuna.checkpoint.loading.loader import StagedCheckpoint
from varuna.checkpoint.script_states import RegisteredStates
from varuna.distributed.departure import GenerationEnded
from varuna.roles.failing import ScriptHabits, are_finite


class Script:
    """One parameter, and a schedule that the script may step between two steps."""

    def __init__(self) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        self.optimizers = [torch.optim.SGD([parameter], lr=0.1)]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], step_size=100)
        self.registered = RegisteredStates()
        self.registered.register_state("schedule", self.schedule)
        self.habits = ScriptHabits()

    def step(self) -> None:
        self.habits.begin_step(self.optimizers, self.registered)
        self.optimizers[0].step()
        self.habits.end_step(self.optimizers, self.registered)

    @property
    def is_between_steps(self) -> bool:
        return self.habits.is_between_steps(self.optimizers, self.registered)


def test_a_script_that_steps_its_schedule_has_to_do_so_before_it_fails() -> None:
    script = Script()
    script.step()
    script.schedule.step()
    script.step()
    assert not script.is_between_steps, "the schedule is one step behind, although the rate is the same"
    script.schedule.step()
    assert script.is_between_steps


def test_a_chain_of_schedules_is_seen_to_step() -> None:
    """It counts nothing itself."""
    script = Script()
    lasting = torch.optim.lr_scheduler.ConstantLR(script.optimizers[0], total_iters=100)
    chain = torch.optim.lr_scheduler.ChainedScheduler([script.schedule, lasting])
    script.registered = RegisteredStates()
    script.registered.register_state("chain", chain)
    script.step()
    chain.step()
    script.step()
    assert not script.is_between_steps, "the chain is one step behind, although the rate is the same"
    chain.step()
    assert script.is_between_steps


def test_a_script_without_schedules_may_fail_anywhere_between_two_steps() -> None:
    script = Script()
    script.step()
    assert not script.is_between_steps, "what it does between two steps is not known yet"
    script.step()
    assert script.is_between_steps
    script.optimizers[0].param_groups[0]["lr"] = 0.2
    assert not script.is_between_steps, "it has done something unusual"


def test_of_other_registered_states_nobody_knows_whether_they_are_complete() -> None:
    script = Script()
    script.registered.register_state("varuna.own", nn.Linear(1, 1))
    script.step()
    script.step()
    assert script.is_between_steps
    script.registered.register_state("sampler", nn.Linear(1, 1))
    assert not script.is_between_steps


@pytest.mark.parametrize(("value", "is_finite"), [(1.0, True), (float("nan"), False), (float("inf"), False)])
def test_parameters_that_are_not_finite_are_left_to_nobody(value: float, *, is_finite: bool) -> None:
    assert are_finite([torch.zeros(2), torch.tensor([1.0, value])]) is is_finite


class Scaled(nn.Module):
    """Its loss is the mean of its inputs, scaled; it refuses inputs that are not positive."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x * self.scale).mean()
        return loss


INPUTS = {"x": torch.ones(4, 2)}
LEFT_AT = 3
"""The newest step that is done when a call fails."""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose states have been left in memory."""
    steps: list[int] = []
    monkeypatch.setattr(varuna.roles.leaving, "leave_in_memory", lambda state, step, **rest: steps.append(step))
    return steps


@pytest.fixture
def model(tmp_path: Path) -> Varuna:
    """Trained for three steps, with a checkpoint of the first in `tmp_path`."""
    model = Varuna(Scaled(), get_batch_fn=INPUTS)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(1, LEFT_AT + 1):
        model.step(INPUTS)
        if step == 1:
            model.checkpoint(str(tmp_path))
    return model


def fail(model: Varuna) -> None:
    """What an exception that nobody catches does."""
    training_role(model)._holder._store_after_failure()


def load_half(model: Varuna, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that fails when it has filled the parameters."""

    def refuse(*_: Any) -> None:
        raise CheckpointError("the store is gone")

    with monkeypatch.context() as patch:
        patch.setattr(StagedCheckpoint, "fill_for_update", refuse)
        with pytest.raises(CheckpointError, match="the store is gone"):
            model.load_checkpoint(str(folder), 1)


def test_a_script_that_fails_between_two_steps_leaves_its_state(model: Varuna, left: list[int]) -> None:
    fail(model)
    assert left == [LEFT_AT]


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.evaluate(INPUTS, batch_size=5),
        lambda model: model.checkpoint("/dev/null/nowhere"),
        lambda model: model.load_checkpoint("/nowhere", 1),
    ],
    ids=["evaluate", "checkpoint", "load_checkpoint"],
)
def test_a_script_that_fails_in_another_call_leaves_nothing(
    model: Varuna, left: list[int], call: Callable[[Varuna], object]
) -> None:
    with pytest.raises((ValueError, CheckpointError)):
        call(model)
    fail(model)
    assert left == []
    model.step(INPUTS)
    fail(model)
    assert left == [LEFT_AT + 1], "the script has caught the error, and has gone on"


def test_a_state_of_two_steps_is_neither_left_nor_trained_with(
    model: Varuna, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that catches the error of its load believes that nothing was changed."""
    role = training_role(model)
    load_half(model, tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match="load_checkpoint"):
        model.step(INPUTS)
    with pytest.raises(RuntimeError, match="load_checkpoint"):
        model.checkpoint(str(tmp_path))
    model.evaluate(INPUTS)
    fail(model)
    assert left == []
    role._progress.is_ready = True
    assert not role._holder._try_to_stay(GenerationEnded("a peer is lost"))
    model.load_checkpoint(str(tmp_path), 1)
    model.step(INPUTS)
    model.step(INPUTS)
    fail(model)
    assert left == [3]


def test_an_evaluation_whose_loss_the_others_know_has_not_failed(model: Varuna, left: list[int]) -> None:
    progress = training_role(model)._progress
    progress.has_call_failed, progress.missed_loss = True, 0.5
    assert model.evaluate(INPUTS) == 0.5
    fail(model)
    assert left == [LEFT_AT]
