"""Which copies in other VMs' memories are worth the time that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_planner.liveput.copies import (
    MARKS_SHARE,
    SENDING_SHARE,
    CopiedParts,
    LossExposure,
    choose_copies,
    predict_copying_share,
)
from varuna_planner.liveput.hazard import bursts_per_hour, holder_losses_per_hour, mean_hit_share
from varuna_planner.liveput.morph_cost import MARKS_S, SUMS_PART

NOTHING, STATES, MARKS, BOTH = CopiedParts(), CopiedParts(states=True), CopiedParts(marks=True), CopiedParts(True, True)
ALL = (STATES, MARKS, BOTH)


def expose(
    p: int,
    d: int,
    *,
    removals_per_vm_hour: float,
    step_s: float,
    state_s: float = 1.0,
    bursts: tuple[int, ...] = (),
) -> LossExposure:
    """One GPU a VM. `state_s`: how long a stage's state is written; training stands still for a tenth of that."""
    vms = p * d
    losses = vms * removals_per_vm_hour
    return LossExposure(
        losses_per_hour=losses,
        bursts_per_hour=bursts_per_hour(losses, bursts, vms),
        hit_share=mean_hit_share(bursts, [p] * d, vms),
        store_stops_per_hour=holder_losses_per_hour(losses, bursts, [d] * p, vms),
        copied_store_stops_per_hour=holder_losses_per_hour(losses, bursts, [min(d + 1, vms)] * p, vms),
        step_s=step_s,
        save_stall_s=state_s / 10,
        save_write_s=state_s,
    )


def list_possible(d: int) -> tuple[CopiedParts, ...]:
    """One replica's marks go to the VMs that have its copies."""
    return ALL if d > 1 else (STATES, BOTH)


def choose(p: int, d: int, exposure: LossExposure) -> CopiedParts:
    return choose_copies(exposure, list_possible(d))[0]


fleets = st.fixed_dictionaries(
    {
        "removals_per_vm_hour": st.floats(1e-4, 2.0),
        "step_s": st.floats(0.05, 300.0),
        "state_s": st.floats(0.01, 30.0),
        "bursts": st.lists(st.integers(1, 6), max_size=10).map(tuple),
    }
)
shapes = st.tuples(st.integers(2, 8), st.integers(1, 4))


@settings(max_examples=200, deadline=None)
@given(shapes, fleets, st.sampled_from(["removals_per_vm_hour", "step_s", "state_s"]), st.floats(2.0, 10.0))
def test_more_losses_longer_steps_and_larger_states_never_make_copies_worth_less(
    shape: tuple[int, int], fleet: dict[str, float], grows: str, factor: float
) -> None:
    """Longer steps make marks worth more, and larger states copies of them. Copies of states alone spare little where a
    job saves after each step, and marks less where it takes longer to send them."""
    before = expose(*shape, **fleet)  # type: ignore[arg-type]
    after = expose(*shape, **{**fleet, grows: fleet[grows] * factor})  # type: ignore[arg-type]
    for one in list_possible(shape[1]):
        if (grows == "step_s" and not one.marks) or (one.marks and (grows == "state_s" or before.step_s <= MARKS_S)):
            continue
        worth, more = (each.predict_lost_s(NOTHING) - each.predict_lost_s(one) for each in (before, after))
        if worth > 0:
            assert more > 0, one


@settings(max_examples=200, deadline=None)
@given(shapes, fleets)
def test_the_choice_loses_the_least_of_all(shape: tuple[int, int], fleet: dict[str, float]) -> None:
    exposure = expose(*shape, **fleet)  # type: ignore[arg-type]
    chosen = choose(*shape, exposure)
    options = [one for one in (NOTHING, *list_possible(shape[1])) if not one.marks or exposure.step_s > MARKS_S]
    assert chosen in options
    assert exposure.predict_lost_s(chosen) == min(exposure.predict_lost_s(one) for one in options)


@given(shapes, st.floats(0.05, 300.0))
def test_nothing_is_copied_where_nothing_is_lost(shape: tuple[int, int], step_s: float) -> None:
    assert choose(*shape, expose(*shape, removals_per_vm_hour=0.0, step_s=step_s)) == NOTHING


def share(kept: CopiedParts, *, step_s: float = 100.0, send_s: float = 3.0, beside_passes: bool = True) -> float:
    return predict_copying_share(kept, step_s=step_s, send_s=send_s, beside_passes=beside_passes)


def test_what_they_take_of_the_time() -> None:
    every = (NOTHING, STATES, MARKS, BOTH)
    assert [share(one, beside_passes=False) for one in every] == pytest.approx([0.0, 0.02, 0.01, 0.03])
    assert (SENDING_SHARE, MARKS_SHARE) == (0.02, 0.01)
    states, marks = 0.02 * 3.0 / 100.0, 0.02 * 3.0 * SUMS_PART / MARKS_S
    assert [share(one) for one in every] == pytest.approx([0.0, states, marks, states + marks])
    assert [share(one, step_s=1.0, send_s=60.0) for one in every] == pytest.approx([0.0, 0.02, 0.02, 0.04]), "at most"


