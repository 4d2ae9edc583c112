# mypy: disable-error-code="untyped-decorator"
"""Compiled: the times of a cut's stages, and a lower bound of the mini-batch under any schedule.

Letters: P stages, D replicas, N micro-batches of a replica. Times of stages are [2, P]: row 0 for a full micro-batch,
row 1 for the last.

The first call on a machine compiles for some seconds. numba keeps the result in __pycache__, under the names of the
classes in `_tables`.
"""

from __future__ import annotations

import numpy as np

from varuna_planner._compiled import compiled
from varuna_planner.cutting._tables import Flags, Floats, Ints, NetworkCosts, SectionTables, StageTimes

BUCKET_BYTES = 25 * 1024 * 1024
"""Gradients that one collective sums; a test compares it with the runtime's own (varuna.optim.reduction)."""


@compiled(cache=True)
def lower_bound(N: int, times: StageTimes, recompute: Flags, cap: Ints) -> float:
    """max over s, u <= s of fill_s + max(work_s, round trips_s) + drain from s to u + finish_u.

    With at most cap[s] micro-batches in flight, forward b + cap follows backward b, so N / cap round trips follow each
    other.
    """
    F, R, B, down, up, latency, finish = times
    P = recompute.shape[0]
    first = 1 if N == 1 else 0
    end = np.empty(P)
    fill = 0.0
    for s in range(P):
        full = F[0, s] + B[0, s]
        last = F[1, s] + B[1, s]
        if recompute[s]:
            full += R[0, s]
            last += R[1, s]
        end[s] = fill + (N - 1) * full + last
        fill += F[first, s] + down[first, s] + latency[s]
    bound = 0.0
    trip = np.zeros(2)  # of a full micro-batch and of the last, from a stage's forward to its backward
    for back in range(P):
        s = P - 1 - back
        fill -= F[first, s] + down[first, s] + latency[s]
        for row in range(2):
            trip[row] += F[row, s] + B[row, s]
            if back > 0:
                trip[row] += 2.0 * latency[s] + down[row, s] + up[row, s]
        rounds = (N - 1) // cap[s]
        end[s] = max(end[s], fill + rounds * trip[0] + trip[1 if rounds * cap[s] == N - 1 else 0])
        if back > 0:
            end[s] = max(end[s], end[s + 1] + up[1, s] + latency[s] + B[1, s])
        bound = max(bound, end[s] + finish[s])
    return bound


@compiled(cache=True)
def ring_us(count: int, ranks: int, hop_us: float, byte_us: float) -> float:
    """Ring all-reduce of `count` bytes: 2(n-1) hops, and 2(n-1)/n of the bytes over each link."""
    if ranks <= 1:
        return 0.0
    return 2.0 * (ranks - 1) * (hop_us + byte_us * count / ranks)


@compiled(cache=True)
def ring_costs(net: NetworkCosts, P: int) -> tuple[float, float]:
    """(µs per hop, µs per byte) of the all-reduces of P stages, of which each has a ring. Ranks fill VMs replica by
    replica (`placement`), so as many rings share a VM's network as it has stages: at most P, and one for each GPU.
    """
    last = min(P, net.hop_us.shape[0]) - 1
    return net.hop_us[last], net.byte_us[last]


