"""Numbers that modules return, or keep in attributes, beside their tensors.

A ghost returns the numbers of the dry run and sets no attribute. So a call whose number may be another for another
batch is run again by later stages, from the inputs and shapes that they have. If they cannot, and the two dry runs show
how the number follows from the batch size, a ghost returns it, and a stage that runs the module compares.
"""

from __future__ import annotations

from collections.abc import Callable
from types import new_class
from typing import Any

from torch import nn

from varuna.partition.cutting.graph import Graph, ModuleCall, ObjectLeaf, are_equal_numbers
from varuna.partition.cutting.shapes import learn_size

__all__ = ["KeptNumbers", "mark_numbers"]

_NUMBERS = (bool, int, float, complex, str)
_TORCH_NAMES = frozenset(nn.Module().__dict__)
_MOST_TOGETHER = 16
"""Of numbers in a tuple, list or dict: longer ones are tables, not what a forward has found of its batch."""


def mark_numbers(one: Graph, two: Graph) -> None:
    """Mark the calls of `one` whose numbers may be others for another batch.

    `two`: of the dry run with another batch size.
    """
    looked_at = {call for _, _, call in one.looked_at}
    for call, again in zip(one.calls, two.calls, strict=True):
        if call.last_section >= one.sections - 1:
            continue  # no stage is behind it
        call.must_run = call.must_run or again.must_run
        looks = any(call.index <= inner < call.end for inner in looked_at)
        for leaf, other in zip(call.leaves, again.leaves, strict=True):
            if not (isinstance(leaf, ObjectLeaf) and isinstance(other, ObjectLeaf)):
                continue
            differs = not are_equal_numbers(leaf.value, other.value)
            call.may_vary |= differs or (looks and leaf.is_number)
            if differs and not _is_on_line((one.batch, two.batch), leaf.value, other.value):
                call.must_run = f"returns {leaf.value!r} with {one.batch} examples and {other.value!r} with {two.batch}"


def _is_on_line(batches: tuple[int, int], one: Any, two: Any) -> bool:
    """Whether a line through `one` and `two` with a whole slope exists."""
    if type(one) is not int or type(two) is not int:
        return False
    return learn_size(batches, (one, two)).for_batch(batches[1]) == two


class KeptNumbers:
    """Notices when code reads a number that a module's forward has changed in an attribute of the module. One that was
    set to what it had been is not noticed.

    A module with such a number gets a class of its own, as `torch.nn.utils.parametrize` gives it one: so nothing else
    takes longer.
    """

    def __init__(self, on_read: Callable[[int, str], None]) -> None:
        """`on_read` is called with the call that has set the attribute, and the attribute's name."""
        self._on_read = on_read
        self._set_by: dict[tuple[int, str], int] = {}
        """By the id of a module and the name: the newest call that has changed the number."""

    @staticmethod
    def list_numbers(module: nn.Module) -> dict[str, Any]:
        """The numbers in attributes of `module`, by name, for `record_call`."""
        own = {name: _freeze_numbers(value) for name, value in module.__dict__.items() if name not in _TORCH_NAMES}
        return {name: value for name, value in own.items() if value is not None}

    def record_call(self, call: ModuleCall, module: nn.Module, before: dict[str, Any]) -> None:
        """After a call of `module`, which had the numbers `before`."""
        for name, value in self.list_numbers(module).items():
            if name not in before or not are_equal_numbers(before[name], value):
                if (id(module), name) not in self._set_by:
                    self._watch_reads(module, name)
                self._set_by[id(module), name] = call.index

    def _watch_reads(self, module: nn.Module, name: str) -> None:
        kind, key = type(module), (id(module), name)

        def read(owner: nn.Module) -> Any:
            if name not in owner.__dict__:
                raise AttributeError(name)
            self._on_read(self._set_by[key], name)
            return owner.__dict__[name]

        def write(owner: nn.Module, value: Any) -> None:
            owner.__dict__[name] = value

        def delete(owner: nn.Module) -> None:
            del owner.__dict__[name]

        own = {name: property(read, write, delete), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        module.__class__ = new_class(kind.__name__, (kind,), exec_body=lambda names: names.update(own))


def _freeze_numbers(value: Any, depth: int = 3) -> Any:
    """A number, or the numbers in a tuple, list or dict, as they are now; None: it is something else.

    `depth`: of tuples, lists and dicts inside one another.
    """
    if type(value) in _NUMBERS:
        return value
    if not isinstance(value, tuple | list | dict) or len(value) > _MOST_TOGETHER or not depth:
        return None
    parts = [_freeze_numbers(part, depth - 1) for part in (value.items() if isinstance(value, dict) else value)]
    return None if any(part is None for part in parts) else tuple(parts)
