# mypy: disable-error-code="untyped-decorator"
"""Compiled: the search for the best plan over all shapes; `auto_config` says what is searched.

Letters: K sections, S micro-batch sizes, P stages, D replicas, N micro-batches of a replica, V the least possible work
of the busiest stage, k run-ahead. A shape is (size, P, D), with `LEVELS` of it: how much run-ahead its cuts leave room
for.

Best first: what has the lowest bound has its turn, and each turn makes the bound closer, or gives the time itself:
TO_BOUND by what cuts of the same number of stages tell, TO_DRAW by its own cut, TO_SIMULATE. It ends when no bound is
left below the best time.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from varuna_planner import _bounds, _cuts, _enumerate, _kernels, _makespan
from varuna_planner._bounds import Known
from varuna_planner._compiled import compiled
from varuna_planner._enumerate import full_micro_batches, least_finish_us, most_run_ahead
from varuna_planner._rules import code_of, stash_cap
from varuna_planner._tables import (
    DRAWN,
    LEVELS,
    SIMULATED,
    UNFIT,
    UNLIMITED,
    Cut,
    Flags,
    Floats,
    Ints,
    Problem,
    Shape,
    Shapes,
    Size,
    StageTimes,
    Whole,
)

_INFINITY = np.inf

FIRST_DIVE, DIVE_FACTOR = 16, 4
"""After how many cuts drawn one is simulated before its turn, and how many times as many until the next."""

TO_BOUND, TO_DRAW, TO_SIMULATE = 0, 1, 2


class Turn(NamedTuple):
    """What to do about one level of one shape; the lowest bound comes first, then the lowest rank."""

    bound_us: float
    rank: int
    """On equal times the lowest wins: of fewer GPUs, then fewer stages, then the smaller micro-batch and level."""
    number: int
    """Of the shape; -1: there is nothing to do."""
    level: int
    todo: int
    busiest_us: float
    """V, of what is drawn."""


class Best(NamedTuple):
    """The best so far."""

    number: int
    """Of the shape; -1: none."""
    level: int
    rank: int
    time_us: float


@compiled()
def _draw(problem: Problem, of: Size, shape: Shape, least: float, limit: float, cut: Cut) -> tuple[float, int]:
    """(V, k) of a shape's cut, which it fills in; V, known to be at least `least`, is infinite if more than `limit`."""
    limits, tables, (a, P, _, N, level) = problem.limits, problem.tables, shape
    sets = _bounds.room_sets(problem, of, shape)
    # The best cut where memory limits nothing is the best wherever it fits.
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
def _times(problem: Problem, shape: Shape, cut: Cut) -> StageTimes:
    starts = cut.starts[: shape.P + 1]
    times: StageTimes = _kernels.stage_times(problem.sections, problem.net, shape.a, starts, shape.D)
    return times


def _make_draw(code: int) -> Any:
    @compiled(cache=True)
    def draw(
        problem: Problem, a: int, P: int, D: int, N: int, level: int
    ) -> tuple[float, int, Ints, Flags, Ints, StageTimes]:
        """(V, k, starts[P + 1], recompute[P], bytes[P], stage times) of one shape; V is infinite if it does not fit."""
        assert code != -1  # a use, so that it is part of the cache's key
        of, shape = _cuts.at_size(problem, a), Shape(a, P, D, N, level)
        cut = Cut(np.zeros(P + 1, dtype=np.int64), np.zeros(P, dtype=np.bool_))
        V, k = _draw(problem, of, shape, 0.0, _INFINITY, cut)
        needed = np.zeros(P, dtype=np.int64)
        sets = np.zeros((4, P + 1), dtype=np.int64)
        _cuts.fill_sets(of, problem.limits, P, N, k, sets)
        for s in range(P):
            needed[s] = _cuts.needed_bytes(of, sets, cut.starts, P, s, cut.recompute[s])
        return V, k, cut.starts, cut.recompute, needed, _times(problem, shape, cut)

    return draw


