"""Training on GPUs, and on the simulated accelerator, compared with plain PyTorch on the same device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from small_gpt import Task, train_plainly
from training_matrix import FACTORS, Configuration, assert_equal, covering_rows, plainly, run
from training_world import Ranks, Zygote

__all__ = ["PRECISIONS", "SHAPES", "check_device_links", "check_dropout", "check_host_optimizer", "check_rows"]

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]
PRECISIONS = ["float32", "bfloat16", "float16"]
_FACTORS = {**FACTORS, "shape": SHAPES, "precision": PRECISIONS}
_PAIRS = [
    ("shape", "precision"),
    ("shape", "tied"),
    ("shape", "skip"),
    ("precision", "tied"),
    ("precision", "optimizer"),
]
_ROWS = [Configuration(**row) for row in covering_rows(_FACTORS, _PAIRS)]

DeviceOf = Callable[[int], str]
"""The device of a rank."""


def check_rows(zygote: Zygote, folder: Path, device_of: DeviceOf, shape: tuple[int, int], precision: str) -> None:
    """All rows of one shape and precision are plain PyTorch's."""
    rows = [row for row in _ROWS if (row.shape, row.precision) == (shape, precision)]
    for row, outcome in zip(rows, run(zygote, folder, rows, device_of), strict=True):
        print(row)
        assert_equal(outcome, plainly(row, torch.device(device_of(0))), row.precision)


def check_device_links(
    zygote: Zygote, folder: Path, device_of: DeviceOf, p: int, precision: str, *, emulated: bool = False
) -> None:
    """Messages that stay on the devices. `emulated`: over an emulated NCCL."""
    task = Task(global_batch=7, tied=True, clip=0.5, precision=precision, loss_scale=2.0**7)
    wanted = {"varuna": {"links": "nccl"}, "emulates_nccl": emulated}
    recompute = (True,) * (p - 1) + (False,)
    with Ranks(zygote, folder, task, p, 1, recompute=recompute, device=device_of, wanted=wanted) as world:
        outcome = world.finish()
    assert_equal(outcome, train_plainly(task, world.micro_batch, device=torch.device(device_of(0))), precision)


def check_host_optimizer(zygote: Zygote, folder: Path, device_of: DeviceOf) -> None:
    task = Task(precision="float16", loss_scale=2.0**7, offload=True, clip=0.5, learning_rate=1e-3)
    with Ranks(zygote, folder, task, 2, 2, recompute=(True, False), device=device_of) as world:
        outcome = world.finish()
    assert_equal(outcome, train_plainly(task, world.micro_batch, device=torch.device(device_of(0))), task.precision)


def check_dropout(zygote: Zygote, folder: Path, device_of: DeviceOf) -> None:
    """Random numbers do not depend on the shape."""
    task = Task(global_batch=7, dropout=0.2, steps=3, learning_rate=1e-3)
    with Ranks(zygote, folder / "alone", task, 1, 1, device=device_of) as world:
        alone = world.finish()
    with Ranks(zygote, folder / "spread", task, 2, 2, recompute=(True, False), device=device_of) as world:
        spread = world.finish()
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, value in alone.parameters.items():
        torch.testing.assert_close(spread.parameters[name], value, rtol=1e-4, atol=2e-5)
