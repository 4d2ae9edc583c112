"""Measurements made comparable and merged: those of several ranks, and earlier ones with new ones."""

from __future__ import annotations

from collections.abc import Mapping

from varuna_planner.profile.document import Measurement, Profile

__all__ = ["merge_measurements", "rescale_profile", "scale_times", "subtract_overhead"]


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
    """`earlier` as if as many ranks had shared the cores as now."""
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
