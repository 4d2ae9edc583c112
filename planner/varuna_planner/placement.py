"""Which device each rank gets.

Ranks go replica by replica (rank = replica * P + stage). A VM that takes a run of neighbouring ranks thus has
neighbouring stages of a replica, and no stage twice unless it has more devices than P: when one VM is lost, the other
replicas of its stages remain. Runs are assigned to VMs so that as much of the model as possible stays where it is.

Where VMs are in several zones, as many replicas as possible have all their stages in one zone: messages between stages
are sent for each micro-batch, those between replicas once in a step. The replicas are spread over the zones, so that a
burst in one of them leaves the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from varuna_proto.plan import Device, Plan

__all__ = ["place", "place_by_type", "share_replicas"]


class _Stages(NamedTuple):
    """The stages that are placed, and where the devices had theirs. Stages count as equal parts of the model."""

    p: int
    """The number of stages that are placed."""
    first: int
    """The first of them in the model."""
    of: int
    """Stages of the model."""
    old: Mapping[Device, int]
    """The stage that each device had before."""
    old_p: int

    @classmethod
    def of_model(cls, p: int, previous: Mapping[Device, int] | None, previous_p: int | None) -> _Stages:
        """All stages of a model. `previous`, `previous_p`: as of `place`."""
        old_p = previous_p or p
        return cls(p, 0, p, {device: rank % old_p for device, rank in (previous or {}).items()}, old_p)

    def find_old(self, device: Device) -> int:
        """-1: it had none."""
        return self.old.get(device, -1)

    def compute_overlap(self, old: int, rank: int) -> float:
        """The part of the model that an old stage (-1: none) and the stage of a rank share."""
        if old < 0:
            return 0.0
        new = self.first + rank % self.p
        return max(0.0, min((old + 1) / self.old_p, (new + 1) / self.of) - max(old / self.old_p, new / self.of))


def place(
    plan_p: int,
    plan_d: int,
    devices: Sequence[Device],
    previous: Mapping[Device, int] | None = None,
    *,
    previous_p: int | None = None,
    zones: Mapping[str, str] | None = None,
) -> tuple[Device, ...]:
    """The device of each rank (index = rank).

    Args:
        plan_p, plan_d: the new plan's P and D.
        devices: the free devices, in any order; P · D of them are used.
        previous: the rank that each device had before; devices without one held nothing.
        previous_p: the P of those ranks; by default the new P.
        zones: the zone of each VM; None: all are in one.

    Raises:
        ValueError: there are fewer devices than ranks, or one is named twice.
    """
    return _place(_Stages.of_model(plan_p, previous, previous_p), plan_d, devices, zones)


def place_by_type(
    plan: Plan,
    devices: Sequence[Device],
    gpu_types: Mapping[str, str],
    previous: Mapping[Device, int] | None = None,
    *,
    previous_p: int | None = None,
    zones: Mapping[str, str] | None = None,
) -> tuple[Device, ...]:
    """The device of each rank of a plan with `gpu_types`: of the type that the plan names for it.

    Args:
        plan: its types differ by replica, or by stage and then alike in all replicas.
        devices: the free devices, in any order.
        gpu_types: the type of each VM's GPUs.
        previous, previous_p, zones: as of `place`.

    Raises:
        ValueError: there are fewer devices of a type than the plan needs, or one is named twice.
    """
    stages = _Stages.of_model(plan.p, previous, previous_p)
    by_type: defaultdict[str, list[Device]] = defaultdict(list)
    for device in devices:
        by_type[gpu_types.get(device.vm_id, "")].append(device)

    def take(gpu_type: str, placed_stages: _Stages, d: int) -> tuple[Device, ...]:
        taken = _place(placed_stages, d, by_type[gpu_type], zones)
        by_type[gpu_type] = sorted({*by_type[gpu_type]}.difference(taken))
        return taken

    rows = [plan.gpu_types[replica * plan.p : (replica + 1) * plan.p] for replica in range(plan.d)]
    if all(len(set(row)) == 1 for row in rows):
        by_replica = groupby(rows, key=lambda row: row[0])
        return tuple(device for gpu_type, alike in by_replica for device in take(gpu_type, stages, len(list(alike))))
    found: dict[int, Device] = {}
    first = 0
    for gpu_type, run in groupby(rows[0]):
        p = len(list(run))
        for number, device in enumerate(take(gpu_type, stages._replace(p=p, first=first), plan.d)):
            found[number // p * plan.p + first + number % p] = device
        first += p
    return tuple(found[rank] for rank in range(plan.p * plan.d))


def _place(
    stages: _Stages, plan_d: int, devices: Sequence[Device], zones: Mapping[str, str] | None
) -> tuple[Device, ...]:
    plan_p = stages.p
    ranks = plan_p * plan_d
    if len(set(devices)) != len(devices):
        raise ValueError("a device is named twice")
    if len(devices) < ranks:
        raise ValueError(f"{plan_p}×{plan_d} needs {ranks} devices and there are {len(devices)}")
    free: dict[str, set[Device]] = {}
    for device in devices:
        free.setdefault("" if zones is None else zones.get(device.vm_id, ""), set()).add(device)
    placed: dict[int, Device] = {}

    def fill(zone: str, count: int) -> None:
        """Give the next ranks to devices of the zone."""
        first = len(placed)
        for vms, runs in _list_runs(free[zone], range(first, first + count)):
            for vm, run in _match_runs(vms, runs, stages):
                placed.update(_take_devices(vm, run, stages))
        free[zone] -= set(placed.values())

    sizes = {zone: len(those) for zone, those in free.items()}
    held = {zone: len(those & stages.old.keys()) for zone, those in free.items()}
    for zone, replicas in share_replicas(plan_p, plan_d, sizes, held).items():
        fill(zone, replicas * plan_p)
    for zone in sorted(free, key=lambda zone: (-len(free[zone]), zone)):
        fill(zone, min(len(free[zone]), ranks - len(placed)))
    return tuple(placed[rank] for rank in range(ranks))


def share_replicas(
    plan_p: int, plan_d: int, devices: Mapping[str, int], held: Mapping[str, int] | None = None
) -> dict[str, int]:
    """How many whole replicas each zone has: as many in all as fit, and as equal numbers as the zones allow.

    Args:
        plan_p, plan_d: the plan's P and D.
        devices: the number of free devices, by zone.
        held: how many of them hold something; among equal zones, the one with more is filled first.
    """
    replicas = dict.fromkeys(devices, 0)
    for _ in range(plan_d):
        fitting = [zone for zone, size in devices.items() if (replicas[zone] + 1) * plan_p <= size]
        if not fitting:
            break
        best = min(fitting, key=lambda zone: (replicas[zone], -(held or {}).get(zone, 0), -devices[zone], zone))
        replicas[best] += 1
    return replicas


def _list_runs(devices: Collection[Device], ranks: range) -> list[tuple[list[list[Device]], list[range]]]:
    """For each size of VM, largest first (fewest hops between VMs): its VMs, and the runs of ranks for those that are
    needed. The last run may be shorter than its VM."""
    by_vm: defaultdict[str, list[Device]] = defaultdict(list)
    for device in sorted(devices):
        by_vm[device.vm_id].append(device)
    by_size: defaultdict[int, list[list[Device]]] = defaultdict(list)
    for vm in by_vm.values():
        by_size[len(vm)].append(vm)
    groups = []
    first = ranks.start
    for size, vms in sorted(by_size.items(), reverse=True):
        end = min(ranks.stop, first + size * len(vms))
        groups.append((vms, [range(start, min(start + size, end)) for start in range(first, end, size)]))
        first = end
    return groups


def _match_runs(vms: list[list[Device]], runs: list[range], stages: _Stages) -> list[tuple[list[Device], range]]:
    """Pairs runs with VMs, best overlap first. VMs that held the same stages are interchangeable, as are equal runs."""
    vms_like: defaultdict[tuple[int, ...], list[list[Device]]] = defaultdict(list)
    for vm in reversed(vms):
        vms_like[tuple(stages.find_old(device) for device in vm)].append(vm)
    runs_like: defaultdict[tuple[int, int], list[range]] = defaultdict(list)
    for run in reversed(runs):
        runs_like[run[0] % stages.p, len(run)].append(run)
    kept = [(-_kept_share(held, like, stages), like, held) for held in vms_like for like in runs_like]
    pairs = []
    for _, like, held in sorted(kept):
        while vms_like[held] and runs_like[like]:
            pairs.append((vms_like[held].pop(), runs_like[like].pop()))
    return pairs


def _kept_share(held: tuple[int, ...], like: tuple[int, int], stages: _Stages) -> float:
    """The part of the model that stays in place when a VM takes the run (first stage, length)."""
    stage, length = like
    free = list(held)
    total = 0.0
    for rank in range(stage, stage + length):
        best = max(free, key=lambda old: stages.compute_overlap(old, rank))
        total += stages.compute_overlap(best, rank)
        free.remove(best)
    return total


def _take_devices(vm: list[Device], run: range, stages: _Stages) -> dict[int, Device]:
    """The VM's devices for a run of ranks."""
    free = list(vm)
    placed = {}
    for rank in run:
        device = max(free, key=lambda d: (stages.compute_overlap(stages.find_old(d), rank), -d.local_rank))
        free.remove(device)
        placed[rank] = device
    return placed
