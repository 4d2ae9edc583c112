"""Spot prices from Azure's public price list, which asks for no login and no right.

`SpotResources` of Resource Graph needs the right to read the subscription, which the manager's identity does not have
unless somebody grants it. The list (prices.azure.com, "Azure Retail Prices") has the same spot prices by size and
region, in US dollars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

__all__ = ["ask_retail_prices"]

_TIMEOUT_S = 5.0
"""For all sizes together: the fleet controller waits for it."""


async def ask_retail_prices(url: str, location: str, sizes: Sequence[str]) -> Mapping[str, float]:
    """The spot price of an hour of a Linux VM, for those of the sizes that are in the list.

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
    """The list has Windows' prices and the older Low Priority ones under the same size."""
    return (
        item["meterName"].endswith(" Spot")
        and "Windows" not in item["productName"]
        and item["unitOfMeasure"] == "1 Hour"
        and item["currencyCode"] == "USD"
        and float(item["retailPrice"]) > 0
    )
