"""What Varuna makes of a model, for people: where it may be cut, what crosses, what it writes, what was refused.

The document (`sections_document`) is what `varuna inspect --json` prints; `text_of` is the same as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from varuna.example_inputs import example_maker
from varuna.generators import global_generators_kept
from varuna.optimizer_check import Finding
from varuna.partition import Boundary, ModelMap, trace
from varuna.partition.graph import Kind
from varuna_planner.profile import Profile

__all__ = ["describe_sections", "optimizer_document", "sections_document", "text_of", "times_document"]

BUFFER_RULE = "replicas follow replica 0 after each step"


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
    return text_of(sections_document(model_map))


def sections_document(model_map: ModelMap) -> dict[str, Any]:
    """Everything that the dry run found, as JSON values. Bytes and FLOPs are those of a forward of one example."""
    costs = model_map.costs()
    whole = max(sum(costs), 1.0)
    sections = []
    for section, cost in zip(model_map.sections, costs, strict=True):
        crossing = model_map.boundary(section.index + 1) if section.index + 1 < len(costs) else ()
        sections.append(
            {
                "index": section.index,
                "name": section.name,
                "modules": list(section.modules),
                "work": cost / whole,
                "flops": cost / model_map.graph.batch,
                "parameter_bytes": sum(model_map.parameter_bytes[name] for name in section.parameters),
                "sends": [_boundary(boundary) for boundary in crossing],
            }
        )
    return {
        "sections": sections,
        "shared": [{"parameter": name, "sections": list(where)} for name, where in model_map.shared.items()],
        "long_lived": _long_lived(model_map),
        "buffers": [
            {"buffer": name, "sections": sorted(model_map.graph.buffers_used.get(name, ())), "written_at": place}
            for name, place in sorted(model_map.graph.buffers_changed.items())
        ],
        "constants": _constants(model_map),
        "not_cut": list(model_map.refused),
    }


def times_document(profile: Profile, micro_batch: int) -> dict[str, Any]:
    """The sections' times at the profile's micro-batch size that is next to `micro_batch`."""
    size = min(profile.micro_batches, key=lambda known: (abs(known - micro_batch), known))
    measured = [next(m for m in section.measurements if m.micro_batch == size) for section in profile.sections]
    return {
        "micro_batch": size,
        "device": profile.environment.get("device", ""),
        "forward_us": [m.forward_us for m in measured],
        "backward_us": [m.backward_us for m in measured],
    }


def optimizer_document(names: Sequence[str], findings: Sequence[Finding], left_out: Sequence[str]) -> dict[str, Any]:
    """Of all of the script's optimizers, whose classes have these names; `left_out`: parameters that none holds."""
    return {
        "class": " and ".join(names),
        "findings": [{"what": x.what, "place": x.place, "way_out": x.way_out, "matters": x.matters} for x in findings],
        "left_out": list(left_out),
    }


def text_of(document: Mapping[str, Any]) -> str:
    """The document as a table and notes."""
    times = document.get("times")
    head = ["section", "work", "parameters", "modules", "sends to the next, for each example"]
    if times is not None:
        head[2:2] = ["forward", "backward"]
    rows = [head]
    for section in document["sections"]:
        row = [str(section["index"]), f"{section['work']:.1%}", _size(section["parameter_bytes"]), section["name"]]
        if times is not None:
            row[2:2] = [_time(times[what][section["index"]]) for what in ("forward_us", "backward_us")]
        sends = (f"{sent['name']} {_size(sent['bytes'])}" for sent in section["sends"])
        rows.append([*row, ", ".join(sends)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(document)])


def _notes(document: Mapping[str, Any]) -> list[str]:
    lines = []
    if (times := document.get("times")) is not None:
        lines.append(f"times: of {times['micro_batch']} examples on {times['device'] or 'this device'}")
    lines += [f"shared by sections {_list(x['sections'])}: {x['parameter']}" for x in document["shared"]]
    for x in document["long_lived"]:
        lines.append(f"long-lived: {x['name']}, of section {x['made_in']}, is used in sections {_list(x['used_in'])}")
    for x in document["buffers"]:
        lines.append(f"written by forward: buffer {x['buffer']} ({x['written_at']}); {BUFFER_RULE}")
    for x in document["constants"]:
        lines.append(f"from outside of the model: {x['place']}, used in sections {_list(x['sections'])}")
    lines += [f"not cut {reason}" for reason in document["not_cut"]]
    if (optimizer := document.get("optimizer")) is not None:
        lines.append(f"optimizer {optimizer['class']}: {'' if optimizer['findings'] else 'may be split over stages'}")
        lines += [
            f"  {x['what']}{' (at ' + x['place'] + ')' if x['place'] else ''}: {x['way_out']}"
            for x in optimizer["findings"]
        ]
        lines += [
            f"  held by no optimizer: {name}, which requires a gradient and never changes"
            for name in optimizer["left_out"]
        ]
    return lines


def _boundary(boundary: Boundary) -> dict[str, Any]:
    return {
        "name": boundary.name,
        "bytes": boundary.bytes_for(1),
        "shape": list(boundary.shape_for(1)),
        "dtype": str(boundary.dtype).removeprefix("torch."),
        "has_gradient": boundary.requires_grad,
    }


def _long_lived(model_map: ModelMap) -> list[dict[str, Any]]:
    """What is sent over more than one cut, being used in a section that is not the next one."""
    cuts: dict[int, list[int]] = {}
    for cut in range(1, len(model_map.sections)):
        for value in model_map.plan(cut).transported:
            cuts.setdefault(value, []).append(cut)
    values = model_map.graph.values
    uses: dict[int, set[int]] = {}
    for seen in values:
        uses.setdefault(seen.same_as, set()).update(seen.used_in)
    return [
        {
            "name": model_map.plan(over[0]).places[index][0].name,
            "made_in": values[index].section,
            "used_in": sorted(section for section in uses[index] if section > values[index].section),
        }
        for index, over in cuts.items()
        if len(over) > 1
    ]


def _constants(model_map: ModelMap) -> list[dict[str, Any]]:
    """Tensors that forward found elsewhere than in the model and its inputs, in the order of their first use."""
    found: dict[str, set[int]] = {}
    for value in model_map.graph.values:
        if value.kind is Kind.GIVEN and value.call == -1 and value.buffer is None and value.place.startswith("a const"):
            found.setdefault(f"{value.place}, shape {value.shape}", set()).update(value.used_in)
    return [{"place": place, "sections": sorted(sections)} for place, sections in found.items()]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _time(us: float) -> str:
    return f"{us / 1000:.2f} ms"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
