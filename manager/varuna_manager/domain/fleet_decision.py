"""Decisions about the fleet: the state of each VM, and how many VMs to request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from varuna_manager.domain.clock import is_within
from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.silence import find_silent_together
from varuna_manager.domain.states import VmState
from varuna_proto.wording import count_are, count_of


@dataclass(frozen=True, kw_only=True)
class VmVerdict:
    state: VmState
    reason: str


class RefusalKind(StrEnum):
    """Why a provider makes no VM. The kind sets the pause before the next request."""

    CAPACITY = "capacity"
    """The provider has none left. The market changes by the minute."""
    QUOTA = "quota"
    """The account may have no more, until VMs are given back or the quota is raised."""
    THROTTLED = "throttled"
    """The provider was asked too often."""
    FAILED = "failed"
    """Anything else: an error of the provider, a VM that did not come up."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    kind: RefusalKind
    reason: str
    retry_after_s: float | None = None
    """The pause that the provider asks for; None: it names none."""


@dataclass(frozen=True, kw_only=True)
class RefusalStreak:
    """Refusals in a row, without a VM in between."""

    count: int
    last: Refusal
    last_at: float
    jitter: float = 0.0
    """In [0, 1), drawn at the last refusal. It shortens the pause by up to a half, so that managers spread out."""

    @property
    def pause_s(self) -> float:
        """The pause before the provider is asked again, never shorter than it asks for."""
        pause_s = backoff_s(self.count, self.last.kind) * (1.0 - 0.5 * self.jitter)
        return max(pause_s, self.last.retry_after_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class FleetLimits:
    """Limits of a fleet. None: there is no limit of this kind."""

    max_vms: int | None = None
    max_cost_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class FleetView:
    target: int
    vms: tuple[VmView, ...]
    """All VMs that are not gone."""
    why: str = ""
    """Where the target comes from; empty: an operator set it."""
    refusals: RefusalStreak | None = None
    limits: FleetLimits = FleetLimits()
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price per hour, by VM, where it is known."""
    going: tuple[float, ...] = ()
    """Prices of VMs that are gone, but that the provider is still deleting; 0: not known."""
    price_per_hour: float | None = None
    """The price of one more VM; None: not known, or free."""
    idle_s: Mapping[str, float] = field(default_factory=dict)
    """How long each idle VM has been so (`domain.idle_vms`)."""
    spare_after_s: float | None = None
    """Surplus VMs are given back after they were idle for this long; None: at once, even busy ones."""


@dataclass(frozen=True, kw_only=True)
class FleetDecision:
    reason: str
    create: int = 0
    drain: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    is_met: bool = False
    """Whether there are as many VMs as are wanted."""


def decide_vm(now: float, vm: VmView, rules: Rules, *, together: bool = False) -> VmVerdict | None:
    """The VM's new state; None: it stays as it is.

    `together`: it fell silent with most others (`domain.silence`).

    A VM that the provider does not list is gone, whether it is silent or not. A silent VM that it does list is lost.
    When its heartbeats arrive again, it is ready, or it drains if it is to leave.
    """
    if vm.listed is False:
        return _verdict(vm, VmState.GONE, _why_gone(now, vm))
    if vm.notice_deadline is not None and vm.state not in (VmState.DRAINING, VmState.LOST):
        left_s = max(vm.notice_deadline - now, 0.0)
        return _verdict(vm, VmState.DRAINING, f"it has notice to leave within {left_s:.0f} s")
    if vm.state is VmState.REQUESTED:
        return _verdict(vm, VmState.READY, "its agent has connected") if vm.connected else None
    grace_s = 0.0 if vm.connected_since_start else rules.restart_grace_s
    held_s = max(rules.lost_after_s, grace_s, rules.lease_s if together else 0.0)
    if vm.silent_s(now) >= held_s:
        with_others = ", like most others" if together else ""
        return _verdict(vm, VmState.LOST, f"it has been silent for {held_s:.0f} s{with_others}")
    if vm.state is VmState.DRAINING:
        return None
    if vm.silent_s(now) >= max(rules.suspect_after_s, grace_s):
        # A lost VM changes only when its heartbeats arrive again.
        missing = "its heartbeats are missing, like most others: the manager may be cut off, so it waits"
        reason = missing if together else "its heartbeats are missing"
        return None if vm.state is VmState.LOST else _verdict(vm, VmState.SUSPECT, reason)
    if vm.state in (VmState.SUSPECT, VmState.LOST) and vm.connected:
        heard = "its heartbeats arrive again"
        if vm.notice_deadline is not None:
            return _verdict(vm, VmState.DRAINING, f"{heard}, and it has notice to leave")
        if vm.drained:
            return _verdict(vm, VmState.DRAINING, f"{heard}, and it was drained by the user")
        return _verdict(vm, VmState.READY, heard)
    return None


def _verdict(vm: VmView, state: VmState, reason: str) -> VmVerdict | None:
    return None if vm.state is state else VmVerdict(state=state, reason=reason)


def _why_gone(now: float, vm: VmView) -> str:
    if vm.end_reason and vm.state is not VmState.DRAINING:
        return vm.end_reason
    if vm.state is VmState.REQUESTED:
        return "its agent ended before it connected: see agent.log in the VM's folder"
    if vm.state is VmState.DRAINING:
        return f"it left: {vm.reason}"
    return "the provider no longer lists it (there was no notice)"


def decide_fleet(now: float, fleet: FleetView, rules: Rules) -> FleetDecision:
    """How many VMs to request, which surplus VMs to drain, and which VMs to give back.

    A cordoned VM counts only for the limits: another takes its place, and it stays until it is drained.
    """
    held = _held_back(now, fleet, rules)
    delete = tuple(vm.id for vm in fleet.vms if vm.id not in held and _is_to_be_deleted(now, vm, rules))
    staying = [vm for vm in fleet.vms if vm.state in (VmState.REQUESTED, VmState.READY, VmState.SUSPECT)]
    staying = [vm for vm in staying if vm.id not in delete and not vm.cordoned]
    staying += [vm for vm in fleet.vms if vm.id in held and not vm.cordoned]
    wanted = f"{count_are(fleet.target, 'VM')} wanted{f' ({fleet.why})' if fleet.why else ''}"
    missing = fleet.target - len(staying)
    if missing < 0:
        drain = _spare(now, fleet, staying, -missing)
        reason = f"{count_are(len(staying), 'VM')} there and {wanted}"
        if len(drain) < -missing:
            reason += f": {-missing - len(drain)} cannot go yet (silent, in use, or used a moment ago)"
        return FleetDecision(reason=reason, drain=drain, delete=delete)
    if missing == 0:
        return FleetDecision(reason=f"{wanted}, and all are there", delete=delete, is_met=True)
    reason = f"{wanted} and {len(staying)} are there"
    if held:
        reason += f" ({len(held)} of them fell silent together with most others, and may come back)"
    refusals = fleet.refusals
    if refusals is not None and is_within(now, refusals.last_at, refusals.pause_s):
        often = "once" if refusals.count == 1 else f"{refusals.count} times in a row"
        reason += (
            f"; the provider refused {often} ({refusals.last.kind}: {refusals.last.reason}) "
            f"and is asked again {refusals.pause_s:.3g} s after the last refusal"
        )
        return FleetDecision(reason=reason, delete=delete)
    allowed, limit = _allowed(fleet, staying)
    return FleetDecision(reason=reason + limit, create=min(missing, allowed), delete=delete)


def _held_back(now: float, fleet: FleetView, rules: Rules) -> frozenset[str]:
    """The lost VMs that are not replaced or given back yet."""
    together = find_silent_together(now, fleet.vms, rules)
    lost = [vm for vm in fleet.vms if vm.state is VmState.LOST and vm.id in together]
    return frozenset(vm.id for vm in lost if vm.silent_s(now) < rules.common_silence_hold_s)


def _spare(now: float, fleet: FleetView, staying: Sequence[VmView], surplus: int) -> tuple[str, ...]:
    """The VMs to give back: idle ones first, then the newest, which have done the least.

    Lost ones count first, but nobody can tell them to leave: they are drained if they come back, and deleted otherwise.
    """
    reached = [vm for vm in staying if vm.state is not VmState.LOST]
    surplus = max(surplus - (len(staying) - len(reached)), 0)
    order = sorted(reached, key=lambda vm: (vm.workers > 0, vm.age_s(now), vm.id))
    least_s = fleet.spare_after_s
    if least_s is not None:
        order = [vm for vm in order if vm.workers == 0 and fleet.idle_s.get(vm.id, 0.0) >= least_s]
    return tuple(vm.id for vm in order[:surplus])


def _allowed(fleet: FleetView, staying: Sequence[VmView]) -> tuple[int, str]:
    """How many more VMs the limits allow, and text about the limit that does not allow all."""
    missing = fleet.target - len(staying)
    limits, allowed, text = fleet.limits, missing, ""
    paid_for = len(fleet.vms) + len(fleet.going)  # draining and lost ones too
    if limits.max_vms is not None and limits.max_vms - paid_for < allowed:
        allowed, text = max(limits.max_vms - paid_for, 0), f"; the limit is {count_of(limits.max_vms, 'VM')}"
    if limits.max_cost_per_hour is not None and fleet.price_per_hour:
        cost = sum(fleet.prices.get(vm.id, 0.0) for vm in fleet.vms) + sum(fleet.going)
        affordable = max(int((limits.max_cost_per_hour - cost) / fleet.price_per_hour + 1e-9), 0)
        if affordable < allowed:
            allowed = affordable
            text = (
                f"; they cost {cost:.4g} an hour and one more costs {fleet.price_per_hour:.4g}, "
                f"but the limit is {limits.max_cost_per_hour:.4g}"
            )
    return allowed, text


_BACKOFF_S = {
    RefusalKind.CAPACITY: (1.0, 30.0),
    RefusalKind.QUOTA: (30.0, 600.0),
    RefusalKind.THROTTLED: (5.0, 120.0),
    RefusalKind.FAILED: (2.0, 60.0),
}
"""The first pause and the longest."""


def backoff_s(refusals: int, kind: RefusalKind = RefusalKind.CAPACITY) -> float:
    """The pause before the provider is asked again: it doubles with each refusal in a row, up to a bound."""
    first_s, most_s = _BACKOFF_S[kind]
    return min(first_s * 2.0 ** min(refusals - 1, 32), most_s)


def _is_to_be_deleted(now: float, vm: VmView, rules: Rules) -> bool:
    if vm.state is VmState.REQUESTED:
        # The age alone says nothing of a VM that has just been taken in, or that started while no manager listened.
        return min(vm.age_s(now), vm.silent_s(now)) >= rules.request_timeout_s
    if vm.state is VmState.LOST:
        return vm.silent_s(now) >= max(rules.lease_s, rules.restart_grace_s)
    if vm.state is not VmState.DRAINING or vm.workers:
        return False
    # A VM with a notice is taken by the provider, unless it changes its mind. One without is surplus.
    return vm.notice_deadline is None or now >= vm.notice_deadline + rules.notice_overdue_s


# ---------------------------------------------------------------- the demand of jobs


@dataclass(frozen=True, kw_only=True)
class JobDemand:
    """The GPUs that one job, which has not ended, can use."""

    id: str
    max_gpus: int | None
    """None: as many as make it faster."""
    trains: bool = False
    """Whether its newest generation has completed a step and goes on."""
    gpu_types: frozenset[str] = frozenset()
    """Types of GPUs on offer that it takes."""
    mixes_types: bool = False
    """Whether it may train on several of them at a time, if it has the fleet to itself."""


@dataclass(frozen=True, kw_only=True)
class VmRange:
    """The bounds of a fleet that follows the demand of the jobs."""

    min_vms: int
    max_vms: int


def count_wanted_vms(
    vms: VmRange, jobs: Sequence[JobDemand], *, gpus_per_vm: int, enough_vms: int | None = None
) -> tuple[int, str]:
    """How many VMs the jobs can use, and why.

    A job without `max_gpus` can use the largest fleet, or `enough_vms` once these jobs have left further VMs idle.
    """
    if not jobs:
        wanted, why = vms.min_vms, "there are no jobs"
    elif all(job.max_gpus is not None for job in jobs):
        gpus = sum(job.max_gpus or 0 for job in jobs)
        wanted, why = -(-gpus // gpus_per_vm), f"{count_of(len(jobs), 'job')} can use {count_of(gpus, 'GPU')}"
    elif enough_vms is not None:
        wanted, why = enough_vms, f"{count_of(len(jobs), 'job')} left further ones idle"
    else:
        unbounded = sum(job.max_gpus is None for job in jobs)
        wanted, why = vms.max_vms, f"{unbounded} of {count_of(len(jobs), 'job')} can use any number"
    clamped = min(max(wanted, vms.min_vms), vms.max_vms)
    return clamped, f"{why}, within {vms.min_vms} to {vms.max_vms} VMs"
