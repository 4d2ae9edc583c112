"""What crosses a cut, and where a stage behind it can inject it: pure decisions over the graph of a dry run.

A stage that starts with section `cut` also runs the forward before it, but hollow: modules that have returned by then
are *ghosts*, which return tensors without numbers. Values that later sections need are therefore either computed again
from the inputs, by code that still runs, or sent (*transported*) and injected *at their producer*: the ghost that
returned the value, or the cut-point that passed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from varuna.partition.cutting.graph import Graph, ModuleCall, TensorLeaf, Value, ValueKind
from varuna.partition.errors import PartitionError

__all__ = ["CutPlan", "ProducerPlace", "can_cut", "plan_cut"]


@dataclass(frozen=True, slots=True)
class ProducerPlace:
    """Where a value can be read and injected: a leaf of a call's output, or a cut-point (`call` is then -1)."""

    call: int
    leaf: int
    cut: int
    name: str


@dataclass(frozen=True, slots=True)
class CutPlan:
    """How a stage that starts with section `cut` gets the values made before it."""

    cut: int
    ghosts: frozenset[int]  # calls that a ghost answers; calls inside them do not happen
    transported: tuple[int, ...]  # values, in the order they are sent
    places: Mapping[int, tuple[ProducerPlace, ...]]  # of each transported value
    buffers: frozenset[str]  # that code before the cut reads: for values that are computed again, and to choose a path
    overwritten: frozenset[int]  # cut-points whose argument is used later, so that it gets the received values too


def plan_cut(graph: Graph, cut: int, *, trusts_numbers: bool) -> CutPlan:
    """Plan the cut before section `cut` (1 … sections-1).

    `trusts_numbers`: ghosts also return numbers that may be others than those of the dry run.

    Raises:
        PartitionError: a value made before the cut is used behind it, and can be neither computed again nor injected.
    """
    planning = _CutPlanner(graph, cut, trusts_numbers=trusts_numbers)
    planning.resolve_all()
    plan = planning.make_plan()
    for name, place in graph.buffers_changed.items():
        used_in = sorted(graph.buffers_used.get(name, ()))
        if used_in and (name in planning.read_again or used_in[0] < cut <= used_in[-1]):
            raise _no_owner(name, place, used_in, cut)
    return plan


def can_cut(graph: Graph, cut: int, *, trusts_numbers: bool) -> bool:
    """Whether `plan_cut` succeeds."""
    try:
        plan_cut(graph, cut, trusts_numbers=trusts_numbers)
    except PartitionError:
        return False
    return True


def _no_owner(name: str, changed_at: str, used_in: list[int], cut: int) -> PartitionError:
    how = f"(sections {used_in})" if len(used_in) > 1 else "(behind it, through tensors computed from it)"
    return PartitionError(
        f"buffer {name} is changed by forward ({changed_at}) and used on both sides of cut-point {cut} {how}, which "
        "would be in different stages, each with its own copy; use a module per section, or leave this cut-point out"
    )


