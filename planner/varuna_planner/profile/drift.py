"""Keeps a profile accurate: corrects it by the measured times per micro-batch of the running job's ranks.

It distinguishes a fleet that is slower than calibrated (other clocks, other neighbours on the host), sections that are
slower than calibrated, and a single slow VM. A factor that all stages share belongs to the hardware. What remains of a
stage belongs to its sections if several replicas, on different devices, agree on it; with one replica the device may be
the cause, so it is left to the search for slow VMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from varuna_planner.profile.document import Profile, SectionProfile

__all__ = ["THRESHOLD", "Drift", "StageMeasurement", "expected", "find_drift"]

THRESHOLD = 0.1
"""Smaller differences are measurement noise, within the stated accuracy of predictions."""


@dataclass(frozen=True, kw_only=True)
class StageMeasurement:
    """The time that each rank of one stage takes for a micro-batch, without waiting."""

    first: int
    """First section."""
    stop: int
    """Section after the last."""
    replicas_us: tuple[float, ...]
    """Forward and backward together, one value per replica."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The correction of a profile that is no longer accurate."""

    profile: Profile
    """The corrected profile."""
    factors: tuple[float, ...]
    """Per stage: the factor applied to forward, recompute and backward of its sections."""
    reason: str


def expected(profile: Profile, micro_batch: int, stages: Sequence[StageMeasurement]) -> list[float]:
    """Forward and backward of a micro-batch by the profile, with each stage's overhead, µs per stage."""
    predicted = profile.measurements_at(micro_batch)
    for stage in stages:
        if not 0 <= stage.first < stage.stop <= len(predicted):
            raise ValueError(f"stage of sections {stage.first} to {stage.stop - 1}: the profile has {len(predicted)}")
    return [
        2 * profile.stage_overhead_us
        + sum(section.forward_us + section.backward_us for section in predicted[stage.first : stage.stop])
        for stage in stages
    ]


def find_drift(profile: Profile, micro_batch: int, stages: Sequence[StageMeasurement]) -> Drift | None:
    """The drift that the stages' times show; None when they agree with the profile within THRESHOLD.

    `micro_batch`: examples. Stages must be non-empty and within the profile's sections, else ValueError.
    """
    ratios = []
    for stage, expected_us in zip(stages, expected(profile, micro_batch, stages), strict=True):
        # The lower median: one slow VM of two must not be taken for slow sections.
        ratios.append(median_low(stage.replicas_us) / expected_us if expected_us > 0 else 1.0)
    common = median_low(ratios)
    alone = any(len(stage.replicas_us) < 2 for stage in stages)
    factors = tuple(common if alone else ratio for ratio in ratios)
    if all(1 / (1 + THRESHOLD) <= factor <= 1 + THRESHOLD for factor in factors):
        return None
    section_factors = [1.0] * len(profile.sections)
    for stage, factor in zip(stages, factors, strict=True):
        section_factors[stage.first : stage.stop] = [factor] * (stage.stop - stage.first)
    sections = tuple(map(_scaled, profile.sections, section_factors))
    shown = ", ".join(f"{factor:.2f}" for factor in factors)
    per = "as a whole" if alone else "stage by stage"
    return Drift(
        profile=profile.model_copy(
            update={"sections": sections, "stage_overhead_us": profile.stage_overhead_us * common}
        ),
        factors=factors,
        reason=f"forward and backward take {shown} times as long as profiled: the profile is corrected {per}",
    )


def _scaled(section: SectionProfile, factor: float) -> SectionProfile:
    times = ("forward_us", "recompute_us", "backward_us")
    measurements = tuple(
        measurement.model_copy(update={name: getattr(measurement, name) * factor for name in times})
        for measurement in section.measurements
    )
    return section.model_copy(update={"measurements": measurements})
