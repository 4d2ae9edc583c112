"""How a job goes on after a loss in the middle of a step: with the stages that its survivors have, in another shape
that keeps what they have of the step, or in the planner's best one.

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from varuna_manager.domain.better_shape import count_vms, gpu_limit, predict_life_s, predict_restart
from varuna_manager.domain.holders import find_holders
from varuna_manager.domain.leaving_step import find_done_part, has_left_within_step
from varuna_manager.domain.moving_state import predict_pause_s
from varuna_manager.domain.observed import GenerationView, JobView, Proposal, Rules, Vms
from varuna_manager.domain.other_stages import find_movers
from varuna_manager.domain.reshaping import count_kept_replicas, list_kept_replicas, may_gain_elsewhere, plan_reshape
from varuna_planner.liveput.morph_cost import (
    MARKS_S,
    MorphCost,
    MorphKind,
    ShapeOption,
    choose_shape,
)
from varuna_planner.schedule.batching import shared_micro_batch
from varuna_proto.plan import Plan

__all__ = ["Way", "WayOn", "choose_way_on", "predict_kept_examples"]


class Way(StrEnum):
    STAY = "stay"
    """With the stages that the survivors have."""
    KEEP = "keep"
    """In the best shape for the survivors that keeps the step under way."""
    CHANGE = "change"
    """In the best shape for all devices."""


class WayOn(NamedTuple):
    way: Way
    reason: str = ""
    """The figures of all ways; empty: there was no choice."""
    keeping: Proposal | None = None
    """The planner's answer that is followed, with `Way.KEEP`."""


def choose_way_on(now: float, job: JobView, vms: Vms, rules: Rules) -> WayOn:
    """The way on that promises most examples.

    With the stages of the survivors the job may have to end the step with few replicas, and takes the best shape then;
    it cannot where a stage has no survivor. Processes that take other stages in place keep as much of the step, unless
    its micro-batches and the new ones are not made of whole ones of the smaller size; new processes keep nothing.
    """
    ended, proposal = job.generation, job.proposal
    if ended is None or ended.plan is None or proposal is None or proposal.plan is None:
        return WayOn(Way.STAY)
    if job.share_due or not may_gain_elsewhere(ended):  # survivors do not wait for other jobs
        return WayOn(Way.STAY)
    reshape = plan_reshape(ended.plan, ended.workers, job.survivors, gpu_limit(job))
    keeping = _find_keeping(now, job, ended, proposal, rules)
    if find_holders(now, ended, proposal.placement, vms, rules) is None:
        if reshape is None and keeping is not None:
            return WayOn(Way.KEEP, "only all of them together have the whole state", keeping)
        return WayOn(Way.STAY)
    batch, kept = ended.plan.global_batch, predict_kept_examples(job, ended)
    change = _make_option(job, ended, proposal, kept, moves=_can_move(now, job, ended, proposal, rules))
    then = replace(change, kept_examples=0.0)
    options = {Way.CHANGE: change}
    if reshape is not None and len(reshape.placement) >= job.min_gpus:
        stay = ShapeOption(
            name=f"{reshape.plan.p}×{reshape.plan.d} in place",
            examples_per_s=reshape.plan.examples_per_s,
            cost=MorphCost(kind=MorphKind.IN_PLACE, fixed_s=job.morphs.in_place_s),
            kept_examples=kept,
            step_left=batch - kept,
            then=then,
        )
        options = {Way.STAY: stay, **options}
    if keeping is not None:
        keep = _make_option(job, ended, keeping, kept, moves=True)
        options[Way.KEEP] = replace(keep, step_left=batch - kept, then=then)
    if len(options) == 1:
        return WayOn(Way.STAY)
    best, text = choose_shape(tuple(options.values()), predict_life_s(now, job, count_vms(proposal.placement)))
    way = next(way for way, option in options.items() if option is best)
    reason = f"{text}, with {100 * kept / batch:.0f} % of the step kept"
    return WayOn(way, reason, keeping if way is Way.KEEP else None)


def _find_keeping(now: float, job: JobView, ended: GenerationView, proposal: Proposal, rules: Rules) -> Proposal | None:
    """The planner's answer for the survivors, if it is another one and they can take its ranks."""
    keeping = proposal.keeping
    if keeping is None or keeping.plan is None or len(keeping.placement) < job.min_gpus:
        return None
    if keeping.placement == proposal.placement and keeping.plan == proposal.plan:
        return None
    return keeping if _can_move(now, job, ended, keeping, rules) else None


def _can_move(now: float, job: JobView, ended: GenerationView, proposal: Proposal, rules: Rules) -> bool:
    """Whether the processes of the ended generation can take the ranks of the proposal's plan."""
    return find_movers(now, job, ended, proposal, rules) is not None


def _make_option(job: JobView, ended: GenerationView, proposal: Proposal, kept: float, *, moves: bool) -> ShapeOption:
    """`kept`: examples of the step under way. They go on where processes move, if the micro-batches before and after
    are made of whole ones of the smaller size."""
    before, plan = ended.plan, proposal.plan
    assert before is not None
    assert plan is not None
    cost, moved = replace(predict_restart(job), moving_s=proposal.moves.to_new_s), 0.0
    if moves:
        moved = 0.0 if shared_micro_batch(plan.micro_batch, before.micro_batch) is None else kept
        moving_s = predict_pause_s(
            before,
            plan,
            proposal.moves.in_place,
            (before.global_batch - moved) / plan.examples_per_s,
            copies=bool(ended.keepers),
            with_sums=moved > 0,
        )
        cost = replace(cost, kind=MorphKind.IN_PLACE, fixed_s=job.morphs.in_place_s, moving_s=moving_s)
    name = f"{plan.p}×{plan.d} of micro-batch {plan.micro_batch}"
    return ShapeOption(name=name, examples_per_s=plan.examples_per_s, cost=cost, kept_examples=moved)


def predict_kept_examples(job: JobView, ended: GenerationView) -> float:
    """The examples of the step under way that survivors have, as far as the manager can know it.

    All that was done counts where all have left in the middle of the step, in order. Otherwise replicas without a loss
    have their shares. With marks, others have what they had done at their newest ones, where each stage has a survivor
    with a copy. With one replica, those are the ranks that keep copies of states.
    """
    plan = ended.plan
    assert plan is not None
    if has_left_within_step(ended):
        return plan.global_batch * find_done_part(ended)
    share = plan.global_batch / plan.d
    kept = sum(
        plan.shares[replica] * plan.micro_batch if plan.shares else share
        for replica in list_kept_replicas(plan, ended.workers)
    )
    if not job.copies_shares or (plan.d < 2 and not ended.keepers):
        return kept
    marked = find_done_part(ended, MARKS_S / 2) if ended.step_s > MARKS_S else 0.0
    return kept + _count_marked_replicas(plan, ended) * share * marked


def _count_marked_replicas(plan: Plan, ended: GenerationView) -> int:
    """Replicas that were hit, and of whose marks survivors have the copies of all stages: the rank that made it, or the
    one that keeps it, which is that with its stage in the next replica, or with one replica that which keeps its
    state."""
    ranks, p = plan.p * plan.d, plan.p
    keepers = ended.keepers if plan.d == 1 else [(rank + p) % ranks for rank in range(ranks)]
    there = {worker.rank for worker in ended.workers if worker.held_step is not None}

    def has_mark(replica: int) -> bool:
        own = range(replica * p, (replica + 1) * p)
        return all(rank in there or keepers[rank] in there for rank in own)

    return sum(has_mark(replica) for replica in range(plan.d)) - count_kept_replicas(plan, ended.workers)