class _CutPlanner:
    """The state of planning one cut."""

    def __init__(self, graph: Graph, cut: int, *, trusts_numbers: bool) -> None:
        self.graph, self.cut, self.trusts_numbers = graph, cut, trusts_numbers
        self.ghost_above = self._find_ghosts()
        self.ghosts = frozenset(index for index, ghost in enumerate(self.ghost_above) if ghost == index)
        self.visible_leaves: dict[int, list[tuple[int, int]]] = {}
        for index in sorted(self.ghosts):
            for leaf, what in enumerate(graph.calls[index].leaves):
                if isinstance(what, TensorLeaf) and what.made_inside:
                    self.visible_leaves.setdefault(what.value, []).append((index, leaf))
        self.places: dict[int, list[ProducerPlace]] = {}
        self.done: set[int] = set()
        self.read_again: set[str] = set()  # buffers that code before the cut reads
        self.overwritten: set[int] = set()
        passes = [graph.values[passed.value] for passed in graph.cuts[:cut]]
        self.cut_of_argument = {passed.parents[0]: passed for passed in passes if not self._hidden(passed.call)}

    def _find_ghosts(self) -> list[int]:
        """For each call the ghost that hides it (the outermost one at or above it), or -1 if the call runs."""
        above: list[int] = []
        for call in self.graph.calls:
            hidden_by = above[call.parent] if call.parent >= 0 else -1
            if hidden_by < 0 and self._can_be_ghost(call):
                hidden_by = call.index
            above.append(hidden_by)
        return above

    def _can_be_ghost(self, call: ModuleCall) -> bool:
        if not 0 <= call.last_section < self.cut or call.structure is None or call.leaks or call.must_run:
            return False
        if call.may_vary and not self.trusts_numbers:
            return False
        tensors = [leaf for leaf in call.leaves if isinstance(leaf, TensorLeaf)]
        own = [self.graph.values[leaf.value] for leaf in tensors if leaf.made_inside]
        if not all(call.index <= value.call < call.end for value in own):
            return False  # it returns a tensor that it holds, which other code may use
        # A call without parameters is cheap, and its results from the inputs alone are needed everywhere (masks).
        return call.owns_parameters or (bool(own) and all(value.dependent for value in own))

    def _hidden(self, call: int) -> bool:
        return call >= 0 and self.ghost_above[call] >= 0

    def resolve_all(self) -> None:
        values = self.graph.values
        for choosing in self.graph.calls:
            if choosing.chooses and choosing.last_section < self.cut and not self._hidden(choosing.index):
                raise _choice_cannot_be_made_again(choosing)
        for index, section, call in sorted(self.graph.looked_at):
            if section < self.cut and not self._hidden(call):
                buffer = values[index].buffer
                self.read_again.update(() if buffer is None else (buffer,))
                self.resolve_value(values[index])
        self.resolve_value(values[self.graph.cuts[self.cut - 1].value])
        for value in values:
            if value.section < self.cut and any(section >= self.cut for section in value.used_in):
                self.resolve_value(value)

    def resolve_value(self, value: Value) -> None:
        """Make sure that a stage behind the cut has `value`, and the values that it is computed from."""
        remaining: list[tuple[Value, Value | None]] = [(value, None)]
        while remaining:
            wanted, wanted_by = remaining.pop()
            if wanted.index not in self.done:
                self.done.add(wanted.index)
                needs = [self.graph.values[index] for index in self._needs(wanted, wanted_by)]
                remaining.extend((value, wanted) for value in needs)
                self.read_again.update(value.buffer for value in needs if value.buffer is not None)

    def _needs(self, value: Value, wanted_by: Value | None) -> tuple[int, ...]:
        """Decide how to get `value`. Returns the other values that this needs."""
        if value.kind in (ValueKind.GIVEN, ValueKind.PARAMETER):
            return ()
        if value.index in self.visible_leaves:
            return self._inject_at_leaves(value)
        assert not self._hidden(value.call), "a call whose values leak is no ghost"
        if value.kind is ValueKind.CUT and (value.dependent or value.cut == self.cut):
            name = self.graph.cuts[value.cut - 1].name
            self.places.setdefault(value.same_as, []).append(ProducerPlace(-1, -1, value.cut, name))
            return ()
        if not value.dependent or value.weight is not None or self._follows_from_one(value):
            return value.parents
        passed = self.cut_of_argument.get(value.index)
        if passed is not None and not value.changed_in_place:
            self.overwritten.add(passed.cut)
            return (passed.index,)
        raise self._no_producer(value, wanted_by)

    def _inject_at_leaves(self, value: Value) -> tuple[int, ...]:
        for call, leaf in self.visible_leaves[value.index]:
            made_by = self.graph.calls[call]
            again = f" (call {made_by.number + 1})" if made_by.number else ""
            position = f" output {leaf + 1}" if len(made_by.leaves) > 1 else ""
            name = f"{made_by.path}{again}{position}"
            self.places.setdefault(value.same_as, []).append(ProducerPlace(call, leaf, -1, name))
        return ()

    def _follows_from_one(self, value: Value) -> bool:
        """Whether code outside of ghosts computes it from one value that can be injected: then nothing more is sent."""
        while True:
            sources = [self.graph.values[parent] for parent in value.parents if self.graph.values[parent].dependent]
            if value.random or len({source.same_as for source in sources}) != 1:
                return False
            if any(source.weight is not None or source.changed_in_place for source in sources):
                return False
            value = sources[0]
            if self._hidden(value.call) or value.kind is ValueKind.CUT or value.index in self.visible_leaves:
                return True

    def _no_producer(self, value: Value, wanted_by: Value | None) -> PartitionError:
        wanted = wanted_by or value
        uses = sorted(section for section in wanted.used_in if section >= self.cut)
        through = f" (through the tensor made from it at {wanted.place})" if wanted_by is not None else ""
        where = f"section {uses[0]}" if uses else "a later section"
        inside = f", inside {self.graph.calls[value.call].path}," if value.call > 0 else ""
        must_run = self._find_must_run(value.call)
        if must_run is not None:
            return PartitionError(
                f"module {must_run.path} {must_run.must_run}, so that later stages run its code, too; but for "
                f"{where}{through} they cannot get the tensor of shape {value.shape} made at {value.place}{inside} "
                f"in section {value.section}. Return the number as a tensor, or compute it in forward outside of "
                f"{must_run.path}"
            )
        return PartitionError(
            f"the tensor of shape {value.shape} made at {value.place}{inside} in section {value.section} is used in "
            f"{where}{through} without passing cut-point {self.cut}, and no module returned it, so a later stage "
            "cannot get it. Compute it inside a module that returns it, or pass it through the cut-point and use its "
            "result, or move the cut-point"
        )

    def _find_must_run(self, index: int) -> ModuleCall | None:
        """The innermost call at or above call `index` that would be a ghost without its numbers."""
        while index >= 0:
            call = self.graph.calls[index]
            if call.must_run and 0 <= call.last_section < self.cut:
                return call
            index = call.parent
        return None

    def make_plan(self) -> CutPlan:
        order = sorted(self.places)
        places = {value: tuple(self.places[value]) for value in order}
        return CutPlan(
            self.cut,
            self.ghosts,
            tuple(order),
            places,
            frozenset(self.read_again),
            frozenset(self.overwritten),
        )


def _choice_cannot_be_made_again(call: ModuleCall) -> PartitionError:
    return PartitionError(
        f"module {call.path} chooses rows by computed values, which a later stage does not have, and it keeps or "
        "returns more than tensors, so that nothing can replace it there; make it return tensors only"
    )
