"""Batches that processes make ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["SizedDataset", "prefetch_batches"]


class SizedDataset(Protocol):
    """A dataset for `Batches`: it has a length and random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def prefetch_batches(
    dataset: SizedDataset, indices: Iterable[list[int]], collate: Callable[[list[Any]], Any], *, workers: int, seed: int
) -> Generator[Any]:
    """The batches with these indices, in order, two per process ahead. The processes end when it is closed.

    `seed`: of the processes' own generators, so that the script's keep their state.
    """
    loader = DataLoader(
        cast("Dataset[Any]", dataset),
        batch_sampler=cast("Iterable[list[int]]", _IndexLists(indices)),
        num_workers=workers,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
    )
    made = iter(loader)
    try:
        yield from made
    finally:
        # It would end them when it is no longer referred to, but an error's traceback does that for long, and processes
        # that are forked meanwhile would try the same.
        made._shutdown_workers()  # type: ignore[attr-defined]


class _IndexLists:
    """`DataLoader` wants an object that gives an iterator."""

    def __init__(self, indices: Iterable[list[int]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._indices)
