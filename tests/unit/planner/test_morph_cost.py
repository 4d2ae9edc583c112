"""What a morph costs, and which shape is worth one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_planner.liveput.morph_cost import (
    KEPT_BYTES_PER_S,
    MEMORY_BYTES_PER_S,
    MorphCost,
    MorphKind,
    MovedBytes,
    ShapeOption,
    choose_shape,
    count_moved_bytes,
    expected_life_s,
    predict_moving,
    worthwhile_ratio,
)
from varuna_proto.plan import Device

A, B, C, D = (Device(name, 0) for name in "abcd")
RESTART = MorphCost(kind=MorphKind.FROM_MEMORY, fixed_s=1.7, moving_s=4.0)


def starts(p: int, sections: int) -> list[int]:
    return [stage * sections // p for stage in range(p)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], int, list[Device], int, list[Device]]:
    """(bytes of each section, P, device of each rank, P held, the same): some VMs are new, some gone."""
    sizes = draw(st.lists(st.integers(0, 1000), min_size=4, max_size=9))
    p, held_p = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    vms = st.sampled_from([Device(f"vm{n // 2}", n % 2) for n in range(14)])
    placement = draw(st.lists(vms, min_size=p, max_size=p)) * draw(st.integers(1, 3))
    holders = draw(st.lists(vms, min_size=held_p, max_size=held_p)) * draw(st.integers(1, 3))
    return sizes, p, placement, held_p, holders


@given(layouts())
def test_each_section_that_a_vm_does_not_hold_is_received_and_given_once(
    layout: tuple[list[int], int, list[Device], int, list[Device]],
) -> None:
    sizes, p, placement, held_p, holders = layout
    count = len(sizes)

    found = count_moved_bytes(
        sizes, stage_starts=starts(p, count), placement=placement, held_starts=starts(held_p, count), holders=holders
    )

    def held_by(section: int) -> list[Device]:
        return [device for rank, device in enumerate(holders) if section in stage_of(rank % held_p, held_p)]

    def stage_of(stage: int, of: int) -> range:
        return range(starts(of, count)[stage], [*starts(of, count), count][stage + 1])

    received: Counter[str] = Counter()
    given_: defaultdict[str, Fraction] = defaultdict(Fraction)
    local, local_in_place, kept = Counter[str](), Counter[str](), Counter[Device]()
    for rank, device in enumerate(placement):
        vm = device.vm_id
        for section in stage_of(rank % p, p):
            having = held_by(section)
            if vm in {holder.vm_id for holder in having}:
                local[vm] += sizes[section]
                if device in having:
                    kept[device] += sizes[section]
                else:
                    local_in_place[vm] += sizes[section]
                continue
            received[vm] += sizes[section]
            for holder in having:
                given_[holder.vm_id] += Fraction(sizes[section], len(having))
    counted = (found.received, found.local, found.local_in_place, found.kept)
    assert counted == tuple(max(one.values(), default=0) for one in (received, local, local_in_place, kept))
    assert abs(found.given - max(given_.values(), default=Fraction(0))) <= 0.5001, "rounded"
    in_place_s = found.predict_s(1e9, in_place=True)
    assert found.predict_s(1e9) + found.kept / KEPT_BYTES_PER_S + 1e-12 >= in_place_s >= found.received / 1e9


def test_a_stage_that_stays_where_it_is_crosses_no_link() -> None:
    found = count_moved_bytes(
        [10, 20, 30, 40], stage_starts=[0, 2], placement=[A, B], held_starts=[0, 2], holders=[A, B]
    )
    assert found == MovedBytes(received=0, given=0, local=70, local_in_place=0, kept=70)
    assert found.predict_s(1.0) == 70 / MEMORY_BYTES_PER_S
    assert found.predict_s(1.0, in_place=True) == 70 / KEPT_BYTES_PER_S


def test_a_process_that_goes_on_takes_what_others_of_its_vm_have() -> None:
    beside = Device("a", 1)
    found = count_moved_bytes(
        [10, 20, 30, 40], stage_starts=[0, 2], placement=[A, beside], held_starts=[0, 3], holders=[A, beside]
    )
    assert found == MovedBytes(received=0, given=0, local=100, local_in_place=30, kept=40)


def test_the_part_that_no_pass_reads_is_late() -> None:
    """Half of the second stage comes from the other VM. What a process has waits in host memory, all of it."""
    moves = predict_moving(
        [30, 30, 30, 30],
        [10, 10, 10, 10],
        1.0,
        stage_starts=[0, 2],
        placement=[A, B],
        held_starts=[0, 3],
        holders=[A, B],
    )
    assert moves.to_new_s == pytest.approx(30, abs=1e-6)
    assert moves.in_place.whole_s == 30 + 60 / KEPT_BYTES_PER_S
    assert moves.in_place.late_s == pytest.approx(20)


def test_two_holders_share_what_they_give() -> None:
    found = count_moved_bytes([100], stage_starts=[0], placement=[C, D], held_starts=[0], holders=[A, B])
    assert found == MovedBytes(received=100, given=100, local=0, local_in_place=0, kept=0)
    assert found.predict_s(50.0) == 2.0


def test_a_section_that_nobody_holds_is_named() -> None:
    with pytest.raises(ValueError, match="section 1 has no holder"):
        count_moved_bytes([1, 1], stage_starts=[0], placement=[A], held_starts=[0, 1], holders=[A])


rates = st.floats(0.1, 1e4)
seconds = st.floats(0, 500)
lives = st.floats(60, 1e5)


@given(rates, rates, seconds, lives)
def test_the_ratio_is_where_the_other_shape_begins_to_be_worth_more(
    present: float, other: float, cost_s: float, life_s: float
) -> None:
    stays = ShapeOption(name="stays", examples_per_s=present)
    grows = ShapeOption(name="grows", examples_per_s=other, cost=MorphCost(kind=MorphKind.FROM_MEMORY, fixed_s=cost_s))
    best, _ = choose_shape((stays, grows), life_s)
    ratio = worthwhile_ratio(cost_s, life_s)
    assert ratio >= 1
    if other > present * ratio * (1 + 1e-9):
        assert best is grows
    if other < present * ratio * (1 - 1e-9):
        assert best is stays


@given(rates, seconds, lives, lives)
def test_a_longer_life_makes_a_morph_worth_more_and_a_dearer_one_less(
    rate: float, cost_s: float, one_s: float, other_s: float
) -> None:
    cost = MorphCost(kind=MorphKind.IN_PLACE, fixed_s=cost_s)
    option = ShapeOption(name="x", examples_per_s=rate, cost=cost)
    short, long = sorted((one_s, other_s))
    assert option.expected_examples(short) <= option.expected_examples(long)
    assert 0 <= option.expected_examples(short) <= rate * short
    assert worthwhile_ratio(cost_s, long) <= worthwhile_ratio(cost_s, short)
    assert worthwhile_ratio(cost_s, short, 1.05) >= 1.05


def test_with_most_of_the_step_lost_few_replicas_in_place_are_worth_less_than_a_restart() -> None:
    restart = ShapeOption(name="7×3", examples_per_s=40.0, cost=RESTART)

    def in_place(kept: float) -> ShapeOption:
        cost = MorphCost(kind=MorphKind.IN_PLACE, fixed_s=0.8)
        return ShapeOption(
            name="8×1 in place", examples_per_s=16.0, cost=cost, kept_examples=kept, step_left=8000 - kept, then=restart
        )

    # In place: 0.8 s, the rest of the step at 16/s, then 5.7 s to the better shape. Restart: 5.7 s, then 40/s.
    best, text = choose_shape((in_place(0.0), restart), 960.0)
    assert best is restart
    assert text == "over 960 s 7×3 gives 38,172 examples, 8×1 in place 26,140"
    kept = in_place(6000.0)
    assert kept.expected_examples(960.0) == pytest.approx(8000 + 40 * (960 - 0.8 - 125 - 5.7))
    assert choose_shape((kept, restart), 960.0)[0] is kept
    assert kept.expected_examples(60.0) == pytest.approx(6000 + 16 * 59.2), "the step would not end in time"


def test_the_cost_says_its_parts() -> None:
    assert str(RESTART) == "5.7 s: 1.7 s to start and meet, 4.0 s for the state"
    assert str(MorphCost(kind=MorphKind.IN_PLACE, fixed_s=0.8)) == "0.8 s"


@given(st.floats(0, 1e3), st.floats(0, 1e7))
def test_a_life_is_a_power_of_two_of_a_minute(stops_per_hour: float, stable_s: float) -> None:
    life_s = expected_life_s(stops_per_hour, stable_s)
    assert math.log2(life_s / 60).is_integer()
    assert 60 <= life_s <= 24 * 3600
    assert life_s <= max(60, stable_s, 3600 / stops_per_hour if stops_per_hour else math.inf)
    assert expected_life_s(stops_per_hour + 1, stable_s) <= life_s <= expected_life_s(stops_per_hour, stable_s + 1)
