"""How long a mini-batch takes: the longest path of a fixed order, and an event simulation of a policy.

Letters: P stages, N micro-batches of one replica, F forward, R recompute, B backward, W the weights' half of a split
backward. Times are float microseconds. Arrays of times are [2, P]: row 0 for a full micro-batch, row 1 for the last
one, which may be smaller. Messages on a link go in order; their transfer occupies the link, their latency does not. A
boundary of several tensors is one message: they follow each other on the link, so their bytes add up and the latency
counts once. `_event_loop` has the compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from varuna_planner.cutting import _kernels
from varuna_planner.cutting._tables import StageTimes
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.schedule.actions import Action, Schedule
from varuna_planner.schedule.policies import ACTIVATION_SETS, Op, Policy
from varuna_planner.simulator import _event_loop

__all__ = [
    "Jitter",
    "MinibatchTimes",
    "Simulation",
    "fixed_order",
    "lower_bound",
    "replay",
    "simulate",
    "uniform",
]

WEIGHT_SHARE = 0.5
"""The weights' part of a split backward: both gradients of a matrix product are products of its size."""

_LEAST_LATENCY_US = 1e-3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Jitter:
    """Random disturbance. The same seed disturbs the same actions and messages alike under all policies."""

    latency_us: float = 0.0
    """Mean of an exponential delay added to each message."""
    compute: float = 0.0
    """Standard deviation of each action's time, relative."""
    seed: int = 0

    def draw_times(self, pipeline: Pipeline) -> MinibatchTimes:
        """One mini-batch's times."""
        P, N = pipeline.stages, pipeline.micro_batches
        random = np.random.default_rng(self.seed)
        action = np.stack([pipeline.forward_us, pipeline.recompute_us, pipeline.backward_us])
        action_us = random.standard_normal((3, P, N)) if self.compute > 0 else np.zeros((3, P, N))
        action_us *= self.compute
        action_us += 1.0
        np.maximum(action_us, 0.1, out=action_us)
        # Each op has a time for a full micro-batch but the last.
        action_us[:, :, :-1] *= action[:, 0, :, None]
        action_us[:, :, -1] *= action[:, 1]
        delay_us = random.standard_exponential((2, P, N)) if self.latency_us > 0 else np.zeros((2, P, N))
        delay_us *= self.latency_us
        return MinibatchTimes(action_us=action_us, delay_us=delay_us)


@dataclass(frozen=True, kw_only=True, eq=False)
class MinibatchTimes:
    """The times of all actions and messages of one mini-batch: drawn by `Jitter`, or recorded from a real run."""

    action_us: Floats
    """[F R B, P, N]: replace the pipeline's times, which stages still expect."""
    delay_us: Floats
    """[activations gradients, P that receives, N]: added to the link's latency."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """The result of a simulation."""

    makespan_us: float
    """From the first forward to the end of the last stage's finish."""
    backward_end_us: Floats
    """[P]: when each stage ends its last action."""
    stash: tuple[int, ...]
    """Per stage: the most micro-batches in flight."""
    ops: npt.NDArray[np.int8]
    """[P, 4N]: Op numbers in the order they began; most stages fill fewer."""
    counts: npt.NDArray[np.int64]
    """[P]: how many of `ops` are real."""
    spans_us: Floats
    """[begin end, P, 4N]: when each of `ops` ran; empty unless asked for."""

    @cached_property
    def actions(self) -> Schedule:
        """The order in which each stage did its work."""
        return tuple(_actions(row[:count]) for row, count in zip(self.ops, self.counts, strict=True))


