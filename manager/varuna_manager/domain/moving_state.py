"""How long ranks wait for the state of the stages that they take."""

from __future__ import annotations

from varuna_manager.domain.observed import GenerationView, Proposal
from varuna_planner.liveput.morph_cost import SUMS_PART, MovingTime
from varuna_proto.plan import Plan

__all__ = ["predict_growth_pause_s", "predict_pause_s", "predict_sums_pause_s"]


def predict_pause_s(
    before: Plan, after: Plan, moving: MovingTime, rest_s: float, *, copies: bool, with_sums: bool
) -> float:
    """How long processes that go on in place, and new ones beside them, wait until they train in another shape.

    What only the update reads comes while they run the rest of the step, and so do sums of gradients. All of the state
    comes first where nobody takes another stage, because those that were there before train on at once, and where one
    replica copies its state, because another loss in the step needs the copies.

    Args:
        moving: the time in which the state moves.
        rest_s: how long they run the rest of the step.
        copies: whether ranks copy their states to others.
        with_sums: whether sums move, too.
    """
    sums_s = SUMS_PART * moving.whole_s if with_sums else 0.0
    has_same_stages = (after.p, after.stage_starts) == (before.p, before.stage_starts)
    if has_same_stages or (copies and after.d == 1):
        moving = MovingTime(moving.whole_s)
    return moving.with_sums(sums_s).predict_wait_s(rest_s)


def predict_sums_pause_s(moving: MovingTime, rest_s: float) -> float:
    """The same where the state is there, and only sums of gradients move."""
    return max(0.0, SUMS_PART * moving.whole_s - rest_s)


def predict_growth_pause_s(generation: GenerationView, proposal: Proposal) -> float:
    """How long the ranks of the proposal wait for their state at the beginning of a step."""
    before, after = generation.plan, proposal.plan
    assert before is not None
    assert after is not None
    moving, copies = proposal.moves.in_place, bool(generation.keepers)
    return predict_pause_s(before, after, moving, after.predicted_minibatch_s, copies=copies, with_sums=False)
