# mypy: disable-error-code="untyped-decorator"
"""The planner's compiled loops. They hold no ideas of their own: rules come from `schedule` and `memory`, compiled as
they stand; what they compute is described by the callers in `simulator` and `balance`.

The first call on a machine compiles for some seconds; numba keeps the result in __pycache__.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from varuna_planner import memory, schedule

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_choose = njit(nogil=True)(schedule.choose)
_most_in_flight = njit(nogil=True)(schedule.most_in_flight)
_stage_bytes = njit(nogil=True)(memory.stage_bytes)

_F, _R, _B, _WAIT = 0, 1, 2, -1
_INFINITY = np.inf


def _fingerprint(*functions: Callable[..., Any]) -> int:
    """Changes when the functions do. numba's cache notices edits of this file only, but its key includes closures."""

    def text(code: CodeType) -> str:
        return repr((code.co_code, code.co_names, [c for c in code.co_consts if not isinstance(c, CodeType)]))

    return zlib.crc32("".join(text(function.__code__) for function in functions).encode())


_RULES = _fingerprint(schedule.choose, schedule.most_in_flight, memory.stage_bytes)


def _make_simulate(rules: int) -> Any:
    @njit(cache=True, nogil=True)
    def simulate(
        policy: int,
        N: int,
        run_ahead: int,
        forward: Floats,
        recompute_time: Floats,
        backward: Floats,
        activation_transfer: Floats,
        gradient_transfer: Floats,
        latency: Floats,
        recompute: npt.NDArray[np.bool_],
        jitter: float,
        noise: float,
        seed: int,
    ) -> tuple[npt.NDArray[np.int8], Ints, Ints, Floats]:
        """(ops[P, 3N], their counts[P], most in flight[P], end of the last backward[P])."""
        assert rules != -1  # a use, so that it is part of the cache's key
        if jitter > 0 or noise > 0:
            np.random.seed(seed)
        P = recompute.shape[0]
        activation_at = np.full((P, N), _INFINITY)
        activation_at[0] = 0.0
        gradient_at = np.full((P, N), _INFINITY)
        due_at = np.full((P, N), -1.0)  # when the next stage should end the backward; -1: it has not begun
        ops = np.zeros((P, 3 * N), dtype=np.int8)
        done = np.zeros((P, 3), dtype=np.int64)  # [stage][op]
        arrived = np.zeros((P, 2), dtype=np.int64)  # [stage][activations, gradients]
        stash = np.zeros(P, dtype=np.int64)
        free_at = np.zeros(P)
        link_free_at = np.zeros((P, 2))  # [stage that sends][activations, gradients]
        look_at = np.full(P, _INFINITY)  # when a stage should be asked next
        look_at[0] = 0.0
        while True:
            s = 0
            for other in range(1, P):
                if look_at[other] < look_at[s]:
                    s = other
            now = look_at[s]
            if now == _INFINITY:
                break
            while arrived[s, 0] < N and activation_at[s, arrived[s, 0]] <= now:
                arrived[s, 0] += 1
            while arrived[s, 1] < N and gradient_at[s, arrived[s, 1]] <= now:
                arrived[s, 1] += 1
            b = done[s, _B]
            due = due_at[s, b] if b < N else -1.0
            row = 1 if done[s, _F] == N - 1 else 0
            op = _choose(
                policy,
                s,
                P,
                N,
                run_ahead,
                recompute[s],
                done[s, _F],
                done[s, _R],
                b,
                arrived[s, 0],
                arrived[s, 1],
                forward[row, s],
                recompute_time[row, s],
                max(0.0, due - now) if due >= 0.0 else -1.0,
            )
            if op == _WAIT:
                # Ask again at the next thing that is known to come; messages not yet sent wake it when they are.
                wake = _INFINITY
                if arrived[s, 0] < N:
                    wake = min(wake, activation_at[s, arrived[s, 0]])
                if arrived[s, 1] < N:
                    wake = min(wake, gradient_at[s, arrived[s, 1]])
                if due > now:
                    wake = min(wake, due)
                look_at[s] = wake
                continue
            n = done[s, op]
            row = 1 if n == N - 1 else 0
            usual = forward[row, s] if op == _F else recompute_time[row, s] if op == _R else backward[row, s]
            end = now + (usual * max(0.1, 1.0 + noise * np.random.normal()) if noise > 0 else usual)
            ops[s, done[s, 0] + done[s, 1] + done[s, 2]] = op
            done[s, op] += 1
            free_at[s] = end
            look_at[s] = end
            stash[s] = max(stash[s], done[s, _F] - done[s, _B])
            delay = np.random.exponential(jitter) if jitter > 0 and op != _R else 0.0
            if op == _F and s == P - 1:
                gradient_at[s, n] = end
            elif op == _F:
                link_free_at[s, 0] = max(end, link_free_at[s, 0]) + activation_transfer[row, s]
                arrival = max(link_free_at[s, 0] + latency[s] + delay, activation_at[s + 1, n - 1] if n > 0 else 0.0)
                activation_at[s + 1, n] = arrival
                look_at[s + 1] = min(look_at[s + 1], max(arrival, free_at[s + 1]))
            elif op == _B and s > 0:
                link_free_at[s, 1] = max(end, link_free_at[s, 1]) + gradient_transfer[row, s - 1]
                arrival = link_free_at[s, 1] + latency[s - 1] + delay
                gradient_at[s - 1, n] = max(arrival, gradient_at[s - 1, n - 1] if n > 0 else 0.0)
                due_at[s - 1, n] = now + usual
                look_at[s - 1] = min(look_at[s - 1], max(now, free_at[s - 1]))
        return ops, done.sum(axis=1), stash, free_at

    return simulate


