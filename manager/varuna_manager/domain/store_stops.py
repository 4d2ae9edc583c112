"""How often lost VMs are expected to send a generation back to its checkpoint, from which its workers decide how often
they save.

Where processes hold their state when others are lost, that is only where one burst takes all VMs that hold a stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from varuna_manager.domain.fleet_past import FleetPast
from varuna_planner.liveput.hazard import holder_losses_per_hour, list_bursts


def expect_store_stops(
    fleet: FleetPast, vm_ids: Sequence[str], p: int, *, keepers: Sequence[int], holds_state: bool
) -> float:
    """Stops per hour that need the checkpoint.

    Args:
        vm_ids: the VM of each rank; rank = replica * p + stage.
        p: stages.
        keepers: by stage, the rank that keeps a copy of it (`domain.keepers`); empty: none does.
        holds_state: whether the job's processes hold their state when others are lost.
    """
    vms = len(set(vm_ids))
    stops = fleet.stops_per_hour(vms)
    if not holds_state:
        return stops
    holders = [{*vm_ids[stage::p], *(vm_ids[rank] for rank in keepers[stage : stage + 1])} for stage in range(p)]
    return holder_losses_per_hour(stops, list_bursts(fleet.losses_at), [len(held) for held in holders], vms)
