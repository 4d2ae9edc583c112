"""A generation in place begins: its ranks meet, and agree on where the training is and on what counts of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from varuna.copies.share_marks import MarkedSums, ShareMark
from varuna.distributed.agreement import BoundaryRequests
from varuna.distributed.topology import stage_sections
from varuna.pipeline.micro_batches import join_spans
from varuna.roles.kept_shares import KeptShare, StepRest, SumsChoice
from varuna.roles.leaving import StateHolder
from varuna.roles.moved_sums import add_sums
from varuna.roles.progress import TrainingStep
from varuna.roles.reshaping import (
    GenerationMember,
    SettledSums,
    add_step,
    choose_totals,
    count_redone,
    list_survivors,
    plan_rest,
    settle_sums,
)
from varuna.roles.training_parts import TrainingParts
from varuna_proto.environment import WorkerEnvironment

__all__ = ["GenerationMeeting", "Meeting"]


class Meeting(NamedTuple):
    """What the members of a generation in place have agreed on."""

    settled: SettledSums
    lent: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})
    """The copies of other stages' sums that count and that this rank has, by their numbers among all sums."""
    rest: StepRest | None = None
    """What this rank's replica runs of the step under way, which others may be in before it; None: its share, or the
    step is agreed on."""

    @property
    def members(self) -> Sequence[GenerationMember]:
        return self.settled.members

    @property
    def survivors(self) -> Sequence[GenerationMember]:
        """Those that are not new."""
        return list_survivors(self.members)


