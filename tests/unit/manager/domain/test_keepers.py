"""Who keeps whose copy: never on the same VM, as far apart as there is room, and evenly. And when copies are kept."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import generation
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.keepers import (
    Copies,
    CopiesChoice,
    CopiesFacts,
    CopiesObstacles,
    SaveCost,
    UnsavedSteps,
    VmPlace,
    choose_copies,
    choose_keepers,
    count_unsaved,
    expect_step_s,
    find_kept,
    find_marks_obstacle,
)
from varuna_manager.domain.observed import Proposal
from varuna_proto.plan import Plan
from varuna_proto.state_use import ACCUMULATES, OTHER_STAGES, OWN_GROUPS


def vm_ids(p: int, d: int, gpus: int) -> list[str]:
    """The VM of each rank, where each VM takes `gpus` ranks in turn."""
    return [f"vm{rank // gpus}" for rank in range(p * d)]


shapes = st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
zones = st.lists(st.sampled_from("abc"), min_size=21, max_size=21)


def count_shared(chosen: list[str], stages: list[set[str]], zone_of: dict[str, str]) -> int:
    return sum(zone_of[keeper] in {zone_of[vm] for vm in stage} for keeper, stage in zip(chosen, stages, strict=True))


@given(shape=shapes, zone_names=zones)
def test_a_copy_is_never_on_a_vm_that_has_the_stage(shape: tuple[int, int, int], zone_names: list[str]) -> None:
    p, d, gpus = shape
    vms = vm_ids(p, d, gpus)
    places = {f"vm{number}": VmPlace(f"host{number}", zone) for number, zone in enumerate(zone_names)}
    keepers = choose_keepers(p, vms, places)
    stages = [set(vms[stage::p]) for stage in range(p)]
    if not keepers:
        assert any(stage == set(vms) for stage in stages)
        return
    assert len(keepers) == p
    for stage, keeper in enumerate(keepers):
        assert vms[keeper] not in stages[stage]
    assert keepers == choose_keepers(p, vms, dict(reversed(places.items())))
    if gpus == 1:
        assert max(Counter(keepers).values()) == 1


@given(p=st.integers(2, 5), zone_names=zones)
def test_no_other_choice_shares_fewer_zones(p: int, zone_names: list[str]) -> None:
    """Compared with all choices in which each VM keeps one copy."""
    vms = vm_ids(p, 1, 1)
    zone_of = dict(zip(vms, zone_names, strict=False))
    keepers = choose_keepers(p, vms, {vm: VmPlace(vm, zone) for vm, zone in zone_of.items()})
    stages = [{vm} for vm in vms]
    fewest = min(
        count_shared(list(choice), stages, zone_of)
        for choice in product(vms, repeat=p)
        if len(set(choice)) == p and all(keeper not in stage for keeper, stage in zip(choice, stages, strict=True))
    )
    assert count_shared([vms[keeper] for keeper in keepers], stages, zone_of) == fewest


def test_the_same_host_is_worse_than_any_zone() -> None:
    places = {"vm0": VmPlace("h", "a"), "vm1": VmPlace("h", "b"), "vm2": VmPlace("i", "a"), "vm3": VmPlace("i", "b")}
    keepers = choose_keepers(4, vm_ids(4, 1, 1), places)
    assert sorted(keepers) == [0, 1, 2, 3]
    assert all(places[f"vm{keeper}"].host != places[f"vm{stage}"].host for stage, keeper in enumerate(keepers))
    assert all(places[f"vm{keeper}"].zone != places[f"vm{stage}"].zone for stage, keeper in enumerate(keepers))


@pytest.mark.parametrize(
    ("p", "vms", "can_be_kept"),
    [
        (3, ["a", "b", "c"], True),
        (2, ["a", "b", "c", "d"], True),
        (2, ["a", "b", "a", "c"], True),  # both replicas of stage 0 are on one
        (3, ["a", "a", "a"], False),
        (1, ["a"], False),
        (1, ["a", "b"], False),  # both have all of it
        (4, ["a", "a", "a", "b"], True),  # b keeps three
    ],
)
def test_where_copies_can_be_kept(p: int, vms: list[str], can_be_kept: bool) -> None:
    assert bool(choose_keepers(p, vms)) is can_be_kept


CALM = FleetPast(removals=0.0, vm_hours=1000.0)
"""A thousand hours without a loss."""
RARE = FleetPast(removals=0.0, vm_hours=40.0)
"""A VM in fifty an hour."""
NEW = FleetPast()
"""The prior: a VM in ten an hour, half of them in pairs."""
TRACE = FleetPast(removals=167.0, vm_hours=273.0, losses_at=tuple(60.0 * burst for burst in range(40) for _ in (0, 1)))
"""As in docs/goodput.md: 0.6 removals per VM-hour, two at once."""
LARGE = SaveCost(stall_s=0.5, write_s=4.0)
"""Of 5 GB a stage, over 10 Gb/s."""


def choose(
    p: int,
    d: int,
    fleet: FleetPast,
    step_s: float,
    *,
    save: SaveCost = LARGE,
    wish: Copies = Copies.AUTO,
    gpus: int = 1,
    **facts: Any,
) -> CopiesChoice:
    plan = Plan(p=p, d=d, micro_batch=1, global_batch=8 * d, predicted_minibatch_s=step_s)
    return choose_copies(
        wish, plan, vm_ids(p, d, gpus), {}, CopiesFacts(fleet=fleet, step_s=step_s, save=save, **facts)
    )


@pytest.mark.parametrize(
    ("p", "d", "fleet", "step_s", "are_kept"),
    [
        (8, 1, CALM, 180.0, (False, False)),
        (8, 3, CALM, 180.0, (False, False)),
        (4, 1, NEW, 0.05, (False, False)),
        (2, 2, NEW, 5.0, (False, False)),
        (8, 3, NEW, 180.0, (False, True)),
        (24, 1, NEW, 180.0, (True, True)),
        (8, 3, TRACE, 180.0, (False, True)),
        (8, 3, TRACE, 12.0, (False, False)),
        (8, 1, TRACE, 180.0, (True, True)),
        (24, 1, TRACE, 8.0, (True, False)),  # no marks in short steps
    ],
)
def test_what_is_worth_its_time_is_kept(
    p: int, d: int, fleet: FleetPast, step_s: float, are_kept: tuple[bool, bool]
) -> None:
    found = choose(p, d, fleet, step_s)
    assert (bool(found.keepers), found.marks) == are_kept, found.reason
    assert len(found.keepers) in (0, p)
    assert re.search(r"are kept: about \S+ VMs are lost an hour, which takes ", found.reason)


@pytest.mark.parametrize(
    ("d", "announced", "facts", "are_kept"),
    [
        (1, 0.0, {}, (True, True)),
        (1, 50.0, {}, (True, True)),
        (1, 167.0, {}, (False, False)),
        (1, 167.0, {"save": SaveCost(stall_s=0.5, write_s=40.0)}, (True, True)),  # a notice is too short to send it
        (3, 0.0, {}, (False, True)),
        (3, 167.0, {}, (False, False)),
        (3, 167.0, {"script_obstacles": (OTHER_STAGES + "a list",)}, (False, True)),
    ],
)
def test_losses_that_come_with_a_notice_need_no_copies(
    d: int, announced: float, facts: dict[str, Any], are_kept: tuple[bool, bool]
) -> None:
    """In which a job leaves all to VMs that stay."""
    found = choose(8, d, replace(TRACE, announced=announced), 180.0, **facts)
    assert (bool(found.keepers), found.marks) == are_kept, found.reason
    says_so = re.search(r"; about (\d+) % of the losses should come with a notice", found.reason)
    assert [int(part) for part in (says_so.groups() if says_so else ())] == (
        [round(100 * announced / 168)] if announced and not facts else []
    )


def test_a_new_fleet_is_expected_to_give_no_notice() -> None:
    assert FleetPast().unannounced_share == 1.0
    assert FleetPast(removals=9.0, announced=9.0).unannounced_share == pytest.approx(0.1)
    assert FleetPast(removals=9.0, announced=4.0).unannounced_share == pytest.approx(0.6)


@pytest.mark.parametrize("d", [1, 2])
def test_the_job_file_can_decide(d: int) -> None:
    kept = choose(3, d, CALM, 0.1, wish=Copies.ON)
    assert (len(kept.keepers), kept.marks, kept.reason) == (3, True, ""), "also where several VMs have a stage"
    assert choose(3, d, TRACE, 180.0, wish=Copies.OFF) == CopiesChoice()


@pytest.mark.parametrize(
    ("d", "states", "marks", "are_kept", "reason"),
    [
        (1, "", "", (True, True), ""),
        (1, "rank 1: no room", "", (False, False), "no copies of states are kept: rank 1: no room"),
        (2, "rank 1: no room", "", (False, True), "no copies of states are kept: rank 1: no room"),
        (1, "", "rank 0: none", (True, False), "no marks are kept: rank 0: none"),
        (2, "a", "b", (False, False), "no copies of states are kept: a; no marks are kept: b"),
    ],
)
def test_what_workers_cannot_keep_does_not_count(
    d: int, states: str, marks: str, are_kept: tuple[bool, bool], reason: str
) -> None:
    """One replica's marks are of use only beside copies of states."""
    chosen = CopiesChoice(keepers=(1, 2, 0), marks=True, reason="because")
    found = find_kept(chosen, CopiesObstacles(states, marks), d=d)
    assert (bool(found.keepers), found.marks, found.reason) == (*are_kept, reason)


