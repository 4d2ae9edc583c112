"""What one dry run saw: values, module calls and cut-points, as plain data.

A *value* is a tensor as the user's code saw it: a change in place makes a new value of the same tensor object. The
recorder (recorder.py) writes this graph; boundaries.py reads it to decide what crosses a cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch

from varuna.partition.structure import Structure

__all__ = ["Call", "CutPass", "Draw", "Graph", "Kind", "ObjectLeaf", "TensorLeaf", "Value"]


class Kind(Enum):
    """Where a value comes from."""

    GIVEN = auto()  # an input, a buffer or a constant: every stage has it
    PARAMETER = auto()
    COMPUTED = auto()
    CUT = auto()  # what a cut-point returned; the same tensor as its one parent


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the dry run."""

    index: int
    kind: Kind
    section: int  # where it was born
    call: int  # the innermost module call that it was born in; -1 outside the model
    parents: tuple[int, ...]
    dependent: bool  # on parameters or on a random draw: it cannot be had from the inputs alone
    random: bool
    place: str  # for people: the parameter's name, or file:line of the user's code
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    same_as: int  # the value that a cut-point passed on; else itself
    weight: str | None = None  # the parameter that it is, or is a mere view or cast of
    buffer: str | None = None
    cut: int = -1  # Kind.CUT: which cut-point
    used_in: set[int] = field(default_factory=set)  # sections
    changed_in_place: bool = False


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor in a module's output. `argument`: it is the tensor object that was handed in at that position."""

    value: int
    argument: int | None
    changed: bool = False  # the module changed that argument in place

    @property
    def made_inside(self) -> bool:
        return self.argument is None or self.changed


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """Anything else in a module's output: a plain value, or something passed through."""

    value: Any
    argument: int | None


@dataclass(slots=True, eq=False)
class Call:
    """One call of one module of the model."""

    index: int
    path: str
    number: int  # the how-manieth call of this module object
    parent: int
    owns_parameters: bool
    first_section: int
    last_section: int = -1  # -1: it has not returned
    end: int = -1  # calls [index, end) are this one and those inside it
    structure: Structure | None = None  # None: the output holds something that cannot be made again
    leaves: tuple[TensorLeaf | ObjectLeaf, ...] = ()
    leaks: bool = False  # others use a tensor made inside that it did not return (it left it in a list, an attribute)
    arguments: tuple[int, ...] = ()  # values
    chooses: bool = False  # what runs inside depends on computed values (choices.py)
    varies: bool = False  # it is inside of a call that chooses


@dataclass(frozen=True, slots=True)
class CutPass:
    """A cut-point as it was passed. Cut-point c lies between sections c-1 and c; there is no cut-point 0."""

    name: str
    value: int  # what it returned


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw of random numbers."""

    op: Any
    section: int
    call: int  # the innermost module call
    shape: tuple[int, ...]
    like: int  # the value that gives it its shape; -1: the code says it in numbers
    place: str


@dataclass(slots=True, eq=False)
class Graph:
    """One dry run."""

    batch: int
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    cuts: list[CutPass] = field(default_factory=list)
    buffers_used: dict[str, set[int]] = field(default_factory=dict)  # name -> sections
    buffers_changed: dict[str, str] = field(default_factory=dict)  # name -> place
    costs: dict[tuple[int, int], float] = field(default_factory=dict)  # (innermost call, section) -> work (costs.py)
    looked_at: set[tuple[int, int, int]] = field(default_factory=set)  # value, section, call: the path depends on it
    choosing: dict[int, str] = field(default_factory=dict)  # calls that look at computed values -> places
    draws: list[Draw] = field(default_factory=list)  # in order
    loss: int = -1
    weighted: bool = False  # forward returns the weight of its loss behind it

    @property
    def sections(self) -> int:
        return len(self.cuts) + 1

    def copied(self) -> Graph:
        """A graph that may be written on, without a trace in this one."""
        return replace(
            self,
            values=[replace(value, used_in=set(value.used_in)) for value in self.values],
            calls=[replace(call) for call in self.calls],
            cuts=list(self.cuts),
            buffers_used={name: set(sections) for name, sections in self.buffers_used.items()},
            buffers_changed=dict(self.buffers_changed),
            costs=dict(self.costs),
            looked_at=set(self.looked_at),
            draws=list(self.draws),
        )
