"""What survivors keep of the step under way: the micro-batches whose gradients are in their sums.

A gradient is a sum over micro-batches, so the sums of a replica that has lost no rank stay valid, also where they move
to other ranks (`varuna.roles.moved_sums`). Only the micro-batches that are not in such sums are run again, by the
replicas of the next generation.

Letters: P stages, D replicas, M micro-batches in the global batch; rank = replica * P + stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from varuna.pipeline.pass_state import PassResult
from varuna.roles.moved_sums import SumsPlan
from varuna_planner.schedule.batching import split_evenly

__all__ = ["KeptShare", "StepRest", "deal_evenly", "find_complete", "join_spans", "split_spans"]


@dataclass(frozen=True)
class KeptShare:
    """The micro-batches that `.grad` of this rank has, whole, and the result of their passes."""

    numbers: tuple[int, ...]
    """In the global batch."""
    passed: PassResult
    is_even: bool = True
    """Whether the sums of all sections of the stage have the same ones. Otherwise nothing of them counts after another
    loss."""

    def join(self, later: KeptShare) -> KeptShare:
        """Both together; the times are those of the later pass, if it ran anything."""
        timed = later.passed if later.numbers else self.passed
        joined = replace(
            timed,
            loss_sum=self.passed.loss_sum + later.passed.loss_sum,
            weight=self.passed.weight + later.passed.weight,
            examples=self.passed.examples + later.passed.examples,
            expected_weight=later.passed.expected_weight or self.passed.expected_weight,
        )
        return KeptShare((*self.numbers, *later.numbers), joined, self.is_even and later.is_even)


@dataclass(frozen=True)
class StepRest:
    """The part of a step that one replica runs when survivors have kept another part."""

    numbers: tuple[int, ...]
    """Of its micro-batches in the global batch."""
    count: int
    """The micro-batches that all replicas run."""
    expected_weight: float
    """The weight by which the kept backward passes divided."""
    keeps_share: bool
    """Whether the sums that this rank has count."""
    sums: SumsPlan | None = None
    """Where the sums that count go; None: they stay where they are."""


def find_complete(shares: Sequence[Iterable[int]], stages: Sequence[Hashable]) -> frozenset[int]:
    """The micro-batches that count as run; all others of the step are run again.

    `shares`: by rank, the micro-batches that its sums have. `stages`: by rank, the stage with which it made them; each
    stage has a rank. At each stage no two ranks have the same micro-batch. The sums of a rank count as a whole or not
    at all: a rank whose share is not within the answer drops them. So the answer is the largest set that is, at each
    stage, the union of some ranks' shares.
    """
    of_stage: dict[Hashable, list[frozenset[int]]] = {}
    for share, stage in zip(shares, stages, strict=True):
        of_stage.setdefault(stage, []).append(frozenset(share))
    by_stage = list(of_stage.values())
    while True:
        complete = frozenset.intersection(*(frozenset[int]().union(*held) for held in by_stage))
        counted = [[share for share in held if share <= complete] for held in by_stage]
        if counted == by_stage:
            return complete
        by_stage = counted


def deal_evenly(numbers: Sequence[int], d: int) -> tuple[tuple[int, ...], ...]:
    """The numbers in d runs whose lengths differ by at most 1, the longer ones first. Runs may be empty."""
    return tuple(tuple(numbers[run.start : run.stop]) for run in split_evenly(len(numbers), d))


def join_spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The numbers as runs [first, end), which are short to send."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans


def split_spans(spans: Iterable[Sequence[int]]) -> list[int]:
    """The numbers in runs [first, end)."""
    return [number for first, end in spans for number in range(first, end)]
