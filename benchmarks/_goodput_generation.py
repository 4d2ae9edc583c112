"""One generation of a replayed job, and who holds the newest committed state.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from _goodput_setting import Stop

from varuna_planner.liveput.copies import NOTHING, CopiedParts
from varuna_planner.liveput.morph_cost import MorphKind
from varuna_proto.plan import Plan


@dataclass(kw_only=True)
class ReplayedGeneration:
    plan: Plan
    vms: tuple[str, ...]
    """By rank. One that has left stays in it."""
    number: int
    kind: MorphKind
    started_s: float
    ready_s: float
    pause_s: float
    moving_s: float
    lost: set[int] = field(default_factory=set)
    """Ranks whose VM has left."""
    first_loss_s: float | None = None
    shares_end_s: float = 0.0
    """When its complete replicas have finished their share."""
    steps: int = 0
    stepped_s: float = 0.0
    """When its newest step ended; before its first: when it started."""
    kept: float = 0.0
    """Examples of the step under way that it began with."""
    stop: Stop | None = None
    """How it was asked to leave; None: it was not."""
    has_left_within_step: bool = False
    parting_s: float = 0.0
    """For how long ranks that do not go on sent what they had, when all had ended their passes."""
    takers: Mapping[int, int] = field(default_factory=dict)
    """Of each stage that only such ranks had: one of them, and the rank that took its state."""
    ended_s: float | None = None
    copied: CopiedParts = NOTHING
    """What its VMs copy to each other."""

    @property
    def complete(self) -> int:
        """Replicas that have lost no rank."""
        return self.plan.d - len({rank // self.plan.p for rank in self.lost})

    @property
    def live(self) -> bool:
        return self.ended_s is None

    def list_alive(self) -> list[int]:
        return [rank for rank in range(len(self.vms)) if rank not in self.lost]

    @property
    def keepers(self) -> list[int]:
        """By stage, the rank that has the copy of what the only replica has; none with several replicas."""
        return [find_keeper(rank, self.plan) for rank in range(self.plan.p)] if self.plan.d == 1 else []


def find_keeper(rank: int, plan: Plan) -> int:
    """The rank that has a rank's copy: one of another stage, half the ranks away."""
    count = plan.p * plan.d
    away = max(1, count // 2)
    away += plan.p > 1 and away % plan.p == 0
    return (rank + away) % count


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The layout that has the newest committed state in its memories."""

    plan: Plan
    vms: tuple[str, ...]
    has_copies: bool = False
    """Whether a second VM has each rank's part."""
    takers: Mapping[int, int] = field(default_factory=dict)
    """As of the generation."""

    def find_holders(self, there: set[str]) -> bool:
        """Whether every stage is on a VM that is there."""
        p = self.plan.p
        held = {rank % p for rank, vm in enumerate(self.list_holders(there)) if vm}
        return len(held) == p

    def list_holders(self, there: set[str]) -> list[str]:
        """The VM that has each rank's part; empty: none."""
        has_copies = self.has_copies
        second = [self.vms[find_keeper(rank, self.plan)] if has_copies else "" for rank in range(len(self.vms))]
        third = [self.vms[self.takers[rank]] if rank in self.takers else "" for rank in range(len(self.vms))]
        return [next((vm for vm in having if vm in there), "") for having in zip(self.vms, second, third, strict=True)]
