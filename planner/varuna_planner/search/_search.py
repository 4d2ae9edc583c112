# mypy: disable-error-code="untyped-decorator"
"""Compiled: the search for the best plan over all shapes; `auto_config` describes it.

Letters: K sections, S micro-batch sizes, P stages, D replicas, N micro-batches of a replica, V the least possible work
of the busiest stage, k run-ahead. A shape is (size, P, D). It has `LEVELS` levels: how much run-ahead its cuts leave
room for.

The level with the lowest bound has the next turn. A turn makes its bound closer, from known cuts with as many stages
(TO_BOUND) or from its own cut (TO_DRAW), or finds its time (TO_SIMULATE). The search ends when no bound is below the
best time.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from varuna_planner._compiled import compiled
from varuna_planner._rules import code_of, stash_cap
from varuna_planner.cutting import _cuts, _kernels
from varuna_planner.cutting._tables import (
    DRAWN,
    LEVELS,
    SIMULATED,
    UNFIT,
    UNLIMITED,
    CutInputs,
    CutShape,
    Flags,
    Floats,
    Ints,
    ModelTotals,
    SearchProblem,
    ShapeTable,
    StageCut,
    StageTimes,
)
from varuna_planner.search import _bounds, _enumerate
from varuna_planner.search._bounds import KnownBounds
from varuna_planner.search._enumerate import full_micro_batches, least_finish_us, most_run_ahead
from varuna_planner.simulator import _makespan

_INFINITY = np.inf

FIRST_DIVE, DIVE_FACTOR = 16, 4
"""After this many drawn cuts one is simulated before its turn, and each further time after a multiple of that."""

TO_BOUND, TO_DRAW, TO_SIMULATE = 0, 1, 2


class SearchTurn(NamedTuple):
    """The next thing to do for one level of one shape; the lowest bound comes first, then the lowest rank."""

    bound_us: float
    rank: int
    """Of equal times the lowest wins: fewer GPUs, then fewer stages, then the smaller micro-batch and level."""
    number: int
    """Of the shape; -1: there is nothing to do."""
    level: int
    todo: int
    busiest_us: float
    """V of the drawn cut."""


class BestShape(NamedTuple):
    """The best shape so far."""

    number: int
    """Of the shape; -1: none."""
    level: int
    rank: int
    time_us: float


@compiled()
def _draw(
    problem: SearchProblem, of: CutInputs, shape: CutShape, least: float, limit: float, cut: StageCut
) -> tuple[float, int]:
    """Fills in a shape's cut and returns (V, k). V is known to be at least `least`; infinite if more than `limit`."""
    limits, tables, (a, P, _, N, level) = problem.limits, problem.tables, shape
    sets = _bounds.room_sets(problem, of, shape)
    # The best cut without a memory limit is the best wherever it fits.
    _cuts.read_starts(tables.free_end[a], P, cut.starts)
    if _cuts.fits_without_recompute(of, sets, cut.starts, P):
        V = tables.free_us[a, P]
    else:
        V = _cuts.cut(of, sets, P, max(least, tables.least_us[a, P]), limit, cut.starts)
    if V == _INFINITY:
        return V, 0
    for s in range(P):
        needed = _cuts.needed_bytes(of, sets, cut.starts, P, s, False)
        cut.recompute[s] = s < P - 1 and needed > limits.usable_bytes
    most = most_run_ahead(limits, P, N)
    room = min(level * P, most)
    return V, _cuts.largest_run_ahead(of, limits, N, cut.starts, cut.recompute[:P], room, most)


@compiled()
def _times(problem: SearchProblem, shape: CutShape, cut: StageCut) -> StageTimes:
    starts = cut.starts[: shape.P + 1]
    times: StageTimes = _kernels.stage_times(problem.sections, problem.net, shape.a, starts, shape.D)
    return times


