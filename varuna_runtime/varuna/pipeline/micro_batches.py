"""The micro-batches that a replica's inputs are cut into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from varuna.devices.accelerator import is_accelerator
from varuna.devices.copy_stream import CopyStream, StartedCopies
from varuna.partition.model_io.batch import take_examples

__all__ = [
    "MicroBatch",
    "StartedInputs",
    "copy_containers",
    "cut_inputs",
    "cut_spans",
    "join_spans",
    "pin_inputs",
    "split_spans",
    "start_loading",
]


@dataclass(frozen=True)
class MicroBatch:
    """What the model gets for one micro-batch."""

    index: int
    """Its number in the global batch, whose micro-batches are all of one size but for the last."""
    examples: int
    inputs: dict[str, Any]
    first_example: int = 0
    """The place of its first example in the global batch: part of the key of its random streams, and of those of its
    examples."""


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


def pin_inputs(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The inputs of a whole step as copies to `device` take them beside the computing: in pinned host memory.

    A copy from ordinary memory makes the host wait for it. On a CPU the inputs themselves.
    """
    if not is_accelerator(device):
        return dict(inputs)
    return {name: _map_tensors(value, _pin) for name, value in inputs.items()}


class StartedInputs(NamedTuple):
    """The inputs of a micro-batch, whose copies to an accelerator may still be under way."""

    leaves: list[Any]
    structure: TreeSpec
    places: list[int]
    """Of the leaves that are copied."""
    copies: StartedCopies

    def take(self) -> dict[str, Any]:
        """The inputs on the device, which ops launched next may use."""
        for place, tensor in zip(self.places, self.copies.take(), strict=True):
            self.leaves[place] = tensor
        inputs: dict[str, Any] = tree_unflatten(self.leaves, self.structure)
        return inputs


def start_loading(inputs: Mapping[str, Any], device: torch.device, copies: CopyStream) -> StartedInputs:
    """Starts to copy the inputs of a micro-batch to an accelerator. Inputs that are on the accelerator stay."""
    leaves, structure = tree_flatten(dict(inputs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not is_accelerator(leaf.device)]
    return StartedInputs(leaves, structure, places, copies.start_to_device([leaves[i] for i in places], device))


def copy_containers(value: Any) -> Any:
    """The same tensors in copies of the nested containers that hold them: the model may change the containers."""
    return _map_tensors(value, lambda tensor: tensor)


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


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
