"""Chooses a part of a spot trace that a few local VMs can play: some of its nodes, some of its time, compressed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from varuna_planner.liveput.spot_trace import SpotTrace, TraceEvent

__all__ = ["Segment", "cut_out", "find_busiest_segment", "thin_out"]

_BEGINNINGS_S = 600.0
"""Segments begin at multiples of this."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Every k-th node of a trace, for a part of its time."""

    trace: SpotTrace
    """In the time in which it is played, from 0 on."""
    every: int
    """k. Nodes are counted in the order in which they first come."""
    phase: int
    """The nodes before the first that is taken."""
    start_s: float
    """From the trace's beginning, in its own time."""
    seconds: float
    """Of the trace's own time."""
    speed: float
    """Seconds of the trace in one second."""

    @property
    def removals(self) -> int:
        return sum(not event.add for event in self.trace.events)

    @property
    def additions(self) -> int:
        """After the first fleet."""
        return sum(event.add and event.at_s > 0 for event in self.trace.events)

    @property
    def removal_moments(self) -> int:
        return len({event.at_s for event in self.trace.events if not event.add})

    @property
    def fleet_sizes(self) -> tuple[int, int]:
        """The fewest and the most VMs at once."""
        sizes = [len(fleet) for _, fleet in self.trace.iterate_fleets()]
        return min(sizes), max(sizes)


def thin_out(trace: SpotTrace, every: int, phase: int) -> tuple[TraceEvent, ...]:
    """The events of every k-th node. The removals per VM-hour stay the same; bursts get smaller."""
    order = {node: number for number, node in enumerate(dict.fromkeys(event.node for event in trace.events))}
    return tuple(event for event in trace.events if order[event.node] % every == phase)


def cut_out(events: tuple[TraceEvent, ...], start_s: float, seconds: float, speed: float) -> SpotTrace:
    """What happens from `start_s` on, for `seconds`, at `speed` times the pace. The fleet at the start comes at 0."""
    there: dict[str, None] = {}
    for event in events:
        if event.at_s > start_s:
            break
        if event.add:
            there[event.node] = None
        else:
            there.pop(event.node)
    first = [TraceEvent(at_s=0.0, add=True, node=node) for node in there]
    later = [
        TraceEvent(at_s=(event.at_s - start_s) / speed, add=event.add, node=event.node)
        for event in events
        if start_s < event.at_s < start_s + seconds
    ]
    return SpotTrace(events=(*first, *later), until_s=seconds / speed)


def find_busiest_segment(
    trace: SpotTrace, *, seconds: float, speed: float, least_vms: int, most_vms: int, start_s: float | None = None
) -> Segment:
    """The segment with the most moments at which VMs go, of those in which the fleet stays within the bounds.

    k is the most nodes that the trace has at once, divided by `most_vms` and rounded up.

    Args:
        seconds: of the trace's own time.
        start_s: where it begins, from the trace's beginning; None: anywhere.

    Raises:
        ValueError: there is none.
    """
    most_nodes = max(len(fleet) for _, fleet in trace.iterate_fleets())
    every = math.ceil(most_nodes / most_vms)
    found = [
        segment
        for phase, at_s in itertools.product(range(every), _list_beginnings(trace, seconds, start_s))
        if (segment := _cut_segment(trace, every, phase, at_s, seconds, speed)) is not None
        and segment.fleet_sizes[0] >= least_vms
        and segment.fleet_sizes[1] <= most_vms
    ]
    if not found:
        where = "" if start_s is None else f" that begins at {start_s:g} s"
        raise ValueError(
            f"the trace has no part of {seconds:g} s{where} in which every {every}th node gives {least_vms} to "
            f"{most_vms} VMs: take a shorter part, or more VMs"
        )
    return max(found, key=lambda one: (one.removal_moments, one.removals, one.additions))


def _list_beginnings(trace: SpotTrace, seconds: float, start_s: float | None) -> Iterator[float]:
    if start_s is not None:
        yield start_s
        return
    for number in range(1 + max(0, int((trace.ends_s - trace.starts_s - seconds) / _BEGINNINGS_S))):
        yield number * _BEGINNINGS_S


def _cut_segment(
    trace: SpotTrace, every: int, phase: int, start_s: float, seconds: float, speed: float
) -> Segment | None:
    """None: it would begin without a VM."""
    cut = cut_out(thin_out(trace, every, phase), trace.starts_s + start_s, seconds, speed)
    if not cut.events or cut.events[0].at_s > 0:
        return None
    return Segment(trace=cut, every=every, phase=phase, start_s=start_s, seconds=seconds, speed=speed)
