"""State that a forward carries to the next one outside of buffers, which no stage, replica or checkpoint could keep.

If a dry run has changed attributes of the model, or constants that it holds, a second forward runs on the same copy.
What it uses of the first one is state: a hidden state, a counter. Tensors that are made once and kept (masks,
rotations) do not depend on anything that changes, and are allowed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from varuna.diagnostics.user_code import user_code
from varuna.partition.cutting.graph import Graph, Value, ValueKind
from varuna.partition.errors import PartitionError

__all__ = ["GlobalGenerators", "ModuleAttributes", "attributes_of", "depends_on_inputs", "refuse_carried_state"]

ModuleAttributes = Mapping[str, Any]
"""Every attribute of every module, by path."""

_OWN = frozenset({"forward", "training", "_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, str)


def attributes_of(model: nn.Module) -> ModuleAttributes:
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in (*module.__dict__.items(), *module._buffers.items())
        if name not in _OWN
    }


def changed_attributes(before: ModuleAttributes, after: ModuleAttributes) -> set[str]:
    """The names of the attributes that are another object, or another number."""
    return {name for name, value in after.items() if not _same(before.get(name, _MISSING), value)}


_MISSING = object()


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def depends_on_inputs(graph: Graph, value: Value) -> bool:
    """Whether `value` was computed from inputs, parameters or random draws."""
    remaining, seen = [value], set()
    while remaining:
        wanted = remaining.pop()
        if wanted.dependent or (wanted.kind is ValueKind.GIVEN and wanted.place.startswith("input ")):
            return True
        seen.add(wanted.index)
        remaining.extend(graph.values[parent] for parent in wanted.parents if parent not in seen)
    return False


def refuse_carried_state(
    uses: Mapping[int, str],
    graph: Graph,
    tensors: list[Tensor],
    *,
    changed_again: Callable[[Tensor], bool],
    first: ModuleAttributes,
    second: ModuleAttributes,
    same_operations: bool,
) -> None:
    """Refuse state, after the second forward.

    Args:
        uses: the values of the first forward that the second used, and where.
        tensors: of the values, by index.
        changed_again: whether the second forward changed a tensor in place.
        first, second: the attributes after each.
        same_operations: whether both computed the same, with the same numbers.

    Raises:
        PartitionError: forward depends on something that an earlier one left behind.
    """
    moved = changed_attributes(first, second)
    for index, place in uses.items():
        value, tensor = graph.values[index], tensors[index]
        held = [name for name, kept in first.items() if kept is tensor]
        if depends_on_inputs(graph, value) or changed_again(tensor) or any(name in moved for name in held):
            where = f" (kept in {held[0]})" if held else ""
            raise PartitionError(
                f"forward uses at {place} a tensor of shape {value.shape} that an earlier forward left behind{where}, "
                f"made at {value.place}: each stage and replica would have its own, and no checkpoint holds it. "
                "Make it a buffer (register_buffer) that forward changes, or pass it in as an input"
            )
    counters = sorted(name for name in moved if isinstance(second[name], _PLAIN))
    if counters and not same_operations:
        raise PartitionError(
            f"forward changes {', '.join(counters)} each time and computes with it: each stage and replica would count "
            "for itself, and no checkpoint holds it. Make it a buffer (register_buffer) that forward changes, or pass "
            "it in as an input"
        )


class GlobalGenerators:
    """The generators of Python and NumPy, from which every stage, replica and recompute would draw other numbers."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def check_unchanged(self, path: str) -> None:
        """Raises PartitionError when module `path`, whose forward has just run, has drawn from one of them."""
        for name, before, now in (("random", self._python, random.getstate()), ("numpy", self._numpy, _numpy_state())):
            if now != before:
                raise PartitionError(
                    f"forward of {path or 'the model'} draws from {name}'s generator (before {user_code()}): other "
                    "stages and replicas, and a recompute, would draw other numbers. Draw with torch (torch.rand), or "
                    "pass the numbers in as an input"
                )


def _numpy_state() -> tuple[int, bytes]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return int(position), np.asarray(keys).tobytes()
