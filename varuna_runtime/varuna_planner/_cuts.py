# mypy: disable-error-code="untyped-decorator"
"""Compiled: cutting sections into stages, and what memory makes of the stages; `balance` describes the results.

Letters: K sections, P stages, N micro-batches of a replica, k run-ahead, r stages from one to the last (so that stage s
has r = P - s): a stage's stash depends on how many stages follow it. Sums over sections have K + 1 places.

Nothing here is cached by itself: the entry points of `_search` are, whose key includes the code of these functions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from varuna_planner._rules import gradient_sets, input_sets, most_in_flight, stage_bytes, stash_cap

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Ends = npt.NDArray[np.int16]

_INFINITY = np.inf


@njit(nogil=True)
def fill_free(work: Floats, most_stages: int, least: Floats, end: Ends) -> None:
    """Without regard to memory: least[P] is the work of the busiest of P stages; end[r, i] where the first ends of the
    r stages over sections i and up.
    """
    K = work.shape[0] - 1
    row = work[K] - work
    least[0], least[1] = _INFINITY, row[0]
    end[1, :] = K
    for r in range(2, most_stages + 1):
        # In place: row[i] needs those of i + 1 and up from the round before, so i ascends. The work of a first stage
        # that ends at j grows with j, that of the rest shrinks, and where they cross moves up with i.
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


@njit(nogil=True)
def fewest_stages(state: Ints, activation: Ints, working: Ints, usable: int) -> int:
    """With fewer stages no cut fits the memory, whatever is recomputed; K + 1 when a section fits no device."""
    K: int = working.shape[0]
    stages = i = 0
    while i < K:
        j, most = i, 0
        while j < K:
            most = max(most, working[j])
            if stage_bytes(state[j + 1] - state[i], 0, 0, activation[j + 1] - activation[i], most, 0, 0, 1) > usable:
                break
            j += 1
        if j == i:
            return K + 1
        stages += 1
        i = j
    return int(stages)


@njit(nogil=True)
def fill_sets(policy: int, P: int, N: int, k: int, staged: bool, sets: Ints) -> None:
    """sets[3, r]: of activations when nothing is recomputed, of inputs and of gradients."""
    for r in range(1, P + 1):
        in_flight = most_in_flight(policy, P - r, P, N, k)
        cap = stash_cap(policy, P - r, P, N, k)
        sets[0, r] = in_flight
        sets[1, r] = input_sets(r == P, in_flight, cap, N, staged)
        sets[2, r] = gradient_sets(r == 1, cap, N, staged)


@njit(nogil=True)
def _windows(
    work: Floats,
    rework: Floats,
    state: Ints,
    activation: Ints,
    working: Ints,
    usable: int,
    sets: Ints,
    messages: Ints,
    P: int,
    limit: float,
    first: Ints,
    last: Ints,
) -> bool:
    """Fills first[r] and last[r], between which the last r stages start in every cut whose stages work at most `limit`.

    Greedy from both ends, with messages[r], the least bytes that a stage's can take, in the place of its own: so a part
    of a stage that fits fits. False: there is no cut.
    """
    K = working.shape[0]
    last[P] = 0
    for r in range(P, 1, -1):
        i = j = last[r]
        most = 0
        while j < K - r + 1:
            most = max(most, working[j])
            time = work[j + 1] - work[i]
            kept, own = activation[j + 1] - activation[i], state[j + 1] - state[i] + messages[r]
            if stage_bytes(own, 0, 0, kept, most, 0, 0, sets[0, r]) > usable:
                time += rework[j + 1] - rework[i]
                if stage_bytes(own, 0, 0, kept, most, 0, 0, 1) > usable:
                    break
            if time > limit:
                break
            j += 1
        if j == i:
            return False
        last[r - 1] = j
    first[0] = K
    for r in range(1, P + 1):
        i = j = first[r - 1]
        most = 0
        while i > P - r:
            most = max(most, working[i - 1])
            time = work[j] - work[i - 1]
            kept, own = activation[j] - activation[i - 1], state[j] - state[i - 1] + messages[r]
            if stage_bytes(own, 0, 0, kept, most, 0, 0, sets[0, r]) > usable:
                time += rework[j] - rework[i - 1]
                if r == 1 or stage_bytes(own, 0, 0, kept, most, 0, 0, 1) > usable:
                    break
            if time > limit:
                break
            i -= 1
        if i == j or i > last[r]:
            return False
        first[r] = i
    return True


@njit(nogil=True)
def is_possible(
    work: Floats,
    rework: Floats,
    state: Ints,
    activation: Ints,
    inputs: Ints,
    outputs: Ints,
    working: Ints,
    usable: int,
    sets: Ints,
    P: int,
    N: int,
    hop: float,
    most_us: float,
) -> bool:
    """Whether any cut could be done in `most_us`: for each stage a micro-batch's way there and back, and N times its
    work. Hops of the way take at least `hop`, there and back. Greedy: the later a stage starts, the further it reaches.
    """
    K = working.shape[0]
    least_input = inputs[1:].min() if K > 1 else 0
    least_output = outputs[:-1].min() if K > 1 else 0
    i = 0
    for s in range(P):
        r, j, most = P - s, i, 0
        messages = sets[1, r] * (inputs[0] if s == 0 else least_input) + sets[2, r] * least_output
        limit = (most_us - work[i] - s * hop) / N
        while j < K - r + 1:
            most = max(most, working[j])
            time = work[j + 1] - work[i]
            kept, own = activation[j + 1] - activation[i], state[j + 1] - state[i] + messages
            if stage_bytes(own, 0, 0, kept, most, 0, 0, sets[0, r]) > usable:
                time += rework[j + 1] - rework[i]
                if r == 1 or stage_bytes(own, 0, 0, kept, most, 0, 0, 1) > usable:
                    break
            if time > limit:
                break
            j += 1
        if j == i:
            return False
        i = j
    return bool(i == K)


@njit(nogil=True)
def _first_stage(
    work: Floats,
    rework: Floats,
    state: Ints,
    activation: Ints,
    outputs: Ints,
    working: Ints,
    usable: int,
    into: int,
    kept_sets: int,
    gradient_sets: int,
    last_stage: bool,
    i: int,
    earliest: int,
    latest: int,
    limit: float,
    rest: Floats,
) -> tuple[float, int]:
    """(least work of the busiest stage, where the first ends) of stages over sections i and up; infinite over `limit`.

    The first ends within [earliest, latest]; rest[j] is the least for the stages over j and up; `into` are the bytes of
    its inputs, all sets of them.
    """
    best, end, most = limit, -1, 0
    for j in range(i + 1, latest + 1):
        most = max(most, working[j - 1])
        time = work[j] - work[i]
        if time > best:
            break
        if j < earliest or rest[j] > best:
            continue
        own = state[j] - state[i] + into
        kept, out = activation[j] - activation[i], outputs[j - 1]
        if stage_bytes(own, 0, out, kept, most, 0, gradient_sets, kept_sets) > usable:
            # The last stage works on one micro-batch at a time: to recompute would save nothing.
            if last_stage or stage_bytes(own, 0, out, kept, most, 0, gradient_sets, 1) > usable:
                continue
            time += rework[j] - rework[i]
        time = max(time, rest[j])
        # On a tie the longest stage wins, as in `fill_free`.
        if time <= best:
            best, end = time, j
    return (best, end) if end >= 0 else (_INFINITY, -1)


@njit(nogil=True)
def fill_full(
    work: Floats,
    rework: Floats,
    state: Ints,
    activation: Ints,
    inputs: Ints,
    outputs: Ints,
    working: Ints,
    usable: int,
    sets: Ints,
    most_stages: int,
    value: Floats,
    end: Ends,
) -> None:
    """For every P at once, with memory for N >= P: value[r, i] is the least work of the busiest of r stages over
    sections i and up, end[r, i] where the first of them ends. `sets` are those of stages that are not the first.
    """
    K = working.shape[0]
    value[0, :] = _INFINITY
    value[0, K] = 0.0
    for r in range(1, most_stages + 1):
        value[r, :] = _INFINITY
        for i in range(K - r + 1):
            # The first stage receives nothing, and keeps the inputs of what is in flight.
            into = inputs[i] * (sets[0, r] if i == 0 else sets[1, r])
            value[r, i], end[r, i] = _first_stage(
                work,
                rework,
                state,
                activation,
                outputs,
                working,
                usable,
                into,
                sets[0, r],
                sets[2, r],
                r == 1,
                i,
                K if r == 1 else i + 1,
                K - r + 1,
                _INFINITY,
                value[r - 1],
            )


@njit(nogil=True)
def read_starts(end: Ends, P: int, starts: Ints) -> None:
    """starts[P + 1] from where stages end."""
    starts[0] = 0
    for s in range(P):
        starts[s + 1] = end[P - s, starts[s]]


@njit(nogil=True)
def cut(
    work: Floats,
    rework: Floats,
    state: Ints,
    activation: Ints,
    inputs: Ints,
    outputs: Ints,
    working: Ints,
    usable: int,
    sets: Ints,
    P: int,
    least: float,
    limit: float,
    value: Floats,
    end: Ends,
    starts: Ints,
) -> float:
    """The least work of the busiest of P stages, infinite if more than `limit`; fills starts[P + 1].

    It is known to be at least `least`. value and end are scratch [P + 1, K + 1]. Narrow windows are quick to search,
    so the limit within which they are made is raised from `least` to where there first are any.
    """
    K = working.shape[0]
    first, last = np.empty(P + 1, dtype=np.int64), np.empty(P + 1, dtype=np.int64)
    messages = np.empty(P + 1, dtype=np.int64)
    least_input = inputs[1:].min() if K > 1 else 0
    least_output = outputs[:-1].min() if K > 1 else 0
    for r in range(1, P + 1):
        messages[r] = sets[1, r] * (inputs[0] if r == P else least_input) + sets[2, r] * least_output
    if not _windows(work, rework, state, activation, working, usable, sets, messages, P, limit, first, last):
        return _INFINITY
    within, below = min(least, limit), 0.0
    while not _windows(work, rework, state, activation, working, usable, sets, messages, P, within, first, last):
        below, within = within, min(limit, within * 1.08 if within < 64.0 * least else _INFINITY)
    while below > 0.0 and within < _INFINITY and within > 1.002 * below:
        middle = 0.5 * (below + within)
        if _windows(work, rework, state, activation, working, usable, sets, messages, P, middle, first, last):
            within = middle
        else:
            below = middle
    while True:
        _windows(work, rework, state, activation, working, usable, sets, messages, P, within, first, last)
        value[0, K] = 0.0
        for r in range(1, P + 1):
            earliest, latest = (K, K) if r == 1 else (first[r - 1], last[r - 1])
            for i in range(first[r], min(last[r], K - r) + 1):
                value[r, i], end[r, i] = _first_stage(
                    work,
                    rework,
                    state,
                    activation,
                    outputs,
                    working,
                    usable,
                    inputs[i] * sets[1, r],
                    sets[0, r],
                    sets[2, r],
                    r == 1,
                    i,
                    earliest,
                    latest,
                    within,
                    value[r - 1],
                )
        busiest: float = value[P, 0]
        if busiest < _INFINITY:
            read_starts(end, P, starts)
            return busiest
        if within == limit:
            return _INFINITY
        # The windows knew only the least that messages can take.
        within = min(limit, within * 1.1 if within < 64.0 * least else _INFINITY)


@njit(nogil=True)
def needed_bytes(
    state: Ints,
    activation: Ints,
    inputs: Ints,
    outputs: Ints,
    working: Ints,
    sets: Ints,
    starts: Ints,
    P: int,
    s: int,
    recompute: bool,
) -> int:
    """Peak bytes of stage s."""
    i, j, r = starts[s], starts[s + 1], P - s
    most = 0
    for section in range(i, j):
        most = max(most, working[section])
    kept_sets = 1 if recompute else sets[0, r]
    needed: int = stage_bytes(
        state[j] - state[i],
        inputs[i],
        outputs[j - 1],
        activation[j] - activation[i],
        most,
        sets[1, r],
        sets[2, r],
        kept_sets,
    )
    return needed


@njit(nogil=True)
def fits_without_recompute(
    state: Ints,
    activation: Ints,
    inputs: Ints,
    outputs: Ints,
    working: Ints,
    usable: int,
    sets: Ints,
    starts: Ints,
    P: int,
) -> bool:
    for s in range(P):
        if needed_bytes(state, activation, inputs, outputs, working, sets, starts, P, s, False) > usable:
            return False
    return True


@njit(nogil=True)
def largest_run_ahead(
    state: Ints,
    activation: Ints,
    inputs: Ints,
    outputs: Ints,
    working: Ints,
    usable: int,
    policy: int,
    N: int,
    staged: bool,
    starts: Ints,
    recompute: Flags,
    least: int,
    most: int,
) -> int:
    """The largest k from `least`, with which every stage fits, to `most`."""
    P = recompute.shape[0]
    for s in range(P):
        low, high, tried = least, most, most  # `most` first: mostly it fits
        i, j = starts[s], starts[s + 1]
        largest = 0
        for section in range(i, j):
            largest = max(largest, working[section])
        while low < high:
            in_flight, cap = most_in_flight(policy, s, P, N, tried), stash_cap(policy, s, P, N, tried)
            needed = stage_bytes(
                state[j] - state[i],
                inputs[i],
                outputs[j - 1],
                activation[j] - activation[i],
                largest,
                input_sets(s == 0, in_flight, cap, N, staged),
                gradient_sets(s == P - 1, cap, N, staged),
                1 if recompute[s] else in_flight,
            )
            if needed <= usable:
                low = tried
            else:
                high = tried - 1
            tried = (low + high + 1) // 2
        most = low
    return most
