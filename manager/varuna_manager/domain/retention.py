"""How long ended things are kept, how many rows are deleted at once, and what is kept of VMs for ever."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DAY_S = 86_400.0
_HELD_S = 0.05
"""The time that one batch should take. Other writers wait for it."""
_LEAST, _MOST = 100, 5_000
"""Rows of a batch."""


@dataclass(frozen=True, kw_only=True)
class KeepDays:
    """Days for which something is kept after its end; 0: for ever."""

    events: float = 30.0
    jobs: float = 60.0
    vms: float = 30.0
    archives: float = 30.0
    logs: float = 7.0
    """Also stacks, traces, candidate plans, and the histories of workers."""
    tokens: float = 7.0


def find_horizon(now: float, days: float) -> float | None:
    """What ended before this time is deleted; None: nothing is."""
    return now - days * DAY_S if days > 0 else None


def choose_batch_size(rows: int, took_s: float) -> int:
    """How many rows to delete at once, after a batch of `rows` took `took_s`: at most twice as many."""
    factor = min(max(_HELD_S / max(took_s, 1e-4), 0.1), 2.0)
    return min(max(int(rows * factor), _LEAST), _MOST)


# ---------------------------------------------------------------- VMs by the day


class PastPrice(NamedTuple):
    """A price that a VM had before its last one."""

    since: float
    until: float
    price_per_hour: float


@dataclass(frozen=True, kw_only=True)
class GoneVm:
    """A VM that is gone."""

    created_at: float
    gone_at: float
    gpus: int
    price_per_hour: float | None
    """Its last one."""
    past_prices: Sequence[PastPrice] = ()

    def find_cost(self, begins: float, ends: float) -> float:
        """Of this part of its life; 0 if its price is not known."""
        last = self.price_per_hour or 0.0
        changes = [(past, min(ends, past.until) - max(begins, past.since)) for past in self.past_prices]
        changed = sum(max(seconds, 0.0) * (past.price_per_hour - last) for past, seconds in changes)
        return (max(ends - begins, 0.0) * last + changed) / 3600


@dataclass(kw_only=True)
class FleetDay:
    """What VMs did on one day (UTC)."""

    vm_hours: float = 0.0
    gpu_hours: float = 0.0
    cost: float = 0.0
    gone: int = 0
    gone_with_price: int = 0


def sum_up_by_day(vms: Iterable[GoneVm]) -> dict[int, FleetDay]:
    """The fleet by day since the epoch. A VM's hours count on each day on which it existed."""
    days: dict[int, FleetDay] = {}
    for vm in vms:
        last = int(max(vm.gone_at, vm.created_at) // DAY_S)
        for number in range(int(vm.created_at // DAY_S), last + 1):
            day = days.setdefault(number, FleetDay())
            begins, ends = max(vm.created_at, number * DAY_S), min(vm.gone_at, (number + 1) * DAY_S)
            hours = max(ends - begins, 0.0) / 3600
            day.vm_hours += hours
            day.gpu_hours += hours * vm.gpus
            day.cost += vm.find_cost(begins, ends)
        days[last].gone += 1
        days[last].gone_with_price += vm.price_per_hour is not None
    return days
