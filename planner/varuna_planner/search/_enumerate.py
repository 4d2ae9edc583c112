# mypy: disable-error-code="untyped-decorator"
"""Compiled: lists all shapes with a lower bound of each one's time; `auto_config` describes the search.

Letters: K sections, S micro-batch sizes, P stages, D replicas, M micro-batches of the global batch, N of a replica, V
the least possible work of the busiest stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from varuna_planner._compiled import compiled
from varuna_planner._rules import code_of
from varuna_planner.cutting import _cuts, _kernels
from varuna_planner.cutting._kernels import BUCKET_BYTES, agreement_us, ring_costs, ring_us
from varuna_planner.cutting._tables import (
    BOUNDED,
    RUN_AHEAD_STAGES,
    UNFIT,
    CutInputs,
    Ints,
    ModelTotals,
    NetworkCosts,
    SearchLimits,
    SearchProblem,
    ShapeTable,
)

_INFINITY = np.inf


@compiled()
def most_run_ahead(limits: SearchLimits, P: int, N: int) -> int:
    return min(RUN_AHEAD_STAGES * P, N - 1) if limits.runs_ahead and P > 1 else 0


@compiled()
def full_micro_batches(D: int, N: int) -> int:
    """How many of N are surely full: with one replica, the last may be smaller."""
    return N - 1 if D == 1 else N


@compiled()
def reduce_us_per_byte(net: NetworkCosts, P: int, D: int) -> float:
    """The least time of a stage's all-reduce per byte of gradients: on links, and for the hops of buckets."""
    hop_us, byte_us = ring_costs(net, P)
    per_byte: float = 2.0 * (D - 1) * (hop_us / BUCKET_BYTES + byte_us / D)
    return per_byte


@compiled()
def whole(problem: SearchProblem, a: int) -> ModelTotals:
    """The totals at micro-batch size number `a`."""
    sections, net = problem.sections, problem.net
    K, message = sections.inputs.shape[1], sections.least_message[a]
    hop = net.other_vm[0] + message / net.other_vm[1]
    if net.gpus_per_vm > 1:
        hop = min(hop, net.same_vm[0] + message / net.same_vm[1])
    return ModelTotals(
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
def least_finish_us(model: ModelTotals, net: NetworkCosts, P: int, D: int) -> float:
    """The least time that follows the first stage's last backward. It never falls as D grows.

    It is the sum of three: the all-reduce of one bucket, or of the first section's gradients less its backward (unless
    more sections in the stage could make that less); that of weights tied to the last section; the agreement.
    """
    hop_us, _ = ring_costs(net, P)
    least: float = 2.0 * (D - 1) * hop_us
    per_byte = reduce_us_per_byte(net, P, D)
    if P > 1 and per_byte >= model.reduce_rate:
        least = max(least, per_byte * model.first_own_bytes - model.first_backward_us - net.overhead_us)
    if P > 1 and model.ends_bytes > 0:
        hop_us, byte_us = ring_costs(net, 1)
        least += ring_us(model.ends_bytes, 2 * D, hop_us, byte_us)
    return least + agreement_us(net, P, D)


@compiled()
def _bound(model: ModelTotals, net: NetworkCosts, V: float, P: int, D: int, N: int, cap: int) -> float:
    """A lower bound for all cuts into P stages, found without a cut: the largest of four.

    1. The busiest stage's work. 2. One micro-batch's way through all stages and back, during which the busiest stage
    can only do the forwards that its stash holds, at most `cap`, and then the rest of its work. 3. The fill up to stage
    s, N times its work, and the drain, if the work is divided so that this is the same for every s: with hops of h,
    both ways, w_s + h = (w_0 + h) (1 - 1/N)^s. 4. The average stage with its all-reduce. One backward hides a part of
    that at best. `least_finish_us` is added to 1 to 3.
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
    reduce = reduce_us_per_byte(net, P, D) * model.own_bytes - model.backward_us if D > 1 else 0.0
    average: float = (full * work + reduce) / P - net.overhead_us + agreement_us(net, P, D)
    return max(bound + least_finish_us(model, net, P, D), average)


@compiled()
def _fewest(count: int, most: int) -> int:
    """The fewest replicas whose busiest has no more micro-batches than with `most`."""
    N = -(-count // most)
    return -(-count // N)


@compiled()
def _most_replicas(gpus: int, P: int, count: int, pinned_d: int) -> int:
    """The most replicas of P stages that get a micro-batch each, of `count`; 0 when the pinned D is more."""
    most: int = min(gpus // P, count)
    if pinned_d == 0:
        return most
    return pinned_d if pinned_d <= most else 0


@compiled()
def _least_work(of: CutInputs, limits: SearchLimits, free_us: float, fewest: int, P: int, D: int, count: int) -> float:
    """A lower bound of V for P stages on at most D replicas; infinite if no cut fits the memory.

    Cuts never get better with more micro-batches, so the fewest, which D replicas have, give a bound for all.
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
        """The most shapes that `fill_shape_table` can find."""
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
    def fill_shape_table(
        problem: SearchProblem, counts: Ints, gpus: int, lowest: int, pinned_d: int, shapes: ShapeTable
    ) -> int:
        """Fills `shapes` with every shape and a lower bound, and the problem's tables. Returns the number of shapes.

        Of the D with the same N only the smallest is listed: others cost GPUs and all-reduce for nothing. A P with too
        few stages for the memory is listed once.

        Args:
            counts: [S], M of each size.
            lowest: the first P; the tables' width gives the last.
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

    return fill_shape_table


_CODE = code_of(_cuts, _kernels)
count_shapes = _make_count(_CODE)
fill_shape_table = _make_enumerate(_CODE)
