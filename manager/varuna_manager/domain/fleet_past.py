"""What the fleet has just been through, as far as it bears on morphs: losses, and how long new VMs take to join."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_manager.domain.clock import is_within
from varuna_planner.hazard import removals_per_vm_hour


@dataclass(frozen=True, kw_only=True)
class FleetPast:
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
    """VMs that were lost or got notice, older ones counting less,"""
    vm_hours: float = 0.0
    """while so many VM-hours were seen."""
    market_hazard: float | None = None
    """Removals per VM-hour, by what the provider tells of its market; None: it tells nothing."""

    def stops_per_hour(self, vms: int) -> float:
        """How often losses are expected to stop a generation that uses so many VMs."""
        return vms * removals_per_vm_hour(self.removals, self.vm_hours, self.market_hazard)

    def stable_s(self, now: float) -> float:
        """For how long no VM was lost."""
        return 0.0 if self.stable_since is None else max(0.0, now - self.stable_since)

    def storm(self, now: float, *, losses: int, window_s: float, quiet_s: float, wait_s: float) -> str:
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
        return f"{lost}: no change of shape before {quiet_s:.0f} s without one"

    def arrives_within_s(self) -> float | None:
        """When the next VM that was requested should be here; None: none is coming, or it is not known or overdue."""
        if self.join_s is None:
            return None
        left = [self.join_s - age for age in self.coming_ages_s if age < self.join_s]
        return min(left, default=None)