class GenerationMeeting:
    """How this process meets the other members of a generation, of one after another.

    Args:
        prepare_last_step: is called where the script of one of them cannot follow the shape, with the step under way.
    """

    def __init__(
        self,
        parts: TrainingParts,
        holder: StateHolder,
        prepare_last_step: Callable[[TrainingStep | None, SettledSums], None],
    ) -> None:
        self._parts, self._holder = parts, holder
        self._prepare_last_step = prepare_last_step

    def meet(self, step: TrainingStep | None, before: WorkerEnvironment | None) -> Meeting:
        """Agrees with the other members on the newest committed step, and on what counts of the step under way.

        `before`: of the rank that this process was; None: it is new.
        """
        parts, worker, progress = self._parts, self._parts.worker, self._parts.progress
        sections = parts.assembly.stage.sections
        if step is not None and step.kept is not None and not step.kept.is_even:
            step.drop_share()
        own = GenerationMember(
            committed=progress.find_committed(step),
            totals=progress.committed_totals,
            sections=(sections.start, sections.stop),
            is_evaluating=progress.can_reevaluate,
            evaluations=progress.evaluations,
            evaluated_loss=progress.evaluated_loss,
            weight_per_example=parts.expected_weight.per_example,
            trace_digest=parts.trace_digest,
            is_new=before is None,
            follows_shape=before is None or not self._holder.find_script_obstacle(),
            agreed_changes=join_spans(parts.changes.agreed),
            has_exchanged=parts.changes.has_exchanged,
        )
        own = add_step(own, step)
        marked: Sequence[MarkedSums] = self._list_marked(step)
        own = replace(own, marks=[one.mark for one in marked], copied=self._list_copied(own.committed, before))
        everyone = worker.topology.everyone
        texts = worker.rendezvous.exchange_values("member", everyone, own.to_json())
        members = [GenerationMember.from_json(text) for text in texts]
        self._settle_evaluations(members, is_new=own.is_new)
        self._settle_weight(members)
        settled = settle_sums(members, worker.environment.plan, parts.stages)
        totals = choose_totals(own, settled.members, is_reduced=step is not None and step.is_reduced)
        all_follow = all(member.follows_shape for member in settled.members)
        if step is None:
            if not all_follow:
                self._prepare_last_step(None, settled)
            return Meeting(settled, rest=plan_rest(settled, worker.environment, parts.stages))
        step.redone = 0
        if totals is not None:
            step.totals = progress.committed_totals = totals
        if step.totals is None:  # it is run again
            step.is_reduced = False
            step.rest = plan_rest(settled, worker.environment, parts.stages)
            if not all_follow:
                self._prepare_last_step(step, settled)
            step.redone = count_redone(step.rest, settled.members, worker.environment)
            marked = self._renumber_share(step, marked, settled.micro_batch)
            chosen = settled.choices[worker.topology.rank] if step.rest is not None else SumsChoice(live=False)
            self._settle_share(step, chosen, marked)
            lent = {number: _find_sums(mark, marked) for number, mark in settled.list_lent(worker.topology.rank)}
            return Meeting(settled, lent, step.rest)
        # A rank that has begun the next step has dropped the requests, so no rank may follow them.
        step.totals = replace(step.totals, requests=BoundaryRequests())
        step.was_interrupted = True
        if not all_follow:
            self._prepare_last_step(step, settled)
        return Meeting(settled)

    def _settle_evaluations(self, members: Sequence[GenerationMember], *, is_new: bool) -> None:
        """A rank that has missed what the others have agreed on in an evaluation gets it from them. `is_new`: this
        process is, and has made none."""
        newest, progress = max(members, key=lambda member: member.evaluations), self._parts.progress
        if is_new:
            progress.evaluations = newest.evaluations
        elif progress.evaluations < newest.evaluations:
            progress.missed_loss = newest.evaluated_loss

    def _settle_weight(self, members: Sequence[GenerationMember]) -> None:
        """Expects the weights that the others do, if this rank does not know any: ranks that take the last stage now
        and do not know it would exchange what those that have had it do not."""
        expected = self._parts.expected_weight
        known = (member.weight_per_example for member in members if member.weight_per_example is not None)
        if not expected.is_known and (weight := next(known, None)) is not None:
            expected.follow_others(weight)

    def _list_copied(self, committed: int, before: WorkerEnvironment | None) -> list[tuple[int, int]]:
        """The sections of each stage whose state after `committed` steps this process can give a copy of."""
        if before is None:
            return []
        plan, count = before.plan, self._parts.section_count
        stages = stage_sections(plan.stage_starts, plan.p, count)
        copies = self._holder.list_copies_of_others(committed)
        held = {stages[copy.inventory.receipt.rank % plan.p] for copy in copies}
        return sorted((stage.start, stage.stop) for stage in held)

    def _list_marked(self, step: TrainingStep | None) -> list[MarkedSums]:
        """The copies of sums in this process's memory that may count of the step under way."""
        shares, parting, number = self._parts.shares, self._parts.parting, self._parts.progress.step + 1
        if step is None or step.totals is not None:
            return []
        at_marks = [] if shares is None else shares.list_sums(number)
        return at_marks if parting is None else [*at_marks, *parting.list_sums(number)]

    def _renumber_share(
        self, step: TrainingStep, marked: Sequence[MarkedSums], micro_batch: int | None
    ) -> Sequence[MarkedSums]:
        """Counts what is kept of the step in micro-batches of so many examples, as all ranks do now. Returns the copies
        so; none if nothing counts."""
        global_batch = self._parts.worker.environment.plan.global_batch
        if micro_batch is None:
            return []
        if step.kept is not None:
            step.kept = step.kept.renumber_micro_batches(micro_batch, global_batch)
        return [one.renumber_micro_batches(micro_batch, global_batch) for one in marked]

    def _settle_share(self, step: TrainingStep, choice: SumsChoice, marked: Sequence[MarkedSums]) -> None:
        """Makes `.grad` what counts of this rank's sums, and adds the chosen copies."""
        parameters = self._parts.assembly.stage.parameters
        if not choice.live:
            step.drop_share()
            for parameter in parameters.values():
                parameter.grad = None
        for mark in choice.marks:
            # Of copies, because the marks may be needed again: this generation may be left before it has begun.
            add_sums(parameters, {name: tensor.clone() for name, tensor in _find_sums(mark, marked).items()})
            share = KeptShare(tuple(sorted(mark.numbers)), mark.passed, mark.micro_batch)
            step.kept = share if step.kept is None else step.kept.join(share)


def _find_sums(mark: ShareMark, marked: Sequence[MarkedSums]) -> Mapping[str, Tensor]:
    """`mark`: as it came back from the ranks, so it is equal only in what says which it is: its loss may be a NaN."""
    same = (mark.key, mark.sections, mark.spans)
    return {} if mark.is_empty else next(sums for one, sums in marked if (one.key, one.sections, one.spans) == same)
