"""Which types of GPU the ranks of a calibration have.

The profile has the times of one type, its own: that of most ranks. Every type's ranks measure all sections among
themselves, so that the profile also has the other types' speeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankTypes"]


@dataclass(frozen=True)
class RankTypes:
    """The type of GPU of each rank, by its VM's agent; an empty name, where it is not known, is a type, too."""

    by_rank: tuple[str, ...]

    @property
    def all(self) -> list[str]:
        """Each type once, in the order of ranks."""
        return list(dict.fromkeys(self.by_rank))

    @property
    def own(self) -> str:
        """The profile's own type: that of most ranks; among types with equally many, that of the lowest rank."""
        return Counter(self.by_rank).most_common(1)[0][0]

    @property
    def leader(self) -> int:
        """The rank that measures what is measured once, on the profile's own type."""
        return self.by_rank.index(self.own)

    def list_ranks(self, gpu_type: str) -> list[int]:
        return [rank for rank, each in enumerate(self.by_rank) if each == gpu_type]

    def find_place(self, rank: int) -> tuple[int, int]:
        """The rank's number among the ranks of its type, and how many these are."""
        equals = self.list_ranks(self.by_rank[rank])
        return equals.index(rank), len(equals)

    def share_sections(self, sections: Sequence[int], rank: int) -> Sequence[int]:
        """Those that the rank measures: rank r of the W ranks of its type has the sections number r, r+W, …"""
        place, count = self.find_place(rank)
        return sections[place::count]

    def count_most_sections(self, sections: int) -> int:
        """How many of so many sections the busiest rank measures."""
        return -(-sections // min(Counter(self.by_rank).values()))
