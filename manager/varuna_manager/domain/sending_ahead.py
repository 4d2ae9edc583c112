"""Whether the state goes to the devices of the next shape before the present generation leaves for it.

Its workers send it while they train (`varuna.copies.rank_ahead`). It does not change in the passes of a step, so it
counts where the generation leaves in the middle of the step, and each step that ends makes it void.
"""

from __future__ import annotations

from varuna_manager.domain.leaving_step import LEAST_REST_S, predict_rest_s
from varuna_manager.domain.moving_state import predict_growth_pause_s
from varuna_manager.domain.newcomers import NewcomersView, WantedNewcomers
from varuna_manager.domain.observed import GenerationView, Proposal

__all__ = ["SENDING_SLOWDOWN", "has_sent_ahead", "is_sending_awaited"]

_LEAST_SAVED_S = 1.0
"""A shorter pause is not worth it."""
SENDING_SLOWDOWN = 3.0
"""Beside training, the state takes longer than over links of its own. Of the processors it takes what is idle."""
_PATIENCE_S = 20.0
_MOST_STEPS = 3
"""In which it is tried."""


def is_sending_awaited(
    now: float,
    generation: GenerationView,
    proposal: Proposal,
    wanted: WantedNewcomers,
    view: NewcomersView | None,
    *,
    present_rate: float,
    wait_s: float,
) -> bool:
    """Whether the generation, which may leave within its step, trains on until the state is there.

    Args:
        present_rate: its examples/s.
        wait_s: how long after the first wish for the next generation this may begin, whatever its shape.
    """
    assert proposal.plan is not None
    saved_s = predict_growth_pause_s(generation, proposal)
    sending_s = SENDING_SLOWDOWN * proposal.moves.in_place.whole_s
    if saved_s < _LEAST_SAVED_S or generation.step_s < sending_s + LEAST_REST_S:
        return False  # there is little to gain, or the step would be over before
    if view is None or view.wanted.request != wanted.request or view.sending_since is None:
        if view is not None and view.wanted.number == wanted.number and now - view.since >= wait_s:
            return False  # what is planned has changed again and again
        rest_s = predict_rest_s(now, generation)
        until_s = sending_s if rest_s >= sending_s + LEAST_REST_S else rest_s + sending_s
        return until_s * (1.0 - present_rate / proposal.plan.examples_per_s) < saved_s
    if has_sent_ahead(generation, wanted, view):
        return predict_rest_s(now, generation) < LEAST_REST_S and _is_patient(now, generation, view, sending_s)
    return _is_patient(now, generation, view, sending_s)


def _is_patient(now: float, generation: GenerationView, view: NewcomersView, sending_s: float) -> bool:
    assert view.sending_since is not None
    waited_s = now - max(view.sending_since, generation.stepped_at)
    return waited_s < _PATIENCE_S + sending_s and now - view.sending_since < _MOST_STEPS * generation.step_s


def has_sent_ahead(generation: GenerationView, wanted: WantedNewcomers, view: NewcomersView | None) -> bool:
    """Whether the state that the step under way began with is where the next shape needs it."""
    if view is None or view.wanted.request != wanted.request or view.sending_since is None:
        return False
    steps = {view.sent_steps.get(worker.rank) for worker in generation.workers}
    committed = generation.resumed_step if generation.last_step is None else generation.last_step
    (step, *others) = steps
    return not others and step is not None and step >= (committed or 0)
