"""The micro-batches that a replica's inputs are cut into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from varuna.partition.model_io.batch import take_examples

__all__ = ["MicroBatch", "cut_inputs", "cut_spans", "join_spans", "move_to_device", "split_spans"]


@dataclass(frozen=True)
class MicroBatch:
    """What the model gets for one micro-batch."""

    index: int
    """Its number in the global batch, which is the key of random streams that belong to micro-batches."""
    examples: int
    inputs: dict[str, Any]
    first_example: int = 0
    """The place of its first example in the global batch: part of the key of random streams that belong to examples."""


def cut_inputs(
    inputs: Mapping[str, Any], sizes: Sequence[int], first_index: int, first_example: int = 0
) -> list[MicroBatch]:
    """Cuts a replica's inputs into micro-batches of `sizes`.

    `first_index`, `first_example`: the places of the first micro-batch and of the first example in the global batch.
    """
    batches = []
    start = 0
    for offset, size in enumerate(sizes):
        part = take_examples(inputs, slice(start, start + size))
        batches.append(MicroBatch(first_index + offset, size, part, first_example + start))
        start += size
    return batches


def cut_spans(inputs: Mapping[str, Any], spans: Mapping[int, range]) -> list[MicroBatch]:
    """Cuts inputs that hold the examples of some micro-batches, one after the other.

    `spans`: by the micro-batch's number in the global batch, the places of its examples there.
    """
    batches = []
    start = 0
    for number, span in spans.items():
        part = take_examples(inputs, slice(start, start + len(span)))
        batches.append(MicroBatch(number, len(span), part, span.start))
        start += len(span)
    return batches


def move_to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or all tensors in nested containers, on `device`. Containers are copied: the model may change them."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value)


def join_spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The numbers as runs [first, end), which are short to send."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans


def split_spans(spans: Iterable[Sequence[int]]) -> list[int]:
    """The numbers in runs [first, end)."""
    return [number for first, end in spans for number in range(first, end)]
