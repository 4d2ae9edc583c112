"""Batches that processes make ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from varuna.data.seeded_examples import PlacedExample, SeededExamples

__all__ = ["prefetch_batches"]


def prefetch_batches(
    examples: SeededExamples,
    places: Iterable[list[PlacedExample]],
    collate: Callable[[list[Any]], Any],
    *,
    workers: int,
    seed: int,
) -> Generator[Any]:
    """The batches at these places, in order, two per process ahead. The processes end when it is closed.

    `seed`: of the processes' own generators, so that the script's keep their state.
    """
    loader = DataLoader(
        cast("Dataset[Any]", examples),
        batch_sampler=cast("Iterable[list[int]]", _PlaceLists(places)),
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


class _PlaceLists:
    """`DataLoader` wants an object that gives an iterator."""

    def __init__(self, places: Iterable[list[PlacedExample]]) -> None:
        self._places = places

    def __iter__(self) -> Iterator[list[PlacedExample]]:
        return iter(self._places)
