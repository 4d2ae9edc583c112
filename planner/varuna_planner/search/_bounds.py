# mypy: disable-error-code="untyped-decorator"
"""Compiled: bounds from the cut of one shape for shapes with as many stages and at least as many micro-batches.

Letters: S micro-batch sizes, P stages, D replicas, N micro-batches of a replica, V the least possible work of the
busiest stage, k run-ahead. More micro-batches in flight never allow a better cut, so V never falls with N. From N = P +
room on, no more are in flight, so the cut stays the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from varuna_planner._compiled import compiled
from varuna_planner._rules import stash_cap
from varuna_planner.cutting import _cuts
from varuna_planner.cutting._kernels import agreement_us, exposed_us, ring_costs, ring_us
from varuna_planner.cutting._tables import (
    LEVELS,
    UNLIMITED,
    CutInputs,
    Cuts,
    CutShape,
    Flags,
    Floats,
    Ints,
    ModelTotals,
    NetworkCosts,
    SearchProblem,
    SectionTables,
    StageCut,
    StageTimes,
)
from varuna_planner.search._enumerate import least_finish_us, most_run_ahead, reduce_us_per_byte


class KnownBounds(NamedTuple):
    """The cuts drawn so far, at most one for each size, P and level of run-ahead: arrays [S, P + 1, LEVELS]."""

    n: Ints
    """The cut's N; 0: none is drawn."""
    busiest_us: Floats
    """V, or a time that V exceeds."""
    drawn: Flags
    """Whether the cut is known; if not, only that V exceeds busiest_us."""
    run_ahead: Ints
    """The most that memory allows at any greater N; -1: memory does not limit it."""
    starts: Cuts
    """[S, P + 1, LEVELS, P + 1]: the cut."""
    recompute: Flags
    """[S, P + 1, LEVELS, P]."""
    same_to: Ints
    """Up to this N the cut is known to stay the same ..."""
    other_from: Ints
    """... and from this N on to be another."""
    stages: Floats
    """[S, P + 1, LEVELS, 2, 5]: of `_note_path`."""
    before: Floats
    """[S, P + 1, LEVELS, P + 1]: of `_note_path`."""
    impossible_n: Ints
    """From this N on (0: none is known) ..."""
    impossible_d: Ints
    """... and from this D on, no cut with as much room takes ..."""
    impossible_us: Floats
    """... this time or less."""


@compiled()
def _note_stage(sections: SectionTables, net: NetworkCosts, starts: Ints, s: int, of: Floats) -> None:
    """Fills of[2] and of[4]: the bytes of gradients that stage s sums with its replicas, and with other stages too."""
    i, j = starts[s], starts[s + 1]
    own, tied = sections.gradient_bytes[j] - sections.gradient_bytes[i], 0
    for tie in range(net.ties.shape[0]):
        inside = outside = 0
        for section in net.ties[tie]:
            if i <= section < j:
                inside += 1
            elif section >= 0:
                outside += 1
        if inside > 0 and outside > 0:
            own -= inside * net.tie_bytes[tie]
            tied += net.tie_bytes[tie]
        elif inside > 1:
            own -= (inside - 1) * net.tie_bytes[tie]
    of[2], of[4] = max(0, own), tied


@compiled()
def _finish_us(net: NetworkCosts, of: Floats, P: int, D: int) -> float:
    """The least time that follows the last backward of a stage."""
    hop_us, byte_us = ring_costs(net, P)
    least: float = agreement_us(net, P, D)
    least += exposed_us(int(of[2]), D, hop_us, byte_us, of[3])
    if of[4] > 0.0:
        hop_us, byte_us = ring_costs(net, 1)
        least += ring_us(int(of[4]), 2 * D, hop_us, byte_us)
    return least


