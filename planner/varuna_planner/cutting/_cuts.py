# mypy: disable-error-code="untyped-decorator"
"""Compiled: cuts sections into stages that fit the memory; `auto_config` describes which cut is best.

Letters: K sections, P stages, N micro-batches of a replica, k run-ahead, r the number of stages from one to the last
(r = P - s for stage s), on which its stash depends. Prefix sums over sections have K + 1 entries.

There are three problems, each at least as hard as the one before: memory is unlimited; every message is as small as the
smallest; messages have their real size. The best cut of one is also the best of the next if its stages take no longer
there. In the second, each part of a stage that fits also fits, so greedy passes find the cut. The third takes dynamic
programming.

numba does not cache these functions. It caches the entry points of `_enumerate` and `_search`, under a key that
includes the code of these functions.
"""

from __future__ import annotations

import numpy as np

from varuna_planner._compiled import compiled
from varuna_planner._rules import gradient_sets, input_sets, most_in_flight, pass_bytes, stage_bytes, stash_cap
from varuna_planner.cutting._tables import CutInputs, Ends, Flags, Floats, Ints, SearchLimits, SearchProblem

_INFINITY = np.inf

KEPT, INPUTS, GRADIENTS, MESSAGES = 0, 1, 2, 3
"""Rows of sets[4, r]: micro-batches whose activations (without recompute), inputs and gradients a stage keeps, and the
least bytes of the last two."""


@compiled()
def fill_free(work: Floats, most_stages: int, least: Floats, end: Ends) -> None:
    """Cuts without a memory limit: fills least[P], the work of the busiest of P stages, and end[r, i], where the first
    of r stages over sections i and up ends.
    """
    K = work.shape[0] - 1
    row = work[K] - work
    least[0], least[1] = _INFINITY, row[0]
    end[1, :] = K
    for r in range(2, most_stages + 1):
        # In place: row[i] needs the entries from i + 1 on of the round before, so i ascends. The work of a first stage
        # that ends at j grows with j, the work of the rest shrinks, and the crossing moves up with i.
        j = 1
        for i in range(K - r + 1):
            j = max(j, i + 1)
            while j < K - r + 1 and work[j] - work[i] < row[j]:
                j += 1
            value, longest = max(work[j] - work[i], row[j]), j
            if j > i + 1 and row[j - 1] < value:
                value, longest = row[j - 1], j - 1
            # On a tie the longest stage wins: the earlier the heavy stages, the sooner the last one begins.
            while longest < K - r + 1 and work[longest + 1] - work[i] <= value and row[longest + 1] <= value:
                longest += 1
            row[i], end[r, i] = value, longest
        least[r] = row[0]


@compiled()
def at_size(problem: SearchProblem, a: int) -> CutInputs:
    """The sections at micro-batch size number `a`."""
    sections = problem.sections
    return CutInputs(
        sections.work_us[a],
        sections.rework_us[a],
        sections.state_bytes,
        sections.update_bytes,
        sections.activation_bytes[a],
        sections.inputs[a],
        sections.outputs[a],
        sections.working[a],
        problem.limits.usable_bytes,
        sections.least_input[a],
        sections.least_output[a],
    )


@compiled()
def fewest_stages(of: CutInputs) -> int:
    """With fewer stages no cut fits the memory, even if all recompute; K + 1 when a section fits no device."""
    state, activation, working, usable, update = of.state, of.activation, of.working, of.usable, of.update
    K: int = working.shape[0]
    stages = i = 0
    while i < K:
        j, most = i, 0
        while j < K:
            most = max(most, working[j])
            kept, moved = activation[j + 1] - activation[i], update[j + 1] - update[i]
            if stage_bytes(state[j + 1] - state[i], pass_bytes(0, 0, kept, most, 0, 0, 1), moved) > usable:
                break
            j += 1
        if j == i:
            return K + 1
        stages += 1
        i = j
    return int(stages)


@compiled()
def fill_sets(of: CutInputs, limits: SearchLimits, P: int, N: int, k: int, sets: Ints) -> None:
    for r in range(1, P + 1):
        in_flight = most_in_flight(limits.policy, P - r, P, N, k)
        cap = stash_cap(limits.policy, P - r, P, N, k)
        sets[KEPT, r] = in_flight
        sets[INPUTS, r] = input_sets(r == P, in_flight, cap, N, limits.staged)
        sets[GRADIENTS, r] = gradient_sets(r == 1, cap, N, limits.staged)
        least_input = of.inputs[0] if r == P else of.least_input
        sets[MESSAGES, r] = sets[INPUTS, r] * least_input + sets[GRADIENTS, r] * of.least_output


