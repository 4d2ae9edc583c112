"""Example inputs, from which the model's structure is learnt and with which it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from varuna.partition.batch import resized

__all__ = ["GetBatch", "example_maker"]

GetBatch = Callable[[int], dict[str, Any]]
"""Makes a dict of model inputs with so many examples, on the CPU."""


def example_maker(given: Callable[..., Mapping[str, Any]] | Mapping[str, Any] | None) -> GetBatch:
    """What the script gives: a function `(size, device="cpu")`, or one batch, whose examples are then repeated.

    Raises ValueError when it gives nothing.
    """
    if given is None:
        raise ValueError(
            "get_batch_fn is missing: Varuna finds where to cut the model by running it on example inputs; "
            "pass a function (size, device='cpu') -> dict of model inputs"
        )
    if isinstance(given, Mapping):
        batch = given
        return lambda size: resized(batch, size)
    make = given
    return lambda size: dict(make(size, device="cpu"))
