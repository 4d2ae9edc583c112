"""A pipeline schedule as data: for each stage its actions in order."""

from __future__ import annotations

from typing import NamedTuple

from varuna_planner.schedule.policies import Op

__all__ = ["Action", "Schedule"]


class Action(NamedTuple):
    """One op on one micro-batch (numbered within the replica)."""

    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.name}{self.micro_batch}"


Schedule = tuple[tuple[Action, ...], ...]
"""[stage][position]"""
