"""A job that asks for certain GPUs is planned for these and gets these, and no other job waits for it meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from decision_views import decide, devices, job, vm
from varuna_manager.domain.fitting import fits_job, is_choosy, may_fit_job, render_request
from varuna_manager.domain.sharing import Contender, share_gpus
from varuna_manager.domain.spec import Resources

GIB = 1 << 30


@pytest.mark.parametrize(
    ("wanted", "gpu_type", "gib", "fitting", "possible"),
    [
        ({}, "", None, True, True),
        ({"gpu_type": "a100"}, "NVIDIA A100 80GB PCIe", None, True, True),
        ({"gpu_type": "A100"}, "Tesla V100-PCIE-16GB", 16, False, False),
        ({"gpu_type": "A100"}, "", None, False, True),
        ({"min_gpu_memory_gib": 40}, "", 40, True, True),
        ({"min_gpu_memory_gib": 40}, "NVIDIA A100 80GB PCIe", 39.9, False, False),
        ({"min_gpu_memory_gib": 40}, "NVIDIA A100 80GB PCIe", None, False, True),
        ({"gpu_type": "A100", "min_gpu_memory_gib": 80}, "NVIDIA A100-SXM4-40GB", 40, False, False),
    ],
)
def test_gpus_fit_by_their_name_and_their_memory(
    wanted: dict[str, object], gpu_type: str, gib: float | None, fitting: bool, possible: bool
) -> None:
    asked = Resources.model_validate(wanted)
    there = {"gpu_type": gpu_type, "device_memory_bytes": None if gib is None else int(gib * GIB)}
    assert fits_job(asked, **there) is fitting
    assert may_fit_job(asked, **there) is possible
    assert is_choosy(asked) is bool(wanted)


@pytest.mark.parametrize("flaw", [{"gpu_type": ""}, {"min_gpu_memory_gib": 0}, {"min_gpu_memory_gib": float("inf")}])
def test_what_no_gpu_could_be_is_refused(flaw: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(flaw))):
        Resources.model_validate(flaw)


def test_the_reason_for_waiting_names_what_is_asked_for() -> None:
    asks = render_request(Resources(gpu_type="A100", min_gpu_memory_gib=40))
    view = job(min_gpus=2, devices=devices("a"), unfit=3, asks=asks)
    assert decide(view, vm("a")).reason == (
        "1 GPU is free for this job and it needs 2: waiting for more "
        "(3 others do not match its resources: gpu_type A100, min_gpu_memory_gib 40.0)"
    )


def contender(name: str, **changes: object) -> Contender:
    one = Contender(id=name, name=name, priority=0, created_at=float(ord(name)), min_gpus=1, max_gpus=None)
    return replace(one, **changes)


def test_a_job_whose_gpus_are_not_there_keeps_no_other_waiting() -> None:
    shares = share_gpus([contender("a", min_gpus=4, fitting=0), contender("b")], 8)
    assert shares["b"].gpus == 8
    assert shares["a"].reason == "it needs 4 GPUs and 0 of 8 match its resources"


def test_a_job_is_given_no_more_than_fit_it() -> None:
    shares = share_gpus([contender("a", fitting=2), contender("b")], 8)
    assert (shares["a"].gpus, shares["b"].gpus) == (2, 6)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(0, 8))), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_shares_stay_within_what_fits_and_what_there_is(jobs: list[tuple[int, int | None]], gpus: int) -> None:
    asked = [
        contender(chr(97 + at), min_gpus=least, fitting=None if fitting is None else min(fitting, gpus))
        for at, (least, fitting) in enumerate(jobs)
    ]
    shares = share_gpus(asked, gpus)
    possible = [one for one in asked if not one.is_too_large(gpus)]
    assert sum(shares[one.id].gpus for one in possible) <= gpus
    assert all(one.fitting is None or shares[one.id].gpus <= one.fitting for one in possible)
