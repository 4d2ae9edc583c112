"""The sizes and zones from which a fleet on Azure takes VMs, in order of preference, with a backoff for refusals.

Each size in each zone is a market of its own, with a backoff of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, backoff_s
from varuna_manager.providers.azure_settings import AzureSize

__all__ = ["AzurePlace", "AzurePlaces"]


@dataclass(frozen=True)
class AzurePlace:
    size: AzureSize
    zone: str | None
    """None: Azure chooses."""

    def __str__(self) -> str:
        return self.size.name if self.zone is None else f"{self.size.name} in zone {self.zone}"


@dataclass(frozen=True)
class _PlaceRefusals:
    in_a_row: int
    until: float


class AzurePlaces:
    """`now`: a monotonic clock in seconds."""

    def __init__(self, sizes: Sequence[AzureSize], now: Callable[[], float]) -> None:
        self._all = [AzurePlace(size, zone) for size in sizes for zone in size.zones or (None,)]
        self._now = now
        self._refused: dict[AzurePlace, _PlaceRefusals] = {}

    def list_open(self) -> Sequence[AzurePlace]:
        """The places that may be tried now."""
        now = self._now()
        return [place for place in self._all if place not in self._refused or self._refused[place].until <= now]

    def is_doubtful(self, place: AzurePlace) -> bool:
        """Whether the place refused the last request: then one VM is tried first."""
        return place in self._refused

    def note_made(self, place: AzurePlace) -> None:
        self._refused.pop(place, None)

    def note_refused(self, place: AzurePlace, refusal: Refusal) -> None:
        """Count a refusal of the place. Several at one moment count once, and other kinds of refusals do not count."""
        if refusal.kind not in (RefusalKind.CAPACITY, RefusalKind.QUOTA) or place not in self.list_open():
            return
        before = self._refused.get(place)
        in_a_row = 1 if before is None else before.in_a_row + 1
        self._refused[place] = _PlaceRefusals(in_a_row, self._now() + backoff_s(in_a_row, refusal.kind))

    def make_refusal(self) -> Refusal:
        """The refusal when no place is open."""
        soonest = min(refused.until for refused in self._refused.values()) - self._now()
        text = "every size and zone has refused: each is tried again after its own pause"
        return Refusal(kind=RefusalKind.CAPACITY, reason=text, retry_after_s=max(soonest, 0.0))
