"""Going on in the next generation in the same process: what that needs, and what the ranks agree on.

A survivor keeps its process, its stage and the state of its last committed step. It takes its rank in the next
generation from its agent, meets the other survivors there, and the call of `step` that was under way goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from varuna.copies.share_marks import ShareMark
from varuna.distributed.agreement import BoundaryRequests, StepTotals
from varuna.distributed.gloo import list_script_groups
from varuna.distributed.group_sockets import can_find_sockets
from varuna.distributed.topology import spans_of_micro_batches
from varuna.distributed.worker_environment import list_shape_readers
from varuna.pipeline.micro_batches import join_spans, split_spans
from varuna.pipeline.pass_state import PassResult
from varuna.roles.kept_shares import (
    KeptShare,
    Sections,
    StepRest,
    SumsChoice,
    choose_sums,
    deal_micro_batches,
    find_complete,
)
from varuna.roles.moved_sums import SumsPlan, plan_moved_sums
from varuna.roles.progress import TrainingStep
from varuna_planner.schedule.batching import count_micro_batches, renumber_micro_batches, shared_micro_batch
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan
from varuna_proto.state_use import ACCUMULATES, OWN_GROUPS

__all__ = [
    "GenerationMember",
    "SettledSums",
    "add_step",
    "can_hold_state",
    "choose_totals",
    "count_left",
    "count_redone",
    "describe_script_obstacle",
    "explain_apart",
    "explain_lost_step",
    "fits_in_place",
    "follow_sums",
    "list_only_copied",
    "list_survivors",
    "may_end_step",
    "must_move",
    "plan_rest",
    "settle_sums",
]

_SWITCH = "VARUNA_IN_PLACE"
"""A job's variable; 0: each generation gets new processes."""