simulate = _make_simulate(_RULES)


@njit(cache=True, nogil=True)
def fixed_order(
    ops: npt.NDArray[np.int8],
    counts: Ints,
    N: int,
    forward: Floats,
    recompute_time: Floats,
    backward: Floats,
    activation_transfer: Floats,
    gradient_transfer: Floats,
    latency: Floats,
    late_recompute: bool,
) -> tuple[bool, Floats]:
    """(whether all of it ran, end of each stage's last action)."""
    P = counts.shape[0]
    activation_at: Floats = np.full((P, N), _INFINITY)
    activation_at[0] = 0.0
    gradient_at: Floats = np.full((P, N), _INFINITY)
    done: Ints = np.zeros((P, 3), dtype=np.int64)
    at: Ints = np.zeros(P, dtype=np.int64)
    clock: Floats = np.zeros(P)
    link_free_at: Floats = np.zeros((P, 2))  # [stage that sends][activations, gradients]
    waiting = np.ones(P, dtype=np.bool_)  # in the worklist
    work: Ints = np.arange(P)[::-1].copy()
    left = P
    while left > 0:
        # A stage enters the worklist only when it is not in it, so P places are enough.
        left -= 1
        s = int(work[left])
        waiting[s] = False
        while at[s] < counts[s]:
            op = int(ops[s, at[s]])
            n = int(done[s, op])
            row = 1 if n == N - 1 else 0
            ready = 0.0
            if op == _F:
                ready = activation_at[s, n]
            elif op == _B or late_recompute:
                ready = gradient_at[s, n]
            if ready == _INFINITY:
                break
            usual = forward[row, s] if op == _F else recompute_time[row, s] if op == _R else backward[row, s]
            clock[s] = max(clock[s], ready) + usual
            done[s, op] += 1
            at[s] += 1
            neighbour = -1
            if op == _F and s == P - 1:
                gradient_at[s, n] = clock[s]
            elif op == _F:
                link_free_at[s, 0] = max(clock[s], link_free_at[s, 0]) + activation_transfer[row, s]
                activation_at[s + 1, n] = link_free_at[s, 0] + latency[s]
                neighbour = s + 1
            elif op == _B and s > 0:
                link_free_at[s, 1] = max(clock[s], link_free_at[s, 1]) + gradient_transfer[row, s - 1]
                gradient_at[s - 1, n] = link_free_at[s, 1] + latency[s - 1]
                neighbour = s - 1
            if neighbour >= 0 and not waiting[neighbour]:
                waiting[neighbour] = True
                work[left] = neighbour
                left += 1
    return bool((at == counts).all()), clock


@njit(cache=True, nogil=True)
def lower_bound(
    N: int,
    forward: Floats,
    recompute_time: Floats,
    backward: Floats,
    activation_transfer: Floats,
    gradient_transfer: Floats,
    latency: Floats,
    recompute: npt.NDArray[np.bool_],
    finish: Floats,
    cap: Ints,
) -> float:
    """max over s, u <= s of fill_s + max(work_s, round trips_s) + drain from s to u + finish_u.

    With cap[s] micro-batches in flight at most, forward b + cap follows backward b: so N / cap round trips in turn.
    """
    P = recompute.shape[0]
    first = 1 if N == 1 else 0
    end = np.empty(P)
    fill = 0.0
    for s in range(P):
        full = forward[0, s] + backward[0, s]
        last = forward[1, s] + backward[1, s]
        if recompute[s]:
            full += recompute_time[0, s]
            last += recompute_time[1, s]
        end[s] = fill + (N - 1) * full + last
        fill += forward[first, s] + activation_transfer[first, s] + latency[s]
    bound = 0.0
    trip = np.zeros(2)  # of a full micro-batch and of the last, from a stage's forward to its backward
    for back in range(P):
        s = P - 1 - back
        fill -= forward[first, s] + activation_transfer[first, s] + latency[s]
        for row in range(2):
            trip[row] += forward[row, s] + backward[row, s]
            if back > 0:
                trip[row] += 2.0 * latency[s] + activation_transfer[row, s] + gradient_transfer[row, s]
        rounds = (N - 1) // cap[s]
        end[s] = max(end[s], fill + rounds * trip[0] + trip[1 if rounds * cap[s] == N - 1 else 0])
        if back > 0:
            end[s] = max(end[s], end[s + 1] + gradient_transfer[1, s] + latency[s] + backward[1, s])
        bound = max(bound, end[s] + finish[s])
    return bound


