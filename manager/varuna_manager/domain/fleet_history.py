"""What a fleet went through before this manager came, from the lives of its VMs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from varuna_manager.domain.states import VmState

HALF_LIFE_S = 24 * 3600.0
"""After so long a loss, and an hour without one, count half: spot markets change with the hour and the day."""
_WORKS = (VmState.READY, VmState.SUSPECT)


@dataclass(frozen=True, kw_only=True)
class VmLife:
    created_at: float
    states: Sequence[tuple[float, VmState]]
    """Since when it was in each, oldest first."""
    had_notice: bool = False


@dataclass(frozen=True, kw_only=True)
class FleetHistory:
    losses_at: tuple[float, ...] = ()
    """Oldest first."""
    joins_s: tuple[float, ...] = ()
    """What VMs took from being requested to being ready, in the order in which they were."""
    stable_since: float | None = None
    """The last loss; else since when there are VMs; None: there never was one."""
    removals: float = 0.0
    """As many losses, each by its age (`HALF_LIFE_S`),"""
    vm_hours: float = 0.0
    """and the hours of VMs in which they were seen, likewise."""


def look_back(lives: Iterable[VmLife], now: float) -> FleetHistory:
    """`lives`: of all VMs, those that are gone as well."""
    losses: list[float] = []
    joins: list[tuple[float, float]] = []
    vm_hours, first = 0.0, math.inf
    for life in lives:
        steps = [*life.states, (now, None)]
        for (since, state), (until, new) in pairwise(steps):
            first = min(first, since)
            if state in _WORKS:
                vm_hours += _faded_hours(since, until, now)
                if new is not None and _is_lost(new, had_notice=life.had_notice):
                    losses.append(until)
            elif state is VmState.REQUESTED and new is VmState.READY:
                joins.append((until, until - life.created_at))
    return FleetHistory(
        losses_at=tuple(sorted(losses)),
        joins_s=tuple(seconds for _, seconds in sorted(joins)),
        stable_since=max(losses, default=None if first is math.inf else first),
        removals=sum(_weight(now - at) for at in losses),
        vm_hours=vm_hours,
    )


def _is_lost(state: VmState, *, had_notice: bool) -> bool:
    """By the market, that is: one that a user drains is not."""
    return state in (VmState.LOST, VmState.GONE) or (state is VmState.DRAINING and had_notice)


def _weight(age_s: float) -> float:
    return math.exp2(-max(age_s, 0.0) / HALF_LIFE_S)


def _faded_hours(since: float, until: float, now: float) -> float:
    """The integral of the weight over the time from `since` to `until`, in hours."""
    return HALF_LIFE_S / math.log(2) * (_weight(now - until) - _weight(now - since)) / 3600.0
