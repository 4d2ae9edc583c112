"""Example inputs, with which a model is traced and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from varuna.partition.model_io.batch import resize_batch

__all__ = ["GetBatch", "example_maker"]

GetBatch = Callable[[int], dict[str, Any]]
"""Makes a dict of model inputs with the given number of examples, on the CPU."""


def example_maker(given: Callable[..., Mapping[str, Any]] | Mapping[str, Any] | None) -> GetBatch:
    """A maker from what the script gives: a function `(size, device="cpu")`, or one batch, whose examples are repeated.

    Raises ValueError when the script gives nothing.
    """
    if given is None:
        raise ValueError(
            "get_batch_fn is missing: Varuna finds where to cut the model by running it on example inputs; "
            "pass a function (size, device='cpu') -> dict of model inputs"
        )
    if isinstance(given, Mapping):
        batch = given
        return lambda size: resize_batch(batch, size)
    make = given
    return lambda size: dict(make(size, device="cpu"))
