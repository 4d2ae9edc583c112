# mypy: disable-error-code="untyped-decorator"
"""The simulator's compiled loops; `simulation` describes what they compute.

Letters: P stages, N micro-batches. Messages are of two kinds: 0 activations, 1 gradients. A link is in the column of
its earlier stage. Times come as

    usual      [4 ops, 2 rows, P]    row 0 for a full micro-batch, row 1 for the last
    actual     [4 ops, P, N]         this mini-batch's; empty: the usual times
    transfer   [2 kinds, 2 rows, P]  occupies the link
    latency    [P]                   does not
    delay      [2 kinds, P that receives, N]  on top of the latency; empty: none

These and the state are separate arrays, because in tuples they make the loops ten times slower (measured: numba counts
references to each).

There is no queue of events. Each stage in turn advances as long as it is certain which messages have arrived. A message
that is not sent yet arrives at the earliest after its sender, from its clock on, has worked and the link has carried
it. Until then the stage acts as if there were none; then it lets the other stages advance first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_planner._compiled import compiled
from varuna_planner._rules import RULES, choose, choose_split
from varuna_planner.schedule import policies as schedule
from varuna_planner.schedule.policies import RecomputeTiming, StageOrders, StageProgress

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_F, _R, _B, _W, _WAIT = 0, 1, 2, 3, -1
_VARUNA, _ZERO_BUBBLE = schedule.VARUNA, schedule.ZERO_BUBBLE
_NEVER = np.inf


@compiled(cache=True)
def _send(
    message_at: Floats, link_free_at: Floats, to: int, link: int, n: int, at: float, transfer: float, beyond: float
) -> None:
    """Puts a message on a link, behind those before it. It arrives `beyond` after it has left the link."""
    leaves = max(at, link_free_at[link]) + transfer
    link_free_at[link] = leaves
    arrives = leaves + beyond
    if n > 0:
        arrives = max(arrives, message_at[to, n - 1])
    message_at[to, n] = arrives


@compiled(cache=True)
def _takes(usual: Floats, actual: Floats, op: int, s: int, n: int, row: int) -> float:
    """How long an action takes."""
    took: float = actual[op, s, n] if actual.size > 0 else usual[op, row, s]
    return took


@compiled(cache=True)
def _beyond(latency: Floats, delay: Floats, kind: int, to: int, link: int, n: int) -> float:
    """The part of a message's time that does not occupy its link."""
    took: float = latency[link] + (delay[kind, to, n] if delay.size > 0 else 0.0)
    return took


@compiled(cache=True)
def _next_after(now: float, activation_comes: float, gradient_comes: float, known_at: float, due: float) -> float:
    """When a waiting stage has to choose again."""
    wake: float = activation_comes if activation_comes > now else _NEVER
    if gradient_comes > now:
        wake = min(wake, gradient_comes)
    expected = known_at if known_at > now else due
    return min(wake, expected) if expected > now else wake


@compiled(cache=True)
def _expect(gradient_at: Floats, s: int, backwards: int, first_forward_at: float, F: float, B: float) -> float:
    """When varuna.pipeline.gradient_forecast expects the next gradient: it knows usual times and past arrivals only.

    This matters only until that gradient arrives: up to then, all gradients that have arrived are used.
    """
    newest_at: float = gradient_at[s, max(0, backwards - 1)]
    return newest_at + B if backwards > 0 else first_forward_at + (gradient_at.shape[0] - 1 - s) * (F + B)


@compiled(cache=True, inline="always")
def _choose(orders: StageOrders, done: Ints, activations: int, gradients: int, usual: Floats, due_us: float) -> int:
    """The stage's choice."""
    s = orders.stage
    progress = StageProgress(done[s, _F], done[s, _R], done[s, _B], activations, gradients)
    if orders.policy == _ZERO_BUBBLE:
        split: int = choose_split(orders, progress, done[s, _W])
        return split
    row = 1 if done[s, _F] == orders.N - 1 else 0
    whole: int = choose(orders, progress, RecomputeTiming(usual[_F, row, s], usual[_R, row, s], due_us))
    return whole


