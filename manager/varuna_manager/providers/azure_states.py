"""What a VM's states at Azure mean: it exists, is being deleted, or never came up.

`provisioningState` is the outcome of the last operation on the VM's description, not whether the VM runs: a VM whose
extension, update or resize failed is "Failed" and trains on. Its power state, in its instance view, says whether it
runs (Microsoft's page "States and billing status of Azure Virtual Machines").
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from azure.mgmt.compute.models import VirtualMachine

from varuna_manager.providers.azure_market import CAPACITY_CODES, QUOTA_CODES

__all__ = ["VmCondition", "find_condition"]

_OFF = frozenset({"stopped", "stopping", "deallocated", "deallocating"})


class VmCondition(StrEnum):
    THERE = "there"
    """It runs, or may run soon."""
    GOING = "going"
    """It is being deleted."""
    FAILED = "failed"
    """It never came up or was stopped: nothing runs there, and it uses quota."""


def find_condition(vm: VirtualMachine) -> VmCondition:
    """In doubt THERE: the fleet controller gives the VM back if its agent does not connect."""
    if vm.provisioning_state == "Deleting":
        return VmCondition.GOING
    if vm.provisioning_state != "Failed":
        return VmCondition.THERE
    codes = _status_codes(vm)
    power = [code.removeprefix("powerstate/") for code in codes if code.startswith("powerstate/")]
    if power:
        return VmCondition.FAILED if power[0] in _OFF else VmCondition.THERE
    never_came_up = {code.lower() for code in CAPACITY_CODES | QUOTA_CODES}
    return VmCondition.FAILED if any(code.rpartition("/")[2] in never_came_up for code in codes) else VmCondition.THERE


def _status_codes(vm: VirtualMachine) -> Sequence[str]:
    """For example provisioningstate/failed/allocationfailed and powerstate/running."""
    statuses = (vm.instance_view.statuses if vm.instance_view else None) or ()
    return [status.code.lower() for status in statuses if status.code]
