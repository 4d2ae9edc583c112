"""Which VMs are found slow, and which are not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_manager.domain.stutter import RankTimes, SlownessRecord, compare_ranks, update_records


def fleet(
    *stages_us: list[float], expected_us: float = 1000.0, mad_us: float = 5.0, steps: int = 32
) -> dict[int, RankTimes]:
    """One VM per rank, called by stage and replica; rank = replica * P + stage."""
    p = len(stages_us)
    return {
        replica * p + stage: RankTimes(
            stage=stage, vm_id=f"s{stage}r{replica}", median_us=us, mad_us=mad_us, steps=steps, expected_us=expected_us
        )
        for stage, replicas in enumerate(stages_us)
        for replica, us in enumerate(replicas)
    }


def slow(ranks: dict[int, RankTimes], threshold: float = 0.15) -> set[str]:
    found = update_records({}, compare_ranks(ranks), threshold=threshold, looks=1)
    return {vm for vm, watched in found.items() if watched.is_slow}


def test_one_slow_replica_among_several() -> None:
    assert slow(fleet([1000, 1010, 1300, 990], [2000, 2010, 1990, 2005])) == {"s0r2"}


def test_of_two_replicas_the_slower() -> None:
    assert slow(fleet([1000, 1300])) == {"s0r1"}


def test_stages_of_different_work_are_not_compared() -> None:
    assert slow(fleet([1000, 1000], [3000, 3000])) == set()


def test_under_the_threshold_is_not_slow_and_the_threshold_can_be_set() -> None:
    assert slow(fleet([1000, 1000, 1100])) == set()
    assert slow(fleet([1000, 1000, 1100]), threshold=0.05) == {"s0r2"}


def test_noise_is_not_slowness() -> None:
    assert slow(fleet([1000, 1000, 1200], mad_us=150.0, steps=8)) == set(), "a rank that varies so much on its own"
    assert slow(fleet([1000, 700, 1350, 900, 1300])) == set(), "replicas that differ so much anyway"


def test_over_many_steps_a_rank_that_varies_is_known_as_well() -> None:
    """A rank's own noise makes its median uncertain, less so with more steps."""
    found = [compare_ranks(fleet([1000, 1000, 1200], mad_us=150.0, steps=steps))["s0r2"].z for steps in (8, 32, 128)]
    assert found == [pytest.approx(found[0]), pytest.approx(2 * found[0]), pytest.approx(4 * found[0])]
    assert slow(fleet([1000, 1000, 3000], mad_us=700.0)) == {"s0r2"}, "on a machine that does other things, too"


def test_with_one_replica_the_profile_is_the_measure() -> None:
    assert slow(fleet([1000], [1010], [1400], [990])) == {"s2r0"}


def test_a_profile_that_is_wrong_throughout_blames_nobody() -> None:
    assert slow(fleet([1500], [1520], [1490])) == set()
    assert slow(fleet([1500], [1520], [2100])) == {"s2r0"}


def test_a_lone_rank_has_nothing_to_be_compared_with() -> None:
    assert compare_ranks(fleet([5000])) == {}


def test_a_vm_of_several_gpus_is_judged_by_its_slowest() -> None:
    ranks = fleet([1000, 1000, 1400], [2000, 2000, 2000])
    together = {n: replace(r, vm_id=r.vm_id[2:]) for n, r in ranks.items()}
    found = compare_ranks(together)["r2"]
    assert (found.rank, round(found.ratio, 2)) == (4, 1.4)
    assert found.reason.startswith(
        "rank 4 takes 1.40 times as long as the other replicas of stage 0 (1 ms per micro-batch)"
    )


def test_slow_for_some_looks_in_a_row_and_until_well_again() -> None:
    memory: dict[str, SlownessRecord] = {}
    was_slow = []
    for us in (1300, 1000, 1300, 1300, 1300, 1100, 1100, 1050, 1100):
        memory = update_records(memory, compare_ranks(fleet([1000, 1000, us])), threshold=0.15, looks=3)
        was_slow.append(memory["s0r2"].is_slow)
    assert was_slow == [False, False, False, False, True, True, True, False, False]


def typed(ranks: dict[int, RankTimes], **vms: str) -> dict[int, RankTimes]:
    """With the types of some VMs; those of the others are V100."""
    return {n: replace(rank, gpu_type=vms.get(rank.vm_id, "V100")) for n, rank in ranks.items()}


def test_replicas_on_slower_gpus_are_not_slow() -> None:
    ranks = typed(
        fleet([1000, 1010, 2000, 1990], [1000, 1010, 2000, 1990]), s0r2="K80", s0r3="K80", s1r2="K80", s1r3="K80"
    )
    assert slow(ranks) == set()
    worse = {n: replace(r, median_us=2600) if r.vm_id == "s1r3" else r for n, r in ranks.items()}
    assert slow(worse) == {"s1r3"}
    assert "the other replica of stage 1 on K80 (2 ms per micro-batch)" in compare_ranks(worse)["s1r3"].reason


def test_a_rank_alone_of_its_type_in_its_stage_is_held_to_the_pace_of_its_type() -> None:
    expected_us = {"V100": 1000.0, "K80": 2000.0}
    ranks = typed(fleet([1000, 2600], [1000, 2600], [1000, 3500]), s0r1="K80", s1r1="K80", s2r1="K80")
    ranks = {n: replace(rank, expected_us=expected_us[rank.gpu_type]) for n, rank in ranks.items()}
    assert slow(ranks) == {"s2r1"}, "the profile is wrong about the whole type, which blames nobody"
    assert "at the pace of the other stages on K80 (2.6 ms" in compare_ranks(ranks)["s2r1"].reason


def test_the_only_rank_of_its_type_is_held_to_the_pace_of_all() -> None:
    ranks = typed(fleet([1500, 1500, 4500]), s0r2="K80")
    ranks[2] = replace(ranks[2], expected_us=2000.0)
    assert slow(ranks) == {"s0r2"}
    assert "at the pace of the other stages (3 ms" in compare_ranks(ranks)["s0r2"].reason
    assert slow({**ranks, 2: replace(ranks[2], is_type_profiled=False)}) == set(), "nobody knows how fast it should be"


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 2**31))
def test_equal_machines_with_noise_are_never_slow_for_long(d: int, p: int, seed: int) -> None:
    chance = random.Random(seed)
    memory: dict[str, SlownessRecord] = {}
    for _ in range(10):
        ranks = fleet(*[[1000 * chance.gauss(1, 0.03) for _ in range(d)] for _ in range(p)], mad_us=20.0)
        memory = update_records(memory, compare_ranks(ranks), threshold=0.15, looks=3)
        assert not any(watched.is_slow for watched in memory.values())


@pytest.mark.parametrize("factor", [1.25, 2.0, 10.0])
def test_slowness_does_not_depend_on_the_unit(factor: float) -> None:
    for unit in (1.0, 1e3, 1e6):
        found = compare_ranks(fleet([unit, unit, factor * unit], mad_us=0.001 * unit))
        assert found["s0r2"].ratio == pytest.approx(factor)
