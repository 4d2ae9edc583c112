"""Buffers that forward writes are replica 0's after each step, on all ranks, in checkpoints and in the next shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote
from written_buffers_script import BATCH, Model, examples

SCRIPT = TRAINING_SCRIPTS / "written_buffers_script.py"
SHARES = [[0, 6], [6, 10]]
"""For two replicas with micro-batches of two: three of them and two."""


def train_plainly(model: Model, steps: range, replicas: int, losses: list[float]) -> None:
    """Trains in one process by the same rule: each replica starts from the same buffers, and replica 0's are kept."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        kept: dict[str, torch.Tensor] = {}
        total = 0.0
        for first, end in SHARES if replicas == 2 else [[0, BATCH]]:
            model.load_state_dict(before, strict=False)
            for start in range(first, end, 2):
                loss = model(examples(step)[start : start + 2])
                (loss * 2 / BATCH).backward()
                total += loss.item() * 2 / BATCH
            kept = kept or {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.load_state_dict(kept, strict=False)
        optimizer.step()
        losses.append(total)


def ranks_of(world: Ranks) -> list[dict[str, Any]]:
    codes = world.exit_codes()
    assert codes == [0] * (world.p * world.d), world.logs()
    return [torch.load(world.out / f"rank{rank}.pt") for rank in range(world.p * world.d)]


def test_replicas_follow_the_first_and_so_do_checkpoints_and_other_shapes(zygote: Zygote, tmp_path: Path) -> None:
    task, plain = Task(global_batch=BATCH), Model()
    losses: list[float] = []
    store = str(tmp_path / "store")
    for generation, (p, d, first, last) in enumerate([(2, 2, 1, 3), (1, 1, 4, 5)], start=1):
        wanted = {"steps": last, "save": True, "p": p, "shares": SHARES if d == 2 else [[0, BATCH]]}
        train_plainly(plain, range(first, last + 1), d, losses)
        with Ranks(
            zygote,
            tmp_path,
            task,
            p,
            d,
            generation=generation,
            recompute=(True,) * (p - 1) + (False,),
            checkpoint_url=store,
            wanted=wanted,
            script=SCRIPT,
        ) as world:
            found = ranks_of(world)
        expected = {**dict(plain.named_buffers()), **dict(plain.named_parameters())}
        for rank in found:
            assert rank["losses"] == pytest.approx(losses[first - 1 :], rel=1e-5)
            assert rank["evaluated"] == found[0]["evaluated"]
            for name, tensor in {**rank["buffers"], **rank["parameters"]}.items():
                torch.testing.assert_close(tensor, expected[name], msg=f"{name} in generation {generation}")
