"""Who keeps whose copy: never on the same VM, as far apart as there is room, and evenly."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_manager.domain.keepers import Copies, VmPlace, choose_keepers


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
    keepers = choose_keepers(Copies.ON, p, vms, places)
    stages = [set(vms[stage::p]) for stage in range(p)]
    if not keepers:
        assert any(stage == set(vms) for stage in stages)
        return
    assert len(keepers) == p
    for stage, keeper in enumerate(keepers):
        assert vms[keeper] not in stages[stage]
    assert keepers == choose_keepers(Copies.ON, p, vms, dict(reversed(places.items())))
    if gpus == 1:
        assert max(Counter(keepers).values()) == 1


@given(p=st.integers(2, 5), zone_names=zones)
def test_no_other_choice_shares_fewer_zones(p: int, zone_names: list[str]) -> None:
    """Compared with all choices in which each VM keeps one copy."""
    vms = vm_ids(p, 1, 1)
    zone_of = dict(zip(vms, zone_names, strict=False))
    keepers = choose_keepers(Copies.AUTO, p, vms, {vm: VmPlace(vm, zone) for vm, zone in zone_of.items()})
    stages = [{vm} for vm in vms]
    fewest = min(
        count_shared(list(choice), stages, zone_of)
        for choice in product(vms, repeat=p)
        if len(set(choice)) == p and all(keeper not in stage for keeper, stage in zip(choice, stages, strict=True))
    )
    assert count_shared([vms[keeper] for keeper in keepers], stages, zone_of) == fewest


def test_the_same_host_is_worse_than_any_zone() -> None:
    places = {"vm0": VmPlace("h", "a"), "vm1": VmPlace("h", "b"), "vm2": VmPlace("i", "a"), "vm3": VmPlace("i", "b")}
    keepers = choose_keepers(Copies.AUTO, 4, vm_ids(4, 1, 1), places)
    assert sorted(keepers) == [0, 1, 2, 3]
    assert all(places[f"vm{keeper}"].host != places[f"vm{stage}"].host for stage, keeper in enumerate(keepers))
    assert all(places[f"vm{keeper}"].zone != places[f"vm{stage}"].zone for stage, keeper in enumerate(keepers))


@pytest.mark.parametrize(
    ("copies", "p", "vms", "are_kept"),
    [
        ("auto", 3, ["a", "b", "c"], True),
        ("auto", 2, ["a", "b", "c", "d"], False),  # each stage is on two VMs
        ("on", 2, ["a", "b", "c", "d"], True),
        ("auto", 2, ["a", "b", "a", "c"], True),  # both replicas of stage 0 are on one
        ("off", 3, ["a", "b", "c"], False),
        ("on", 3, ["a", "a", "a"], False),
        ("auto", 1, ["a"], False),
        ("auto", 4, ["a", "a", "a", "b"], True),  # b keeps three
    ],
)
def test_when_copies_are_kept(copies: str, p: int, vms: list[str], are_kept: bool) -> None:
    assert bool(choose_keepers(Copies(copies), p, vms)) is are_kept


def test_more_stages_than_are_placed_together() -> None:
    keepers = choose_keepers(Copies.AUTO, 150, vm_ids(150, 1, 1))
    assert len(keepers) == 150
    assert all(keeper != stage for stage, keeper in enumerate(keepers))
    assert max(Counter(keepers).values()) <= 3
