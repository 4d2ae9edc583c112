"""Where the sums of gradients go in another shape: each is added once, at a rank that holds the parameter there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from small_gpt import Task, example_batch, make_model
from varuna.checkpoint.format.tensor_file import read_tensors
from varuna.distributed.topology import stage_sections
from varuna.holdings.inventory import HeldFile
from varuna.partition import trace
from varuna.roles.kept_shares import find_complete
from varuna.roles.moved_sums import SumsPlan, add_sums, pack_sums, plan_moved_sums, split_sums

K, M = 6, 10
"""Sections of the model, micro-batches of the step."""
MAP = trace(make_model(Task(blocks=4, tied=True)), example_batch(2))


@st.composite
def survivors(draw: st.DrawFn) -> tuple[list[range], list[frozenset[int]], list[range]]:
    """(by new rank the sections that it held, and the micro-batches of its sums; the sections of each new stage)."""
    p, new_p = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    new_d = draw(st.integers(-(-p // new_p), 4))
    before, stages = stage_sections((), p, K), stage_sections((), new_p, K)
    more = new_p * new_d - p
    others = draw(st.lists(st.integers(0, p - 1), min_size=more, max_size=more))
    of_rank = draw(st.permutations([*range(p), *others]))
    shares = [set[int]() for _ in of_rank]
    for stage in range(p):
        ranks = [rank for rank, held in enumerate(of_rank) if held == stage]
        for number in range(M):
            owner = draw(st.sampled_from([None, *ranks]))
            if owner is not None:
                shares[owner].add(number)
    return [before[stage] for stage in of_rank], [frozenset(share) for share in shares], list(stages)


def plan_all(
    shares: list[frozenset[int]], complete: frozenset[int], held: list[range], stages: Sequence[range]
) -> SumsPlan:
    """The plan for the sums of all ranks, of their own stages."""
    ranks, d = range(len(held)), len(held) // len(stages)
    return plan_moved_sums(shares, complete, held, stages, ranks=ranks, d=d)


@given(survivors())
def test_each_micro_batch_is_in_the_sums_of_one_replica_at_each_section(
    case: tuple[list[range], list[frozenset[int]], list[range]],
) -> None:
    held, shares, stages = case
    complete = find_complete(shares, held)
    plan = plan_all(shares, complete, held, stages)
    d = len(held) // len(stages)
    for section in range(K):
        have = [
            [number for rank in plan.list_givers(replica) if section in held[rank] for number in shares[rank]]
            for replica in range(d)
        ]
        assert sorted(chain.from_iterable(have)) == sorted(complete)
        if plan.are_even:
            assert [frozenset(numbers) for numbers in have] == list(plan.shares)
    assert len(plan.shares) == d


def test_the_sums_of_a_complete_replica_stay_together() -> None:
    """Rank 3 of 2 x 2 is lost, and three stages follow: what replica 0 has is in the only new replica."""
    before, stages = stage_sections((), 2, K), stage_sections((), 3, K)
    share, nothing = frozenset(range(5)), frozenset[int]()
    held = [before[0], before[1], before[0]]
    shares = [share, share, nothing]
    plan = plan_all(shares, find_complete(shares, held), held, stages)
    assert plan.replica_of == {0: 0, 1: 0}
    assert plan.shares == (share,)
    assert plan.are_even


def test_sums_go_where_most_of_them_are() -> None:
    """The stage of ranks 0 and 1 becomes two stages of one replica each; both shares stay in their processes."""
    before, stages = stage_sections((), 2, K), stage_sections((), 1, K)
    one, other = frozenset({0, 1}), frozenset({2, 3})
    held = [before[0], before[0], before[1], before[1]]
    plan = plan_all([other, one, one, other], one | other, held, stages)
    assert plan.replica_of[0] == plan.replica_of[3] != plan.replica_of[1] == plan.replica_of[2]
    assert plan.shares[plan.replica_of[0]] == other
    assert plan.are_even


def test_sums_that_no_replica_has_alike_are_not_kept_after_another_loss() -> None:
    before, stages = stage_sections((), 2, K), stage_sections((), 1, K)
    held = [before[0], before[0], before[1], before[1]]
    shares = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 2}), frozenset({1, 3})]
    plan = plan_all(shares, find_complete(shares, held), held, stages)
    assert sorted(plan.replica_of) == [0, 1, 2, 3]
    assert not plan.are_even


@given(st.data())
def test_each_parameter_goes_to_a_rank_that_holds_it(data: st.DataObject) -> None:
    """Tied ones, too, which several stages hold, go to one of them."""
    count = len(MAP.sections)
    new_p, replica = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    stages = stage_sections((), new_p, count)
    first = data.draw(st.integers(0, count - 1))
    names = MAP.parameters_held(range(first, data.draw(st.integers(first + 1, count))))
    rank = data.draw(st.integers(0, 3 * new_p - 1))
    parts = split_sums(sorted(names), rank=rank, replica=replica, model_map=MAP, stages=stages)
    assert sorted(chain.from_iterable(parts.values())) == sorted(names)
    for to, given_names in parts.items():
        assert to // new_p == replica
        assert set(given_names) <= MAP.parameters_held(stages[to % new_p])
    if rank // new_p == replica:
        assert set(parts.get(rank, ())) == names & MAP.parameters_held(stages[rank % new_p])


def read_file(file: HeldFile) -> dict[str, torch.Tensor]:
    return read_tensors(memoryview(bytearray(b"".join(file.pieces))))[0]


def test_packed_sums_are_added_to_gradients() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}
    parameters["a"].grad = torch.ones(2, 3)
    sums = {"a": torch.arange(6.0).reshape(3, 2).t(), "b": torch.arange(4.0)}
    files = pack_sums({1: sums, 2: {"b": sums["b"]}})
    assert set(read_file(files[2])) == {"b"}
    add_sums(parameters, read_file(files[1]))
    assert torch.equal(parameters["a"].grad, 1 + sums["a"])
    assert parameters["b"].grad is not None
    assert torch.equal(parameters["b"].grad, sums["b"])
