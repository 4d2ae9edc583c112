"""The measurements of running stages compared with a profile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_planner.profile.document import GpuTypeSpeeds, Measurement, Profile, SectionProfile
from varuna_planner.profile.drift import StageMeasurement, expected, find_drift


def profile(*forward_us: float, own_type: str = "", overhead_us: float = 0.0, **speeds: tuple[float, ...]) -> Profile:
    """`speeds`: of the sections, by the names of the other types."""
    return Profile(
        gpu_type=own_type,
        stage_overhead_us=overhead_us,
        other_gpu_types=tuple(
            GpuTypeSpeeds(gpu_type=gpu_type, section_speeds=each) for gpu_type, each in speeds.items()
        ),
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
        ),
    )


def stage(first: int, stop: int, *replicas_us: float, on: str = "") -> StageMeasurement:
    return StageMeasurement(first=first, stop=stop, replicas_us=replicas_us, gpu_type=on)


def speeds_of(found: Profile) -> dict[str, tuple[float, ...]]:
    return {other.gpu_type: other.section_speeds for other in found.other_gpu_types}


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


def test_each_type_is_expected_to_take_its_own_times() -> None:
    known = profile(10, 20, own_type="V100", A100=(2.0, 4.0))
    stages = [stage(0, 2, 90, on="V100"), stage(0, 2, 30, on="A100"), stage(0, 2, 90, on="K80"), stage(0, 2, 90)]
    assert expected(known, 1, stages) == [90, 30, 90, 90], "one that is not known is as fast as the profile's own"
    assert find_drift(known, 1, stages[:2]) is None


def test_a_drift_of_the_profiles_own_type_leaves_the_other_types_their_times() -> None:
    known = profile(10, 10, own_type="V100", A100=(2.0, 2.0))
    stages = [stage(0, 1, 60, 62, on="V100"), stage(1, 2, 30, 30, on="V100"), stage(0, 1, 15, on="A100")]
    drift = find_drift(known, 1, [*stages, stage(1, 2, 15, on="A100")])
    assert drift is not None
    assert (drift.factors, forwards(drift.profile)) == ((2, 1, 1, 1), [[20, 40], [10, 20]])
    assert speeds_of(drift.profile) == {"A100": (4.0, 2.0)}
    assert drift.reason == (
        "forward and backward on V100 take 2.00, 1.00 times as long as profiled: "
        "the profile is corrected stage by stage"
    )


def test_a_drift_of_another_type_is_corrected_in_its_speeds() -> None:
    known = profile(10, 10, own_type="V100", A100=(2.0, 2.0), K80=(0.5, 0.5))
    own = [stage(0, 1, 30, on="V100"), stage(1, 2, 31, on="V100")]
    alone = find_drift(known, 1, [*own, stage(0, 1, 30, on="A100"), stage(1, 2, 31, on="A100")])
    assert alone is not None
    assert (forwards(alone.profile), speeds_of(alone.profile)) == (
        forwards(known),
        {"A100": (1.0, 1.0), "K80": (0.5, 0.5)},
    ), "what both its stages share"
    assert "on A100 take 2.00, 2.00 times as long as profiled: its speeds in the profile are corrected" in alone.reason
    agreed = find_drift(known, 1, [*own, stage(0, 1, 30, 30, on="A100"), stage(1, 2, 15, 15, on="A100")])
    assert agreed is not None
    assert speeds_of(agreed.profile)["A100"] == (1.0, 2.0), "several replicas agree on the stage"


def test_both_types_at_once() -> None:
    """A host that is busy with something else slows every type."""
    known = profile(10, own_type="V100", A100=(2.0,))
    drift = find_drift(known, 1, [stage(0, 1, 45, on="V100"), stage(0, 1, 30, on="A100")])
    assert drift is not None
    assert (forwards(drift.profile), speeds_of(drift.profile)) == ([[15, 30]], {"A100": (1.5,)})
    assert [part.split(" take ")[0] for part in drift.reason.split("; ")] == [
        "forward and backward on V100",
        "forward and backward on A100",
    ]


@pytest.mark.parametrize("us", [31.0, 60.0])
def test_a_type_that_is_not_known_yet_is_added_even_if_it_is_as_fast(us: float) -> None:
    known = profile(10, 10, own_type="V100")
    stages = [stage(0, 1, 30, on="V100"), stage(1, 2, us, on="K80")]
    drift = find_drift(known, 1, stages)
    assert drift is not None
    assert forwards(drift.profile) == forwards(known)
    assert speeds_of(drift.profile) == {"K80": pytest.approx((30 / us, 30 / us))}, (
        "the other section, which it has not run, too"
    )
    assert f"on K80 take {us / 30:.2f} times as long as on V100: its speeds are added as a whole" in drift.reason
    assert find_drift(drift.profile, 1, stages) is None


def test_a_job_that_has_moved_to_another_type_leaves_the_profiles_own_times() -> None:
    known = profile(10, 10, own_type="V100", A100=(2.0, 2.0))
    drift = find_drift(known, 1, [stage(0, 1, 30, 30, on="A100"), stage(1, 2, 15, 15, on="A100")])
    assert drift is not None
    assert (forwards(drift.profile), speeds_of(drift.profile)) == (forwards(known), {"A100": (1.0, 2.0)})


TIMES = st.floats(150, 3000)


@given(
    own=st.lists(st.lists(TIMES, min_size=0, max_size=3), min_size=3, max_size=3),
    other=st.lists(st.lists(TIMES, min_size=0, max_size=3), min_size=3, max_size=3),
    overhead_us=st.floats(0, 3),
    is_known=st.booleans(),
)
def test_corrections_come_to_an_end(
    own: list[list[float]], other: list[list[float]], overhead_us: float, is_known: bool
) -> None:
    speeds = {"A100": (2.0, 2.0, 1.0, 4.0)} if is_known else {}
    now = profile(100, 50, 200, 100, own_type="V100", overhead_us=overhead_us, **speeds)
    bounds = [0, 1, 3, 4]
    stages = [
        stage(bounds[number], bounds[number + 1], *replicas, on=gpu_type)
        for gpu_type, by_stage in (("V100", own), ("A100", other))
        for number, replicas in enumerate(by_stage)
        if replicas
    ]
    for _ in range(6):
        drift = find_drift(now, 1, stages) if stages else None
        if drift is None:
            return
        now = Profile.from_json(drift.profile.to_json())
    raise AssertionError(f"corrected again and again: {drift}")


def test_a_worker_that_reports_nonsense_leaves_a_profile_that_can_be_read() -> None:
    known = profile(10, 10, own_type="V100")
    for us in (1e-3, 1e12):
        drift = find_drift(known, 1, [stage(0, 2, us, on="A100")])
        assert drift is not None
        assert Profile.from_json(drift.profile.to_json()).other_gpu_types


@pytest.mark.parametrize("us", [2.0**53, 1e300])
def test_a_profile_that_is_corrected_can_be_read_again(us: float) -> None:
    """Whatever workers report: a profile that cannot be read would end the job."""
    found = find_drift(profile(10, 10, overhead_us=1.0), 1, [stage(0, 2, us)])
    assert found is not None
    assert Profile.from_json(found.profile.to_json()) == found.profile
    other = find_drift(profile(10, 10, own_type="V100"), 1, [stage(0, 2, us, on="A100")])
    assert other is not None
    assert Profile.from_json(other.profile.to_json()) == other.profile