def uniform(
    P: int,
    N: int,
    *,
    forward_us: float = 1.0,
    recompute_us: float = 1.0,
    backward_us: float = 2.0,
    latency_us: float = 0.0,
    last_recomputes: bool = False,
) -> Pipeline:
    """Equal stages that all recompute, by default except for the last: the setting of the paper's figure 4."""
    ones = np.ones((2, P))
    recompute = np.ones(P, dtype=np.bool_)
    recompute[-1] = last_recomputes
    return Pipeline(
        micro_batches=N,
        forward_us=ones * forward_us,
        recompute_us=ones * recompute_us,
        backward_us=ones * backward_us,
        activation_transfer_us=np.zeros((2, P)),
        gradient_transfer_us=np.zeros((2, P)),
        latency_us=np.full(P, latency_us),
        finish_us=np.zeros(P),
        recompute=recompute,
    )


def simulate(
    pipeline: Pipeline,
    policy: Policy,
    *,
    run_ahead: int = 0,
    jitter: Jitter | MinibatchTimes | None = None,
    foresight: bool = False,
    record: bool = False,
) -> Simulation:
    """Runs a policy's `choose` on every stage and gives the time of a mini-batch. Always completes.

    If stages that exchange messages in no time would wait for each other, their messages take a nanosecond.

    Args:
        jitter: random disturbance, or times that replace the pipeline's.
        foresight: stages under VARUNA know when the next stage has begun the backward that gives their gradient,
            as the paper's offline tool does. Otherwise they forecast it as the engine does, from their own times.
        record: keep when each action ran.
    """
    P, N = pipeline.stages, pipeline.micro_batches
    spans = np.zeros((2 * P, 4 * N if record else 0))
    minibatch_times = jitter.draw_times(pipeline) if isinstance(jitter, Jitter) else jitter
    times = _times(pipeline, minibatch_times, WEIGHT_SHARE if policy is Policy.ZERO_BUBBLE else 0.0)
    ran, ops, counts, stash, end = _event_loop.simulate(
        policy.code, N, run_ahead, *times, pipeline.recompute, foresight, spans
    )
    if not ran:
        timed = replace(pipeline, latency_us=np.maximum(pipeline.latency_us, _LEAST_LATENCY_US))
        return simulate(timed, policy, run_ahead=run_ahead, jitter=minibatch_times, foresight=foresight, record=record)
    return Simulation(
        makespan_us=float((end + pipeline.finish_us).max()),
        backward_end_us=end,
        stash=tuple(int(most) for most in stash),
        ops=ops,
        counts=counts,
        spans_us=spans.reshape(2, P, spans.shape[1]),
    )


def fixed_order(
    pipeline: Pipeline,
    schedule: Schedule,
    *,
    late_recompute: bool = False,
    jitter: Jitter | MinibatchTimes | None = None,
) -> float:
    """The makespan in microseconds when each stage runs its actions in the given order, each as soon as it can.

    Longest path over F_end[P, N], B_end[P, N] by a worklist of stages. `late_recompute`: R waits for the gradient.
    Raises ValueError when the order deadlocks or has more or fewer actions than micro-batches need.
    """
    P, N = pipeline.stages, pipeline.micro_batches
    if len(schedule) != P:
        raise ValueError(f"the schedule has {len(schedule)} stages, the pipeline {P}")
    counts = np.array([len(stage) for stage in schedule], dtype=np.int64)
    ops = np.zeros((P, max(1, int(counts.max()))), dtype=np.int8)
    for stage, actions in enumerate(schedule):
        ops[stage, : len(actions)] = [action.op for action in actions]
    if any(int((ops[s, : counts[s]] == op).sum()) != N for s in range(P) for op in (Op.F, Op.B)):
        raise ValueError(f"every stage needs {N} forwards and {N} backwards")
    return _play(pipeline, ops, counts, late_recompute=late_recompute, jitter=jitter)


def replay(
    pipeline: Pipeline,
    order: Simulation,
    *,
    late_recompute: bool = False,
    jitter: Jitter | MinibatchTimes | None = None,
) -> float:
    """`fixed_order` of what a simulation found: the policy's order as a static schedule."""
    return _play(pipeline, order.ops, order.counts, late_recompute=late_recompute, jitter=jitter)


