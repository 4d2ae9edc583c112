"""The report of `varuna inspect` as text: a table of the sections, and notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from varuna.devices.generators import keep_global_generators
from varuna.inspection.document import sections_document
from varuna.partition import trace
from varuna.partition.model_io.example_inputs import example_maker

__all__ = ["describe_sections", "render_document"]

_BUFFER_RULE = "replicas follow replica 0 after each step"


def describe_sections(
    model: nn.Module,
    get_batch_fn: Callable[..., Mapping[str, Any]] | Mapping[str, Any],
    *,
    shared_weights: Sequence[tuple[str, str]] | None = None,
    cut_points: int | None = None,
) -> str:
    """A table with one line for each section into which `Varuna` can cut `model`, with the same arguments.

    It needs no device, and no memory for the model, which may be on `meta`. The work of a section is its share of the
    model's operations, estimated from their shapes; the calibration measures times.

    Raises:
        ValueError: an argument does not fit the model.
        varuna.partition.PartitionError: the model cannot be cut as it stands.
    """
    get_batch = example_maker(get_batch_fn)
    with keep_global_generators(torch.device("cpu")):
        model_map = trace(model, get_batch(2), shared_weights=shared_weights or (), cut_points=cut_points)
    return render_document(sections_document(model_map))


def render_document(document: Mapping[str, Any]) -> str:
    """The document as a table and notes."""
    times = document.get("times")
    head = ["section", "work", "parameters", "modules", "sends to the next, per example"]
    if times is not None:
        head[2:2] = ["forward", "backward"]
    rows = [head]
    for section in document["sections"]:
        row = [
            str(section["index"]),
            f"{section['work']:.1%}",
            _render_size(section["parameter_bytes"]),
            section["name"],
        ]
        if times is not None:
            row[2:2] = [_render_time(times[what][section["index"]]) for what in ("forward_us", "backward_us")]
        sends = (f"{sent['name']} {_render_size(sent['bytes'])}" for sent in section["sends"])
        rows.append([*row, ", ".join(sends)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(document)])


def _notes(document: Mapping[str, Any]) -> list[str]:
    lines = []
    if (times := document.get("times")) is not None:
        lines.append(f"times: for {times['micro_batch']} examples on {times['device'] or 'this device'}")
    lines += [f"shared by sections {_join(x['sections'])}: {x['parameter']}" for x in document["shared"]]
    for x in document["long_lived"]:
        lines.append(
            f"long-lived: {x['name']}, made in section {x['made_in']}, is used in sections {_join(x['used_in'])}"
        )
    for x in document["buffers"]:
        lines.append(f"written by forward: buffer {x['buffer']} ({x['written_at']}); {_BUFFER_RULE}")
    for x in document["constants"]:
        lines.append(f"from outside the model: {x['place']}, used in sections {_join(x['sections'])}")
    lines += [f"not cut {reason}" for reason in document["not_cut"]]
    if (optimizer := document.get("optimizer")) is not None:
        lines.append(f"optimizer {optimizer['class']}: {'' if optimizer['findings'] else 'can be split over stages'}")
        lines += [
            f"  {x['what']}{' (at ' + x['place'] + ')' if x['place'] else ''}: {x['way_out']}"
            for x in optimizer["findings"]
        ]
        lines += [
            f"  held by no optimizer: {name}, which requires a gradient but never changes"
            for name in optimizer["left_out"]
        ]
    return lines


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _render_time(us: float) -> str:
    return f"{us / 1000:.2f} ms"


def _render_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
