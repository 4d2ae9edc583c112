"""Keeps a profile accurate: corrects it by the measured times per micro-batch of the running job's ranks.

It distinguishes a fleet that is slower than calibrated (other clocks, other neighbours on the host), sections that are
slower than calibrated, and a single slow VM. A factor that all stages share belongs to the hardware. What remains of a
stage belongs to its sections if several replicas, on different devices, agree on it; with one replica the device may be
the cause, so it is left to the search for slow VMs.

Each type of GPU is compared with its own times. The profile's own type corrects the sections' times, every other type
its speeds. A type that the profile does not know yet is added with the first measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from varuna_planner.profile.document import MOST_US, GpuTypeSpeeds, Profile, SectionProfile
from varuna_planner.profile.speed import select_gpu_type

__all__ = ["THRESHOLD", "Drift", "StageMeasurement", "expected", "find_drift"]

THRESHOLD = 0.1
"""Smaller differences are measurement noise, within the stated accuracy of predictions."""

_LEAST_SPEED, _MOST_SPEED = 1e-5, 1e5
"""Within what a profile can hold: no GPU is further from another, whatever a worker reports."""


@dataclass(frozen=True, kw_only=True)
class StageMeasurement:
    """The time that each rank of one stage takes for a micro-batch, without waiting, on GPUs of one type."""

    first: int
    """First section."""
    stop: int
    """Section after the last."""
    replicas_us: tuple[float, ...]
    """Forward and backward together, one value per replica."""
    gpu_type: str = ""
    """Of these replicas; empty: not known, which counts as the profile's own."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The correction of a profile that is no longer accurate."""

    profile: Profile
    """The corrected profile."""
    factors: tuple[float, ...]
    """Per measurement: the factor applied to forward, recompute and backward of its sections on its type."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class _TypeCorrection:
    """By what the times of one type of GPU are multiplied."""

    common: float
    """What all its stages share."""
    factors: tuple[float, ...]
    """Per measurement of this type."""
    by_section: tuple[float, ...]
    is_by_stage: bool

    @property
    def is_needed(self) -> bool:
        return not all(1 / (1 + THRESHOLD) <= factor <= 1 + THRESHOLD for factor in self.factors)


def expected(profile: Profile, micro_batch: int, stages: Sequence[StageMeasurement]) -> list[float]:
    """Forward and backward of a micro-batch by the profile, with each stage's overhead, µs per measurement.

    A type of GPU that the profile does not know is expected to be as fast as the profile's own.
    """
    found = []
    gpu_types = {_type_of(stage, profile) for stage in stages}
    of_types = {gpu_type: select_gpu_type(profile, gpu_type) for gpu_type in gpu_types}
    predicted = {gpu_type: of_type.measurements_at(micro_batch) for gpu_type, of_type in of_types.items()}
    for stage in stages:
        if not 0 <= stage.first < stage.stop <= len(profile.sections):
            count = len(profile.sections)
            raise ValueError(f"stage of sections {stage.first} to {stage.stop - 1}: the profile has {count}")
        gpu_type = _type_of(stage, profile)
        sections = predicted[gpu_type][stage.first : stage.stop]
        found.append(
            2 * of_types[gpu_type].stage_overhead_us
            + sum(section.forward_us + section.backward_us for section in sections)
        )
    return found


def find_drift(profile: Profile, micro_batch: int, stages: Sequence[StageMeasurement]) -> Drift | None:
    """The drift that the stages' times show; None when they agree with the profile within THRESHOLD.

    `micro_batch`: examples. A stage whose replicas are of several types of GPU is one measurement for each of them.
    Stages must be non-empty and within the profile's sections, else ValueError.
    """
    expected_us = expected(profile, micro_batch, stages)
    members: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        members.setdefault(_type_of(stage, profile), []).append(number)
    known = profile.known_gpu_types
    compared = {
        gpu_type: _compare_type(
            [stages[number] for number in numbers], [expected_us[number] for number in numbers], len(profile.sections)
        )
        for gpu_type, numbers in members.items()
    }
    corrections = {
        gpu_type: correction
        for gpu_type, correction in compared.items()
        if correction.is_needed or gpu_type not in known
    }
    if not corrections:
        return None
    factors = [1.0] * len(stages)
    for gpu_type, correction in corrections.items():
        for number, factor in zip(members[gpu_type], correction.factors, strict=True):
            factors[number] = factor
    return Drift(
        profile=_correct_profile(profile, corrections, measured=members.keys()),
        factors=tuple(factors),
        reason="; ".join(
            _describe_correction(gpu_type, correction, profile, is_known=gpu_type in known)
            for gpu_type, correction in corrections.items()
        ),
    )


def _type_of(stage: StageMeasurement, profile: Profile) -> str:
    return stage.gpu_type or profile.gpu_type


def _compare_type(
    stages: Sequence[StageMeasurement], expected_us: Sequence[float], section_count: int
) -> _TypeCorrection:
    """Compares the measurements of one type with what is expected of it."""
    ratios = [
        # The lower median: one slow VM of two must not be taken for slow sections.
        median_low(stage.replicas_us) / us if us > 0 else 1.0
        for stage, us in zip(stages, expected_us, strict=True)
    ]
    common = median_low(ratios)
    is_by_stage = all(len(stage.replicas_us) > 1 for stage in stages)
    factors = tuple(ratio if is_by_stage else common for ratio in ratios)
    # Sections that no GPU of this type runs now have what belongs to the hardware.
    by_section = [common] * section_count
    for stage, factor in zip(stages, factors, strict=True):
        by_section[stage.first : stage.stop] = [factor] * (stage.stop - stage.first)
    return _TypeCorrection(common=common, factors=factors, by_section=tuple(by_section), is_by_stage=is_by_stage)


def _correct_profile(
    profile: Profile, corrections: Mapping[str, _TypeCorrection], *, measured: Collection[str]
) -> Profile:
    """`measured`: the types that run now. They keep their own times when those of the profile's type are corrected; the
    speed of a type that does not run stays."""
    unchanged = (1.0,) * len(profile.sections)
    own = corrections.get(profile.gpu_type)
    own_factors = unchanged if own is None else own.by_section
    speeds = {other.gpu_type: other.section_speeds for other in profile.other_gpu_types}
    for gpu_type in measured:
        if gpu_type != profile.gpu_type:
            other = corrections.get(gpu_type)
            speeds[gpu_type] = tuple(
                min(max(speed * own_factor / factor, _LEAST_SPEED), _MOST_SPEED)
                for speed, own_factor, factor in zip(
                    speeds.get(gpu_type, unchanged),
                    own_factors,
                    unchanged if other is None else other.by_section,
                    strict=True,
                )
            )
    return profile.model_copy(
        update={
            "sections": tuple(map(_scaled, profile.sections, own_factors)),
            "stage_overhead_us": min(profile.stage_overhead_us * (1.0 if own is None else own.common), MOST_US),
            "other_gpu_types": tuple(
                GpuTypeSpeeds(gpu_type=gpu_type, section_speeds=section_speeds)
                for gpu_type, section_speeds in speeds.items()
            ),
        }
    )


def _describe_correction(gpu_type: str, correction: _TypeCorrection, profile: Profile, *, is_known: bool) -> str:
    times = ", ".join(f"{factor:.2f}" for factor in correction.factors)
    per = "stage by stage" if correction.is_by_stage else "as a whole"
    on_type = f" on {gpu_type}" if gpu_type else ""
    if not is_known:
        own_type = profile.gpu_type or "the profile's own type"
        return f"forward and backward{on_type} take {times} times as long as on {own_type}: its speeds are added {per}"
    corrected = "the profile is" if gpu_type == profile.gpu_type else "its speeds in the profile are"
    return f"forward and backward{on_type} take {times} times as long as profiled: {corrected} corrected {per}"


def _scaled(section: SectionProfile, factor: float) -> SectionProfile:
    """No time is more than a profile can hold, whatever a worker reports."""
    times = ("forward_us", "recompute_us", "backward_us")
    measurements = tuple(
        measurement.model_copy(update={name: min(getattr(measurement, name) * factor, MOST_US) for name in times})
        for measurement in section.measurements
    )
    return section.model_copy(update={"measurements": measurements})
