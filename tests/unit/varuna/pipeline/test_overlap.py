"""Replicas as threads of one process, over real gloo groups: what overlaps, in which order, and that sums are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup, connect_group
from varuna.distributed.groups import RankGroup
from varuna.optim.reduction import GradientReducer
from waiting import DEADLINE_S

REPLICAS = 3
LIMIT = timedelta(seconds=DEADLINE_S)


def gloo_groups(size: int) -> list[GlooGroup]:
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        made = [
            pool.submit(connect_group, store, rank, size, address="127.0.0.1", timeout=LIMIT) for rank in range(size)
        ]
        return [future.result() for future in made]


class RecordingGroup(RankGroup):
    """Notes what begins, in order."""

    def __init__(self, group: GlooGroup, log: list[Any]) -> None:
        super().__init__(group, range(REPLICAS), Departure(lambda code: None))
        self._log = log

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self._log.append(tensors[0].numel())
        return super().start_all_reduce(tensors)


class Model(nn.Module):
    """Four layers; one of them may be skipped; and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3))
        self.layers = nn.ModuleList([nn.Linear(6, 5 + 1) for _ in range(4)])

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = torch.tanh(layer(x))
        return x.square().mean()


def reduced(overlap: bool, skips: bool) -> tuple[list[list[Tensor | None]], list[list[Any]]]:
    """Each replica's gradients after two steps of two micro-batches, and the order in which it began its work."""
    groups = gloo_groups(REPLICAS)
    logs: list[list[Any]] = [[] for _ in range(REPLICAS)]

    def run(rank: int) -> list[Tensor | None]:
        numbers = torch.Generator().manual_seed(rank)
        same = torch.Generator().manual_seed(7)
        model = Model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=same))
        named = dict(model.named_parameters())
        reducer = GradientReducer(named, RecordingGroup(groups[rank], logs[rank]), [], counted=(), bucket_bytes=200)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(torch.rand(5, 6, generator=numbers), -1).backward()
            if overlap:
                reducer.mark_last_backward()
            # Each replica skips another layer, so they finish their buckets in different orders.
            model(torch.rand(5, 6, generator=numbers), rank if skips else -1).backward()
            logs[rank].append("reduce")
            reducer.reduce_gradients()
        return [parameter.grad for parameter in named.values()]

    with ThreadPoolExecutor(REPLICAS) as pool:
        return list(pool.map(run, range(REPLICAS))), logs


@pytest.mark.parametrize("skips", [False, True])
def test_overlapped_sums_are_those_of_the_plain_reduction_to_the_bit(skips: bool) -> None:
    plain, _ = reduced(overlap=False, skips=skips)
    overlapped, logs = reduced(overlap=True, skips=skips)

    for expected, got in zip(plain, overlapped, strict=True):
        for one, other in zip(expected, got, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
    assert plain[0][0] is None  # the parameter that is never used stays without a gradient
    begun = [[entry for entry in log if entry != "reduce"] for log in logs]
    assert begun[0] == begun[1] == begun[2]
    # All but the last bucket, which has the unused parameter, are on their way before the backward has ended.
    if not skips:
        assert [log.index("reduce") for log in logs] == [len(begun[0]) // 2 - 1] * REPLICAS


def test_a_gradient_that_comes_after_its_bucket_has_gone_is_no_silent_loss() -> None:
    parameter = nn.Parameter(torch.ones(2))
    reducer = GradientReducer({"w": parameter}, RecordingGroup(gloo_groups(1)[0], []), [], counted=())
    reducer.mark_last_backward()
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        parameter.sum().backward()