def _make_balance(rules: int) -> Any:
    @njit(cache=True, nogil=True)
    def balance(
        time: Floats,
        recompute_time: Floats,
        state: Ints,
        activation: Ints,
        inputs: Ints,
        working: Ints,
        usable: int,
        policy: int,
        N: int,
        most_stages: int,
    ) -> tuple[Floats, Ints]:
        """(value[r, i], cut[r, i]): the least possible work of the busiest of r stages that share sections i and up,
        and where the first of them ends. Sums run from section 0: time[i] is that of the sections before i."""
        assert rules != -1  # a use, so that it is part of the cache's key
        K = inputs.shape[0]
        value = np.full((most_stages + 1, K + 1), _INFINITY)
        cut = np.full((most_stages + 1, K + 1), -1, dtype=np.int64)
        value[0, K] = 0.0
        for r in range(1, most_stages + 1):
            in_flight = _most_in_flight(policy, 0, r, N, 0)
            for i in range(K - r + 1):
                most_working = 0
                for j in range(K if r == 1 else i + 1, K - r + 2):
                    # r == 1 has one way only, over all the rest.
                    for section in range(i if r == 1 else j - 1, j):
                        most_working = max(most_working, working[section])
                    cost = time[j] - time[i]
                    own_state, own_activation = state[j] - state[i], activation[j] - activation[i]
                    if _stage_bytes(own_state, inputs[i], own_activation, most_working, in_flight, False) > usable:
                        # The last stage has one micro-batch in flight: to recompute would save nothing.
                        if (
                            r == 1
                            or _stage_bytes(own_state, inputs[i], own_activation, most_working, in_flight, True)
                            > usable
                        ):
                            break
                        cost += recompute_time[j] - recompute_time[i]
                    if cost > value[r, i]:
                        break  # cost only grows with j
                    busiest = max(cost, value[r - 1, j])
                    # On a tie the longest stage wins: the earlier the heavy stages, the sooner the last one begins.
                    if busiest <= value[r, i] and busiest < _INFINITY:
                        value[r, i] = busiest
                        cut[r, i] = j
        return value, cut

    return balance


balance = _make_balance(_RULES)


@njit(cache=True, nogil=True)
def starts(cut: Ints, P: int) -> Ints:
    """[P + 1]: where each stage starts, and K, read from `balance`'s cuts."""
    bounds = np.zeros(P + 1, dtype=np.int64)
    for stage in range(P):
        bounds[stage + 1] = cut[P - stage, bounds[stage]]
    return bounds


def _make_stage_memory(rules: int) -> Any:
    @njit(cache=True, nogil=True)
    def stage_memory(
        bounds: Ints,
        state: Ints,
        activation: Ints,
        inputs: Ints,
        working: Ints,
        usable: int,
        policy: int,
        N: int,
        run_ahead: int,
        recompute: npt.NDArray[np.bool_],
        decide: bool,
    ) -> Ints:
        """Peak bytes[P]; with `decide`, first sets recompute[P] where a stage would not fit without."""
        assert rules != -1  # a use, so that it is part of the cache's key
        P = recompute.shape[0]
        needed = np.zeros(P, dtype=np.int64)
        for s in range(P):
            i, j = bounds[s], bounds[s + 1]
            in_flight = _most_in_flight(policy, s, P, N, run_ahead)
            own_state, own_activation, most = state[j] - state[i], activation[j] - activation[i], working[i:j].max()
            if decide:
                kept = _stage_bytes(own_state, inputs[i], own_activation, most, in_flight, False)
                recompute[s] = s < P - 1 and kept > usable
            needed[s] = _stage_bytes(own_state, inputs[i], own_activation, most, in_flight, recompute[s])
        return needed

    return stage_memory


stage_memory = _make_stage_memory(_RULES)