def test_what_was_not_chosen_is_not_lacking() -> None:
    assert find_kept(CopiesChoice(), CopiesObstacles("a", "b"), d=2) == CopiesChoice()


LOADER = "the script does not pass the batches of varuna.data.Batches to step() as they are"


@pytest.mark.parametrize(
    ("p", "d", "reasons", "obstacle"),
    [
        (2, 2, [], ""),
        (2, 2, [ACCUMULATES], ACCUMULATES),
        (2, 2, [LOADER, OWN_GROUPS], OWN_GROUPS),
        (2, 2, [LOADER], ""),  # survivors end the step
        (1, 4, [LOADER], LOADER),
        (4, 1, [LOADER], LOADER),
        (2, 2, [OTHER_STAGES + "a list"], ""),
        (1, 2, [OTHER_STAGES + "a list"], ""),
        (4, 1, [OTHER_STAGES + "a list"], OTHER_STAGES + "a list"),  # one replica's survivors take the lost stage
    ],
)
def test_marks_are_of_no_use_where_no_process_can_go_on_with_them(
    p: int, d: int, reasons: list[str], obstacle: str
) -> None:
    plan = Plan(p=p, d=d, micro_batch=1, global_batch=8 * d)
    assert find_marks_obstacle(reasons, plan) == obstacle


