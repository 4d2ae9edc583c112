"""The nested inputs and outputs of modules, flattened into leaves and put together again.

Tuples, lists, dicts, named tuples and other types that are registered with torch's pytree are flattened; so are plain
dataclass instances. Anything else is a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Structure", "flatten_nested"]


@dataclasses.dataclass(frozen=True, slots=True)
class _DataclassFields:
    """A dataclass instance among the leaves: its class, and the structure of its fields."""

    kind: type
    names: tuple[str, ...]
    structure: Structure


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """The nesting of leaves. `unflatten_leaves` is the inverse of `flatten_nested`."""

    spec: TreeSpec
    dataclasses_at: tuple[tuple[int, _DataclassFields], ...]
    """By position among the leaves of `spec`: the dataclass instances that stood there."""

    def unflatten_leaves(self, leaves: Sequence[Any]) -> Any:
        if not self.dataclasses_at:
            return tree_unflatten(leaves, self.spec)
        remaining, own, at = list(leaves), [], dict(self.dataclasses_at)
        for position in range(self.spec.num_leaves):
            fields = at.get(position)
            if fields is None:
                own.append(remaining.pop(0))
                continue
            count = fields.structure.leaf_count
            values = fields.structure.unflatten_leaves(remaining[:count])
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


def flatten_nested(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of `tree` in order, and their structure."""
    outer, spec = tree_flatten(tree)
    leaves: list[Any] = []
    found: list[tuple[int, _DataclassFields]] = []
    for position, leaf in enumerate(outer):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            leaves.append(leaf)
            continue
        names = tuple(f.name for f in dataclasses.fields(leaf) if hasattr(leaf, f.name))
        inner, structure = flatten_nested([getattr(leaf, name) for name in names])
        found.append((position, _DataclassFields(type(leaf), names, structure)))
        leaves.extend(inner)
    return leaves, Structure(spec, tuple(found))
