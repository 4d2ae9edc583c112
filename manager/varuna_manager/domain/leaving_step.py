"""Whether a generation leaves for another shape in the middle of its step, or at its end.

What its workers have of the step goes on in the next shape, and only the rest is run there. So a long step need not be
finished in the slower shape. Workers that cannot leave so finish it (`StopMode.HOLD_WITHIN_STEP`).

Letters: P stages, D replicas; rank = replica * P + stage.
"""

from __future__ import annotations

from varuna_manager.domain.moving_state import predict_growth_pause_s, predict_sums_pause_s
from varuna_manager.domain.observed import GenerationView, Proposal
from varuna_manager.domain.states import ExitCause, StopMode
from varuna_planner.schedule.batching import count_micro_batches, shared_micro_batch
from varuna_proto.plan import Plan

__all__ = [
    "GIVING_S",
    "LEAST_REST_S",
    "find_done_part",
    "has_left_within_step",
    "may_leave_within_step",
    "part_left",
    "predict_fill_s",
    "predict_parting_s",
    "predict_rest_s",
    "render_gain_within_step",
]

LEAST_REST_S = 10.0
"""In less time there is little to gain, and the workers may be past their passes when they are asked."""
GIVING_S = 15.0
"""In which a stage's sums of 1.7 GB, beside a state of 5 GB, go over a link of 1 Gb/s, and all of it over 10 Gb/s."""


def may_leave_within_step(generation: GenerationView, proposal: Proposal) -> bool:
    """Whether what its workers have of the step counts in the proposal's shape."""
    before, after = generation.plan, proposal.plan
    if before is None or after is None or not generation.devices.issubset(proposal.placement):
        return False  # the sums of a worker that does not go on would be lost
    return shared_micro_batch(before.micro_batch, after.micro_batch) is not None


def render_gain_within_step(
    now: float, generation: GenerationView, proposal: Proposal, present_rate: float, *, has_state: bool = False
) -> str:
    """Why it leaves for the proposal's shape in the middle of its step; empty: it finishes the step.

    It costs that the pipelines drain and fill once more, and that sums of gradients move, if that takes longer than
    the rest of the step, in which they come.

    Args:
        present_rate: its examples/s.
        has_state: whether the new shape's ranks have the state that the step began with, so that it need not move.
    """
    before, after = generation.plan, proposal.plan
    if before is None or after is None or not may_leave_within_step(generation, proposal):
        return ""
    rest_s = predict_rest_s(now, generation)
    if rest_s < LEAST_REST_S or _has_only_just_begun(now, generation):
        return ""
    rest_after_s = rest_s * present_rate / after.examples_per_s
    gain_s = rest_s - rest_after_s + has_state * predict_growth_pause_s(generation, proposal)
    sums_s = predict_sums_pause_s(proposal.moves.in_place, rest_after_s)
    cost_s = predict_fill_s(before) + predict_fill_s(after) + sums_s
    if gain_s <= cost_s:
        return ""
    there = ", the state is there" if has_state else ""
    worth = f"that saves {gain_s:.0f} s and costs {cost_s:.1f} s"
    return f"; within its step ({rest_s:.0f} s are left{there}): {worth}"


def predict_rest_s(now: float, generation: GenerationView, since: float | None = None) -> float:
    """About how long the step under way still takes. `since`: when it began; None: when the one before was over."""
    part = 1.0
    if generation.last_step is None and generation.plan is not None:
        part = part_left(generation.plan, generation.micro_batches_left)
    return max(0.0, part * generation.step_s - (now - (generation.stepped_at if since is None else since)))


def part_left(plan: Plan, micro_batches_left: int | None) -> float:
    """The part of a generation's first step that it runs; all of it where that is not known."""
    return min(1.0, micro_batches_left * plan.micro_batch / plan.global_batch) if micro_batches_left else 1.0


def has_left_within_step(ended: GenerationView) -> bool:
    """Whether all its workers have left in order when they were asked to do so in the middle of a step."""
    was_asked = ended.stop is not None and ended.stop.mode is StopMode.HOLD_WITHIN_STEP
    return was_asked and all(worker.cause is ExitCause.GENERATION_ENDED for worker in ended.workers)


def find_done_part(ended: GenerationView, lag_s: float = 0.0) -> float:
    """About what part of the step under way its workers had, `lag_s` before the first of them stopped."""
    plan = ended.plan
    if plan is None or ended.step_s <= 0:
        return 0.0
    stopped = [worker.stopped_at for worker in ended.workers if worker.stopped_at is not None]
    trained_s = max(0.0, min(stopped, default=ended.stepped_at) - ended.stepped_at - lag_s)
    before = 0.0 if ended.last_step is not None else 1.0 - part_left(plan, ended.micro_batches_left)
    return min(before + trained_s / ended.step_s, 1.0)


def predict_parting_s(generation: GenerationView) -> float:
    """How long ranks take at most to leave a step in its middle, and to give what they have to others."""
    return GIVING_S + (0.0 if generation.plan is None else predict_fill_s(generation.plan))


def predict_fill_s(plan: Plan) -> float:
    """The time in which a pipeline fills or drains."""
    longest = max(plan.shares, default=-(-count_micro_batches(plan.global_batch, plan.micro_batch) // plan.d))
    return plan.predicted_minibatch_s * (plan.p - 1) / (longest + plan.p - 1)


def _has_only_just_begun(now: float, generation: GenerationView) -> bool:
    """So that a stream of new VMs cannot keep a job from making progress."""
    if generation.last_step is not None:
        return False
    return generation.resumed_step is None or now - generation.stepped_at < LEAST_REST_S
