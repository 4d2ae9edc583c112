"""The choice of a plan: exact cuts, the best of all shapes, memory, pins, and answers in words."""

import itertools
import re
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_profiles import make_profile
from varuna_planner.cutting import _kernels
from varuna_planner.cutting import balance as cutting
from varuna_planner.memory import USABLE_FRACTION
from varuna_planner.profile.document import (
    AllReduceMeasurement,
    Link,
    Links,
    Profile,
)
from varuna_planner.schedule.batching import count_micro_batches
from varuna_planner.schedule.policies import Policy
from varuna_planner.search.auto_config import Pins, PlanChoice, choose_plan
from varuna_planner.search.candidates import PlanCandidates
from varuna_planner.simulator import _makespan
from varuna_planner.simulator.simulation import simulate

POLICY = Policy.WORK_CONSERVING


def choose(profile: Profile, gpus: int, global_batch: int, memory: int | None = None, **more: object) -> PlanChoice:
    return choose_plan(profile, gpus=gpus, global_batch=global_batch, device_memory_bytes=memory, **more)  # type: ignore[arg-type]


class Exhaustive:
    """Every m, P, D, cut and run-ahead, by the plain rules: what the planner's search must not miss."""

    def __init__(self, profile: Profile, gpus: int, global_batch: int, memory: int | None, gpus_per_vm: int) -> None:
        self.profile, self.gpus, self.global_batch = profile, gpus, global_batch
        self.usable = 2**62 if memory is None else int(memory * 0.9)
        self.net = cutting.make_network_costs(profile, gpus=gpus, gpus_per_vm=gpus_per_vm)
        self.most_replicas = gpus

    def best_us(self, sizes: Iterable[int]) -> float:
        """Of all shapes; if none fits, of those with one replica, which sums no copies of gradients."""
        best = self._best_us(sizes)
        if best == float("inf"):
            self.most_replicas = 1
            best = self._best_us(sizes)
        return best

    def _best_us(self, sizes: Iterable[int]) -> float:
        best = float("inf")
        for m in sizes:
            count = -(-self.global_batch // m)
            table = cutting.section_tables(self.profile, [(m, self.global_batch - m * (count - 1))])
            for p in range(1, min(len(self.profile.sections), self.gpus) + 1):
                for d in range(1, min(self.gpus // p, count, self.most_replicas) + 1):
                    n = -(-count // d)
                    for level in (0, p, 2 * p):
                        drawn = self.draw(m, p, n, level)
                        if drawn is not None:
                            starts, recompute, k = drawn
                            pipeline = cutting.make_pipeline(
                                table, self.net, np.array(starts), np.array(recompute), N=n, d=d
                            )
                            best = min(best, simulate(pipeline, POLICY, run_ahead=k).makespan_us)
        return best

    def draw(self, m: int, p: int, n: int, level: int) -> tuple[tuple[int, ...], list[bool], int] | None:
        """(starts, recompute, k): the best of all cuts with room for a run-ahead, and what memory is left for."""
        K = len(self.profile.sections)
        most = min(2 * p, n - 1) if p > 1 else 0
        room = min(level, most)
        cuts = [(0, *inner, K) for inner in itertools.combinations(range(1, K), p - 1)]
        starts = min(cuts, key=lambda cut: self.rank(cut, m, n, room))
        works = [self.work(starts, s, m, n, room) for s in range(p)]
        if max(work for work, _ in works) == float("inf"):
            return None
        recompute = [again for _, again in works]
        fitting = [
            k
            for k in range(room, most + 1)
            if all(self.needed(starts, s, m, n, k, recompute[s]) <= self.usable for s in range(p))
        ]
        return starts, recompute, max(fitting)

    def rank(self, cut: tuple[int, ...], m: int, n: int, room: int) -> list[float]:
        """The busiest stage's work, then the first stage's length, then the same of the stages after it, and so on."""
        works = [self.work(cut, s, m, n, room)[0] for s in range(len(cut) - 1)]
        return [x for s in range(len(works)) for x in (max(works[s:]), -cut[s + 1])]

    def work(self, cut: tuple[int, ...], s: int, m: int, n: int, room: int) -> tuple[float, bool]:
        """(work of stage s, whether it recomputes); infinite if it does not fit either way."""
        own = self.profile.measurements_at(m)[cut[s] : cut[s + 1]]
        work = sum(x.forward_us + x.backward_us for x in own)
        if self.needed(cut, s, m, n, room, False) <= self.usable:
            return work, False
        if s == len(cut) - 2 or self.needed(cut, s, m, n, room, True) > self.usable:
            return float("inf"), False
        return work + sum(x.recompute_us for x in own), True

    def needed(self, cut: tuple[int, ...], s: int, m: int, n: int, k: int, recompute: bool) -> int:
        """Peak bytes of stage s, counted out."""
        p = len(cut) - 1
        own, sections = (
            self.profile.measurements_at(m)[cut[s] : cut[s + 1]],
            self.profile.sections[cut[s] : cut[s + 1]],
        )
        in_flight = min(n, 1 if s == p - 1 else p - s + k)
        posted_activations = in_flight if s == 0 else min(n, p - s + k + 1)
        posted_gradients = 0 if s == p - 1 else min(n, p - s + k)
        passes = (
            posted_activations * own[0].input_bytes
            + posted_gradients * own[-1].output_bytes
            + (1 if recompute else in_flight) * sum(x.activation_bytes for x in own)
            + max(x.input_bytes + x.output_bytes + x.activation_bytes for x in own)
        )
        # There may be several replicas, whose sums are of copies.
        update = sum(max(x.update_bytes, x.gradient_bytes if self.most_replicas > 1 else 0) for x in sections)
        return sum(x.parameter_bytes + x.gradient_bytes + x.optimizer_bytes for x in sections) + max(passes, update)


weight_lists = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def test_one_replica_has_room_where_several_would_not() -> None:
    """A section's state takes 1000 bytes, and the copy of its gradients 250 more."""
    choice = choose(make_profile([1, 1], sizes=(1,), activation_bytes=10), 3, 4, 1300)
    assert choice.best is not None
    assert (choice.best.p, choice.best.d) == (2, 1)


def test_a_schedule_that_holds_all_micro_batches_is_what_does_not_fit() -> None:
    profile = make_profile([1, 1], sizes=(1,), activation_bytes=100)
    assert choose(profile, 2, 4, 2000).best is not None
    choice = choose(profile, 2, 64, 2000, policy=Policy.GPIPE)
    assert choice.best is None
    assert "wait for more" not in choice.reason, "there are as many GPUs as the model has sections"
    assert choice.reason.startswith("the model fits 2 GPUs with 1.8 KiB to give each, but not with ")


def test_the_chosen_plan_heads_the_candidates_also_where_another_is_as_fast() -> None:
    # 17 examples on 3 replicas: three parts of 2 take the busiest as long as two parts of 4.
    link = Link(latency_us=0.0, bandwidth_bytes_per_s=1e6)
    links = Links(same_vm=link, other_vm=link)
    choice = choose(make_profile([15], fixed_us=200.0, links=links), 3, 17)
    first, second, plan = choice.candidates[0], choice.candidates[1], choice.best
    assert plan is not None
    assert first.predicted_minibatch_s == second.predicted_minibatch_s
    assert (first.p, first.d, first.micro_batch) == (plan.p, plan.d, plan.micro_batch)


def test_equal_sections_put_the_longer_stages_first() -> None:
    plan = choose(make_profile([1] * 10), 4, 8, pins=Pins(p=4)).best
    assert plan is not None
    assert plan.stage_starts == (0, 3, 6, 8)


networks = st.builds(
    lambda latency, bandwidth: Links(
        same_vm=Link(latency_us=latency, bandwidth_bytes_per_s=bandwidth * 10),
        other_vm=Link(latency_us=latency * 3, bandwidth_bytes_per_s=bandwidth, jitter_us=latency),
    ),
    st.sampled_from([0.0, 10.0, 300.0]),
    st.sampled_from([1e4, 1e6, 1e9]),
)


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(
    weights=weight_lists,
    messages=st.lists(st.integers(1, 60) | st.integers(1, 1500), min_size=7, max_size=7),
    gpus=st.integers(1, 10) | st.integers(11, 40),
    global_batch=st.integers(1, 30),
    links=networks,
    memory=st.none() | st.integers(2000, 40_000),
    gpus_per_vm=st.integers(1, 4),
    fixed_us=st.sampled_from([0.0, 200.0]),
    tied=st.booleans(),
    optimizer_us=st.sampled_from([0.0, 150.0, 5000.0]),
    rings=st.sampled_from([(), (1,), (1, 4)]),
)
def test_the_choice_is_the_best_of_all_shapes(
    weights: list[int],
    messages: list[int],
    gpus: int,
    global_batch: int,
    links: Links,
    memory: int | None,
    gpus_per_vm: int,
    fixed_us: float,
    tied: bool,
    optimizer_us: float,
    rings: tuple[int, ...],
) -> None:
    """`rings`: how many at once were measured; several share what one has alone."""
    profile = make_profile(
        weights,
        fixed_us=fixed_us,
        links=links,
        tied=tied and len(weights) > 1,
        messages=messages,
        optimizer_us=optimizer_us,
    )
    byte_us = 1e6 / links.other_vm.bandwidth_bytes_per_s
    measured = [one for k in rings for one in measured_rings(k, 20.0 + k, byte_us * k)]
    profile = profile.model_copy(update={"all_reduce": tuple(measured)})
    choice = choose(profile, gpus, global_batch, memory, gpus_per_vm=gpus_per_vm)
    exhaustive = Exhaustive(profile, gpus, global_batch, memory, gpus_per_vm)
    best_us = exhaustive.best_us({candidate.micro_batch for candidate in choice.candidates})
    if choice.best is None:
        assert best_us == float("inf")
        return
    assert choice.best.predicted_minibatch_s * 1e6 == pytest.approx(best_us)
    check_plan(choice, profile, gpus, global_batch, memory)
    plan = choice.best
    count = -(-global_batch // plan.micro_batch)
    for stage, needed in enumerate(plan.memory_bytes):
        starts = (*plan.stage_starts, len(weights))
        again = plan.recompute[stage]
        n = -(-count // plan.d)
        assert needed == exhaustive.needed(starts, stage, plan.micro_batch, n, plan.run_ahead, again)


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=14),
    n=st.integers(1, 24),
    k=st.integers(0, 20),
    links=networks,
    policy=st.sampled_from([Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.WORK_CONSERVING]),
    data=st.data(),
)
def test_the_quick_makespan_is_the_simulators(
    weights: list[int], n: int, k: int, links: Links, policy: Policy, data: st.DataObject
) -> None:
    profile = make_profile(weights, (2,), links=links)
    p = data.draw(st.integers(1, len(weights)))
    inner = data.draw(st.permutations(range(1, len(weights))))[: p - 1]
    starts = np.array([0, *sorted(inner), len(weights)])
    recompute = np.array(data.draw(st.lists(st.booleans(), min_size=p, max_size=p)))
    net = cutting.make_network_costs(profile, gpus=p, gpus_per_vm=1)
    table = cutting.section_tables(profile, [(2, 1)])
    pipeline = cutting.make_pipeline(table, net, starts, recompute, N=n, d=1)
    expected = simulate(pipeline, policy, run_ahead=k).makespan_us

    times = _kernels.stage_times(table, net, 0, starts, 1)

    def quick(cutoff: float) -> float:
        return float(_makespan.makespan(policy.code, n, k, times, recompute, cutoff))

    assert quick(float("inf")) == pytest.approx(expected, rel=1e-12)
    assert quick(expected * 0.7) <= expected * (1 + 1e-12)  # a bound, or the time itself


@pytest.mark.parametrize("policy", [Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.VARUNA])
def test_every_policy_that_runs_can_be_planned_for(policy: Policy) -> None:
    profile = make_profile([1, 2, 3, 2, 1], (1, 2), activation_bytes=300)
    choice = choose(profile, 6, 24, 20_000, policy=policy)
    assert choice.best is not None
    assert choice.best.policy == policy.value
    check_plan(choice, profile, 6, 24, 20_000)
    for other in itertools.product(range(1, 6), range(1, 7)):
        if other[0] * other[1] <= 6:
            pinned = choose(profile, 6, 24, 20_000, policy=policy, pins=Pins(p=other[0], d=other[1])).best
            slowest_allowed = choice.best.predicted_minibatch_s * (1 - 1e-12)
            assert pinned is None or pinned.predicted_minibatch_s >= slowest_allowed


@pytest.mark.parametrize(("memory", "global_batch"), [(None, 5000), (9000, 5000), (9000, 700), (7000, 5000)])
def test_the_best_of_many_shapes_is_the_best_of_each_number_of_stages(memory: int | None, global_batch: int) -> None:
    """Cuts drawn for few micro-batches rule out shapes with more. With P pinned, each number of stages has its own."""
    profile = make_profile([3, 1, 2, 2, 5, 1, 4], fixed_us=100)
    best = choose(profile, 3000, global_batch, memory).best
    assert best is not None
    alone = [choose(profile, 3000, global_batch, memory, pins=Pins(p=p)).best for p in range(1, 8)]
    fitting = [plan for plan in alone if plan is not None]
    assert best in fitting
    assert best.predicted_minibatch_s == min(plan.predicted_minibatch_s for plan in fitting)


def test_a_policy_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="zero-bubble"):
        choose(make_profile([1, 1]), 2, 4, policy=Policy.ZERO_BUBBLE)


def test_a_stage_that_recomputes_runs_further_ahead_where_latency_is_what_limits() -> None:
    """A round trip is many times a stage's work: to recompute, and so have more in flight, is worth its time."""
    links = Links(other_vm=Link(latency_us=5000, bandwidth_bytes_per_s=1e9))
    profile = make_profile([1, 1], (1,), links=links, activation_bytes=1000)
    plan = choose(profile, 2, 60, 6500, pins=Pins(p=2, d=1)).best
    assert plan is not None
    assert plan.recompute == (True, False)
    assert plan.run_ahead >= 2


def test_fewer_replicas_win_where_they_share_the_batch_as_well() -> None:
    """With slow all-reduces the best D is neither all nor half: 24 micro-batches on 11 replicas take three, as on 8."""
    links = Links(other_vm=Link(latency_us=12, bandwidth_bytes_per_s=1e15))
    plans = [choose(make_profile([1], (1,), links=links), 23, 24).best]
    assert plans[0] is not None
    assert plans[0].d in (5, 6, 8, 12)
    times = [
        choose(make_profile([1], (1,), links=links), 23, 24, pins=Pins(d=d)).best.predicted_minibatch_s  # type: ignore[union-attr]
        for d in range(1, 24)
    ]
    assert plans[0].predicted_minibatch_s == min(times)


def test_the_table_says_what_a_loser_loses_by() -> None:
    choice = choose(make_profile([1] * 6, state_bytes=400_000), 6, 48)
    assert choice.candidates[0].reason == "the fastest"
    reasons = [candidate.reason for candidate in choice.candidates[1:]]
    assert any(re.search(r"% slower than .*: (its|filling) .* s instead of .* s$", reason) for reason in reasons)
    assert len(choice.candidates) == len({(c.p, c.d, c.micro_batch) for c in choice.candidates})


@pytest.mark.parametrize("policy", [Policy.WORK_CONSERVING, Policy.VARUNA])
def test_a_closer_look_gives_times_in_the_place_of_bounds(policy: Policy) -> None:
    profile = make_profile([1, 2, 1, 3, 1, 1], state_bytes=400_000)
    memory = 2_400_000
    choice = choose(profile, 12, 48, memory, policy=policy)
    assert isinstance(choice.candidates, PlanCandidates)
    bounds = {(c.p, c.d, c.micro_batch): c.predicted_minibatch_s for c in choice.candidates}
    assert any("at least" in candidate.reason for candidate in choice.candidates[:8])
    choice.candidates.look_closer(8)
    assert choice.candidates[0].reason == "the fastest"
    times = []
    for one in choice.candidates[:8]:
        alone = choose(profile, 12, 48, memory, policy=policy, pins=Pins(p=one.p, d=one.d, micro_batch=one.micro_batch))
        assert alone.best is not None
        assert "at least" not in one.reason
        assert one.predicted_minibatch_s == pytest.approx(alone.best.predicted_minibatch_s)
        bound = bounds[one.p, one.d, one.micro_batch]
        assert bound is not None
        assert alone.best.predicted_minibatch_s >= bound * (1 - 1e-9)
        times.append(one.predicted_minibatch_s)
    assert times == sorted(times, key=lambda time: time or 0)


def test_receives_wait_in_host_memory_where_devices_have_their_own() -> None:
    """So a GPU has room for more than a CPU, which receives into its only memory."""
    profile = make_profile([1] * 4, (1,), messages=[400] * 4)
    on_gpu = profile.model_copy(update={"environment": {"device": "cuda: some"}})
    here, there = (choose(one, 4, 64, None, pins=Pins(p=4)).best for one in (profile, on_gpu))
    assert here is not None
    assert there is not None
    # Stage 1 of 4 with k=8: 11 may be in flight, for 12 activations and 11 gradients of 400 bytes; or 12 and 2.
    assert here.memory_bytes[1] - there.memory_bytes[1] == (12 + 11 - 12 - 2) * 400


def check_plan(choice: PlanChoice, profile: Profile, gpus: int, global_batch: int, memory: int | None) -> None:
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
    links = Links(other_vm=Link(latency_us=0, bandwidth_bytes_per_s=1e15))
    profile = make_profile([1] * 4, (1,), state_bytes=400, activation_bytes=1000, links=links)
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
    [hop_us], [byte_us] = cutting.fit_all_reduce(profile, np.array([1.0, 1.0]), 1)
    assert (hop_us, byte_us) == pytest.approx((30, 0.01))


def measured_rings(rings: int, hop_us: float, byte_us: float) -> list[AllReduceMeasurement]:
    return [
        AllReduceMeasurement(ranks=2, bytes=count, us=2 * (hop_us + count / 2 * byte_us), rings=rings)
        for count in (1000, 1_000_000)
    ]


def test_rings_of_several_stages_share_their_vms_network() -> None:
    both = (*measured_rings(1, 10, 0.1), *measured_rings(4, 16, 0.4))
    profile = make_profile([1]).model_copy(update={"all_reduce": both})

    def costs(gpus: int, gpus_per_vm: int) -> list[tuple[float, float]]:
        found = cutting.make_network_costs(profile, gpus=gpus, gpus_per_vm=gpus_per_vm)
        return list(zip(found.hop_us, found.byte_us, strict=True))

    by_rings = [(10, 0.1), (12, 0.2), (14, 0.3), (16, 0.4), (16, 0.4)]
    for found, expected in zip(costs(10, 5), by_rings, strict=True):
        assert found == pytest.approx(expected)
    [found] = costs(4, 4)
    assert found == pytest.approx((10, 0.1)), "one VM: no ring leaves it"


@pytest.mark.parametrize(("p", "rings"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_as_many_rings_share_a_vms_network_as_it_has_stages(p: int, rings: int) -> None:
    """Not as many as it has GPUs: with one stage, all GPUs of a VM are in the same ring."""
    costs = {k: measured_rings(k, 10, 5 * k) for k in (1, 2, 4)}
    profile = make_profile([5] * 8)
    all_of_them = profile.model_copy(update={"all_reduce": tuple(one for each in costs.values() for one in each)})
    those = profile.model_copy(update={"all_reduce": tuple(costs[rings])})
    times = [
        choose(one, 16, 64, gpus_per_vm=4, pins=Pins(p=p, d=16 // p, micro_batch=1)).best
        for one in (all_of_them, those)
    ]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0].predicted_minibatch_s == pytest.approx(times[1].predicted_minibatch_s, rel=1e-12)


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
    assert choice.reason == "p=2 and d=2 pinned needs 4 GPUs and only 3 can be used: wait for more, or unpin"


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


def test_a_slower_micro_batch_is_compared_with_the_work_of_the_best_also_on_one_gpu() -> None:
    choice = choose_plan(
        make_profile((1, 1), sizes=(1, 2, 4), fixed_us=300), gpus=1, global_batch=4, device_memory_bytes=None
    )
    assert choice.best is not None
    assert choice.best.micro_batch == 4
    smallest = next(one for one in choice.candidates if one.micro_batch == 1)
    assert "its busiest stage works 0.0096 s instead of 0.0042 s" in smallest.reason
