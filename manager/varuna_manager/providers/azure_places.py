"""Where a fleet on Azure may take its VMs from: sizes and zones in order of preference, without those that refuse.

Each size in each zone is a market of its own, so each has a backoff of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, backoff_s
from varuna_manager.providers.azure_settings import AzureSize

__all__ = ["Place", "Places"]


@dataclass(frozen=True)
class Place:
    size: AzureSize
    zone: str | None
    """None: Azure chooses."""

    def __str__(self) -> str:
        return self.size.name if self.zone is None else f"{self.size.name} in zone {self.zone}"


@dataclass(frozen=True)
class _Refused:
    in_a_row: int
    until: float


class Places:
    """`now`: a clock in seconds that is never set."""

    def __init__(self, sizes: Sequence[AzureSize], now: Callable[[], float]) -> None:
        self._all = [Place(size, zone) for size in sizes for zone in size.zones or (None,)]
        self._now = now
        self._refused: dict[Place, _Refused] = {}

    def open(self) -> Sequence[Place]:
        """Those that may be asked now."""
        now = self._now()
        return [place for place in self._all if place not in self._refused or self._refused[place].until <= now]

    def is_doubtful(self, place: Place) -> bool:
        """Whether it refused when it was asked last: then one VM is enough to ask again."""
        return place in self._refused

    def note_made(self, place: Place) -> None:
        self._refused.pop(place, None)

    def note_refused(self, place: Place, refusal: Refusal) -> None:
        """Several of the same moment count once. A refusal that is not about the place is none of it."""
        if refusal.kind not in (RefusalKind.CAPACITY, RefusalKind.QUOTA) or place not in self.open():
            return
        before = self._refused.get(place)
        in_a_row = 1 if before is None else before.in_a_row + 1
        self._refused[place] = _Refused(in_a_row, self._now() + backoff_s(in_a_row, refusal.kind))

    def all_refused(self) -> Refusal:
        """What to say when none is open."""
        soonest = min(refused.until for refused in self._refused.values()) - self._now()
        text = "every size and zone has refused: each is asked again after a pause of its own"
        return Refusal(kind=RefusalKind.CAPACITY, reason=text, retry_after_s=max(soonest, 0.0))
