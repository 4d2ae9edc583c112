"""Liveput: checkpoint intervals, the fleet's expectation against closed forms and against chance, and the ranking."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from varuna_planner.liveput.checkpoint_interval import CheckpointInterval, StopCosts, _checkpoints, best_checkpoints
from varuna_planner.liveput.liveput import FleetModel, Hazard, Matrix, PlanOption, fleet_sizes
from varuna_planner.profile.document import Measurement, Profile, SectionProfile
from varuna_planner.search.liveput_ranking import LiveputChoice, SpotMarket, rank_by_liveput

FREE = StopCosts(morph_s=0, detect_s=0, save_stall_s=0, save_write_s=0)


def make_profile(sections: int) -> Profile:
    """Equal sections of 10 ms forward and 20 ms backward per example."""
    return Profile(
        sections=tuple(
            SectionProfile(
                index=i,
                name=f"block.{i}",
                parameter_bytes=1000,
                gradient_bytes=1000,
                optimizer_bytes=2000,
                measurements=(
                    Measurement(
                        micro_batch=1,
                        forward_us=10_000,
                        backward_us=20_000,
                        recompute_us=10_000,
                        output_bytes=10,
                        input_bytes=10,
                        activation_bytes=10,
                    ),
                ),
            )
            for i in range(sections)
        )
    )


# ---------------------------------------------------------------- how often to save


def test_without_hazard_saves_cost_only_their_stall() -> None:
    found = best_checkpoints(0, 10, StopCosts(save_stall_s=1, save_write_s=0))

    assert found.interval_s == 3600
    assert found.running == found.kept == pytest.approx(3600 / 3601)


def test_the_interval_is_youngs_where_mini_batches_and_stalls_are_short() -> None:
    stops_per_s, stall_s = 1 / 36_000, 0.2
    found = best_checkpoints(stops_per_s, 0.1, StopCosts(save_stall_s=stall_s, save_write_s=0))

    assert found.interval_s == pytest.approx(math.sqrt(2 * stall_s / stops_per_s), rel=0.02)
    assert found.redone_s == pytest.approx(found.interval_s / 2, rel=0.02)


def test_where_every_removal_is_announced_nothing_is_redone() -> None:
    found = best_checkpoints(1 / 600, 10, StopCosts(notice_probability=1))

    assert found.redone_s == 0
    assert found.interval_s == 3600


def test_a_save_is_not_started_before_the_one_before_is_written() -> None:
    assert best_checkpoints(1, 1, StopCosts(save_stall_s=1, save_write_s=20)).every >= 19


rates = st.floats(1e-6, 1e-1)
minibatches = st.floats(30, 500)
some_costs = st.builds(
    StopCosts,
    save_stall_s=st.floats(0, 30),
    save_write_s=st.floats(0, 60),
    notice_probability=st.floats(0, 1),
)


@settings(max_examples=60, deadline=None)
@given(rates, minibatches, some_costs)
@example(1e-3, 30.0, StopCosts(save_stall_s=0, save_write_s=0))
# Beyond the best interval, so many stops keep the same but for rounding.
@example(0.03, 77.0, StopCosts(save_stall_s=16, save_write_s=45, notice_probability=0.75))
def test_no_other_interval_keeps_more(stops_per_s: float, minibatch_s: float, costs: StopCosts) -> None:
    found = best_checkpoints(stops_per_s, minibatch_s, costs)
    first = max(1, math.ceil((costs.save_write_s - costs.save_stall_s) / minibatch_s))
    all_of_them = [
        _checkpoints(every, stops_per_s, minibatch_s, costs).kept
        for every in range(first, max(first, int(3600 // minibatch_s)) + 1)
    ]
    assert found.kept == pytest.approx(max(all_of_them), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(rates, minibatches, some_costs)
def test_more_stops_keep_less_and_notice_keeps_more(stops_per_s: float, minibatch_s: float, costs: StopCosts) -> None:
    def kept(rate: float, notice: float) -> float:
        with_notice = StopCosts(
            save_stall_s=costs.save_stall_s, save_write_s=costs.save_write_s, notice_probability=notice
        )
        return best_checkpoints(rate, minibatch_s, with_notice).kept

    assert 0 <= kept(stops_per_s, 0) <= 1
    assert kept(stops_per_s * 1.5, 0) <= kept(stops_per_s, 0) + 1e-12
    assert kept(stops_per_s, 0.5) >= kept(stops_per_s, 0) - 1e-12


def trained_and_saved(until_s: float, checkpoints: CheckpointInterval, costs: StopCosts) -> tuple[float, float]:
    """What a generation that starts at 0 has trained, and has in complete checkpoints, at a moment: step by step."""
    at = trained = saved = 0.0
    while at < until_s:
        trained += min(checkpoints.interval_s, until_s - at)
        at += checkpoints.interval_s + costs.save_stall_s
        if at + costs.save_write_s <= until_s:
            saved = trained
    return trained, saved


def test_the_closed_form_of_a_stop_is_what_chance_gives() -> None:
    chance = random.Random(1)
    costs = StopCosts(save_stall_s=4, save_write_s=9, notice_probability=0.3)
    rate = 1 / 200
    found = best_checkpoints(rate, 15, costs)
    training, redone = [], []
    for _ in range(40_000):
        trained, saved = trained_and_saved(chance.expovariate(rate), found, costs)
        training.append(trained)
        redone.append(0 if chance.random() < 0.3 else trained - saved)

    def error(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return 4 * math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)

    assert sum(training) / len(training) * rate == pytest.approx(found.running, abs=error(training) * rate)
    assert sum(redone) / len(redone) == pytest.approx(found.redone_s, abs=error(redone))


# ---------------------------------------------------------------- the fleet


def make_options(*vms: int, per_vm: float = 2.0, minibatch_s: float = 20) -> list[PlanOption]:
    return [PlanOption(vms=count, examples_per_s=per_vm * count, minibatch_s=minibatch_s) for count in vms]


def test_without_hazard_the_expectation_is_the_peak() -> None:
    fleet = FleetModel(make_options(2, 4), Hazard(removals_per_vm_hour=0), FREE, most_vms=4, horizon_s=3600)

    assert [fleet.expected_rate(4, option) for option in (0, 1, 2)] == pytest.approx([0, 4, 8])


def test_a_lone_vm_that_is_lost_and_not_replaced_gives_its_life() -> None:
    hazard = Hazard(removals_per_vm_hour=3, additions_per_hour=0)
    costs = StopCosts(save_stall_s=0, save_write_s=0)
    fleet = FleetModel(make_options(1), hazard, costs, most_vms=1, horizon_s=7200)

    # Until the loss or the horizon, whichever comes first, less what the loss throws back.
    loss, end = 3 / 3600, 1 / 7200
    redone_s = fleet.plan_checkpoints(1, 1).redone_s * math.exp(-loss * costs.morph_s)
    assert fleet.expected_rate(1, 1) == pytest.approx(2 * (1 - loss * redone_s) * end / (loss + end))


def test_a_lone_vm_that_is_replaced_alternates() -> None:
    hazard = Hazard(removals_per_vm_hour=3, additions_per_hour=12)
    fleet = FleetModel(make_options(1), hazard, FREE, most_vms=1, horizon_s=1e9)

    # A renewal process: 1/3 h of training, less what is thrown back, then 1/12 h of waiting for a VM.
    redone_s = fleet.plan_checkpoints(1, 1).redone_s
    assert redone_s > 0
    assert fleet.expected_rate(1, 1) == pytest.approx(2 * (1200 - redone_s) / (1200 + 300), rel=1e-3)


def test_burst_removals_of_all_vms_hit_whatever_is_used() -> None:
    hazard = Hazard(removals_per_vm_hour=1, removal_sizes=(0, 0, 0, 1))
    fleet = FleetModel(make_options(2, 4), hazard, FREE, most_vms=4, horizon_s=3600)

    assert fleet.stops_per_s(4, 1) == pytest.approx(fleet.stops_per_s(4, 2)) == pytest.approx(1 / 3600)


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 3), st.floats(0, 3), st.floats(0, 120), st.floats(0, 120))
def test_more_hazard_and_dearer_morphs_never_give_more(low: float, more: float, morph_s: float, dearer: float) -> None:
    def expected(hazard: float, morph: float) -> float:
        rates = Hazard(removals_per_vm_hour=hazard, additions_per_hour=5)
        return FleetModel(
            make_options(2, 4, 6), rates, StopCosts(morph_s=morph, save_stall_s=0), most_vms=6, horizon_s=3600
        ).expected_rate(6, 3)

    assert expected(low + more, morph_s) <= expected(low, morph_s) * (1 + 1e-9)
    assert expected(low, morph_s + dearer) <= expected(low, morph_s) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("vms", "hazard", "costs"),
    [(8, 1000.0, StopCosts()), (8, 300.0, StopCosts(morph_s=600.0)), (40, 60.0, StopCosts(morph_s=300.0))],
)
def test_decisions_of_equal_worth_do_not_take_turns_for_ever(
    vms: int, hazard: float, costs: StopCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At such a hazard they differ by less than their values' rounding."""
    evaluated, really = 0, FleetModel._evaluate_choices

    def evaluate(model: FleetModel) -> Matrix:
        nonlocal evaluated
        evaluated += 1
        assert evaluated < 50
        return really(model)

    monkeypatch.setattr(FleetModel, "_evaluate_choices", evaluate)
    options = [PlanOption(vms=v, examples_per_s=v**0.9, minibatch_s=1.0) for v in range(1, vms + 1)]
    model = FleetModel(options, Hazard(removals_per_vm_hour=hazard), costs, most_vms=vms, horizon_s=3600)
    assert 0 <= model.expected_rate(vms, vms) <= vms**0.9


