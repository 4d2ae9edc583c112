"""Cuts sections into stages on GPUs of several types, each with its own speed and memory, and fits given stages.

Letters: K sections, P stages, N micro-batches of a replica, k run-ahead. As in `_cuts`, the best cut is the one whose
busiest stage has the least work, with recompute where memory demands it. Here each stage has the times and the memory
of its type, so plain dynamic programming over arrays finds it; it is asked for a few layouts, not for thousands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from varuna_planner.cutting import _tables
from varuna_planner.memory import gradient_sets, input_sets, pass_bytes, stage_bytes
from varuna_planner.schedule.policies import most_in_flight, stash_cap

__all__ = ["SectionRuns", "TypedCut", "cut_by_type", "fit_stages"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TypedCut:
    """A cut for all replicas."""

    starts: Ints
    """[P + 1] first section of each stage, and K."""
    recompute: npt.NDArray[np.bool_]
    """[P]."""
    run_ahead: int
    needed_bytes: tuple[int, ...]
    """By stage, on the type that has it."""


def cut_by_type(
    sections: Mapping[str, _tables.SectionTables],
    types: Sequence[str],
    usable_bytes: Sequence[int],
    limits: _tables.SearchLimits,
    *,
    N: int,
    room: int,
) -> TypedCut | None:
    """The best cut with room for a run-ahead of at least `room`, and the largest run-ahead for which memory is left;
    None: no cut fits.

    Args:
        sections: the profile of each type, at one micro-batch size.
        types: of each of the P stages.
        usable_bytes: memory that each stage may use.
        limits: the schedule, and where receives wait.
    """
    P, K = len(types), sections[types[0]].working.shape[1]
    runs = {name: SectionRuns(sections[name]) for name in set(types)}
    sets = _list_sets(limits, P, N, room)
    value, begins = np.full(K + 1, inf), []
    value[0] = 0.0
    for stage, name in enumerate(types):
        stage_us = runs[name].list_stage_us(sets[stage], usable_bytes[stage], is_last=stage == P - 1)
        busiest = np.maximum(value[:, None], stage_us)  # [i, j]
        begin = busiest.argmin(axis=0)
        begins.append(begin)
        value = busiest[begin, np.arange(K + 1)]
    if value[K] == inf:
        return None
    starts = np.zeros(P + 1, dtype=np.int64)
    starts[P] = K
    for stage in reversed(range(P)):
        starts[stage] = begins[stage][starts[stage + 1]]
    most = min(_tables.RUN_AHEAD_STAGES * P, N) if limits.runs_ahead else room
    # All types need the same bytes.
    return fit_stages(runs[types[0]], starts, usable_bytes, limits=limits, N=N, room=room, most=most)


def fit_stages(
    runs: SectionRuns,
    starts: Ints,
    usable_bytes: Sequence[int],
    *,
    limits: _tables.SearchLimits,
    N: int,
    room: int,
    most: int,
    recompute: Sequence[bool] | None = None,
) -> TypedCut:
    """Given stages, with recompute where a run-ahead of `room` demands it, and the largest run-ahead from there to
    `most` for which memory is left. If they do not fit even so, their `needed_bytes` exceed `usable_bytes`.

    Args:
        runs: of the sections.
        starts: [P + 1] first section of each stage, and K.
        usable_bytes: memory that each stage may use.
        limits: the schedule, and where receives wait.
        recompute: by stage, whatever memory demands.
    """
    P = len(starts) - 1
    bounds = [(int(starts[stage]), int(starts[stage + 1])) for stage in range(P)]

    def list_needed(k: int, recompute: Sequence[bool]) -> list[int]:
        stages = zip(bounds, _list_sets(limits, P, N, k), recompute, strict=True)
        return [runs.count_bytes(i, j, of_stage, recompute=again) for (i, j), of_stage, again in stages]

    if recompute is None:
        whole = list_needed(room, (False,) * P)
        recompute = [stage < P - 1 and whole[stage] > usable_bytes[stage] for stage in range(P)]
    low, high = room, max(room, most)
    while low < high:
        middle = (low + high + 1) // 2
        fits = all(need <= usable for need, usable in zip(list_needed(middle, recompute), usable_bytes, strict=True))
        low, high = (middle, high) if fits else (low, middle - 1)
    return TypedCut(starts, np.array(recompute, dtype=np.bool_), low, tuple(list_needed(low, recompute)))


def _list_sets(limits: _tables.SearchLimits, P: int, N: int, k: int) -> list[_StageSets]:
    sets = []
    for stage in range(P):
        in_flight = most_in_flight(limits.policy, stage, P, N, k)
        cap = stash_cap(limits.policy, stage, P, N, k)
        inputs = input_sets(stage == 0, in_flight, cap, N, limits.staged)
        sets.append(_StageSets(inputs, gradient_sets(stage == P - 1, cap, N, limits.staged), in_flight))
    return sets


class _StageSets(NamedTuple):
    """Micro-batches for which a stage's device has room."""

    inputs: int
    gradients: int
    activations: int
    """Without recompute."""


class SectionRuns:
    """All runs of sections i to j - 1 at one micro-batch size, as [K + 1, K + 1] arrays."""

    def __init__(self, sections: _tables.SectionTables) -> None:
        working = sections.working[0]
        K = working.shape[0]
        self._work, self._rework = _differences(sections.work_us[0]), _differences(sections.rework_us[0])
        self._state, self._update = _differences(sections.state_bytes), _differences(sections.update_bytes)
        self._activation = _differences(sections.activation_bytes[0])
        self._most = np.zeros((K + 1, K + 1), dtype=np.int64)
        for i in range(K):
            self._most[i, i + 1 :] = np.maximum.accumulate(working[i:])
        self._input = np.append(sections.inputs[0], 0)
        self._output = np.insert(sections.outputs[0], 0, 0)
        self._is_run = np.triu(np.ones((K + 1, K + 1), dtype=np.bool_), 1)

    def list_stage_us(self, sets: _StageSets, usable: int, *, is_last: bool) -> Floats:
        """The work of a stage for one micro-batch, with recompute where memory demands it; infinite where it does not
        fit. The last stage works on one micro-batch at a time, so recompute saves nothing there."""
        room = np.where(self._state + self._update <= usable, usable - self._state, -1)
        messages = sets.inputs * self._input[:, None] + sets.gradients * self._output[None, :] + self._most
        fits = messages + sets.activations * self._activation <= room
        recomputed = inf if is_last else np.where(messages + self._activation <= room, self._work + self._rework, inf)
        return np.where(self._is_run, np.where(fits, self._work, recomputed), inf)

    def count_bytes(self, i: int, j: int, sets: _StageSets, *, recompute: bool) -> int:
        """Peak bytes of a stage of sections i to j - 1."""
        passes = pass_bytes(
            int(self._input[i]),
            int(self._output[j]),
            int(self._activation[i, j]),
            int(self._most[i, j]),
            sets.inputs,
            sets.gradients,
            1 if recompute else sets.activations,
        )
        return stage_bytes(int(self._state[i, j]), passes, int(self._update[i, j]))


def _differences(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = sums[None, :] - sums[:, None]
    return found
