# mypy: disable-error-code="untyped-decorator"
"""The simulator's compiled loops; `simulator` says what they compute.

Letters: P stages, N micro-batches. Messages are of two kinds: 0 activations, 1 gradients; a link stands in the column
of its earlier stage. Times come as

    usual      [4 ops, 2 rows, P]    row 0 for a full micro-batch, row 1 for the last
    actual     [4 ops, P, N]         what actions take this time; empty: as usual
    transfer   [2 kinds, 2 rows, P]  occupies the link
    latency    [P]                   does not
    delay      [2 kinds, P that receives, N]  on top of the latency; empty: none

They and the state are separate arrays: gathered in tuples they make these loops ten times slower (numba counts
references to each, measured).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from varuna_planner import schedule
from varuna_planner._rules import RULES, choose, choose_split

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_F, _R, _B, _W, _WAIT = 0, 1, 2, 3, -1
_VARUNA, _ZERO_BUBBLE = schedule.VARUNA, schedule.ZERO_BUBBLE
_NEVER = np.inf


@njit(cache=True, nogil=True)
def _send(
    message_at: Floats, link_free_at: Floats, to: int, link: int, n: int, at: float, transfer: float, beyond: float
) -> float:
    """Puts a message on a link, behind those before it. When it arrives: `beyond` after it has left the link."""
    leaves = max(at, link_free_at[link]) + transfer
    link_free_at[link] = leaves
    arrives: float = leaves + beyond
    if n > 0:
        arrives = max(arrives, message_at[to, n - 1])
    message_at[to, n] = arrives
    return arrives


@njit(cache=True, nogil=True)
def _count_arrived(message_at: Floats, s: int, known: int, now: float) -> int:
    """How many messages are here, `known` of which were before."""
    N = message_at.shape[1]
    while known < N and message_at[s, known] <= now:
        known += 1
    return known


@njit(cache=True, nogil=True)
def _next_at(message_at: Floats, s: int, arrived: int) -> float:
    """When the next message comes; never, as long as it is not sent."""
    at: float = message_at[s, arrived] if arrived < message_at.shape[1] else _NEVER
    return at


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})  # so that the minimum is vectorised
def _first_of(look_at: Floats) -> int:
    earliest = look_at[0]
    for at in look_at:
        earliest = min(earliest, at)
    s = 0
    while look_at[s] != earliest:
        s += 1
    return s


@njit(cache=True, nogil=True)
def _expect(gradient_at: Floats, s: int, arrived: int, first_forward_at: float, F: float, B: float) -> float:
    """When varuna.pipeline.forecast expects the next gradient: from usual times and what has arrived, no more."""
    newest_at: float = gradient_at[s, max(0, arrived - 1)]
    return newest_at + B if arrived > 0 else first_forward_at + (gradient_at.shape[0] - 1 - s) * (F + B)


@njit(cache=True, nogil=True, inline="always")
def _ask(
    policy: int,
    s: int,
    N: int,
    run_ahead: int,
    recompute: bool,
    done: Ints,
    activations: int,
    gradients: int,
    usual: Floats,
    due_us: float,
) -> int:
    """The stage's choice."""
    P = done.shape[0]
    F, R, B, W = done[s, _F], done[s, _R], done[s, _B], done[s, _W]
    if policy == _ZERO_BUBBLE:
        split: int = choose_split(s, P, N, run_ahead, recompute, F, R, B, W, activations, gradients)
        return split
    row = 1 if F == N - 1 else 0
    forward, again = usual[_F, row, s], usual[_R, row, s]
    whole: int = choose(policy, s, P, N, run_ahead, recompute, F, R, B, activations, gradients, forward, again, due_us)
    return whole


