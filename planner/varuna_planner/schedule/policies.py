"""What a stage does next: one pure rule, called by the engine for real and by the simulator for time.

Letters: P stages, N micro-batches of a replica, F forward, R recompute, B backward, W the part of a split backward that
gives the weights' gradients, k run-ahead (forwards in flight beyond P - s). A micro-batch is in flight from its F to
its B (its W, where backwards are split).

Micro-batches go in order in every stage (F0 F1 ..., B0 B1 ...), so an op alone identifies its micro-batch, and messages
on a link can never mismatch. This module imports neither numba nor torch; `choose` uses plain numbers so that
`varuna_planner._rules` can compile it as it stands.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple


class Op(IntEnum):
    """An action of a stage on its next micro-batch."""

    F = 0
    R = 1
    B = 2
    W = 3
    """Only where the policy splits the backward; B is then the gradient of the inputs alone."""


WAIT: Final = -1
"""What `choose` returns when nothing can be done until a message arrives (or nothing is left to do)."""


class Policy(StrEnum):
    """How a stage orders its work.

    GPIPE: all F, then all B (Huang et al. 2019). ONE_F_ONE_B: P - s forwards, then B and F in turn, with R once the
    gradient is here (Narayanan et al. 2021). VARUNA: the paper's three rules and its opportunistic deviation (Varuna,
    section 3.2). WORK_CONSERVING, the default: an idle stage takes any op that is ready, backwards first. ZERO_BUBBLE:
    work-conserving with a split backward, whose W fills what would be stalls (Qi et al. 2024); it can only be
    simulated, to show its gain.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    VARUNA = "varuna"
    WORK_CONSERVING = "work-conserving"
    ZERO_BUBBLE = "zero-bubble"

    @property
    def executable(self) -> bool:
        """Whether the engine can run it."""
        return self is not Policy.ZERO_BUBBLE

    @property
    def code(self) -> int:
        """The number by which `choose` knows the policy."""
        return _CODES[self]


# Policy.code of each, as numbers that numba takes as constants.
GPIPE: Final = 0
ONE_F_ONE_B: Final = 1
VARUNA: Final = 2
WORK_CONSERVING: Final = 3
ZERO_BUBBLE: Final = 4

_CODES: Final = MappingProxyType(
    {
        Policy.GPIPE: GPIPE,
        Policy.ONE_F_ONE_B: ONE_F_ONE_B,
        Policy.VARUNA: VARUNA,
        Policy.WORK_CONSERVING: WORK_CONSERVING,
        Policy.ZERO_BUBBLE: ZERO_BUBBLE,
    }
)

ACTIVATION_SETS: Final = 2
"""Micro-batches whose activations a stage keeps under ZERO_BUBBLE for a W that is put off, the current one among them.
One more than without the split already gives the whole gain (measured)."""

_F: Final = 0
_R: Final = 1
_B: Final = 2
_W: Final = 3
_WAIT: Final = -1


def require_executable(policy: Policy) -> None:
    """Raises ValueError, naming those that will do, for a policy that only the simulator knows."""
    if not policy.executable:
        known = ", ".join(known.value for known in Policy if known.executable)
        raise ValueError(f"policy {policy.value!r} can only be simulated, not run: choose one of {known}")


def parse_policy(name: str) -> Policy:
    """The policy of a name. Raises ValueError that lists the known ones."""
    try:
        return Policy(name)
    except ValueError:
        raise ValueError(f"policy {name!r} is not known: choose one of {', '.join(Policy)}") from None


def stash_cap(policy: int, stage: int, P: int, N: int, run_ahead: int) -> int:
    """The number of micro-batches in flight at which `choose` starts no further forward on a stage."""
    if policy == GPIPE:
        return N
    if policy == ONE_F_ONE_B:
        return min(N, P - stage)
    if policy == ZERO_BUBBLE:
        # One set more than the work-conserving policy, for a W that is put off; see `choose_split`.
        return min(N, (1 if stage == P - 1 else P - stage + run_ahead) + ACTIVATION_SETS - 1)
    return min(N, P - stage + run_ahead)


def most_in_flight(policy: int, stage: int, P: int, N: int, run_ahead: int) -> int:
    """The most micro-batches that a stage ever has in flight: what its memory must hold.

    The last stage has its gradient from its own forward, so every policy but GPIPE then runs B before another F.
    """
    cap = N
    if policy == ONE_F_ONE_B:
        cap = P - stage
    elif policy == ZERO_BUBBLE:
        cap = (1 if stage == P - 1 else P - stage + run_ahead) + ACTIVATION_SETS - 1
    elif policy != GPIPE:
        cap = 1 if stage == P - 1 else P - stage + run_ahead
    return min(N, cap)


