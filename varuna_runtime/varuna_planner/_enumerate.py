# mypy: disable-error-code="untyped-decorator"
"""Compiled: every shape there is, with a lower bound of its time; `auto_config` says what is searched.

Letters: K sections, S micro-batch sizes, P stages, D replicas, M micro-batches of the global batch, N of a replica, V
the least possible work of the busiest stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from varuna_planner import _cuts, _kernels
from varuna_planner._compiled import compiled
from varuna_planner._kernels import BUCKET_BYTES, agreement_us, ring_us
from varuna_planner._rules import code_of
from varuna_planner._tables import (
    BOUNDED,
    RUN_AHEAD_STAGES,
    UNFIT,
    Ints,
    Limits,
    Network,
    Problem,
    Shapes,
    Size,
    Whole,
)

_INFINITY = np.inf


@compiled()
def most_run_ahead(limits: Limits, P: int, N: int) -> int:
    return min(RUN_AHEAD_STAGES * P, N - 1) if limits.runs_ahead and P > 1 else 0


@compiled()
def full_micro_batches(D: int, N: int) -> int:
    """Of N, those that are surely as large as the others: where there is one replica, the last may be smaller."""
    return N - 1 if D == 1 else N


@compiled()
def reduce_us_per_byte(net: Network, D: int) -> float:
    """What a stage's all-reduce takes for each byte of gradients, at least: on links, and a bucket's hops."""
    per_byte: float = 2.0 * (D - 1) * (net.hop_us / BUCKET_BYTES + net.byte_us / D)
    return per_byte


@compiled()
def whole(problem: Problem, a: int) -> Whole:
    """Of micro-batch size number a."""
    sections, net = problem.sections, problem.net
    K, message = sections.inputs.shape[1], sections.least_message[a]
    hop = net.other_vm[0] + message / net.other_vm[1]
    if net.gpus_per_vm > 1:
        hop = min(hop, net.same_vm[0] + message / net.same_vm[1])
    return Whole(
        sections.forward_us[a, 0, K],
        sections.backward_us[a, 0, K],
        float(sections.own_bytes[K]),
        float(sections.own_bytes[1]),
        sections.backward_us[a, 0, 1],
        sections.forward_share[a],
        sections.reduce_rate[a],
        net.ends_bytes,
        hop,
    )


@compiled()
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


@compiled()
def _bound(model: Whole, net: Network, V: float, P: int, D: int, N: int, cap: int) -> float:
    """A lower bound for every cut into P stages: of four, in the order below. No cut has to be made for it.

    1. The busiest stage's work. 2. One micro-batch's way through all stages and back, during which the busiest stage
    can do no more than its stash's forwards, `cap` at most, and then what else it has to do. 3. That of s stages' fill,
    N times the work of stage s, and their drain, were work dealt out to make it the same for every s: with hops of h
    there and back, w_s + h = (w_0 + h) (1 - 1/N)^s. 4. The average stage, with its all-reduce, which at best overlaps
    one backward. Behind 1 to 3 comes `least_finish_us`.
    """
    work = model.forward_us + model.backward_us
    full = full_micro_batches(D, N)
    bound = full * V
    if D > 1:
        way = work + 2.0 * (P - 1) * model.hop_us
        hidden = (min(N, cap) - 1) * model.forward_share
        bound = max(bound, way + V * max(0.0, (N - 1) - hidden))
        if N > 1:
            done = 1.0 - (1.0 - 1.0 / N) ** P
            bound = max(bound, (work + 2.0 * model.hop_us * max(0.0, P - N * done)) / done)
    reduce = reduce_us_per_byte(net, D) * model.own_bytes - model.backward_us if D > 1 else 0.0
    average: float = (full * work + reduce) / P - net.overhead_us + agreement_us(net, P, D)
    return max(bound + least_finish_us(model, net, P, D), average)


@compiled()
def _fewest(count: int, most: int) -> int:
    """The fewest replicas whose busiest has no more micro-batches than with `most`."""
    N = -(-count // most)
    return -(-count // N)


@compiled()
def _most_replicas(gpus: int, P: int, count: int, pinned_d: int) -> int:
    """Of P stages, each with one of `count` micro-batches at least; 0 when the pinned D is more."""
    most: int = min(gpus // P, count)
    if pinned_d == 0:
        return most
    return pinned_d if pinned_d <= most else 0


@compiled()
def _least_work(of: Size, limits: Limits, free_us: float, fewest: int, P: int, D: int, count: int) -> float:
    """V of P stages on at most D replicas, at least; infinite if no cut fits the memory.

    No cut gets better with more micro-batches, so that of the least, which D replicas have, is a bound for all.
    """
    if fewest > P:
        return _INFINITY
    if D == 0:
        return free_us
    sets = np.empty((4, P + 1), dtype=np.int64)
    _cuts.fill_sets(of, limits, P, -(-count // D), 0, sets)
    least: float = _cuts.least_work(of, sets, 0, P, free_us, _INFINITY, np.empty(P + 1, dtype=np.int64))
    return least


def _make_count(code: int) -> Any:
    @compiled(cache=True)
    def count_shapes(counts: Ints, gpus: int, lowest: int, highest: int, pinned_d: int) -> int:
        """How many shapes `enumerate_shapes` finds at most."""
        assert code != -1  # a use, so that it is part of the cache's key
        total = 0
        for count in counts:
            for P in range(lowest, highest + 1):
                D = _most_replicas(gpus, P, count, pinned_d)
                while D > 0:
                    D = 0 if pinned_d > 0 else _fewest(count, D) - 1
                    total += 1
        return total

    return count_shapes


def _make_enumerate(code: int) -> Any:
    @compiled(cache=True)
    def enumerate_shapes(problem: Problem, counts: Ints, gpus: int, lowest: int, pinned_d: int, shapes: Shapes) -> int:
        """Fills `shapes` with every shape and a lower bound, and the problem's tables. How many there are.

        Of replicas with the same N only the fewest count: more cost GPUs and all-reduce for nothing. Shapes with too
        few stages for the memory, whatever else, stand once for each P.

        Args:
            counts: M [S].
            lowest: P, the first; the last is the tables'.
            pinned_d: 0 for every D.
        """
        assert code != -1  # a use, so that it is part of the cache's key
        size, p, d, n, state, time_us = shapes
        net, limits, tables = problem.net, problem.limits, problem.tables
        highest = tables.free_us.shape[1] - 1
        at = 0
        for a in range(counts.shape[0]):
            count, of, model = counts[a], _cuts.at_size(problem, a), whole(problem, a)
            _cuts.fill_free(of.work, highest, tables.free_us[a], tables.free_end[a])
            fewest = _cuts.fewest_stages(of)
            for P in range(lowest, highest + 1):
                D = _most_replicas(gpus, P, count, pinned_d)
                V = tables.least_us[a, P] = _least_work(of, limits, tables.free_us[a, P], fewest, P, D, count)
                while D > 0:
                    if pinned_d == 0:
                        D = _fewest(count, D)
                    N = -(-count // D)
                    size[at], p[at], d[at], n[at] = a, P, D, N
                    state[at], time_us[at] = UNFIT, _INFINITY
                    if V < _INFINITY:
                        cap = P + most_run_ahead(limits, P, N) if limits.counts_stages else N
                        state[at], time_us[at] = BOUNDED, _bound(model, net, V, P, D, N, cap)
                    at += 1
                    D = 0 if pinned_d > 0 or V == _INFINITY else D - 1
        return at

    return enumerate_shapes


_CODE = code_of(_cuts, _kernels)
count_shapes = _make_count(_CODE)
enumerate_shapes = _make_enumerate(_CODE)
