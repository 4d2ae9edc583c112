"""A policy orders the work; the result is the same to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_gpt import Task
from training_world import Outcome, Ranks, Zygote
from varuna_planner.schedule.policies import Policy


@pytest.mark.slow
def test_all_policies_train_alike(zygote: Zygote, tmp_path: Path) -> None:
    outcomes: dict[Policy, Outcome] = {}
    for policy in (policy for policy in Policy if policy.executable):
        with Ranks(
            zygote,
            tmp_path / policy,
            Task(global_batch=11, tied=True, clip=0.5),
            3,
            1,
            policy=policy.value,
            run_ahead=1,
            recompute=(True, True, False),
        ) as world:
            outcomes[policy] = world.finish()

    expected = outcomes[Policy.GPIPE]
    assert expected.losses[-1] < expected.losses[0]
    for outcome in outcomes.values():
        assert outcome.losses == expected.losses
        assert outcome.norms == expected.norms
        for name, value in expected.parameters.items():
            assert torch.equal(outcome.parameters[name], value), name