@compiled()
def _note_path(
    sections: SectionTables, net: NetworkCosts, N: int, times: StageTimes, cut: StageCut, of: Floats, before: Floats
) -> None:
    """Fills before[s], the time of a micro-batch's way from its start to stage s and back, and before[P], its whole
    way.

    Fills of[2, 5]. Row 0: (before[s], work) of the stage that takes a mini-batch longest, and the first stage's
    backward and bytes (`_note_stage`). Row 1: all of these of the stage with the longest all-reduce.
    """
    F, R, B, transfer, _, latency, finish = times
    P = F.shape[1]
    longest, heaviest = -1.0, 0
    before[0] = 0.0
    for s in range(P):
        work = F[0, s] + B[0, s] + (R[0, s] if cut.recompute[s] else 0.0)
        if before[s] + N * work > longest:
            longest = before[s] + N * work
            of[0, 0], of[0, 1] = before[s], work
        if finish[s] > finish[heaviest]:
            heaviest = s
        hop = 2.0 * (transfer[0, s] + latency[s]) if s < P - 1 else 0.0
        before[s + 1] = before[s] + F[0, s] + B[0, s] + hop
    s = heaviest
    of[1, 0], of[1, 1] = 0.0, F[0, s] + B[0, s] + (R[0, s] if cut.recompute[s] else 0.0)
    of[0, 3], of[1, 3] = B[0, 0], B[0, s]
    _note_stage(sections, net, cut.starts, 0, of[0])
    _note_stage(sections, net, cut.starts, s, of[1])


@compiled()
def _same_to(problem: SearchProblem, shape: CutShape) -> int:
    """Up to which N the best cut for this N stays the same: UNLIMITED if no more micro-batches get in flight."""
    most = (shape.level + 1) * shape.P + 1 if problem.limits.counts_stages else UNLIMITED
    return UNLIMITED if most <= shape.N or problem.limits.usable_bytes >= UNLIMITED else shape.N


@compiled()
def note_cut(
    problem: SearchProblem, known: KnownBounds, shape: CutShape, V: float, k: int, cut: StageCut, times: StageTimes
) -> None:
    """Records a cut as a bound for more micro-batches, unless a cut of fewer is recorded that holds for all."""
    limits, (a, P, _, N, level) = problem.limits, shape
    if known.same_to[a, P, level] == UNLIMITED and known.n[a, P, level] <= N:
        return
    known.n[a, P, level], known.busiest_us[a, P, level], known.drawn[a, P, level] = N, V, True
    known.run_ahead[a, P, level] = k if k < most_run_ahead(limits, P, N) else -1
    known.same_to[a, P, level] = _same_to(problem, shape)
    known.other_from[a, P, level] = UNLIMITED
    known.starts[a, P, level, : P + 1], known.recompute[a, P, level, :P] = cut.starts[: P + 1], cut.recompute[:P]
    noted, before = known.stages[a, P, level], known.before[a, P, level]
    _note_path(problem.sections, problem.net, N, times, cut, noted, before)


@compiled()
def note_beyond(known: KnownBounds, shape: CutShape, limit: float) -> None:
    """Records that V exceeds `limit`."""
    a, P, _, N, level = shape
    if limit > known.busiest_us[a, P, level] and known.same_to[a, P, level] < UNLIMITED:
        known.n[a, P, level], known.busiest_us[a, P, level], known.drawn[a, P, level] = N, limit, False


