"""Batches whose random numbers follow from the places of their examples.

Each stage of a replica makes the replica's batch for itself, and makes it, or a part of it, again after a change of
shape. Where the dataset or `collate` draws (augmentations, masked words), all of them must draw the same numbers,
whatever each process has drawn before. So the host's global generators are seeded: for each example from its position
in the stream, and for `collate` from the position of its first example. What a dataset draws is then the same in every
shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

from varuna.devices.generators import keep_host_generators, seed_host_generators
from varuna.pipeline.seed_mixing import mix_seed

__all__ = ["PlacedExample", "SeededExamples", "SizedDataset"]


class SizedDataset(Protocol):
    """A dataset for `Batches`: it has a length and random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class PlacedExample(NamedTuple):
    """Which example: its position in the endless stream, and its number in the dataset."""

    position: int
    number: int


class _Item(NamedTuple):
    """What the dataset gives for an example."""

    position: int
    value: Any


class SeededExamples:
    """The examples of a dataset, made one by one and collated."""

    def __init__(self, dataset: SizedDataset, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._item_key = mix_seed(seed)
        self._collate_key = mix_seed(self._item_key)

    def make_batch(self, examples: Sequence[PlacedExample]) -> dict[str, Any]:
        """The global generators are as before at the end. Raises TypeError when collating gives no dict."""
        with keep_host_generators() if _may_seed() else nullcontext():
            return self.collate_items([self[example] for example in examples])

    def __getitem__(self, example: PlacedExample) -> _Item:
        _seed(self._item_key, example.position)
        return _Item(example.position, self._dataset[example.number])

    def collate_items(self, items: Sequence[_Item]) -> dict[str, Any]:
        """Raises TypeError when collating gives no dict."""
        _seed(self._collate_key, items[0].position if items else 0)
        collated = self._collate([item.value for item in items])
        if not isinstance(collated, Mapping):
            raise TypeError(
                f"a batch must be a dict of model inputs by name, but collate returned a {type(collated).__name__}: "
                "let the dataset's items be dicts, or pass collate="
            )
        return dict(collated)


def _seed(key: int, position: int) -> None:
    if _may_seed():
        seed_host_generators(mix_seed(key ^ position) >> 1)


def _may_seed() -> bool:
    """In another thread of the script it may not: a pass that runs in the main one draws from the same generators."""
    return threading.current_thread() is threading.main_thread()