def _make_simulate(rules: int) -> Any:
    @compiled(cache=True)
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
    ) -> tuple[bool, npt.NDArray[np.int8], Ints, Ints, Floats]:
        """(whether all of it ran, ops[P, 4N], their counts[P], most in flight[P], end of each stage's last action[P]).

        Also fills spans[2P, 4N] with the begins and then the ends of actions, unless it is empty. Not all of it runs
        when stages wait for each other, which only happens if neighbours' actions and messages have no duration.
        """
        assert rules != -1  # a use, so that it is part of the cache's key
        P = recompute.shape[0]
        last_op = _W if policy == _ZERO_BUBBLE else _B
        activation_at, gradient_at = np.empty((P, N)), np.empty((P, N))
        begun_at = np.empty((P, N if foresight else 0))  # backwards
        ops, counts = np.zeros((P, 4 * N), dtype=np.int8), np.zeros(P, dtype=np.int64)
        done, stash = np.zeros((P, 4), dtype=np.int64), np.zeros(P, dtype=np.int64)
        clock = np.zeros(P)  # a stage's next action does not begin before
        first_forward_at = np.full(P, _NEVER)
        down_free_at, up_free_at = np.zeros(P), np.zeros(P)  # links, in the column of their earlier stage
        left, moved = P, True
        while left > 0 and moved:
            moved = False
            for s in range(P):
                if done[s, last_op] == N:
                    continue
                now, asked_at = clock[s], -1.0
                orders = StageOrders(policy, s, P, N, run_ahead, recompute[s])
                while done[s, last_op] < N:
                    # Only whether the next message of each kind is here matters, not how many more are.
                    f, b = done[s, _F], done[s, _B]
                    activation_comes = gradient_comes = due = known_at = _NEVER
                    surely = True
                    if s == 0:
                        activation_comes = 0.0
                    elif f < N and f < done[s - 1, _F]:
                        activation_comes = activation_at[s, f]
                    elif f < N:
                        row = 1 if f == N - 1 else 0
                        sent_at = clock[s - 1] + _takes(usual, actual, _F, s - 1, f, row)
                        activation_comes = sent_at + transfer[0, row, s - 1] + _beyond(latency, delay, 0, s, s - 1, f)
                        surely = activation_comes > now
                    if b < f and s == P - 1:
                        gradient_comes = 0.0
                    elif b < f and b < done[s + 1, _B]:
                        gradient_comes = gradient_at[s, b]
                    elif b < f:
                        row = 1 if b == N - 1 else 0
                        sent_at = clock[s + 1] + _takes(usual, actual, _B, s + 1, b, row)
                        gradient_comes = sent_at + transfer[1, row, s] + _beyond(latency, delay, 1, s, s, b)
                        surely = surely and gradient_comes > now
                    if policy == _VARUNA and b < N and s < P - 1:
                        if not foresight:
                            due = _expect(gradient_at, s, b, first_forward_at[s], usual[_F, 0, s], usual[_B, 0, s])
                            known_at = due - usual[_B, 0, s]
                        elif b == done[s + 1, _B]:
                            known_at = clock[s + 1]
                            surely = surely and known_at > now
                        else:
                            known_at = begun_at[s + 1, b]
                            due = known_at + usual[_B, 1 if b == N - 1 else 0, s + 1]
                    if not surely:
                        break
                    activations = f + 1 if activation_comes <= now else f
                    gradients = b + 1 if gradient_comes <= now else b
                    # Of stages that act at the same moment the earlier goes first, and only then sees the next one act.
                    unseen = foresight and known_at == now and asked_at < now
                    due_us = max(0.0, due - now) if known_at <= now and not unseen else -1.0
                    op = _choose(orders, done, activations, gradients, usual, due_us)
                    moved, asked_at = True, now
                    if op == _WAIT:
                        if not unseen:
                            now = clock[s] = _next_after(now, activation_comes, gradient_comes, known_at, due)
                        continue
                    n = done[s, op]
                    row = 1 if n == N - 1 else 0
                    end = now + _takes(usual, actual, op, s, n, row)
                    if spans.size > 0:
                        spans[s, counts[s]], spans[P + s, counts[s]] = now, end
                    ops[s, counts[s]] = op
                    counts[s] += 1
                    done[s, op] += 1
                    if op == _F:
                        stash[s] = max(stash[s], n + 1 - done[s, last_op])
                        if n == 0:
                            first_forward_at[s] = end
                        if s < P - 1:
                            beyond = _beyond(latency, delay, 0, s + 1, s, n)
                            _send(activation_at, down_free_at, s + 1, s, n, end, transfer[0, row, s], beyond)
                    elif op == _B and s > 0:
                        if foresight:
                            begun_at[s, n] = now
                        beyond = _beyond(latency, delay, 1, s - 1, s - 1, n)
                        _send(gradient_at, up_free_at, s - 1, s - 1, n, end, transfer[1, row, s - 1], beyond)
                    now = clock[s] = end
                if done[s, last_op] == N:
                    left -= 1
        return left == 0, ops, counts, stash, clock

    return simulate


simulate = _make_simulate(RULES)


@compiled(cache=True)
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
