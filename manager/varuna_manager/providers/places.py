"""The places from which a fleet takes VMs, in order of preference, with a backoff for refusals.

A place is a kind of VM in a zone. Each is a market of its own, with a backoff of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, backoff_s

__all__ = ["Places"]

PlaceT = TypeVar("PlaceT", bound=Hashable)


@dataclass(frozen=True)
class _PlaceRefusals:
    in_a_row: int
    until: float


class Places(Generic[PlaceT]):
    """`now`: a monotonic clock in seconds."""

    def __init__(self, places: Sequence[PlaceT], now: Callable[[], float]) -> None:
        self._all = places
        self._now = now
        self._refused: dict[PlaceT, _PlaceRefusals] = {}
        self._doubtful: set[PlaceT] = set()

    def list_open(self) -> Sequence[PlaceT]:
        """The places that may be tried now."""
        now = self._now()
        return [place for place in self._all if place not in self._refused or self._refused[place].until <= now]

    def is_doubtful(self, place: PlaceT) -> bool:
        """Whether the place refused the last request, for any reason: then one VM is tried first."""
        return place in self._doubtful

    def note_made(self, place: PlaceT) -> None:
        self._doubtful.discard(place)
        self._refused.pop(place, None)

    def note_refused(self, place: PlaceT, refusal: Refusal) -> None:
        """Count a refusal of the place. Several at one moment count once, and only the market's close the place."""
        self._doubtful.add(place)
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
