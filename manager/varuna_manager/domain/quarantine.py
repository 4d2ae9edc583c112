"""How long VMs are quarantined: taken out of use by the manager."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_manager.domain.actions import QuarantineVms
from varuna_manager.domain.observed import Rules, VmView

_DOUBLINGS = 6


def make_quarantine(now: float, vms: Sequence[VmView], rules: Rules, *, reason: str) -> QuarantineVms:
    """Each quarantine of the same VM lasts twice as long as the one before, up to a bound."""
    before = max(vm.quarantines for vm in vms)
    until = now + rules.quarantine_s * 2.0 ** min(before, _DOUBLINGS)
    return QuarantineVms(vm_ids=tuple(vm.id for vm in vms), until=until, reason=reason)
