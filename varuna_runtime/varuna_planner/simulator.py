"""How long a mini-batch takes: the longest path of a fixed order, and an event simulation of a policy.

Letters: P stages, N micro-batches of one replica, F forward, R recompute, B backward. Times are float microseconds.
Arrays of times are [2, P]: row 0 for a full micro-batch, row 1 for the last one, which may be smaller. Messages on a
link go in order; their transfer occupies the link, their latency does not. Compiled code lies in `_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from varuna_planner import _kernels
from varuna_planner.actions import Action, Schedule
from varuna_planner.schedule import Op, Policy

__all__ = ["Jitter", "Pipeline", "Simulation", "fixed_order", "lower_bound", "simulate", "uniform"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """One replica's pipeline with its times. A link stands in the column of its earlier stage; the last is not read."""

    micro_batches: int
    """N."""
    forward_us: Floats
    """[2, P], as the other times unless said."""
    recompute_us: Floats
    backward_us: Floats
    activation_transfer_us: Floats
    """Of activations from stage s to s + 1; occupies the link."""
    gradient_transfer_us: Floats
    """Of gradients from stage s + 1 to s."""
    latency_us: Floats
    """[P]: added to each message in either direction."""
    finish_us: Floats
    """[P]: what follows a stage's last backward: all-reduce, tied weights."""
    recompute: npt.NDArray[np.bool_]
    """[P]: whether the stage recomputes."""

    @property
    def stages(self) -> int:
        return int(self.recompute.shape[0])


@dataclass(frozen=True)
class Jitter:
    """Random disturbance of a simulation."""

    latency_us: float = 0.0
    """Mean of an exponential delay added to each message."""
    compute: float = 0.0
    """Standard deviation of each action's time, relative."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What a simulation found."""

    makespan_us: float
    """From the first forward to the end of the last stage's finish."""
    backward_end_us: Floats
    """[P]: when each stage ends its last backward."""
    stash: tuple[int, ...]
    """Per stage: the most micro-batches in flight."""
    ops: npt.NDArray[np.int8]
    """[P, 3N]: Op numbers in the order they began; a stage without recompute fills 2N of them."""
    counts: npt.NDArray[np.int64]
    """[P]: how many of `ops` are real."""

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
    """A pipeline of equal stages that all recompute but, unless said, the last: the setting of the paper's figure 4."""
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


def simulate(pipeline: Pipeline, policy: Policy, *, run_ahead: int = 0, jitter: Jitter | None = None) -> Simulation:
    """Runs a policy's `choose` on every stage and gives the time of a mini-batch. Always completes.

    Each event costs a scan of the P stages (ANCHORS: 2.3 ms for 36 × 683 with jitter).
    """
    jitter = jitter or Jitter()
    ops, counts, stash, backward_end = _kernels.simulate(
        policy.code,
        pipeline.micro_batches,
        run_ahead,
        *_times(pipeline),
        pipeline.recompute,
        jitter.latency_us,
        jitter.compute,
        jitter.seed,
    )
    return Simulation(
        makespan_us=float((backward_end + pipeline.finish_us).max()),
        backward_end_us=backward_end,
        stash=tuple(int(most) for most in stash),
        ops=ops,
        counts=counts,
    )


def fixed_order(pipeline: Pipeline, schedule: Schedule, *, late_recompute: bool = False) -> float:
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
    completed, backward_end = _kernels.fixed_order(ops, counts, N, *_times(pipeline), late_recompute)
    if not completed:
        raise ValueError("the schedule deadlocks: run varuna_planner.actions.check on it to see where")
    return float((backward_end + pipeline.finish_us).max())


def lower_bound(pipeline: Pipeline) -> float:
    """No schedule is faster, in microseconds: max over stages of fill + N·work + drain + finish."""
    return float(
        _kernels.lower_bound(
            pipeline.micro_batches,
            *_times(pipeline),
            pipeline.recompute,
            pipeline.finish_us,
            np.full(pipeline.stages, pipeline.micro_batches),
        )
    )


def _times(pipeline: Pipeline) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
    return (
        pipeline.forward_us,
        pipeline.recompute_us,
        pipeline.backward_us,
        pipeline.activation_transfer_us,
        pipeline.gradient_transfer_us,
        pipeline.latency_us,
    )


def _actions(ops: npt.NDArray[np.int8]) -> tuple[Action, ...]:
    done = [0, 0, 0]
    actions = []
    for code in ops:
        actions.append(Action(Op(int(code)), done[code]))
        done[code] += 1
    return tuple(actions)