def test_growing_waits_where_a_morph_costs_more_than_it_brings() -> None:
    options = [
        PlanOption(vms=4, examples_per_s=8, minibatch_s=1),
        PlanOption(vms=5, examples_per_s=8.2, minibatch_s=1),
    ]
    hazard = Hazard(removals_per_vm_hour=0.5, additions_per_hour=10)

    def grown(morph_s: float) -> int:
        return FleetModel(options, hazard, StopCosts(morph_s=morph_s), most_vms=5, horizon_s=3600).after_growth(5, 1)

    assert grown(1) == 2
    assert grown(300) == 1


def test_a_fleet_of_many_vms_is_told_apart_in_levels() -> None:
    assert fleet_sizes(5) == [0, 1, 2, 3, 4, 5]
    sizes = fleet_sizes(4098)
    assert sizes[0] == 0
    assert sizes[-1] == 4098
    assert len(sizes) <= 42
    fleet = FleetModel(
        make_options(2000, 4000), Hazard(removals_per_vm_hour=0.05), StopCosts(), most_vms=4098, horizon_s=3600
    )
    assert 0 < fleet.expected_rate(4098, 2) < 8000


class Played:
    """Simulates the fleet's process VM by VM and save by save, with the fleet's decisions."""

    def __init__(self, fleet: FleetModel, chance: random.Random) -> None:
        self.fleet, self.costs, self.chance = fleet, fleet.costs, chance
        self.vms = fleet.most_vms
        self.option = len(fleet.options) - 1
        self.examples = 0.0
        self.checkpoints = [fleet.plan_checkpoints(fleet.most_vms, i) for i in range(len(fleet.options))]

    def play(self) -> float:
        """Examples until the horizon, from the full fleet with the largest option just launched."""
        fleet, chance = self.fleet, self.chance
        left_s = chance.expovariate(1 / fleet.horizon_s)
        age_s = down_s = 0.0
        while True:
            removal = self.vms * fleet.hazard.removals_per_vm_hour / 3600 / mean(fleet.hazard.removal_sizes)
            addition = fleet.hazard.additions_to(fleet.most_vms) / 3600 / mean(fleet.hazard.addition_sizes)
            if self.vms == fleet.most_vms:
                addition = 0.0
            passed_s = chance.expovariate(removal + addition)
            if passed_s >= left_s:
                self.count(age_s + left_s - down_s, lost=False)
                return self.examples
            age_s += passed_s
            left_s -= passed_s
            before = self.option
            if chance.random() < removal / (removal + addition):
                stopped_for_s = self.remove(age_s - down_s)
            else:
                self.vms = min(fleet.most_vms, self.vms + draw(fleet.hazard.addition_sizes, chance))
                grown = fleet.after_growth(self.vms, before)
                stopped_for_s = None
                if grown != before:
                    self.count(age_s - down_s, lost=False)
                    self.option, stopped_for_s = grown, self.costs.save_s + self.costs.morph_s
            if stopped_for_s is not None:
                age_s, down_s = 0.0, stopped_for_s

    def remove(self, ran_s: float) -> float | None:
        """A burst of losses: returns how long training stands still; None: all lost VMs were spare."""
        taken = min(self.vms, draw(self.fleet.hazard.removal_sizes, self.chance))
        hit = min(self.chance.sample(range(self.vms), taken)) < self.fleet.options[self.option].vms
        self.vms -= taken
        if not hit:
            return None
        notice = self.chance.random() < self.costs.notice_probability
        self.count(ran_s, lost=not notice)
        before, self.option = self.option, self.fleet.after_loss(self.vms, self.option)
        kept = self.costs.replace_s is not None and self.option == before
        down_s = self.costs.replace_s if kept else self.costs.morph_s
        assert down_s is not None
        return down_s + (self.costs.save_s if notice else self.costs.detect_s)

    def count(self, ran_s: float, *, lost: bool) -> None:
        if self.option == 0 or ran_s <= 0:
            return
        trained, saved = trained_and_saved(ran_s, self.checkpoints[self.option], self.costs)
        self.examples += self.fleet.options[self.option].examples_per_s * (saved if lost else trained)


