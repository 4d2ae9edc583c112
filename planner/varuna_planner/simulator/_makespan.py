# mypy: disable-error-code="untyped-decorator"
"""Compiled: a policy's makespan, in half the time of a simulation.

Letters: P stages, N micro-batches of a replica, k run-ahead. Times of stages are [2, P]: row 0 for a full micro-batch,
row 1 for the last.

numba does not cache these functions. It caches the entry points of `_search`, under a key that includes their code.
"""

from __future__ import annotations

import numpy as np

from varuna_planner._compiled import compiled
from varuna_planner._rules import choose
from varuna_planner.cutting._tables import Flags, Floats, StageTimes
from varuna_planner.schedule import policies as schedule
from varuna_planner.schedule.policies import NO_TIMING, StageOrders, StageProgress

_F, _R, _B, _WAIT = 0, 1, 2, -1
_VARUNA = schedule.VARUNA
_INFINITY = np.inf


@compiled()
def _least_left(F: Floats, R: Floats, B: Floats, s: int, N: int, f: int, r: int, b: int, again: bool) -> float:
    """The work that is left to a stage after f forwards, r recomputes and b backwards."""
    left = 0.0
    if f < N:
        left += (N - 1 - f) * F[0, s] + F[1, s]
    if again and r < N:
        left += (N - 1 - r) * R[0, s] + R[1, s]
    if b < N:
        left += (N - 1 - b) * B[0, s] + B[1, s]
    return left


@compiled()
def _least_after(B: Floats, transfer: Floats, latency: Floats, finish: Floats) -> Floats:
    """[P]: the least time that follows a stage's last backward, in earlier stages or in itself."""
    after = finish.copy()
    for s in range(1, finish.shape[0]):
        after[s] = max(after[s], transfer[1, s - 1] + latency[s - 1] + B[1, s - 1] + after[s - 1])
    return after


@compiled(inline="always")  # as a call it makes `makespan` four times slower (measured)
def _comes(
    message_at: Floats,
    sent: int,
    clock: Floats,
    took: Floats,
    transfer: Floats,
    latency: Floats,
    s: int,
    link: int,
    to: int,
    n: int,
    N: int,
) -> float:
    """When message n of stage `s` arrives; before it is sent, the earliest time at which it can."""
    if n < sent:
        at: float = message_at[to, n]
        return at
    row = 1 if n == N - 1 else 0
    earliest: float = clock[s] + took[row, s] + transfer[row, link] + latency[link]
    return earliest


@compiled(inline="always")
def _send(
    message_at: Floats,
    free_at: Floats,
    transfer: Floats,
    latency: Floats,
    link: int,
    to: int,
    n: int,
    N: int,
    at: float,
) -> None:
    """Puts message n on a link, behind those before it."""
    free_at[link] = max(at, free_at[link]) + transfer[1 if n == N - 1 else 0, link]
    message_at[to, n] = free_at[link] + latency[link]


@compiled()
def makespan(policy: int, N: int, k: int, times: StageTimes, recompute: Flags, cutoff: float) -> float:
    """The result of `simulation.simulate` without jitter; a lower bound if that exceeds `cutoff`.

    Stages advance as in `_event_loop`. -1 when all wait for each other, which only happens if actions have no duration,
    and for VARUNA, whose stages know more than the messages that have arrived.
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
    left, latest, moved = P, 0.0, True
    while left > 0:
        if not moved:
            return -1.0
        moved = False
        for s in range(P):
            f, r, b = done[s, _F], done[s, _R], done[s, _B]
            if b == N:
                continue
            now, again = clock[s], recompute[s]
            least = now + _least_left(F, R, B, s, N, f, r, b, again) + after[s]
            if least > cutoff:
                return float(least)
            orders = StageOrders(policy, s, P, N, k, again)
            while b < N:
                # Only whether the next message of each kind is here matters, not how many more are.
                activation_comes = now if s == 0 else _INFINITY
                gradient_comes = now if s == P - 1 and b < f else _INFINITY
                surely = True
                if s > 0 and f < N:
                    sent = done[s - 1, _F]
                    activation_comes = _comes(activation_at, sent, clock, F, transfer, latency, s - 1, s - 1, s, f, N)
                    surely = f < sent or activation_comes > now
                if s < P - 1 and b < f:
                    sent = done[s + 1, _B]
                    gradient_comes = _comes(gradient_at, sent, clock, B, transfer, latency, s + 1, s, s, b, N)
                    surely = surely and (b < sent or gradient_comes > now)
                if not surely:
                    break
                activations = f + 1 if activation_comes <= now else f
                gradients = b + 1 if gradient_comes <= now else b
                op = choose(orders, StageProgress(f, r, b, activations, gradients), NO_TIMING)
                if op == _WAIT:
                    wake = activation_comes if activation_comes > now else _INFINITY
                    if gradient_comes > now:
                        wake = min(wake, gradient_comes)
                    if wake == _INFINITY:
                        break
                    now = wake
                elif op == _F:
                    now += F[1 if f == N - 1 else 0, s]
                    if s < P - 1:
                        _send(activation_at, down_free_at, transfer, latency, s, s + 1, f, N, now)
                    f += 1
                elif op == _R:
                    now += R[1 if r == N - 1 else 0, s]
                    r += 1
                else:
                    now += B[1 if b == N - 1 else 0, s]
                    if s > 0:
                        _send(gradient_at, up_free_at, transfer, latency, s - 1, s - 1, b, N, now)
                    b += 1
                clock[s], moved = now, True
                done[s, _F], done[s, _R], done[s, _B] = f, r, b
            if b == N:
                left -= 1
                latest = max(latest, now + finish[s])
    return latest
