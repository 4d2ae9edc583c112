"""The profile of GPUs that are faster or slower than those on which it was measured."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_planner.profile.document import Measurement, Profile, SectionProfile

__all__ = ["scale_speed", "select_gpu_type"]


def select_gpu_type(profile: Profile, gpu_type: str, *, assumed_speed: float = 1.0) -> Profile:
    """The profile with the times of GPUs of this type.

    Args:
        assumed_speed: of a type that the profile does not know: how many times as fast as the profile's own it is.

    Raises:
        ValueError: the assumed speed is not positive.
    """
    if gpu_type == profile.gpu_type:
        return profile.model_copy(update={"other_gpu_types": ()})
    known = next((other for other in profile.other_gpu_types if other.gpu_type == gpu_type), None)
    if known is None:
        scaled = scale_speed(profile, assumed_speed)
    else:
        sections = tuple(map(_scale_section, profile.sections, known.section_speeds))
        overhead_us = profile.stage_overhead_us / _compute_mean_speed(profile.sections, known.section_speeds)
        scaled = profile.model_copy(update={"sections": sections, "stage_overhead_us": overhead_us})
    return scaled.model_copy(update={"gpu_type": gpu_type, "other_gpu_types": ()})


def scale_speed(profile: Profile, relative_speed: float) -> Profile:
    """The profile of GPUs that compute `relative_speed` times as fast. Links, sizes and memory stay. Raises ValueError
    for a speed that is not positive."""
    if not relative_speed > 0:
        raise ValueError(f"relative speed {relative_speed}: it must be above 0")
    if relative_speed == 1:
        return profile
    sections = tuple(_scale_section(section, relative_speed) for section in profile.sections)
    overhead_us = profile.stage_overhead_us / relative_speed
    return profile.model_copy(update={"sections": sections, "stage_overhead_us": overhead_us})


def _compute_mean_speed(sections: Sequence[SectionProfile], speeds: Sequence[float]) -> float:
    """The speed of the whole model: a section counts by its time."""
    own = [section.measurements[0].forward_us + section.measurements[0].backward_us for section in sections]
    other = [us / speed for us, speed in zip(own, speeds, strict=True)]
    return sum(own) / sum(other) if sum(other) > 0 else 1.0


def _scale_section(section: SectionProfile, speed: float) -> SectionProfile:
    measurements = tuple(_scale_measurement(measurement, speed) for measurement in section.measurements)
    return section.model_copy(update={"measurements": measurements, "optimizer_us": section.optimizer_us / speed})


def _scale_measurement(measurement: Measurement, speed: float) -> Measurement:
    names = ("forward_us", "backward_us", "recompute_us")
    return measurement.model_copy(update={name: getattr(measurement, name) / speed for name in names})
