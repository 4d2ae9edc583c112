"""Measurements made comparable and put together: what one rank found and another, what was found now and before."""

from __future__ import annotations

from collections.abc import Mapping

from varuna_planner.profile import Measurement, Profile

__all__ = ["in_step", "scaled", "with_earlier", "without"]


def without(measured: Measurement, forward_us: float, backward_us: float) -> Measurement:
    """What the section takes as one of several. A tenth at least is its own, whatever noise says."""
    return measured.model_copy(
        update={
            "forward_us": max(measured.forward_us - forward_us, measured.forward_us / 10),
            "backward_us": max(measured.backward_us - backward_us, measured.backward_us / 10),
            "recompute_us": max(measured.recompute_us - forward_us, measured.recompute_us / 10),
        }
    )


def scaled(measured: Measurement, factor: float) -> Measurement:
    """All times `factor` times as long."""
    return measured.model_copy(
        update={
            "forward_us": measured.forward_us * factor,
            "backward_us": measured.backward_us * factor,
            "recompute_us": measured.recompute_us * factor,
        }
    )


def in_step(earlier: Profile, sharing: float) -> Profile:
    """`earlier` as it would be, had as many ranks shared the cores as now."""
    factor = sharing / float(earlier.environment.get("sharing", "1"))
    sections = [
        section.model_copy(update={"measurements": tuple(scaled(each, factor) for each in section.measurements)})
        for section in earlier.sections
    ]
    return earlier.model_copy(update={"sections": tuple(sections)})


def with_earlier(
    found: Mapping[int, list[Measurement]], before: Profile | None, count: int, *, every_size: bool
) -> dict[int, list[Measurement]]:
    """What was measured now, completed by what was measured before; now wins where both have a size."""
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