def test_a_job_whose_script_cannot_use_marks_keeps_none() -> None:
    known = {"script_obstacles": (ACCUMULATES,)}
    found = choose(8, 3, NEW, 180.0, **known)
    assert (found.keepers, found.marks) == ((), False)
    assert found.reason.endswith(f"; no marks are kept, which would be of no use: {ACCUMULATES}")
    assert choose(8, 3, NEW, 180.0).marks
    one_replica = choose(24, 1, TRACE, 12.0, **known)
    assert (len(one_replica.keepers), one_replica.marks) == (24, False), "copies of states are of use to new processes"
    assert "no marks" not in choose(2, 2, NEW, 5.0, **known).reason, "there are none in short steps anyway"
    wanted = choose(3, 2, CALM, 0.1, wish=Copies.ON, **known)
    assert (len(wanted.keepers), wanted.marks) == (3, False)
    assert ACCUMULATES in wanted.reason


def test_one_vm_has_no_other_to_copy_to() -> None:
    assert choose(3, 2, TRACE, 180.0, gpus=6) == CopiesChoice()


def test_the_users_interval_of_checkpoints_counts() -> None:
    rare = SaveCost(stall_s=0.006, write_s=0.01, pinned_interval_s=1800.0)
    assert not choose(4, 1, NEW, 1.0, save=replace(rare, pinned_interval_s=None)).keepers
    assert choose(4, 1, NEW, 1.0, save=rare).keepers