def mean(sizes: Sequence[float]) -> float:
    return sum(share * size for size, share in enumerate(sizes, 1))


def draw(sizes: Sequence[float], chance: random.Random) -> int:
    return chance.choices(range(1, len(sizes) + 1), weights=sizes)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("hazard", "costs"),
    [
        # Losses that throw work back come one VM at a time: how often an option is stopped, and so how it saves, then
        # depends on its own VMs alone.
        (
            Hazard(removals_per_vm_hour=2, additions_per_hour=8),
            StopCosts(morph_s=60, detect_s=5, save_stall_s=1, save_write_s=4),
        ),
        (
            Hazard(removals_per_vm_hour=2, additions_per_hour=8, addition_sizes=(0.5, 0.5)),
            StopCosts(morph_s=60, replace_s=5, detect_s=5, save_stall_s=1, save_write_s=4),
        ),
        (
            Hazard(removals_per_vm_hour=2, additions_per_hour=12, removal_sizes=(0.4, 0.2, 0.4)),
            StopCosts(morph_s=60, replace_s=5, save_stall_s=1, save_write_s=4, notice_probability=1),
        ),
    ],
)
def test_the_expectation_is_what_chance_gives(hazard: Hazard, costs: StopCosts) -> None:
    fleet = FleetModel(make_options(2, 3, 4, minibatch_s=10), hazard, costs, most_vms=5, horizon_s=3600)
    chance = random.Random(7)

    runs = [Played(fleet, chance).play() / fleet.horizon_s for _ in range(6000)]

    average = sum(runs) / len(runs)
    error = math.sqrt(sum((run - average) ** 2 for run in runs)) / len(runs)
    assert fleet.expected_rate(5, 3) == pytest.approx(average, abs=4 * error)
    assert 4 * error < 0.06 * average


