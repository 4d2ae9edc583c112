"""What a forward leaves behind for the next one outside of buffers: no stage, replica or checkpoint could keep it.

A dry run that has changed attributes of the model, or constants that it holds, is followed by a second forward on the
same copy. What that uses of the first is state: a hidden state carried on, a counter. What is merely made once and kept
(masks, rotations) depends on nothing that changes, and stays allowed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from varuna.partition.errors import PartitionError
from varuna.partition.graph import Graph, Kind, Value
from varuna.places import users_code

__all__ = ["Attributes", "GlobalDraws", "attributes_of", "is_of_inputs", "refuse_state"]

Attributes = Mapping[str, Any]
"""Every attribute of every module, by path."""

_OWN = frozenset({"forward", "training", "_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, str)


def attributes_of(model: nn.Module) -> Attributes:
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in (*module.__dict__.items(), *module._buffers.items())
        if name not in _OWN
    }


def changed(before: Attributes, after: Attributes) -> set[str]:
    """The attributes that are another object, or another number."""
    return {name for name, value in after.items() if not _same(before.get(name, _MISSING), value)}


_MISSING = object()


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def is_of_inputs(graph: Graph, value: Value) -> bool:
    """Whether it was computed from inputs, parameters or random draws."""
    remaining, seen = [value], set()
    while remaining:
        wanted = remaining.pop()
        if wanted.dependent or (wanted.kind is Kind.GIVEN and wanted.place.startswith("input ")):
            return True
        seen.add(wanted.index)
        remaining.extend(graph.values[parent] for parent in wanted.parents if parent not in seen)
    return False


def refuse_state(
    uses: Mapping[int, str],
    graph: Graph,
    tensors: list[Tensor],
    changed_again: Callable[[Tensor], bool],
    first: Attributes,
    second: Attributes,
    *,
    same_operations: bool,
) -> None:
    """After the second forward.

    Args:
        uses: values born in the first forward that the second used, and where.
        tensors: of the values, by index.
        changed_again: whether the second forward changed a tensor in place.
        first, second: the attributes after each.
        same_operations: whether both computed the same, with the same numbers.

    Raises:
        PartitionError: forward depends on what an earlier one left behind.
    """
    moved = changed(first, second)
    for index, place in uses.items():
        value, tensor = graph.values[index], tensors[index]
        held = [name for name, kept in first.items() if kept is tensor]
        if is_of_inputs(graph, value) or changed_again(tensor) or any(name in moved for name in held):
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


class GlobalDraws:
    """Watches the generators of Python and NumPy, from which no stage, replica or recompute would draw the same."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def check(self, path: str) -> None:
        """Raises PartitionError when the code of module `path`, which has run just now, has drawn from one."""
        for name, before, now in (("random", self._python, random.getstate()), ("numpy", self._numpy, _numpy_state())):
            if now != before:
                raise PartitionError(
                    f"forward of {path or 'the model'} draws from {name}'s generator (before {users_code()}): other "
                    "stages and replicas, and a recompute, would draw something else. Draw with torch (torch.rand), or "
                    "pass the numbers in as an input"
                )


def _numpy_state() -> tuple[int, bytes]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return int(position), np.asarray(keys).tobytes()
