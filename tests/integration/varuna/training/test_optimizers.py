"""Training is plain PyTorch's in fp16, too, with the optimizer on the host, and with micro-batches run ahead.

The other combinations are in `test_training_matrix.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from small_gpt import Task, train_plainly
from training_matrix import assert_equal
from training_world import Ranks, Zygote


@pytest.mark.parametrize(
    ("p", "d", "task", "options"),
    [
        pytest.param(
            3,
            1,
            Task(optimizer="momentum", offload=True, tied=True),
            {"policy": "1f1b", "run_ahead": 1},
            id="3x1-momentum-offload-tied",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            2,
            Task(precision="float16", loss_scale=2.0**7, skip=True, offload=True, clip=0.5),
            {"recompute": (True, False)},
            id="2x2-float16-offload-skip",
        ),
        pytest.param(
            4,
            1,
            Task(precision="float16", optimizer="momentum", tied=True),
            {"policy": "gpipe"},
            id="4x1-float16-momentum-tied",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_plain_pytorchs(
    zygote: Zygote, tmp_path: Path, p: int, d: int, task: Task, options: dict[str, Any]
) -> None:
    with Ranks(zygote, tmp_path, task, p, d, **options) as world:
        outcome = world.finish()

    micro_batch = None if task.precision == "float32" else world.micro_batch
    assert_equal(outcome, train_plainly(task, micro_batch), task.precision)