@compiled()
def _room_bytes(of: CutInputs, i: int, j: int) -> int:
    """What the state of sections i to j - 1 leaves of a device; -1 if even the update has no room beside it."""
    own = of.state[j] - of.state[i]
    return int(of.usable - own if own + of.update[j] - of.update[i] <= of.usable else -1)


@compiled()
def _stage_us(
    work: float, rework: float, messages: int, kept: int, most: int, room: int, sets: int, last: bool
) -> float:
    """A stage's work for one micro-batch, with recompute where memory demands it; infinite where it does not fit.

    Args:
        messages: bytes of its messages.
        kept: bytes of the activations of one micro-batch; without recompute there are `sets` of them.
        most: bytes of its largest section's working set.
        room: as of `_room_bytes`.
        last: the last stage works on one micro-batch at a time, so recompute saves nothing there.
    """
    if messages + pass_bytes(0, 0, kept, most, 0, 0, sets) <= room:
        return work
    if last or messages + pass_bytes(0, 0, kept, most, 0, 0, 1) > room:
        return _INFINITY
    return work + rework


@compiled()
def _earliest(of: CutInputs, sets: Ints, i: int, R: int, limit: float, first: Ints) -> tuple[float, float]:
    """Fills first[r], the earliest section at which the last r of R stages over sections i and up can start, if each
    has at most `limit` work.

    Greedy from the end, with the smallest messages. Returns the most work of one of these stages (infinite when they
    do not reach i), and the least work of a stage that is one section longer.
    """
    work, rework, activation, working = of.work, of.rework, of.activation, of.working
    K = of.working.shape[0]
    busiest, beyond = 0.0, _INFINITY
    first[0] = K
    r = 1
    while r <= R:
        end = start = first[r - 1]
        most, longest = 0, 0.0
        while start > i + R - r:
            most = max(most, working[start - 1])
            room, kept = _room_bytes(of, start - 1, end), activation[end] - activation[start - 1]
            time, again = work[end] - work[start - 1], rework[end] - rework[start - 1]
            time = _stage_us(time, again, sets[MESSAGES, r], kept, most, room, sets[KEPT, r], r == 1)
            if time > limit:
                beyond = min(beyond, time)
                break
            longest = time
            start -= 1
        if start == end:
            # Earlier stages have as much in flight, so that section does not fit them either, except for the very
            # first, which receives nothing.
            first[r : R + 1] = end
            if r == R or i > 0:
                return _INFINITY, beyond
            r = R
            continue
        first[r] = start
        busiest = max(busiest, longest)
        r += 1
    return (busiest if first[R] == i else _INFINITY), beyond


@compiled()
def least_work(of: CutInputs, sets: Ints, i: int, R: int, least: float, most: float, first: Ints) -> float:
    """The least work of the busiest of R stages over sections i and up, if all messages are as small as the smallest.

    At least `least`; infinite if more than `most`. Each pass gives the next value to try, up or down, so that the
    search ends with the exact one.
    """
    low, high, step, limit = least, _INFINITY, 1e-3, least
    while low < high and low <= most:
        busiest, beyond = _earliest(of, sets, i, R, limit, first)
        if busiest < _INFINITY:
            high = max(busiest, least)
        else:
            low = beyond
            step *= 2.0
        limit = min(low * (1.0 + step), most) if high == _INFINITY else 0.5 * (low + high)
        limit = max(limit, low)
    return high if high <= most else _INFINITY


@compiled()
def _cut_greedily(of: CutInputs, sets: Ints, P: int, least: float, limit: float, starts: Ints) -> float:
    """The least work of the busiest of P stages, if all messages are as small as the smallest; fills starts[P + 1].

    Every stage is as long as the least work of the busiest stage from there on allows.
    """
    work, rework, activation, working = of.work, of.rework, of.activation, of.working
    K = working.shape[0]
    first = np.empty(P + 1, dtype=np.int64)
    busiest = within = least_work(of, sets, 0, P, least, limit, first)
    if busiest == _INFINITY:
        return busiest
    _earliest(of, sets, 0, P, np.nextafter(within, 0.0), first)  # from first[r] on, less work is enough
    i = 0
    for s in range(P):
        r = P - s
        if s > 0 and i >= first[r]:
            rest = least_work(of, sets, i, r, 0.0, within, np.empty(P + 1, dtype=np.int64))
            if rest < within:
                within = rest
                _earliest(of, sets, i, r, np.nextafter(within, 0.0), first)
        starts[s] = i
        j, most = i, 0
        while j < K - r + 1:
            most = max(most, working[j])
            room, kept = _room_bytes(of, i, j + 1), activation[j + 1] - activation[i]
            time, again = work[j + 1] - work[i], rework[j + 1] - rework[i]
            if _stage_us(time, again, sets[MESSAGES, r], kept, most, room, sets[KEPT, r], r == 1) > within:
                break
            j += 1
        i = j
    starts[P] = i
    return busiest


