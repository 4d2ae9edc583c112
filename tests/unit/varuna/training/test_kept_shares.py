"""Which sums of the survivors count, and how the rest is shared: each micro-batch is in one sum of each stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.copies.share_marks import ShareMark
from varuna.pipeline.micro_batches import join_spans, split_spans
from varuna.pipeline.pass_state import PassResult
from varuna.roles.kept_shares import (
    KeptShare,
    Sections,
    SumsChoice,
    choose_sums,
    deal_micro_batches,
    find_complete,
)
from varuna_planner.schedule.batching import micro_batches, split_evenly


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


def list_cut(p: int) -> list[Sections]:
    """Stages of one section each."""
    return [(stage, stage + 1) for stage in range(p)]


def union(shares: list[frozenset[int]]) -> frozenset[int]:
    return frozenset(chain.from_iterable(shares))


@given(held_shares())
def test_each_micro_batch_is_in_one_sum_of_each_stage(case: tuple[int, int, int, list[frozenset[int]]]) -> None:
    p, d, m, shares = case
    complete = find_complete(shares, list_stages(shares, p))
    runs = deal_micro_batches(sorted(set(range(m)) - complete), (1,) * d)
    for stage in range(p):
        kept = [number for share in shares[stage::p] if share <= complete for number in share]
        assert sorted([*kept, *chain.from_iterable(runs)]) == list(range(m))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(st.sets(st.integers(0, 99)).map(sorted), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_rest_is_dealt_in_proportion_to_the_shares(numbers: list[int], shares: list[int]) -> None:
    runs = deal_micro_batches(numbers, shares)
    assert len(runs) == len(shares)
    assert list(chain.from_iterable(runs)) == numbers, "each once, in order"
    for run, share in zip(runs, shares, strict=True):
        assert abs(len(run) * sum(shares) - len(numbers) * share) < sum(shares), "less than one from its part"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_whole_step_is_dealt_as_the_shares_are(shares: list[int]) -> None:
    assert [len(run) for run in deal_micro_batches(range(sum(shares)), shares)] == shares


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 9))
def test_equal_shares_get_equally_many_and_the_first_ones_what_is_left_over(count: int, d: int, share: int) -> None:
    numbers = range(100, 100 + count)
    runs = deal_micro_batches(numbers, (share,) * d)
    assert runs == tuple(tuple(numbers[run.start : run.stop]) for run in split_evenly(count, d))


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


def test_shares_that_have_a_micro_batch_in_common_do_not_count() -> None:
    """The micro-batch would count twice. Two losses leave that if only one of them has added a mark's sums, say."""
    shares = [{0, 1, 4}, {0, 1, 4}, {2, 3, 4}, {2, 3, 4}, {5}, {5}]
    assert find_complete(shares, [0, 1, 0, 1, 0, 1]) == {5}


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
    share = KeptShare((0, 1), first, 2)
    assert share.join(KeptShare((), nothing, 2)) == share
    more = share.join(share)
    assert (more.numbers, more.passed.loss_sum, more.passed.weight) == ((0, 1, 0, 1), 4.0, 8.0)
    assert (more.passed.examples, more.passed.expected_weight, more.passed.forward_us) == (4, 8.0, 5)


def test_a_share_is_counted_in_smaller_micro_batches() -> None:
    """Of 30 examples, so that the last micro-batch has two."""
    passed = PassResult(
        loss_sum=2.0, weight=4.0, examples=6, expected_weight=8.0, forward_us=5, backward_us=6, wait_us=7
    )
    share = KeptShare((1, 7), passed, 4, is_even=False)
    assert share.renumber_micro_batches(4, 30) == share
    finer = share.renumber_micro_batches(2, 30)
    assert finer == KeptShare((2, 3, 14), replace(passed, forward_us=0, backward_us=0), 2, is_even=False)
    assert KeptShare((), passed, 4).renumber_micro_batches(3, 30).numbers == (), "what has nothing fits everywhere"
    with pytest.raises(AssertionError, match="not made of"):
        share.renumber_micro_batches(3, 30)
    with pytest.raises(AssertionError, match="the same micro-batches"):
        share.join(finer)


@dataclass(frozen=True)
class HeldSums:
    """What the ranks of a generation of P x D have after a loss. A rank without a stage is a new process."""

    p: int
    d: int
    count: int
    """Micro-batches of the step."""
    stages: list[Sections | None]
    live: list[frozenset[int]]
    marks: list[list[ShareMark]]

    def choose(self, *, moves: bool) -> list[SumsChoice]:
        return choose_sums(self.live, self.marks, self.stages, cut=list_cut(self.p), p=self.p, moves=moves)

    def list_counted(self, choices: list[SumsChoice], stage: Sections) -> list[int]:
        """The micro-batches that count at a stage, each as often as it does."""
        marks = [mark for choice in choices for mark in (*choice.marks, *choice.lent) if mark.sections == stage]
        live = [self.live[rank] for rank, choice in enumerate(choices) if choice.live and self.stages[rank] == stage]
        return [*chain.from_iterable(live), *chain.from_iterable(mark.numbers for mark in marks)]


