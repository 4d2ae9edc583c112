"""Plans over GPUs of several types."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_profiles import make_profile
from varuna_planner.cutting import balance as cutting
from varuna_planner.cutting.typed_cut import SectionRuns, _list_sets
from varuna_planner.profile.document import Link, Links
from varuna_planner.profile.speed import scale_speed
from varuna_planner.schedule.batching import count_micro_batches
from varuna_planner.schedule.policies import Policy
from varuna_planner.search.auto_config import Pins, choose_plan, make_search_limits
from varuna_planner.search.mixed import TypedGpus, _Mixer, choose_mixed_plan, predict_mixed_s
from varuna_proto.plan import Plan
from varuna_proto.wording import render_rate


def typed(
    name: str, gpus: int, speed: float, weights: tuple[int, ...] = (1,) * 8, memory: int | None = None, **more: object
) -> TypedGpus:
    profile = scale_speed(make_profile(weights, **more), speed)  # type: ignore[arg-type]
    return TypedGpus(gpu_type=name, gpus=gpus, profile=profile, device_memory_bytes=memory)


def test_replicas_of_a_faster_type_run_more_micro_batches() -> None:
    groups = [typed("V100", 2, 1.0), typed("A100", 2, 3.0)]
    choice = choose_mixed_plan(groups, global_batch=256, pins=Pins(p=2))
    plan = choice.best
    assert plan is not None
    assert (plan.p, plan.d) == (2, 2)
    assert plan.gpu_types == ("A100", "A100", "V100", "V100")
    fast, slow = plan.shares
    assert fast + slow == -(-256 // plan.micro_batch)
    assert fast / slow == pytest.approx(3.0, rel=0.1)
    alone = choose_plan(groups[1].profile, gpus=2, global_batch=256, device_memory_bytes=None, pins=Pins(p=2)).best
    assert alone is not None
    assert choice.reason == (
        f"2×2, micro-batch {plan.micro_batch}, over 1 replica of A100 ({fast} micro-batches) and 1 replica of "
        f"V100 ({slow} micro-batches): {render_rate(plan.examples_per_s)} examples/s predicted, instead of "
        f"{render_rate(alone.examples_per_s)} on A100 alone"
    )


def test_stages_of_a_faster_type_have_more_sections() -> None:
    """No type has the GPUs for a replica of its own: the model needs four devices."""
    groups = [
        typed("V100", 3, 1.0, state_bytes=1000, memory=2600),
        typed("A100", 1, 4.0, state_bytes=1000, memory=8000),
    ]
    choice = choose_mixed_plan(groups, global_batch=64)
    plan = choice.best
    assert plan is not None
    assert (plan.p, plan.d) == (4, 1)
    assert plan.shares == ()
    assert sorted(plan.gpu_types) == ["A100", "V100", "V100", "V100"]
    sections = np.diff([*plan.stage_starts, 8])
    assert sections[plan.gpu_types.index("A100")] > max(
        count for count, name in zip(sections, plan.gpu_types, strict=True) if name == "V100"
    )
    assert "no type alone suffices" in choice.reason


def test_the_memory_of_each_type_limits_its_own_stages() -> None:
    groups = [
        typed("small", 2, 1.0, state_bytes=1000, memory=3000),
        typed("large", 2, 1.0, state_bytes=1000, memory=9000),
    ]
    plan = choose_mixed_plan(groups, global_batch=64, pins=Pins(p=4)).best
    assert plan is not None
    usable = {"small": 2700, "large": 8100}
    assert all(need <= usable[name] for need, name in zip(plan.memory_bytes, plan.gpu_types, strict=True))


def test_a_type_that_would_hold_the_others_up_is_left_out() -> None:
    groups = [typed("fast", 4, 100.0), typed("slow", 1, 1.0)]
    choice = choose_mixed_plan(groups, global_batch=16)
    assert choice.best is not None
    assert set(choice.best.gpu_types) == {"fast"}
    assert len(choice.best.gpu_types) == choice.best.p * choice.best.d
    assert ", all fast; mixed with other types it would be" in choice.reason


def test_one_type_gives_the_plan_of_that_type() -> None:
    group = typed("V100", 8, 1.0)
    alone = choose_plan(group.profile, gpus=8, global_batch=64, device_memory_bytes=None).best
    found = choose_mixed_plan([group, replace(group, gpu_type="none", gpus=0)], global_batch=64).best
    assert alone is not None
    assert found == replace(alone, gpu_types=("V100",) * (alone.p * alone.d))


@pytest.mark.parametrize("gpus", [(1, 1), (3, 2), (4, 4), (5, 3)])
def test_types_of_equal_speed_are_as_good_as_one(gpus: tuple[int, int]) -> None:
    one = typed("a", sum(gpus), 1.0)
    alone = choose_plan(one.profile, gpus=sum(gpus), global_batch=128, device_memory_bytes=None).best
    mixed = choose_mixed_plan([replace(one, gpus=gpus[0]), typed("b", gpus[1], 1.0)], global_batch=128).best
    assert alone is not None
    assert mixed is not None
    assert mixed.examples_per_s == pytest.approx(alone.examples_per_s, rel=0.03)


def test_pins_hold_for_mixtures() -> None:
    groups = [typed("V100", 5, 1.0), typed("A100", 3, 2.0)]
    for p, d, m in itertools.product((None, 2), (None, 2, 3), (None, 2)):
        plan = choose_mixed_plan(groups, global_batch=96, pins=Pins(p=p, d=d, micro_batch=m)).best
        assert plan is not None
        assert p in (None, plan.p)
        assert d in (None, plan.d)
        assert m in (None, plan.micro_batch)


def test_a_mixed_plan_has_the_connections_of_the_profile() -> None:
    links = Links(other_vm=Link(latency_us=10, bandwidth_bytes_per_s=1e9, connections=2))
    choice = choose_mixed_plan(
        [typed("V100", 2, 1.0, links=links), typed("A100", 2, 3.0, links=links)], global_batch=64
    )
    assert choice.best is not None
    assert choice.best.link_connections == 2


def test_without_gpus_there_is_no_plan() -> None:
    assert choose_mixed_plan([typed("V100", 0, 1.0)], global_batch=8).best is None


def test_no_mixture_that_fits_is_said_as_for_one_type() -> None:
    groups = [typed("a", 2, 1.0, memory=500), typed("b", 2, 1.0, memory=500)]
    choice = choose_mixed_plan(groups, global_batch=8)
    assert choice.best is None
    assert "does not fit devices" in choice.reason


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=7).map(tuple),
    gpus=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    speed=st.sampled_from([0.5, 1.0, 1.7, 3.0, 8.0]),
    global_batch=st.sampled_from([8, 33, 64]),
)
def test_every_mixed_plan_is_whole_and_takes_what_was_predicted(
    weights: tuple[int, ...], gpus: tuple[int, int], speed: float, global_batch: int
) -> None:
    groups = [typed("a", gpus[0], 1.0, weights), typed("b", gpus[1], speed, weights)]
    plan = choose_mixed_plan(groups, global_batch=global_batch).best
    assert plan is not None
    assert len(plan.gpu_types) == plan.p * plan.d
    assert plan.gpu_types.count("a") <= gpus[0]
    assert plan.gpu_types.count("b") <= gpus[1]
    if plan.shares:
        assert len(plan.shares) == plan.d
        assert sum(plan.shares) == -(-global_batch // plan.micro_batch)
        assert min(plan.shares) >= 1
    if len(set(plan.gpu_types)) > 1:
        assert predict_mixed_s(plan, groups) == pytest.approx(plan.predicted_minibatch_s)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=8).map(tuple),
    speed=st.sampled_from([0.3, 1.0, 2.0, 5.0]),
    memory=st.sampled_from([None, 40_000, 20_000]),
)
def test_the_cut_between_types_is_the_best_of_all_cuts(
    weights: tuple[int, ...], speed: float, memory: int | None
) -> None:
    """With one micro-batch in flight: the busiest stage has the least work that any cut allows."""
    groups = [typed("a", 2, 1.0, weights, memory), typed("b", 1, speed, weights, memory)]
    plan = choose_mixed_plan(groups, global_batch=32, pins=Pins(p=3, d=1, micro_batch=1)).best
    if plan is None:
        return
    speeds = {"a": 1.0, "b": speed}
    table = cutting.section_tables(make_profile(weights), [(1, 1)])
    work = table.work_us[0]

    def busiest_us(starts: tuple[int, ...]) -> float:
        bounds = zip(starts, (*starts[1:], len(weights)), plan.gpu_types, strict=True)
        return max((work[j] - work[i]) / speeds[name] for i, j, name in bounds)

    if not any(plan.recompute):
        cuts = [(0, *inner) for inner in itertools.combinations(range(1, len(weights)), 2)]
        fitting = cuts if memory is None else [plan.stage_starts]
        assert busiest_us(plan.stage_starts) <= min(map(busiest_us, fitting)) * (1 + 1e-9)


def test_what_shares_cost_can_be_asked_for_any_plan() -> None:
    groups = [typed("V100", 1, 1.0), typed("A100", 1, 3.0)]
    even = Plan(
        p=1,
        d=2,
        micro_batch=4,
        global_batch=64,
        stage_starts=(0,),
        recompute=(False,),
        gpu_types=("A100", "V100"),
    )
    uneven = replace(even, shares=(12, 4))
    assert predict_mixed_s(uneven, groups) < 0.55 * predict_mixed_s(even, groups)
    assert predict_mixed_s(replace(even, gpu_types=("A100", "L4")), groups) == float("inf")


def test_a_profile_without_times_is_planned_for_all_the_same() -> None:
    """Profiles come from jobs, unchecked."""
    groups = [typed("a", 2, 1.0, (0,) * 4), typed("b", 2, 1.0, (0,) * 4)]
    assert choose_mixed_plan(groups, global_batch=16).best is not None


def count_needed(plan: Plan, group: TypedGpus) -> list[int]:
    """By stage: what the replica with the most micro-batches needs."""
    limits = make_search_limits(group.profile, 1 << 40, Policy(plan.policy))
    m = plan.micro_batch
    most = max(plan.shares or (-(-count_micro_batches(plan.global_batch, m) // plan.d),))
    runs = SectionRuns(cutting.section_tables(group.profile, [(m, m)], sums_gradients=plan.d > 1))
    bounds = zip(plan.stage_starts, (*plan.stage_starts[1:], len(group.profile.sections)), strict=True)
    sets = _list_sets(limits, plan.p, most, plan.run_ahead)
    return [
        runs.count_bytes(*of, one, recompute=again) for of, one, again in zip(bounds, sets, plan.recompute, strict=True)
    ]


@settings(max_examples=20, deadline=None)
@given(
    gpus=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    speed=st.sampled_from([1.0, 3.0, 8.0]),
    global_batch=st.sampled_from([8, 12, 33]),
    policy=st.sampled_from([Policy.WORK_CONSERVING, Policy.GPIPE]),
)
def test_memory_is_planned_for_the_replica_with_the_most_micro_batches(
    gpus: tuple[int, int], speed: float, global_batch: int, policy: Policy
) -> None:
    """Also where a layout with the same rows, but more or fewer replicas, was cut before."""
    groups = [typed("a", gpus[0], 1.0), typed("b", gpus[1], speed)]
    pins = Pins(micro_batch=1)
    mixer = _Mixer(groups, global_batch=global_batch, gpus_per_vm=1, pins=pins, policy=policy)
    for plan in mixer.list_best():
        assert list(plan.memory_bytes) == count_needed(plan, groups[0])


def test_a_fast_replica_has_more_micro_batches_in_flight() -> None:
    groups = [typed("a", 2, 1.0), typed("b", 2, 3.0)]
    pins = Pins(p=2, d=2, micro_batch=1)
    mixer = _Mixer(groups, global_batch=8, gpus_per_vm=1, pins=pins, policy=Policy.WORK_CONSERVING)
    (plan,) = [plan for plan in mixer.list_best() if plan.shares]
    assert max(plan.shares) > 4
    assert list(plan.memory_bytes) == count_needed(plan, groups[0])
