"""Which sums of the survivors count, and how the rest is shared: each micro-batch is in one sum of each stage."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.copies.share_marks import ShareMark
from varuna.pipeline.micro_batches import join_spans, split_spans
from varuna.pipeline.pass_state import PassResult
from varuna.roles.kept_shares import KeptShare, SumsChoice, choose_sums, deal_evenly, find_complete
from varuna_planner.schedule.batching import micro_batches


@st.composite
def held_shares(draw: st.DrawFn) -> tuple[int, int, int, list[frozenset[int]]]:
    """(P, D, M, by rank: what its sums have). At each stage the shares are disjoint."""
    p, d, m = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 10))
    shares = [set[int]() for _ in range(p * d)]
    for stage in range(p):
        for number in range(m):
            replica = draw(st.integers(0, d))
            if replica < d:
                shares[replica * p + stage].add(number)
    return p, d, m, [frozenset(share) for share in shares]


def list_stages(shares: list[frozenset[int]], p: int) -> list[int]:
    return [rank % p for rank in range(len(shares))]


def union(shares: list[frozenset[int]]) -> frozenset[int]:
    return frozenset(chain.from_iterable(shares))


@given(held_shares())
def test_each_micro_batch_is_in_one_sum_of_each_stage(case: tuple[int, int, int, list[frozenset[int]]]) -> None:
    p, d, m, shares = case
    complete = find_complete(shares, list_stages(shares, p))
    runs = deal_evenly(sorted(set(range(m)) - complete), d)
    for stage in range(p):
        kept = [number for share in shares[stage::p] if share <= complete for number in share]
        assert sorted([*kept, *chain.from_iterable(runs)]) == list(range(m))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(held_shares())
def test_no_larger_choice_of_sums_is_equal_at_all_stages(case: tuple[int, int, int, list[frozenset[int]]]) -> None:
    p, _, _, shares = case
    by_stage = [shares[stage::p] for stage in range(p)]
    choices = [{union(list(some)) for n in range(len(held) + 1) for some in combinations(held, n)} for held in by_stage]
    assert find_complete(shares, list_stages(shares, p)) == max(set.intersection(*choices), key=len)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 2), (1, 3), (2, 3), (3, 4)])
def test_the_shares_of_complete_replicas_count(p: int, d: int) -> None:
    shares = micro_batches(3 * d + 1, 1, d)
    for lost in range(p * d):
        hit = lost // p
        ranks = [rank for rank in range(p * d) if rank // p != hit]
        complete = find_complete([shares[rank // p] for rank in ranks], [rank % p for rank in ranks])
        assert complete == set(range(3 * d + 1)) - set(shares[hit])


def test_a_share_that_one_stage_has_lost_does_not_count() -> None:
    shares = [frozenset({0, 1}), frozenset({0, 1}), frozenset({2, 3}), frozenset[int]()]
    assert find_complete(shares, [0, 1, 0, 1]) == {0, 1}


def test_survivors_of_several_replicas_may_form_new_ones() -> None:
    """Stage 0 of the one and stage 1 of the other; then both have run one more micro-batch together."""
    shares = [{0, 1, 4}, {2, 3, 4}, {2, 3, 5}, {0, 1, 5}]
    assert find_complete(shares, [0, 1, 0, 1]) == set(range(6))


@given(st.sets(st.integers(0, 40)))
def test_spans_say_the_same_as_numbers(numbers: set[int]) -> None:
    assert split_spans(join_spans(numbers)) == sorted(numbers)


def test_later_passes_add_to_a_share() -> None:
    first = PassResult(
        loss_sum=2.0, weight=4.0, examples=2, expected_weight=8.0, forward_us=5, backward_us=6, wait_us=7
    )
    nothing = PassResult(
        loss_sum=0.0, weight=0.0, examples=0, expected_weight=8.0, forward_us=0, backward_us=0, wait_us=0
    )
    share = KeptShare((0, 1), first)
    assert share.join(KeptShare((), nothing)) == share
    more = share.join(share)
    assert (more.numbers, more.passed.loss_sum, more.passed.weight) == ((0, 1, 0, 1), 4.0, 8.0)
    assert (more.passed.examples, more.passed.expected_weight, more.passed.forward_us) == (4, 8.0, 5)


@st.composite
def held_sums(
    draw: st.DrawFn,
) -> tuple[int, int, int, list[frozenset[int]], list[list[ShareMark]]]:
    """(P, D, M, by rank: what `.grad` has, and the copies at marks) after a loss in a generation of P x D.

    A replica has a prefix of its share at each mark, and each rank's copies may be in its own memory, in that of the
    same stage of another replica, in both, or nowhere. Some ranks have finished their shares.
    """
    p, d = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    m = draw(st.integers(d, 12))
    live = [frozenset[int]() for _ in range(p * d)]
    marks: list[list[ShareMark]] = [[] for _ in range(p * d)]
    for replica, share in enumerate(micro_batches(m, 1, d)):
        counts = draw(st.sets(st.integers(1, len(share)), max_size=2))
        for stage in range(p):
            rank = replica * p + stage
            if draw(st.booleans()):
                live[rank] = frozenset(share)
            for count in sorted(counts):
                mark = ShareMark(generation=1, replica=replica, step=3, spans=tuple(join_spans(sorted(share)[:count])))
                keepers = draw(st.sets(st.integers(0, d - 1), max_size=2))
                for keeper in keepers:
                    marks[keeper * p + stage].append(mark)
    return p, d, m, live, marks


@given(held_sums())
def test_each_micro_batch_counts_once_at_each_stage(
    case: tuple[int, int, int, list[frozenset[int]], list[list[ShareMark]]],
) -> None:
    p, _, _, live, marks = case
    choices = choose_sums(live, marks, list_stages(live, p), p)
    counted: set[frozenset[int]] = set()
    for stage in range(p):
        numbers: list[int] = []
        for rank in range(stage, len(live), p):
            numbers += live[rank] if choices[rank].live else ()
            for mark in choices[rank].marks:
                assert mark in marks[rank]
                numbers += mark.numbers
        assert len(numbers) == len(set(numbers))
        counted.add(frozenset(numbers))
    assert len(counted) == 1
    assert counted.pop() >= find_complete(live, list_stages(live, p))


@given(held_sums())
def test_no_replica_has_a_larger_mark_at_all_stages_than_what_counts(
    case: tuple[int, int, int, list[frozenset[int]], list[list[ShareMark]]],
) -> None:
    p, d, m, live, marks = case
    choices = choose_sums(live, marks, list_stages(live, p), p)
    first_stage = [choice for rank, choice in enumerate(choices) if rank % p == 0]
    counted = union([live[rank * p] for rank, choice in enumerate(first_stage) if choice.live])
    counted |= union([mark.numbers for choice in first_stage for mark in choice.marks])
    for replica, share in enumerate(micro_batches(m, 1, d)):
        at_stage = [
            {mark.numbers for rank in range(stage, len(live), p) for mark in marks[rank] if mark.replica == replica}
            for stage in range(p)
        ]
        common = max(map(len, set.intersection(*at_stage)), default=0)
        assert len(counted & set(share)) >= common


def test_a_new_process_has_no_sums_and_prevents_none() -> None:
    mark = ShareMark(generation=1, replica=1, step=3, spans=((2, 3),))
    choices = choose_sums([{0, 1}, set(), set()], [[mark], [], []], [(0, 4), None, None], p=3)
    assert choices == [SumsChoice(True, (mark,)), SumsChoice(False), SumsChoice(False)]
