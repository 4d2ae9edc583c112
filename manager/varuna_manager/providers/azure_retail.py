"""Spot prices from Azure's public price list, which needs no login.

`SpotResources` of Resource Graph needs the right to read the subscription, which an operator may not have granted to
the manager's identity. The list (prices.azure.com, "Azure Retail Prices") has the same spot prices by size and region,
in US dollars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

__all__ = ["fetch_retail_prices"]

_TIMEOUT_S = 5.0
"""For all sizes together, because the fleet controller waits for the answer."""


async def fetch_retail_prices(url: str, location: str, sizes: Sequence[str]) -> Mapping[str, float]:
    """The hourly spot price of a Linux VM, for those sizes that the list has.

    Raises httpx.HTTPError, KeyError, TypeError, ValueError.
    """
    prices: dict[str, float] = {}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S / max(len(sizes), 1), trust_env=True) as client:
        for size in sizes:
            query = (
                f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq '{location}' "
                f"and armSkuName eq '{size}' and contains(meterName, 'Spot')"
            )
            answer = await client.get(url, params={"$filter": query})
            answer.raise_for_status()
            found = [float(item["retailPrice"]) for item in answer.json()["Items"] if _is_linux_spot_hour(item)]
            if found:
                prices[size] = max(found)
    return prices


def _is_linux_spot_hour(item: Mapping[str, Any]) -> bool:
    """Whether an entry is the one: the list has Windows and older Low Priority prices under the same size."""
    return (
        item["meterName"].endswith(" Spot")
        and "Windows" not in item["productName"]
        and item["unitOfMeasure"] == "1 Hour"
        and item["currencyCode"] == "USD"
        and float(item["retailPrice"]) > 0
    )
