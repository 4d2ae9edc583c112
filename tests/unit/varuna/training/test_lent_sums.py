"""One replica loses ranks, and others keep their sums: each micro-batch is in the sums of each section once, or it is
run again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from varuna.copies.share_marks import ShareMark
from varuna.distributed.topology import stage_sections
from varuna.pipeline.micro_batches import join_spans
from varuna.roles.kept_shares import StepRest
from varuna.roles.reshaping import (
    GenerationMember,
    SettledSums,
    explain_apart,
    follow_sums,
    plan_rest,
    settle_sums,
)
from varuna_planner.schedule.batching import micro_batches
from varuna_proto.environment import WorkerEnvironment

K, M, STEP = 6, 9, 4
"""Sections of the model, micro-batches of the step, and the step that is committed."""


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

    def list_rests(self, settled: SettledSums) -> list[StepRest | None]:
        """By new rank: what its replica runs."""
        return [plan_rest(settled, self.make_environment(rank), self.stages) for rank in range(len(self.members))]

    def make_environment(self, rank: int) -> WorkerEnvironment:
        environment = WorkerEnvironment.alone("job", micro_batch=1, global_batch=M)
        return replace(environment, rank=rank, plan=replace(environment.plan, p=len(self.stages), d=self.d))

    def find_newest_mark(self) -> int:
        """The most micro-batches that copies of all stages have that train; 0: there is no such mark."""
        marks = [mark for member in self.members for mark in member.marks]
        counts = [
            {mark.key.micro_batches for mark in marks if range(*mark.sections) == stage}
            for stage in self.before[self.untrained :]
        ]
        return max(set.intersection(*counts), default=0)


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    """Each rank has made marks, of the same micro-batches in any order, and may have left one out. Another has each of
    its copies, or nobody. The first stages may train nothing and make no marks. Some ranks are lost, and the others
    take fewer stages, with spare ranks left over."""
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
                spans=tuple(join_spans(order[:count])),
                without_sums=tuple((stage.start, stage.stop) for stage in before[:untrained]),
            )
            if stage == p - 1:
                mark = replace(mark, examples=count, weight=float(count), expected_weight=float(M))
            for rank in {stage, keeper}:
                marks[rank].append(mark)
    members = [
        GenerationMember(
            committed=STEP,
            marks=marks[rank],
            sections=(before[rank].start, before[rank].stop),
            is_at_start=True,
            has_begun=True,
            micro_batch=1,
        )
        for rank in there
    ]
    new_p = draw(st.integers(1, len(there)))
    d = draw(st.integers(1, len(there) // new_p))
    members = [GenerationMember.from_json(member.to_json()) for member in members[: new_p * d]]
    return Loss(members, before, stage_sections((), new_p, K), d, untrained)


@given(losses())
def test_each_micro_batch_counts_once_at_each_section(loss: Loss) -> None:
    settled = settle_sums(loss.members, loss.stages)
    rests = loss.list_rests(settled)
    assert len({rest is None for rest in rests}) == 1
    for section in range(K):
        counted: Counter[int] = Counter()
        for replica, rest in enumerate(rests[:: len(loss.stages)]):
            if rest is None:
                counted.update(micro_batches(M, 1, loss.d)[replica])
                continue
            assert rest.sums is not None
            counted.update(rest.numbers)
            for source in (settled.sources[number] for number in rest.sums.list_givers(replica)):
                counted.update(source.numbers if section in range(*source.sections) else ())
        assert counted == Counter(range(M))


@given(losses())
def test_the_newest_mark_of_which_each_stage_has_a_copy_counts_with_its_losses(loss: Loss) -> None:
    settled, kept = settle_sums(loss.members, loss.stages), loss.find_newest_mark()
    shares = []
    for rank, rest in enumerate(loss.list_rests(settled)):
        assert (0 if rest is None else M - rest.count) == kept
        if rest is not None and rest.sums is not None:
            shares.append(follow_sums(rest.sums, settled, loss.make_environment(rank), rest.expected_weight))
    assert sum(share.passed.examples for share in shares) == kept
    assert sum(len(share.numbers) for share in shares[:: len(loss.stages)]) == kept
    assert all(share.is_even for share in shares)


@given(losses())
def test_each_rank_finds_the_copies_that_it_lends(loss: Loss) -> None:
    settled = settle_sums(loss.members, loss.stages)
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
