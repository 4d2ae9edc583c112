"""The engine and the simulator order a mini-batch alike, and agree on its duration."""

from __future__ import annotations

import numpy as np
import pytest

from varuna.distributed.departure import Departure
from varuna.pipeline import engine, pass_timer
from varuna.pipeline.engine import Engine
from varuna.pipeline.stage_setting import StageLinks, StagePosition
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.schedule.policies import Policy
from varuna_planner.simulator.simulation import MinibatchTimes, simulate
from virtual_pipeline import Clock, Ran, Times, run_engines

EXECUTABLE = [
    policy if policy is Policy.WORK_CONSERVING else pytest.param(policy, marks=pytest.mark.slow)
    for policy in Policy
    if policy.executable
]


def random_times(random: np.random.Generator) -> Times:
    """Stages of any speed, with noise; links from fast to slower than a forward; some stages without recompute."""
    P, N = int(random.integers(2, 6)), int(random.integers(1, 13))
    usual = random.integers(200, 2000, (3, P, 1)) * np.array([1, 1, 2])[:, None, None]
    action = np.round(usual * random.uniform(0.7, 1.5, (3, P, N))).astype(np.int64)
    recompute = tuple(bool(flag) for flag in random.random(P - 1) < 0.8)
    return Times(
        action_us=action, latency_us=random.integers(0, 1500, P), recompute=(*recompute, bool(random.random() < 0.2))
    )


def simulated_pipeline(times: Times, ran: Ran) -> Pipeline:
    _, P, N = times.action_us.shape
    rows = [np.repeat(usual[None], 2, axis=0) for usual in ran.usual_us]
    return Pipeline(
        micro_batches=N,
        forward_us=rows[0],
        recompute_us=rows[1],
        backward_us=rows[2],
        activation_transfer_us=np.zeros((2, P)),
        gradient_transfer_us=np.zeros((2, P)),
        latency_us=times.latency_us.astype(np.float64),
        finish_us=np.zeros(P),
        recompute=np.array(times.recompute),
    )


@pytest.mark.parametrize("policy", EXECUTABLE)
def test_the_engine_and_the_simulator_choose_alike(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own loop, forecasts and all, on 25 random instances: every stage's order, and the makespan."""

    def patch_time(clock: Clock) -> None:
        monkeypatch.setattr(engine, "time", clock)
        monkeypatch.setattr(pass_timer, "time", clock)

    for seed in range(25):
        random = np.random.default_rng(seed)
        times, run_ahead = random_times(random), int(random.integers(0, 5))
        ran = run_engines(times, policy, run_ahead, patch_time)
        course = MinibatchTimes(
            action_us=times.action_us.astype(np.float64), delay_us=np.zeros((2, *times.action_us.shape[1:]))
        )
        result = simulate(simulated_pipeline(times, ran), policy, run_ahead=run_ahead, jitter=course)
        assert result.actions == ran.order, f"seed {seed}"
        assert result.makespan_us == pytest.approx(ran.makespan_us), f"seed {seed}"


def test_the_engine_refuses_a_policy_that_can_only_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    position = StagePosition(stage=0, p=1, policy=Policy.ZERO_BUBBLE, run_ahead=0, recompute=False)
    with pytest.raises(ValueError, match="'zero-bubble' can only be simulated, not run: choose one of gpipe, 1f1b"):
        Engine(None, position=position, links=StageLinks(), device=None, departure=Departure())
