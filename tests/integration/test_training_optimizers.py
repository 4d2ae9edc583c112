"""Losses, norms, parameters and the optimizer's state are plain PyTorch's, in any shape, order and precision.

Not the full product: rows are chosen so that each two values of shape, policy, optimizer, precision, batch and model
that may meet badly meet in one of them. Half precision is compared with plain autocast over the same micro-batches:
a product's gradient is rounded once per micro-batch, so with others the two would differ by that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_gpt import Task, train_plainly
from training_world import World, Zygote

TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {"loss": 1e-5, "norm": 1e-4, "rtol": 1e-4, "atol": 2e-5},
    # Much wider than seen (1e-7): what lies at the edge between two half-precision values may fall either way.
    "bfloat16": {"loss": 1e-4, "norm": 1e-3, "rtol": 1e-3, "atol": 1e-4},
    "float16": {"loss": 1e-4, "norm": 1e-3, "rtol": 1e-3, "atol": 1e-4},
}
ALL_BUT_LAST = {p: {"recompute": (True,) * (p - 1) + (False,)} for p in range(2, 7)}


def assert_close(ours: Tensor, theirs: Tensor, what: str, precision: str) -> None:
    within = TOLERANCES[precision]
    torch.testing.assert_close(
        ours, theirs, rtol=within["rtol"], atol=within["atol"], msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize(
    ("p", "d", "task", "options"),
    [
        pytest.param(p, d, task, options, id=f"{p}x{d}-{task.optimizer}-{task.precision}-{name}")
        for p, d, name, task, options in [
            (1, 2, "skip", Task(optimizer="momentum", skip=True, clip=0.5), {"policy": "gpipe"}),
            (2, 1, "tied", Task(optimizer="lamb", tied=True, clip=0.1), {"policy": "gpipe", **ALL_BUT_LAST[2]}),
            (1, 3, "uneven", Task(global_batch=11, optimizer="lamb", clip=1.0), {"policy": "varuna"}),
            (
                3,
                1,
                "offload-tied",
                Task(optimizer="momentum", offload=True, tied=True),
                {"policy": "1f1b", "run_ahead": 1},
            ),
            (3, 2, "uneven-skip", Task(global_batch=9, skip=True, clip=0.5), {"policy": "varuna", **ALL_BUT_LAST[3]}),
            (6, 1, "skip-tied", Task(optimizer="lamb", blocks=6, skip=True, tied=True, clip=0.5), ALL_BUT_LAST[6]),
            (1, 1, "skip", Task(precision="bfloat16", skip=True, clip=0.5), {"recompute": (True,)}),
            (1, 4, "uneven", Task(global_batch=9, precision="bfloat16", optimizer="lamb", clip=1.0), {}),
            (
                2,
                2,
                "skip-tied",
                Task(precision="bfloat16", skip=True, tied=True),
                {"policy": "1f1b", **ALL_BUT_LAST[2]},
            ),
            (5, 1, "skip", Task(precision="bfloat16", blocks=5, optimizer="momentum", skip=True), {"policy": "varuna"}),
            (
                2,
                3,
                "uneven-tied",
                Task(global_batch=13, precision="bfloat16", optimizer="lamb", tied=True, clip=0.5),
                {},
            ),
            (
                2,
                2,
                "skip",
                Task(precision="float16", loss_scale=2.0**7, skip=True, offload=True, clip=0.5),
                ALL_BUT_LAST[2],
            ),
            (4, 1, "tied", Task(precision="float16", optimizer="momentum", tied=True), {"policy": "gpipe"}),
        ]
    ],
)
def test_training_is_plain_pytorchs(
    zygote: Zygote, tmp_path: Path, p: int, d: int, task: Task, options: dict[str, Any]
) -> None:
    with World(zygote, tmp_path, task, p, d, **options) as world:
        outcome = world.finish()

    expected = train_plainly(task, micro_batch=None if task.precision == "float32" else world.micro_batch)
    within = TOLERANCES[task.precision]
    assert outcome.losses == pytest.approx(expected.losses, rel=within["loss"])
    assert outcome.norms == pytest.approx(expected.norms, rel=within["norm"])
    assert outcome.parameters.keys() == expected.parameters.keys() == outcome.states.keys()
    for name, value in expected.parameters.items():
        assert_close(outcome.parameters[name], value, name, task.precision)
        assert outcome.states[name].keys() == expected.states[name].keys()
        for key, kept in expected.states[name].items():
            assert_close(outcome.states[name][key], kept, f"{key} of {name}", task.precision)