@compiled()
def _first_turn(problem: Problem, shapes: Shapes, index: int) -> Turn:
    S, K = problem.sections.inputs.shape
    P, D = shapes.p[index], shapes.d[index]
    rank = ((P * D * (K + 1) + P) * S + shapes.size[index]) * LEVELS
    return Turn(shapes.time_us[index], rank, index, 0, TO_BOUND, 0.0)


@compiled()
def _take_lowest_drawn(queue: list[Turn], best_us: float) -> Turn:
    """Out of its turn, what is drawn and has the lowest bound, if that is below the best time."""
    lowest = -1
    for place in range(len(queue)):
        is_drawn = queue[place].todo == TO_SIMULATE
        if is_drawn and (lowest < 0 or queue[place].bound_us < queue[lowest].bound_us):
            lowest = place
    if lowest < 0 or queue[lowest].bound_us >= best_us:
        return Turn(_INFINITY, 0, -1, 0, TO_BOUND, 0.0)
    turn = queue[lowest]
    queue[lowest] = queue[-1]
    queue.pop()
    heapq.heapify(queue)
    return turn


@compiled()
def _rule_out(shapes: Shapes, turn: Turn, least_us: float) -> None:
    """No level of the shape takes less; those with more room only say what holds of themselves."""
    if turn.level == 0:
        shapes.time_us[turn.number] = max(shapes.time_us[turn.number], least_us)


@compiled()
def _queue_more_room(queue: list[Turn], turn: Turn, P: int, k: int, most: int, least_us: float, best_us: float) -> None:
    """The next level whose cuts leave room for more than k, which this one's has, if it can still win."""
    level = turn.level + 1
    while level < LEVELS and min(level * P, most) <= k:
        level += 1
    bound = max(turn.bound_us, least_us)
    if level < LEVELS and bound <= best_us:
        heapq.heappush(queue, Turn(bound, turn.rank + level - turn.level, turn.number, level, TO_BOUND, 0.0))


@compiled()
def _is_worth_a_cut(
    problem: Problem,
    shapes: Shapes,
    of: Size,
    model: Whole,
    known: Known,
    turn: Turn,
    shape: Shape,
    best_us: float,
    queue: list[Turn],
) -> bool:
    """Whether a cut is to be drawn now: not where known ones tell that it cannot win, or that others come first."""
    limits, (_, P, D, N, level) = problem.limits, shape
    if D == 1:  # its last micro-batch differs, so that nothing is known of it
        return True
    if best_us < _INFINITY and _bounds.is_known_impossible(known, shape, best_us):
        _rule_out(shapes, turn, best_us)
        return False
    if turn.todo == TO_BOUND:
        least, alone = _bounds.least_us(problem, of, model, known, shape, best_us)
        if alone > turn.bound_us * (1.0 + 1e-9):
            _rule_out(shapes, turn, least)
            if alone <= best_us:
                heapq.heappush(queue, Turn(alone, turn.rank, turn.number, level, TO_DRAW, 0.0))
            most = most_run_ahead(limits, P, N)
            k = min(level * P, most) if limits.usable_bytes < UNLIMITED else most
            _queue_more_room(queue, turn, P, k, most, least, best_us)
            return False
    if best_us < _INFINITY and not _bounds.is_possible(problem, of, model, known, shape, best_us):
        _rule_out(shapes, turn, best_us)
        return False
    return True


@compiled()
def _most_work(problem: Problem, model: Whole, shape: Shape, best_us: float) -> float:
    """The most that V can be for a time of no more than the best; a little more, for rounding."""
    full = full_micro_batches(shape.D, shape.N)
    if full == 0 or best_us == _INFINITY:
        return _INFINITY
    most: float = max(0.0, best_us - least_finish_us(model, problem.net, shape.P, shape.D)) / full * (1.0 + 1e-9)
    return most


@compiled()
def _bound_of_cut(problem: Problem, shape: Shape, k: int, times: StageTimes, recompute: Flags) -> float:
    cap = np.empty(shape.P, dtype=np.int64)
    for s in range(shape.P):
        cap[s] = stash_cap(problem.limits.policy, s, shape.P, shape.N, k)
    bound: float = _kernels.lower_bound(shape.N, times, recompute[: shape.P], cap)
    return bound * (1.0 - 1e-12)  # it may be the time itself, summed in another order


