"""Training on CUDA devices is plain PyTorch's there: in fp32, bf16 and fp16, with several ranks on one device.

With one device all ranks share it and everything goes over gloo. With more, ranks take them in turn; where each
replica of a stage then has its own, gradients are summed over NCCL.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from small_gpt import Task, train_plainly
from training_matrix import FACTORS, Configuration, assert_equal, covering_rows, plainly, run
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]
HERE_FACTORS = {**FACTORS, "shape": SHAPES, "precision": ["float32", "bfloat16", "float16"]}
PAIRS = [
    ("shape", "precision"),
    ("shape", "tied"),
    ("shape", "skip"),
    ("precision", "tied"),
    ("precision", "optimizer"),
]
ROWS = [Configuration(**row) for row in covering_rows(HERE_FACTORS, PAIRS)]


def device_of(rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_training_is_plain_pytorchs(zygote: Zygote, tmp_path: Path, shape: tuple[int, int]) -> None:
    rows = [row for row in ROWS if row.shape == shape]
    for row, outcome in zip(rows, run(zygote, tmp_path, rows, device_of), strict=True):
        print(row)
        assert_equal(outcome, plainly(row, torch.device("cuda", 0)), row.precision)


def test_the_optimizer_may_be_on_the_host(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(precision="float16", loss_scale=2.0**7, offload=True, clip=0.5, learning_rate=1e-3)
    with Ranks(zygote, tmp_path, task, 2, 2, recompute=(True, False), device=device_of) as world:
        outcome = world.finish()
    assert_equal(outcome, train_plainly(task, world.micro_batch, device=torch.device("cuda", 0)), task.precision)


def test_dropout_does_not_depend_on_the_shape(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(global_batch=7, dropout=0.2, steps=3, learning_rate=1e-3)
    with Ranks(zygote, tmp_path / "alone", task, 1, 1, device=device_of) as world:
        alone = world.finish()
    with Ranks(zygote, tmp_path / "spread", task, 2, 2, recompute=(True, False), device=device_of) as world:
        spread = world.finish()
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, value in alone.parameters.items():
        torch.testing.assert_close(spread.parameters[name], value, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("p", "d"), [(3, 1), (1, 3)])
def test_survivors_leave_when_a_rank_is_killed(zygote: Zygote, tmp_path: Path, p: int, d: int) -> None:
    dying = {"die": {"rank": 1, "step": 3}, "forever": True}
    with Ranks(zygote, tmp_path, Task(), p, d, wanted=dying, device=device_of) as world:
        ends = world.ends()
    died = ends.pop(1)
    assert died["code"] == -signal.SIGKILL, world.logs()
    assert [end["code"] for end in ends.values()] == [EXIT_PEER_LOST] * 2, world.logs()
