"""The request to Compute Engine for one spot VM, in the JSON of its REST API, and what its refusals mean."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from google.api_core.exceptions import GoogleAPICallError
from google.cloud import compute_v1

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.gce_settings import GceSettings

__all__ = [
    "FLEET_LABEL",
    "REQUEST_LABEL",
    "make_insert_request",
    "parse_error",
    "parse_operation_errors",
]

FLEET_LABEL = "varuna-fleet"
REQUEST_LABEL = "varuna-request"

_THROTTLED_CODES = ("RATE_LIMIT", "rateLimitExceeded", "OPERATION_RATE_EXCEEDED")
_QUOTA_CODES = ("QUOTA_EXCEEDED", "quotaExceeded", "QUOTA", "LIMIT_EXCEEDED", "IP_SPACE_EXHAUSTED")
_CAPACITY_CODES = ("ZONE_RESOURCE_POOL_EXHAUSTED", "STOCKOUT", "RESOURCE_POOL_EXHAUSTED", "UNSUPPORTED_CAPACITY")


def make_insert_request(
    settings: GceSettings, name: str, place: tuple[str, str], request: str, user_data: str
) -> compute_v1.InsertInstanceRequest:
    """A spot VM, deleted when it is preempted, with its disk. `place`: machine type and zone.

    The request id lets Google ignore a repetition by the client. The name does so for good: a zone has no two instances
    of one name.
    """
    machine_type, zone = place
    instance = _make_instance(settings, name, machine_type, zone, request, user_data)
    return compute_v1.InsertInstanceRequest(
        project=settings.project,
        zone=zone,
        request_id=str(uuid.uuid4()),
        instance_resource=compute_v1.Instance.from_json(json.dumps(instance)),
    )


def _make_instance(
    settings: GceSettings, name: str, machine_type: str, zone: str, request: str, user_data: str
) -> dict[str, Any]:
    place = f"projects/{settings.project}/zones/{zone}"
    accelerator = {
        "acceleratorType": f"{place}/acceleratorTypes/{settings.accelerator}",
        "acceleratorCount": settings.gpus,
    }
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    account = {"email": settings.service_account, "scopes": scopes}
    return {
        "name": name,
        "machineType": f"{place}/machineTypes/{machine_type}",
        "labels": {**settings.labels, FLEET_LABEL: settings.fleet, REQUEST_LABEL: request},
        "tags": {"items": [*settings.network_tags]},
        "scheduling": {
            "provisioningModel": "SPOT",
            "instanceTerminationAction": "DELETE",
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
        },
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "initializeParams": {
                    "sourceImage": settings.image,
                    "diskSizeGb": str(settings.disk_gib),
                    "diskType": f"{place}/diskTypes/{settings.disk_type}",
                },
            }
        ],
        # No public address: VMs reach the internet through the network's NAT.
        "networkInterfaces": [{"subnetwork": settings.subnetwork}],
        "metadata": {"items": [{"key": "user-data", "value": user_data}]},
        **({"guestAccelerators": [accelerator]} if settings.accelerator else {}),
        **({"serviceAccounts": [account]} if settings.service_account else {}),
    }


def parse_error(error: Exception) -> Refusal:
    """The kind of refusal that an error of the client means."""
    if not isinstance(error, GoogleAPICallError):
        return Refusal(kind=RefusalKind.FAILED, reason=f"Google Cloud cannot be reached: {_first_line(str(error))}")
    reasons = [str(detail.get("reason", "")) for detail in error.errors if isinstance(detail, dict)]
    if error.code == 429:
        return Refusal(kind=RefusalKind.THROTTLED, reason=_first_line(error.message))
    return _make_refusal(" ".join(reasons) or str(error.code), error.message)


def parse_operation_errors(errors: Sequence[compute_v1.Errors]) -> Refusal:
    """Why an operation failed, from its first error."""
    if not errors:
        return Refusal(kind=RefusalKind.FAILED, reason="the operation failed, and Google does not say why")
    return _make_refusal(errors[0].code, errors[0].message)


def _make_refusal(code: str, message: str) -> Refusal:
    reason = f"{code}: {_first_line(message)}"
    for kind, codes in (
        (RefusalKind.THROTTLED, _THROTTLED_CODES),
        (RefusalKind.CAPACITY, _CAPACITY_CODES),
        (RefusalKind.QUOTA, _QUOTA_CODES),
    ):
        if any(each in code for each in codes):
            return Refusal(kind=kind, reason=reason)
    return Refusal(kind=RefusalKind.FAILED, reason=reason)


def _first_line(text: str | None) -> str:
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "no message")
