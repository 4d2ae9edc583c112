"""Measurements made comparable and merged: those of several ranks, and earlier ones with new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from varuna_planner.profile.document import GpuTypeSpeeds, Measurement, Profile

__all__ = ["compare_types", "merge_measurements", "rescale_profile", "scale_times", "subtract_overhead"]

_LEAST_SPEED, _MOST_SPEED = 1e-5, 1e5
"""Within what a profile can hold: the times of a section that does almost nothing are noise."""


def subtract_overhead(measured: Measurement, forward_us: float, backward_us: float) -> Measurement:
    """The times of the section as one of several. At least a tenth remains, in spite of noise."""
    return measured.model_copy(
        update={
            "forward_us": max(measured.forward_us - forward_us, measured.forward_us / 10),
            "backward_us": max(measured.backward_us - backward_us, measured.backward_us / 10),
            "recompute_us": max(measured.recompute_us - forward_us, measured.recompute_us / 10),
        }
    )


def scale_times(measured: Measurement, factor: float) -> Measurement:
    """Multiplies all times with `factor`."""
    return measured.model_copy(
        update={
            "forward_us": measured.forward_us * factor,
            "backward_us": measured.backward_us * factor,
            "recompute_us": measured.recompute_us * factor,
        }
    )


def rescale_profile(earlier: Profile, sharing: float) -> Profile:
    """`earlier` as if as many ranks had shared the cores as now, on every type of GPU: relative speeds stay."""
    factor = sharing / float(earlier.environment.get("sharing", "1"))
    sections = [
        section.model_copy(update={"measurements": tuple(scale_times(each, factor) for each in section.measurements)})
        for section in earlier.sections
    ]
    return earlier.model_copy(update={"sections": tuple(sections)})


def merge_measurements(
    found: Mapping[int, list[Measurement]], before: Profile | None, count: int, *, every_size: bool
) -> dict[int, list[Measurement]]:
    """New measurements completed by earlier ones; the new one counts if both have a size.

    Raises ValueError when a section has neither.
    """
    earlier = {} if before is None else {section.index: section.measurements for section in before.sections}
    missing = [section for section in range(count) if section not in found and section not in earlier]
    if missing:
        raise ValueError(
            f"sections {missing} were never measured: leave pstages_to_profile out, or keep the profile of an earlier "
            "run in out_folder"
        )
    merged = {}
    for section in range(count):
        kept = earlier.get(section, ()) if every_size or section not in found else ()
        by_size = {each.micro_batch: each for each in (*kept, *found.get(section, ()))}
        merged[section] = [by_size[size] for size in sorted(by_size)]
    return merged


def compare_types(
    own: Mapping[int, Sequence[Measurement]],
    others: Mapping[str, Mapping[int, Sequence[Measurement]]],
    before: Profile | None,
    count: int,
    *,
    own_type: str,
) -> tuple[GpuTypeSpeeds, ...]:
    """The speeds of the other types of GPU that were measured now, and of those that only the earlier profile has.

    Args:
        own: measurements of the profile's own type, by section.
        others: those of the other types. A type without a name is left out: no plan could ask for it.
        before: has the speeds of sections that were not measured now.
        count: of the model's sections.
    """
    speeds = {} if before is None else {other.gpu_type: other.section_speeds for other in before.other_gpu_types}
    for gpu_type, measured in others.items():
        if gpu_type:
            speeds[gpu_type] = _compute_speeds(own, measured, known=speeds.get(gpu_type, (1.0,) * count))
    return tuple(
        GpuTypeSpeeds(gpu_type=gpu_type, section_speeds=section_speeds)
        for gpu_type, section_speeds in speeds.items()
        if gpu_type != own_type
    )


def _compute_speeds(
    own: Mapping[int, Sequence[Measurement]], other: Mapping[int, Sequence[Measurement]], *, known: Sequence[float]
) -> tuple[float, ...]:
    """Of each section: own time over the other's, by forward and backward together; the median over common sizes."""
    speeds = list(known)
    for section in own.keys() & other.keys():
        own_us = {each.micro_batch: each.forward_us + each.backward_us for each in own[section]}
        other_us = {each.micro_batch: each.forward_us + each.backward_us for each in other[section]}
        ratios = [own_us[size] / us for size, us in other_us.items() if us > 0 and own_us.get(size, 0.0) > 0]
        if ratios:
            speeds[section] = min(max(median(ratios), _LEAST_SPEED), _MOST_SPEED)
    return tuple(speeds)
