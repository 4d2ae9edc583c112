"""EC2's market: refusals, and spot prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.ec2_settings import Ec2Settings

__all__ = ["fetch_spot_prices", "parse_error", "parse_fleet_errors"]

_CAPACITY_CODES = frozenset(
    {
        "InsufficientCapacity",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
    }
)
_QUOTA_CODES = frozenset(
    {
        "InstanceLimitExceeded",
        "InsufficientFreeAddressesInSubnet",
        "MaxSpotFleetRequestCountExceeded",
        "MaxSpotInstanceCountExceeded",
        "VcpuLimitExceeded",
        "VolumeLimitExceeded",
    }
)
_THROTTLED_CODES = frozenset(
    {"EC2ThrottledException", "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"}
)


def parse_error(error: BotoCoreError | ClientError) -> Refusal:
    """The kind of refusal that an error of the SDK means."""
    if isinstance(error, ClientError):
        found = error.response.get("Error", {})
        return _make_refusal(found.get("Code", ""), found.get("Message", ""))
    return Refusal(kind=RefusalKind.FAILED, reason=f"AWS cannot be reached: {_first_line(str(error))}")


def parse_fleet_errors(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """Why a fleet got no instance. Each type in each subnet has an error of its own; the one that may pass first
    decides when to try again."""
    order = (RefusalKind.THROTTLED, RefusalKind.CAPACITY, RefusalKind.QUOTA, RefusalKind.FAILED)
    refusals = [_make_refusal(error.get("ErrorCode", ""), error.get("ErrorMessage", "")) for error in errors]
    if not refusals:
        return Refusal(kind=RefusalKind.CAPACITY, reason="AWS made no instance, and does not say why")
    return min(refusals, key=lambda refusal: order.index(refusal.kind))


def fetch_spot_prices(client: Any, settings: Ec2Settings) -> Mapping[tuple[str, str], float]:
    """The present price in US dollars per hour, by instance type and availability zone. Raises BotoCoreError,
    ClientError."""
    pages = client.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=[*settings.instance_types],
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.now(UTC),  # answers with the price at that time
    )
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    for entry in (entry for page in pages for entry in page["SpotPriceHistory"]):
        place = (entry["InstanceType"], entry["AvailabilityZone"])
        seen = (entry["Timestamp"], float(entry["SpotPrice"]))
        newest[place] = max(newest.get(place, seen), seen)
    return {place: price for place, (_, price) in newest.items()}


def _make_refusal(code: str, message: str) -> Refusal:
    reason = f"{code}: {_first_line(message)}"
    if code in _THROTTLED_CODES:
        return Refusal(kind=RefusalKind.THROTTLED, reason=reason)
    if code in _CAPACITY_CODES:
        return Refusal(kind=RefusalKind.CAPACITY, reason=reason)
    if code in _QUOTA_CODES:
        return Refusal(kind=RefusalKind.QUOTA, reason=reason)
    return Refusal(kind=RefusalKind.FAILED, reason=reason)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
