"""What survivors keep of the step under way: the micro-batches whose gradients are in their sums.

A gradient is a sum over micro-batches, so the sums of a replica that has lost no rank stay valid, also where they move
to other ranks (`varuna.roles.moved_sums`). The copies of a mark are as good, if those of all stages are there. Only the
micro-batches that are not in such sums are run again, by the replicas of the next generation.

Letters: P stages, D replicas, M micro-batches in the global batch; rank = replica * P + stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from varuna.copies.share_marks import MarkKey, ShareMark
from varuna.pipeline.pass_state import PassResult
from varuna.roles.moved_sums import SumsPlan
from varuna_planner.schedule.batching import apportion, renumber_micro_batches

__all__ = ["KeptShare", "Sections", "StepRest", "SumsChoice", "choose_sums", "deal_micro_batches", "find_complete"]


Sections = tuple[int, int]
"""Of a stage: the first, and the one after the last."""


@dataclass(frozen=True)
class KeptShare:
    """The micro-batches that `.grad` of this rank has, whole, and the result of their passes."""

    numbers: tuple[int, ...]
    """In the global batch."""
    passed: PassResult
    micro_batch: int
    """Examples in each micro-batch."""
    is_even: bool = True
    """Whether the sums of all sections of the stage have the same ones. Otherwise nothing of them counts after another
    loss."""

    def join(self, later: KeptShare) -> KeptShare:
        """Both together; the times are those of the later pass, if it ran anything."""
        assert self.micro_batch == later.micro_batch, "the numbers of both are of the same micro-batches"
        joined = self.passed.join(later.passed)
        return KeptShare(
            (*self.numbers, *later.numbers), joined, self.micro_batch, is_even=self.is_even and later.is_even
        )

    def renumber_micro_batches(self, micro_batch: int, global_batch: int) -> KeptShare:
        """The same share, whose micro-batches have so many examples now. It is not known how long these take."""
        if micro_batch == self.micro_batch:
            return self
        numbers = renumber_micro_batches(
            self.numbers, before=self.micro_batch, after=micro_batch, global_batch=global_batch
        )
        return KeptShare(numbers, self.passed.without_op_times(), micro_batch, is_even=self.is_even)


@dataclass(frozen=True)
class StepRest:
    """The part of a step that one replica runs when survivors have kept another part."""

    numbers: tuple[int, ...]
    """Of its micro-batches in the global batch."""
    micro_batch: int
    """Examples in each of them: what the plan says, or a part of it, so that what is kept has whole ones, too."""
    examples: int
    """Those of the micro-batches that all replicas run."""
    expected_weight: float
    """The weight by which the kept backward passes divided."""
    sums: SumsPlan | None = None
    """Where the sums that count go; None: they stay where they are."""


def find_complete(
    shares: Sequence[Iterable[int]], stages: Sequence[Hashable], all_stages: Iterable[Hashable] = ()
) -> frozenset[int]:
    """The micro-batches that count as run; all others of the step are run again.

    `shares`: by rank, the micro-batches that its sums have. `stages`: by rank, the stage with which it made them.
    `all_stages`: among them those that no rank has; there is one stage at least. The sums of a rank count as a whole or
    not at all: a rank whose share is not within the answer drops them. So the answer is the largest set that is, at
    each stage, the union of some ranks' shares. Shares of one stage that have a micro-batch in common do not count.
    """
    of_stage: dict[Hashable, list[frozenset[int]]] = {stage: [] for stage in all_stages}
    for share, stage in zip(shares, stages, strict=True):
        of_stage.setdefault(stage, []).append(frozenset(share))
    by_stage = [_drop_overlapping(held) for held in of_stage.values()]
    while True:
        complete = frozenset.intersection(*(frozenset[int]().union(*held) for held in by_stage))
        counted = [[share for share in held if share <= complete] for held in by_stage]
        if counted == by_stage:
            return complete
        by_stage = counted


def _drop_overlapping(shares: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Without those that have a micro-batch in common: it would count twice. Losses that follow one another closely can
    leave that, where only some of the ranks had added the sums of a mark."""
    shares = list(shares)
    ranks = Counter(number for share in shares for number in share)
    return [share for share in shares if all(ranks[number] == 1 for number in share)]


def deal_micro_batches(numbers: Sequence[int], shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The numbers in runs, one for each replica, whose lengths are in proportion to the replicas' shares of a step.
    Runs may be empty."""
    lengths = apportion(len(numbers), shares, least=0)
    ends = accumulate(lengths)
    return tuple(tuple(numbers[end - length : end]) for end, length in zip(ends, lengths, strict=True))


@dataclass(frozen=True)
class SumsChoice:
    """Which of a rank's sums count of the step under way."""

    live: bool
    """Those in `.grad`."""
    marks: tuple[ShareMark, ...] = ()
    """The copies of its own stage's sums, which are added to them."""
    lent: tuple[ShareMark, ...] = ()
    """The copies of other stages' sums, which move to ranks of the new shape."""


def choose_sums(
    shares: Sequence[Iterable[int]],
    marks: Sequence[Iterable[ShareMark]],
    stages: Sequence[Sections | None],
    *,
    cut: Iterable[Sections],
    p: int,
    moves: bool,
) -> list[SumsChoice]:
    """By rank: what counts, so that each micro-batch is in the sums of each stage once, or not at all.

    What replicas have finished counts first, as `find_complete` says. Then come the copies at marks, those with most
    micro-batches first. A mark counts if each stage has a copy of it, and if none of its micro-batches counts already.
    Where several ranks have a copy, it counts in one replica if that has all of them, so that another loss costs one
    replica's.

    Args:
        shares: by rank, the micro-batches that `.grad` has; none for a new process.
        marks: by rank, the copies that it has, of its own stage and of others.
        stages: by rank, the stage with which its sums were made; None for a new process.
        cut: all stages with which sums were made. Of one without a rank, the copies at marks may be there.
        p: stages of the new shape; rank = replica * p + stage.
        moves: whether sums move to other ranks. Otherwise only copies of a rank's own stage count.
    """
    all_stages = set(cut)
    old = [rank for rank, stage in enumerate(stages) if stage is not None]
    counted = find_complete([shares[rank] for rank in old], [stages[rank] for rank in old], all_stages)
    live = [bool(share) and counted.issuperset(share) for share in map(frozenset, shares)]
    holders: dict[MarkKey, dict[Sections, dict[int, ShareMark]]] = {}
    for rank in old:
        for mark in marks[rank]:
            if moves or mark.sections == stages[rank]:
                holders.setdefault(mark.key, {}).setdefault(mark.sections, {})[rank] = mark
    chosen: list[list[ShareMark]] = [[] for _ in shares]
    for key in sorted(holders, key=lambda key: (-key.micro_batches, key)):
        of_stage = holders[key]
        copies = [mark.numbers for by_rank in of_stage.values() for mark in by_rank.values()]
        if of_stage.keys() != all_stages or len(set(copies)) > 1 or not counted.isdisjoint(copies[0]):
            continue
        counted |= copies[0]
        replicas = [{rank // p for rank in by_rank} for by_rank in of_stage.values()]
        together = min(set.intersection(*replicas), default=None)
        for stage, by_rank in of_stage.items():
            rank = min(by_rank, key=lambda rank: (rank // p != together, stages[rank] != stage, rank))
            chosen[rank].append(by_rank[rank])
    return [
        SumsChoice(
            of_rank,
            tuple(mark for mark in of_marks if mark.sections == stage),
            tuple(mark for mark in of_marks if mark.sections != stage),
        )
        for of_rank, of_marks, stage in zip(live, chosen, stages, strict=True)
    ]