def _make_draw(code: int) -> Any:
    @compiled(cache=True)
    def draw_cut(
        problem: SearchProblem, a: int, P: int, D: int, N: int, level: int
    ) -> tuple[float, int, Ints, Flags, Ints, StageTimes]:
        """(V, k, starts[P + 1], recompute[P], bytes[P], stage times) of one shape; V is infinite if it does not fit."""
        assert code != -1  # a use, so that it is part of the cache's key
        of, shape = _cuts.at_size(problem, a), CutShape(a, P, D, N, level)
        cut = StageCut(np.zeros(P + 1, dtype=np.int64), np.zeros(P, dtype=np.bool_))
        V, k = _draw(problem, of, shape, 0.0, _INFINITY, cut)
        needed = np.zeros(P, dtype=np.int64)
        sets = np.zeros((4, P + 1), dtype=np.int64)
        _cuts.fill_sets(of, problem.limits, P, N, k, sets)
        for s in range(P):
            needed[s] = _cuts.needed_bytes(of, sets, cut.starts, P, s, cut.recompute[s])
        return V, k, cut.starts, cut.recompute, needed, _times(problem, shape, cut)

    return draw_cut


@compiled()
def _first_turn(problem: SearchProblem, shapes: ShapeTable, index: int) -> SearchTurn:
    S, K = problem.sections.inputs.shape
    P, D = shapes.p[index], shapes.d[index]
    rank = ((P * D * (K + 1) + P) * S + shapes.size[index]) * LEVELS
    return SearchTurn(shapes.time_us[index], rank, index, 0, TO_BOUND, 0.0)


@compiled()
def _take_lowest_drawn(queue: list[SearchTurn], best_us: float) -> SearchTurn:
    """Takes the drawn cut with the lowest bound out of the queue, if that bound is below the best time."""
    lowest = -1
    for place in range(len(queue)):
        is_drawn = queue[place].todo == TO_SIMULATE
        if is_drawn and (lowest < 0 or queue[place].bound_us < queue[lowest].bound_us):
            lowest = place
    if lowest < 0 or queue[lowest].bound_us >= best_us:
        return SearchTurn(_INFINITY, 0, -1, 0, TO_BOUND, 0.0)
    turn = queue[lowest]
    queue[lowest] = queue[-1]
    queue.pop()
    heapq.heapify(queue)
    return turn


@compiled()
def _rule_out(shapes: ShapeTable, turn: SearchTurn, least_us: float) -> None:
    """Records that the shape takes no less. Level 0 bounds all levels, the others bound only themselves."""
    if turn.level == 0:
        shapes.time_us[turn.number] = max(shapes.time_us[turn.number], least_us)


@compiled()
def _queue_more_room(
    queue: list[SearchTurn], turn: SearchTurn, P: int, k: int, most: int, least_us: float, best_us: float
) -> None:
    """Queues the next level that leaves room for more than k, this cut's run-ahead, if it can still win."""
    level = turn.level + 1
    while level < LEVELS and min(level * P, most) <= k:
        level += 1
    bound = max(turn.bound_us, least_us)
    if level < LEVELS and bound <= best_us:
        heapq.heappush(queue, SearchTurn(bound, turn.rank + level - turn.level, turn.number, level, TO_BOUND, 0.0))