# ---------------------------------------------------------------- the ranking


def rank(hazard: float, costs: StopCosts, *, gpus: int = 8, sections: int = 8, global_batch: int = 64) -> LiveputChoice:
    return rank_by_liveput(
        make_profile(sections),
        gpus=gpus,
        global_batch=global_batch,
        device_memory_bytes=None,
        market=SpotMarket(hazard=Hazard(removals_per_vm_hour=hazard), costs=costs),
    )


def test_without_hazard_the_ranking_is_by_peak() -> None:
    choice = rank(0, StopCosts(save_stall_s=0))

    assert choice.best is not None
    assert choice.best.plan == choice.peak.best
    assert choice.best.expected_examples_per_s == pytest.approx(choice.best.plan.examples_per_s)
    peaks = [one.plan.examples_per_s for one in choice.ranked]
    assert peaks == sorted(peaks, reverse=True)
    assert choice.spare_reason.startswith("use all 8 VMs")


def test_where_a_warm_spare_saves_much_of_a_stop_one_is_kept() -> None:
    costs = StopCosts(morph_s=600, replace_s=1, detect_s=1, save_stall_s=0, save_write_s=0)

    cheap = rank(0.001, costs, gpus=8, global_batch=56)
    dear = rank(6, costs, gpus=8, global_batch=56)

    assert cheap.best is not None
    assert dear.best is not None
    assert cheap.best.spare_vms == 0
    assert dear.best.spare_vms > 0
    assert "keep" in dear.spare_reason
    assert "warm" in dear.spare_reason
    assert f"{dear.best.expected_examples_per_s:.4g} examples/s are expected" in dear.spare_reason
    assert "less expected than from" in dear.ranked[1].reason


