"""All GPUs of a job are of one type."""

from __future__ import annotations

import pytest

from varuna_manager.domain.fitting import fits_job, is_choosy, pin_type, render_request
from varuna_manager.domain.gpu_types import OnlyType, choose_job_type
from varuna_manager.domain.spec import Resources


@pytest.mark.parametrize(
    ("usable", "present", "chosen"),
    [
        ({}, None, None),
        ({"A": 0}, "A", None),
        ({"A": 2, "B": 3}, None, "B"),
        ({"A": 2, "B": 3}, "A", "A"),
        ({"A": 2, "B": 4}, "A", "B"),
        ({"A": 2, "B": 2}, None, "A"),
        ({"B": 1}, "A", "B"),
    ],
)
def test_a_job_keeps_its_type_until_there_is_twice_as_much_of_another(
    usable: dict[str, int], present: str | None, chosen: str | None
) -> None:
    assert choose_job_type(usable, present) == chosen


def test_gpus_beyond_what_a_job_uses_do_not_count_and_of_equally_many_it_gets_the_larger() -> None:
    usable, memory_bytes = {"A100": 2, "T4": 4}, {"A100": 80 << 30, "T4": 16 << 30}
    assert choose_job_type(usable, "A100") == "T4"
    assert choose_job_type(usable, "A100", max_gpus=2) == "A100"
    assert choose_job_type(usable, "A100", max_gpus=3) == "A100"
    assert choose_job_type(usable, "A100", memory_bytes=memory_bytes) == "A100", "it may not fit smaller ones"
    assert choose_job_type({"A100": 4, "T4": 2}, "T4", memory_bytes=memory_bytes) == "A100"
    assert choose_job_type({"Z": 2, **usable}, None, max_gpus=2, memory_bytes={**memory_bytes, "Z": 8 << 30}) == "A100"


def test_a_pinned_type_is_the_whole_name() -> None:
    pinned = pin_type(Resources(gpu_type="a100"), OnlyType("A100", "several jobs share the fleet"))
    assert is_choosy(pinned)
    assert fits_job(pinned, gpu_type="A100", device_memory_bytes=None)
    assert not fits_job(pinned, gpu_type="A100-80GB", device_memory_bytes=None)
    text = "gpu_type a100, only A100, as several jobs share the fleet"
    assert render_request(pinned) == text
    assert pin_type(Resources(), None) == Resources()
