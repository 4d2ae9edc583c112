"""The graph of one dry run: values, module calls and cut-points, as plain data.

A *value* is a tensor as the user's code saw it: a change in place makes a new value of the same tensor object. The
recorder (tracing/recorder.py) writes this graph; cut_plan.py reads it to decide what crosses a cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch

from varuna.partition.model_io.structure import Structure

__all__ = [
    "CutRecord",
    "Graph",
    "ModuleCall",
    "ObjectLeaf",
    "RandomDraw",
    "TensorLeaf",
    "Value",
    "ValueKind",
    "are_equal_numbers",
]


class ValueKind(Enum):
    """Where a value comes from."""

    GIVEN = auto()  # an input, a buffer or a constant, which every stage has
    PARAMETER = auto()
    COMPUTED = auto()
    CUT = auto()  # what a cut-point returned: the same tensor as its one parent


@dataclass(slots=True, eq=False, kw_only=True)
class Value:
    """A tensor of the dry run."""

    index: int
    kind: ValueKind
    section: int  # where it was made
    call: int  # the innermost module call that made it; -1 outside the model
    parents: tuple[int, ...]
    dependent: bool  # on parameters or a random draw: it cannot be computed from the inputs alone
    random: bool
    place: str  # for people: the parameter's name, or file:line of the user's code
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    gets_gradient: bool = False  # the loss's backward comes to it
    same_as: int  # the value that a cut-point passed on; else itself
    weight: str | None = None  # the parameter that it is, or that it is a view or cast of
    buffer: str | None = None
    cut: int = -1  # the cut-point's number, for ValueKind.CUT
    input: str | None = None  # the model's input that it is, or that it is a view of
    used_in: set[int] = field(default_factory=set)  # sections
    read_at: set[tuple[int, int]] = field(default_factory=set)  # (section, call) of what reads an input's elements
    changed_in_place: bool = False


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor in a module's output. `argument`: the position among the arguments of the same tensor object, if any."""

    value: int
    argument: int | None
    changed: bool = False  # the module changed that argument in place

    @property
    def made_inside(self) -> bool:
        return self.argument is None or self.changed


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """Anything else in a module's output: a plain value, or an argument passed through."""

    value: Any
    argument: int | None

    @property
    def is_number(self) -> bool:
        """Whether it is a number, a truth value or a text."""
        return self.argument is None and isinstance(self.value, int | float | complex | str)


def are_equal_numbers(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; here NaN equals NaN."""
    return bool(one == other or (one != one and other != other))


@dataclass(slots=True, eq=False, kw_only=True)
class ModuleCall:
    """One call of one module of the model."""

    index: int
    path: str
    number: int  # among the calls of this module, from 0
    parent: int
    owns_parameters: bool
    first_section: int
    last_section: int = -1  # -1: it has not returned
    end: int = -1  # calls [index, end) are this one and the ones inside it
    structure: Structure | None = None  # None: the output holds something that a ghost could not make
    leaves: tuple[TensorLeaf | ObjectLeaf, ...] = ()
    leaks: bool = False  # code outside uses a tensor made inside that it did not return (but left in a list, say)
    must_run: str = ""  # what it returns or keeps beside tensors that no ghost could have; empty: nothing
    may_vary: bool = False  # what it returns beside tensors may be another for another batch
    arguments: tuple[int, ...] = ()  # values
    chooses: bool = False  # what runs inside depends on computed values (tracing/choosing_modules.py)
    varies: bool = False  # it is inside a call that chooses


@dataclass(frozen=True, slots=True)
class CutRecord:
    """The passing of a cut-point. Cut-point c lies between sections c-1 and c; there is no cut-point 0."""

    name: str
    value: int  # what it returned


@dataclass(frozen=True, slots=True)
class RandomDraw:
    """A draw of random numbers."""

    op: Any
    section: int
    call: int  # the innermost module call
    shape: tuple[int, ...]
    like: int  # the value that gives the draw its shape; -1: the code gives it in numbers
    place: str


@dataclass(slots=True, eq=False)
class Graph:
    """One dry run."""

    batch: int
    values: list[Value] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    cuts: list[CutRecord] = field(default_factory=list)
    buffers_used: dict[str, set[int]] = field(default_factory=dict)  # name -> sections
    buffers_changed: dict[str, str] = field(default_factory=dict)  # name -> place
    costs: dict[tuple[int, int], float] = field(default_factory=dict)  # (innermost call, section) -> work
    looked_at: set[tuple[int, int, int]] = field(default_factory=set)  # (value, section, call): the path depends on it
    need_numbers: set[tuple[int, int]] = field(default_factory=set)  # (section, call) of what fails on NaN
    choosing: dict[int, str] = field(default_factory=dict)  # calls that look at computed values -> places
    draws: list[RandomDraw] = field(default_factory=list)  # in order
    loss: int = -1
    weighted: bool = False  # forward returns the weight of its loss behind it

    @property
    def sections(self) -> int:
        return len(self.cuts) + 1

    def make_copy(self) -> Graph:
        """A copy that can be changed independently."""
        return replace(
            self,
            values=[replace(value, used_in=set(value.used_in), read_at=set(value.read_at)) for value in self.values],
            calls=[replace(call) for call in self.calls],
            cuts=list(self.cuts),
            buffers_used={name: set(sections) for name, sections in self.buffers_used.items()},
            buffers_changed=dict(self.buffers_changed),
            costs=dict(self.costs),
            looked_at=set(self.looked_at),
            need_numbers=set(self.need_numbers),
            draws=list(self.draws),
        )
