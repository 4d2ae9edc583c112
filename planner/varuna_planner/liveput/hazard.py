"""Estimates how often a fleet's VMs are taken away, and how often those go together that hold the same state. Imports
nothing, because the manager's loop calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Final

__all__ = [
    "BURST_S",
    "PRIOR_BURSTS",
    "PRIOR_REMOVALS",
    "PRIOR_VM_HOURS",
    "bursts_per_hour",
    "holder_losses_per_hour",
    "list_bursts",
    "mean_hit_share",
    "removals_per_vm_hour",
]

PRIOR_REMOVALS: Final = 1.0
PRIOR_VM_HOURS: Final = 10.0
"""The rate assumed for a fleet without history: one in ten spot VMs is taken per hour, the middle of the bands (0-5 %
to above 20 %) that Azure publishes for its sizes. The prior weighs as much as 10 VM-hours."""
PRIOR_BURSTS: Final = (1, 1, 2)
"""The sizes of bursts that count besides those that were seen: half of the VMs go alone, and half in pairs."""
BURST_S: Final = 30.0
"""Losses that follow each other within this time are one burst: the job may not hold each section twice again."""


def removals_per_vm_hour(removals: float, vm_hours: float, expected: float | None = None) -> float:
    """The mean of the hazard's posterior: a Gamma prior, and removals as a Poisson process.

    `expected`: the prior's mean, if the market publishes its eviction rate; it weighs as much as the default.
    Raises ValueError when any is negative.
    """
    if not (removals >= 0 and vm_hours >= 0):
        raise ValueError(f"{removals} removals in {vm_hours} VM-hours: neither can be negative")
    if expected is not None and not expected >= 0:
        raise ValueError(f"{expected} removals per VM-hour are expected: they cannot be negative")
    prior = PRIOR_REMOVALS if expected is None else expected * PRIOR_VM_HOURS
    return (prior + removals) / (PRIOR_VM_HOURS + vm_hours)


def list_bursts(losses_at: Sequence[float]) -> tuple[int, ...]:
    """The VMs in each burst, from the times of all losses, oldest first."""
    sizes = [1] if losses_at else []
    for before, at in pairwise(losses_at):
        if at - before <= BURST_S:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return tuple(sizes)


def holder_losses_per_hour(stops_per_hour: float, bursts: Iterable[int], holders: Sequence[int], vms: int) -> float:
    """How often one burst is expected to take all VMs that hold some stage, so that a job needs its checkpoint.

    A burst takes any of the VMs with equal chance.

    Args:
        stops_per_hour: VMs that are expected to be lost an hour, of those that the job uses.
        bursts: the sizes of those that were seen (`list_bursts`).
        holders: by stage, the VMs that hold it, at least one.
        vms: that the job uses.
    """
    sizes = _list_sizes(bursts, vms)
    needs = (min(1.0, sum(_chance_of_all(size, held, vms) for held in holders)) for size in sizes)
    return stops_per_hour * sum(needs) / sum(sizes)


def bursts_per_hour(stops_per_hour: float, bursts: Iterable[int], vms: int) -> float:
    """How often a burst is expected to take VMs that the job uses. The arguments are those of
    `holder_losses_per_hour`."""
    sizes = _list_sizes(bursts, vms)
    return stops_per_hour * len(sizes) / sum(sizes)


def mean_hit_share(bursts: Iterable[int], replicas: Sequence[int], vms: int) -> float:
    """The share of the replicas that lose a VM in a burst, on average. `replicas`: the VMs of each."""
    sizes = _list_sizes(bursts, vms)
    hit = sum(1.0 - _chance_of_none(size, own, vms) for size in sizes for own in replicas)
    return hit / (len(sizes) * len(replicas))


def _list_sizes(bursts: Iterable[int], vms: int) -> list[int]:
    return [min(size, vms) for size in (*PRIOR_BURSTS, *bursts)]


def _chance_of_all(size: int, held: int, vms: int) -> float:
    """That `size` of `vms` VMs, drawn without replacement, include certain `held` of them."""
    return prod((size - one) / (vms - one) for one in range(held)) if held <= size else 0.0


def _chance_of_none(size: int, own: int, vms: int) -> float:
    """That `size` of `vms` VMs, drawn without replacement, include none of certain `own`."""
    return prod(max(0, vms - own - one) / (vms - one) for one in range(size))
