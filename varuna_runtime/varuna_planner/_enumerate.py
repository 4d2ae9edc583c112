# mypy: disable-error-code="untyped-decorator"
"""Compiled: every shape there is, with a lower bound of its time; `auto_config` says what is searched.

Letters: K sections, S micro-batch sizes, P stages, D replicas, M micro-batches of the global batch, N of a replica, V
the least possible work of the busiest stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from varuna_planner import _cuts, _kernels
from varuna_planner._kernels import ring_us
from varuna_planner._rules import code_of
from varuna_planner._tables import (
    BOUNDED,
    RUN_AHEAD_STAGES,
    UNFIT,
    Floats,
    Ints,
    Limits,
    Network,
    Sections,
    Shapes,
    Tables,
)

_INFINITY = np.inf


@njit(nogil=True)
def most_run_ahead(limits: Limits, P: int, N: int) -> int:
    return min(RUN_AHEAD_STAGES * P, N - 1) if limits.runs_ahead and P > 1 else 0


@njit(nogil=True)
def reduce_us(net: Network, gradient: float, backward: float, P: int, D: int) -> float:
    """The least that a stage with so many bytes of gradients takes after its last backward, which it overlaps."""
    ring = 2.0 * (D - 1) * (net.hop_us + net.byte_us * gradient / D)
    least: float = max(ring - backward, 2.0 * (D - 1) * net.hop_us) + 2.0 * np.ceil(np.log2(P * D)) * net.hop_us
    return least


@njit(nogil=True)
def least_finish_us(net: Network, K: int, P: int, D: int) -> float:
    """The least that follows the first stage's last backward: weights tied to the last section's are summed there."""
    least: float = reduce_us(net, 0.0, 0.0, P, D)
    for tie in range(net.ties.shape[0]):
        first = last = False
        for section in net.ties[tie]:
            first, last = first or section == 0, last or section == K - 1
        if P > 1 and first and last:
            least += ring_us(net.tie_bytes[tie], 2 * D, net.hop_us, net.byte_us)
    return least


@njit(nogil=True)
def least_hop_us(net: Network, message: float) -> float:
    """The least that a message takes one way, on whichever link."""
    hop: float = net.other_vm[0] + message / net.other_vm[1]
    if net.gpus_per_vm > 1:
        hop = min(hop, net.same_vm[0] + message / net.same_vm[1])
    return hop


@njit(nogil=True)
def _bound(
    net: Network,
    V: float,
    work: float,
    backward: float,
    heaviest_forward: float,
    gradient: float,
    P: int,
    D: int,
    N: int,
    most_cap: int,
    short_last: bool,
    message: float,
    K: int,
) -> float:
    """A lower bound for every cut into P stages: of four, in the order below. No cut has to be made for it.

    1. The busiest stage's work. 2. One micro-batch's way through all stages and back, during which the busiest stage
    can do no more than its stash's forwards, and then what else it has to do. 3. That of s stages' fill, N times the
    work of stage s, and their drain, were work dealt out to make it the same for every s: with hops of h there and
    back, w_s + h = (w_0 + h) (1 - 1/N)^s. 4. The average stage, with its all-reduce, which at best overlaps one
    backward. Behind 1 to 3 comes `least_finish_us`. `message`: the least bytes of any cut's.
    """
    full = N - 1 if short_last else N
    bound = full * V
    if not short_last:
        hop = least_hop_us(net, message)
        way = work + 2.0 * (P - 1) * hop
        hidden = (min(N, most_cap) - 1) * heaviest_forward
        bound = max(bound, way + V * max(0.0, (N - 1) - hidden))
        if N > 1:
            done = 1.0 - (1.0 - 1.0 / N) ** P
            bound = max(bound, (work + 2.0 * hop * max(0.0, P - N * done)) / done)
    bytes_us = 2.0 * (D - 1) / D * net.byte_us * gradient
    average = (full * work + bytes_us - backward) / P if D > 1 else 0.0
    return max(bound + least_finish_us(net, K, P, D), average + reduce_us(net, 0.0, 0.0, P, D))


@njit(nogil=True)
def _fewest(count: int, most: int) -> int:
    """The fewest replicas whose busiest has no more micro-batches than with `most`."""
    N = -(-count // most)
    return -(-count // N)


def _make_count(code: int) -> Any:
    @njit(cache=True, nogil=True)
    def count_shapes(counts: Ints, gpus: int, lowest: int, highest: int, pinned_d: int) -> int:
        """How many shapes `enumerate_shapes` finds at most."""
        assert code != -1  # a use, so that it is part of the cache's key
        total = 0
        for count in counts:
            for P in range(lowest, highest + 1):
                D = min(gpus // P, count)
                if pinned_d > 0:
                    total += 1 if pinned_d <= D else 0
                    continue
                while D > 0:
                    D = _fewest(count, D) - 1
                    total += 1
        return total

    return count_shapes


def _make_enumerate(code: int) -> Any:
    @njit(cache=True, nogil=True)
    def enumerate_shapes(
        sections: Sections,
        net: Network,
        limits: Limits,
        counts: Ints,
        heaviest_forward: Floats,
        gradient: float,
        gpus: int,
        lowest: int,
        pinned_d: int,
        tables: Tables,
        shapes: Shapes,
    ) -> int:
        """Fills `shapes` with every shape and a lower bound, and `tables` for cuts without memory. How many there are.

        Of replicas with the same N only the fewest count: more cost GPUs and all-reduce for nothing. Shapes with too
        few stages for the memory, whatever else, stand once for each P.

        Args:
            counts: M [S].
            heaviest_forward: [S] the largest part of forward in any section's forward and backward.
            gradient: bytes that are summed over replicas, tied weights left out.
            lowest: P, the first; the last is the tables'.
            pinned_d: 0 for every D.
        """
        assert code != -1  # a use, so that it is part of the cache's key
        size, p, d, n, short_last, state, time_us = shapes
        S, K = sections.inputs.shape
        highest = tables.free_us.shape[1] - 1
        at = 0
        for a in range(S):
            count = counts[a]
            _cuts.fill_free(sections.work_us[a], highest, tables.free_us[a], tables.free_end[a])
            fewest = _cuts.fewest_stages(
                sections.state_bytes, sections.activation_bytes[a], sections.working[a], limits.usable_bytes
            )
            backward = sections.backward_us[a, 0, K]
            work = sections.forward_us[a, 0, K] + backward
            message = sections.output_bytes[a, 0, : K - 1].min() if K > 1 else 0.0
            for P in range(lowest, highest + 1):
                D = min(gpus // P, count)
                if pinned_d > 0:
                    D = pinned_d if pinned_d <= D else 0
                while D > 0:
                    if pinned_d == 0:
                        D = _fewest(count, D)
                    N = -(-count // D)
                    size[at], p[at], d[at], n[at], short_last[at] = a, P, D, N, D == 1
                    cap = P + most_run_ahead(limits, P, N) if limits.counts_stages else N
                    V, forward = tables.free_us[a, P], heaviest_forward[a]
                    state[at] = BOUNDED
                    time_us[at] = _bound(net, V, work, backward, forward, gradient, P, D, N, cap, D == 1, message, K)
                    at += 1
                    if fewest > P:
                        state[at - 1], time_us[at - 1] = UNFIT, _INFINITY
                        break
                    D = 0 if pinned_d > 0 else D - 1
        return at

    return enumerate_shapes


_CODE = code_of(_cuts, _kernels)
count_shapes = _make_count(_CODE)
enumerate_shapes = _make_enumerate(_CODE)
