"""What to do about the fleet: the state of each VM from what is heard of it, and how many VMs to ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.states import VmState


@dataclass(frozen=True, kw_only=True)
class VmVerdict:
    state: VmState
    reason: str


@dataclass(frozen=True, kw_only=True)
class FleetView:
    target: int
    vms: tuple[VmView, ...]
    """All that are not gone."""
    refusals: int = 0
    """Of the provider, in a row."""
    refused_at: float = 0.0
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class FleetDecision:
    reason: str
    create: int = 0
    drain: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()


def decide_vm(now: float, vm: VmView, rules: Rules) -> VmVerdict | None:
    """The state that the VM is in now, when it is not the one that it had; None otherwise.

    The provider's word beats silence: a VM that it does not list is gone. A silent VM that it does list is lost, and
    comes back when it is heard again.
    """
    if vm.listed is False:
        return _verdict(vm, VmState.GONE, _why_gone(now, vm))
    if vm.notice_deadline is not None and vm.state not in (VmState.DRAINING, VmState.LOST):
        left_s = max(vm.notice_deadline - now, 0.0)
        return _verdict(vm, VmState.DRAINING, f"it has notice to leave in {left_s:.0f} s")
    if vm.state is VmState.REQUESTED:
        return _verdict(vm, VmState.READY, "its agent said Hello") if vm.connected else None
    grace_s = 0.0 if vm.heard_since_start else rules.restart_grace_s
    if vm.silent_s >= max(rules.lost_after_s, grace_s):
        return _verdict(vm, VmState.LOST, f"nothing was heard from it for {max(rules.lost_after_s, grace_s):.0f} s")
    if vm.state is VmState.DRAINING:
        return None
    if vm.silent_s >= max(rules.suspect_after_s, grace_s):
        # From lost there is only the way back to ready, when it is heard again.
        return None if vm.state is VmState.LOST else _verdict(vm, VmState.SUSPECT, "heartbeats are missing")
    if vm.state in (VmState.SUSPECT, VmState.LOST) and vm.connected:
        back = VmState.READY if vm.notice_deadline is None else VmState.DRAINING
        return _verdict(vm, back, "it is heard again")
    return None


def _verdict(vm: VmView, state: VmState, reason: str) -> VmVerdict | None:
    return None if vm.state is state else VmVerdict(state=state, reason=reason)


def _why_gone(now: float, vm: VmView) -> str:
    if vm.state is VmState.REQUESTED:
        return "its agent ended before it said Hello: see agent.log in the VM's folder"
    if vm.state is VmState.DRAINING:
        return f"it left: {vm.reason}"
    return "the provider does not have it any more (no notice was given)"


def decide_fleet(now: float, fleet: FleetView, rules: Rules) -> FleetDecision:
    """How many VMs to ask the provider for, which to drain because they are too many, which to give back."""
    delete = tuple(vm.id for vm in fleet.vms if _is_to_be_deleted(vm, rules))
    staying = [vm for vm in fleet.vms if vm.state in (VmState.REQUESTED, VmState.READY, VmState.SUSPECT)]
    staying = [vm for vm in staying if vm.id not in delete]
    missing = fleet.target - len(staying)
    if missing < 0:
        # Idle ones first, then the newest: they have done the least.
        order = sorted(staying, key=lambda vm: (vm.workers > 0, vm.age_s, vm.id))
        drain = tuple(vm.id for vm in order[:-missing])
        return FleetDecision(reason=f"{-missing} VMs over the target of {fleet.target}", drain=drain, delete=delete)
    if missing == 0:
        return FleetDecision(reason=f"{len(staying)} VMs, as many as wanted", delete=delete)
    if fleet.refusals and now < fleet.refused_at + backoff_s(fleet.refusals):
        reason = f"{missing} VMs are missing; the provider refused: {fleet.refusal}"
        return FleetDecision(reason=reason, delete=delete)
    return FleetDecision(reason=f"{missing} VMs are missing", create=missing, delete=delete)


def backoff_s(refusals: int) -> float:
    """Before the provider is asked again: 1, 2, 4, ... up to 30 seconds."""
    return min(2.0 ** (refusals - 1), 30.0)


def _is_to_be_deleted(vm: VmView, rules: Rules) -> bool:
    if vm.state is VmState.REQUESTED:
        return vm.age_s >= rules.request_timeout_s
    if vm.state is VmState.LOST:
        return vm.silent_s >= max(rules.lease_s, rules.restart_grace_s)
    # With a notice, the provider takes it; without, we were asked to make the fleet smaller.
    return vm.state is VmState.DRAINING and vm.notice_deadline is None and vm.workers == 0


def total_gpus(vms: Sequence[VmView]) -> int:
    return sum(vm.gpus for vm in vms if vm.usable)