@compiled()
def _draw_turn(
    problem: Problem,
    shapes: Shapes,
    of: Size,
    model: Whole,
    known: Known,
    turn: Turn,
    shape: Shape,
    best_us: float,
    queue: list[Turn],
    cut: Cut,
) -> None:
    """Draws a cut, and queues it to be simulated, and the next level, as far as they can still win."""
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
        heapq.heappush(queue, Turn(closer, turn.rank, turn.number, turn.level, TO_SIMULATE, V))
    if shape.D > 1:
        _bounds.note_cut(problem, known, shape, V, k, cut, times)
    if turn.todo == TO_BOUND:  # else the next level is queued already
        least, most = full_micro_batches(shape.D, shape.N) * V, most_run_ahead(problem.limits, shape.P, shape.N)
        _queue_more_room(queue, turn, shape.P, k, most, least, best_us)


@compiled()
def _simulated_us(
    problem: Problem, of: Size, turn: Turn, shape: Shape, best_us: float, told: Ints, told_us: Floats, cut: Cut
) -> float:
    """The makespan of the policy; a lower bound where that exceeds the best; -1 when it has to be told and is not."""
    _, k = _draw(problem, of, shape, turn.busiest_us, turn.busiest_us, cut)
    times, recompute = _times(problem, shape, cut), cut.recompute[: shape.P]
    cutoff = best_us * (1.0 + 1e-12)  # sums in other orders differ
    time: float = _makespan.makespan(problem.limits.policy, shape.N, k, times, recompute, cutoff)
    if time < 0.0:
        for at in range(told.size):
            if told[at] == turn.number * LEVELS + turn.level:
                time = told_us[at]
    return time


@compiled()
def _better(shapes: Shapes, turn: Turn, time_us: float, best: Best) -> Best:
    """The best after a simulation, which is noted."""
    if time_us <= best.time_us:
        shapes.state[turn.number], shapes.time_us[turn.number] = SIMULATED, time_us
        if time_us < best.time_us or best.number < 0 or turn.rank < best.rank:
            return Best(turn.number, turn.level, turn.rank, time_us)
    elif shapes.state[turn.number] != SIMULATED:
        shapes.time_us[turn.number] = max(shapes.time_us[turn.number], time_us)
    return best


def _make_search(code: int) -> Any:
    @compiled(cache=True)
    def search(problem: Problem, shapes: Shapes, ordered: Ints, told: Ints, told_us: Floats) -> Best:
        """The best shape. Now and then what is drawn is simulated before its turn, for a time to leave others out by.

        Args:
            ordered: the shapes to search, by bound.
            told, told_us: times of shapes shape * LEVELS + level that the policy's makespan is not known of. Where one
                more is needed, the answer is that shape, its level and a time of -1.
        """
        assert code != -1  # a use, so that it is part of the cache's key
        S, most_stages = problem.sections.inputs.shape[0], problem.tables.free_us.shape[1] - 1
        known = _bounds.nothing_known(S, most_stages)
        cut = Cut(np.empty(most_stages + 1, dtype=np.int64), np.empty(most_stages, dtype=np.bool_))
        best = Best(-1, 0, 0, _INFINITY)
        nothing = Turn(_INFINITY, 0, -1, 0, TO_BOUND, 0.0)
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
            shape = Shape(shapes.size[i], shapes.p[i], shapes.d[i], shapes.n[i], turn.level)
            of, model = _cuts.at_size(problem, shape.a), _enumerate.whole(problem, shape.a)
            if turn.todo == TO_SIMULATE:
                time = _simulated_us(problem, of, turn, shape, best.time_us, told, told_us, cut)
                if time < 0.0:
                    return Best(turn.number, turn.level, turn.rank, time)
                best = _better(shapes, turn, time, best)
            elif _is_worth_a_cut(problem, shapes, of, model, known, turn, shape, best.time_us, queue):
                _draw_turn(problem, shapes, of, model, known, turn, shape, best.time_us, queue, cut)
                draws += 1

    return search


_CODE = code_of(_bounds, _cuts, _enumerate, _kernels, _makespan)
draw = _make_draw(_CODE)
search = _make_search(_CODE)
