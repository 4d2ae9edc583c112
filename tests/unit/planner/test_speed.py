"""The profile of GPUs of another type or speed."""

from __future__ import annotations

import pytest

from varuna_planner.profile.document import GpuTypeSpeeds, Measurement, Profile, SectionProfile
from varuna_planner.profile.speed import scale_speed, select_gpu_type


def make_profile(*forward_us: float) -> Profile:
    """Sections with these forwards, backwards of twice that, measured on a V100; an A100 is 2 and 4 times as fast."""
    return Profile(
        gpu_type="V100",
        stage_overhead_us=30.0,
        sections=tuple(
            SectionProfile(
                index=index,
                name=str(index),
                parameter_bytes=4,
                optimizer_bytes=8,
                optimizer_us=8.0,
                gradient_bytes=4,
                measurements=(
                    Measurement(
                        micro_batch=1,
                        forward_us=us,
                        backward_us=2 * us,
                        recompute_us=us,
                        output_bytes=1,
                        input_bytes=1,
                        activation_bytes=1,
                    ),
                ),
            )
            for index, us in enumerate(forward_us)
        ),
        other_gpu_types=(GpuTypeSpeeds(gpu_type="A100", section_speeds=(2.0, 4.0)),),
    )


def test_a_type_that_was_measured_has_a_speed_for_each_section() -> None:
    found = select_gpu_type(make_profile(100.0, 100.0), "A100")
    assert [section.measurements[0].forward_us for section in found.sections] == [50.0, 25.0]
    assert [section.optimizer_us for section in found.sections] == [4.0, 2.0]
    assert found.stage_overhead_us == pytest.approx(30.0 / (200 / 75)), "the whole model is 200 / 75 times as fast"
    assert (found.gpu_type, found.other_gpu_types) == ("A100", ())


def test_the_profiles_own_type_keeps_its_times() -> None:
    profile = make_profile(100.0, 100.0)
    assert select_gpu_type(profile, "V100", assumed_speed=3.0).sections == profile.sections


def test_a_type_that_is_not_known_has_the_assumed_speed() -> None:
    profile = make_profile(100.0, 100.0)
    assert select_gpu_type(profile, "L4", assumed_speed=0.5).sections == scale_speed(profile, 0.5).sections


def test_speeds_belong_to_sections_and_types_are_there_once() -> None:
    document = make_profile(100.0, 100.0).model_dump()
    with pytest.raises(ValueError, match="speeds of 1 sections, and the model has 2"):
        Profile.model_validate({**document, "other_gpu_types": [{"gpu_type": "A100", "section_speeds": [2.0]}]})
    with pytest.raises(ValueError, match="a type of GPU is there twice: A100, A100"):
        Profile.model_validate({**document, "gpu_type": "A100"})