def test_copies_beside_the_passes_stop_no_training_for_saves() -> None:
    waits = replace(expose(8, 2, removals_per_vm_hour=0.5, step_s=20.0), save_stall_s=0.5)
    beside = replace(waits, copies_beside_passes=True)
    assert beside.predict_lost_s(NOTHING) < waits.predict_lost_s(NOTHING)
    short = replace(waits, step_s=0.4)
    assert replace(short, copies_beside_passes=True).predict_lost_s(NOTHING) == short.predict_lost_s(NOTHING)


def test_marks_come_no_sooner_than_the_newest_is_sent() -> None:
    fleet = replace(expose(4, 2, removals_per_vm_hour=0.5, step_s=70.0, state_s=60.0), store_stops_per_hour=0.0)
    exposure = replace(fleet, bursts_per_hour=4.0, hit_share=0.5)
    spared_s = exposure.predict_lost_s(NOTHING) + exposure.predict_copying_s(MARKS) - exposure.predict_lost_s(MARKS)
    assert spared_s == pytest.approx(4.0 * 0.5 * (70.0 - 60.0 * SUMS_PART) / 2)


def test_vms_that_go_together_make_copies_of_states_worth_it_for_two_replicas() -> None:
    alone, together = (
        expose(8, 2, removals_per_vm_hour=1.5, step_s=8.0, state_s=20.0, bursts=(size,) * 100) for size in (1, 4)
    )
    assert choose(8, 2, alone) == NOTHING
    assert choose(8, 2, together) == STATES


def test_a_mark_saves_half_a_step_but_for_half_of_the_time_between_two() -> None:
    fleet = expose(4, 2, removals_per_vm_hour=0.5, step_s=70.0)
    exposure = replace(fleet, bursts_per_hour=4.0, hit_share=0.5, store_stops_per_hour=0.0)
    saved_s = exposure.predict_lost_s(NOTHING) - exposure.predict_lost_s(MARKS)
    assert saved_s + exposure.predict_copying_s(MARKS) == pytest.approx(4.0 * 0.5 * (70.0 - MARKS_S) / 2)


def test_the_figures_are_told() -> None:
    exposure = expose(8, 3, removals_per_vm_hour=0.61, step_s=180.0, state_s=4.0, bursts=(2,) * 40)
    found, text = choose_copies(exposure, ALL)
    assert found == MARKS
    lost = [round(exposure.predict_lost_s(one)) for one in (NOTHING, MARKS)]
    assert text == (
        f"marks are kept: about 15 VMs are lost an hour, which takes {lost[0]} s of it, saves included; with marks it "
        f"is {lost[1]} s, 36 s of them for copying"
    )
    assert choose_copies(exposure, ()) == (NOTHING, "")


def test_a_job_without_checkpoints_loses_all_and_keeps_copies_where_another_would_not() -> None:
    saves = expose(8, 1, removals_per_vm_hour=0.02, step_s=5.0)
    never = replace(saves, unsaved_s=20 * 3600.0)
    assert choose(8, 1, saves) == NOTHING
    assert choose(8, 1, never) == STATES
    spared_s = never.predict_lost_s(NOTHING) - saves.predict_lost_s(NOTHING)
    assert spared_s == pytest.approx(saves.store_stops_per_hour * 20.5 * 3600, rel=0.01)
    assert choose_copies(never, ALL)[1].endswith("; no checkpoint has the last 72000 s of training")
    assert choose(8, 1, replace(never, store_stops_per_hour=0.0, copied_store_stops_per_hour=0.0)) == NOTHING


def test_a_checkpoint_is_overdue_after_the_time_of_three() -> None:
    exposure = replace(expose(8, 1, removals_per_vm_hour=0.02, step_s=5.0), save_interval_s=1800.0)
    assert not exposure.is_overdue(3 * 1800.0)
    assert exposure.is_overdue(3 * 1800.0 + 4.0)
    assert not replace(exposure, save_interval_s=1.0).is_overdue(1799.0), "what a save takes is only predicted"


def test_the_share_of_the_replicas_that_a_burst_hits() -> None:
    alone, pairs = (1,) * 10**4, (2,) * 10**4
    assert mean_hit_share(alone, [4, 4], 8) == pytest.approx(0.5, abs=1e-3)
    assert mean_hit_share(pairs, [1, 1], 2) == pytest.approx(1.0, abs=1e-3)
    assert mean_hit_share(pairs, [4, 4], 8) == pytest.approx(1 - 4 / 8 * 3 / 7, abs=1e-3)
    assert bursts_per_hour(6.0, pairs, 8) == pytest.approx(3.0, abs=1e-3)
