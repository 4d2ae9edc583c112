"""Bodies of requests to Azure Resource Manager: the scale set and its VMs, in the JSON of its REST API."""

from __future__ import annotations

import base64
from typing import Any

from varuna_manager.providers.azure_places import AzurePlace
from varuna_manager.providers.azure_settings import AzureSettings

__all__ = ["FLEET_TAG", "REQUEST_TAG", "make_scale_set_body", "make_vm_body"]

FLEET_TAG = "varuna-fleet"
REQUEST_TAG = "varuna-request"

_NETWORK_API = "2022-11-01"


def make_scale_set_body(settings: AzureSettings) -> dict[str, Any]:
    """A Flexible set without a VM model: each VM is made with its own name, size and join token.

    One fault domain, because N-series sizes allow only one, and because Azure then spreads VMs as widely as it can.
    """
    zones = sorted({zone for size in settings.sizes for zone in size.zones})
    return {
        "location": settings.location,
        "tags": {**settings.tags, FLEET_TAG: settings.scale_set},
        **({"zones": zones} if zones else {}),
        "properties": {
            "orchestrationMode": "Flexible",
            "platformFaultDomainCount": 1,
            "singlePlacementGroup": False,
        },
    }


def make_vm_body(
    settings: AzureSettings, name: str, place: AzurePlace, request: str, cloud_init: str, *, accelerated: bool
) -> dict[str, Any]:
    """A spot VM of the set. Its disk and its network interface are deleted with it.

    It has no profile of scheduled events: Azure announces evictions without one. Terminate notifications would delay
    our own deletions by minutes, and spot VMs cannot have them ("Terminate notification for Azure Virtual Machine Scale
    Set instances").
    """
    identity, size, zone = settings.identity_id, place.size, place.zone
    return {
        "location": settings.location,
        "tags": {**settings.tags, FLEET_TAG: settings.scale_set, REQUEST_TAG: request},
        **({"zones": [zone]} if zone else {}),
        **({"identity": {"type": "UserAssigned", "userAssignedIdentities": {identity: {}}}} if identity else {}),
        "properties": {
            "virtualMachineScaleSet": {"id": settings.scale_set_id},
            "priority": "Spot",
            # Deallocated VMs keep using quota, and their disks keep costing money.
            "evictionPolicy": "Delete",
            "billingProfile": {"maxPrice": settings.max_price_per_hour},
            "hardwareProfile": {"vmSize": size.name},
            "storageProfile": {
                "imageReference": _image(settings.image),
                "osDisk": {
                    "createOption": "FromImage",
                    "deleteOption": "Delete",
                    "diskSizeGB": settings.os_disk_gib,
                    "managedDisk": {"storageAccountType": "Premium_LRS"},
                },
            },
            "osProfile": _os_profile(settings, name, cloud_init),
            "networkProfile": _network_profile(settings, accelerated=accelerated),
        },
    }


def _image(image: str) -> dict[str, str]:
    if image.startswith("/"):
        return {"id": image}
    return dict(zip(("publisher", "offer", "sku", "version"), image.split(":"), strict=True))


def _os_profile(settings: AzureSettings, name: str, cloud_init: str) -> dict[str, Any]:
    key_path = f"/home/{settings.admin_username}/.ssh/authorized_keys"
    return {
        "computerName": name,
        "adminUsername": settings.admin_username,
        "customData": base64.b64encode(cloud_init.encode()).decode(),
        "linuxConfiguration": {
            "disablePasswordAuthentication": True,
            "ssh": {"publicKeys": [{"path": key_path, "keyData": settings.ssh_public_key}]},
        },
    }


def _network_profile(settings: AzureSettings, *, accelerated: bool) -> dict[str, Any]:
    """No public address: VMs reach the internet through the subnet's NAT, and cannot be reached from it."""
    group = settings.network_security_group_id
    interface = {
        "primary": True,
        "deleteOption": "Delete",
        "enableAcceleratedNetworking": accelerated,
        **({"networkSecurityGroup": {"id": group}} if group else {}),
        "ipConfigurations": [{"name": "first", "properties": {"subnet": {"id": settings.subnet_id}}}],
    }
    return {
        "networkApiVersion": _NETWORK_API,
        "networkInterfaceConfigurations": [{"name": "first", "properties": interface}],
    }
