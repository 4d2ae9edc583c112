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

from varuna_planner._enumerate import most_run_ahead, reduce_us
from varuna_planner._rules import stash_cap
from varuna_planner._tables import Flags, Floats, Ints, Limits, Network, Sections, StageTimes


class Known(NamedTuple):
    """Of the cuts drawn so far, one for each size, P and level of run-ahead: arrays [S, P + 1, LEVELS]."""

    n: Ints
    """Its N; 0: none is drawn."""
    busiest_us: Floats
    """V, or what it is known to exceed."""
    run_ahead: Ints
    """The most that the memory leaves at any greater N; -1: it does not limit it."""
    same_cut: Flags
    """Whether all with as many micro-batches or more have the same cut, so that `stages` are theirs."""
    stages: Floats
    """[S, P + 1, LEVELS, 3, 5]: of `note`."""


@njit(nogil=True)
def note(
    sections: Sections, N: int, times: StageTimes, recompute: Flags, starts: Ints, k: int, policy: int, of: Floats
) -> None:
    """of[3, 5]: of three stages of a cut, time before and after, work or round trip, gradient bytes, backward, number.

    The first is the one that a mini-batch takes longest by; the second has the longest all-reduce; the third waits
    longest for round trips.
    """
    F, R, B, transfer, latency, finish = times
    P = recompute.shape[0]
    before, longest, heaviest = 0.0, -1.0, -1.0
    for s in range(P):
        work = F[0, s] + B[0, s] + (R[0, s] if recompute[s] else 0.0)
        gradient = float(sections.gradient_bytes[starts[s + 1]] - sections.gradient_bytes[starts[s]])
        if before + N * work > longest:
            longest = before + N * work
            of[0, 0], of[0, 1], of[0, 2], of[0, 3], of[0, 4] = before, work, 0.0, 0.0, s
        if finish[s] > heaviest:
            heaviest = finish[s]
            of[1, 0], of[1, 1], of[1, 2], of[1, 3], of[1, 4] = 0.0, work, gradient, B[0, s], s
        before += F[0, s] + B[0, s] + 2.0 * (transfer[0, s] + latency[s])
    trip, longest = 0.0, -1.0
    for s in range(P - 1, -1, -1):
        hop = 2.0 * (transfer[0, s] + latency[s]) if s < P - 1 else 0.0
        trip += F[0, s] + B[0, s] + hop
        before -= F[0, s] + B[0, s] + hop
        wait = max(0.0, before) + np.ceil(N / stash_cap(policy, s, P, N, k)) * trip
        if wait > longest:
            longest = wait
            of[2, 0], of[2, 1], of[2, 2], of[2, 3], of[2, 4] = max(0.0, before), trip, 0.0, 0.0, s


@njit(nogil=True)
def least_us(
    net: Network, limits: Limits, known: Known, tied_bytes: float, a: int, P: int, D: int, N: int, level: int
) -> tuple[float, float]:
    """Lower bounds of the mini-batch's time: of this level's cut and of those with more room, and of this one alone."""
    if known.n[a, P, level] == 0 or known.n[a, P, level] > N:
        return 0.0, 0.0
    agreement = reduce_us(net, 0.0, 0.0, P, D)
    least = N * known.busiest_us[a, P, level] + agreement
    if not known.same_cut[a, P, level]:
        return least, least
    of = known.stages[a, P, level]
    k = known.run_ahead[a, P, level]
    if k < 0:
        k = most_run_ahead(limits, P, N)
    alone = max(least, of[0, 0] + N * of[0, 1] + agreement)
    alone = max(alone, N * of[1, 1] + reduce_us(net, max(0.0, of[1, 2] - tied_bytes), of[1, 3], P, D))
    rounds = np.ceil(N / stash_cap(limits.policy, int(of[2, 4]), P, N, k))
    return least, max(alone, of[2, 0] + rounds * of[2, 1] + agreement)
