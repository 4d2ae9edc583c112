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
from varuna_planner._kernels import BUCKET_BYTES, ring_us
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
    Whole,
)

_INFINITY = np.inf


@njit(nogil=True)
def most_run_ahead(limits: Limits, P: int, N: int) -> int:
    return min(RUN_AHEAD_STAGES * P, N - 1) if limits.runs_ahead and P > 1 else 0


@njit(nogil=True)
def agreement_us(net: Network, P: int, D: int) -> float:
    """The small reduction over all ranks, up a tree and down, with which every step ends."""
    agreement: float = 2.0 * np.ceil(np.log2(P * D)) * net.hop_us
    return agreement


@njit(nogil=True)
def reduce_us_per_byte(net: Network, D: int) -> float:
    """What a stage's all-reduce takes for each byte of gradients, at least: on links, and a bucket's hops."""
    per_byte: float = 2.0 * (D - 1) * (net.hop_us / BUCKET_BYTES + net.byte_us / D)
    return per_byte


@njit(nogil=True)
def whole(sections: Sections, net: Network, a: int) -> Whole:
    """Of micro-batch size number a."""
    K = sections.inputs.shape[1]
    ends = 0
    for tie in range(net.ties.shape[0]):
        first = last = False
        for section in net.ties[tie]:
            first, last = first or section == 0, last or section == K - 1
        if first and last:
            ends += net.tie_bytes[tie]
    message = sections.output_bytes[a, 0, : K - 1].min() if K > 1 else 0.0
    hop = net.other_vm[0] + message / net.other_vm[1]
    if net.gpus_per_vm > 1:
        hop = min(hop, net.same_vm[0] + message / net.same_vm[1])
    return Whole(
        sections.forward_us[a, 0, K],
        sections.backward_us[a, 0, K],
        float(sections.own_bytes[K]),
        float(sections.own_bytes[1]),
        sections.backward_us[a, 0, 1],
        sections.reduce_rate[a],
        ends,
        hop,
    )


@njit(nogil=True)
def least_finish_us(model: Whole, net: Network, P: int, D: int) -> float:
    """The least that follows the first stage's last backward. Never less with greater D.

    One bucket's all-reduce, or that of the first section's gradients, which its backward overlaps (as long as others in
    the stage make it no less); weights tied to the last section's; the agreement.
    """
    least: float = 2.0 * (D - 1) * net.hop_us
    per_byte = reduce_us_per_byte(net, D)
    if P > 1 and per_byte >= model.reduce_rate:
        least = max(least, per_byte * model.first_own_bytes - model.first_backward_us - net.overhead_us)
    if P > 1 and model.ends_bytes > 0:
        least += ring_us(model.ends_bytes, 2 * D, net.hop_us, net.byte_us)
    return least + agreement_us(net, P, D)


@njit(nogil=True)
def _bound(model: Whole, net: Network, V: float, heaviest_forward: float, P: int, D: int, N: int, cap: int) -> float:
    """A lower bound for every cut into P stages: of four, in the order below. No cut has to be made for it.

    1. The busiest stage's work. 2. One micro-batch's way through all stages and back, during which the busiest stage
    can do no more than its stash's forwards, `cap` at most, and then what else it has to do. 3. That of s stages' fill,
    N times the work of stage s, and their drain, were work dealt out to make it the same for every s: with hops of h
    there and back, w_s + h = (w_0 + h) (1 - 1/N)^s. 4. The average stage, with its all-reduce, which at best overlaps
    one backward. Behind 1 to 3 comes `least_finish_us`.
    """
    work = model.forward_us + model.backward_us
    short_last = D == 1
    full = N - 1 if short_last else N
    bound = full * V
    if not short_last:
        way = work + 2.0 * (P - 1) * model.hop_us
        hidden = (min(N, cap) - 1) * heaviest_forward
        bound = max(bound, way + V * max(0.0, (N - 1) - hidden))
        if N > 1:
            done = 1.0 - (1.0 - 1.0 / N) ** P
            bound = max(bound, (work + 2.0 * model.hop_us * max(0.0, P - N * done)) / done)
    reduce = reduce_us_per_byte(net, D) * model.own_bytes - model.backward_us if D > 1 else 0.0
    average: float = (full * work + reduce) / P - net.overhead_us + agreement_us(net, P, D)
    return max(bound + least_finish_us(model, net, P, D), average)


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
        gpus: int,
        lowest: int,
        pinned_d: int,
        tables: Tables,
        shapes: Shapes,
    ) -> int:
        """Fills `shapes` with every shape and a lower bound, and `tables`. How many there are.

        Of replicas with the same N only the fewest count: more cost GPUs and all-reduce for nothing. Shapes with too
        few stages for the memory, whatever else, stand once for each P.

        Args:
            counts: M [S].
            heaviest_forward: [S] the largest part of forward in any section's forward and backward.
            lowest: P, the first; the last is the tables'.
            pinned_d: 0 for every D.
        """
        assert code != -1  # a use, so that it is part of the cache's key
        size, p, d, n, short_last, state, time_us = shapes
        S = counts.shape[0]
        highest = tables.free_us.shape[1] - 1
        sets, first = np.empty((4, highest + 1), dtype=np.int64), np.empty(highest + 1, dtype=np.int64)
        at = 0
        for a in range(S):
            count, of = counts[a], _cuts.at_size(sections, limits, a)
            _cuts.fill_free(of.work, highest, tables.free_us[a], tables.free_end[a])
            fewest = _cuts.fewest_stages(of)
            model = whole(sections, net, a)
            for P in range(lowest, highest + 1):
                D = min(gpus // P, count)
                if pinned_d > 0:
                    D = pinned_d if pinned_d <= D else 0
                # No cut gets better with more micro-batches, so that of the least is a bound for all.
                V = tables.free_us[a, P] if fewest <= P else _INFINITY
                if fewest <= P and D > 0:
                    _cuts.fill_sets(of, limits, P, -(-count // D), 0, sets[:, : P + 1])
                    V = _cuts.least_work(of, sets[:, : P + 1], 0, P, V, _INFINITY, first)
                tables.least_us[a, P] = V
                while D > 0:
                    if pinned_d == 0:
                        D = _fewest(count, D)
                    N = -(-count // D)
                    size[at], p[at], d[at], n[at], short_last[at] = a, P, D, N, D == 1
                    if V == _INFINITY:
                        state[at], time_us[at] = UNFIT, _INFINITY
                        at += 1
                        break
                    cap = P + most_run_ahead(limits, P, N) if limits.counts_stages else N
                    state[at] = BOUNDED
                    time_us[at] = _bound(model, net, V, heaviest_forward[a], P, D, N, cap)
                    at += 1
                    D = 0 if pinned_d > 0 else D - 1
        return at

    return enumerate_shapes


_CODE = code_of(_cuts, _kernels)
count_shapes = _make_count(_CODE)
enumerate_shapes = _make_enumerate(_CODE)
