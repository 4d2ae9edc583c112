"""The sizes and zones from which a fleet on Azure takes VMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna_manager.providers.azure_settings import AzureSize

__all__ = ["AzurePlace", "list_azure_places"]


@dataclass(frozen=True)
class AzurePlace:
    size: AzureSize
    zone: str | None
    """None: Azure chooses."""

    def __str__(self) -> str:
        return self.size.name if self.zone is None else f"{self.size.name} in zone {self.zone}"


def list_azure_places(sizes: Sequence[AzureSize]) -> Sequence[AzurePlace]:
    """In order of preference."""
    return [AzurePlace(size, zone) for size in sizes for zone in size.zones or (None,)]
