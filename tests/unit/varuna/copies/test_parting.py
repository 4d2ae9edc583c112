"""Who takes what ranks leave that do not go on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.copies.parting import list_lonely, plan_takers


@pytest.mark.parametrize(
    ("p", "d", "leaving", "takers"),
    [
        (2, 2, [3], {2: 0, 3: 1}),
        (2, 2, [0, 3], {0: 2, 3: 1}),  # the others have their own, and no replica is whole
        (1, 3, [1], {1: 2}),
        (2, 3, [1, 2], {0: 4, 1: 5, 2: 4, 3: 5}),
        (1, 4, [0, 1], {0: 2, 1: 3}),
        (2, 1, [1], {1: 0}),  # no other rank has its stage
        (3, 1, [0, 2], {0: 1, 2: 1}),
        (2, 1, [0, 1], {}),
        (2, 2, [1, 3], {0: 2, 1: 0, 2: 0, 3: 2}),
    ],
)
def test_takers_are_ranks_of_whole_replicas_where_there_are_some(
    p: int, d: int, leaving: list[int], takers: dict[int, int]
) -> None:
    assert plan_takers(leaving, p, d) == takers


@given(st.data())
def test_whoever_leaves_gives_to_a_rank_that_stays_with_its_stage_if_there_is_one(data: st.DataObject) -> None:
    p, d = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    ranks = range(p * d)
    leaving = data.draw(st.sets(st.sampled_from(ranks), min_size=1))
    takers, lonely = plan_takers(leaving, p, d), list_lonely(leaving, p, d)
    stages_left = {rank % p for rank in ranks if rank not in leaving}
    assert {rank % p for rank in lonely} == set(range(p)) - stages_left
    assert lonely <= leaving
    for giver, taker in takers.items():
        assert taker not in leaving
        assert taker != giver
        assert (taker % p == giver % p) is (giver % p in stages_left)
    assert all((rank in takers) is bool(stages_left) for rank in leaving)
    whole = [replica for replica in range(d) if not any(rank // p == replica for rank in leaving)]
    assert all(taker // p in whole for taker in takers.values()) or not whole
    if whole:
        taken = Counter(takers.values())
        assert max(taken.values()) <= -(-(d - len(whole)) // len(whole)), "each takes as few as can be"