def test_vms_that_no_plan_needs_are_said_to_be_left_over() -> None:
    choice = rank(1, StopCosts(), gpus=8, sections=1, global_batch=6)

    assert choice.best is not None
    assert choice.best.vms == 6
    assert choice.spare_reason.startswith("use 6 of 8 VMs: 2 are left over and stay warm")


def test_on_vms_of_several_gpus_the_vms_are_counted() -> None:
    choice = rank_by_liveput(
        make_profile(8),
        gpus=10,
        gpus_per_vm=4,
        global_batch=64,
        device_memory_bytes=None,
        market=SpotMarket(hazard=Hazard(removals_per_vm_hour=0.5)),
    )

    for one in choice.ranked:
        assert one.vms == math.ceil(one.plan.p * one.plan.d / 4)
        assert one.vms + one.spare_vms == 3
        assert one.stops_per_hour == pytest.approx(0.5 * one.vms)


def test_a_fleet_that_no_plan_fits_has_no_ranking() -> None:
    choice = rank_by_liveput(
        make_profile(2),
        gpus=1,
        global_batch=4,
        device_memory_bytes=6000,
        market=SpotMarket(hazard=Hazard(removals_per_vm_hour=1)),
    )

    assert choice.best is None
    assert "needs at least" in choice.spare_reason


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Hazard(removals_per_vm_hour=-1), "removals_per_vm_hour is -1"),
        (lambda: Hazard(removals_per_vm_hour=1, removal_sizes=(0.5,)), "which add up to 1"),
        (lambda: StopCosts(morph_s=math.nan), "morph_s is nan"),
        (lambda: StopCosts(notice_probability=2), "notice_probability is 2"),
        (lambda: best_checkpoints(1, 0, StopCosts()), "minibatch_s is 0"),
    ],
)
def test_wrong_values_are_named(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