@compiled()
def _latest(of: CutInputs, sets: Ints, P: int, limit: float, last: Ints) -> None:
    """Fills last[r], the latest section at which the last r of P stages can start, if each has at most `limit` work.

    Like `_earliest`, from the other end.
    """
    work, rework, activation, working = of.work, of.rework, of.activation, of.working
    K = working.shape[0]
    last[P] = 0
    for r in range(P, 1, -1):
        i = j = last[r]
        most = 0
        while j < K - r + 1:
            most = max(most, working[j])
            room, kept = _room_bytes(of, i, j + 1), activation[j + 1] - activation[i]
            time, again = work[j + 1] - work[i], rework[j + 1] - rework[i]
            if _stage_us(time, again, sets[MESSAGES, r], kept, most, room, sets[KEPT, r], False) > limit:
                break
            j += 1
        last[r - 1] = j


@compiled()
def _first_stage(
    of: CutInputs, sets: Ints, r: int, i: int, earliest: int, latest: int, limit: float, rest: Floats
) -> tuple[float, int]:
    """(least work of the busiest stage, where the first ends) of r stages over sections i and up.

    Infinite over `limit`. The first ends within [earliest, latest]; rest[j] is the least for the stages over j and up.
    """
    work, rework, activation, working = of.work, of.rework, of.activation, of.working
    into = of.inputs[i] * sets[INPUTS, r]
    best, end, most = limit, -1, 0
    for j in range(i + 1, latest + 1):
        most = max(most, working[j - 1])
        if work[j] - work[i] > best:
            break
        if j < earliest or rest[j] > best:
            continue
        messages, room = into + sets[GRADIENTS, r] * of.outputs[j - 1], _room_bytes(of, i, j)
        kept, again = activation[j] - activation[i], rework[j] - rework[i]
        time = _stage_us(work[j] - work[i], again, messages, kept, most, room, sets[KEPT, r], r == 1)
        time = max(time, rest[j])
        # On a tie the longest stage wins, as in `fill_free`.
        if time <= best and time < _INFINITY:
            best, end = time, j
    return (best, end) if end >= 0 else (_INFINITY, -1)


@compiled()
def read_starts(end: Ends, P: int, starts: Ints) -> None:
    """Fills starts[P + 1] from the ends of stages."""
    starts[0] = 0
    for s in range(P):
        starts[s + 1] = end[P - s, starts[s]]


@compiled()
def _cut_exactly(of: CutInputs, sets: Ints, P: int, least: float, limit: float, starts: Ints) -> float:
    """The least work of the busiest of P stages, infinite if more than `limit`; fills starts[P + 1].

    It is known to be at least `least`. Narrow windows are quick to search, so the limit that makes them begins there
    and rises.
    """
    K = of.working.shape[0]
    first, last = np.empty(P + 1, dtype=np.int64), np.empty(P + 1, dtype=np.int64)
    value, end = np.empty((P + 1, K + 1)), np.empty((P + 1, K + 1), dtype=np.int16)
    within = min(least, limit)
    while True:
        _earliest(of, sets, 0, P, within, first)
        _latest(of, sets, P, within, last)
        value[:] = _INFINITY
        value[0, K] = 0.0
        for r in range(1, P + 1):
            earliest, latest = (K, K) if r == 1 else (first[r - 1], last[r - 1])
            for i in range(first[r], min(last[r], K - r) + 1):
                value[r, i], end[r, i] = _first_stage(of, sets, r, i, earliest, latest, within, value[r - 1])
        busiest: float = value[P, 0]
        if busiest < _INFINITY:
            read_starts(end, P, starts)
            return busiest
        if within == limit:
            return _INFINITY
        within = min(limit, within * 1.1 if within < 64.0 * least else _INFINITY)


@compiled()
def _is_as_good(of: CutInputs, sets: Ints, P: int, starts: Ints) -> bool:
    """Whether the stages of `_cut_greedily` take no longer with messages of their real size."""
    activation, working = of.activation, of.working
    for s in range(P):
        r, i, j, most = P - s, starts[s], starts[s + 1], 0
        if j == i:
            return False
        for section in range(i, j):
            most = max(most, working[section])
        room, kept = _room_bytes(of, i, j), activation[j] - activation[i]
        messages = sets[INPUTS, r] * of.inputs[i] + sets[GRADIENTS, r] * of.outputs[j - 1]
        less = _stage_us(0.0, 1.0, sets[MESSAGES, r], kept, most, room, sets[KEPT, r], r == 1)
        if less < _stage_us(0.0, 1.0, messages, kept, most, room, sets[KEPT, r], r == 1):
            return False
    return bool(starts[P] == working.shape[0])