@compiled(cache=True)
def exposed_us(count: int, ranks: int, hop_us: float, byte_us: float, backward_us: float) -> float:
    """The part of a bucketed all-reduce of `count` bytes that the last backward does not hide.

    Buckets go one after another, each as soon as its gradients are final: bucket i of n after (i + 1) / n of the
    backward. The longest path begins with the first bucket or is the last one alone.
    """
    buckets = max(1, -(-count // BUCKET_BYTES))
    hidden = backward_us * (buckets - 1) / buckets
    whole = ring_us(count, ranks, buckets * hop_us, byte_us)
    return max(whole - hidden, whole / buckets)


@compiled(cache=True)
def hop_inside(s: int, P: int, D: int, gpus_per_vm: int) -> bool:
    """Whether stages s and s + 1 are on one VM in every replica: ranks fill VMs replica by replica (`placement`)."""
    inside = True
    for d in range(min(D, gpus_per_vm)):  # from then on it repeats
        inside = inside and (d * P + s + 1) % gpus_per_vm != 0
    return inside


@compiled(cache=True)
def agreement_us(net: NetworkCosts, P: int, D: int) -> float:
    """The small reduction over all ranks, up a tree and down, with which every step ends."""
    agreement: float = 2.0 * np.ceil(np.log2(P * D)) * net.hop_us[0]
    return agreement


@compiled(cache=True)
def _sum_gradients(sections: SectionTables, net: NetworkCosts, bounds: Ints, D: int, own: Ints, finish: Floats) -> None:
    """Fills own[P], the bytes of gradients that each stage sums with its replicas alone, and adds the time for weights
    shared with other stages to finish[P]: one sum over all those stages and replicas, after all else.
    """
    P = own.shape[0]
    for s in range(P):
        own[s] = sections.gradient_bytes[bounds[s + 1]] - sections.gradient_bytes[bounds[s]]
    hop_us, byte_us = ring_costs(net, 1)
    uses = np.zeros(P, dtype=np.int64)  # sections of a stage that use the tied weight: each counts its gradient
    for tie in range(net.ties.shape[0]):
        uses[:] = 0
        for section in net.ties[tie]:
            if section >= 0:
                uses[np.searchsorted(bounds, section, side="right") - 1] += 1
        stages = (uses > 0).sum()
        for s in range(P):
            if stages > 1 and uses[s] > 0:
                own[s] -= uses[s] * net.tie_bytes[tie]
                finish[s] += ring_us(net.tie_bytes[tie], stages * D, hop_us, byte_us)
            elif uses[s] > 1:
                own[s] -= (uses[s] - 1) * net.tie_bytes[tie]


@compiled(cache=True)
def stage_times(sections: SectionTables, net: NetworkCosts, a: int, bounds: Ints, D: int) -> StageTimes:
    """Those of the busiest of D replicas, cut at bounds[P + 1], at micro-batch size number `a`.

    Its last micro-batch is the smaller one only if there is one replica.
    """
    P = bounds.shape[0] - 1
    F, R, B, transfer = np.zeros((2, P)), np.zeros((2, P)), np.zeros((2, P)), np.zeros((2, P))
    latency, finish, own = np.zeros(P), np.zeros(P), np.empty(P, dtype=np.int64)
    forward, recompute, backward = sections.forward_us[a], sections.recompute_us[a], sections.backward_us[a]
    for s in range(P):
        i, j = bounds[s], bounds[s + 1]
        link = net.same_vm if hop_inside(s, P, D, net.gpus_per_vm) else net.other_vm
        for row in range(2):
            source = row if D == 1 else 0
            F[row, s] = forward[source, j] - forward[source, i] + net.overhead_us
            R[row, s] = recompute[source, j] - recompute[source, i] + net.overhead_us
            B[row, s] = backward[source, j] - backward[source, i] + net.overhead_us
            transfer[row, s] = sections.output_bytes[a, source, j - 1] / link[1] if s < P - 1 else 0.0
        latency[s] = link[0] if s < P - 1 else 0.0
    _sum_gradients(sections, net, bounds, D, own, finish)
    agreement = agreement_us(net, P, D)
    hop_us, byte_us = ring_costs(net, P)
    for s in range(P):
        finish[s] += agreement + exposed_us(max(0, own[s]), D, hop_us, byte_us, B[1, s])
        finish[s] += net.optimizer_us[bounds[s + 1]] - net.optimizer_us[bounds[s]]
    return StageTimes(F, R, B, transfer, transfer, latency, finish)
