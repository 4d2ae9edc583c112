"""The history of a spot fleet, and the hazards measured from it.

A trace is text with one event per line: `milliseconds,add|remove,node`, times ascending (Bamboo's format; blank lines
and lines that start with # are skipped). The VMs added at the first time are the initial fleet.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from varuna_planner.liveput.liveput import Hazard

__all__ = ["SpotTrace", "TraceEvent", "measure_hazard", "parse_trace"]

_HOW: Final = "expected milliseconds,add|remove,node"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """A VM joins or leaves."""

    at_s: float
    add: bool
    """False: the VM leaves."""
    node: str


@dataclass(frozen=True, kw_only=True)
class SpotTrace:
    """Events in the order of time; each changes the fleet."""

    events: tuple[TraceEvent, ...]

    @property
    def starts_s(self) -> float:
        return self.events[0].at_s

    @property
    def ends_s(self) -> float:
        return self.events[-1].at_s

    def iterate_bursts(self) -> Iterator[tuple[float, tuple[TraceEvent, ...]]]:
        """The events of each time that has any."""
        for at_s, events in itertools.groupby(self.events, key=lambda event: event.at_s):
            yield at_s, tuple(events)

    def iterate_fleets(self) -> Iterator[tuple[float, frozenset[str]]]:
        """The fleet from each time on."""
        there: set[str] = set()
        for at_s, events in self.iterate_bursts():
            for event in events:
                (there.add if event.add else there.discard)(event.node)
            yield at_s, frozenset(there)


def parse_trace(text: str, *, name: str = "trace") -> SpotTrace:
    """Reads a trace. Raises ValueError naming the line, its text and the fault."""
    events: list[TraceEvent] = []
    there: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            event = _parse_line(line)
            _check_order(event, events, there)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        (there.add if event.add else there.remove)(event.node)
        events.append(event)
    if not events:
        raise ValueError(f"{name} has no events: {_HOW} on every line")
    return SpotTrace(events=tuple(events))


def _parse_line(line: str) -> TraceEvent:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3 or not fields[2]:
        raise ValueError(f"{line.strip()[:60]!r}: {_HOW}")
    milliseconds, what, node = fields
    try:
        at_ms = float(milliseconds)
    except ValueError:
        raise ValueError(f"{milliseconds[:40]!r} is no number of milliseconds: {_HOW}") from None
    if not math.isfinite(at_ms) or at_ms < 0:
        raise ValueError(f"{milliseconds[:40]} milliseconds: a time is finite and not negative")
    if what not in ("add", "remove"):
        raise ValueError(f"{what[:40]!r} is neither add nor remove: {_HOW}")
    return TraceEvent(at_s=at_ms / 1e3, add=what == "add", node=node)


def _check_order(event: TraceEvent, before: list[TraceEvent], there: set[str]) -> None:
    if before and event.at_s < before[-1].at_s:
        raise ValueError(f"{event.at_s:g} s comes after {before[-1].at_s:g} s: times must ascend")
    if event.add and event.node in there:
        raise ValueError(f"node {event.node} is added and was there already")
    if not event.add and event.node not in there:
        raise ValueError(f"node {event.node} is removed and was not there")


def measure_hazard(trace: SpotTrace) -> Hazard:
    """The rates of a trace, each the maximum-likelihood estimate of a Poisson process, and its burst sizes.

    Removals are counted per VM-hour, additions per hour. Raises ValueError when the trace covers no time or has no
    VM.
    """
    hours = (trace.ends_s - trace.starts_s) / 3600
    if hours <= 0:
        raise ValueError(f"the trace has {len(trace.events)} events, all at {trace.starts_s:g} s: it covers no time")
    vm_hours = sum(
        len(vms) * (until_s - from_s) / 3600
        for (from_s, vms), (until_s, _) in itertools.pairwise(trace.iterate_fleets())
    )
    if vm_hours <= 0:
        raise ValueError("the trace has no VM for any time, so no preemption can be counted")
    later = [events for at_s, events in trace.iterate_bursts() if at_s > trace.starts_s]
    removed = [count for events in later if (count := sum(not event.add for event in events))]
    added = [count for events in later if (count := sum(event.add for event in events))]
    return Hazard(
        removals_per_vm_hour=sum(removed) / vm_hours,
        additions_per_hour=sum(added) / hours,
        removal_sizes=_shares(removed),
        addition_sizes=_shares(added),
    )


def _shares(counts: Iterable[int]) -> tuple[float, ...]:
    """The share of bursts of 1, 2, ... VMs."""
    seen = Counter(counts)
    if not seen:
        return (1.0,)
    return tuple(seen[size] / seen.total() for size in range(1, max(seen) + 1))
