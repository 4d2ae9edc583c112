"""What ranks compute in a step, by which the time that they wait is told apart."""

from __future__ import annotations

import pytest

from planner_profiles import make_profile
from varuna_manager.history.spending import _predict_busy_us
from varuna_planner.profile.document import GpuTypeSpeeds
from varuna_proto.plan import Plan


def test_each_rank_computes_its_share_at_the_speed_of_its_type() -> None:
    """A section takes 300 µs for a micro-batch of one example."""
    profile = make_profile([1, 1], (1,)).model_copy(
        update={
            "gpu_type": "V100",
            "other_gpu_types": (GpuTypeSpeeds(gpu_type="A100", section_speeds=(3.0, 3.0)),),
        }
    )
    whole = Plan(p=2, d=2, micro_batch=1, global_batch=16, stage_starts=(0, 1), recompute=(False, False))
    assert _predict_busy_us(profile, whole) == pytest.approx(8 * 300)
    mixed = Plan(
        p=1,
        d=2,
        micro_batch=1,
        global_batch=16,
        stage_starts=(0,),
        recompute=(True,),
        shares=(12, 4),
        gpu_types=("A100", "V100"),
    )
    assert _predict_busy_us(profile, mixed) == pytest.approx((12 * 800 / 3 + 4 * 800) / 2), "with recompute"
