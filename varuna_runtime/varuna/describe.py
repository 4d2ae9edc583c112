"""A model's sections as text, for people: where it may be cut, and what each cut costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from varuna.example_inputs import example_maker
from varuna.generators import global_generators_kept
from varuna.partition import Boundary, ModelMap, trace

__all__ = ["describe_sections"]


def describe_sections(
    model: nn.Module,
    get_batch_fn: Callable[..., Mapping[str, Any]] | Mapping[str, Any],
    *,
    shared_weights: Sequence[tuple[str, str]] | None = None,
    cut_points: int | None = None,
) -> str:
    """Where `Varuna`, given the same arguments, may cut `model`: a table with a line for each section.

    It needs no device and no memory for the model, which may be on `meta`. The work is the part of the model's
    operations, an estimate from their shapes; the calibration measures times.

    Raises:
        ValueError: an argument does not fit the model.
        varuna.partition.PartitionError: the model cannot be cut as it stands.
    """
    get_batch = example_maker(get_batch_fn)
    with global_generators_kept(torch.device("cpu")):
        model_map = trace(model, get_batch(2), shared_weights=shared_weights or (), cut_points=cut_points)
    costs = model_map.costs()
    rows = [("section", "work", "parameters", "modules", "sends to the next, for each example")]
    for section, cost in zip(model_map.sections, costs, strict=True):
        parameter_bytes = sum(model_map.parameter_bytes[name] for name in section.parameters)
        crossing = model_map.boundary(section.index + 1) if section.index + 1 < len(costs) else ()
        work = f"{cost / max(sum(costs), 1.0):.1%}"
        rows.append((str(section.index), work, _size(parameter_bytes), section.name, _sent(crossing)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(model_map)])


def _sent(crossing: Sequence[Boundary]) -> str:
    named = (f"{boundary.name} {_size(boundary.bytes_for(1))}" for boundary in crossing)
    return ", ".join(named)


def _notes(model_map: ModelMap) -> list[str]:
    shared = [
        f"shared by sections {', '.join(map(str, sections))}: {name}" for name, sections in model_map.shared.items()
    ]
    return [*shared, *(f"not cut {reason}" for reason in model_map.refused)]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
