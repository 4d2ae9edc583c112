"""Requests to EC2: the launch template of a fleet, and the request for one spot instance, as boto3's arguments."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from varuna_manager.providers.ec2_settings import Ec2Settings

__all__ = ["FLEET_TAG", "REQUEST_TAG", "make_fleet_request", "make_template_data", "name_template"]

FLEET_TAG = "varuna-fleet"
REQUEST_TAG = "varuna-request"


def make_template_data(settings: Ec2Settings) -> dict[str, Any]:
    """What all instances of the fleet share. The disk is deleted with its instance."""
    profile = settings.instance_profile
    disk = {"VolumeSize": settings.disk_gib, "VolumeType": "gp3", "DeleteOnTermination": True}
    return {
        "ImageId": settings.image_id,
        "SecurityGroupIds": [*settings.security_group_ids],
        "BlockDeviceMappings": [{"DeviceName": settings.root_device, "Ebs": disk}],
        # Version 2 of the metadata service only. Two hops, because jobs may run in containers.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        **({"IamInstanceProfile": {"Arn" if profile.startswith("arn:") else "Name": profile}} if profile else {}),
        **({"KeyName": settings.key_name} if settings.key_name else {}),
    }


def name_template(settings: Ec2Settings) -> str:
    """A name of its own for each content, so that changed settings make another template."""
    content = json.dumps(make_template_data(settings), sort_keys=True)
    return f"{settings.fleet}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def make_fleet_request(settings: Ec2Settings, name: str, request: str, attempt: int, cloud_init: str) -> dict[str, Any]:
    """An instant fleet of one spot instance, of any type in any subnet of the settings.

    AWS answers a request with the same client token as it did before, also if it had no capacity then. So each
    `attempt` whose outcome is known has a token of its own.
    """
    tags = _tags({**settings.tags, "Name": name, FLEET_TAG: settings.fleet, REQUEST_TAG: request})
    return {
        "Type": "instant",
        "ClientToken": hashlib.sha256(f"{settings.fleet}/{request}/{name}/{attempt}".encode()).hexdigest()[:64],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        "SpotOptions": {
            "AllocationStrategy": settings.allocation_strategy,
            "InstanceInterruptionBehavior": "terminate",
        },
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateName": name_template(settings),
                    "Version": "1",
                    "LaunchTemplateSpecificationUserData": base64.b64encode(cloud_init.encode()).decode(),
                },
                "Overrides": [
                    _make_override(settings, instance_type, subnet, priority)
                    for priority, instance_type in enumerate(settings.instance_types)
                    for subnet in settings.subnet_ids
                ],
            }
        ],
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("fleet", "instance")],
    }


def _make_override(settings: Ec2Settings, instance_type: str, subnet: str, priority: int) -> dict[str, Any]:
    most = settings.max_price_per_hour
    return {
        "InstanceType": instance_type,
        "SubnetId": subnet,
        **({"MaxPrice": f"{most:g}"} if most is not None else {}),
        **({"Priority": float(priority)} if settings.allocation_strategy == "capacity-optimized-prioritized" else {}),
    }


def _tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]
