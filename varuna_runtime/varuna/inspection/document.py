"""What Varuna finds in a model, as JSON: where it can be cut, what crosses the cuts, what forward writes.

`varuna inspect --json` prints these documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from varuna.optim.split_check import Finding
from varuna.partition import Boundary, ModelMap
from varuna.partition.cutting.graph import ValueKind
from varuna_planner.profile.document import Profile

__all__ = ["optimizer_document", "sections_document", "times_document"]


def sections_document(model_map: ModelMap) -> dict[str, Any]:
    """All findings of the dry run, as JSON values. Bytes and FLOPs are those of a forward of one example."""
    costs = model_map.section_costs()
    whole = max(sum(costs), 1.0)
    sections = []
    for section, cost in zip(model_map.sections, costs, strict=True):
        crossing = model_map.find_boundary(section.index + 1) if section.index + 1 < len(costs) else ()
        sections.append(
            {
                "index": section.index,
                "name": section.name,
                "modules": list(section.modules),
                "work": cost / whole,
                "flops": cost / model_map.graph.batch,
                "parameter_bytes": sum(model_map.parameter_bytes[name] for name in section.parameters),
                "sends": [_describe_boundary(boundary) for boundary in crossing],
            }
        )
    return {
        "sections": sections,
        "shared": [{"parameter": name, "sections": list(where)} for name, where in model_map.shared.items()],
        "long_lived": _list_long_lived(model_map),
        "buffers": [
            {"buffer": name, "sections": sorted(model_map.graph.buffers_used.get(name, ())), "written_at": place}
            for name, place in sorted(model_map.graph.buffers_changed.items())
        ],
        "constants": _list_constants(model_map),
        "not_cut": list(model_map.refused),
    }


def times_document(profile: Profile, micro_batch: int) -> dict[str, Any]:
    """The sections' times at the size in the profile that is nearest to `micro_batch`."""
    size = min(profile.micro_batches, key=lambda known: (abs(known - micro_batch), known))
    measured = [next(m for m in section.measurements if m.micro_batch == size) for section in profile.sections]
    return {
        "micro_batch": size,
        "device": profile.environment.get("device", ""),
        "forward_us": [m.forward_us for m in measured],
        "backward_us": [m.backward_us for m in measured],
    }


def optimizer_document(names: Sequence[str], findings: Sequence[Finding], left_out: Sequence[str]) -> dict[str, Any]:
    """The script's optimizers, by the names of their classes. `left_out`: parameters that no optimizer holds."""
    return {
        "class": " and ".join(names),
        "findings": [{"what": x.what, "place": x.place, "way_out": x.way_out, "matters": x.matters} for x in findings],
        "left_out": list(left_out),
    }


def _describe_boundary(boundary: Boundary) -> dict[str, Any]:
    return {
        "name": boundary.name,
        "bytes": boundary.bytes_for(1),
        "shape": list(boundary.shape_for(1)),
        "dtype": str(boundary.dtype).removeprefix("torch."),
        "has_gradient": boundary.requires_grad,
    }


def _list_long_lived(model_map: ModelMap) -> list[dict[str, Any]]:
    """The tensors that cross more than one cut, because a section after the next one uses them."""
    cuts: dict[int, list[int]] = {}
    for cut in range(1, len(model_map.sections)):
        for value in model_map.cut_plan(cut).transported:
            cuts.setdefault(value, []).append(cut)
    values = model_map.graph.values
    uses: dict[int, set[int]] = {}
    for seen in values:
        uses.setdefault(seen.same_as, set()).update(seen.used_in)
    return [
        {
            "name": model_map.cut_plan(over[0]).places[index][0].name,
            "made_in": values[index].section,
            "used_in": sorted(section for section in uses[index] if section > values[index].section),
        }
        for index, over in cuts.items()
        if len(over) > 1
    ]


def _list_constants(model_map: ModelMap) -> list[dict[str, Any]]:
    """Tensors from outside the model and its inputs, in the order of their first use."""
    found: dict[str, set[int]] = {}
    for value in model_map.graph.values:
        if (
            value.kind is ValueKind.GIVEN
            and value.call == -1
            and value.buffer is None
            and value.place.startswith("a const")
        ):
            found.setdefault(f"{value.place}, shape {value.shape}", set()).update(value.used_in)
    return [{"place": place, "sections": sorted(sections)} for place, sections in found.items()]
