"""The history of a spot fleet, and the hazards measured from it.

Three formats are read, told apart by the first character:

- Bamboo's: an event per line, `milliseconds,add|remove,node`, times ascending. Blank lines and lines that start with #
  are skipped.
- Parcae's: a line of JSON per interval, `[milliseconds, "add"|"remove"|"no-op", {"nodes": [...], "duration": ...}]`,
  with `*_strategy: [pipelines, stages]`, the shapes that Parcae's planners chose for it.
- SkyPilot's: `{"metadata": {"gap_seconds": s}, "data": [n, ...]}`, the number of VMs in each interval, with
  `"prices": [dollars per VM and hour, ...]` where they are known.

The VMs added at the first time are the initial fleet.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from varuna_planner.liveput.liveput import Hazard

__all__ = ["SpotTrace", "TraceEvent", "measure_hazard", "parse_trace"]

_HOW: Final = "expected milliseconds,add|remove,node"
_HOW_PARCAE: Final = 'expected [milliseconds, "add"|"remove"|"no-op", {"nodes": [...], "duration": milliseconds}]'
_HOW_SKYPILOT: Final = 'expected {"metadata": {"gap_seconds": s}, "data": [number of VMs, ...]}'
_STRATEGY: Final = "_strategy"


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
    until_s: float | None = None
    """When it ends; None: with its last event."""
    prices: tuple[tuple[float, float], ...] = ()
    """(from when, dollars per VM and hour), times ascending; empty: not known."""
    decisions: Mapping[str, tuple[tuple[float, int, int], ...]] = field(default_factory=dict)
    """By planner, the shapes that it chose: (from when, stages, pipelines), times ascending."""

    @property
    def starts_s(self) -> float:
        return self.events[0].at_s

    @property
    def ends_s(self) -> float:
        last_s = self.events[-1].at_s
        return last_s if self.until_s is None else max(self.until_s, last_s)

    def find_price(self, at_s: float) -> float | None:
        """Dollars per VM and hour at a time; None: not known."""
        if not self.prices:
            return None
        return self.prices[max(0, bisect.bisect_right(self.prices, (at_s, math.inf)) - 1)][1]

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
    """Reads a trace in any of the formats. Raises ValueError naming the line, its text and the fault."""
    lines = [line.lstrip() for line in text.splitlines()]
    first = next((line[0] for line in lines if line and not line.startswith("#")), "")
    if first == "[":
        return _parse_parcae(text, name)
    return _parse_skypilot(text, name) if first == "{" else _parse_bamboo(text, name)


def _parse_bamboo(text: str, name: str) -> SpotTrace:
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


def _parse_parcae(text: str, name: str) -> SpotTrace:
    events: list[TraceEvent] = []
    there: set[str] = set()
    decisions: dict[str, list[tuple[float, int, int]]] = {}
    ends_s = at_s = 0.0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            before_s, (at_s, what, facts) = at_s, _parse_interval(line)
            if at_s < before_s:
                raise ValueError(f"{at_s:g} s comes after {before_s:g} s: times must ascend")
            for node in facts["nodes"]:
                event = TraceEvent(at_s=at_s, add=what == "add", node=str(node))
                _check_order(event, events, there)
                (there.add if event.add else there.remove)(event.node)
                events.append(event)
            for planner, shape in facts.items():
                if planner.endswith(_STRATEGY):
                    pipelines, stages = _parse_shape(planner, shape)
                    decisions.setdefault(planner.removesuffix(_STRATEGY), []).append((at_s, stages, pipelines))
            ends_s = at_s + _check_number("duration", facts.get("duration", 0)) / 1e3
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
    if not events:
        raise ValueError(f"{name} has no events: {_HOW_PARCAE} on every line")
    return SpotTrace(
        events=tuple(events),
        until_s=ends_s,
        decisions={planner: tuple(shapes) for planner, shapes in decisions.items()},
    )


def _parse_interval(line: str) -> tuple[float, str, Mapping[str, Any]]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    is_one = isinstance(found, list) and len(found) == 3 and isinstance(found[2], dict)
    if not is_one or not isinstance(found[2].get("nodes"), list):
        raise ValueError(f"{line.strip()[:60]!r}: {_HOW_PARCAE}")
    at_ms, what, facts = found
    if what not in ("add", "remove", "no-op"):
        raise ValueError(f"{str(what)[:40]!r} is none of add, remove and no-op: {_HOW_PARCAE}")
    if what == "no-op" and facts["nodes"]:
        raise ValueError(f"no-op names nodes: {_HOW_PARCAE}")
    return _check_number("milliseconds", at_ms) / 1e3, what, facts


def _parse_shape(planner: str, shape: object) -> tuple[int, int]:
    is_pair = isinstance(shape, list) and len(shape) == 2 and all(type(one) is int and one >= 0 for one in shape)
    if not is_pair:
        raise ValueError(f"{planner} is {str(shape)[:40]}: expected [pipelines, stages]")
    assert isinstance(shape, list)
    return shape[0], shape[1]


def _parse_skypilot(text: str, name: str) -> SpotTrace:
    """Which VMs leave when their number falls is not in it: they are spread evenly over those that are there."""
    try:
        document = json.loads(text)
        gap_s = _check_number("metadata.gap_seconds", document["metadata"]["gap_seconds"])
        counts, prices = document["data"], document.get("prices") or []
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: {error}: {_HOW_SKYPILOT}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} has no {error}: {_HOW_SKYPILOT}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if gap_s <= 0 or not isinstance(counts, list) or not isinstance(prices, list):
        raise ValueError(f"{name}: {_HOW_SKYPILOT}, with a gap above 0")
    if prices and len(prices) != len(counts):
        raise ValueError(f"{name} has {len(prices)} prices for {len(counts)} intervals: expected one for each")
    events: list[TraceEvent] = []
    there: list[str] = []
    made = 0
    for interval, count in enumerate(counts):
        if type(count) is not int or count < 0:
            raise ValueError(f"{name}, interval {interval}: {str(count)[:40]} is no number of VMs")
        leaving = sorted(there, key=lambda node: zlib.crc32(f"{interval}/{node}".encode()))[
            : max(0, len(there) - count)
        ]
        coming = [f"vm{number}" for number in range(made, made + max(0, count - len(there)))]
        made += len(coming)
        there = [node for node in there if node not in leaving] + coming
        for nodes, is_coming in ((leaving, False), (coming, True)):
            events += [TraceEvent(at_s=interval * gap_s, add=is_coming, node=node) for node in nodes]
    if not events:
        raise ValueError(f"{name} has no VM at any time: {_HOW_SKYPILOT}")
    return SpotTrace(
        events=tuple(events),
        until_s=len(counts) * gap_s,
        prices=tuple(
            (number * gap_s, _check_number(f"{name}, prices[{number}]", price)) for number, price in enumerate(prices)
        ),
    )


def _check_number(what: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ValueError(f"{what} is {str(value)[:40]}: expected a number that is finite and not negative")
    return float(value)  # type: ignore[arg-type]


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
    fleets = [*trace.iterate_fleets(), (trace.ends_s, frozenset[str]())]
    vm_hours = sum(len(vms) * (until_s - from_s) / 3600 for (from_s, vms), (until_s, _) in itertools.pairwise(fleets))
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
