"""The table of all that was considered, whose rows are worded only when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

__all__ = ["Candidate", "Candidates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A shape that was considered."""

    p: int
    d: int
    micro_batch: int
    predicted_minibatch_s: float | None
    """Simulated; a lower bound when `reason` says "at least"; None when it does not fit."""
    fits: bool
    """In memory."""
    reason: str
    """Why it won or lost, in words."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Candidates(Sequence[Candidate]):
    """Best first, and of those that are equally fast the chosen one.

    There may be hundreds of thousands, so order and words are made on demand.
    """

    def __init__(
        self,
        p: npt.NDArray[np.int64],
        time_us: npt.NDArray[np.float64],
        simulated: npt.NDArray[np.bool_],
        rough_us: npt.NDArray[np.float64],
        chosen: int,
        row: Callable[[int], Candidate],
        simulate: Callable[[int], float],
    ):
        """Those that were not simulated stand behind those that were.

        Args:
            p: of each shape.
            time_us: of each, or a lower bound, or infinite when it does not fit.
            simulated: which of them it is.
            rough_us: another bound, for the order of those with the same.
            chosen: the number of the shape that is the answer, or -1.
            row: words shape number i.
            simulate: its time.
        """
        self._p, self._time_us, self._simulated, self._rough_us = p, time_us, simulated, rough_us
        self._chosen = chosen
        self._row, self._simulate = row, simulate
        self._order: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._time_us)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, place: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(place, slice):
            return tuple(self._row(int(index)) for index in self._ordered()[place])
        return self._row(int(self._ordered()[place]))

    def look_closer(self, most: int) -> None:
        """Simulates those of the first `most` that have no more than a bound."""
        for index in self._ordered()[:most]:
            if not self._simulated[index] and np.isfinite(self._time_us[index]):
                self._time_us[index] = self._simulate(int(index))
                self._simulated[index] = True
        self._order = None

    def best_of_each_p(self, most: int) -> tuple[Candidate, ...]:
        """Best first, but of the shapes with the same number of stages no more than `most`."""
        order = self._ordered()
        by_p = np.argsort(self._p[order], kind="stable")  # places in `order`
        first = np.flatnonzero(np.diff(self._p[order][by_p], prepend=-1))
        rank = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
        return tuple(self._row(int(order[place])) for place in np.sort(by_p[rank < most]))

    def _ordered(self) -> npt.NDArray[np.int64]:
        if self._order is None:
            is_other = np.arange(len(self)) != self._chosen
            fits_not = np.isinf(self._time_us)
            self._order = np.lexsort((self._rough_us, is_other, self._time_us, ~self._simulated, fits_not))
        return self._order
