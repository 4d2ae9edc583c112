"""The measurements of running stages compared with a profile."""

from __future__ import annotations

import pytest

from varuna_planner.profile.document import Measurement, Profile, SectionProfile
from varuna_planner.profile.drift import StageMeasurement, find_drift


def profile(*forward_us: float) -> Profile:
    return Profile(
        sections=tuple(
            SectionProfile(
                index=index,
                name=str(index),
                parameter_bytes=8,
                optimizer_bytes=8,
                gradient_bytes=8,
                measurements=tuple(
                    Measurement(
                        micro_batch=size,
                        forward_us=each * size,
                        backward_us=2 * each * size,
                        recompute_us=each * size,
                        output_bytes=1,
                        input_bytes=1,
                        activation_bytes=1,
                    )
                    for size in (1, 2)
                ),
            )
            for index, each in enumerate(forward_us)
        )
    )


def stage(first: int, stop: int, *replicas_us: float) -> StageMeasurement:
    return StageMeasurement(first=first, stop=stop, replicas_us=replicas_us)


def forwards(found: Profile) -> list[list[float]]:
    return [[measurement.forward_us for measurement in section.measurements] for section in found.sections]


def test_noise_is_no_drift() -> None:
    # At micro-batch 2: 3 * 2 * (10 + 10) = 120 us for the first stage, 60 us for the second.
    assert find_drift(profile(10, 10, 10), 2, [stage(0, 2, 128, 125), stage(2, 3, 56, 58)]) is None


def test_a_fleet_that_is_slower_throughout() -> None:
    drift = find_drift(profile(10, 10, 10), 2, [stage(0, 2, 180), stage(2, 3, 96)])
    assert drift is not None
    assert drift.factors == (1.5, 1.5), "what both stages have in common"
    assert forwards(drift.profile) == [[15, 30]] * 3, "at every size"
    assert find_drift(drift.profile, 2, [stage(0, 2, 180), stage(2, 3, 96)]) is None


def test_one_slow_device_is_not_booked_on_its_sections() -> None:
    assert find_drift(profile(10, 10, 10), 1, [stage(0, 1, 90), stage(1, 2, 31), stage(2, 3, 30)]) is None


def test_sections_that_every_replica_finds_slower() -> None:
    drift = find_drift(profile(10, 10), 1, [stage(0, 1, 60, 62, 58), stage(1, 2, 30, 30, 30)])
    assert drift is not None
    assert drift.factors == (2, 1)
    assert forwards(drift.profile) == [[20, 40], [10, 20]]
    assert "2.00, 1.00" in drift.reason


def test_one_slow_replica_is_outvoted() -> None:
    assert find_drift(profile(10), 1, [stage(0, 1, 30, 90, 31)]) is None


def test_faster_counts_too() -> None:
    drift = find_drift(profile(10), 1, [stage(0, 1, 15)])
    assert drift is not None
    assert forwards(drift.profile) == [[5, 10]]


def test_stages_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="sections 1 to 2: the profile has 2"):
        find_drift(profile(10, 10), 1, [stage(0, 1, 30), stage(1, 3, 30)])