@st.composite
def held_sums(draw: st.DrawFn) -> HeldSums:
    """A replica has a prefix of its share at each mark, and each rank's copies may be in its own memory, in others', or
    nowhere. Some ranks have finished their shares, and some are lost."""
    p, d = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    m, ranks = draw(st.integers(d, 12)), range(p * d)
    lost = draw(st.sets(st.sampled_from(ranks), max_size=p * d - 1))
    stages = [None if rank in lost else list_cut(p)[rank % p] for rank in ranks]
    live = [frozenset[int]() for _ in ranks]
    marks: list[list[ShareMark]] = [[] for _ in ranks]
    for replica, share in enumerate(micro_batches(m, 1, d)):
        counts = draw(st.sets(st.integers(1, len(share)), max_size=2))
        for stage, sections in enumerate(list_cut(p)):
            rank = replica * p + stage
            if rank not in lost and draw(st.booleans()):
                live[rank] = frozenset(share)
            for count in sorted(counts):
                spans = tuple(join_spans(sorted(share)[:count]))
                mark = ShareMark(generation=1, replica=replica, step=3, sections=sections, micro_batch=1, spans=spans)
                for keeper in draw(st.sets(st.sampled_from(ranks), max_size=2)) - lost:
                    marks[keeper].append(mark)
    return HeldSums(p, d, m, stages, live, marks)


@given(held_sums(), st.booleans())
def test_each_micro_batch_counts_once_at_each_stage(held: HeldSums, moves: bool) -> None:
    choices = held.choose(moves=moves)
    counted = [held.list_counted(choices, stage) for stage in list_cut(held.p)]
    assert all(sorted(numbers) == sorted(set(numbers)) for numbers in counted)
    assert len(set(map(frozenset, counted))) == 1
    there = [rank for rank, stage in enumerate(held.stages) if stage is not None]
    assert set(counted[0]) >= find_complete(
        [held.live[rank] for rank in there], [held.stages[rank] for rank in there], list_cut(held.p)
    )
    for choice, marks, stage in zip(choices, held.marks, held.stages, strict=True):
        assert {*choice.marks, *choice.lent} <= {*marks}
        assert {mark.sections for mark in choice.marks} <= {stage}
        assert not choice.lent or (moves and stage not in {mark.sections for mark in choice.lent})


@given(held_sums(), st.booleans())
def test_no_replica_has_a_larger_mark_at_all_stages_than_what_counts(held: HeldSums, moves: bool) -> None:
    counted = set(held.list_counted(held.choose(moves=moves), (0, 1)))
    for replica, share in enumerate(micro_batches(held.count, 1, held.d)):
        at_stage = [
            {
                mark.numbers
                for marks, own in zip(held.marks, held.stages, strict=True)
                for mark in marks
                if (mark.replica, mark.sections) == (replica, stage) and (moves or own == stage)
            }
            for stage in list_cut(held.p)
        ]
        common = max(map(len, set.intersection(*at_stage)), default=0)
        assert len(counted & set(share)) >= common


def test_a_new_process_has_no_sums_and_prevents_none() -> None:
    mark = ShareMark(generation=1, replica=1, step=3, sections=(0, 4), micro_batch=1, spans=((2, 3),))
    choices = choose_sums([{0, 1}, set(), set()], [[mark], [], []], [(0, 4), None, None], cut=[(0, 4)], p=3, moves=True)
    assert choices == [SumsChoice(True, (mark,)), SumsChoice(False), SumsChoice(False)]


def test_one_replica_goes_on_from_the_newest_mark_of_which_all_stages_are_there() -> None:
    """Rank 1 of 3 x 1 is lost. Rank 2 keeps its sums, of the last but one mark only."""
    of_mark = {
        count: [
            ShareMark(generation=1, replica=0, step=3, sections=sections, micro_batch=1, spans=((0, count),))
            for sections in list_cut(3)
        ]
        for count in (4, 6)
    }
    first, second = of_mark[4], of_mark[6]
    marks = [[first[0], second[0]], [first[2], second[2], first[1]]]
    stages: list[Sections | None] = [(0, 1), (2, 3)]
    choices = choose_sums([set(), set()], marks, stages, cut=list_cut(3), p=2, moves=True)
    assert choices == [SumsChoice(False, (first[0],)), SumsChoice(False, (first[2],), (first[1],))]
    assert choose_sums([set(), set()], marks, stages, cut=list_cut(3), p=2, moves=False) == [SumsChoice(False)] * 2
