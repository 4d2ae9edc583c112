"""What stages cost in a plan (links, all-reduce, ties, last micro-batch), and plans under other circumstances."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from varuna.optim.reduction import BUCKET_BYTES
from varuna_planner.cutting import _kernels, balance
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.placement import place
from varuna_planner.profile.document import (
    AllReduceMeasurement,
    Link,
    Links,
    Measurement,
    Profile,
    SectionProfile,
    SharedParameter,
)
from varuna_planner.schedule.policies import Op, Policy, most_in_flight
from varuna_planner.search.auto_config import Pins, choose_plan
from varuna_planner.simulator.simulation import lower_bound, simulate, uniform
from varuna_planner.what_if import SimulationRequest, simulate_plan
from varuna_proto.plan import Device

K = 8
GRADIENT_BYTES = 3_000_000
HOP_US, BYTE_US = 20.0, 1e-3
"""Of the all-reduces that were measured."""


def make_profile(**changes: Any) -> Profile:
    """K equal sections, F = R = 1 ms and B = 2 ms per example; fast links inside VMs, slow ones between."""
    measurements = tuple(
        Measurement(
            micro_batch=m,
            forward_us=1000 * m,
            backward_us=2000 * m,
            recompute_us=1000 * m,
            output_bytes=100_000 * m,
            input_bytes=100_000 * m,
            activation_bytes=1_000_000 * m,
        )
        for m in (1, 2, 4)
    )
    sections = tuple(
        SectionProfile(
            index=index,
            name=f"block {index}",
            parameter_bytes=3_000_000,
            optimizer_bytes=6_000_000,
            gradient_bytes=GRADIENT_BYTES,
            measurements=measurements,
        )
        for index in range(K)
    )
    links = Links(
        same_vm=Link(latency_us=10, bandwidth_bytes_per_s=1e10),
        other_vm=Link(latency_us=100, bandwidth_bytes_per_s=1e9),
    )
    all_reduce = tuple(
        AllReduceMeasurement(ranks=ranks, bytes=count, us=ring_us(count, ranks))
        for ranks in (2, 4)
        for count in (1000, 1_000_000)
    )
    return Profile(**{"sections": sections, "links": links, "all_reduce": all_reduce, **changes})


def ring_us(count: int, ranks: int) -> float:
    return 2 * (ranks - 1) * (HOP_US + BYTE_US * count / ranks) if ranks > 1 else 0.0


def make_pipeline(
    profile: Profile, bounds: list[int], d: int, *, N: int = 4, gpus_per_vm: int = 1, last: int = 2
) -> Pipeline:
    P = len(bounds) - 1
    sections = balance.section_tables(profile, [(2, last)])
    net = balance.make_network_costs(profile, gpus=P * d, gpus_per_vm=gpus_per_vm)
    return balance.make_pipeline(sections, net, np.array(bounds), np.zeros(P, dtype=np.bool_), N=N, d=d)


def test_a_boundary_of_several_tensors_costs_one_latency_and_the_sum_of_their_bytes() -> None:
    """Stage 0 sends three tensors as one message, whose bytes are summed when sections are measured."""
    tensors = (60_000, 30_000, 10_000)  # bytes of each for one example
    profile = make_profile()
    sections = []
    for section in profile.sections:
        measured = [m.model_copy(update={"output_bytes": sum(tensors) * m.micro_batch}) for m in section.measurements]
        sections.append(section.model_copy(update={"measurements": tuple(measured)}))
    pipeline = make_pipeline(profile.model_copy(update={"sections": tuple(sections)}), [0, 4, K], 1, N=1)
    link = profile.links.other_vm
    one_way_us = link.latency_us + sum(2 * size for size in tensors) / link.bandwidth_bytes_per_s * 1e6
    found = simulate(pipeline, Policy.WORK_CONSERVING, record=True)
    begins, ends = found.spans_us
    assert begins[1, 0] - ends[0, 0] == pytest.approx(one_way_us)  # the forward's activations
    assert begins[0, 1] - ends[1, 1] == pytest.approx(one_way_us)  # the backward's gradients


@pytest.mark.parametrize("gpus_per_vm", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_a_link_is_inside_a_vm_if_placement_puts_it_there_in_every_replica(p: int, d: int, gpus_per_vm: int) -> None:
    devices = [Device(f"vm{n:02}", i) for n in range(-(-p * d // gpus_per_vm)) for i in range(gpus_per_vm)]
    placed = place(p, d, devices)
    pipeline = make_pipeline(make_profile(), [*range(p), K], d, gpus_per_vm=gpus_per_vm)
    for s in range(p - 1):
        inside = all(placed[r * p + s].vm_id == placed[r * p + s + 1].vm_id for r in range(d))
        assert pipeline.latency_us[s] == (10 if inside else 100)
        # 200 kB for a micro-batch of 2.
        assert pipeline.activation_transfer_us[0, s] == pytest.approx(20 if inside else 200)


def test_all_reduce_overlaps_the_last_backward() -> None:
    """The buckets one by one, as varuna.optim.reduction.GradientReducer launches them, against the formula."""
    assert BUCKET_BYTES == _kernels.BUCKET_BYTES
    for buckets in (1, 2, 3, 10):
        for backward_us in (0.0, 1e4, 1e5, 1e7):
            count = buckets * BUCKET_BYTES
            ends = 0.0
            for bucket in range(buckets):
                ends = max(ends, backward_us * (bucket + 1) / buckets) + ring_us(BUCKET_BYTES, 4)
            exposed = _kernels.exposed_us(count, 4, HOP_US, BYTE_US, backward_us)
            assert exposed == pytest.approx(ends - backward_us)


def test_tied_weights_are_summed_over_all_that_hold_them_and_nobody_else() -> None:
    tied = SharedParameter(name="wte", sections=(0, K - 1), bytes=1_000_000)
    agreement = 2 * 3 * HOP_US  # a tree over 8 ranks
    pipeline = make_pipeline(make_profile(shared_parameters=(tied,)), [0, 2, 4, 6, K], 2)
    others = ring_us(2 * GRADIENT_BYTES, 2) + agreement
    ends = ring_us(2 * GRADIENT_BYTES - tied.bytes, 2) + ring_us(tied.bytes, 4) + agreement
    assert pipeline.finish_us == pytest.approx([ends, others, others, ends])


def test_weights_tied_within_a_stage_are_summed_once() -> None:
    tied = SharedParameter(name="wte", sections=(0, 1), bytes=1_000_000)
    pipeline = make_pipeline(make_profile(shared_parameters=(tied,)), [0, 4, K], 2)
    agreement = 2 * 2 * HOP_US
    first, second = ring_us(4 * GRADIENT_BYTES - tied.bytes, 2), ring_us(4 * GRADIENT_BYTES, 2)
    assert pipeline.finish_us == pytest.approx([first + agreement, second + agreement])


def test_every_stage_ends_with_the_step_of_its_own_optimizer() -> None:
    plain = make_profile()
    slow = [section.model_copy(update={"optimizer_us": 100.0 * section.index}) for section in plain.sections]
    before = make_pipeline(plain, [0, 1, K], 2).finish_us
    after = make_pipeline(plain.model_copy(update={"sections": tuple(slow)}), [0, 1, K], 2).finish_us
    assert after - before == pytest.approx([0.0, 100.0 * sum(range(1, K))])


def test_a_smaller_last_micro_batch_takes_less() -> None:
    pipeline = make_pipeline(make_profile(), [0, 4, K], 1, last=1)
    assert pipeline.forward_us.tolist() == [[8000, 8000], [4000, 4000]]
    # With more replicas the busiest one is the first, which has none.
    assert make_pipeline(make_profile(), [0, 4, K], 2, last=1).forward_us.tolist() == [[8000, 8000], [8000, 8000]]


QUESTION = SimulationRequest(profile=make_profile(), p=4, d=2, micro_batch=2, global_batch=40)


@pytest.mark.parametrize("foresight", [False, True])
@pytest.mark.parametrize("policy", Policy)
def test_actions_and_messages_of_no_duration_are_simulated_too(policy: Policy, foresight: bool) -> None:
    nothing = uniform(4, 6, forward_us=0.0, recompute_us=0.0, backward_us=0.0)
    found = simulate(nothing, policy, foresight=foresight)
    assert 0.0 <= found.makespan_us < 1.0
    for actions in found.actions:
        assert [action.micro_batch for action in actions if action.op is Op.B] == list(range(6))


def test_what_is_simulated_is_what_was_planned() -> None:
    best = choose_plan(
        QUESTION.profile, gpus=8, global_batch=40, device_memory_bytes=None, pins=Pins(p=4, d=2, micro_batch=2)
    ).best
    assert best is not None
    outcome = simulate_plan(QUESTION)
    assert outcome.minibatch_us == pytest.approx(best.predicted_minibatch_s * 1e6)
    assert outcome.stage_starts == best.stage_starts
    assert outcome.lower_bound_us == lower_bound(outcome.pipeline) <= outcome.minibatch_us
    # 10 micro-batches of F = 4, B = 8 ms fill (10 + 3) * 12 ms if messages cost nothing.
    assert outcome.bubble_fraction == pytest.approx(3 / 13, abs=0.01)


def test_a_slow_network_costs_time_unless_it_is_not_used() -> None:
    slow = dataclasses.replace(QUESTION, network_scale=10)
    assert simulate_plan(slow).minibatch_us > simulate_plan(QUESTION).minibatch_us
    inside = dataclasses.replace(QUESTION, gpus_per_vm=8)
    assert (
        simulate_plan(dataclasses.replace(inside, network_scale=10)).minibatch_us == simulate_plan(inside).minibatch_us
    )


def test_jitter_costs_time_and_the_seed_decides_how_much() -> None:
    jittery = dataclasses.replace(QUESTION, jitter_us=3000.0, compute_noise=0.05)
    outcome = simulate_plan(jittery)
    assert outcome.minibatch_us > simulate_plan(QUESTION).minibatch_us
    assert outcome.minibatch_us == simulate_plan(jittery).minibatch_us
    assert outcome.minibatch_us != simulate_plan(dataclasses.replace(jittery, seed=1)).minibatch_us


def test_memory_caps_the_stash_and_makes_stages_recompute() -> None:
    free = simulate_plan(QUESTION)
    assert not any(free.recompute)
    for memory_mb in (65, 50, 40):
        tight = simulate_plan(dataclasses.replace(QUESTION, device_memory_bytes=memory_mb * 1_000_000))
        caps = [most_in_flight(Policy.WORK_CONSERVING.code, s, 4, 10, tight.run_ahead) for s in range(4)]
        assert tight.stash_max <= max(caps)
        assert tight.stash_max < free.stash_max or any(tight.recompute)
        assert not tight.recompute[-1]


def test_memory_decides_what_given_stages_leave_open() -> None:
    """In stages of 6 and 2 sections the first one recomputes where it would not in stages of 4 and 4."""
    memory_bytes = 105_000_000  # 12 MB of state a section, and 2 MB of activations for each micro-batch in flight
    two = dataclasses.replace(QUESTION, p=2, d=1, device_memory_bytes=memory_bytes)
    assert simulate_plan(two).recompute == (False, False)
    uneven = simulate_plan(dataclasses.replace(two, stage_starts=(0, 6)))
    assert uneven.recompute == (True, False)
    assert simulate_plan(dataclasses.replace(two, stage_starts=(0, 2))).recompute == (False, False)
    kept = simulate_plan(dataclasses.replace(two, stage_starts=(0, 4), recompute=(False, False)))
    again = simulate_plan(dataclasses.replace(two, stage_starts=(0, 4), recompute=(True, False)))
    assert kept.run_ahead < again.run_ahead, "what a stage does not keep leaves room to run ahead"


@pytest.mark.parametrize("memory_mb", [None, 65, 50, 40])
def test_the_planners_own_stages_are_simulated_as_it_planned_them(memory_mb: int | None) -> None:
    memory_bytes = None if memory_mb is None else memory_mb * 1_000_000
    free = simulate_plan(dataclasses.replace(QUESTION, device_memory_bytes=memory_bytes))
    given = dataclasses.replace(QUESTION, device_memory_bytes=memory_bytes, stage_starts=free.stage_starts)
    same = simulate_plan(given)
    assert (same.recompute, same.run_ahead, same.minibatch_us) == (free.recompute, free.run_ahead, free.minibatch_us)


def test_what_is_given_whole_is_simulated_whatever_the_memory() -> None:
    tight = dataclasses.replace(QUESTION, device_memory_bytes=1_000_000, stage_starts=(0, 2, 4, 6))
    with pytest.raises(ValueError, match=r"stages 0,2,4,6: stage 0 needs 3\d\.\d MiB with a run-ahead of 0, and a dev"):
        simulate_plan(tight)
    told = dataclasses.replace(tight, run_ahead=3, recompute=(False,) * 4)
    assert simulate_plan(told).run_ahead == 3


def test_zero_bubble_gains() -> None:
    whole = simulate_plan(QUESTION)
    split = simulate_plan(dataclasses.replace(QUESTION, policy=Policy.ZERO_BUBBLE))
    assert split.lower_bound_us <= split.minibatch_us < whole.minibatch_us
    assert split.bubble_fraction < whole.bubble_fraction


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p": 9}, "p=9: the profile has 8 sections, so there are 1 to 8 stages"),
        ({"p": 0}, "p=0: the profile has 8 sections"),
        ({"d": 21}, "d=21: a global batch of 40 has 20 micro-batches of 2, so there are 1 to 20 replicas"),
        ({"network_scale": 0}, "network scale 0: it must be above 0"),
        ({"network_scale": float("inf")}, "network scale inf: it must be above 0"),
        ({"seed": -5}, "seed -5: it is 0 or more"),
        ({"jitter_us": -1e6}, "jitter -1 s: it is 0 or more"),
        ({"run_ahead": -1}, "run-ahead -1: it is 0 or more"),
        ({"recompute": (True,)}, "the recompute mask has 1 stages, the plan 4"),
        ({"stage_starts": (0, 2)}, "stages 0,2: these are the first sections of 2 stages, the plan has 4"),
        ({"stage_starts": (0, 2, 2, 4)}, "stages 0,2,2,4: first sections begin with 0, ascend, and are below 8"),
        ({"device_memory_bytes": 1_000_000}, "GPUs|devices"),
    ],
)
def test_a_question_without_an_answer_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_plan(dataclasses.replace(QUESTION, **changes))
