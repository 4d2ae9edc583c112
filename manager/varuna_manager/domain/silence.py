"""VMs that fall silent together: most likely the manager is cut off, and the VMs are well.

VMs fail one by one or a few at a time, and the provider reports most of it. When most of the fleet has been silent
since about the same moment although the provider lists it, its agents probably train on and redial. The manager then
holds back, as after its own restart: it launches nothing there, but stops no generation before the lease is over (when
the agents have ended their workers), and neither requests nor gives back VMs for a while longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.states import VmState

_FEWEST = 2
"""A single silent VM may be the whole fleet, and is no evidence about the manager."""
_CAN_FALL_SILENT = (VmState.READY, VmState.SUSPECT, VmState.DRAINING, VmState.LOST)


def find_silent_together(now: float, vms: Iterable[VmView], rules: Rules) -> frozenset[str]:
    """Ids of the VMs that fell silent at about the same moment as most of those whose messages arrived until then."""
    known = [vm for vm in vms if vm.state in _CAN_FALL_SILENT and vm.listed is not False]
    silent = sorted((vm.silent_s(now), vm.id) for vm in known if vm.silent_s(now) >= rules.suspect_after_s)
    if len(silent) < _FEWEST:
        return frozenset()
    found, connected = set[str](), len(known) - len(silent)
    silences = [silent_s for silent_s, _ in silent]
    for silent_s, vm_id in silent:
        first = bisect_left(silences, silent_s - rules.lost_after_s)
        last = bisect_right(silences, silent_s + rules.lost_after_s)
        # VMs that fell silent later still sent messages at that moment. VMs that had been silent for longer were not.
        if last - first >= _FEWEST and 2 * (last - first) > connected + last:
            found.add(vm_id)
    return frozenset(found)