@pytest.mark.parametrize(
    ("best", "last", "resumed", "saved", "unsaved"),
    [
        (0, None, None, 0, (0, 0)),
        (0, 40, 0, 0, (40, 40)),
        (40, None, 30, 0, (40, 30)),
        (40, 7, 0, 0, (40, 7)),  # begun again
        (40, 45, 40, 44, (1, 1)),
        (40, None, 44, 44, (0, 0)),
    ],
)
def test_the_steps_that_no_checkpoint_has(
    best: int, last: int | None, resumed: int | None, saved: int, unsaved: tuple[int, int]
) -> None:
    assert count_unsaved(best, None, saved) == (max(best - saved, 0), 0)
    before = replace(generation(2), last_step=last, resumed_step=resumed)
    assert count_unsaved(best, before, saved) == unsaved


def test_a_job_of_which_no_checkpoint_comes_keeps_copies() -> None:
    """Its store refuses them, say, or is a folder that differs between VMs."""
    assert not choose(4, 1, RARE, 5.0).keepers
    assert not choose(4, 1, RARE, 5.0, unsaved=UnsavedSteps(most=100, now=100)).keepers, "none is due yet"
    found = choose(4, 1, RARE, 5.0, unsaved=UnsavedSteps(most=20_000, now=20_000))
    assert found.keepers
    assert found.reason.endswith("no checkpoint has the last 100000 s of training")
    anew = choose(4, 1, RARE, 5.0, unsaved=UnsavedSteps(most=20_000, now=0))
    assert anew.reason.endswith("no checkpoint has the last 0 s of training"), "it has begun again"


def test_a_generation_that_was_slower_than_predicted_makes_the_next_ones_steps_longer() -> None:
    plan = Plan(p=2, d=1, micro_batch=1, global_batch=8, predicted_minibatch_s=2.0)
    before = generation(2, plan=replace(plan, predicted_minibatch_s=4.0))
    assert expect_step_s(None, plan) == expect_step_s(before, plan) == 2.0
    assert expect_step_s(replace(before, mean_step_s=36.0), plan) == 18.0


def test_a_corrected_profile_makes_steps_longer_only_once() -> None:
    """Its plans are predicted with what the steps before took. So these are compared with what it predicts of them."""
    plan = Plan(p=2, d=1, micro_batch=1, global_batch=8, predicted_minibatch_s=20.0)
    before = generation(2, plan=replace(plan, predicted_minibatch_s=10.0), mean_step_s=20.0)
    corrected = Proposal(plan=plan, present_examples_per_s=8 / 20.0)
    assert expect_step_s(before, plan, corrected) == 20.0
    assert expect_step_s(replace(before, mean_step_s=30.0), plan, corrected) == pytest.approx(30.0)
    kept = replace(plan, d=2, predicted_minibatch_s=12.0)
    keeping = replace(corrected, keeping=Proposal(plan=kept))
    assert expect_step_s(replace(before, mean_step_s=30.0), kept, keeping) == pytest.approx(18.0)
    assert expect_step_s(before, plan, replace(corrected, present_examples_per_s=None)) == 20.0, "nothing to compare"
    in_place = replace(plan, d=2, predicted_minibatch_s=5.0)
    assert expect_step_s(before, in_place, corrected) == 10.0, "that of a shape in place is of the earlier profile"


def test_more_stages_than_are_placed_together() -> None:
    keepers = choose_keepers(150, vm_ids(150, 1, 1))
    assert len(keepers) == 150
    assert all(keeper != stage for stage, keeper in enumerate(keepers))
    assert max(Counter(keepers).values()) <= 3
