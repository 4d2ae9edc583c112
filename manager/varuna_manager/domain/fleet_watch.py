"""Watches the fleet from one look to the next, so that decisions know what it has been through."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import quantiles

from varuna_manager.domain.fleet_past import FleetPast, LivesSummary, is_announced, is_lost_to_market, weight
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState

_JOINS_KEPT = 20
_LOSSES_KEPT = 200


class FleetWatch:
    """Remembers which VMs were lost and how long new ones took to join."""

    def __init__(self, now: float) -> None:
        self._stable_since = now
        self._losses: deque[float] = deque(maxlen=_LOSSES_KEPT)
        self._joins_s: deque[float] = deque(maxlen=_JOINS_KEPT)
        self._states: dict[str, VmState] = {}
        self._warms_s: deque[float] = deque(maxlen=_JOINS_KEPT)
        self._warming: dict[tuple[str, str], float] = {}
        """When each VM began the imports for a job's workers, by VM and job."""
        self._looked_at = now
        self._removals = self._announced = self._vm_hours = 0.0
        """Older ones count less (`HALF_LIFE_S`)."""

    def add_past(self, summary: LivesSummary) -> None:
        """Add what happened before this manager became the leader. Called before the first `observe_vms`."""
        self._losses.extend(summary.losses_at)
        self._joins_s.extend(summary.joins_s)
        self._removals, self._announced, self._vm_hours = summary.removals, summary.announced, summary.vm_hours
        if summary.stable_since is not None:
            self._stable_since = summary.stable_since

    def observe_vms(self, vms: Mapping[str, VmView], now: float, market_hazard: float | None = None) -> FleetPast:
        """`vms`: all that are not gone. `market_hazard`: see FleetPast."""
        elapsed_s, self._looked_at = max(0.0, now - self._looked_at), now
        fading = weight(elapsed_s)
        self._removals *= fading
        self._announced *= fading
        self._vm_hours *= fading
        states = {vm_id: vm.state for vm_id, vm in vms.items()}
        there = sum(state is VmState.READY or state is VmState.SUSPECT for state in self._states.values())
        self._vm_hours += there * elapsed_s / 3600
        for vm_id, before in self._states.items() if states != self._states else ():
            vm = vms.get(vm_id)
            goes_at = None if vm is None else vm.notice_deadline
            new = VmState.GONE if vm is None else vm.state
            if before in (VmState.READY, VmState.SUSPECT) and is_lost_to_market(new, had_notice=goes_at is not None):
                self._removals += 1
                self._announced += is_announced(new, goes_at, now)
                self._losses.append(now)
                self._stable_since = now
            elif before is VmState.REQUESTED and vm is not None and vm.state is VmState.READY:
                self._joins_s.append(vm.age_s(now))
        self._states = states
        self._record_warm_times(vms, now)
        coming = [vms[vm_id].age_s(now) for vm_id, state in states.items() if state is VmState.REQUESTED]
        return FleetPast(
            losses_at=tuple(self._losses),
            stable_since=self._stable_since,
            join_s=_upper_quartile(self._joins_s),
            warm_s=_upper_quartile(self._warms_s),
            coming_ages_s=tuple(coming),
            removals=self._removals,
            announced=self._announced,
            vm_hours=self._vm_hours,
            market_hazard=market_hazard,
        )

    def _record_warm_times(self, vms: Mapping[str, VmView], now: float) -> None:
        warming = {(vm.id, job_id): now for vm in vms.values() if vm.preparing for job_id in vm.preparing}
        for key, since in self._warming.items():
            vm_id, job_id = key
            if key in warming:
                warming[key] = since
            elif vm_id in vms and job_id in vms[vm_id].warm:
                self._warms_s.append(now - since)
        self._warming = warming


def _upper_quartile(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=4, method="inclusive")[2]
