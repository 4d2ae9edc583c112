"""The wiring of a stage: which calls are ghosts, where received tensors go in, and where sent ones come out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from varuna.partition.cutting.graph import ObjectLeaf
from varuna.partition.cutting.model_map import ModelMap
from varuna.partition.cutting.shapes import LinearSize
from varuna.partition.stages.ghost import Ghost, ghost_numbers, make_ghost

__all__ = ["CallPlan", "StageWiring", "plan_wiring"]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What a stage does at one call of one module: answer as a ghost, or run it and keep parts of its output."""

    ghost: Ghost | None
    keeps: tuple[tuple[int, int], ...]
    """(leaf of the output, slot among the sent tensors)."""
    last_section: int
    """The section after the call: a ghost hides the cut-points inside the module."""
    numbers: tuple[tuple[int, LinearSize | ObjectLeaf], ...] = ()
    """(leaf of the output, the number that ghosts of later stages return there)."""


@dataclass(slots=True, kw_only=True)
class StageWiring:
    """A *slot* is a position among the tensors that the stage receives or sends."""

    cut_slots: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """By cut-point: the received slot that goes in there, and whether code changes it in place."""
    overwritten: frozenset[int] = frozenset()
    """Cut-points whose argument is used later, so that it gets the received values too."""
    cut_keeps: dict[int, int] = field(default_factory=dict)
    """By cut-point: the sent slot that it fills."""
    relays: tuple[tuple[int, int], ...] = ()
    """(received slot, sent slot) of tensors that only pass through."""
    calls: dict[str, list[CallPlan]] = field(default_factory=dict)
    """By path of a module: its calls in this stage, in order."""


def plan_wiring(model_map: ModelMap, sections: range) -> StageWiring:
    """The wiring of the stage that runs `sections`."""
    wiring = StageWiring()
    graph = model_map.graph
    received: dict[int, int] = {}  # by value: its slot
    ghosts: frozenset[int] = frozenset()
    if sections.start > 0:
        before = model_map.cut_plan(sections.start)
        ghosts = before.ghosts
        wiring.overwritten = before.overwritten
        received = {value: slot for slot, value in enumerate(before.transported)}
        for cut in range(1, sections.start + 1):
            value = graph.values[graph.cuts[cut - 1].value]
            if value.same_as in received:
                wiring.cut_slots[cut] = received[value.same_as], value.changed_in_place
    keeps: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by call
    later_ghosts: frozenset[int] = frozenset()
    if sections.stop < len(model_map.sections):
        after = model_map.cut_plan(sections.stop)
        later_ghosts = after.ghosts
        relays = []
        for sent, transported in enumerate(after.transported):
            if transported in received:
                relays.append((received[transported], sent))
                continue
            for place in after.places[transported]:
                if place.call < 0:
                    wiring.cut_keeps[place.cut] = sent
                else:
                    keeps[place.call].append((place.leaf, sent))
        wiring.relays = tuple(relays)
    wiring.calls = _plan_calls(model_map, sections, ghosts, received=received, keeps=keeps, later_ghosts=later_ghosts)
    return wiring


def _plan_calls(
    model_map: ModelMap,
    sections: range,
    ghosts: frozenset[int],
    *,
    received: Mapping[int, int],
    keeps: Mapping[int, Sequence[tuple[int, int]]],
    later_ghosts: frozenset[int],
) -> dict[str, list[CallPlan]]:
    calls: dict[str, list[CallPlan]] = defaultdict(list)
    hidden: set[int] = set()
    for call in model_map.graph.calls:
        if call.parent in hidden or call.parent in ghosts:
            hidden.add(call.index)
        elif call.first_section < sections.stop:
            ghost = make_ghost(model_map, call, received) if call.index in ghosts else None
            compared = ghost is None and call.index in later_ghosts
            numbers = ghost_numbers(model_map, call) if compared else ()
            calls[call.path].append(CallPlan(ghost, tuple(keeps.get(call.index, ())), call.last_section, numbers))
    return calls
