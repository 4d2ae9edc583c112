"""What the fleet has been through, as far as it bears on morphs: losses, and how long new VMs take to join."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from varuna_manager.domain.clock import is_within
from varuna_manager.domain.states import VmState
from varuna_planner.liveput.hazard import PRIOR_REMOVALS, PRIOR_VM_HOURS, removals_per_vm_hour
from varuna_proto.wording import count_of

HALF_LIFE_S = 24 * 3600.0
"""After this time, a loss and an hour without one count half: spot markets change with the hour and the day."""
USEFUL_NOTICE_S = 20.0
"""In which a job can leave a VM with all that it has done there, as a rule (`domain.leaving_step`)."""
_WORKS = (VmState.READY, VmState.SUSPECT)


@dataclass(frozen=True, kw_only=True)
class VmLife:
    """What the store keeps of one VM's states."""

    created_at: float
    states: Sequence[tuple[float, VmState]]
    """Each state with its start, oldest first."""
    notice_deadline: float | None = None
    """When it was to go; None: it had no notice."""


@dataclass(frozen=True, kw_only=True)
class LivesSummary:
    """What the lives of all VMs show about the fleet. A new leader begins with it."""

    losses_at: tuple[float, ...] = ()
    """Oldest first."""
    joins_s: tuple[float, ...] = ()
    """The time of each VM from its request until it was ready, in the order of their arrival."""
    stable_since: float | None = None
    """The last loss, or the first VM where none was lost; None: there never was a VM."""
    removals: float = 0.0
    """The number of losses, each with the weight of its age (`HALF_LIFE_S`)."""
    announced: float = 0.0
    """The same of those that came with a useful notice."""
    vm_hours: float = 0.0
    """The hours that VMs were there, weighted in the same way."""


def summarize_lives(lives: Iterable[VmLife], now: float) -> LivesSummary:
    """`lives`: of all VMs, including those that are gone."""
    losses: list[float] = []
    announced: list[float] = []
    joins: list[tuple[float, float]] = []
    vm_hours, first = 0.0, math.inf
    for life in lives:
        steps = [*life.states, (now, None)]
        for (since, state), (until, new) in pairwise(steps):
            first = min(first, since)
            if state in _WORKS:
                vm_hours += _weighted_hours(since, until, now)
                if new is not None and is_lost_to_market(new, had_notice=life.notice_deadline is not None):
                    losses.append(until)
                    if is_announced(new, life.notice_deadline, until):
                        announced.append(until)
            elif state is VmState.REQUESTED and new is VmState.READY:
                joins.append((until, until - life.created_at))
    return LivesSummary(
        losses_at=tuple(sorted(losses)),
        joins_s=tuple(seconds for _, seconds in sorted(joins)),
        stable_since=max(losses, default=None if first is math.inf else first),
        removals=sum(weight(now - at) for at in losses),
        announced=sum(weight(now - at) for at in announced),
        vm_hours=vm_hours,
    )


def is_lost_to_market(state: VmState, *, had_notice: bool) -> bool:
    """Whether a VM that worked and is in `state` now was taken away. A VM that a user drains was not."""
    return state in (VmState.LOST, VmState.GONE) or (state is VmState.DRAINING and had_notice)


def is_announced(state: VmState, notice_deadline: float | None, now: float) -> bool:
    """Whether a VM that worked and is in `state` since `now` has a notice that is of use."""
    is_soon_enough = notice_deadline is not None and notice_deadline - now >= USEFUL_NOTICE_S
    return state is VmState.DRAINING and is_soon_enough


def weight(age_s: float) -> float:
    """How much an observation of this age counts."""
    return math.exp2(-max(age_s, 0.0) / HALF_LIFE_S)


def _weighted_hours(since: float, until: float, now: float) -> float:
    """The integral of the weight over the time from `since` to `until`, in hours."""
    return HALF_LIFE_S / math.log(2) * (weight(now - until) - weight(now - since)) / 3600.0


@dataclass(frozen=True, kw_only=True)
class FleetPast:
    """What decisions know of it now."""

    losses_at: tuple[float, ...] = ()
    """When VMs were lost, fell silent or got notice, oldest first; the last minutes only."""
    stable_since: float | None = None
    """Of the last loss; without one, since when VMs were seen; None: not known."""
    join_s: float | None = None
    """What VMs took from being requested to being ready (upper quartile of the last ones); None: none has joined."""
    warm_s: float | None = None
    """What their agents took for the imports of a job's workers (upper quartile); None: none has done any."""
    coming_ages_s: tuple[float, ...] = ()
    """How long ago those were requested that are not here yet."""
    removals: float = 0.0
    """VMs that were lost or got notice, weighted by age,"""
    announced: float = 0.0
    """of them those with a useful notice,"""
    vm_hours: float = 0.0
    """in this many VM-hours, weighted in the same way."""
    market_hazard: float | None = None
    """Removals per VM-hour, by what the provider reports of its market; None: it reports nothing."""

    def stops_per_hour(self, vms: int) -> float:
        """How often losses are expected to stop a generation that uses so many VMs."""
        return vms * removals_per_vm_hour(self.removals, self.vm_hours, self.market_hazard)

    @property
    def unannounced_share(self) -> float:
        """The part of the losses that is expected to come without a useful notice. A new fleet's all do."""
        return (self.removals - self.announced + PRIOR_REMOVALS) / (self.removals + PRIOR_REMOVALS)

    def describe_losses(self) -> str:
        """What `stops_per_hour` is computed from."""
        lost = round(self.removals)
        were = "was" if lost == 1 else "were"
        seen = f"newer losses count more: about {count_of(lost, 'VM')} {were}" if lost else "no VM was"
        hours = f"{self.vm_hours:.0f}" if self.vm_hours >= PRIOR_VM_HOURS else f"{self.vm_hours:.2g}"
        seen += f" lost in {hours} VM-hours"
        if self.vm_hours >= PRIOR_VM_HOURS:
            return seen
        if self.market_hazard is None:
            return f"{seen} so far; the estimate starts from {PRIOR_REMOVALS:.0f} in {PRIOR_VM_HOURS:.0f} VM-hours"
        return f"{seen} so far; the estimate starts from the provider's {self.market_hazard:.2g} per VM-hour"

    def stable_s(self, now: float) -> float:
        """For how long no VM was lost."""
        return 0.0 if self.stable_since is None else max(0.0, now - self.stable_since)

    def describe_storm(self, now: float, *, losses: int, window_s: float, quiet_s: float, wait_s: float) -> str:
        """Why shapes should be left alone for now; empty when they need not be.

        A storm is `losses` VMs lost within `window_s`. It is over after `quiet_s` without a loss, and no longer waited
        for `wait_s` after its first loss: a fleet that is never quiet must not keep new VMs idle for ever.
        """
        if not self.losses_at or not is_within(now, self.losses_at[-1], quiet_s):
            return ""
        last = began = self.losses_at[-1]
        for at in reversed(self.losses_at):
            if began - at >= quiet_s:
                break
            began = at
        within = [at for at in self.losses_at if last - at < window_s]
        if len(within) < losses or now - began >= wait_s:
            return ""
        lost = f"{len(within)} VMs were lost within {window_s:.0f} s"
        return f"{lost}: shapes stay as they are until {quiet_s:.0f} s pass without a loss"

    def next_arrival_s(self) -> float | None:
        """When the next VM that was requested should be here; None: none is coming, or it is not known or overdue."""
        if self.join_s is None:
            return None
        left = [self.join_s - age for age in self.coming_ages_s if age < self.join_s]
        return min(left, default=None)
