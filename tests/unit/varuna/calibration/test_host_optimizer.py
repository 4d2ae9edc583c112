"""The time of an optimizer on the host is in the profile, and so in the predicted step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner_profiles import make_profile
from varuna.calibration import optimizer_costs as optimizer_costs_module
from varuna.calibration.clock import ComputeClock
from varuna.calibration.optimizer_costs import HostCopies, OptimizerSetup, OptimizerTime
from varuna_planner.profile.document import Profile
from varuna_planner.what_if import SimulationRequest, simulate_plan

CPU = torch.device("cpu")
COPIES = HostCopies(gradient_us=3.0, parameter_us=2.0)


class OwnSgd(torch.optim.SGD):
    """The script's own class: its step is called once for all parameters."""


@pytest.mark.parametrize(
    ("kind", "step_us", "on_device", "expected"),
    [
        (torch.optim.SGD, 5.0, True, 5.0),
        (torch.optim.SGD, 5.0, False, 7.0),  # gradients come while others are stepped
        (torch.optim.SGD, 1.0, False, 5.0),  # steps wait for gradients
        (OwnSgd, 5.0, False, 10.0),
    ],
)
def test_a_step_on_the_host_takes_its_gradients_there_and_its_parameters_back(
    kind: Any, step_us: float, on_device: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_costs_module, "time_optimizer", lambda *_: OptimizerTime(0.5, step_us))
    monkeypatch.setattr(optimizer_costs_module, "time_host_copies", lambda *_: COPIES)
    parameter = nn.Parameter(torch.zeros(8))
    setup = OptimizerSetup(kind([parameter], lr=0.1), on_device=on_device)
    costs = setup.measure_costs(CPU, ComputeClock(CPU))
    assert costs.us_for([parameter]) == 0.5 + 8 * expected


def predict_step_s(profile: Profile) -> float:
    request = SimulationRequest(profile=profile, p=2, d=1, micro_batch=2, global_batch=16, stage_starts=(0, 2))
    return simulate_plan(request).minibatch_us / 1e6


def test_the_predicted_step_has_the_time_of_an_optimizer_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_costs_module, "time_optimizer", lambda *_: OptimizerTime(0.0, 0.001))
    monkeypatch.setattr(optimizer_costs_module, "time_host_copies", lambda *_: HostCopies(0.002, 0.003))
    profile, parameter = make_profile([1, 1, 1, 1]), nn.Parameter(torch.zeros(10**6))

    def with_costs(*, on_device: bool) -> Profile:
        setup = OptimizerSetup(torch.optim.SGD([parameter], lr=0.1), on_device=on_device)
        step_us = setup.measure_costs(CPU, ComputeClock(CPU)).us_for([parameter])
        sections = [section.model_copy(update={"optimizer_us": step_us}) for section in profile.sections]
        return profile.model_copy(update={"sections": tuple(sections)})

    here, there = (predict_step_s(with_costs(on_device=on_device)) for on_device in (True, False))
    # Of two sections with a million elements each.
    assert there - here == pytest.approx(2 * (0.005 - 0.001), rel=1e-6)
    assert here - predict_step_s(profile) == pytest.approx(2 * 0.001, rel=1e-6)


def test_a_setup_that_is_not_known_costs_nothing_on_the_host_either() -> None:
    costs = OptimizerSetup(on_device=False).measure_costs(CPU, ComputeClock(CPU))
    assert costs.us_for([nn.Parameter(torch.zeros(8))]) == 0.0
