"""The choice of a plan: exact cuts, the best of all shapes, memory, pins, and answers in words."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_planner import balance as cutting
from varuna_planner.auto_config import Choice, Pins, choose_plan
from varuna_planner.batching import count_micro_batches, micro_batch_sizes
from varuna_planner.memory import USABLE_FRACTION, stage_bytes, usable_bytes
from varuna_planner.profile import AllReduceMeasurement, Link, Links, Measurement, Profile, Section, SharedParameter
from varuna_planner.schedule import Policy, most_in_flight
from varuna_planner.simulator import simulate

POLICY = Policy.WORK_CONSERVING


def make_profile(
    weights: Sequence[int],
    sizes: Sequence[int] = (1, 2, 4),
    *,
    fixed_us: float = 0,
    state_bytes: int = 1000,
    activation_bytes: int = 100,
    links: Links | None = None,
    tied: bool = False,
) -> Profile:
    """Sections whose forward takes weight × (fixed_us + 100 µs × m), backward twice that."""
    sections = []
    for index, weight in enumerate(weights):
        measurements = tuple(
            Measurement(
                micro_batch=size,
                forward_us=weight * (fixed_us + 100 * size),
                backward_us=2 * weight * (fixed_us + 100 * size),
                recompute_us=weight * (fixed_us + 100 * size),
                output_bytes=10 * size,
                input_bytes=10 * size,
                activation_bytes=activation_bytes * weight * size,
            )
            for size in sizes
        )
        sections.append(
            Section(
                index=index,
                name=f"block.{index}",
                parameter_bytes=state_bytes // 4 * weight,
                gradient_bytes=state_bytes // 4 * weight,
                optimizer_bytes=state_bytes // 2 * weight,
                measurements=measurements,
            )
        )
    shared = (SharedParameter(name="wte", sections=(0, len(weights) - 1), bytes=500),) if tied else ()
    return Profile(sections=tuple(sections), links=links or Links(), shared_parameters=shared)


def choose(profile: Profile, gpus: int, global_batch: int, memory: int | None = None, **more: object) -> Choice:
    return choose_plan(profile, gpus=gpus, global_batch=global_batch, device_memory_bytes=memory, **more)  # type: ignore[arg-type]


def brute_force_busiest(profile: Profile, m: int, p: int, n: int, usable: int) -> float:
    """The least busiest-stage work over all cuts, by trying them all with the plain formulas."""
    at, K = profile.at(m), len(profile.sections)
    best = float("inf")
    for inner in itertools.combinations(range(1, K), p - 1):
        busiest = 0.0
        for s, (i, j) in enumerate(itertools.pairwise((0, *inner, K))):
            own, sections = at[i:j], profile.sections[i:j]
            numbers = (
                sum(x.parameter_bytes + x.gradient_bytes + x.optimizer_bytes for x in sections),
                own[0].input_bytes,
                sum(x.activation_bytes for x in own),
                max(x.input_bytes + x.output_bytes + x.activation_bytes for x in own),
                most_in_flight(POLICY.code, s, p, n, 0),
            )
            work = sum(x.forward_us + x.backward_us for x in own)
            if stage_bytes(*numbers, False) > usable:
                work += sum(x.recompute_us for x in own)
                if s == p - 1 or stage_bytes(*numbers, True) > usable:
                    work = float("inf")
            busiest = max(busiest, work)
        best = min(best, busiest)
    return best


weight_lists = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@settings(deadline=None, max_examples=80)
@given(weight_lists, st.integers(1, 8), st.integers(1500, 30_000))
def test_cuts_are_the_best_of_all_cuts(weights: list[int], n: int, usable: int) -> None:
    profile = make_profile(weights, (2,))
    table = cutting.section_table(profile, 2, 2)
    cuts = cutting.balance(table, usable_bytes=usable, policy=POLICY, N=n, most_stages=len(weights))
    for p in range(1, len(weights) + 1):
        expected = brute_force_busiest(profile, 2, p, n, usable)
        assert cuts.busiest_us(p) == pytest.approx(expected)
        bounds = cuts.bounds(p)
        if expected == float("inf"):
            assert bounds is None
            continue
        assert bounds is not None
        assert (bounds[0], bounds[-1]) == (0, len(weights))
        assert (np.diff(bounds) > 0).all()
        recompute = cutting.recompute_where_needed(table, bounds, usable_bytes=usable, policy=POLICY, N=n)
        memory = cutting.stage_memory(table, bounds, recompute, policy=POLICY, N=n, run_ahead=0)
        assert max(memory) <= usable


def test_equal_sections_put_the_longer_stages_first() -> None:
    table = cutting.section_table(make_profile([1] * 10), 1, 1)
    cuts = cutting.balance(table, usable_bytes=2**62, policy=POLICY, N=8, most_stages=4)
    bounds = cuts.bounds(4)
    assert bounds is not None
    assert bounds.tolist() == [0, 3, 6, 8, 10]


networks = st.builds(
    lambda latency, bandwidth: Links(
        same_vm=Link(latency_us=latency, bandwidth_bytes_per_s=bandwidth * 10),
        other_vm=Link(latency_us=latency * 3, bandwidth_bytes_per_s=bandwidth, jitter_us=latency),
    ),
    st.sampled_from([0.0, 10.0, 300.0]),
    st.sampled_from([1e4, 1e6, 1e9]),
)


@settings(deadline=None, max_examples=60)
@given(
    weights=weight_lists,
    gpus=st.integers(1, 8),
    global_batch=st.integers(1, 30),
    links=networks,
    memory=st.none() | st.integers(3000, 40_000),
    gpus_per_vm=st.integers(1, 3),
    fixed_us=st.sampled_from([0.0, 200.0]),
    tied=st.booleans(),
)
def test_the_choice_is_the_best_of_all_shapes(
    weights: list[int],
    gpus: int,
    global_batch: int,
    links: Links,
    memory: int | None,
    gpus_per_vm: int,
    fixed_us: float,
    tied: bool,
) -> None:
    profile = make_profile(weights, fixed_us=fixed_us, links=links, tied=tied and len(weights) > 1)
    choice = choose(profile, gpus, global_batch, memory, gpus_per_vm=gpus_per_vm)
    usable = usable_bytes(memory)
    net = cutting.network(profile, gpus=gpus, gpus_per_vm=gpus_per_vm)
    best = float("inf")
    for m in {c.micro_batch for c in choice.candidates}:
        table = cutting.section_table(profile, m, micro_batch_sizes(global_batch, m)[-1])
        count = count_micro_batches(global_batch, m)
        for p in range(1, min(len(weights), gpus) + 1):
            for d in range(1, min(gpus // p, count) + 1):
                cost = cutting.Cost(N=-(-count // d), d=d)
                cuts = cutting.balance(table, usable_bytes=usable, policy=POLICY, N=cost.N, most_stages=p)
                bounds = cuts.bounds(p)
                if bounds is None:
                    continue
                recompute = cutting.recompute_where_needed(table, bounds, usable_bytes=usable, policy=POLICY, N=cost.N)
                most = min(2 * p, cost.N - 1) if p > 1 else 0
                ks = [
                    k
                    for k in range(most + 1)
                    if max(cutting.stage_memory(table, bounds, recompute, policy=POLICY, N=cost.N, run_ahead=k))
                    <= usable
                ]
                pipeline = cutting.pipeline(table, net, bounds, recompute, cost)
                time_us = simulate(pipeline, POLICY, run_ahead=max(ks)).makespan_us
                bound = cutting.bound_us(table, net, bounds, recompute, cost, policy=POLICY, run_ahead=max(ks))
                assert bound <= time_us * (1 + 1e-9)
                best = min(best, time_us)
    if choice.best is None:
        assert best == float("inf")
        return
    assert choice.best.predicted_minibatch_s * 1e6 == pytest.approx(best)
    check_plan(choice, profile, gpus, global_batch, memory)


def check_plan(choice: Choice, profile: Profile, gpus: int, global_batch: int, memory: int | None) -> None:
    """What holds of every answer."""
    plan = choice.best
    assert plan is not None
    assert plan.p * plan.d <= gpus
    assert plan.d <= count_micro_batches(global_batch, plan.micro_batch)
    assert len(plan.stage_starts) == len(plan.recompute) == len(plan.memory_bytes) == plan.p
    assert plan.stage_starts[0] == 0
    assert list(plan.stage_starts) == sorted(set(plan.stage_starts))
    assert plan.stage_starts[-1] < len(profile.sections)
    assert not plan.recompute[-1]
    if memory is None:
        assert not any(plan.recompute)
    else:
        assert max(plan.memory_bytes) <= memory * USABLE_FRACTION
    first = choice.candidates[0]
    assert (first.p, first.d, first.micro_batch) == (plan.p, plan.d, plan.micro_batch)
    for candidate in choice.candidates:
        assert candidate.reason
        assert candidate.fits == (candidate.predicted_minibatch_s is not None)
        if candidate.predicted_minibatch_s is not None:
            assert candidate.fits
    predicted = [c.predicted_minibatch_s for c in choice.candidates if c.fits and "at least" not in c.reason]
    assert predicted == sorted(predicted, key=lambda s: s or 0)


def test_a_perfect_network_and_a_large_batch_use_every_gpu() -> None:
    links = Links(
        same_vm=Link(latency_us=0, bandwidth_bytes_per_s=1e15), other_vm=Link(latency_us=0, bandwidth_bytes_per_s=1e15)
    )
    plan = choose(make_profile([1] * 8, links=links), 4, 64).best
    assert plan is not None
    assert (plan.p, plan.d) == (1, 4)
    # 16 examples of 8 sections of 300 µs on each.
    assert plan.predicted_minibatch_s == pytest.approx(16 * 8 * 300e-6)


def test_a_slow_network_prefers_stages_to_replicas() -> None:
    """All-reduce moves parameters, a pipeline only activations."""
    links = Links(other_vm=Link(latency_us=10, bandwidth_bytes_per_s=1e7))
    plan = choose(make_profile([1] * 8, state_bytes=4_000_000, links=links), 4, 64).best
    assert plan is not None
    assert (plan.p, plan.d) == (4, 1)


def test_one_section_cannot_be_cut() -> None:
    plan = choose(make_profile([5]), 4, 64).best
    assert plan is not None
    assert plan.p == 1


def test_a_global_batch_smaller_than_the_fleet_leaves_gpus_unused() -> None:
    choice = choose(make_profile([1], links=Links(other_vm=Link(latency_us=0, bandwidth_bytes_per_s=1e15))), 8, 3)
    assert choice.best is not None
    assert (choice.best.p, choice.best.d) == (1, 3)
    assert "5 GPUs are left unused" in choice.reason


def test_a_batch_that_d_does_not_divide_is_as_slow_as_its_busiest_replica() -> None:
    links = Links(other_vm=Link(latency_us=0, bandwidth_bytes_per_s=1e15))
    profile = make_profile([1], (1,), links=links)
    assert choose(profile, 3, 10, pins=Pins(d=3)).best.predicted_minibatch_s == pytest.approx(4 * 300e-6)  # type: ignore[union-attr]


def test_a_smaller_last_micro_batch_takes_less_time() -> None:
    profile = make_profile([1], (1, 2, 4))
    plan = choose(profile, 1, 11, pins=Pins(micro_batch=4)).best
    assert plan is not None
    assert plan.predicted_minibatch_s == pytest.approx(11 * 300e-6)


def test_micro_batches_beyond_the_best_efficiency_are_not_tried() -> None:
    """F(m)/m no longer improves; and with a fixed cost per micro-batch it does, so larger ones win."""
    assert {c.micro_batch for c in choose(make_profile([1] * 4), 1, 64).candidates} == {1}
    plan = choose(make_profile([1] * 4, fixed_us=500), 1, 64).best
    assert plan is not None
    assert plan.micro_batch == 4


def test_a_batch_below_every_measured_size_is_one_micro_batch() -> None:
    plan = choose(make_profile([1, 1], (4, 8)), 2, 3).best
    assert plan is not None
    assert (plan.micro_batch, plan.d) == (3, 1)


def test_recompute_only_where_memory_demands_it() -> None:
    """Front stages have more in flight, so they are the first to recompute."""
    profile = make_profile([1] * 4, (1,), state_bytes=400, activation_bytes=1000)
    free = choose(profile, 4, 64, None, pins=Pins(p=4)).best
    tight = choose(profile, 4, 64, 5000, pins=Pins(p=4)).best
    assert free is not None
    assert tight is not None
    assert free.recompute == (False,) * 4
    assert free.run_ahead == 8
    assert tight.recompute == (True, False, False, False)
    assert max(tight.memory_bytes) <= 4500


def test_tied_weights_cost_a_sync_between_their_stages() -> None:
    links = Links(other_vm=Link(latency_us=0, bandwidth_bytes_per_s=1e6))
    times = [
        choose(make_profile([1] * 4, (1,), links=links, tied=tied), 2, 8, pins=Pins(p=2)).best for tied in (False, True)
    ]
    # 500 bytes on each of two ranks: a ring of two moves them once over a link of 1 byte per µs.
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].predicted_minibatch_s - times[0].predicted_minibatch_s == pytest.approx(500e-6)


def test_all_reduce_is_fitted_to_what_was_measured() -> None:
    def us(ranks: int, count: int) -> float:
        return 2 * (ranks - 1) * (30 + count / ranks * 0.01)

    measured = tuple(
        AllReduceMeasurement(ranks=ranks, bytes=count, us=us(ranks, count))
        for ranks, count in ((2, 1000), (2, 10_000_000), (4, 100_000))
    )
    profile = make_profile([1]).model_copy(update={"all_reduce": measured})
    assert cutting.fit_all_reduce(profile, np.array([1.0, 1.0])) == pytest.approx((30, 0.01))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (Pins(d=4), r"d=4 is pinned but a global batch of 2 has at most 2 micro-batches \(of 1\).*pin d to at most 2"),
        (Pins(p=9), r"p=9 is pinned but the model has 8 sections"),
        (Pins(micro_batch=3), r"micro_batch=3 is pinned but the global batch has only 2 examples"),
        (Pins(micro_batch=2, d=2), r"d=2 is pinned but a global batch of 2 has at most 1 micro-batches \(of 2\)"),
        (Pins(p=0), r"p=0 is pinned but must be at least 1"),
    ],
)
def test_a_pin_that_can_never_be_met_is_refused(pins: Pins, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(make_profile([1] * 8), 16, 2, pins=pins)


def test_pins_are_kept() -> None:
    plan = choose(make_profile([1] * 8), 16, 64, pins=Pins(p=3, d=2, micro_batch=3)).best
    assert plan is not None
    assert (plan.p, plan.d, plan.micro_batch) == (3, 2, 3)


def test_pins_beyond_the_fleet_wait_for_more() -> None:
    choice = choose(make_profile([1] * 8), 3, 64, pins=Pins(p=2, d=2))
    assert choice.best is None
    assert choice.reason == "p=2 and d=2 pinned needs 4 GPUs and there are 3: wait for more, or unpin"


def test_no_gpus_no_plan() -> None:
    assert choose(make_profile([1]), 0, 8).reason == "there are no GPUs"


def test_a_model_too_large_for_the_fleet_says_how_many_gpus_it_needs() -> None:
    choice = choose(make_profile([1] * 8, state_bytes=1000), 2, 64, 4000)
    assert choice.best is None
    assert choice.reason.startswith("the model needs at least 3 GPUs")
    assert all(not candidate.fits for candidate in choice.candidates)


def test_a_model_too_large_for_any_fleet_names_its_heaviest_section() -> None:
    choice = choose(make_profile([1, 9, 1]), 8, 64, 4000)
    assert choice.best is None
    assert "section block.1 alone needs" in choice.reason
