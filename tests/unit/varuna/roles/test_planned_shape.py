"""The planner chooses the shape of a script that leaves it open, for the processes that another launcher started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from varuna.roles.planned_shape import RankDevice, choose_shape
from varuna_planner.profile.document import Measurement, Profile, SectionProfile
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

SECTION_BYTES = 1000


def make_profile(kept_for: str = "") -> Profile:
    """Four sections that compute for long and send little. Larger micro-batches save time."""
    measured = tuple(
        Measurement(
            micro_batch=m,
            forward_us=1000.0 * m + 500,
            backward_us=2000.0 * m + 1000,
            recompute_us=1000.0 * m,
            output_bytes=8 * m,
            input_bytes=8 * m,
            activation_bytes=8 * m,
        )
        for m in (1, 2, 4)
    )
    state = dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes"), SECTION_BYTES)
    sections = tuple(SectionProfile(index=i, name=str(i), measurements=measured, **state) for i in range(4))
    return Profile(sections=sections, micro_batch_kept_for=kept_for)


def make_environment(url: str = "", *, ranks: int = 4, micro_batch: int = 0) -> WorkerEnvironment:
    return WorkerEnvironment(
        job_id="launched",
        generation=1,
        mode=Mode.TRAIN,
        rank=0,
        local_rank=0,
        world_size=ranks,
        rendezvous_host="127.0.0.1",
        rendezvous_port=0,
        plan=Plan(p=1, d=ranks, micro_batch=micro_batch, global_batch=16),
        checkpoint_url=url,
        shape_is_open=True,
    )


def choose(profile: Profile, environment: WorkerEnvironment, memory_bytes: int | None = None) -> Plan:
    devices = [RankDevice("host", memory_bytes)] * environment.world_size
    plan = choose_shape(profile, devices, environment).best
    assert plan is not None
    return plan


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_it_is_for_the_ranks_that_there_are(ranks: int) -> None:
    plan = choose(make_profile(), make_environment(ranks=ranks))
    assert (plan.p * plan.d, plan.global_batch) == (ranks, 16)
    assert len(plan.stage_starts) == plan.p


def test_the_smallest_device_sets_the_limit() -> None:
    whole = 4 * 3 * SECTION_BYTES
    devices = [RankDevice("a", 10**9), RankDevice("a", whole // 2), RankDevice("b", None), RankDevice("b", 10**9)]
    plan = choose_shape(make_profile(), devices, make_environment()).best
    assert plan is not None
    assert plan.p > 1
    none = choose_shape(make_profile(), [RankDevice("a", whole // 2)], make_environment(ranks=1))
    assert none.best is None
    assert "there are 1: wait for more" in none.reason


def test_the_scripts_micro_batch_stands() -> None:
    assert choose(make_profile(), make_environment(micro_batch=2)).micro_batch == 2


def test_the_plan_lies_beside_the_checkpoints(tmp_path: Path) -> None:
    plan = choose(make_profile(), make_environment(str(tmp_path)))
    assert Plan.from_document(json.loads((tmp_path / "plan.json").read_text())) == plan


def test_a_training_whose_random_numbers_depend_on_the_micro_batch_keeps_it(tmp_path: Path) -> None:
    url, profile = str(tmp_path), make_profile(kept_for="model.py:7")
    choose(profile, make_environment(url, micro_batch=1))
    assert choose(profile, make_environment(url)).micro_batch > 1, "nothing is trained yet"
    choose(profile, make_environment(url, micro_batch=1))
    (tmp_path / "varuna_ckpt_3").mkdir()
    choice = choose_shape(profile, [RankDevice("host", None)] * 4, make_environment(url))
    assert choice.best is not None
    assert choice.best.micro_batch == 1
    assert choice.reason.endswith("the micro-batch stays 1, because random numbers depend on it: model.py:7")
    assert choose(make_profile(), make_environment(url)).micro_batch > 1
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(ValueError, match=r"plan.json is no plan .*: give the micro-batch of the checkpoints"):
        choose(profile, make_environment(url))
    assert choose(profile, make_environment(url, micro_batch=2)).micro_batch == 2