def _make_simulate(rules: int) -> Any:
    @njit(cache=True, nogil=True)
    def simulate(
        policy: int,
        N: int,
        run_ahead: int,
        usual: Floats,
        actual: Floats,
        transfer: Floats,
        latency: Floats,
        delay: Floats,
        recompute: npt.NDArray[np.bool_],
        foresight: bool,
        spans: Floats,
    ) -> tuple[npt.NDArray[np.int8], Ints, Ints, Floats]:
        """(ops[P, 4N], their counts[P], most in flight[P], end of each stage's last action[P]).

        Also fills spans[2P, 4N], begins and then ends of the stages' actions, unless that is empty.
        """
        assert rules != -1  # a use, so that it is part of the cache's key
        P = recompute.shape[0]
        leaves_flight = _W if policy == _ZERO_BUBBLE else _B
        activation_at, gradient_at = np.full((P, N), _NEVER), np.full((P, N), _NEVER)
        activation_at[0] = 0.0
        due_at = np.full((P, N), _NEVER)  # with foresight: when the next stage should end a backward it has begun
        ops, counts = np.zeros((P, 4 * N), dtype=np.int8), np.zeros(P, dtype=np.int64)
        done, arrived = np.zeros((P, 4), dtype=np.int64), np.zeros((P, 2), dtype=np.int64)
        stash = np.zeros(P, dtype=np.int64)
        free_at, first_forward_at = np.zeros(P), np.full(P, _NEVER)
        down_free_at, up_free_at = np.zeros(P), np.zeros(P)  # links, in the column of their earlier stage
        look_at = np.full(P, _NEVER)  # when a stage should be asked next
        look_at[0] = 0.0
        while True:
            s = _first_of(look_at)
            now = look_at[s]
            if now == _NEVER:
                break
            activations = arrived[s, 0] = _count_arrived(activation_at, s, arrived[s, 0], now)
            gradients = arrived[s, 1] = _count_arrived(gradient_at, s, arrived[s, 1], now)
            # When the next gradient is due, and from when on the stage knows.
            due = known_at = _NEVER
            if policy == _VARUNA and s < P - 1 and done[s, _B] < N:
                if foresight:
                    due = due_at[s, done[s, _B]]
                    known_at = now if due < _NEVER else _NEVER
                else:
                    due = _expect(gradient_at, s, gradients, first_forward_at[s], usual[_F, 0, s], usual[_B, 0, s])
                    known_at = due - usual[_B, 0, s]
            due_us = max(0.0, due - now) if known_at <= now else -1.0
            op = _ask(policy, s, N, run_ahead, recompute[s], done, activations, gradients, usual, due_us)
            if op == _WAIT:
                # Ask again at the next thing that is known to come; messages not yet sent wake it when they are.
                wake = min(_next_at(activation_at, s, activations), _next_at(gradient_at, s, gradients))
                expected = known_at if known_at > now else due
                look_at[s] = min(wake, expected) if expected > now else wake
                continue
            n = done[s, op]
            row = 1 if n == N - 1 else 0
            end = now + (actual[op, s, n] if actual.size > 0 else usual[op, row, s])
            if spans.size > 0:
                spans[s, counts[s]], spans[P + s, counts[s]] = now, end
            ops[s, counts[s]] = op
            counts[s] += 1
            done[s, op] += 1
            free_at[s] = look_at[s] = end
            if op == _F:
                stash[s] = max(stash[s], n + 1 - done[s, leaves_flight])
                if n == 0:
                    first_forward_at[s] = end
                if s == P - 1:
                    gradient_at[s, n] = end
                    continue
                beyond = latency[s] + (delay[0, s + 1, n] if delay.size > 0 else 0.0)
                wake = _send(activation_at, down_free_at, s + 1, s, n, end, transfer[0, row, s], beyond)
                look_at[s + 1] = min(look_at[s + 1], max(wake, free_at[s + 1]))
            elif op == _B and s > 0:
                beyond = latency[s - 1] + (delay[1, s - 1, n] if delay.size > 0 else 0.0)
                wake = _send(gradient_at, up_free_at, s - 1, s - 1, n, end, transfer[1, row, s - 1], beyond)
                if policy == _VARUNA and foresight:
                    due_at[s - 1, n] = now + usual[_B, row, s]
                    wake = now
                look_at[s - 1] = min(look_at[s - 1], max(wake, free_at[s - 1]))
        return ops, counts, stash, free_at

    return simulate


simulate = _make_simulate(RULES)


@njit(cache=True, nogil=True)
def fixed_order(
    ops: npt.NDArray[np.int8],
    counts: Ints,
    N: int,
    usual: Floats,
    actual: Floats,
    transfer: Floats,
    latency: Floats,
    delay: Floats,
    late_recompute: bool,
) -> tuple[bool, Floats]:
    """(whether all of it ran, end of each stage's last action)."""
    P = counts.shape[0]
    activation_at: Floats = np.full((P, N), _NEVER)
    gradient_at: Floats = np.full((P, N), _NEVER)
    activation_at[0] = 0.0
    done: Ints = np.zeros((P, 4), dtype=np.int64)
    at: Ints = np.zeros(P, dtype=np.int64)
    free_at, down_free_at, up_free_at = np.zeros(P), np.zeros(P), np.zeros(P)
    waiting = np.ones(P, dtype=np.bool_)  # in the worklist
    work = np.arange(P)[::-1].copy()
    left = P
    while left > 0:
        # A stage enters the worklist only when it is not in it, so P places are enough.
        left -= 1
        s = int(work[left])
        waiting[s] = False
        clock, position = float(free_at[s]), int(at[s])
        while position < counts[s]:
            op = int(ops[s, position])
            n = int(done[s, op])
            ready = 0.0
            if op == _F:
                ready = activation_at[s, n]
            elif op == _B or (op == _R and late_recompute):
                ready = gradient_at[s, n]
            if ready == _NEVER:
                break
            row = 1 if n == N - 1 else 0
            clock = max(clock, ready) + float(actual[op, s, n] if actual.size > 0 else usual[op, row, s])
            done[s, op] = n + 1
            position += 1
            neighbour = -1
            if op == _F and s == P - 1:
                gradient_at[s, n] = clock
            elif op == _F:
                beyond = float(latency[s]) + (delay[0, s + 1, n] if delay.size > 0 else 0.0)
                _send(activation_at, down_free_at, s + 1, s, n, clock, transfer[0, row, s], beyond)
                neighbour = s + 1
            elif op == _B and s > 0:
                beyond = float(latency[s - 1]) + (delay[1, s - 1, n] if delay.size > 0 else 0.0)
                _send(gradient_at, up_free_at, s - 1, s - 1, n, clock, transfer[1, row, s - 1], beyond)
                neighbour = s - 1
            if neighbour >= 0 and not waiting[neighbour]:
                waiting[neighbour] = True
                work[left] = neighbour
                left += 1
        free_at[s], at[s] = clock, position
    return bool((at == counts).all()), free_at