@dataclass(frozen=True, kw_only=True)
class GenerationMember:
    """One rank of a generation that joins in place: where its training stands, for the others."""

    committed: int
    """The newest step that this rank knows as committed."""
    totals: StepTotals | None = None
    """Of that step."""
    has_begun: bool = False
    """Whether it has begun a pass of the step after it."""
    unbegun: int | None = None
    """If all ranks have ended that pass early: the examples that none of them has begun."""
    kept: Sequence[Sequence[int]] = ()
    """The micro-batches of that pass that its sums have, as runs [first, end)."""
    micro_batch: int = 0
    """Examples in each of these; 0: there are none."""
    loss_sum: float = 0.0
    weight: float = 0.0
    examples: int = 0
    """Of these micro-batches (`PassResult`); 0 except on the last stage."""
    expected_weight: float = 0.0
    """The weight by which their backward passes divided; 0 except on the last stage."""
    marks: Sequence[ShareMark] = ()
    """The copies of sums of the step under way that it has, its own and those of other ranks."""
    sections: Sequence[int] = ()
    """The first section of its stage, and the one after the last."""
    copied: Sequence[Sequence[int]] = ()
    """The same for each stage whose state after `committed` steps it has a copy of."""
    is_at_start: bool = False
    """Whether its script is in the call of a step that nobody has agreed on."""
    is_evaluating: bool = False
    """Whether its script is in an evaluation that can begin again."""
    evaluations: int = 0
    """How many are done."""
    evaluated_loss: float = 0.0
    """Of the newest of them."""
    weight_per_example: float | None = None
    """What it expects; None: it does not know."""
    trace_digest: str = ""
    is_new: bool = False
    """Whether its process has only just started, and has no state yet."""
    follows_shape: bool = True
    """Whether its script can go on in another shape after the step under way."""
    agreed_changes: Sequence[Sequence[int]] = ()
    """What it has agreed on with others of the changes by the script (`ScriptChanges.agreed`), as runs [first, end)."""
    has_exchanged: bool = False
    """Whether it has exchanged those of its script with others."""

    @property
    def evaluation(self) -> int | None:
        """Which one its script is in; None: it is in none that can begin again."""
        return self.evaluations if self.is_evaluating else None

    @property
    def numbers(self) -> frozenset[int]:
        """The micro-batches that its sums have."""
        return frozenset(split_spans(self.kept))

    def renumber_micro_batches(self, micro_batch: int, global_batch: int) -> GenerationMember:
        """The same member, the micro-batches of whose sums have so many examples now."""
        marks = [mark.renumber_micro_batches(micro_batch, global_batch) for mark in self.marks]
        if not self.kept:
            return replace(self, marks=marks)
        numbers = renumber_micro_batches(
            split_spans(self.kept), before=self.micro_batch, after=micro_batch, global_batch=global_batch
        )
        return replace(self, kept=join_spans(numbers), micro_batch=micro_batch, marks=marks)

    def drop_kept(self) -> GenerationMember:
        """Without what its own sums have of the step under way."""
        return replace(self, kept=(), micro_batch=0, loss_sum=0.0, weight=0.0, examples=0, expected_weight=0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GenerationMember:
        fields = json.loads(text)
        totals = fields["totals"]
        if totals is not None:
            totals = StepTotals(**{**totals, "requests": BoundaryRequests(**totals["requests"])})
        marks = [ShareMark.from_document(mark) for mark in fields["marks"]]
        return cls(**{**fields, "totals": totals, "marks": marks})


def add_step(member: GenerationMember, step: TrainingStep | None) -> GenerationMember:
    """With what it has of the call of `step` that is under way."""
    if step is None or step.totals is not None:
        return member
    member = replace(member, is_at_start=True, has_begun=step.has_begun, unbegun=step.unbegun)
    if step.kept is None:
        return member
    passed = step.kept.passed
    return replace(
        member,
        kept=join_spans(step.kept.numbers),
        micro_batch=step.kept.micro_batch,
        loss_sum=passed.loss_sum,
        weight=passed.weight,
        examples=passed.examples,
        expected_weight=passed.expected_weight,
    )


class SettledSums(NamedTuple):
    """Which sums of the step under way count."""

    members: Sequence[GenerationMember]
    """By rank, with just what counts of the sums that they have of their own stages."""
    choices: Sequence[SumsChoice]
    """By rank."""
    cut: Sequence[Sections]
    """The stages with which the sums were made."""
    micro_batch: int | None
    """Examples in each micro-batch that is counted here, and with which the rest of the step runs; None: nothing
    counts, because the plan's micro-batches and those of the sums are not made of whole ones of the smallest."""

    @property
    def sources(self) -> list[GenerationMember | ShareMark]:
        """All sums that count: those of each rank, and then the copies that ranks have of other stages' sums."""
        return [*self.members, *(mark for choice in self.choices for mark in choice.lent)]

    @property
    def source_ranks(self) -> list[int]:
        """The rank that has each of them."""
        lending = [rank for rank, choice in enumerate(self.choices) for _ in choice.lent]
        return [*range(len(self.members)), *lending]

    def list_lent(self, rank: int) -> list[tuple[int, ShareMark]]:
        """The copies of other stages' sums that count and that a rank has, with their numbers among the sources."""
        first = len(self.members) + sum(len(choice.lent) for choice in self.choices[:rank])
        return list(enumerate(self.choices[rank].lent, first))


def settle_sums(members: Sequence[GenerationMember], plan: Plan, stages: Sequence[range]) -> SettledSums:
    """Which sums count, the same on all ranks. `plan`: of the new shape. `stages`: the sections of each stage in it."""
    sizes = {mark.micro_batch for member in members for mark in member.marks}
    sizes |= {member.micro_batch for member in members if member.kept}
    micro_batch = shared_micro_batch(plan.micro_batch, *sizes)
    if micro_batch is None:
        members = [replace(member.drop_kept(), marks=()) for member in members]
    else:
        members = [member.renumber_micro_batches(micro_batch, plan.global_batch) for member in members]
    members = _add_empty_marks(members)
    cut = _list_cut(members, stages[-1].stop)
    choices = choose_sums(
        [split_spans(member.kept) for member in members],
        [member.marks for member in members],
        [None if member.is_new else _as_sections(member.sections) for member in members],
        cut=cut,
        p=len(stages),
        moves=must_move(members, stages),
    )
    counted = [_apply_choice(*one) for one in zip(members, choices, strict=True)]
    return SettledSums(counted, choices, cut, micro_batch)


def _add_empty_marks(members: Sequence[GenerationMember]) -> list[GenerationMember]:
    """With the marks of stages that train nothing, which no rank has made. Whoever has another stage's mark has them,
    and so has each rank of such a stage."""
    by_member = [{empty for mark in member.marks for empty in mark.list_empty()} for member in members]
    everywhere = set[ShareMark]().union(*by_member)
    added = []
    for member, there in zip(members, by_member, strict=True):
        own = set() if member.is_new else {mark for mark in everywhere if mark.sections == tuple(member.sections)}
        empty = sorted(there | own, key=lambda mark: (mark.key, mark.sections))
        added.append(replace(member, marks=[*member.marks, *empty]))
    return added


def _as_sections(sections: Sequence[int]) -> Sections:
    first, end = sections
    return first, end


def _list_cut(members: Sequence[GenerationMember], section_count: int) -> list[Sections]:
    """The stages that the survivors had. Neighbouring stages that no survivor has anything of are one stage."""
    known = {_as_sections(member.sections) for member in list_survivors(members)}
    known |= {mark.sections for member in members for mark in member.marks}
    gaps: list[Sections] = []
    end = 0
    for sections in [*sorted(known), (section_count, section_count)]:
        if sections[0] > end:
            gaps.append((end, sections[0]))
        end = sections[1]
    return [*sorted(known), *gaps]


def _apply_choice(member: GenerationMember, choice: SumsChoice) -> GenerationMember:
    if not choice.live:
        member = member.drop_kept()
    for mark in choice.marks:
        member = replace(
            member,
            kept=join_spans([*split_spans(member.kept), *mark.numbers]),
            micro_batch=mark.micro_batch,
            loss_sum=member.loss_sum + mark.loss_sum,
            weight=member.weight + mark.weight,
            examples=member.examples + mark.examples,
            expected_weight=member.expected_weight or mark.expected_weight,
        )
    return replace(member, marks=())


def choose_totals(own: GenerationMember, members: Sequence[GenerationMember], *, is_reduced: bool) -> StepTotals | None:
    """The totals with which this rank completes the step under way; None when it already stands where all go on.

    A step is committed as soon as one rank has seen the agreement on it. All ranks had summed their gradients by then,
    so one that has not seen it needs only the totals.

    Raises RuntimeError when this rank cannot get to the newest committed step.
    """
    newest = max(list_survivors(members), key=lambda member: member.committed)
    if own.is_new:
        return None
    if own.committed == newest.committed:
        return None
    if own.committed + 1 == newest.committed and newest.totals is not None and is_reduced:
        return newest.totals
    raise RuntimeError(
        f"this process holds step {own.committed}, and another survivor step {newest.committed}: it has to load that"
    )


def list_survivors(members: Sequence[GenerationMember]) -> list[GenerationMember]:
    """Those that are no new processes."""
    return [member for member in members if not member.is_new]


def explain_apart(members: Sequence[GenerationMember], section_count: int) -> str:
    """Why these cannot give other processes a state with which they begin where these are in their scripts; empty: they
    can."""
    old = list_survivors(members)
    places = {(member.committed, member.is_at_start, member.evaluation) for member in old}
    if len(places) > 1 or not (old[0].is_at_start or old[0].is_evaluating):
        return "ranks are at different places of their scripts"
    if not old[0].is_at_start and len(old) < len(members):
        return "ranks are in an evaluation, where no new process can begin"
    if len({member.trace_digest for member in members}) > 1:
        return "a new process has traced the model differently"
    copied = _list_sections(stage for one in old for stage in one.copied)
    missing = sorted(list_only_copied(members, section_count) - copied)
    return f"no process holds section {missing[0]} after step {old[0].committed}" if missing else ""


def list_only_copied(members: Sequence[GenerationMember], section_count: int) -> set[int]:
    """The sections that no process has in its own stage: there are copies at best."""
    return set(range(section_count)) - _list_sections(one.sections for one in list_survivors(members))


def _list_sections(stages: Iterable[Sequence[int]]) -> set[int]:
    return {section for stage in stages for section in range(*stage)}


def explain_lost_step(members: Sequence[GenerationMember], rest: StepRest | None, stages: Sequence[range]) -> str:
    """Why processes whose scripts cannot follow the shape cannot even end the step under way; empty: they can, if they
    have the inputs of its rest. `stages`: the sections of each."""
    if any(member.is_new for member in members) or must_move(members, stages):
        return "the stages are others"
    if reason := explain_apart(members, stages[-1].stop):
        return reason
    return "nothing is kept of the step under way" if rest is None else ""


def can_hold_state(environment: WorkerEnvironment) -> bool:
    """Whether a process may keep its state for the next generation when it leaves this one."""
    is_wanted = os.environ.get(_SWITCH, "1") != "0"
    is_managed = bool(environment.agent_socket) and environment.mode is Mode.TRAIN
    return is_wanted and is_managed and can_find_sockets()


def must_move(members: Sequence[GenerationMember], stages: Sequence[range]) -> bool:
    """Whether a rank holds another stage than its own. `members`: by rank; `stages`: the sections of each."""
    own = (stages[rank % len(stages)] for rank in range(len(members)))
    return any(tuple(member.sections) != (stage.start, stage.stop) for member, stage in zip(members, own, strict=True))


def plan_rest(settled: SettledSums, environment: WorkerEnvironment, stages: Sequence[range]) -> StepRest | None:
    """What this rank's replica runs of the step under way; None: its share, because nothing is kept.

    All ranks decide alike from the same sums. `stages`: the sections of each.
    """
    members, sources, plan = settled.members, settled.sources, environment.plan
    old = list_survivors(members)
    if len({member.committed for member in old}) > 1:
        return None
    if settled.micro_batch is None:
        return None
    shares = [one.numbers for one in sources]
    held = [range(*one.sections) for one in sources]
    counted = [one for one in sources if one.numbers]
    complete = find_complete(
        [one.numbers for one in counted], [_as_sections(one.sections) for one in counted], settled.cut
    )
    expected = max(one.expected_weight for one in sources)
    if not complete or not expected:
        return None
    left = sorted(set(range(count_micro_batches(plan.global_batch, settled.micro_batch))) - complete)
    spans = spans_of_micro_batches(left, settled.micro_batch, plan.global_batch)
    return StepRest(
        numbers=deal_micro_batches(left, plan.shares or (1,) * plan.d)[environment.rank // plan.p],
        micro_batch=settled.micro_batch,
        examples=sum(map(len, spans.values())),
        expected_weight=expected,
        sums=plan_moved_sums(shares, complete, held, stages, ranks=settled.source_ranks, d=plan.d)
        if must_move(members, stages)
        else None,
    )


def follow_sums(
    plan: SumsPlan, settled: SettledSums, environment: WorkerEnvironment, expected_weight: float
) -> KeptShare:
    """What this rank has of the step when the sums have moved. Their losses go with those of the last section."""
    p, replica = environment.plan.p, environment.rank // environment.plan.p
    is_last = environment.rank % p == p - 1
    sources = settled.sources
    end = max(one.sections[1] for one in sources)
    givers = [sources[number] for number in plan.list_givers(replica)] if is_last else []
    losses = [one for one in givers if one.sections[1] == end]
    passed = PassResult(
        loss_sum=sum(one.loss_sum for one in losses),
        weight=sum(one.weight for one in losses),
        examples=sum(one.examples for one in losses),
        expected_weight=expected_weight if is_last else 0.0,
        forward_us=0,
        backward_us=0,
        wait_us=0,
    )
    assert settled.micro_batch is not None, "something counts"
    return KeptShare(tuple(sorted(plan.shares[replica])), passed, settled.micro_batch, is_even=plan.are_even)


def count_redone(rest: StepRest | None, members: Sequence[GenerationMember], environment: WorkerEnvironment) -> int:
    """The micro-batches of the step under way that all replicas run again, whole or in part; the same on all ranks.
    They are counted in micro-batches of the plan, also where the rest runs with smaller ones."""
    if not any(member.has_begun for member in members):
        return 0
    unbegun = {member.unbegun for member in list_survivors(members)}
    examples = unbegun.pop() if len(unbegun) == 1 else None
    if rest is None or examples is None:
        return count_left(rest, environment)
    return _count_in_plan(rest.examples - examples, environment.plan)


def count_left(rest: StepRest | None, environment: WorkerEnvironment) -> int:
    """The micro-batches of the step under way that all replicas run."""
    return _count_in_plan(environment.plan.global_batch if rest is None else rest.examples, environment.plan)


def _count_in_plan(examples: int, plan: Plan) -> int:
    """In micro-batches of the plan."""
    return count_micro_batches(examples, plan.micro_batch) if examples > 0 else 0


def describe_script_obstacle(*, has_own_inputs: bool, accumulates: bool) -> str:
    """What the script does that keeps its processes from going on in place, and the way out; empty: nothing.

    `has_own_inputs`: the newest step has inputs that are no batch of `Batches`, or one that the script has changed.
    """
    if accumulates:
        return ACCUMULATES
    if readers := list_shape_readers():
        return (
            f"the script has read its place in the shape ({', '.join(readers)}); varuna.data.Batches gives each rank "
            "its examples without that"
        )
    if has_own_inputs:
        return (
            "the script does not pass the batches of varuna.data.Batches to step() as they are; pass each dict itself, "
            "no copy, make changes in collate, and fetch at most one ahead"
        )
    if list_script_groups():
        return OWN_GROUPS
    return ""


def may_end_step(*, accumulates: bool) -> bool:
    """Whether a script whose processes cannot go on in another shape lets them end the step under way there."""
    return not accumulates and not list_script_groups()


def fits_in_place(now: WorkerEnvironment, before: WorkerEnvironment) -> bool:
    """Whether a process can be that rank, perhaps with another stage."""
    return now.plan.global_batch == before.plan.global_batch and now.mode is before.mode
