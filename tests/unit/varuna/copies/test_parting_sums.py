"""Who takes the sums of replicas that lose ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.copies.parting_sums import plan_takers


@pytest.mark.parametrize(
    ("p", "d", "leaving", "takers"),
    [
        (2, 2, [3], {2: 0, 3: 1}),
        (2, 2, [0, 3], {0: 2, 3: 1}),  # the others have their own, and no replica is whole
        (1, 3, [1], {1: 2}),
        (2, 3, [1, 2], {0: 4, 1: 5, 2: 4, 3: 5}),
        (1, 4, [0, 1], {0: 2, 1: 3}),
        (2, 1, [1], {}),
        (2, 2, [1, 3], {0: 2, 2: 0}),
    ],
)
def test_takers_are_ranks_of_whole_replicas_where_there_are_some(
    p: int, d: int, leaving: list[int], takers: dict[int, int]
) -> None:
    assert plan_takers(leaving, p, d) == takers


@given(st.data())
def test_whoever_leaves_gives_to_a_rank_that_stays_if_its_stage_has_one(data: st.DataObject) -> None:
    p, d = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    ranks = range(p * d)
    leaving = data.draw(st.sets(st.sampled_from(ranks), min_size=1))
    takers = plan_takers(leaving, p, d)
    for giver, taker in takers.items():
        assert taker not in leaving
        assert taker != giver
        assert taker % p == giver % p
    for rank in leaving:
        assert (rank in takers) is any(other not in leaving for other in ranks if other % p == rank % p)
    whole = [replica for replica in range(d) if not any(rank // p == replica for rank in leaving)]
    assert all(taker // p in whole for taker in takers.values()) or not whole
    if whole:
        taken = Counter(takers.values())
        assert max(taken.values()) <= -(-(d - len(whole)) // len(whole)), "each takes as few as can be"
