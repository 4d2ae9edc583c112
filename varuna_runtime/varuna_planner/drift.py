"""Keeps a profile true: corrects it by what the ranks of the running job take per micro-batch.

A whole fleet that is slower than calibrated (other clocks, other neighbours on the host) is told from sections that
are slower than calibrated, and both from one slow VM: what all stages have in common is the hardware's; what remains
of a stage is its sections' own when several replicas, on other devices, agree on it; with one replica it may just as
well be the device, so it is left to the search for slow VMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from varuna_planner.profile import Profile, Section

__all__ = ["THRESHOLD", "Drift", "StageTimes", "expected", "find_drift"]

THRESHOLD = 0.1
"""Smaller differences are the noise of measurement; predictions are not worse for them than they claim to be."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What the ranks of one stage take for a micro-batch, waiting not counted."""

    first: int
    """First section."""
    stop: int
    """Section after the last."""
    replicas_us: tuple[float, ...]
    """Forward and backward together, one value per replica."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A profile that is no longer true, and the one that is."""

    profile: Profile
    """Corrected."""
    factors: tuple[float, ...]
    """Per stage: what forward, recompute and backward of its sections were multiplied with."""
    reason: str


def expected(profile: Profile, micro_batch: int, stages: Sequence[StageTimes]) -> list[float]:
    """Forward and backward of a micro-batch by the profile, what a stage takes on top included, µs per stage."""
    predicted = profile.at(micro_batch)
    for stage in stages:
        if not 0 <= stage.first < stage.stop <= len(predicted):
            raise ValueError(f"stage of sections {stage.first} to {stage.stop - 1}: the profile has {len(predicted)}")
    return [
        2 * profile.stage_overhead_us
        + sum(section.forward_us + section.backward_us for section in predicted[stage.first : stage.stop])
        for stage in stages
    ]


def find_drift(profile: Profile, micro_batch: int, stages: Sequence[StageTimes]) -> Drift | None:
    """What the stages' times say against the profile; None when they agree with it within THRESHOLD.

    `micro_batch`: examples. Stages must be non-empty and within the profile's sections, else ValueError.
    """
    ratios = []
    for stage, expected_us in zip(stages, expected(profile, micro_batch, stages), strict=True):
        # The lower one of two: one slow VM must not be taken for slow sections.
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


def _scaled(section: Section, factor: float) -> Section:
    measurements = tuple(
        measurement.model_copy(
            update={
                "forward_us": measurement.forward_us * factor,
                "recompute_us": measurement.recompute_us * factor,
                "backward_us": measurement.backward_us * factor,
            }
        )
        for measurement in section.measurements
    )
    return section.model_copy(update={"measurements": measurements})
