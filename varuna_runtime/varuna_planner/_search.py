# mypy: disable-error-code="untyped-decorator"
"""Compiled: the search for the best plan over all shapes; `auto_config` says what is searched.

Letters: K sections, S micro-batch sizes, P stages, D replicas, N micro-batches of a replica, V the least possible work
of the busiest stage, k run-ahead. A shape is (size, P, D), with `LEVELS` of it: how much run-ahead its cuts leave room
for.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numba import njit

from varuna_planner import _bounds, _cuts, _enumerate, _kernels, _makespan
from varuna_planner._enumerate import least_finish_us, most_run_ahead
from varuna_planner._rules import code_of, stash_cap
from varuna_planner._tables import (
    DRAWN,
    LEVELS,
    SIMULATED,
    UNFIT,
    UNLIMITED,
    Flags,
    Floats,
    Ints,
    Limits,
    Network,
    Sections,
    Shapes,
    Size,
    StageTimes,
    Tables,
    Whole,
)

_INFINITY = np.inf

FIRST_DIVE, DIVE_FACTOR = 16, 4
"""After how many cuts drawn one is simulated before its turn, and how many times as many until the next."""


@njit(nogil=True)
def _draw(
    of: Size,
    limits: Limits,
    tables: Tables,
    a: int,
    P: int,
    N: int,
    level: int,
    least: float,
    limit: float,
    starts: Ints,
    recompute: Flags,
) -> tuple[float, int]:
    """(V, k) of a shape's cut, with V infinite if more than `limit`; fills starts[P + 1] and recompute[P]."""
    most = most_run_ahead(limits, P, N)
    room = min(level * P, most)
    sets = np.empty((4, P + 1), dtype=np.int64)
    _cuts.fill_sets(of, limits, P, N, room, sets)
    # The best cut where memory limits nothing is the best wherever it fits.
    _cuts.read_starts(tables.free_end[a], P, starts)
    if _cuts.fits_without_recompute(of, sets, starts, P):
        busiest = tables.free_us[a, P]
    else:
        busiest = _cuts.cut(of, sets, P, max(least, tables.least_us[a, P]), limit, starts)
    if busiest == _INFINITY:
        return busiest, 0
    for s in range(P):
        needed = _cuts.needed_bytes(of, sets, starts, P, s, False)
        recompute[s] = s < P - 1 and needed > limits.usable_bytes
    return busiest, _cuts.largest_run_ahead(of, limits, N, starts, recompute[:P], room, most)


@njit(nogil=True)
def _times(sections: Sections, net: Network, a: int, P: int, D: int, short_last: bool, starts: Ints) -> StageTimes:
    times: StageTimes = _kernels.stage_times(
        starts[: P + 1],
        sections.forward_us[a],
        sections.recompute_us[a],
        sections.backward_us[a],
        sections.output_bytes[a],
        sections.gradient_bytes,
        net.ties,
        net.tie_bytes,
        net.same_vm,
        net.other_vm,
        net.gpus_per_vm,
        net.hop_us,
        net.byte_us,
        net.overhead_us,
        net.optimizer_us,
        D,
        short_last,
    )
    return times


@njit(nogil=True)
def _run(
    limits: Limits,
    N: int,
    k: int,
    times: StageTimes,
    recompute: Flags,
    cutoff: float,
    key: int,
    told: Ints,
    told_us: Floats,
) -> float:
    """The makespan of the policy; a lower bound where that exceeds `cutoff`; -1 when it has to be told and is not."""
    F, R, B, transfer, latency, finish = times
    time: float = _makespan.makespan(limits.policy, N, k, F, R, B, transfer, latency, finish, recompute, cutoff)
    if time < 0.0:
        for at in range(told.size):
            if told[at] == key:
                time = told_us[at]
    return time


def _make_draw(code: int) -> Any:
    @njit(cache=True, nogil=True)
    def draw(
        sections: Sections,
        net: Network,
        limits: Limits,
        tables: Tables,
        a: int,
        P: int,
        D: int,
        N: int,
        level: int,
    ) -> tuple[float, int, Ints, Flags, Ints, StageTimes]:
        """(V, k, starts[P + 1], recompute[P], bytes[P], stage times) of one shape; V is infinite if it does not fit."""
        assert code != -1  # a use, so that it is part of the cache's key
        of = _cuts.at_size(sections, limits, a)
        starts, recompute = np.zeros(P + 1, dtype=np.int64), np.zeros(P, dtype=np.bool_)
        V, k = _draw(of, limits, tables, a, P, N, level, 0.0, _INFINITY, starts, recompute)
        needed = np.zeros(P, dtype=np.int64)
        sets = np.zeros((4, P + 1), dtype=np.int64)
        _cuts.fill_sets(of, limits, P, N, k, sets)
        for s in range(P):
            needed[s] = _cuts.needed_bytes(of, sets, starts, P, s, recompute[s])
        return V, k, starts, recompute, needed, _times(sections, net, a, P, D, D == 1, starts)

    return draw