@compiled()
def _has_same_cut(problem: SearchProblem, of: CutInputs, known: KnownBounds, shape: CutShape) -> bool:
    """Whether the known cut, made for fewer micro-batches, is also the best for N: it is if its stages take no longer.

    With more micro-batches no cut's stages take less: those that recompute still do, and those that do not fit still
    do not.
    """
    a, P, D, N, level = shape
    if not known.drawn[a, P, level] or known.n[a, P, level] > N or known.other_from[a, P, level] <= N:
        return False
    if known.same_to[a, P, level] >= N:
        return True
    most = (level + 1) * P + 1 if problem.limits.counts_stages else N
    beyond = min(most, known.other_from[a, P, level])
    for n in (most, N + (beyond - N) // 2, N):  # an answer for more saves later checks
        if n < known.other_from[a, P, level]:
            if _fits(problem, of, known, CutShape(a, P, D, n, level)):
                known.same_to[a, P, level] = _same_to(problem, CutShape(a, P, D, n, level))
                return True
            known.other_from[a, P, level] = n
    return False


@compiled()
def _fits(problem: SearchProblem, of: CutInputs, known: KnownBounds, shape: CutShape) -> bool:
    """Whether the known cut's stages fit the memory with the same recompute."""
    sets = room_sets(problem, of, shape)
    a, P, _, _, level = shape
    starts, recompute = known.starts[a, P, level], known.recompute[a, P, level]
    needed = 0
    for s in range(P):
        needed = max(needed, _cuts.needed_bytes(of, sets, starts, P, s, recompute[s]))
    return needed <= of.usable


@compiled()
def room_sets(problem: SearchProblem, of: CutInputs, shape: CutShape) -> Ints:
    """`_cuts.fill_sets` with the run-ahead that the shape's level leaves room for."""
    limits, P, N = problem.limits, shape.P, shape.N
    sets = np.empty((4, P + 1), dtype=np.int64)
    _cuts.fill_sets(of, limits, P, N, min(shape.level * P, most_run_ahead(limits, P, N)), sets)
    return sets


@compiled()
def least_us(
    problem: SearchProblem, of: CutInputs, model: ModelTotals, known: KnownBounds, shape: CutShape, most_us: float
) -> tuple[float, float]:
    """Two lower bounds of the mini-batch's time: for this level and those with more room, and for this level alone.

    The second is only as close as it takes to exceed `most_us`.
    """
    limits, net, (a, P, D, N, level) = problem.limits, problem.net, shape
    if known.n[a, P, level] == 0 or known.n[a, P, level] > N:
        return 0.0, 0.0
    least = N * known.busiest_us[a, P, level] + least_finish_us(model, net, P, D)
    if least > most_us or not _has_same_cut(problem, of, known, shape):
        return least, least
    noted, before = known.stages[a, P, level], known.before[a, P, level]
    finish = _finish_us(net, noted[0], P, D)
    path = max(noted[0, 0] + N * noted[0, 1], before[P])  # all end with the first stage
    alone = max(least, path + finish, N * noted[1, 1] + _finish_us(net, noted[1], P, D))
    k = known.run_ahead[a, P, level]
    if k < 0:
        k = most_run_ahead(limits, P, N)
    for s in range(P):
        if alone > most_us:
            break
        cap = stash_cap(limits.policy, s, P, N, k)
        if cap < N:
            alone = max(alone, before[s] + np.ceil(N / cap) * (before[P] - before[s]) + finish)
    return least, alone


@compiled()
def nothing_known(S: int, most_stages: int) -> KnownBounds:
    of = (S, most_stages + 1, LEVELS)
    return KnownBounds(
        np.zeros(of, dtype=np.int64),
        np.zeros(of),
        np.zeros(of, dtype=np.bool_),
        np.zeros(of, dtype=np.int64),
        np.empty((S, most_stages + 1, LEVELS, most_stages + 1), dtype=np.int16),
        np.empty((S, most_stages + 1, LEVELS, most_stages), dtype=np.bool_),
        np.zeros(of, dtype=np.int64),
        np.zeros(of, dtype=np.int64),
        np.zeros((S, most_stages + 1, LEVELS, 2, 5)),
        np.empty((S, most_stages + 1, LEVELS, most_stages + 1)),
        np.zeros(of, dtype=np.int64),
        np.zeros(of, dtype=np.int64),
        np.zeros(of),
    )


@compiled()
def least_work(known: KnownBounds, shape: CutShape) -> float:
    """The largest known lower bound of V. Bounds of levels with less room hold, too."""
    a, P, _, N, level = shape
    least = 0.0
    for less in range(level + 1):
        if 0 < known.n[a, P, less] <= N:
            least = max(least, known.busiest_us[a, P, less])
    return least


@compiled()
def is_known_impossible(known: KnownBounds, shape: CutShape, best_us: float) -> bool:
    """Whether `is_possible` has ruled out as few or fewer micro-batches and replicas with no more room."""
    a, P, D, N, level = shape
    for less in range(level + 1):
        n, d = known.impossible_n[a, P, less], known.impossible_d[a, P, less]
        if 0 < n <= N and d <= D and best_us <= known.impossible_us[a, P, less]:
            return True
    return False


@compiled()
def is_possible(
    problem: SearchProblem, of: CutInputs, model: ModelTotals, known: KnownBounds, shape: CutShape, best_us: float
) -> bool:
    """Whether a cut with this much room, or more, could be as fast as the best; records it if none could."""
    sections, net, (a, P, D, N, level) = problem.sections, problem.net, shape
    sets = room_sets(problem, of, shape)
    most_us = best_us * (1.0 + 1e-9)
    for replicas in (D, (D + 1) // 2):  # ruling out fewer replicas rules out more shapes
        if _cuts.is_possible(
            of,
            sections.own_bytes,
            sections.forward_us[a, 0],
            sets,
            P,
            N,
            2.0 * model.hop_us,
            reduce_us_per_byte(net, P, replicas),
            most_us - least_finish_us(model, net, P, replicas),
            most_us - agreement_us(net, P, replicas) + net.overhead_us,
        ):
            return replicas == D
        known.impossible_n[a, P, level], known.impossible_d[a, P, level] = N, replicas
        known.impossible_us[a, P, level] = best_us
    return False
