"""The table of all candidates. A row is rendered only when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

__all__ = ["PlanCandidate", "PlanCandidates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCandidate:
    """A shape that the search considered."""

    p: int
    d: int
    micro_batch: int
    predicted_minibatch_s: float | None
    """Simulated; a lower bound when `reason` has "at least"; None when it does not fit."""
    fits: bool
    """In memory."""
    reason: str
    """Why it won or lost, in words."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class PlanCandidates(Sequence[PlanCandidate]):
    """Best first, those that were only bounded last; among equally fast ones, the chosen one comes first.

    There may be hundreds of thousands, so their order and reasons are made on demand.
    """

    def __init__(
        self,
        *,
        p: npt.NDArray[np.int64],
        time_us: npt.NDArray[np.float64],
        simulated: npt.NDArray[np.bool_],
        rough_us: npt.NDArray[np.float64],
        chosen: int,
        render: Callable[[int], PlanCandidate],
        simulate: Callable[[int], float],
    ):
        """
        Args:
            p: of each shape.
            time_us: of each shape, or a lower bound, or infinite when it does not fit.
            simulated: whether the time is exact.
            rough_us: another lower bound, which orders equal times.
            chosen: the number of the chosen shape, or -1.
            render: makes the row of a shape, by its number.
            simulate: gives the exact time of a shape, by its number.
        """
        self._p, self._time_us, self._simulated, self._rough_us = p, time_us, simulated, rough_us
        self._chosen = chosen
        self._render, self._simulate = render, simulate
        self._order: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._time_us)

    @overload
    def __getitem__(self, place: int) -> PlanCandidate: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[PlanCandidate, ...]: ...

    def __getitem__(self, place: int | slice) -> PlanCandidate | tuple[PlanCandidate, ...]:
        if isinstance(place, slice):
            return tuple(self._render(int(index)) for index in self._ordered()[place])
        return self._render(int(self._ordered()[place]))

    def look_closer(self, most: int) -> None:
        """Simulates those of the first `most` that have only a bound."""
        for index in self._ordered()[:most]:
            if not self._simulated[index] and np.isfinite(self._time_us[index]):
                self._time_us[index] = self._simulate(int(index))
                self._simulated[index] = True
        self._order = None

    def best_of_each_p(self, most: int) -> tuple[PlanCandidate, ...]:
        """Best first, with at most `most` shapes of the same number of stages."""
        order = self._ordered()
        by_p = np.argsort(self._p[order], kind="stable")  # places in `order`
        first = np.flatnonzero(np.diff(self._p[order][by_p], prepend=-1))
        rank = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
        return tuple(self._render(int(order[place])) for place in np.sort(by_p[rank < most]))

    def _ordered(self) -> npt.NDArray[np.int64]:
        if self._order is None:
            is_other = np.arange(len(self)) != self._chosen
            fits_not = np.isinf(self._time_us)
            self._order = np.lexsort((self._rough_us, is_other, self._time_us, ~self._simulated, fits_not))
        return self._order
