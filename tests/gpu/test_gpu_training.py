"""Training on CUDA devices is plain PyTorch's there: in fp32, bf16 and fp16, with several ranks on one device.

With one device all ranks share it and everything goes over gloo. With more, ranks take them in turn; where each
replica of a stage then has its own, gradients are summed over NCCL.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import device_rows
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST


def device_of(rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}"


@pytest.mark.parametrize("precision", device_rows.PRECISIONS)
@pytest.mark.parametrize("shape", device_rows.SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_training_is_plain_pytorchs(zygote: Zygote, tmp_path: Path, shape: tuple[int, int], precision: str) -> None:
    device_rows.check_rows(zygote, tmp_path, device_of, shape, precision)


def test_the_optimizer_may_be_on_the_host(zygote: Zygote, tmp_path: Path) -> None:
    device_rows.check_host_optimizer(zygote, tmp_path, device_of)


def test_dropout_does_not_depend_on_the_shape(zygote: Zygote, tmp_path: Path) -> None:
    device_rows.check_dropout(zygote, tmp_path, device_of)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, and there is one")
@pytest.mark.parametrize("precision", device_rows.PRECISIONS)
def test_links_over_nccl_train_as_plain_pytorch(zygote: Zygote, tmp_path: Path, precision: str) -> None:
    device_rows.check_device_links(zygote, tmp_path, device_of, 2, precision)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, and there is one")
@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_leaves_links_over_nccl(zygote: Zygote, tmp_path: Path, victim: int) -> None:
    dying = {"die": {"rank": victim, "step": 3}, "forever": True, "varuna": {"links": "nccl"}}
    with Ranks(zygote, tmp_path, Task(), 2, 1, wanted=dying, device=device_of) as world:
        ends = world.ends()
    assert ends.pop(victim)["code"] == -signal.SIGKILL, world.logs()
    assert [end["code"] for end in ends.values()] == [EXIT_PEER_LOST], world.logs()


def test_ranks_that_share_a_gpu_refuse_nccl_for_links(zygote: Zygote, tmp_path: Path) -> None:
    wanted = {"varuna": {"links": "nccl"}}
    with Ranks(zygote, tmp_path, Task(), 2, 1, wanted=wanted, device=lambda rank: "cuda:0") as world:
        assert world.exit_codes() == [1, 1]
    assert "links='nccl': rank 1 shares its device with rank 0" in world.logs()


@pytest.mark.parametrize(("p", "d"), [(3, 1), (1, 3)])
def test_survivors_leave_when_a_rank_is_killed(zygote: Zygote, tmp_path: Path, p: int, d: int) -> None:
    dying = {"die": {"rank": 1, "step": 3}, "forever": True}
    with Ranks(zygote, tmp_path, Task(), p, d, wanted=dying, device=device_of) as world:
        ends = world.ends()
    died = ends.pop(1)
    assert died["code"] == -signal.SIGKILL, world.logs()
    assert [end["code"] for end in ends.values()] == [EXIT_PEER_LOST] * 2, world.logs()
