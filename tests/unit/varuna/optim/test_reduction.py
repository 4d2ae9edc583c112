"""Gradients between the last backward and the optimizer, in one process."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.groups import RankGroup
from varuna.optim.reduction import GradientReducer, TiedGroup, clip_factor, make_buckets, scale_gradients
from varuna.pipeline.random_streams import preserve_generators, seed_generators, stream_seed


def alone() -> RankGroup:
    return RankGroup(None, [0], Departure(lambda code: None))


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(1, 300))
def test_buckets_hold_every_parameter_once_in_order(sizes: list[int], limit: int) -> None:
    all_parameters = parameters(*sizes)
    made = make_buckets(all_parameters, limit)
    assert [id(p) for bucket in made for p in bucket] == [id(p) for p in all_parameters]
    for bucket in made:
        assert len(bucket) == 1 or sum(p.numel() * 4 for p in bucket) <= limit


def test_buckets_leave_out_frozen_parameters_and_keep_types_apart() -> None:
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    (one,) = parameters(3)
    assert [[id(p) for p in bucket] for bucket in make_buckets([one, frozen, half], 10**6)] == [[id(one)], [id(half)]]


def test_the_norm_counts_what_it_is_told_to_count() -> None:
    named = dict(zip("abc", parameters(2, 2, 2), strict=True))
    named["a"].grad, named["b"].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert GradientReducer(named, alone(), [], counted="abc").squared_norm() == 25.0
    assert GradientReducer(named, alone(), [], counted="bc").squared_norm() == 16.0
    assert GradientReducer(named, alone(), [], counted="").squared_norm() == 0.0


def test_reducing_alone_changes_nothing() -> None:
    named = dict(zip("ab", parameters(2, 2), strict=True))
    named["a"].grad = torch.ones(2)
    GradientReducer(named, alone(), [], counted="ab").reduce_gradients()
    assert torch.equal(named["a"].grad, torch.ones(2))
    assert named["b"].grad is None


class NotedGroup(RankGroup):
    """Notes when its sums begin and when they are waited for."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__(None, [0, 1], Departure(lambda code: None))
        self._name, self._notes = name, notes

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self._notes.append(f"{self._name} begins")
        return lambda: self._notes.append(f"{self._name} is awaited")


def test_tied_parameters_are_summed_beside_the_others() -> None:
    notes: list[str] = []
    named = dict(zip("abc", parameters(2, 2, 2), strict=True))
    for parameter in named.values():
        parameter.grad = torch.ones(2)
    tied = [TiedGroup(NotedGroup("c", notes), ("c",))]
    reducer = GradientReducer(named, NotedGroup("a, b", notes), tied, counted="abc")
    reducer.reduce_gradients(lambda: notes.append("replaces"))
    assert notes == ["a, b begins", "c begins", "a, b is awaited", "replaces", "c is awaited", "replaces"]
    assert all(torch.equal(parameter.grad, torch.ones(2)) for parameter in named.values() if parameter.grad is not None)


class LeavingGroup(RankGroup):
    """Of a rank that leaves its generation as a sum is to begin."""

    is_left = False

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> NoReturn:
        self.is_left = True
        raise PeerLost("rank 1 is gone")


def test_a_rank_that_leaves_in_its_last_backward_keeps_no_part_of_the_graph() -> None:
    """An exception out of a hook would leave one in autograd's queue until the next backward."""
    named = dict(zip("ab", parameters(2, 2), strict=True))
    group = LeavingGroup(None, [0, 1], Departure(lambda code: None))
    reducer = GradientReducer(named, group, [], counted=(), bucket_bytes=4, may_overlap=lambda: not group.is_left)
    reducer.mark_last_backward()
    with suppress(PeerLost):
        (named["b"] * named["a"]).exp().sum().backward()
    assert group.is_left
    kept = [weakref.ref(parameter) for parameter in named.values()]
    reducer.remove_hooks()
    del reducer
    named.clear()
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


@settings(deadline=None)
@given(norm=st.floats(0, 1e6), bound=st.floats(1e-3, 1e6))
def test_clipping_is_pytorchs(norm: float, bound: float) -> None:
    (ours,), (theirs,) = parameters(1), parameters(1)
    ours.grad, theirs.grad = torch.tensor([norm]), torch.tensor([norm])
    scale_gradients([ours], clip_factor(norm, bound))
    nn.utils.clip_grad_norm_([theirs], bound)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_clipping_at_the_edges() -> None:
    assert clip_factor(5.0, None) == 1.0
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert clip_factor(math.inf, 1.0) == 0.0
    with pytest.raises(ValueError, match="must be positive"):
        clip_factor(1.0, 0.0)


def test_streams_differ_in_every_coordinate() -> None:
    seeds = {stream_seed(*[a, b, c, d]) for a in range(4) for b in range(4) for c in range(4) for d in range(4)}
    assert len(seeds) == 4**4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_are_left_as_found() -> None:
    device = torch.device("cpu")
    before = torch.get_rng_state()
    with preserve_generators(device):
        seed_generators(device, 5)
        first = torch.rand(3)
        seed_generators(device, 5)
        assert torch.equal(first, torch.rand(3))
    assert torch.equal(before, torch.get_rng_state())

    def draw_and_fail() -> None:
        with preserve_generators(device):
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(before, torch.get_rng_state())
