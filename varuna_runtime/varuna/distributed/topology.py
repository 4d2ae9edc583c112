"""Which rank does what in a generation of P×D.

Letters: P stages, D replicas; rank = replica * P + stage; K sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from varuna_planner.schedule.batching import micro_batch_sizes, micro_batches
from varuna_proto.environment import WorkerEnvironment

__all__ = [
    "Topology",
    "place_in_batch",
    "share_of_batch",
    "spans_of_micro_batches",
    "stage_sections",
    "tied_over_stages",
]


@dataclass(frozen=True)
class Topology:
    """The shape of a generation, and this rank's place in it."""

    p: int
    d: int
    rank: int

    @property
    def stage(self) -> int:
        return self.rank % self.p

    @property
    def replica(self) -> int:
        return self.rank // self.p

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.p * self.d))

    @property
    def mates(self) -> tuple[int, ...]:
        """The other ranks of this rank's replica."""
        first = self.rank - self.stage
        return tuple(rank for rank in range(first, first + self.p) if rank != self.rank)

    def ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The ranks of all replicas of these stages, replica by replica."""
        return tuple(replica * self.p + stage for replica in range(self.d) for stage in sorted(stages))


def stage_sections(starts: Sequence[int], p: int, section_count: int) -> tuple[range, ...]:
    """The sections of each stage. Without `starts`, the stages get equal numbers of sections.

    Raises ValueError when the starts do not fit P or the model's number of sections.
    """
    if p > section_count:
        raise ValueError(
            f"P={p} stages, but the model has only {section_count} section(s): use at most {section_count} stages, "
            "or place more CutPoints in the model"
        )
    starts = tuple(starts) or tuple(stage * section_count // p for stage in range(p))
    ends = (*starts[1:], section_count)
    if len(starts) != p or starts[0] != 0 or any(a >= b for a, b in zip(starts, ends, strict=True)):
        raise ValueError(
            f"stage starts {list(starts)} do not cut {section_count} sections into {p} stages: "
            f"give {p} rising section numbers that begin with 0 and end below {section_count}"
        )
    return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))


def share_of_batch(examples: int, environment: WorkerEnvironment, replica: int) -> tuple[tuple[int, ...], int]:
    """(sizes of this replica's micro-batches, number of the first in the global batch) for `examples` local examples.

    A batch of another size (the end of a data set, an evaluation) is cut into micro-batches in the same way. A script
    that loads its own examples may give all replicas equally many, whatever shares the plan gives them.
    """
    m = environment.plan.micro_batch
    if not environment.plan.global_batch:  # a single process without a plan: its examples are the whole batch
        return (micro_batch_sizes(examples, m or examples) if examples else ()), 0
    sizes, first = _planned_share(examples, environment, replica)
    return sizes or (micro_batch_sizes(examples, m) if examples else ()), first


def place_in_batch(examples: int, environment: WorkerEnvironment, replica: int) -> int:
    """The place of a replica's first example in the batch of all replicas, of any size.

    No example has the place of another replica's if all have equally many, or none has more than in a step.
    """
    if not environment.plan.global_batch:
        return 0
    sizes, first = _planned_share(examples, environment, replica)
    planned = first * environment.plan.micro_batch
    return planned if sizes else max(planned, replica * examples)


def _planned_share(examples: int, environment: WorkerEnvironment, replica: int) -> tuple[tuple[int, ...], int]:
    """As `share_of_batch`, but without sizes where the plan does not give this replica so many examples."""
    plan = environment.plan
    for shares in (plan.shares, ()):
        run = micro_batches(plan.global_batch, plan.micro_batch, plan.d, shares)[replica]
        sizes = micro_batch_sizes(plan.global_batch, plan.micro_batch)[run.start : run.stop]
        if sum(sizes) == examples:
            return sizes, run.start
    return (), run.start


def spans_of_micro_batches(numbers: Iterable[int], micro_batch: int, global_batch: int) -> dict[int, range]:
    """By number: the places of a micro-batch's examples in the global batch. `micro_batch`: examples in each."""
    starts = {number: number * micro_batch for number in numbers}
    return {number: range(at, min(at + micro_batch, global_batch)) for number, at in starts.items()}


def tied_over_stages(shared: Mapping[str, Sequence[int]], stages: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """The parameters that sections of more than one stage use -> those stages, from name -> sections."""
    holders = {
        name: tuple(stage for stage, held in enumerate(stages) if any(section in held for section in sections))
        for name, sections in shared.items()
    }
    return {name: holding for name, holding in holders.items() if len(holding) > 1}
