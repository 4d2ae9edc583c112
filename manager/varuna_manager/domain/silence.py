"""VMs that fall silent together: then it is most likely the manager that is cut off, not they.

VMs fail one by one, or a few at a time, and the provider tells most of it. When most of the fleet is silent since about
the same moment although the provider lists it, its agents are likely to train on and to redial. As after its own
restart, the manager then holds back: nothing new is launched there, but no generation is stopped before the lease is
over (by then the agents have ended their workers), and nothing is bought or given back for a while longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.states import VmState

_FEWEST = 2
"""One VM that is silent alone may be all the fleet, and says nothing about the manager."""
_HEARD = (VmState.READY, VmState.SUSPECT, VmState.DRAINING, VmState.LOST)


def silent_together(vms: Iterable[VmView], rules: Rules) -> frozenset[str]:
    """Ids of the VMs that are silent since about the same moment as most of those that were heard until then."""
    known = [vm for vm in vms if vm.state in _HEARD and vm.listed is not False]
    silent = sorted((vm.silent_s, vm.id) for vm in known if vm.silent_s >= rules.suspect_after_s)
    if len(silent) < _FEWEST:
        return frozenset()
    found, heard = set[str](), len(known) - len(silent)
    silences = [silent_s for silent_s, _ in silent]
    for silent_s, vm_id in silent:
        first = bisect_left(silences, silent_s - rules.lost_after_s)
        last = bisect_right(silences, silent_s + rules.lost_after_s)
        # Those that have fallen silent later were heard meanwhile; those that had been silent for longer were not.
        if last - first >= _FEWEST and 2 * (last - first) > heard + last:
            found.add(vm_id)
    return frozenset(found)
