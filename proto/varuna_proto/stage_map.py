"""The stage-to-rank map: the rank of each stage of each replica, in the text that launchers pass to scripts.

P is the number of stages, D of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StageMap"]


@dataclass(frozen=True)
class StageMap:
    """`stages[s][d]` is the rank that has stage s of replica d."""

    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, text: str) -> StageMap:
        """Parses a text such as `0,2;1,3`, or `0,2;1,3;` from Varuna's launcher of 2021.

        Raises ValueError when stages differ in their number of ranks, or a rank is missing or repeated.
        """
        try:
            stages = tuple(tuple(int(rank) for rank in stage.split(",")) for stage in text.removesuffix(";").split(";"))
        except ValueError:
            raise ValueError(f"stage_to_rank_map {text!r}: expected ranks joined by ',' and stages by ';'") from None
        if len({len(stage) for stage in stages}) != 1:
            raise ValueError(f"stage_to_rank_map {text!r}: every stage needs the same number of ranks")
        count = len(stages) * len(stages[0])
        if sorted(rank for stage in stages for rank in stage) != list(range(count)):
            raise ValueError(f"stage_to_rank_map {text!r}: ranks must be 0 to {count - 1}, each once")
        return cls(stages)

    @classmethod
    def of_shape(cls, p: int, d: int) -> StageMap:
        """The numbering of Varuna's own launchers, replica by replica: rank = replica * P + stage."""
        return cls(tuple(tuple(replica * p + stage for replica in range(d)) for stage in range(p)))

    def __str__(self) -> str:
        return ";".join(",".join(map(str, ranks)) for ranks in self.stages)

    @property
    def p(self) -> int:
        return len(self.stages)

    @property
    def d(self) -> int:
        return len(self.stages[0])

    def place_of(self, rank: int) -> tuple[int, int]:
        """(stage, replica) of `rank`. Raises ValueError when it is not in the map."""
        for stage, ranks in enumerate(self.stages):
            if rank in ranks:
                return stage, ranks.index(rank)
        raise ValueError(
            f"rank {rank} is not in stage_to_rank_map '{self}', which has ranks 0 to {self.p * self.d - 1}"
        )
