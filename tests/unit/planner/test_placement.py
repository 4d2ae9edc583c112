"""Where ranks go: neighbours together, replicas apart, as little moved as possible."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_planner.placement import place, place_by_type, share_replicas
from varuna_proto.plan import Device, Plan


def fleet(vms: int, gpus: int = 1, first: int = 0) -> list[Device]:
    return [Device(f"vm{vm:02}", gpu) for vm in range(first, first + vms) for gpu in range(gpus)]


def ranks(placed: tuple[Device, ...]) -> dict[Device, int]:
    return {device: rank for rank, device in enumerate(placed)}


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_every_rank_gets_a_device_of_its_own(p: int, d: int, sizes: list[int], data: st.DataObject) -> None:
    devices = [Device(f"vm{vm}", gpu) for vm, size in enumerate(sizes) for gpu in range(size)]
    previous = {device: rank for rank, device in enumerate(devices) if data.draw(st.booleans())}
    if len(devices) < p * d:
        with pytest.raises(ValueError, match=f"{p}×{d} needs {p * d} devices and there are {len(devices)}"):
            place(p, d, devices, previous)
        return
    placed = place(p, d, devices, previous, previous_p=data.draw(st.integers(1, 6)))
    assert len(placed) == len(set(placed)) == p * d
    assert set(placed) <= set(devices)


def test_the_stages_of_a_replica_share_a_vm() -> None:
    placed = place(4, 2, fleet(2, gpus=4))
    assert [{device.vm_id for device in placed[r * 4 : r * 4 + 4]} for r in range(2)] == [{"vm00"}, {"vm01"}]


def test_the_replicas_of_a_stage_are_on_different_vms() -> None:
    for p, d, gpus in ((3, 4, 2), (4, 2, 4), (6, 2, 4), (2, 4, 2)):
        placed = place(p, d, fleet(8, gpus=gpus))
        for stage in range(p):
            assert len({placed[replica * p + stage].vm_id for replica in range(d)}) == d


def test_large_vms_first_when_some_are_left_over() -> None:
    devices = [Device("small", 0), Device("large", 0), Device("large", 1)]
    assert place(2, 1, devices) == (Device("large", 0), Device("large", 1))


def test_nothing_moves_when_nothing_changed() -> None:
    for gpus in (1, 2, 4):
        devices = fleet(8 // gpus, gpus)
        placed = place(4, 2, devices)
        shuffled = devices[::-1]
        assert place(4, 2, shuffled, ranks(placed)) == placed


def test_a_lost_vm_is_replaced_and_nobody_else_moves_stage() -> None:
    before = place(3, 2, fleet(6))
    lost = before[4]
    devices = [device for device in fleet(6) if device != lost] + [Device("new", 0)]
    after = place(3, 2, devices, ranks(before))
    assert [after[r].vm_id if r != 4 else "new" for r in range(6)] == [a.vm_id for a in after]
    stages = ranks(before)
    assert sum(stages[device] % 3 != rank % 3 for rank, device in enumerate(after) if device in stages) == 0


def test_a_replica_less_keeps_the_others_in_their_stages() -> None:
    before = place(3, 2, fleet(6))
    left = [device for device in fleet(6) if device != before[1]]
    after = place(3, 1, left, ranks(before))
    assert [ranks(before)[device] % 3 for device in after] == [0, 1, 2]


def test_half_the_stages_go_where_most_of_their_sections_were() -> None:
    """From 4 stages to 2: each new stage lies on a device that held half of it."""
    before = place(4, 1, fleet(4))
    after = place(2, 1, fleet(4), ranks(before), previous_p=4)
    assert [ranks(before)[device] // 2 for device in after] == [0, 1]


def test_a_device_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        place(1, 1, [Device("vm", 0), Device("vm", 0)])


# ---------------------------------------------------------------- zones


@given(
    st.integers(1, 5), st.integers(1, 5), st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abc")), max_size=14),
    st.data(),
)  # fmt: skip
def test_as_many_replicas_as_possible_are_each_in_one_zone(
    p: int, d: int, vms: list[tuple[int, str]], data: st.DataObject
) -> None:
    devices = [Device(f"vm{vm}", gpu) for vm, (size, _) in enumerate(vms) for gpu in range(size)]
    zones = {f"vm{vm}": zone for vm, (_, zone) in enumerate(vms)}
    if len(devices) < p * d:
        return
    previous = {device: rank for rank, device in enumerate(devices) if data.draw(st.booleans())}
    placed = place(p, d, devices, previous, zones=zones)
    assert len(placed) == len(set(placed)) == p * d
    assert set(placed) <= set(devices)
    replicas = [{zones[device.vm_id] for device in placed[r * p : r * p + p]} for r in range(d)]
    sizes = {zone: sum(zones[device.vm_id] == zone for device in devices) for zone in set(zones.values())}
    fitting = sum(size // p for size in sizes.values())
    whole = [zone for replica in replicas if len(replica) == 1 for zone in replica]
    assert len(whole) >= min(d, fitting)
    shared = share_replicas(p, d, sizes)
    assert sum(shared.values()) == min(d, fitting)
    for zone, count in shared.items():
        assert count * p <= sizes[zone]
        for other, more in shared.items():
            assert more <= count + 1 or (count + 1) * p > sizes[zone], f"{other} has {more}, {zone} {count}"


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=10), st.data())
def test_a_single_zone_changes_nothing(p: int, d: int, sizes: list[int], data: st.DataObject) -> None:
    devices = [Device(f"vm{vm}", gpu) for vm, size in enumerate(sizes) for gpu in range(size)]
    if len(devices) < p * d:
        return
    previous = {device: rank for rank, device in enumerate(devices) if data.draw(st.booleans())}
    zones = dict.fromkeys((device.vm_id for device in devices), "a")
    assert place(p, d, devices, previous, zones=zones) == place(p, d, devices, previous)


def test_the_replicas_are_spread_over_zones() -> None:
    zones = {f"vm{vm:02}": "ab"[vm >= 8] for vm in range(16)}
    placed = place(4, 4, fleet(16), zones=zones)
    assert [zones[device.vm_id] for device in placed[::4]] == ["a", "a", "b", "b"]


def test_a_replica_that_no_zone_holds_crosses_them_once() -> None:
    zones = {f"vm{vm:02}": "ab"[vm >= 3] for vm in range(6)}
    placed = place(4, 1, fleet(6), zones=zones)
    crossed = [zones[device.vm_id] for device in placed]
    assert sum(one != other for one, other in itertools.pairwise(crossed)) == 1


def test_what_a_zone_holds_stays_there() -> None:
    zones = {f"vm{vm:02}": "ab"[vm >= 4] for vm in range(8)}
    before = place(2, 2, fleet(8), zones=zones)
    held = ranks(before)
    assert place(2, 2, fleet(8), held, zones=zones) == before
    fewer = {device: rank for device, rank in held.items() if zones[device.vm_id] == "b"}
    kept = place(2, 1, fleet(8), fewer, zones=zones)
    assert {zones[device.vm_id] for device in kept} == {"b"}


def mixed_plan(p: int, d: int, gpu_types: tuple[str, ...]) -> Plan:
    return Plan(p=p, d=d, micro_batch=1, global_batch=p * d, gpu_types=gpu_types)


TYPES = {"v1": "V100", "v2": "V100", "v3": "V100", "a1": "A100", "a2": "A100"}


def test_each_rank_gets_a_device_of_its_type() -> None:
    devices = [Device(vm, index) for vm in TYPES for index in range(2)]
    for gpu_types in (("A100",) * 3 + ("V100",) * 6, ("A100", "V100", "V100") * 2, ("V100", "V100", "A100") * 3):
        plan = mixed_plan(3, len(gpu_types) // 3, gpu_types)
        placed = place_by_type(plan, devices, TYPES)
        assert tuple(TYPES[device.vm_id] for device in placed) == gpu_types
        assert len(set(placed)) == len(placed)


def test_a_mixed_plan_that_is_placed_again_moves_nothing() -> None:
    devices = [Device(vm, 0) for vm in TYPES]
    for gpu_types in (("A100", "A100", "V100", "V100"), ("V100", "A100") * 2):
        plan = mixed_plan(2, 2, gpu_types)
        first = place_by_type(plan, devices, TYPES)
        previous = {device: rank for rank, device in enumerate(first)}
        again = place_by_type(plan, devices[::-1], TYPES, previous, previous_p=2)
        stages = {device: rank % 2 for device, rank in previous.items()}
        assert [stages[device] for device in again] == [0, 1, 0, 1]


def test_a_type_with_too_few_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 devices and there are 2"):
        place_by_type(mixed_plan(1, 3, ("A100",) * 3), [Device(vm, 0) for vm in TYPES], TYPES)