class StageOrders(NamedTuple):
    """What a plan fixes for one stage: everything that `choose` needs and that a mini-batch does not change."""

    policy: int
    """Policy.code."""
    stage: int
    P: int
    N: int
    run_ahead: int
    recompute: bool
    """Whether the stage stashes only inputs, so that it needs R before B."""


class StageProgress(NamedTuple):
    """How far one stage is in a mini-batch, in micro-batches."""

    forwards: int
    """Done by this stage."""
    recomputes: int
    """Done; read only if the stage recomputes."""
    backwards: int
    """Done; of a split backward, those of the inputs."""
    activations: int
    """Micro-batches whose inputs have arrived; the first stage passes N."""
    gradients: int
    """Micro-batches whose output gradients have arrived; the last stage passes `forwards`."""


class RecomputeTiming(NamedTuple):
    """When VARUNA starts a recompute so that it ends as the gradient arrives; the other policies do not read it."""

    forward_us: float
    """This stage's usual time."""
    recompute_us: float
    """This stage's usual time."""
    gradient_due_us: float
    """Time until the next stage should end the backward whose gradient comes next: 0 when that is overdue, -1 when it
    is not known. VARUNA then recomputes only when the gradient is here: never wrong, sometimes late."""


NO_TIMING: Final = RecomputeTiming(0.0, 0.0, -1.0)


def choose(orders: StageOrders, progress: StageProgress, timing: RecomputeTiming) -> int:
    """The next action of a stage that is idle: an Op's number, or WAIT."""
    policy, stage, P, N, run_ahead, recompute = orders
    forwards, recomputes, backwards, activations, gradients = progress
    in_flight = forwards - backwards
    can_forward = forwards < N and forwards < activations
    recomputed = in_flight > 0 and (not recompute or recomputes > backwards)
    gradient_here = in_flight > 0 and gradients > backwards
    if policy in (GPIPE, ONE_F_ONE_B):
        # A fixed order: what comes next is known, the only question is whether it can start.
        if forwards < N and (policy == GPIPE or in_flight < P - stage):
            return _F if can_forward else _WAIT
        if in_flight > 0 and not recomputed and (gradient_here or policy == GPIPE):
            return _R
        return _B if gradient_here and recomputed else _WAIT
    if gradient_here:
        return _B if recomputed else _R
    can_forward = can_forward and in_flight < P - stage + run_ahead
    if policy == VARUNA:
        if in_flight > 0 and recompute:
            if recomputed:
                # Rule 2: a recomputed micro-batch waits for its gradient. The deviation: unless that is overdue.
                return _F if timing.gradient_due_us == 0.0 and can_forward else _WAIT
            # Rule 1: R starts in time for the gradient, so before an F that would make it late.
            usual_us = timing.forward_us + timing.recompute_us
            if timing.gradient_due_us >= 0.0 and (timing.gradient_due_us < usual_us or not can_forward):
                return _R
        return _F if can_forward else _WAIT
    if can_forward and in_flight < P - stage:
        return _F
    if in_flight > 0 and not recomputed:
        return _R
    return _F if can_forward else _WAIT


def choose_split(orders: StageOrders, progress: StageProgress, weight_gradients: int) -> int:
    """`choose` of ZERO_BUBBLE, whose backward is B (the inputs' gradient, which others wait for) and later W.

    The work-conserving rule, with W as what there is to do when nothing else is, or when another micro-batch's
    activations would be one set too many. `weight_gradients` counts the W that this stage has done.
    """
    _, stage, P, N, run_ahead, recompute = orders
    forwards, recomputes, input_gradients, activations, gradients = progress
    in_flight = forwards - input_gradients
    recomputed = in_flight > 0 and (not recompute or recomputes > input_gradients)
    gradient_here = in_flight > 0 and gradients > input_gradients
    room = recomputes - weight_gradients < ACTIVATION_SETS  # for a recompute
    if gradient_here:
        if recomputed:
            return _B
        return _R if room else _W
    cap = (1 if stage == P - 1 else P - stage + run_ahead) + ACTIVATION_SETS - 1
    can_forward = forwards < N and forwards < activations and forwards - weight_gradients < cap
    if can_forward and in_flight < P - stage:
        return _F
    if in_flight > 0 and not recomputed and room:
        return _R
    if weight_gradients < input_gradients:
        return _W
    return _F if can_forward and in_flight < P - stage + run_ahead else _WAIT