@compiled()
def _is_worth_a_cut(
    problem: SearchProblem,
    shapes: ShapeTable,
    of: CutInputs,
    model: ModelTotals,
    known: KnownBounds,
    turn: SearchTurn,
    shape: CutShape,
    best_us: float,
    queue: list[SearchTurn],
) -> bool:
    """Whether to draw a cut now. If known cuts show that others come first, queues it again."""
    limits, (_, P, D, N, level) = problem.limits, shape
    if D == 1:  # its last micro-batch differs, so known cuts are no bound
        return True
    if best_us < _INFINITY and _bounds.is_known_impossible(known, shape, best_us):
        _rule_out(shapes, turn, best_us)
        return False
    if turn.todo == TO_BOUND:
        least, alone = _bounds.least_us(problem, of, model, known, shape, best_us)
        if alone > turn.bound_us * (1.0 + 1e-9):
            _rule_out(shapes, turn, least)
            if alone <= best_us:
                heapq.heappush(queue, SearchTurn(alone, turn.rank, turn.number, level, TO_DRAW, 0.0))
            most = most_run_ahead(limits, P, N)
            k = min(level * P, most) if limits.usable_bytes < UNLIMITED else most
            _queue_more_room(queue, turn, P, k, most, least, best_us)
            return False
    if best_us < _INFINITY and not _bounds.is_possible(problem, of, model, known, shape, best_us):
        _rule_out(shapes, turn, best_us)
        return False
    return True


@compiled()
def _most_work(problem: SearchProblem, model: ModelTotals, shape: CutShape, best_us: float) -> float:
    """The largest V with which a shape can be as fast as the best, and a little more for rounding."""
    full = full_micro_batches(shape.D, shape.N)
    if full == 0 or best_us == _INFINITY:
        return _INFINITY
    most: float = max(0.0, best_us - least_finish_us(model, problem.net, shape.P, shape.D)) / full * (1.0 + 1e-9)
    return most


@compiled()
def _bound_of_cut(problem: SearchProblem, shape: CutShape, k: int, times: StageTimes, recompute: Flags) -> float:
    cap = np.empty(shape.P, dtype=np.int64)
    for s in range(shape.P):
        cap[s] = stash_cap(problem.limits.policy, s, shape.P, shape.N, k)
    bound: float = _kernels.lower_bound(shape.N, times, recompute[: shape.P], cap)
    return bound * (1.0 - 1e-12)  # it may be the time itself, summed in another order


@compiled()
def _draw_turn(
    problem: SearchProblem,
    shapes: ShapeTable,
    of: CutInputs,
    model: ModelTotals,
    known: KnownBounds,
    turn: SearchTurn,
    shape: CutShape,
    best_us: float,
    queue: list[SearchTurn],
    cut: StageCut,
) -> None:
    """Draws a cut. Queues its simulation, and the next level, if they can still win."""
    limit = _most_work(problem, model, shape, best_us)
    V, k = _draw(problem, of, shape, _bounds.least_work(known, shape), limit, cut)
    if V == _INFINITY or limit < V:
        if limit < _INFINITY:
            _rule_out(shapes, turn, best_us)
        elif turn.level == 0:
            shapes.state[turn.number], shapes.time_us[turn.number] = UNFIT, _INFINITY
        _bounds.note_beyond(known, shape, limit)
        return
    times = _times(problem, shape, cut)
    closer = _bound_of_cut(problem, shape, k, times, cut.recompute)
    if turn.level == 0:
        shapes.state[turn.number], shapes.time_us[turn.number] = DRAWN, closer
    if closer <= best_us:
        heapq.heappush(queue, SearchTurn(closer, turn.rank, turn.number, turn.level, TO_SIMULATE, V))
    if shape.D > 1:
        _bounds.note_cut(problem, known, shape, V, k, cut, times)
    if turn.todo == TO_BOUND:  # otherwise the next level is already queued
        least, most = full_micro_batches(shape.D, shape.N) * V, most_run_ahead(problem.limits, shape.P, shape.N)
        _queue_more_room(queue, turn, shape.P, k, most, least, best_us)


@compiled()
def _simulated_us(
    problem: SearchProblem,
    of: CutInputs,
    turn: SearchTurn,
    shape: CutShape,
    best_us: float,
    simulated: Ints,
    simulated_us: Floats,
    cut: StageCut,
) -> float:
    """The policy's makespan, or a lower bound that exceeds the best; -1 when the caller must simulate it."""
    _, k = _draw(problem, of, shape, turn.busiest_us, turn.busiest_us, cut)
    times, recompute = _times(problem, shape, cut), cut.recompute[: shape.P]
    cutoff = best_us * (1.0 + 1e-12)  # sums in other orders differ
    time: float = _makespan.makespan(problem.limits.policy, shape.N, k, times, recompute, cutoff)
    if time < 0.0:
        for at in range(simulated.size):
            if simulated[at] == turn.number * LEVELS + turn.level:
                time = simulated_us[at]
    return time


