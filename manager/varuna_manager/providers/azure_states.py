"""What a VM's states at Azure mean: whether it is there, is going, or never came up.

`provisioningState` is the outcome of the last operation on the VM's description, and says nothing about whether it
runs: a VM whose extension, update or resize failed is "Failed" and trains on. Whether it runs is its power state, in
its instance view (Microsoft's page "States and billing status of Azure Virtual Machines").
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from azure.mgmt.compute.models import VirtualMachine

from varuna_manager.providers.azure_market import CAPACITY_CODES, QUOTA_CODES

__all__ = ["Condition", "condition_of"]

_OFF = frozenset({"stopped", "stopping", "deallocated", "deallocating"})


class Condition(StrEnum):
    THERE = "there"
    """It runs, or may run soon."""
    GOING = "going"
    """It is being deleted."""
    FAILED = "failed"
    """It never came up, or was stopped in the middle: nothing runs there, and it counts against the quota."""


def condition_of(vm: VirtualMachine) -> Condition:
    """In doubt a VM is there: the fleet controller gives it back when its agent does not come."""
    if vm.provisioning_state == "Deleting":
        return Condition.GOING
    if vm.provisioning_state != "Failed":
        return Condition.THERE
    codes = _status_codes(vm)
    power = [code.removeprefix("powerstate/") for code in codes if code.startswith("powerstate/")]
    if power:
        return Condition.FAILED if power[0] in _OFF else Condition.THERE
    never_came_up = {code.lower() for code in CAPACITY_CODES | QUOTA_CODES}
    return Condition.FAILED if any(code.rpartition("/")[2] in never_came_up for code in codes) else Condition.THERE


def _status_codes(vm: VirtualMachine) -> Sequence[str]:
    """Such as provisioningstate/failed/allocationfailed and powerstate/running."""
    statuses = (vm.instance_view.statuses if vm.instance_view else None) or ()
    return [status.code.lower() for status in statuses if status.code]
