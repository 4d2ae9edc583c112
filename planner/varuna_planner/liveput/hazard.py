"""Estimates how often a fleet's VMs are taken away. Imports nothing, because the manager's loop calls it."""

from __future__ import annotations

from typing import Final

__all__ = ["PRIOR_REMOVALS", "PRIOR_VM_HOURS", "removals_per_vm_hour"]

PRIOR_REMOVALS: Final = 1.0
PRIOR_VM_HOURS: Final = 10.0
"""The rate assumed for a fleet without history: one in ten spot VMs is taken per hour, the middle of the bands (0-5 %
to above 20 %) that Azure publishes for its sizes. The prior weighs as much as 10 VM-hours."""


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
