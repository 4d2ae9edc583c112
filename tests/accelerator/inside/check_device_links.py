"""Links that stay on the devices, over an emulated NCCL: training is plain PyTorch's, and a lost rank is noticed.

NCCL itself needs GPUs: tests/gpu has the same rows for it.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import device_rows
from simulated import device_of
from small_gpt import Task, train_plainly
from survivor_world import SurvivorWorld
from training_kills import SCRIPT, N
from training_matrix import assert_equal
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST

LINKS: dict[str, Any] = {"emulates_nccl": True, "varuna": {"links": "nccl"}}


@pytest.mark.parametrize(("p", "precision"), [(3, "float32"), (2, "bfloat16")])
def test_training_is_plain_pytorchs(zygote: Zygote, tmp_path: Path, p: int, precision: str) -> None:
    device_rows.check_device_links(zygote, tmp_path, device_of, p, precision, emulated=True)


@pytest.mark.parametrize(("victim", "kill"), [(1, {"at": "op", "op": "B", "micro_batch": 1}), (2, {"at": "agreement"})])
def test_all_others_leave_when_a_rank_is_killed(
    zygote: Zygote, tmp_path: Path, victim: int, kill: dict[str, Any]
) -> None:
    wanted = {**LINKS, "kill": {"rank": victim, "step": 2, **kill}, "forever": True}
    task = Task(global_batch=2 * N)
    with Ranks(zygote, tmp_path, task, 3, 1, script=SCRIPT, device=device_of, wanted=wanted) as world:
        ends = world.ends()
    assert ends.pop(victim)["code"] == -signal.SIGKILL
    assert [end["code"] for end in ends.values()] == [EXIT_PEER_LOST] * 2, world.logs()
    assert "timed out" not in world.logs()


def test_survivors_go_on_in_place(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=5, global_batch=4 * N, tied=True, clip=0.5)
    wanted = {**LINKS, "kill": {"rank": 1, "step": 2, "at": "op", "op": "F", "micro_batch": 2}}
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, script=SCRIPT, device=device_of, wanted=wanted)
        world.go_on({1})
        assert_equal(world.finish(), train_plainly(task, device=torch.device(device_of(0))), task.precision)