@njit(nogil=True)
def _most_work(model: Whole, net: Network, P: int, D: int, full: int, best_time: float) -> float:
    """The most that V can be for a time of no more than the best; a little more, for rounding."""
    if full == 0 or best_time == _INFINITY:
        return _INFINITY
    most: float = max(0.0, best_time - least_finish_us(model, net, P, D)) / full * (1.0 + 1e-9)
    return most


@njit(nogil=True)
def _lowest_drawn(queue: list[tuple[float, int, int, int, float]]) -> int:
    """Place of the drawn shape with the lowest bound; -1 when none is."""
    lowest = -1
    for place in range(len(queue)):
        if queue[place][4] > 0.0 and (lowest < 0 or queue[place][0] < queue[lowest][0]):
            lowest = place
    return lowest


def _make_search(code: int) -> Any:
    @njit(cache=True, nogil=True)
    def search(
        sections: Sections,
        net: Network,
        limits: Limits,
        tables: Tables,
        shapes: Shapes,
        ordered: Ints,
        upper: float,
        most_runs: int,
        told: Ints,
        told_us: Floats,
    ) -> tuple[int, int, float, int, int]:
        """(the best shape or -1, its level, its time, how many cuts were drawn, how many simulated).

        Best first: the cut with the lowest bound is drawn, or if it is, simulated, until no bound is left below the
        best time; now and then the lowest that is drawn is simulated before its turn, for a time to leave cuts out by.
        On equal times fewer GPUs win, then fewer stages, then the smaller micro-batch and level.

        Args:
            ordered: the shapes to search, by bound.
            upper: the best time is known not to be above.
            most_runs: to simulate; the best of these is the answer then.
            told, told_us: times of shapes shape * LEVELS + level that the policy's makespan is not known of. Where one
                more is needed, the answer is that shape, its level and a time of -1.
        """
        assert code != -1  # a use, so that it is part of the cache's key
        size, p, d, n, short_last, state, time_us = shapes
        S, K = sections.inputs.shape
        most_stages = tables.free_us.shape[1] - 1
        starts, recompute = np.empty(most_stages + 1, dtype=np.int64), np.empty(most_stages, dtype=np.bool_)
        cap = np.empty(most_stages, dtype=np.int64)
        known = _bounds.nothing_known(S, most_stages)
        best, best_level, best_rank, best_time = -1, 0, 0, upper
        draws, runs, next_dive = 0, 0, FIRST_DIVE
        # (bound, rank, shape, level, V), where V is 0 for what is not drawn yet, and -1 when the next level is queued
        # all the same.
        queue = [(_INFINITY, 0, -1, 0, 0.0)]
        queue.pop()
        at = 0
        while runs < most_runs:
            dive = -1
            if draws >= next_dive:
                dive = _lowest_drawn(queue)
                next_dive *= DIVE_FACTOR
            if dive >= 0 and queue[dive][0] < best_time:
                bound, rank, index, level, V = queue[dive]
                queue[dive] = queue[-1]
                queue.pop()
                heapq.heapify(queue)
            elif queue and (at == ordered.size or queue[0][0] <= time_us[ordered[at]]):
                bound, rank, index, level, V = heapq.heappop(queue)
            elif at < ordered.size:
                index, level, V = ordered[at], 0, 0.0
                bound = time_us[index]
                rank = ((p[index] * d[index] * (K + 1) + p[index]) * S + size[index]) * LEVELS
                at += 1
            else:
                break
            if bound > best_time:
                break
            if bound == best_time and best >= 0 and rank >= best_rank:
                continue
            a, P, D, N = size[index], p[index], d[index], n[index]
            full, most = (N - 1 if short_last[index] else N), most_run_ahead(limits, P, N)
            of, model = _cuts.at_size(sections, limits, a), _enumerate.whole(sections, net, a)
            is_drawn = V > 0.0
            may_check = not is_drawn and not short_last[index] and best_time < _INFINITY
            if may_check and _bounds.is_known_impossible(known, a, P, D, N, level, best_time):
                if level == 0:
                    time_us[index] = max(time_us[index], best_time)
                continue
            if V == 0.0 and not short_last[index]:
                least, alone = _bounds.least_us(of, model, net, limits, known, a, P, D, N, level)
                if alone > bound * (1.0 + 1e-9):
                    if level == 0:
                        time_us[index] = max(time_us[index], least)
                    heapq.heappush(queue, (alone, rank, index, level, -1.0))
                    if level + 1 < LEVELS and level * P < most and limits.usable_bytes < UNLIMITED:
                        heapq.heappush(queue, (max(bound, least), rank + 1, index, level + 1, 0.0))
                    continue
            if may_check and not _bounds.is_possible(
                of, model, sections, net, limits, known, a, P, D, N, level, best_time
            ):
                if level == 0:
                    time_us[index] = max(time_us[index], best_time)
                continue
            limit = V if is_drawn else _most_work(model, net, P, D, full, best_time)
            # With more in flight no cut gets better, so that those of fewer are where to begin.
            least = V if is_drawn else _bounds.least_work(known, a, P, N, level)
            next_queued = V != 0.0
            V, k = _draw(of, limits, tables, a, P, N, level, least, limit, starts, recompute)
            draws += 1
            if V == _INFINITY or limit < V:
                if level == 0 and V == _INFINITY and limit == _INFINITY:
                    state[index], time_us[index] = UNFIT, _INFINITY
                elif level == 0:
                    time_us[index] = max(time_us[index], best_time)
                if limit > known.busiest_us[a, P, level] and not known.same_cut[a, P, level]:
                    known.n[a, P, level], known.busiest_us[a, P, level] = N, limit
                    known.drawn[a, P, level] = False
                continue
            times = _times(sections, net, a, P, D, short_last[index], starts)
            if not is_drawn:
                for s in range(P):
                    cap[s] = stash_cap(limits.policy, s, P, N, k)
                F, R, B, transfer, latency, finish = times
                closer = _kernels.lower_bound(N, F, R, B, transfer, transfer, latency, recompute[:P], finish, cap[:P])
                closer *= 1.0 - 1e-12  # it may be the time itself, summed in another order
                heapq.heappush(queue, (closer, rank, index, level, max(V, 1e-300)))
                if level == 0:
                    state[index], time_us[index] = DRAWN, closer
                if not short_last[index] and (not known.same_cut[a, P, level] or known.n[a, P, level] > N):
                    known.n[a, P, level], known.busiest_us[a, P, level] = N, V
                    known.drawn[a, P, level] = True
                    known.run_ahead[a, P, level] = k if k < most else -1
                    known.same_cut[a, P, level] = limits.usable_bytes >= UNLIMITED or (
                        limits.counts_stages and (level + 1) * P < N
                    )
                    known.starts[a, P, level, : P + 1], known.recompute[a, P, level, :P] = (
                        starts[: P + 1],
                        recompute[:P],
                    )
                    noted, before = known.stages[a, P, level], known.before[a, P, level]
                    _bounds.note(sections, net, N, times, recompute[:P], starts, noted, before)
                if next_queued:
                    continue
                level += 1
                while level < LEVELS and min(level * P, most) <= k:
                    level += 1  # has the same cut
                if level < LEVELS:
                    heapq.heappush(queue, (max(bound, full * V), rank - rank % LEVELS + level, index, level, 0.0))
                continue
            key = index * LEVELS + level
            cutoff = best_time * (1.0 + 1e-12)  # sums in other orders differ
            time = _run(limits, N, k, times, recompute[:P], cutoff, key, told, told_us)
            runs += 1
            if time < 0.0:
                return index, level, time, draws, runs
            if time <= best_time:
                state[index], time_us[index] = SIMULATED, time
                if time < best_time or best < 0 or rank < best_rank:
                    best, best_level, best_rank, best_time = index, level, rank, time
            elif state[index] != SIMULATED:
                time_us[index] = max(time_us[index], time)
        return best, best_level, best_time, draws, runs

    return search


_CODE = code_of(_bounds, _cuts, _enumerate, _kernels, _makespan)
draw = _make_draw(_CODE)
search = _make_search(_CODE)