def _play(
    pipeline: Pipeline,
    ops: npt.NDArray[np.int8],
    counts: npt.NDArray[np.int64],
    *,
    late_recompute: bool,
    jitter: Jitter | MinibatchTimes | None,
) -> float:
    minibatch_times = jitter.draw_times(pipeline) if isinstance(jitter, Jitter) else jitter
    times = _times(pipeline, minibatch_times, WEIGHT_SHARE if (ops == Op.W).any() else 0.0)
    completed, end = _event_loop.fixed_order(ops, counts, pipeline.micro_batches, *times, late_recompute)
    if not completed:
        raise ValueError("the schedule deadlocks: some stages wait for messages that never come")
    return float((end + pipeline.finish_us).max())


def lower_bound(pipeline: Pipeline, *, split_backward: bool = False) -> float:
    """No schedule is faster, in microseconds: max over stages of fill + N·work + drain + finish.

    `split_backward`: for schedules like ZERO_BUBBLE's, in which stages that recompute, and the last one, put off the W
    of at most ACTIVATION_SETS micro-batches.
    """
    if split_backward:
        return _split_lower_bound(pipeline)
    times = StageTimes(
        pipeline.forward_us,
        pipeline.recompute_us,
        pipeline.backward_us,
        pipeline.activation_transfer_us,
        pipeline.gradient_transfer_us,
        pipeline.latency_us,
        pipeline.finish_us,
    )
    N = pipeline.micro_batches
    return float(_kernels.lower_bound(N, times, pipeline.recompute, np.full(pipeline.stages, N)))


def _split_lower_bound(pipeline: Pipeline) -> float:
    N, P = pipeline.micro_batches, pipeline.stages
    per_row = np.array([N - 1, 1])
    work = pipeline.forward_us + pipeline.backward_us + pipeline.recompute_us * pipeline.recompute
    weight = pipeline.backward_us * WEIGHT_SHARE
    hop = (pipeline.activation_transfer_us + pipeline.latency_us + pipeline.forward_us)[1 if N == 1 else 0]
    fill = np.concatenate([np.zeros(1), np.cumsum(hop)[:-1]])
    busy = fill + per_row @ work
    bound = float((busy + pipeline.finish_us).max())
    sent = -np.inf  # when the last B of the stage after can end
    for s in reversed(range(P)):
        put_off = min(N, ACTIVATION_SETS) if pipeline.recompute[s] or s == P - 1 else N
        input_gradient = pipeline.backward_us[1, s] - weight[1, s]
        link = pipeline.gradient_transfer_us[1, s] + pipeline.latency_us[s]
        sent = max(sent + link + input_gradient, busy[s] - put_off * weight[:, s].max())
        bound = max(bound, sent + weight[1, s] + float(pipeline.finish_us[s]))
    return bound


def _times(
    pipeline: Pipeline, minibatch_times: MinibatchTimes | None, weight_share: float
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """The arrays that the loops read; backwards are split into B and W by `weight_share`."""
    backward = pipeline.backward_us
    usual = np.stack(
        [pipeline.forward_us, pipeline.recompute_us, backward * (1.0 - weight_share), backward * weight_share]
    )
    actual = np.zeros((4, 0, 0))
    delay = np.zeros((2, 0, 0))
    if minibatch_times is not None:
        whole = minibatch_times.action_us[Op.B]
        actual = np.stack([*minibatch_times.action_us[:2], whole * (1.0 - weight_share), whole * weight_share])
        delay = minibatch_times.delay_us
    transfer = np.stack([pipeline.activation_transfer_us, pipeline.gradient_transfer_us])
    return usual, actual, transfer, pipeline.latency_us, delay


def _actions(ops: npt.NDArray[np.int8]) -> tuple[Action, ...]:
    done = [0] * len(Op)
    actions = []
    for code in ops:
        actions.append(Action(Op(int(code)), done[code]))
        done[code] += 1
    return tuple(actions)
