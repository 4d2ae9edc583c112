"""Modules that choose rows by computed values: the experts of a mixture, each of which runs on the tokens sent to it.

A dry run cannot know which rows a mask over activations picks. There the mask picks all of them, so that everything
runs that can run; in a second dry run it picks fewer. What is equal in both does not depend on the choice. The calls
that differ *choose*: they are never cut inside, and everything that they hold belongs to their section.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from varuna.partition.cutting.graph import Graph, ModuleCall, TensorLeaf, ValueKind
from varuna.partition.errors import PartitionError

__all__ = ["mark_choosing_calls", "pick_rows"]


def pick_rows(mask: Tensor, pick_all: bool) -> Tensor:
    """A possible result of `nonzero` on a mask whose values are unknown."""
    rows = torch.ones(mask.shape, dtype=torch.bool).nonzero()
    return rows if pick_all else rows[: (len(rows) + 1) // 2]


def mark_choosing_calls(graph: Graph, fewer: Graph, first_names: Mapping[str, str]) -> None:
    """Mark the calls of `graph` that choose, and the values that they use.

    Args:
        graph: of the dry run in which masks picked all rows; this changes it.
        fewer: of the dry run in which they picked fewer.
        first_names: the first name of every parameter, by each of its names.

    Raises:
        PartitionError: the choice has effects outside one module or across a cut-point.
    """
    comparison = _RunComparison(graph, fewer)
    if comparison.find_choosing(graph.calls[0], fewer.calls[0]):
        raise PartitionError(
            "which modules run, or the sizes of their outputs, depend on computed values over the whole forward "
            f"({_places(graph)}); choose rows inside a module that returns a tensor of a fixed size"
        )
    by_weight = {value.weight: value for value in graph.values if value.kind is ValueKind.PARAMETER}
    for call in comparison.found:
        if call.first_section != call.last_section:
            raise PartitionError(
                f"module {call.path} chooses rows by computed values ({_places(graph)}), so it cannot be cut inside; "
                f"move the cut-point between sections {call.first_section} and {call.last_section} out of it"
            )
        call.chooses = True
        inside = graph.calls[call.index + 1 : call.end]
        for other in inside:
            other.varies = True
        for name, first in first_names.items():
            if name.startswith(f"{call.path}."):
                by_weight[first].used_in.add(call.first_section)
        for index in call.arguments:
            graph.values[index].used_in.add(call.first_section)
    _refuse_calls_elsewhere(graph)


class _RunComparison:
    """Compares two dry runs of one model."""

    def __init__(self, graph: Graph, fewer: Graph) -> None:
        self.graph, self.fewer = graph, fewer
        self.found: list[ModuleCall] = []
        self._inside = _children(graph), _children(fewer)

    def find_choosing(self, one: ModuleCall, other: ModuleCall) -> bool:
        """Whether this call chooses. Calls inside it that choose are added to `found`."""
        if one.index in self.graph.choosing:
            return True
        ones, others = self._inside[0].get(one.index, []), self._inside[1].get(other.index, [])
        if [call.path for call in ones] != [call.path for call in others]:
            return True
        found = [a for a, b in zip(ones, others, strict=True) if self.find_choosing(a, b)]
        self.found += found
        # If the size of an inner module's output depends on the choice, so does what is done with it here.
        return any(self._sizes(self.graph, a) != self._sizes(self.fewer, b) for a, b in zip(ones, others, strict=True))

    @staticmethod
    def _sizes(graph: Graph, call: ModuleCall) -> list[tuple[int, ...] | None]:
        return [graph.values[leaf.value].shape if isinstance(leaf, TensorLeaf) else None for leaf in call.leaves]


def _children(graph: Graph) -> dict[int, list[ModuleCall]]:
    children: dict[int, list[ModuleCall]] = {}
    for call in graph.calls:
        children.setdefault(call.parent, []).append(call)
    return children


def _refuse_calls_elsewhere(graph: Graph) -> None:
    """Raise PartitionError for a module that is called both inside and outside of a choice.

    Stages count the calls of a module, so their number must not vary.
    """
    varying = {call.path for call in graph.calls if call.varies}
    for call in graph.calls:
        if call.path in varying and not call.varies:
            raise PartitionError(
                f"module {call.path} is called by a module that chooses rows by computed values ({_places(graph)}) "
                "and also elsewhere; make one of it for each caller"
            )


def _places(graph: Graph) -> str:
    return ", ".join(sorted(set(graph.choosing.values())))
