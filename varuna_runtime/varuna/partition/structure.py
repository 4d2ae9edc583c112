"""The nested outputs of modules, taken apart into leaves and put together again.

Tuples, lists, dicts, named tuples and whatever else is registered with torch's pytree are taken apart; so are plain
dataclass instances. Anything else is a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Structure", "take_apart"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """A dataclass instance among the leaves: its class, and how its fields are structured."""

    kind: type
    names: tuple[str, ...]
    structure: Structure


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """How leaves were nested. `put_together` is the inverse of `take_apart`."""

    spec: TreeSpec
    dataclasses_at: tuple[tuple[int, _Fields], ...]  # leaf of `spec` -> the dataclass instance that stood there

    def put_together(self, leaves: Sequence[Any]) -> Any:
        if not self.dataclasses_at:
            return tree_unflatten(leaves, self.spec)
        remaining, own, at = list(leaves), [], dict(self.dataclasses_at)
        for position in range(self.spec.num_leaves):
            fields = at.get(position)
            if fields is None:
                own.append(remaining.pop(0))
                continue
            count = fields.structure.leaf_count
            values = fields.structure.put_together(remaining[:count])
            del remaining[:count]
            instance: Any = object.__new__(fields.kind)
            for name, value in zip(fields.names, values, strict=True):
                object.__setattr__(instance, name, value)
            own.append(instance)
        return tree_unflatten(own, self.spec)

    @property
    def leaf_count(self) -> int:
        inside = sum(fields.structure.leaf_count for _, fields in self.dataclasses_at)
        return self.spec.num_leaves - len(self.dataclasses_at) + inside


def take_apart(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of `tree` in order, and the structure that they stood in."""
    outer, spec = tree_flatten(tree)
    leaves: list[Any] = []
    found: list[tuple[int, _Fields]] = []
    for position, leaf in enumerate(outer):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            leaves.append(leaf)
            continue
        names = tuple(f.name for f in dataclasses.fields(leaf) if hasattr(leaf, f.name))
        inner, structure = take_apart([getattr(leaf, name) for name in names])
        found.append((position, _Fields(type(leaf), names, structure)))
        leaves.extend(inner)
    return leaves, Structure(spec, tuple(found))
