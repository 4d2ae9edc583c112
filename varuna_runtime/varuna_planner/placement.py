"""Which device each rank gets.

Ranks go replica by replica (rank = replica * P + stage), so a VM that takes a run of neighbouring ranks keeps
neighbouring stages of a replica inside it, and has no stage twice unless it has more devices than P: one VM lost
leaves every stage with a replica elsewhere, where there is one. Which VM takes which run is free, and is used to leave
as much of the model as possible where it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Device", "place"]


class Device(NamedTuple):
    """One accelerator of one VM."""

    vm_id: str
    local_rank: int


def place(
    plan_p: int,
    plan_d: int,
    devices: Sequence[Device],
    previous: Mapping[Device, int] | None = None,
    *,
    previous_p: int | None = None,
) -> tuple[Device, ...]:
    """The device of each rank (index = rank).

    Args:
        plan_p, plan_d: the new plan's P and D.
        devices: those that are free for it, in any order, of which P · D are taken.
        previous: the rank that a device had before; devices without one held nothing.
        previous_p: the P of those ranks; by default the new one.

    Raises:
        ValueError: there are fewer devices than ranks, or one is named twice.
    """
    ranks = plan_p * plan_d
    if len(set(devices)) != len(devices):
        raise ValueError("a device is named twice")
    if len(devices) < ranks:
        raise ValueError(f"{plan_p}×{plan_d} needs {ranks} devices and there are {len(devices)}")
    old_p = previous_p or plan_p
    old_stage = {device: rank % old_p for device, rank in (previous or {}).items()}
    placed: dict[int, Device] = {}
    for vms, runs in _runs(devices, ranks):
        for vm, run in _match(vms, runs, plan_p, old_p, old_stage):
            placed.update(_within(vm, run, plan_p, old_p, old_stage))
    return tuple(placed[rank] for rank in range(ranks))


def _runs(devices: Sequence[Device], ranks: int) -> list[tuple[list[list[Device]], list[range]]]:
    """For each size of VM, the largest first (fewest hops between VMs): its VMs, and the runs of ranks for as many of
    them as are needed. The last run may be shorter than its VM."""
    by_vm: defaultdict[str, list[Device]] = defaultdict(list)
    for device in sorted(devices):
        by_vm[device.vm_id].append(device)
    by_size: defaultdict[int, list[list[Device]]] = defaultdict(list)
    for vm in by_vm.values():
        by_size[len(vm)].append(vm)
    groups = []
    first = 0
    for size, vms in sorted(by_size.items(), reverse=True):
        end = min(ranks, first + size * len(vms))
        groups.append((vms, [range(start, min(start + size, end)) for start in range(first, end, size)]))
        first = end
    return groups


def _match(
    vms: list[list[Device]], runs: list[range], p: int, old_p: int, old_stage: Mapping[Device, int]
) -> list[tuple[list[Device], range]]:
    """Pairs runs with VMs, those that keep most first. VMs that held the same stages are alike, and so are runs."""
    vms_like: defaultdict[tuple[int, ...], list[list[Device]]] = defaultdict(list)
    for vm in reversed(vms):
        vms_like[tuple(old_stage.get(device, -1) for device in vm)].append(vm)
    runs_like: defaultdict[tuple[int, int], list[range]] = defaultdict(list)
    for run in reversed(runs):
        runs_like[run[0] % p, len(run)].append(run)
    kept = [(-_kept(held, like, p, old_p), like, held) for held in vms_like for like in runs_like]
    pairs = []
    for _, like, held in sorted(kept):
        while vms_like[held] and runs_like[like]:
            pairs.append((vms_like[held].pop(), runs_like[like].pop()))
    return pairs


def _kept(held: tuple[int, ...], like: tuple[int, int], p: int, old_p: int) -> float:
    """The part of the model that stays where it is when a VM takes a run like (first stage, length)."""
    stage, length = like
    free = list(held)
    total = 0.0
    for offset in range(length):
        best = max(free, key=lambda old: _overlap(old, old_p, (stage + offset) % p, p))
        total += _overlap(best, old_p, (stage + offset) % p, p)
        free.remove(best)
    return total


def _within(vm: list[Device], run: range, p: int, old_p: int, old_stage: Mapping[Device, int]) -> dict[int, Device]:
    """The VM's devices for a run of ranks."""
    free = list(vm)
    placed = {}
    for rank in run:
        device = max(free, key=lambda d: (_overlap(old_stage.get(d, -1), old_p, rank % p, p), -d.local_rank))
        free.remove(device)
        placed[rank] = device
    return placed


def _overlap(old: int, old_p: int, new: int, p: int) -> float:
    """The part of the model that an old stage of old_p (-1: none) and a new one of p share, if stages are equal."""
    if old < 0:
        return 0.0
    return max(0.0, min((old + 1) / old_p, (new + 1) / p) - max(old / old_p, new / p))
