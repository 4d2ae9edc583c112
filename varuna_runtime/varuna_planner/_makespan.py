# mypy: disable-error-code="untyped-decorator"
"""Compiled: the makespan of a policy, quickly.

Letters: P stages, N micro-batches of a replica, k run-ahead. Times of stages are [2, P]: row 0 for a full micro-batch,
row 1 for the last.

Nothing here is cached by itself: the entry points of `_search` are, whose key includes the code of these functions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from varuna_planner import schedule
from varuna_planner._rules import choose
from varuna_planner._tables import Flags, Floats, StageTimes

_F, _R, _B, _WAIT = 0, 1, 2, -1
_VARUNA = schedule.VARUNA
_INFINITY = np.inf


@njit(nogil=True)
def _least_left(F: Floats, R: Floats, B: Floats, s: int, N: int, f: int, r: int, b: int, again: bool) -> float:
    """Work that a stage still has to do after so many forwards, recomputes and backwards."""
    left = 0.0
    if f < N:
        left += (N - 1 - f) * F[0, s] + F[1, s]
    if again and r < N:
        left += (N - 1 - r) * R[0, s] + R[1, s]
    if b < N:
        left += (N - 1 - b) * B[0, s] + B[1, s]
    return left


@njit(nogil=True)
def _least_after(B: Floats, transfer: Floats, latency: Floats, finish: Floats) -> Floats:
    """[P]: what at least follows a stage's last backward, in the stages before or in itself."""
    after = finish.copy()
    for s in range(1, finish.shape[0]):
        after[s] = max(after[s], transfer[1, s - 1] + latency[s - 1] + B[1, s - 1] + after[s - 1])
    return after


@njit(nogil=True)
def makespan(policy: int, N: int, k: int, times: StageTimes, recompute: Flags, cutoff: float) -> float:
    """What `simulator.simulate` gives without jitter, some ten times faster; a lower bound where that exceeds `cutoff`.

    There is no queue of events: each stage in turn goes on for as long as it can tell what has arrived. A message that
    is not sent yet cannot arrive before its sender, from where that stands now, has worked and the link carried it;
    until then the stage acts as if there were none, and from then on it lets the others go on first. -1 when all
    wait for each other, which takes actions of no duration, or with VARUNA, whose stages know more than messages tell.
    """
    if policy == _VARUNA:
        return -1.0
    F, R, B, transfer, _, latency, finish = times
    P = recompute.shape[0]
    activation_at, gradient_at = np.empty((P, N)), np.empty((P, N))
    done = np.zeros((P, 3), dtype=np.int64)  # [stage][op]
    clock = np.zeros(P)  # a stage's next action does not begin before
    down_free_at, up_free_at = np.zeros(P), np.zeros(P)
    after = _least_after(B, transfer, latency, finish)
    left, latest = P, 0.0
    moved = True
    ended = np.zeros(P, dtype=np.bool_)
    while left > 0:
        if not moved:
            return -1.0
        moved = False
        for s in range(P):
            if ended[s]:
                continue
            f, r, b = done[s, _F], done[s, _R], done[s, _B]
            now, again = clock[s], recompute[s]
            least = now + _least_left(F, R, B, s, N, f, r, b, again) + after[s]
            if least > cutoff:
                return float(least)
            while b < N:
                # Only whether the next message of each kind is here matters, not how many more are.
                activation_comes, gradient_comes = _INFINITY, _INFINITY
                surely = True
                if s == 0:
                    activation_comes = now
                elif f < N:
                    if f < done[s - 1, _F]:
                        activation_comes = activation_at[s, f]
                    else:
                        row = 1 if f == N - 1 else 0
                        activation_comes = clock[s - 1] + F[row, s - 1] + transfer[row, s - 1] + latency[s - 1]
                        surely = activation_comes > now
                if s == P - 1:
                    gradient_comes = now if b < f else _INFINITY
                elif b < f:
                    if b < done[s + 1, _B]:
                        gradient_comes = gradient_at[s, b]
                    else:
                        row = 1 if b == N - 1 else 0
                        gradient_comes = clock[s + 1] + B[row, s + 1] + transfer[row, s] + latency[s]
                        surely = surely and gradient_comes > now
                if not surely:
                    break
                activations = f + 1 if activation_comes <= now else f
                gradients = b + 1 if gradient_comes <= now else b
                op = choose(policy, s, P, N, k, again, f, r, b, activations, gradients, 0.0, 0.0, -1.0)
                if op == _WAIT:
                    wake = _INFINITY
                    if activation_comes > now:
                        wake = activation_comes
                    if gradient_comes > now:
                        wake = min(wake, gradient_comes)
                    if wake == _INFINITY:
                        break
                    now = wake
                elif op == _F:
                    row = 1 if f == N - 1 else 0
                    now += F[row, s]
                    if s < P - 1:
                        down_free_at[s] = max(now, down_free_at[s]) + transfer[row, s]
                        activation_at[s + 1, f] = down_free_at[s] + latency[s]
                    f += 1
                    done[s, _F] = f
                elif op == _R:
                    now += R[1 if r == N - 1 else 0, s]
                    r += 1
                    done[s, _R] = r
                else:
                    row = 1 if b == N - 1 else 0
                    now += B[row, s]
                    if s > 0:
                        up_free_at[s - 1] = max(now, up_free_at[s - 1]) + transfer[row, s - 1]
                        gradient_at[s - 1, b] = up_free_at[s - 1] + latency[s - 1]
                    b += 1
                    done[s, _B] = b
                clock[s] = now
                moved = True
            if b == N:
                ended[s] = True
                left -= 1
                latest = max(latest, now + finish[s])
    return latest
