# mypy: disable-error-code="untyped-decorator"
"""Compiled: what the cut of one shape tells of shapes with as many stages and at least as many micro-batches.

Letters: S micro-batch sizes, P stages, D replicas, N micro-batches of a replica, V the least possible work of the
busiest stage, k run-ahead. More micro-batches in flight leave no better cut, so that V never falls with N; from N = P +
room on, no more are in flight, so that the cut stays the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from varuna_planner import _cuts
from varuna_planner._compiled import compiled
from varuna_planner._enumerate import least_finish_us, most_run_ahead, reduce_us_per_byte
from varuna_planner._kernels import agreement_us, exposed_us, ring_us
from varuna_planner._rules import stash_cap
from varuna_planner._tables import (
    LEVELS,
    UNLIMITED,
    Cut,
    Cuts,
    Flags,
    Floats,
    Ints,
    Network,
    Problem,
    Sections,
    Shape,
    Size,
    StageTimes,
    Whole,
)


class Known(NamedTuple):
    """Of the cuts drawn so far, one for each size, P and level of run-ahead: arrays [S, P + 1, LEVELS]."""

    n: Ints
    """Its N; 0: none is drawn."""
    busiest_us: Floats
    """V, or what it is known to exceed."""
    drawn: Flags
    """Whether the cut is known: else only that V exceeds busiest_us."""
    run_ahead: Ints
    """The most that the memory leaves at any greater N; -1: it does not limit it."""
    starts: Cuts
    """[S, P + 1, LEVELS, P + 1]: the cut."""
    recompute: Flags
    """[S, P + 1, LEVELS, P]."""
    same_to: Ints
    """With so many micro-batches the cut is known to be the same ..."""
    other_from: Ints
    """... and from so many on to be another."""
    stages: Floats
    """[S, P + 1, LEVELS, 2, 5]: of `_note_path`."""
    before: Floats
    """[S, P + 1, LEVELS, P + 1]: of `_note_path`."""
    impossible_n: Ints
    """From this N on (0: none is known) ..."""
    impossible_d: Ints
    """... and this D, no cut with as much room does it ..."""
    impossible_us: Floats
    """... in this time."""


@compiled()
def _note_stage(sections: Sections, net: Network, starts: Ints, s: int, of: Floats) -> None:
    """of[2], of[4]: bytes of gradients that stage s sums with its replicas alone, and with other stages too."""
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
def _finish_us(net: Network, of: Floats, P: int, D: int) -> float:
    """What follows the last backward of a stage, at least."""
    least: float = agreement_us(net, P, D)
    least += exposed_us(int(of[2]), D, net.hop_us, net.byte_us, of[3])
    if of[4] > 0.0:
        least += ring_us(int(of[4]), 2 * D, net.hop_us, net.byte_us)
    return least


@compiled()
def _note_path(
    sections: Sections, net: Network, N: int, times: StageTimes, cut: Cut, of: Floats, before: Floats
) -> None:
    """before[s]: what a micro-batch's way takes from its start to stage s, and at its end from there; [P]: all of it.

    of[2, 5]: (before[s], work of stage s) of the stage that a mini-batch takes longest by, and of the first stage
    (`_note_stage`'s, backward); all of these of the stage with the longest all-reduce.
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
def _same_to(problem: Problem, shape: Shape) -> int:
    """With how many micro-batches a cut is the same, that is the best of N: where no more get in flight, with any."""
    most = (shape.level + 1) * shape.P + 1 if problem.limits.counts_stages else UNLIMITED
    return UNLIMITED if most <= shape.N or problem.limits.usable_bytes >= UNLIMITED else shape.N


@compiled()
def note_cut(problem: Problem, known: Known, shape: Shape, V: float, k: int, cut: Cut, times: StageTimes) -> None:
    """Keeps what a cut tells of more micro-batches, but for where one of fewer is kept that tells of all."""
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
def note_beyond(known: Known, shape: Shape, limit: float) -> None:
    """Keeps that V exceeds `limit`."""
    a, P, _, N, level = shape
    if limit > known.busiest_us[a, P, level] and known.same_to[a, P, level] < UNLIMITED:
        known.n[a, P, level], known.busiest_us[a, P, level], known.drawn[a, P, level] = N, limit, False


@compiled()
def _has_same_cut(problem: Problem, of: Size, known: Known, shape: Shape) -> bool:
    """Whether the known cut, of fewer micro-batches, is the best of N, too: if its stages take no longer.

    For no cut's stages take less. What recomputes for fewer does so for more, and what fits neither way does not.
    """
    a, P, D, N, level = shape
    if not known.drawn[a, P, level] or known.n[a, P, level] > N or known.other_from[a, P, level] <= N:
        return False
    if known.same_to[a, P, level] >= N:
        return True
    most = (level + 1) * P + 1 if problem.limits.counts_stages else N
    beyond = min(most, known.other_from[a, P, level])
    for n in (most, N + (beyond - N) // 2, N):  # what is found of more saves asking again
        if n < known.other_from[a, P, level]:
            if _fits(problem, of, known, Shape(a, P, D, n, level)):
                known.same_to[a, P, level] = _same_to(problem, Shape(a, P, D, n, level))
                return True
            known.other_from[a, P, level] = n
    return False


@compiled()
def _fits(problem: Problem, of: Size, known: Known, shape: Shape) -> bool:
    """Whether the known cut's stages do, with what they recompute."""
    sets = room_sets(problem, of, shape)
    a, P, _, _, level = shape
    starts, recompute = known.starts[a, P, level], known.recompute[a, P, level]
    needed = 0
    for s in range(P):
        needed = max(needed, _cuts.needed_bytes(of, sets, starts, P, s, recompute[s]))
    return needed <= of.usable


@compiled()
def room_sets(problem: Problem, of: Size, shape: Shape) -> Ints:
    """`_cuts.fill_sets` with the run-ahead that the shape's level leaves room for."""
    limits, P, N = problem.limits, shape.P, shape.N
    sets = np.empty((4, P + 1), dtype=np.int64)
    _cuts.fill_sets(of, limits, P, N, min(shape.level * P, most_run_ahead(limits, P, N)), sets)
    return sets


@compiled()
def least_us(
    problem: Problem, of: Size, model: Whole, known: Known, shape: Shape, most_us: float
) -> tuple[float, float]:
    """Lower bounds of the mini-batch's time: of this level's cut and of those with more room, and of this one alone.

    The latter is no closer than it takes to exceed `most_us`.
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
def nothing_known(S: int, most_stages: int) -> Known:
    of = (S, most_stages + 1, LEVELS)
    return Known(
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
def least_work(known: Known, shape: Shape) -> float:
    """The most that V is known to be at least: with more in flight no cut gets better."""
    a, P, _, N, level = shape
    least = 0.0
    for less in range(level + 1):
        if 0 < known.n[a, P, less] <= N:
            least = max(least, known.busiest_us[a, P, less])
    return least


@compiled()
def is_known_impossible(known: Known, shape: Shape, best_us: float) -> bool:
    """Whether `is_possible` has found as much of fewer micro-batches and replicas and no more room."""
    a, P, D, N, level = shape
    for less in range(level + 1):
        n, d = known.impossible_n[a, P, less], known.impossible_d[a, P, less]
        if 0 < n <= N and d <= D and best_us <= known.impossible_us[a, P, less]:
            return True
    return False


@compiled()
def is_possible(problem: Problem, of: Size, model: Whole, known: Known, shape: Shape, best_us: float) -> bool:
    """Whether a cut with this much room, or more, could be as fast as the best; notes it where none could."""
    sections, net, (a, P, D, N, level) = problem.sections, problem.net, shape
    sets = room_sets(problem, of, shape)
    most_us = best_us * (1.0 + 1e-9)
    for replicas in (D, (D + 1) // 2):  # what fewer could not do either says more
        if _cuts.is_possible(
            of,
            sections.own_bytes,
            sections.forward_us[a, 0],
            sets,
            P,
            N,
            2.0 * model.hop_us,
            reduce_us_per_byte(net, replicas),
            most_us - least_finish_us(model, net, P, replicas),
            most_us - agreement_us(net, P, replicas) + net.overhead_us,
        ):
            return replicas == D
        known.impossible_n[a, P, level], known.impossible_d[a, P, level] = N, replicas
        known.impossible_us[a, P, level] = best_us
    return False
