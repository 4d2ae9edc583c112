"""One replica loses ranks, and others keep their sums: each micro-batch is in the sums of each section once, or it is
run again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from varuna.copies.share_marks import ShareMark
from varuna.distributed.topology import spans_of_micro_batches, stage_sections
from varuna.pipeline.micro_batches import join_spans, split_spans
from varuna.roles.kept_shares import StepRest
from varuna.roles.reshaping import (
    GenerationMember,
    SettledSums,
    count_redone,
    explain_apart,
    follow_sums,
    plan_rest,
    settle_sums,
)
from varuna_planner.schedule.batching import count_micro_batches, micro_batches
from varuna_proto.environment import WorkerEnvironment

K, M, STEP = 6, 9, 4
"""Sections of the model, micro-batches of the step with which the sums were made, and the step that is committed."""


@dataclass(frozen=True)
class Loss:
    """What the survivors of 1 x P say in another shape."""

    members: list[GenerationMember]
    """By their new ranks."""
    before: tuple[range, ...]
    """The sections of each stage that they had."""
    stages: tuple[range, ...]
    d: int
    untrained: int
    """Of the first stages that they had."""
    global_batch: int
    sizes: tuple[int, int]
    """Examples in a micro-batch, before and in the new shape."""

    def settle(self) -> SettledSums:
        return settle_sums(self.members, self.make_environment(0).plan, self.stages)

    def list_rests(self, settled: SettledSums) -> list[StepRest | None]:
        """By new rank: what its replica runs."""
        return [plan_rest(settled, self.make_environment(rank), self.stages) for rank in range(len(self.members))]

    def make_environment(self, rank: int) -> WorkerEnvironment:
        environment = WorkerEnvironment.alone("job", micro_batch=self.sizes[1], global_batch=self.global_batch)
        return replace(environment, rank=rank, plan=replace(environment.plan, p=len(self.stages), d=self.d))

    def find_newest_mark(self) -> int:
        """The most examples that copies of all stages have that train; 0: there is no such mark, or none fits."""
        if max(self.sizes) % min(self.sizes):
            return 0
        marks = [mark for member in self.members for mark in member.marks]
        counts = [
            {
                sum(map(len, spans_of_micro_batches(mark.numbers, self.sizes[0], self.global_batch).values()))
                for mark in marks
                if range(*mark.sections) == stage
            }
            for stage in self.before[self.untrained :]
        ]
        return max(set.intersection(*counts), default=0)


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    """Each rank has made marks, of the same micro-batches in any order, and may have left one out. Another has each of
    its copies, or nobody. The first stages may train nothing and make no marks. Some ranks are lost, and the others
    take fewer stages, with spare ranks left over, and perhaps another micro-batch."""
    sizes = draw(st.sampled_from([(1, 1), (4, 2), (4, 1), (2, 4), (1, 3), (4, 6), (3, 2)]))
    global_batch = M * sizes[0] - draw(st.integers(0, sizes[0] - 1))
    p = draw(st.integers(2, 5))
    untrained = draw(st.integers(0, p - 1))
    before = stage_sections((), p, K)
    lost = draw(st.sets(st.integers(0, p - 1), min_size=1, max_size=p - 1))
    there = draw(st.permutations(sorted({*range(p)} - lost)))
    order, made = draw(st.permutations(range(M))), draw(st.sets(st.integers(1, M), max_size=3))
    marks: dict[int, list[ShareMark]] = {rank: [] for rank in range(p)}
    for stage, held in list(enumerate(before))[untrained:]:
        keeper = draw(st.integers(0, p - 1))
        for count in sorted(made - draw(st.sets(st.integers(1, M), max_size=1))):
            mark = ShareMark(
                generation=1,
                replica=0,
                step=STEP + 1,
                sections=(held.start, held.stop),
                micro_batch=sizes[0],
                spans=tuple(join_spans(order[:count])),
                without_sums=tuple((stage.start, stage.stop) for stage in before[:untrained]),
            )
            if stage == p - 1:
                examples = sum(map(len, spans_of_micro_batches(order[:count], sizes[0], global_batch).values()))
                mark = replace(mark, examples=examples, weight=float(examples), expected_weight=float(global_batch))
            for rank in {stage, keeper}:
                marks[rank].append(mark)
    members = [
        GenerationMember(
            committed=STEP,
            marks=marks[rank],
            sections=(before[rank].start, before[rank].stop),
            is_at_start=True,
            has_begun=True,
        )
        for rank in there
    ]
    new_p = draw(st.integers(1, len(there)))
    d = draw(st.integers(1, len(there) // new_p))
    members = [GenerationMember.from_json(member.to_json()) for member in members[: new_p * d]]
    d = min(d, count_micro_batches(global_batch, sizes[1]))
    members = members[: new_p * d]
    return Loss(members, before, stage_sections((), new_p, K), d, untrained, global_batch, sizes)


def count_examples(numbers: Iterable[int], micro_batch: int, global_batch: int) -> list[int]:
    spans = spans_of_micro_batches(numbers, micro_batch, global_batch)
    return [example for span in spans.values() for example in span]


@given(losses())
def test_each_example_counts_once_at_each_section(loss: Loss) -> None:
    settled = loss.settle()
    rests = loss.list_rests(settled)
    assert len({rest is None for rest in rests}) == 1
    for section in range(K):
        counted: Counter[int] = Counter()
        for replica, rest in enumerate(rests[:: len(loss.stages)]):
            if rest is None:
                share = micro_batches(loss.global_batch, loss.sizes[1], loss.d)[replica]
                counted.update(count_examples(share, loss.sizes[1], loss.global_batch))
                continue
            assert rest.sums is not None
            assert rest.micro_batch == min(loss.sizes)
            counted.update(count_examples(rest.numbers, rest.micro_batch, loss.global_batch))
            for source in (settled.sources[number] for number in rest.sums.list_givers(replica)):
                if section in range(*source.sections):
                    counted.update(count_examples(source.numbers, rest.micro_batch, loss.global_batch))
        assert counted == Counter(range(loss.global_batch))


@given(losses())
def test_the_newest_mark_of_which_each_stage_has_a_copy_counts_with_its_losses(loss: Loss) -> None:
    settled, kept, whole = loss.settle(), loss.find_newest_mark(), loss.global_batch
    numbers = set[int]()
    shares = []
    for rank, rest in enumerate(loss.list_rests(settled)):
        assert (0 if rest is None else whole - rest.examples) == kept
        redone = count_redone(rest, loss.members, loss.make_environment(rank))
        assert redone == math.ceil((whole - kept) / loss.sizes[1])
        if rest is not None and rest.sums is not None:
            shares.append(follow_sums(rest.sums, settled, loss.make_environment(rank), rest.expected_weight))
    assert sum(share.passed.examples for share in shares) == kept
    for share in shares[:: len(loss.stages)]:
        assert numbers.isdisjoint(share.numbers)
        numbers |= set(share.numbers)
    assert len(count_examples(numbers, min(loss.sizes), whole)) == kept
    assert all(share.is_even for share in shares)


@given(losses())
def test_each_rank_finds_the_copies_that_it_lends(loss: Loss) -> None:
    settled = loss.settle()
    lent = {number: (rank, mark) for rank in range(len(loss.members)) for number, mark in settled.list_lent(rank)}
    for number, source in enumerate(settled.sources):
        if isinstance(source, ShareMark):
            assert lent.pop(number) == (settled.source_ranks[number], source)
        else:
            assert settled.source_ranks[number] == number
    assert not lent


def test_a_copy_of_another_step_does_not_stand_for_a_lost_stage() -> None:
    members = [
        GenerationMember(committed=STEP, sections=(0, 2), copied=[(2, 4)], is_at_start=True),
        GenerationMember(committed=STEP, sections=(4, 6), is_at_start=True),
    ]
    assert explain_apart(members, K) == ""
    lacking = [replace(members[0], copied=[]), members[1]]
    assert explain_apart(lacking, K) == f"no process holds section 2 after step {STEP}"


def survivor(*kept: tuple[int, int], micro_batch: int, marks: Sequence[ShareMark] = ()) -> GenerationMember:
    """One of a generation whose only stage has all sections."""
    examples = sum(4 * (end - first) for first, end in kept)
    return GenerationMember(
        committed=STEP,
        sections=(0, K),
        has_begun=True,
        kept=kept,
        micro_batch=micro_batch,
        examples=examples,
        expected_weight=30.0,
        marks=marks,
    )


def test_ranks_that_have_come_to_different_micro_batches_take_the_smallest() -> None:
    """One has been in a generation with smaller ones, in which another one has not arrived. The third has nothing."""
    own = ShareMark(
        generation=1, replica=1, step=STEP + 1, sections=(0, K), micro_batch=4, spans=((4, 6),), expected_weight=30.0
    )
    members = [
        survivor((0, 4), micro_batch=2),
        survivor(micro_batch=0, marks=[own]),
        survivor(micro_batch=6),
    ]
    environment = WorkerEnvironment.alone("job", micro_batch=4, global_batch=30)
    environment = replace(environment, plan=replace(environment.plan, d=3))
    stages = [range(K)]
    settled = settle_sums(members, environment.plan, stages)
    assert [split_spans(member.kept) for member in settled.members] == [[0, 1, 2, 3], [8, 9, 10, 11], []]
    rest = plan_rest(settled, environment, stages)
    assert rest is not None
    assert (rest.micro_batch, rest.numbers, rest.examples) == (2, (4, 5, 6), 14)
    assert count_redone(rest, members, environment) == 4, "three whole micro-batches of the plan, and a half"
    alone = settle_sums(
        [members[0], replace(members[1], marks=[replace(own, micro_batch=3)])], environment.plan, stages
    )
    assert alone.micro_batch is None
    assert plan_rest(alone, environment, stages) is None
