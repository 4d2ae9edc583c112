"""Which ranks keep copies of others' states, so that the loss of a VM costs no section.

A stage needs a copy where one VM has all its replicas. The copy goes to the VM that is least likely to be lost
with those: never to one of them, to the same host or zone only where there is no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

_BLOCK = 64
"""Stages that are placed together: the search takes time with their third power."""


class Copies(StrEnum):
    """A job's wish."""

    AUTO = "auto"
    """Where the loss of one VM would take all that holds a stage."""
    ON = "on"
    """Wherever there is another VM."""
    OFF = "off"


class VmPlace(NamedTuple):
    """Where a VM is; empty: not known."""

    host: str = ""
    zone: str = ""


class _Risk(IntEnum):
    """Of losing both. One of a kind is worse than any number of the kinds before: there are fewer stages than that."""

    APART = 0
    SAME_ZONE = 1
    SAME_HOST = 10_000
    SAME_VM = 100_000_000


def choose_keepers(
    copies: Copies, p: int, vm_ids: Sequence[str], places: Mapping[str, VmPlace] | None = None
) -> tuple[int, ...]:
    """By stage: the rank that keeps a copy of what the stage's first replica has. Empty: no copies are kept.

    The fewest copies share a host with what they are for, then the fewest a zone; VMs keep about equally many.

    Args:
        copies: the job's wish.
        p: stages.
        vm_ids: the VM of each rank; rank = replica * p + stage.
        places: by VM.
    """
    stages = [frozenset(vm_ids[stage::p]) for stage in range(p)]
    is_needed = any(len(of_stage) == 1 for of_stage in stages)
    if copies is Copies.OFF or (copies is Copies.AUTO and not is_needed):
        return ()
    vms = sorted(set(vm_ids))
    if any(len(of_stage) == len(vms) for of_stage in stages):
        return ()
    ranks_on = {vm: [rank for rank, other in enumerate(vm_ids) if other == vm] for vm in vms}
    kept = [0] * len(vm_ids)
    chosen: list[int] = []
    for at in range(0, p, _BLOCK):
        risks = [[_rate(of_stage, vm, places or {}) for vm in vms] for of_stage in stages[at : at + _BLOCK]]
        for place in _assign_evenly(risks):
            keeper = min(ranks_on[vms[place]], key=lambda rank: (kept[rank], rank))
            kept[keeper] += 1
            chosen.append(keeper)
    return tuple(chosen)


def _rate(owners: frozenset[str], keeper: str, places: Mapping[str, VmPlace]) -> int:
    if keeper in owners:
        return _Risk.SAME_VM
    own, others = places.get(keeper, VmPlace()), [places.get(vm, VmPlace()) for vm in owners]
    if own.host and any(own.host == other.host for other in others):
        return _Risk.SAME_HOST
    is_near = own.zone and any(own.zone == other.zone for other in others)
    return _Risk.SAME_ZONE if is_near else _Risk.APART


def _assign_evenly(risks: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row, with the least sum of risks. A column serves as few rows as avoid `SAME_VM`."""
    columns = len(risks[0])
    for most in range(-(-len(risks) // columns), len(risks) + 1):
        slots = [[risk for risk in row for _ in range(most)] for row in risks]
        assigned = [slot // most for slot in _assign(slots)]
        if all(row[column] < _Risk.SAME_VM for row, column in zip(risks, assigned, strict=True)):
            break
    return assigned


def _assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row, each column once at most, with the least sum of costs (the Hungarian method).

    There are at least as many columns as rows.
    """
    rows, columns = len(costs), len(costs[0])
    row_price, column_price = [0] * (rows + 1), [0] * (columns + 1)
    row_of, before = [0] * (columns + 1), [0] * (columns + 1)
    """By column, from 1: its row (0: none), and the column before it on the path."""
    for row in range(1, rows + 1):
        row_of[0], column = row, 0
        least, is_done = [1 << 62] * (columns + 1), [False] * (columns + 1)
        while row_of[column]:
            is_done[column] = True
            step, following, current = 1 << 62, 0, row_of[column]
            for other in range(1, columns + 1):
                if is_done[other]:
                    continue
                slack = costs[current - 1][other - 1] - row_price[current] - column_price[other]
                if slack < least[other]:
                    least[other], before[other] = slack, column
                if least[other] < step:
                    step, following = least[other], other
            for other in range(columns + 1):
                if is_done[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                else:
                    least[other] -= step
            column = following
        while column:
            row_of[column], column = row_of[before[column]], before[column]
    assigned = [0] * rows
    for column, row in enumerate(row_of[1:]):
        if row:
            assigned[row - 1] = column
    return assigned
