"""Who sends which sections of the state to the ranks of the next shape."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.copies.next_shape import SectionPart, plan_sends
from varuna.distributed.topology import stage_sections
from varuna_proto.plan import Plan


def plan(p: int, d: int) -> Plan:
    return Plan(p=p, d=d, micro_batch=1, global_batch=24)


class NextShape:
    """The sends to a shape whose ranks are these processes now."""

    def __init__(self, p: int, d: int, *ranks_before: int | None) -> None:
        self.plan, self.ranks_before = plan(p, d), ranks_before

    def plan_sends(
        self, present: Plan, sections: int, shared: dict[str, tuple[int, ...]]
    ) -> dict[tuple[int, int], tuple[SectionPart, ...]]:
        return plan_sends(present, self.plan, self.ranks_before, sections, shared)


def whole(*sections: int) -> tuple[SectionPart, ...]:
    return tuple(SectionPart(section, False) for section in sections)


def test_a_new_replica_gets_its_stages_from_the_ranks_that_have_them() -> None:
    shape = NextShape(2, 2, 0, 1, None, None)
    assert shape.plan_sends(plan(2, 1), 4, {}) == {(0, 2): whole(0, 1), (1, 3): whole(2, 3)}


def test_a_process_that_goes_on_gets_only_what_it_lacks() -> None:
    shape = NextShape(3, 1, 0, 1, None)
    sends = shape.plan_sends(plan(2, 1), 6, {})
    assert sends == {(0, 1): whole(2), (1, 2): whole(4, 5)}
    assert NextShape(2, 2, 0, 1, 2, 3).plan_sends(plan(2, 2), 6, {}) == {}


def test_replicas_share_what_is_to_be_sent() -> None:
    shape = NextShape(1, 3, 0, 1, None)
    assert shape.plan_sends(plan(1, 2), 4, {}) == {(0, 2): whole(0, 2), (1, 2): whole(1, 3)}


def test_a_parameter_that_another_stage_uses_comes_from_the_section_that_has_its_files() -> None:
    """Of a section that the rank does not have otherwise."""
    shape, tied = NextShape(2, 2, 0, 1, None, None), {"embedding": (0, 3)}
    sends = shape.plan_sends(plan(2, 1), 4, tied)
    assert sends[0, 3] == (SectionPart(0, True),)
    assert sends[0, 2] == whole(0, 1)
    assert (0, 1) not in NextShape(2, 1, 0, 1).plan_sends(plan(2, 1), 4, tied), "it has the parameter already"


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="only 2 section"):
        NextShape(3, 1, 0, 1, None).plan_sends(plan(2, 1), 2, {})


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(4, 9), st.randoms())
def test_each_rank_gets_all_that_it_lacks_once_and_nothing_else(
    p: int, d: int, next_p: int, next_d: int, sections: int, chance: Random
) -> None:
    present, count = plan(p, d), next_p * next_d
    ranks: list[int | None] = [*range(p * d), *[None] * count]
    chance.shuffle(ranks)
    shape = NextShape(next_p, next_d, *ranks[:count])
    held, wanted = stage_sections((), p, sections), stage_sections((), next_p, sections)
    got: dict[int, Counter[int]] = {rank: Counter() for rank in range(count)}
    for (sender, taker), parts in shape.plan_sends(present, sections, {}).items():
        assert {part.section for part in parts} <= set(held[sender % p])
        got[taker].update(part.section for part in parts)
    for rank, before in enumerate(shape.ranks_before):
        has = set() if before is None else set(held[before % p])
        assert got[rank] == Counter(set(wanted[rank % next_p]) - has)
