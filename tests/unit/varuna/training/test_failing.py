"""Where a script that raises an exception has left the state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from varuna.checkpoint.script_states import RegisteredStates
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
