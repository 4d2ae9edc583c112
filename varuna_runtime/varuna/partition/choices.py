"""Modules that choose rows by computed values: the experts of a mixture, each of which runs on the tokens sent to it.

Which rows a mask over activations picks is not known in a dry run. There the mask picks all of them, so that everything
that can run does; in a second dry run it picks fewer. What is the same in both does not depend on the choice. The calls
that differ *choose*: they are cut nowhere inside, and everything that they hold belongs to their section.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from varuna.partition.errors import PartitionError
from varuna.partition.graph import Call, Graph, Kind, TensorLeaf

__all__ = ["mark_choices", "rows_of_any"]


def rows_of_any(mask: Tensor, all_of_them: bool) -> Tensor:
    """What `nonzero` may make of a mask whose values are unknown."""
    rows = torch.ones(mask.shape, dtype=torch.bool).nonzero()
    return rows if all_of_them else rows[: (len(rows) + 1) // 2]


def mark_choices(graph: Graph, fewer: Graph, first_names: Mapping[str, str]) -> None:
    """Mark the calls of `graph` that choose, and what they use.

    Args:
        graph: of the dry run in which all rows were picked; it is changed.
        fewer: of that in which fewer were.
        first_names: of the model's parameters, by every name.

    Raises:
        PartitionError: the choice has effects outside of one module or over a cut-point.
    """
    marking = _Marking(graph, fewer)
    if marking.chooses(graph.calls[0], fewer.calls[0]):
        raise PartitionError(
            "which modules run, or the size of what they return, depends on computed values, over the whole forward "
            f"({_places(graph)}); choose rows inside of a module that returns a tensor of a fixed size"
        )
    by_weight = {value.weight: value for value in graph.values if value.kind is Kind.PARAMETER}
    for call in marking.found:
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
    _check_not_elsewhere(graph)


class _Marking:
    """Two dry runs side by side."""

    def __init__(self, graph: Graph, fewer: Graph) -> None:
        self.graph, self.fewer = graph, fewer
        self.found: list[Call] = []
        self._inside = _children(graph), _children(fewer)

    def chooses(self, one: Call, other: Call) -> bool:
        """Whether this call does; if some inside it do, they are added to `found`."""
        if one.index in self.graph.choosing:
            return True
        ones, others = self._inside[0].get(one.index, []), self._inside[1].get(other.index, [])
        if [call.path for call in ones] != [call.path for call in others]:
            return True
        found = [a for a, b in zip(ones, others, strict=True) if self.chooses(a, b)]
        self.found += found
        # The size of what a module inside returns depends on the choice: so does what is done with it here.
        return any(self._sizes(self.graph, a) != self._sizes(self.fewer, b) for a, b in zip(ones, others, strict=True))

    @staticmethod
    def _sizes(graph: Graph, call: Call) -> list[tuple[int, ...] | None]:
        return [graph.values[leaf.value].shape if isinstance(leaf, TensorLeaf) else None for leaf in call.leaves]


def _children(graph: Graph) -> dict[int, list[Call]]:
    children: dict[int, list[Call]] = {}
    for call in graph.calls:
        children.setdefault(call.parent, []).append(call)
    return children


def _check_not_elsewhere(graph: Graph) -> None:
    """Stages count the calls of a module, so how often it is called must not vary."""
    varying = {call.path for call in graph.calls if call.varies}
    for call in graph.calls:
        if call.path in varying and not call.varies:
            raise PartitionError(
                f"module {call.path} is called by a module that chooses rows by computed values ({_places(graph)}) "
                "and elsewhere, too; make one of it for each"
            )


def _places(graph: Graph) -> str:
    return ", ".join(sorted(set(graph.choosing.values())))
