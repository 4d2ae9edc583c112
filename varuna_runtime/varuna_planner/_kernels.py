# mypy: disable-error-code="untyped-decorator"
"""Compiled: what the stages of a cut cost, and a lower bound of what any schedule makes of them.

Letters: P stages, D replicas, N micro-batches of a replica. Times of stages are [2, P]: row 0 for a full micro-batch,
row 1 for the last.

The first call on a machine compiles for some seconds; numba keeps the result in __pycache__.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BUCKET_BYTES = 25 * 1024 * 1024
"""Of the gradients that one collective sums (varuna.optim, which is tested to use the same)."""


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


@njit(cache=True, nogil=True)
def ring_us(count: int, ranks: int, hop_us: float, byte_us: float) -> float:
    """Ring all-reduce of `count` bytes: 2(n-1) hops, and 2(n-1)/n of the bytes over each link."""
    if ranks <= 1:
        return 0.0
    return 2.0 * (ranks - 1) * (hop_us + byte_us * count / ranks)


@njit(cache=True, nogil=True)
def exposed_us(count: int, ranks: int, hop_us: float, byte_us: float, backward_us: float) -> float:
    """What is left of a bucketed all-reduce of `count` bytes after the last backward, which it overlaps.

    Buckets go one after another, each from when its gradients are final: bucket i of n after (i + 1) / n of the
    backward. The longest of those paths begins with the first bucket or is the last one alone.
    """
    buckets = max(1, -(-count // BUCKET_BYTES))
    hidden = backward_us * (buckets - 1) / buckets
    whole = ring_us(count, ranks, buckets * hop_us, byte_us)
    return max(whole - hidden, whole / buckets)


@njit(cache=True, nogil=True)
def hop_inside(s: int, P: int, D: int, gpus_per_vm: int) -> bool:
    """Whether stages s and s + 1 are on one VM in every replica: ranks fill VMs replica by replica (`placement`)."""
    inside = True
    for d in range(min(D, gpus_per_vm)):  # from then on it repeats
        inside = inside and (d * P + s + 1) % gpus_per_vm != 0
    return inside


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
    overhead_us: float,
    optimizer_us: Floats,
    D: int,
    short_last: bool,
) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
    """(forward, recompute, backward, transfer [2, P], latency, finish [P]) of stages cut at bounds[P + 1].

    `forward` and the others are sums [2, K + 1] over the sections before, `optimizer_us` [K + 1]; links are
    (latency_us, bytes per us).
    """
    P = bounds.shape[0] - 1
    F, R, B, transfer = np.zeros((2, P)), np.zeros((2, P)), np.zeros((2, P)), np.zeros((2, P))
    latency, finish = np.zeros(P), np.zeros(P)
    # Every step ends with one small reduction over all ranks, up a tree and down.
    agreement = 2.0 * np.ceil(np.log2(P * D)) * hop_us
    for s in range(P):
        i, j = bounds[s], bounds[s + 1]
        link = same_vm if hop_inside(s, P, D, gpus_per_vm) else other_vm
        for row in range(2):
            source = row if short_last else 0
            F[row, s] = forward[source, j] - forward[source, i] + overhead_us
            R[row, s] = recompute_time[source, j] - recompute_time[source, i] + overhead_us
            B[row, s] = backward[source, j] - backward[source, i] + overhead_us
            transfer[row, s] = output_bytes[source, j - 1] / link[1] if s < P - 1 else 0.0
        latency[s] = link[0] if s < P - 1 else 0.0
    own = np.empty(P, dtype=np.int64)  # bytes of gradients that a stage shares with its replicas alone
    for s in range(P):
        own[s] = gradient[bounds[s + 1]] - gradient[bounds[s]]
    uses = np.zeros(P, dtype=np.int64)  # sections of a stage that use the tied weight: each counts its gradient
    for tie in range(ties.shape[0]):
        uses[:] = 0
        for section in ties[tie]:
            if section >= 0:
                uses[np.searchsorted(bounds, section, side="right") - 1] += 1
        stages = (uses > 0).sum()
        for s in range(P):
            if stages > 1 and uses[s] > 0:
                # One sum over all stages and replicas that hold it, after all else.
                own[s] -= uses[s] * tie_bytes[tie]
                finish[s] += ring_us(tie_bytes[tie], stages * D, hop_us, byte_us)
            elif uses[s] > 1:
                own[s] -= (uses[s] - 1) * tie_bytes[tie]
    for s in range(P):
        finish[s] += agreement + exposed_us(max(0, own[s]), D, hop_us, byte_us, B[1, s])
        finish[s] += optimizer_us[bounds[s + 1]] - optimizer_us[bounds[s]]
    return F, R, B, transfer, latency, finish