@compiled()
def _better(shapes: ShapeTable, turn: SearchTurn, time_us: float, best: BestShape) -> BestShape:
    """Records a simulated time and returns the best shape."""
    if time_us <= best.time_us:
        shapes.state[turn.number], shapes.time_us[turn.number] = SIMULATED, time_us
        if time_us < best.time_us or best.number < 0 or turn.rank < best.rank:
            return BestShape(turn.number, turn.level, turn.rank, time_us)
    elif shapes.state[turn.number] != SIMULATED:
        shapes.time_us[turn.number] = max(shapes.time_us[turn.number], time_us)
    return best


def _make_search(code: int) -> Any:
    @compiled(cache=True)
    def search_shapes(
        problem: SearchProblem, shapes: ShapeTable, ordered: Ints, simulated: Ints, simulated_us: Floats
    ) -> BestShape:
        """The best shape. Now and then a drawn cut is simulated before its turn, because its time rules out others.

        Args:
            ordered: the shapes to search, by bound.
            simulated, simulated_us: keys shape * LEVELS + level and their times, for policies whose makespan is not
                computed here. If another is needed, the answer is that shape, its level and a time of -1.
        """
        assert code != -1  # a use, so that it is part of the cache's key
        S, most_stages = problem.sections.inputs.shape[0], problem.tables.free_us.shape[1] - 1
        known = _bounds.nothing_known(S, most_stages)
        cut = StageCut(np.empty(most_stages + 1, dtype=np.int64), np.empty(most_stages, dtype=np.bool_))
        best = BestShape(-1, 0, 0, _INFINITY)
        nothing = SearchTurn(_INFINITY, 0, -1, 0, TO_BOUND, 0.0)
        queue = [nothing]
        queue.pop()
        draws, next_dive, at = 0, FIRST_DIVE, 0
        while True:
            turn = nothing
            if draws >= next_dive:
                turn = _take_lowest_drawn(queue, best.time_us)
                next_dive *= DIVE_FACTOR
            if turn.number < 0:
                from_queue = at == ordered.size or (len(queue) > 0 and queue[0].bound_us <= shapes.time_us[ordered[at]])
                if not from_queue:
                    turn = _first_turn(problem, shapes, ordered[at])
                    at += 1
                elif queue:
                    turn = heapq.heappop(queue)
            if turn.number < 0 or turn.bound_us > best.time_us:
                return best
            if turn.bound_us == best.time_us and best.number >= 0 and turn.rank >= best.rank:
                continue
            i = turn.number
            shape = CutShape(shapes.size[i], shapes.p[i], shapes.d[i], shapes.n[i], turn.level)
            of, model = _cuts.at_size(problem, shape.a), _enumerate.whole(problem, shape.a)
            if turn.todo == TO_SIMULATE:
                time = _simulated_us(problem, of, turn, shape, best.time_us, simulated, simulated_us, cut)
                if time < 0.0:
                    return BestShape(turn.number, turn.level, turn.rank, time)
                best = _better(shapes, turn, time, best)
            elif _is_worth_a_cut(problem, shapes, of, model, known, turn, shape, best.time_us, queue):
                _draw_turn(problem, shapes, of, model, known, turn, shape, best.time_us, queue, cut)
                draws += 1

    return search_shapes


_CODE = code_of(_bounds, _cuts, _enumerate, _kernels, _makespan)
draw_cut = _make_draw(_CODE)
search_shapes = _make_search(_CODE)