def _make_run_ahead(rules: int) -> Any:
    @njit(cache=True, nogil=True)
    def run_ahead(
        bounds: Ints,
        state: Ints,
        activation: Ints,
        inputs: Ints,
        working: Ints,
        usable: int,
        policy: int,
        N: int,
        most: int,
        recompute: npt.NDArray[np.bool_],
    ) -> int:
        """The largest k up to `most` with which every stage fits, if 0 does."""
        assert rules != -1  # a use, so that it is part of the cache's key
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            needed = stage_memory(
                bounds, state, activation, inputs, working, usable, policy, N, middle, recompute, False
            )
            if needed.max() <= usable:
                low = middle
            else:
                high = middle - 1
        return low

    return run_ahead


run_ahead = _make_run_ahead(_RULES)


@njit(cache=True, nogil=True)
def ring_us(count: int, ranks: int, hop_us: float, byte_us: float) -> float:
    """Ring all-reduce of `count` bytes: 2(n-1) hops, and 2(n-1)/n of the bytes over each link."""
    if ranks <= 1:
        return 0.0
    return 2.0 * (ranks - 1) * (hop_us + byte_us * count / ranks)


@njit(cache=True, nogil=True)
def stage_times(
    bounds: Ints,
    forward: Floats,
    recompute_time: Floats,
    backward: Floats,
    output_bytes: Floats,
    gradient: Ints,
    ties: Ints,
    tie_bytes: Ints,
    same_vm: Floats,
    other_vm: Floats,
    gpus_per_vm: int,
    hop_us: float,
    byte_us: float,
    D: int,
    short_last: bool,
) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
    """(forward, recompute, backward, transfer [2, P], latency, finish [P]) of stages cut at bounds[P + 1].

    `forward` and the others are sums [2, K + 1] over the sections before; links are (latency_us, bytes per us).
    """
    P = bounds.shape[0] - 1
    F, R, B, transfer = np.zeros((2, P)), np.zeros((2, P)), np.zeros((2, P)), np.zeros((2, P))
    latency, finish = np.zeros(P), np.zeros(P)
    # Every step ends with one small reduction over all ranks, up a tree and down.
    agreement = 2.0 * np.ceil(np.log2(P * D)) * hop_us
    for s in range(P):
        i, j = bounds[s], bounds[s + 1]
        # Placement fills a VM with neighbouring stages, but only whole VMs put the same hops inside in every replica.
        inside = gpus_per_vm % P == 0 or (P % gpus_per_vm == 0 and (s + 1) % gpus_per_vm != 0)
        link = same_vm if inside else other_vm
        for row in range(2):
            source = row if short_last else 0
            F[row, s] = forward[source, j] - forward[source, i]
            R[row, s] = recompute_time[source, j] - recompute_time[source, i]
            B[row, s] = backward[source, j] - backward[source, i]
            transfer[row, s] = output_bytes[source, j - 1] / link[1] if s < P - 1 else 0.0
        latency[s] = link[0] if s < P - 1 else 0.0
        finish[s] = agreement + ring_us(gradient[j] - gradient[i], D, hop_us, byte_us)
    shares = np.zeros(P, dtype=np.bool_)
    for tie in range(ties.shape[0]):
        shares[:] = False
        for section in ties[tie]:
            if section >= 0:
                shares[np.searchsorted(bounds, section, side="right") - 1] = True
        finish[shares] += ring_us(tie_bytes[tie], shares.sum(), hop_us, byte_us)
    return F, R, B, transfer, latency, finish


def _make_candidate_bound(rules: int) -> Any:
    @njit(cache=True, nogil=True)
    def candidate_bound(
        recompute: npt.NDArray[np.bool_],
        N: int,
        policy: int,
        run_ahead: int,
        bounds: Ints,
        forward: Floats,
        recompute_time: Floats,
        backward: Floats,
        output_bytes: Floats,
        gradient: Ints,
        ties: Ints,
        tie_bytes: Ints,
        same_vm: Floats,
        other_vm: Floats,
        gpus_per_vm: int,
        hop_us: float,
        byte_us: float,
        D: int,
        short_last: bool,
    ) -> float:
        """`lower_bound` of the pipeline that `stage_times` describes, with the policy's caps."""
        assert rules != -1  # a use, so that it is part of the cache's key
        P = recompute.shape[0]
        F, R, B, transfer, latency, finish = stage_times(
            bounds,
            forward,
            recompute_time,
            backward,
            output_bytes,
            gradient,
            ties,
            tie_bytes,
            same_vm,
            other_vm,
            gpus_per_vm,
            hop_us,
            byte_us,
            D,
            short_last,
        )
        cap = np.empty(P, dtype=np.int64)
        for s in range(P):
            cap[s] = _most_in_flight(policy, s, P, N, run_ahead)
        bound: float = lower_bound(N, F, R, B, transfer, transfer, latency, recompute, finish, cap)
        return bound

    return candidate_bound


candidate_bound = _make_candidate_bound(_RULES)
