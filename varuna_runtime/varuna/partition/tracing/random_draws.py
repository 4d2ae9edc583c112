"""Where the model draws random numbers, and which dimension of each draw is the examples'.

Two dry runs with different batch sizes show how the shape of each draw grows with the batch. A draw whose rows are
examples can be made for each example separately, so that its numbers do not depend on the micro-batch.

Letters: b examples, k rows for each example (the heads in attention weights of shape (b·k, T, T)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varuna.partition.cutting.graph import Graph, RandomDraw
from varuna.partition.cutting.shapes import DrawSpec, LinearSize, learn_shape

__all__ = ["is_draw", "learn_draws", "shape_of_draw"]

_aten = torch.ops.aten
_MIXING = frozenset({_aten.randperm})
"""The numbers that these draw for one example depend on how many other examples there are."""
_NO_DRAWS = frozenset({_aten._fused_sdp_choice})
_TAG = torch.Tag.nondeterministic_seeded


def is_draw(func: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether this call of an operation of the dispatcher draws random numbers from the global generators."""
    if _TAG not in func.tags or func.overloadpacket in _NO_DRAWS or "backward" in func.name():
        return False
    if arguments.get("generator") is not None:
        return False
    switches = ("dropout_p", "dropout", "train", "training")
    return all(arguments[name] is None or arguments[name] for name in switches if name in arguments)


def shape_of_draw(func: Any, arguments: Mapping[str, Any], made: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape of the draw: of the tensor that is written, or of the first one that is made."""
    name = func._schema.arguments[0].name if func._schema.arguments else ""
    if "out" not in arguments and func._schema.is_mutable and isinstance(arguments.get(name), torch.Tensor):
        return tuple(arguments[name].shape)
    return tuple(made[0].shape) if made else ()


def learn_draws(one: Graph, two: Graph) -> tuple[DrawSpec, ...]:
    """The draws of a forward, from two dry runs with different batch sizes."""
    if [draw.op for draw in one.draws] != [draw.op for draw in two.draws]:
        problem = "how many draws there are depends on the batch"
        return tuple(DrawSpec(draw.section, draw.place, (), None, problem) for draw in one.draws)
    specs = [_learn(one, two, *pair) for pair in zip(one.draws, two.draws, strict=True)]
    return tuple(
        spec if spec.problem or not any(_confusable(spec, other) for other in specs) else _confused(spec)
        for spec in specs
    )


def _learn(one: Graph, two: Graph, draw: RandomDraw, other: RandomDraw) -> DrawSpec:
    if len(draw.shape) != len(other.shape):
        return DrawSpec(draw.section, draw.place, (), None, "its number of dimensions depends on the batch")
    sizes = learn_shape((one.batch, two.batch), draw.shape, other.shape)
    moving = [dim for dim, size in enumerate(sizes) if size.per_example]
    batch_dim = moving[0] if len(moving) == 1 else None
    return DrawSpec(draw.section, draw.place, sizes, batch_dim, _problem_of(one, two, draw, sizes=sizes, moving=moving))


def _problem_of(one: Graph, two: Graph, draw: RandomDraw, *, sizes: Sequence[LinearSize], moving: Sequence[int]) -> str:
    if draw.call >= 0 and (one.calls[draw.call].varies or one.calls[draw.call].chooses):
        return "its rows are chosen by computed values"
    if not moving:
        return ""
    if len(moving) > 1:
        return "several of its dimensions grow with the batch"
    size = sizes[moving[0]]
    if size.fixed or size.per_example < 0:
        return "its size is not in proportion to the batch"
    if draw.op.overloadpacket in _MIXING:
        return "it shuffles the examples of a micro-batch"
    if size.per_example > 1 and not _keeps_examples_together(one, two, draw):
        return "its rows mix examples with another dimension, in an order that its shape does not show"
    return ""


def _keeps_examples_together(one: Graph, two: Graph, draw: RandomDraw) -> bool:
    """Whether the k rows of an example are neighbours in the dimension of the draw that has b·k rows.

    They are if the examples had a dimension of their own at the same place earlier, with the same dimensions before it:
    then later dimensions have been merged into it.
    """
    if draw.like < 0 or len(one.values) != len(two.values):
        return False
    waiting, seen, found = [draw.like], {draw.like}, False
    while waiting:
        child = waiting.pop()
        dim, rows = _examples_of(one, two, child)
        if rows == 1:
            return False  # the value that gives the draw its shape has no merged dimension
        for parent in one.values[child].parents:
            place, parent_rows = _examples_of(one, two, parent)
            if place is None and parent_rows:
                return False
            if parent_rows == 1:
                if place != dim or one.values[parent].shape[:place] != one.values[child].shape[:place]:
                    return False
                found = True
            elif parent_rows and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return found


def _examples_of(one: Graph, two: Graph, value: int) -> tuple[int | None, int]:
    """(dimension of the examples, rows for each). (None, 0): equal for every batch size; (None, 1): unclear."""
    shape, other = one.values[value].shape, two.values[value].shape
    if shape == other:
        return None, 0
    if len(shape) != len(other):
        return None, 1
    sizes = learn_shape((one.batch, two.batch), shape, other)
    moving = [dim for dim, size in enumerate(sizes) if size.per_example]
    if len(moving) != 1 or sizes[moving[0]].fixed or sizes[moving[0]].per_example < 1:
        return None, 1
    return moving[0], sizes[moving[0]].per_example


def _confusable(one: DrawSpec, other: DrawSpec) -> bool:
    """Whether both have the same shape for some number of examples, but with the examples in different dimensions."""
    if one.batch_dim == other.batch_dim or other.problem or len(one.sizes) != len(other.sizes):
        return False
    wanted: set[int] = set()  # numbers of examples for which the sizes are equal
    for mine, theirs in zip(one.sizes, other.sizes, strict=True):
        if mine.per_example == theirs.per_example:
            if mine.fixed != theirs.fixed:
                return False
        else:
            examples, rest = divmod(theirs.fixed - mine.fixed, mine.per_example - theirs.per_example)
            if rest or examples < 1:
                return False
            wanted.add(examples)
    return len(wanted) == 1


def _confused(spec: DrawSpec) -> DrawSpec:
    problem = "another draw has the same shape for some micro-batch, with the examples in another dimension"
    return DrawSpec(spec.section, spec.place, spec.sizes, spec.batch_dim, problem)
