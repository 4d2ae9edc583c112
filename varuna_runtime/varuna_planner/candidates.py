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
    """Best first. There may be hundreds of thousands, so order and words are made on demand."""

    def __init__(
        self, time_us: npt.NDArray[np.float64], simulated: npt.NDArray[np.bool_], row: Callable[[int], Candidate]
    ):
        """`row` words shape number i; those that were not simulated stand behind those that were."""
        self._time_us = time_us
        self._simulated = simulated
        self._row = row
        self._order: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._time_us)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, place: int | slice) -> Candidate | tuple[Candidate, ...]:
        if self._order is None:
            self._order = np.lexsort((self._time_us, ~self._simulated, np.isinf(self._time_us)))
        if isinstance(place, slice):
            return tuple(self._row(int(index)) for index in self._order[place])
        return self._row(int(self._order[place]))