@compiled()
def cut(of: CutInputs, sets: Ints, P: int, least: float, limit: float, starts: Ints) -> float:
    """The least work of the busiest of P stages, infinite if more than `limit`; fills starts[P + 1].

    It is known to be at least `least`.
    """
    busiest: float = _cut_greedily(of, sets, P, least, limit, starts)
    if busiest == _INFINITY or _is_as_good(of, sets, P, starts):
        return busiest
    exact: float = _cut_exactly(of, sets, P, busiest, limit, starts)
    return exact


@compiled()
def is_possible(
    of: CutInputs,
    own_bytes: Floats,
    forward: Floats,
    sets: Ints,
    P: int,
    N: int,
    hop: float,
    reduce: float,
    most_us: float,
    alone_us: float,
) -> bool:
    """Whether any cut keeps two limits in every stage. A micro-batch's way to the stage and back and N times the
    stage's work take at most `most_us`. The way to the stage, N times its work, and the part of its all-reduce that a
    backward does not hide take at most `alone_us`.

    A hop, both ways, takes at least `hop` µs, and a byte of gradients `reduce` µs. Greedy: the later a stage starts,
    the further it reaches.
    """
    work, rework, activation, working = of.work, of.rework, of.activation, of.working
    K = working.shape[0]
    i = 0
    for s in range(P):
        r, j, most = P - s, i, 0
        full_us = most_us - work[i] - s * hop
        # At most its whole work without the forward hides its all-reduce.
        rest_us = alone_us - forward[i] - 0.5 * s * hop
        while j < K - r + 1:
            most = max(most, working[j])
            room, kept = _room_bytes(of, i, j + 1), activation[j + 1] - activation[i]
            time = work[j + 1] - work[i]
            hidden = time - (forward[j + 1] - forward[i])
            again = rework[j + 1] - rework[i]
            time = N * _stage_us(time, again, sets[MESSAGES, r], kept, most, room, sets[KEPT, r], r == 1)
            if time > full_us or time + (own_bytes[j + 1] - own_bytes[i]) * reduce - hidden > rest_us:
                break
            j += 1
        i = j
    return bool(i == K)


@compiled()
def needed_bytes(of: CutInputs, sets: Ints, starts: Ints, P: int, s: int, recompute: bool) -> int:
    """Peak bytes of stage s."""
    i, j, r = starts[s], starts[s + 1], P - s
    most = 0
    for section in range(i, j):
        most = max(most, of.working[section])
    passes = pass_bytes(
        of.inputs[i],
        of.outputs[j - 1],
        of.activation[j] - of.activation[i],
        most,
        sets[INPUTS, r],
        sets[GRADIENTS, r],
        1 if recompute else sets[KEPT, r],
    )
    needed: int = stage_bytes(of.state[j] - of.state[i], passes, of.update[j] - of.update[i])
    return needed


@compiled()
def fits_without_recompute(of: CutInputs, sets: Ints, starts: Ints, P: int) -> bool:
    needed = 0
    for s in range(P):
        needed = max(needed, needed_bytes(of, sets, starts, P, s, False))
    return needed <= of.usable


@compiled()
def largest_run_ahead(
    of: CutInputs, limits: SearchLimits, N: int, starts: Ints, recompute: Flags, least: int, most: int
) -> int:
    """The largest k, from `least` to `most`, with which every stage fits; with `least` they all do."""
    P = recompute.shape[0]
    for s in range(P):
        low, high, tried = least, most, most  # `most` first, because it usually fits
        i, j = starts[s], starts[s + 1]
        largest = 0
        for section in range(i, j):
            largest = max(largest, of.working[section])
        while low < high:
            in_flight = most_in_flight(limits.policy, s, P, N, tried)
            cap = stash_cap(limits.policy, s, P, N, tried)
            passes = pass_bytes(
                of.inputs[i],
                of.outputs[j - 1],
                of.activation[j] - of.activation[i],
                largest,
                input_sets(s == 0, in_flight, cap, N, limits.staged),
                gradient_sets(s == P - 1, cap, N, limits.staged),
                1 if recompute[s] else in_flight,
            )
            if stage_bytes(of.state[j] - of.state[i], passes, of.update[j] - of.update[i]) <= of.usable:
                low = tried
            else:
                high = tried - 1
            tried = (low + high + 1) // 2
        most = low
    return most
