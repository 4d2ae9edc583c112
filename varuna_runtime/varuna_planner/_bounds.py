# mypy: disable-error-code="untyped-decorator"
"""Compiled: what the cut of one shape tells of shapes with as many stages and at least as many micro-batches.

Letters: S micro-batch sizes, P stages, D replicas, N micro-batches of a replica, V the least possible work of the
busiest stage, k run-ahead. More micro-batches in flight leave no better cut, so that V never falls with N; from N = P +
room on, no more are in flight, so that the cut stays the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from varuna_planner import _cuts
from varuna_planner._enumerate import (
    agreement_us,
    least_finish_us,
    most_run_ahead,
    reduce_us_per_byte,
)
from varuna_planner._kernels import exposed_us, ring_us
from varuna_planner._rules import stash_cap
from varuna_planner._tables import (
    LEVELS,
    Cuts,
    Flags,
    Floats,
    Ints,
    Limits,
    Network,
    Sections,
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
    same_cut: Flags
    """Whether all with as many micro-batches or more are known to have the same cut."""
    stages: Floats
    """[S, P + 1, LEVELS, 2, 5]: of `note`."""
    before: Floats
    """[S, P + 1, LEVELS, P + 1]: of `note`."""
    impossible_n: Ints
    """From this N on (0: none is known) ..."""
    impossible_d: Ints
    """... and this D, no cut with as much room does it ..."""
    impossible_us: Floats
    """... in this time."""


@njit(nogil=True)
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


@njit(nogil=True)
def _finish_us(net: Network, of: Floats, P: int, D: int) -> float:
    """What follows the last backward of a stage, at least."""
    least: float = agreement_us(net, P, D)
    least += exposed_us(int(of[2]), D, net.hop_us, net.byte_us, of[3])
    if of[4] > 0.0:
        least += ring_us(int(of[4]), 2 * D, net.hop_us, net.byte_us)
    return least


@njit(nogil=True)
def note(
    sections: Sections,
    net: Network,
    N: int,
    times: StageTimes,
    recompute: Flags,
    starts: Ints,
    of: Floats,
    before: Floats,
) -> None:
    """before[s]: what a micro-batch's way takes from its start to stage s, and at its end from there; [P]: all of it.

    of[2, 5]: (before[s], work of stage s) of the stage that a mini-batch takes longest by, and of the first stage
    (`_note_stage`'s, backward); all of these of the stage with the longest all-reduce.
    """
    F, R, B, transfer, latency, finish = times
    P = recompute.shape[0]
    longest, heaviest = -1.0, 0
    before[0] = 0.0
    for s in range(P):
        work = F[0, s] + B[0, s] + (R[0, s] if recompute[s] else 0.0)
        if before[s] + N * work > longest:
            longest = before[s] + N * work
            of[0, 0], of[0, 1] = before[s], work
        if finish[s] > finish[heaviest]:
            heaviest = s
        hop = 2.0 * (transfer[0, s] + latency[s]) if s < P - 1 else 0.0
        before[s + 1] = before[s] + F[0, s] + B[0, s] + hop
    s = heaviest
    of[1, 0], of[1, 1] = 0.0, F[0, s] + B[0, s] + (R[0, s] if recompute[s] else 0.0)
    of[0, 3], of[1, 3] = B[0, 0], B[0, s]
    _note_stage(sections, net, starts, 0, of[0])
    _note_stage(sections, net, starts, s, of[1])


@njit(nogil=True)
def has_same_cut(of: Size, limits: Limits, known: Known, a: int, P: int, N: int, level: int) -> bool:
    """Whether the known cut, of fewer micro-batches, is the best of N, too: if its stages take no longer.

    For no cut's stages take less. What recomputes for fewer does so for more, and what fits neither way does not.
    """
    if not known.drawn[a, P, level] or known.n[a, P, level] > N:
        return False
    if known.same_cut[a, P, level]:
        return True
    sets = np.empty((4, P + 1), dtype=np.int64)
    _cuts.fill_sets(of, limits, P, N, min(level * P, most_run_ahead(limits, P, N)), sets)
    starts, recompute = known.starts[a, P, level], known.recompute[a, P, level]
    needed = 0
    for s in range(P):
        needed = max(needed, _cuts.needed_bytes(of, sets, starts, P, s, recompute[s]))
    return needed <= of.usable


@njit(nogil=True)
def least_us(
    of: Size, model: Whole, net: Network, limits: Limits, known: Known, a: int, P: int, D: int, N: int, level: int
) -> tuple[float, float]:
    """Lower bounds of the mini-batch's time: of this level's cut and of those with more room, and of this one alone."""
    if known.n[a, P, level] == 0 or known.n[a, P, level] > N:
        return 0.0, 0.0
    least = N * known.busiest_us[a, P, level] + least_finish_us(model, net, P, D)
    if not has_same_cut(of, limits, known, a, P, N, level):
        return least, least
    noted, before = known.stages[a, P, level], known.before[a, P, level]
    k = known.run_ahead[a, P, level]
    if k < 0:
        k = most_run_ahead(limits, P, N)
    path = max(noted[0, 0] + N * noted[0, 1], before[P])  # all end with the first stage
    for s in range(P):
        cap = stash_cap(limits.policy, s, P, N, k)
        if cap < N:
            path = max(path, before[s] - (-N // cap) * (before[P] - before[s]))
    alone = max(path + _finish_us(net, noted[0], P, D), N * noted[1, 1] + _finish_us(net, noted[1], P, D))
    return least, max(least, alone)


@njit(nogil=True)
def nothing_known(S: int, most_stages: int) -> Known:
    of = (S, most_stages + 1, LEVELS)
    return Known(
        np.zeros(of, dtype=np.int64),
        np.zeros(of),
        np.zeros(of, dtype=np.bool_),
        np.zeros(of, dtype=np.int64),
        np.empty((S, most_stages + 1, LEVELS, most_stages + 1), dtype=np.int16),
        np.empty((S, most_stages + 1, LEVELS, most_stages), dtype=np.bool_),
        np.zeros(of, dtype=np.bool_),
        np.zeros((S, most_stages + 1, LEVELS, 2, 5)),
        np.empty((S, most_stages + 1, LEVELS, most_stages + 1)),
        np.zeros(of, dtype=np.int64),
        np.zeros(of, dtype=np.int64),
        np.zeros(of),
    )


@njit(nogil=True)
def least_work(known: Known, a: int, P: int, N: int, level: int) -> float:
    """The most that V is known to be at least."""
    least = 0.0
    for less in range(level + 1):
        if 0 < known.n[a, P, less] <= N:
            least = max(least, known.busiest_us[a, P, less])
    return least


@njit(nogil=True)
def is_known_impossible(known: Known, a: int, P: int, D: int, N: int, level: int, best_time: float) -> bool:
    """Whether `is_possible` has found as much of fewer micro-batches and replicas and no more room."""
    for less in range(level + 1):
        n, d = known.impossible_n[a, P, less], known.impossible_d[a, P, less]
        if 0 < n <= N and d <= D and best_time <= known.impossible_us[a, P, less]:
            return True
    return False


@njit(nogil=True)
def is_possible(
    of: Size,
    model: Whole,
    sections: Sections,
    net: Network,
    limits: Limits,
    known: Known,
    a: int,
    P: int,
    D: int,
    N: int,
    level: int,
    best_time: float,
) -> bool:
    """Whether a cut with this much room, or more, could be as fast as the best; notes it where none could."""
    sets = np.empty((4, P + 1), dtype=np.int64)
    _cuts.fill_sets(of, limits, P, N, min(level * P, most_run_ahead(limits, P, N)), sets)
    most_us = best_time * (1.0 + 1e-9)
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
        known.impossible_us[a, P, level] = best_time
    return False
