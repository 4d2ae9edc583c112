"""Azure's market: refusals, spot prices, and how often VMs of a size are evicted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from azure.core.exceptions import AzureError, HttpResponseError
from azure.core.rest import HttpRequest
from azure.mgmt.compute.aio import ComputeManagementClient

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.azure_settings import AzureSettings

__all__ = [
    "CAPACITY_CODES",
    "QUOTA_CODES",
    "Quote",
    "fetch_quotes",
    "first_line",
    "is_acceleration_refusal",
    "parse_refusal",
]

CAPACITY_CODES = frozenset(
    {
        "AllocationFailed",
        "OverconstrainedAllocationRequest",
        "OverconstrainedZonalAllocationRequest",
        "SkuNotAvailable",
        "SpotPriceExceededMaxPrice",
        "ZonalAllocationFailed",
    }
)
QUOTA_CODES = frozenset({"QuotaExceeded", "ResourceQuotaExceeded"})
_GRAPH_URL = "/providers/Microsoft.ResourceGraph/resources?api-version=2022-10-01"
_OPEN_BAND = 5.0
"""Assumed width of the open band "20+", in percent."""


@dataclass(frozen=True, kw_only=True)
class Quote:
    """Price and eviction rate of one size in the fleet's region; None: not known."""

    price_per_hour: float | None = None
    hazard_per_hour: float | None = None


def parse_refusal(error: AzureError) -> Refusal:
    """The kind of refusal that an error of the SDK means."""
    if not isinstance(error, HttpResponseError):
        return Refusal(kind=RefusalKind.FAILED, reason=f"Azure cannot be reached: {first_line(error)}")
    code = error.error.code if error.error is not None and error.error.code else ""
    text = f"{code or error.status_code}: {first_line(error)}"
    if error.status_code == 429 or code in ("TooManyRequests", "OperationPreempted"):
        return Refusal(kind=RefusalKind.THROTTLED, reason=text, retry_after_s=_retry_after_s(error))
    if code in CAPACITY_CODES:
        return Refusal(kind=RefusalKind.CAPACITY, reason=text)
    if code in QUOTA_CODES or (code == "OperationNotAllowed" and "quota" in text.lower()):
        return Refusal(kind=RefusalKind.QUOTA, reason=text)
    return Refusal(kind=RefusalKind.FAILED, reason=text)


def is_acceleration_refusal(refusal: Refusal) -> bool:
    """Whether the size has no accelerated networking. The code VMSizeIsNotPermittedToEnableAcceleratedNetworking
    sometimes has a suffix."""
    return "NotPermittedToEnableAcceleratedNetworking" in refusal.reason


def first_line(error: AzureError) -> str:
    inner = getattr(error, "error", None)
    text = (getattr(inner, "message", None) or error.message or str(error)).strip()
    return str(text).splitlines()[0] if text else type(error).__name__


def _retry_after_s(error: HttpResponseError) -> float | None:
    headers: Mapping[str, str] = getattr(error.response, "headers", {})
    value = headers.get("Retry-After")
    try:
        return None if value is None else float(value)
    except ValueError:
        return None  # an HTTP date, which Azure does not send


async def fetch_quotes(client: ComputeManagementClient, settings: AzureSettings) -> Mapping[str, Quote]:
    """Spot prices (US dollars) and eviction rates from Azure Resource Graph, by the sizes' names. Raises AzureError,
    KeyError, ValueError."""
    names = ", ".join(f"'{size.name.lower()}'" for size in settings.sizes)
    where = f"sku.name in~ ({names}) | where location =~ '{settings.location}'"
    prices = await _query(
        client,
        "SpotResources | where type =~ 'microsoft.compute/skuspotpricehistory/ostype/location' "
        f"| where {where} | where properties.osType =~ 'linux' "
        "| project size = tolower(tostring(sku.name)), value = tostring(properties.spotPrices[0].priceUSD)",
    )
    rates = await _query(
        client,
        "SpotResources | where type =~ 'microsoft.compute/skuspotevictionrate/location' "
        f"| where {where} | project size = tolower(tostring(sku.name)), value = tostring(properties.evictionRate)",
    )
    return {
        size.name: Quote(
            price_per_hour=_number(prices.get(size.name.lower())), hazard_per_hour=_hazard(rates.get(size.name.lower()))
        )
        for size in settings.sizes
    }


async def _query(client: ComputeManagementClient, query: str) -> dict[str, str]:
    """Query everything that the identity may read: with a list of subscriptions, the table is empty."""
    body = {"query": query}
    response = await client.send_request(HttpRequest("POST", _GRAPH_URL, json=body))
    await response.read()
    if response.status_code != 200:
        raise HttpResponseError(response=response)
    return {row["size"]: row["value"] for row in json.loads(response.text())["data"]}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _hazard(band: str | None) -> float | None:
    """Evictions per VM-hour from a band such as "5-10" (percent of VMs evicted per hour), at the band's middle."""
    if band is None:
        return None
    low, separator, high = band.rstrip("+%").partition("-")
    try:
        first = float(low)
        last = float(high) if separator else first + _OPEN_BAND
    except ValueError:
        return None
    return -math.log1p(-(first + last) / 200.0)
