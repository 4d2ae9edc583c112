"""Whether another shape is worth a morph: growth, slow VMs, storms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decision_views import (
    NOW,
    RULES,
    at_door,
    decide,
    decide_when_prepared,
    devices,
    generation,
    job,
    kinds,
    plan_for,
    proposal,
    stopping,
    vm,
    worker,
)
from varuna_manager.domain.actions import (
    Decision,
    LiftQuarantine,
    QuarantineVms,
    RequeueJob,
    StartGeneration,
    StopGeneration,
)
from varuna_manager.domain.better_shape import predict_morph
from varuna_manager.domain.devices import choose_devices, keep_waiting_share, list_waiting_devices
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.job_decision import decide_job, wants_plan
from varuna_manager.domain.limits import JobLimitsView
from varuna_manager.domain.morphs import MorphEstimate, PastShape, estimate_fleet_morphs, estimate_morphs
from varuna_manager.domain.newcomers import WantedNewcomers
from varuna_manager.domain.observed import GenerationView, Holder, Holders, Proposal, VmView
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationState,
    JobState,
    StopMode,
    VmState,
)
from varuna_planner.liveput.morph_cost import PRIOR_FIXED_S, MorphKind, MovingTime, StateMoves
from varuna_planner.schedule.batching import count_micro_batches
from varuna_proto.plan import Device, Plan


@pytest.mark.parametrize("cause", [EndCause.GROWTH, EndCause.SLOW_VM, EndCause.VM_LOST])
def test_processes_that_wait_for_another_shape_keep_their_devices(cause: EndCause) -> None:
    """From when they have left, until that has begun or they are not counted on any longer."""
    held = worker(0, "a", ExitCause.GENERATION_ENDED, held_step=5)
    leaving = stopping(StopMode.HOLD_FIRST, cause, held, worker(1, "b"))
    ended = replace(leaving, state=GenerationState.ENDED, stop=None, end_cause=cause, ended_at=NOW - 1)
    expected = frozenset(devices("a")) if cause is not EndCause.VM_LOST else frozenset()
    assert list_waiting_devices(NOW, job(leaving), RULES) == list_waiting_devices(NOW, job(ended), RULES) == expected
    late = replace(ended, ended_at=NOW - RULES.survivors_kept_s - 1)
    assert not list_waiting_devices(NOW, job(late), RULES)
    assert not list_waiting_devices(NOW, job(ended, state=JobState.QUEUED), RULES)
    assert not list_waiting_devices(NOW, job(generation(worker(0, "a"))), RULES)


def test_processes_that_give_their_state_keep_their_devices_until_they_have_given_it() -> None:
    givers = (
        Holder(rank=0, stage=0, vm_id="x", held_at=NOW, local_rank=1),
        Holder(rank=1, stage=1, vm_id="y", held_at=NOW),
    )
    begins = generation(worker(0, "a"), holders=Holders(generation=1, members=givers), state=GenerationState.LAUNCHING)
    assert list_waiting_devices(NOW, job(begins), RULES) == {Device("x", 1)}, "an earlier manager stored no device of y"
    assert not list_waiting_devices(NOW, job(replace(begins, state=GenerationState.RUNNING)), RULES)


@pytest.mark.parametrize(("names", "more"), [("ab", ""), ("abc", "; its GPUs are 3 by now: 1×1 to 1×3")])
def test_a_shape_for_more_gpus_than_its_morph_was_for_says_so(names: str, more: str) -> None:
    grown = "growth: 2 GPUs instead of 1, 1×1 to 1×2, 8 to 16 examples/s predicted"
    ended = generation(
        worker(0, "a", ExitCause.GENERATION_ENDED),
        state=GenerationState.ENDED,
        end_cause=EndCause.GROWTH,
        end_reason=grown,
    )
    view = job(ended, devices=devices(*names), proposal=proposal(devices(*names)))
    (start,) = decide(view, *map(vm, names)).actions
    assert isinstance(start, StartGeneration)
    assert start.reason == grown + more


def test_a_vm_that_comes_between_a_stop_and_the_start_does_not_delay_the_start() -> None:
    """Its process would start in the pause. The job grows into it later, with one that is started ahead."""
    held = [worker(rank, name, ExitCause.GENERATION_ENDED, held_step=5) for rank, name in enumerate("ab")]
    ended = generation(*held, state=GenerationState.ENDED, end_cause=EndCause.GROWTH, ended_at=NOW - 1)
    view = job(ended, devices=devices("a", "b", "c", "d"))
    vms = {name: vm(name) for name in "abcd"}

    def choose(**changes: object) -> tuple[Device, ...]:
        return choose_devices(NOW, replace(view, **changes), vms, RULES)

    assert choose() == devices("a", "b")
    late = worker(1, "b")
    assert choose(generation=replace(ended, workers=(held[0], late))) == devices("a", "b"), "it is about to say so"
    wanted = WantedNewcomers(
        number=3, plan=plan_for(3), placement=devices("a", "b", "c"), devices=frozenset(devices("c"))
    )
    there = at_door(wanted, at_door=wanted.devices)
    assert choose(newcomers=there) == devices("a", "b", "c")
    everything = devices("a", "b", "c", "d")
    assert choose(newcomers=replace(there, at_door=frozenset())) == everything, "it stopped without them"
    assert choose(newcomers_obstacle="KeyError: 'x'") == everything
    assert choose(starts_ahead=False) == everything
    assert choose(has_fixed_stages=True) == everything
    assert choose(generation=replace(ended, end_cause=EndCause.VM_LOST)) == everything
    assert choose(min_gpus=3) == everything
    assert choose(generation=replace(ended, ended_at=NOW - RULES.survivors_wait_s - 1)) == everything
    cut, unable = replace(plan_for(2), p=2, d=1), replace(held[1], held_step=None)
    assert choose(generation=replace(ended, plan=cut, workers=(held[0], unable))) == everything


def test_growth_needs_settled_devices_and_a_gain() -> None:
    here = devices("a", "b")
    young = vm("b", ready_for_s=0.5)
    view = job(generation(worker(0, "a")), devices=here)
    vms = {"a": vm("a"), "b": young}
    assert choose_devices(NOW, view, vms, RULES) == devices("a")
    vms["b"] = vm("b")
    assert choose_devices(NOW, view, vms, RULES) == here
    assert wants_plan(view, here, vms)
    (stop,) = decide_when_prepared(replace(view, proposal=proposal(here)), *vms.values()).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.HOLD_FIRST, EndCause.GROWTH)
    small = decide_when_prepared(replace(view, proposal=proposal(here, rate=8.0 * 1.04)), *vms.values())
    assert not small.actions
    assert "less than 1.05 times as much" in small.reason


def test_a_generation_makes_a_step_before_it_grows() -> None:
    here = devices("a", "b")
    view = job(generation(worker(0, "a"), last_step=None), devices=here, proposal=proposal(here))
    assert not decide(view, vm("a"), vm("b")).actions


def losses(per_vm_hour: float) -> FleetPast:
    """A fleet that loses so many VMs an hour, by a long past."""
    return FleetPast(removals=per_vm_hour * 1e6, vm_hours=1e6)


def test_growth_must_earn_what_a_morph_costs() -> None:
    here = devices("a", "b")
    grown = proposal(here, 8.0 * 1.2)
    cheap = job(
        generation(worker(0, "a")),
        devices=here,
        proposal=grown,
        morphs=MorphEstimate(in_place_s=10.0),
        fleet=losses(7.0),  # a loss each 257 s on two VMs, which counts as 240 s
    )
    (stop,) = decide_when_prepared(cheap, vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert "a morph costs 10.0 s; over 240 s 1×2 gives 2,208 examples, 1×1 1,920" in stop.reason
    dear = replace(
        cheap, morphs=MorphEstimate(in_place_s=30.0), proposal=replace(grown, moves=StateMoves(0.0, MovingTime(30.0)))
    )
    decision = decide_when_prepared(dear, vm("a"), vm("b"))
    assert not decision.actions
    assert (
        "less than 1.33 times as much (a morph costs 60.0 s: 30.0 s to start and meet, 30.0 s for the state, and the "
        "shape should last 240 s)" in decision.reason
    )
    hopeless = replace(cheap, morphs=MorphEstimate(in_place_s=240.0), proposal=proposal(here, 8.0 * 100))
    assert not decide(hopeless, vm("a"), vm("b")).actions


@pytest.mark.parametrize("obstacle", ["nothing is started ahead", "newcomers fail", "stages are fixed"])
def test_growth_by_new_processes_must_earn_what_these_cost(obstacle: str) -> None:
    here = devices("a", "b")
    view = job(
        generation(worker(0, "a")),
        devices=here,
        proposal=replace(proposal(here, 8.0 * 1.2), moves=StateMoves(30.0, MovingTime(5.0))),
        morphs=MorphEstimate(cost_s=30.0, in_place_s=5.0),
        fleet=losses(7.0),
        starts_ahead=obstacle != "nothing is started ahead",
        newcomers_obstacle="they fail" if obstacle == "newcomers fail" else "",
        has_fixed_stages=obstacle == "stages are fixed",
    )
    decision = decide(view, vm("a"), vm("b"))
    assert not decision.actions
    assert "a morph costs 60.0 s: 30.0 s to start and meet, 30.0 s for the state" in decision.reason


@pytest.mark.parametrize(
    ("keepers", "stages", "pause_s"),
    [
        ((), ((0, 3), (0, 2, 4)), 4.0),
        ((), ((0, 3), (0, 3)), 12.0),  # those who are there train on at once
        ((1, 0), ((0, 3), (0, 2, 4)), 12.0),  # one replica begins at once to copy its stages
    ],
    ids=["other stages", "the same stages", "copies"],
)
def test_growth_in_place_waits_for_what_passes_read(
    keepers: tuple[int, ...], stages: tuple[tuple[int, ...], tuple[int, ...]], pause_s: float
) -> None:
    """The state moves in 12 s, 8 of them for what only the update reads, and a step takes longer."""
    here = devices("a", "b", "c")
    before, after = (
        replace(plan_for(1, rate), p=len(starts), predicted_minibatch_s=20.0, stage_starts=starts)
        for starts, rate in zip(stages, (0.2, 0.4), strict=True)
    )
    running = replace(generation(worker(0, "a"), worker(1, "b"), plan=before), keepers=keepers)
    moves = StateMoves(40.0, MovingTime(12.0, 8.0))
    view = job(running, devices=here, proposal=Proposal(plan=after, placement=here[: after.p], moves=moves))
    cost = predict_morph(view)
    assert (cost.kind, cost.fixed_s) == (MorphKind.IN_PLACE, PRIOR_FIXED_S[MorphKind.IN_PLACE])
    assert cost.moving_s == pytest.approx(pause_s)


def test_a_generation_in_place_finishes_its_step_and_grows() -> None:
    """It has fewer devices than there are. Its first step is what survivors have left of the last one."""
    here = devices("a", "b", "c")
    first = generation(worker(0, "a"), last_step=None, in_place=True)
    vms = [vm(name) for name in "abc"]
    (stop,) = decide_when_prepared(job(first, devices=here, proposal=proposal(here)), *vms).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.HOLD_FIRST, EndCause.GROWTH)
    elsewhere = replace(proposal(here), placement=devices("b", "c"))
    assert not decide(job(first, devices=here, proposal=elsewhere), *vms).actions, "it would have to save"


def test_what_a_morph_costs_is_learnt_from_the_recent_ones() -> None:
    assert estimate_morphs([]) == MorphEstimate()
    one = PastShape(morph_s=4.0)
    assert estimate_morphs([one]) == MorphEstimate(cost_s=4.0, measured=True)
    assert estimate_morphs([PastShape(morph_s=4.0, moving_s=3.0)]).cost_s == 1.0, "moving the state counts apart"
    shapes = [*[one] * 3, PastShape(morph_s=None), one, PastShape(morph_s=100.0), PastShape(morph_s=100.0)]
    assert estimate_morphs(shapes) == MorphEstimate(cost_s=4.0, measured=True)


def test_what_generations_in_place_cost_says_nothing_of_restarts() -> None:
    cheap = PastShape(morph_s=0.3, in_place=True)
    dear = PastShape(morph_s=8.0)
    found = estimate_morphs([*[cheap] * 6, dear])
    assert (found.cost_s, found.in_place_s, found.measured) == (8.0, 0.3, True)
    assert not estimate_morphs([cheap] * 6).measured


def test_a_job_without_morphs_of_its_own_learns_from_the_fleet() -> None:
    old = [PastShape(ended_at=100.0 + number, morph_s=9.0, save_s=50.0) for number in range(20)]
    new = [PastShape(ended_at=500.0 + number, morph_s=3.0) for number in range(11)]
    fleet = estimate_fleet_morphs([*old, *new, PastShape(ended_at=1.0, morph_s=0.5, in_place=True)])
    assert fleet == MorphEstimate(cost_s=3.0, in_place_s=0.5, measured=True), "saves are its own"
    assert estimate_morphs([], fleet) == fleet
    assert estimate_morphs([PastShape(morph_s=7.0)], fleet).cost_s == 7.0
    assert estimate_fleet_morphs([]) == MorphEstimate()


# ---------------------------------------------------------------- slow VMs


def slow_vm(name: str, ratio: float = 2.0, **changes: object) -> VmView:
    return vm(name, slow_ratio=ratio, slow_reason=f"rank 1 takes {ratio:.2f} times as long as its peers", **changes)


def with_slow(rate_without: float, slow: VmView, **changes: object) -> Decision:
    """Three VMs at 24 examples/s, with a slow one. `rate_without`: without it. `changes`: of the generation."""
    here = devices("a", slow.id, "c")
    view = job(replace(generation(worker(0, "a"), worker(1, slow.id), worker(2, "c")), **changes), devices=here)
    vms = {"a": vm("a"), slow.id: slow, "c": vm("c")}
    without = choose_devices(NOW, view, vms, RULES)
    assert without == devices("a", "c")
    assert wants_plan(view, without, vms)
    return decide_when_prepared(replace(view, proposal=proposal(without, rate_without)), *vms.values())


def test_a_slow_vm_is_left_when_the_others_are_faster_without() -> None:
    quarantine, stop = with_slow(16.0, slow_vm("b")).actions  # 24 at half the pace is 12
    assert quarantine == QuarantineVms(
        vm_ids=("b",), until=NOW + 600, reason="VM b: rank 1 takes 2.00 times as long as its peers"
    )
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.HOLD_FIRST, EndCause.SLOW_VM), "the others hold the state"
    assert "1×3 to 1×2, 12.0 to 16.0 examples/s" in stop.reason


def test_a_slow_vm_that_alone_has_a_stage_saves_it() -> None:
    plan = Plan(p=3, d=1, micro_batch=1, global_batch=24, predicted_minibatch_s=1.0, examples_per_s=24.0)
    _, stop = with_slow(16.0, slow_vm("b"), plan=plan).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.SAVE_FIRST


def test_a_slow_vm_is_kept_when_it_is_still_worth_having() -> None:
    decision = with_slow(16.0, slow_vm("b", 1.3))
    assert not decision.actions
    assert "VM b: rank 1 takes 1.30 times" in decision.reason
    assert "1×2 without the slow VMs would give 16.0 examples/s instead of 18.5" in decision.reason
    same = with_slow(18.46, slow_vm("b", 1.3))
    assert "1×2 without the slow VMs would give 18.5 examples/s, as many as now" in same.reason


def test_every_quarantine_of_a_vm_is_twice_as_long() -> None:
    quarantine, _ = with_slow(16.0, slow_vm("b", quarantines=2)).actions
    assert isinstance(quarantine, QuarantineVms)
    assert quarantine.until == NOW + 2400


def test_a_slow_vm_that_is_all_there_is_is_kept() -> None:
    view = job(generation(worker(0, "b")), devices=devices("b"))
    vms = {"b": slow_vm("b")}
    assert not wants_plan(view, choose_devices(NOW, view, vms, RULES), vms)
    decision = decide_job(NOW, view, vms, RULES)
    assert not decision.actions
    assert "no plan fits the other VMs" in decision.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"min_gpus": 2, "devices": devices("a")},
        {"devices": devices("a"), "proposal": Proposal(plan=None, reason="no memory")},
    ],
)
def test_a_quarantine_is_lifted_when_the_vm_is_needed(changes: dict[str, object]) -> None:
    over = generation(worker(0, "a", ExitCause.PEER_LOST), state=GenerationState.ENDED)
    view = job(over, quarantined=devices("b"), **changes)
    (lift,) = decide(view, vm("a"), vm("b", quarantined=True)).actions
    assert isinstance(lift, LiftQuarantine)
    assert lift.vm_ids == ("b",)


# ---------------------------------------------------------------- storms, and VMs on their way


def storm(*losses_ago_s: float) -> FleetPast:
    at = sorted(NOW - ago for ago in losses_ago_s)
    return FleetPast(losses_at=tuple(at), stable_since=at[-1] if at else 0.0)


def test_a_job_that_runs_does_not_grow_in_a_storm_and_says_why() -> None:
    here = devices("a", "b")
    view = job(generation(worker(0, "a")), devices=here, proposal=proposal(here))
    assert kinds(decide_when_prepared(replace(view, fleet=storm(1, 2, 3)), vm("a"), vm("b"))) == [StopGeneration]
    stormy = replace(view, fleet=storm(1, 2, 3, 4))
    decision = decide_when_prepared(stormy, vm("a"), vm("b"))
    assert not decision.actions
    assert decision.reason.endswith(
        "4 VMs were lost within 60 s: shapes stay as they are until 15 s pass without a loss"
    )
    assert kinds(decide_when_prepared(stormy, vm("a"), vm("b"), now=NOW + 14)) == [StopGeneration], "quiet"


def test_a_storm_without_end_is_not_waited_for_without_end() -> None:
    here = devices("a", "b")
    view = job(generation(worker(0, "a")), devices=here, proposal=proposal(here))
    endless = replace(view, fleet=storm(*range(0, 300, 10)))
    assert kinds(decide_when_prepared(endless, vm("a"), vm("b"))) == [StopGeneration]


def test_a_job_that_does_not_run_starts_in_any_storm() -> None:
    here = devices("a")
    over = generation(worker(0, "b", ExitCause.VM_GONE), state=GenerationState.ENDED, end_reason="VM b is gone")
    view = job(over, devices=here, proposal=proposal(here), fleet=storm(1, 2, 3, 4, 5))
    assert kinds(decide(view, vm("a"))) == [StartGeneration]


def coming(due_in_s: float, join_s: float = 20.0) -> FleetPast:
    return FleetPast(join_s=join_s, coming_ages_s=(join_s - due_in_s,))


def test_a_vm_that_is_almost_there_is_waited_for_when_that_is_cheaper_than_another_morph() -> None:
    here = devices("a", "b", "c")
    over = generation(worker(0, "d", ExitCause.VM_GONE), state=GenerationState.ENDED, end_reason="VM d is gone")
    known = MorphEstimate(cost_s=8.0, measured=True)
    view = job(over, devices=here, proposal=proposal(here), morphs=known, fleet=coming(due_in_s=5.0))
    vms = [vm(name) for name in "abc"]
    decision = decide(view, *vms)
    assert not decision.actions
    assert "new ones take 20.0 s" in decision.reason
    assert "another morph (8.0 s)" in decision.reason
    for other in (
        replace(view, fleet=coming(due_in_s=9.0)),
        replace(view, fleet=coming(due_in_s=-1.0)),
        replace(view, fleet=FleetPast(coming_ages_s=(1.0,))),
        replace(view, morphs=replace(known, measured=False)),
        replace(view, max_gpus=3),
    ):
        assert kinds(decide(other, *vms)) == [StartGeneration]


def test_a_fleet_that_has_been_stable_for_long_is_worth_a_dear_morph() -> None:
    here = devices("a", "b")
    dear = MorphEstimate(in_place_s=200.0)
    busy = losses(3.0)
    view = job(generation(worker(0, "a")), devices=here, proposal=proposal(here, 8.0 * 1.2), morphs=dear, fleet=busy)
    assert not decide(view, vm("a"), vm("b")).actions
    calm = replace(view, fleet=replace(busy, stable_since=NOW - 2000))
    assert kinds(decide_when_prepared(calm, vm("a"), vm("b"))) == [StopGeneration]
    small = replace(calm, proposal=proposal(here, 8.0 * 1.06))
    decision = decide(small, vm("a"), vm("b"))
    assert "less than 1.12 times as much (a morph costs 200.0 s, and the shape should last 1920 s)" in decision.reason
    later = decide(small, vm("a"), vm("b"), now=NOW + 1)
    assert later.reason == decision.reason, "it is no new event with every look"


# ---------------------------------------------------------------- shares


def taking_state(state: GenerationState = GenerationState.LAUNCHING) -> GenerationView:
    """Two replicas of one stage that take the state from a process on VM b; the generation before has saved nothing."""
    giver = Holder(rank=0, stage=0, vm_id="b", held_at=NOW)
    holders = Holders(generation=1, members=(giver,))
    return generation(worker(0, "a"), worker(1, "b"), state=state, last_step=None, holders=holders)


@pytest.mark.parametrize(("share", "cause"), [(0, EndCause.PREEMPTED), (1, EndCause.SHRUNK)])
def test_a_state_that_is_in_memories_only_is_saved_before_gpus_are_given_up(share: int, cause: EndCause) -> None:
    taken = taking_state(GenerationState.RUNNING)
    (stop,) = decide(job(taken, share=share, share_reason="others need them"), vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, cause)
    cancelled = job(taken, state=JobState.CANCELLING, cancel_saves=True)
    (stop,) = decide(cancelled, vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, EndCause.CANCELLED)
    (stop,) = decide(job(replace(taken, holders=None), share=share), vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.LEAVE_NOW, "there is nothing to save"


@pytest.mark.parametrize(
    "begins",
    [taking_state(), replace(taking_state(), holders=None, in_place=True)],
    ids=["from the memories of others", "in place"],
)
def test_a_generation_takes_its_state_before_it_is_stopped_with_a_save(begins: GenerationView) -> None:
    """Its workers may not even have been told to start."""
    reached = JobLimitsView(max_duration_s=1.0, run_since=NOW - 9)
    for view in (
        job(begins, share=0),
        job(begins, share=1),
        job(begins, state=JobState.CANCELLING, cancel_saves=True),
        job(begins, limits=reached),
    ):
        assert not decide(view, vm("a"), vm("b")).actions
    assert kinds(decide(job(begins, state=JobState.CANCELLING), vm("a"), vm("b"))) == [StopGeneration]
    silent = vm("a", state=VmState.LOST)
    assert kinds(decide(job(begins, state=JobState.CANCELLING, cancel_saves=True), silent, vm("b"))) == [StopGeneration]


@pytest.mark.parametrize("state", [GenerationState.LAUNCHING, GenerationState.RUNNING])
def test_before_its_first_step_a_generation_leaves_a_vm_that_goes_at_once(state: GenerationState) -> None:
    """The next one takes the state from where this one was to take it."""
    view, a = job(taking_state(state)), vm("a", state=VmState.DRAINING, reason="drained", drain_deadline=NOW + 600)
    (stop,) = decide(view, a, vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.LEAVE_NOW


@pytest.mark.parametrize("share", [0, 1])
def test_a_shape_that_was_left_without_a_save_begins_before_its_gpus_are_given_up(share: int) -> None:
    held = [worker(rank, name, ExitCause.GENERATION_ENDED, held_step=5) for rank, name in enumerate("ab")]
    ended = generation(
        *held, state=GenerationState.ENDED, end_cause=EndCause.GROWTH, end_reason="growth", ended_at=NOW - 1
    )
    here = devices("a", "b")
    waiting = job(ended, devices=here, proposal=proposal(here), share=share, share_reason="others need them")
    kept = keep_waiting_share(NOW, waiting, RULES)
    assert choose_devices(NOW, kept, {"a": vm("a"), "b": vm("b")}, RULES) == here
    assert kinds(decide(kept, vm("a"), vm("b"))) == [StartGeneration]


def test_a_share_counts_at_once_where_no_state_waits_that_the_job_could_take() -> None:
    held = worker(0, "a", ExitCause.GENERATION_ENDED, held_step=5)
    ended = generation(held, state=GenerationState.ENDED, end_cause=EndCause.GROWTH, ended_at=NOW - 1)
    waiting = job(ended, devices=devices("a"), share=0)
    assert keep_waiting_share(NOW, waiting, RULES).share == 1
    late = replace(ended, ended_at=NOW - RULES.survivors_kept_s - 1)
    for other in (
        replace(waiting, generation=late),
        replace(waiting, devices=devices("b")),
        replace(waiting, min_gpus=2),
        replace(waiting, share=None),
        replace(waiting, share=5),
        job(stopping(StopMode.HOLD_FIRST, EndCause.GROWTH, held, worker(1, "b")), devices=devices("a"), share=0),
    ):
        assert keep_waiting_share(NOW, other, RULES) is other


def test_a_job_with_more_than_its_share_saves_and_shrinks_or_goes_back_to_the_queue() -> None:
    view = job(generation(worker(0, "a"), worker(1, "b")), share=1, share_reason="others need them")
    (stop,) = decide(view, vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, EndCause.SHRUNK)
    assert stop.reason == "1 GPU instead of 2: others need them"
    (stop,) = decide(replace(view, share=0), vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause, stop.reason) == (
        StopMode.SAVE_FIRST,
        EndCause.PREEMPTED,
        "preempted: others need them",
    )
    over = generation(worker(0, "a", ExitCause.GENERATION_ENDED), state=GenerationState.ENDED)
    (requeue,) = decide(job(over, share=0, share_reason="others need them", devices=devices("a")), vm("a")).actions
    assert requeue == RequeueJob(reason="others need them")
    queued = job(over, share=0, share_reason="others need them", state=JobState.QUEUED, quarantined=devices("b"))
    decision = decide(queued, vm("a"), vm("b", quarantined=True))
    assert (decision.actions, decision.reason) == ((), "others need them")


def test_a_job_takes_no_more_than_its_share_and_waits_for_what_others_give_up() -> None:
    here = devices("a", "b", "c")
    view = job(devices=here, share=2)
    assert choose_devices(NOW, view, {}, RULES) == devices("a", "b")
    short = job(devices=devices("a"), share=2, share_due=True, proposal=proposal(devices("a")))
    decision = decide(short, vm("a"))
    assert not decision.actions
    assert decision.reason == "1 of its 2 GPUs is free: waiting for other jobs to release the rest"
    assert kinds(decide(replace(short, share_due=False), vm("a"))) == [StartGeneration]


# ---------------------------------------------------------------- VMs that leave


def test_the_first_deadline_is_that_of_all_and_a_notice_too_short_to_save_in_is_left_at_once() -> None:
    plan = replace(plan_for(2), predicted_minibatch_s=6.0)
    running = generation(worker(0, "a"), worker(1, "b"), plan=plan, progress_at=NOW - 2)
    view = job(running, morphs=MorphEstimate(save_s=3.0))

    def stop_of(a_left_s: float | None, b_left_s: float) -> StopGeneration:
        deadline = None if a_left_s is None else NOW + a_left_s
        a = vm("a", state=VmState.DRAINING, reason="notice", notice_deadline=deadline)
        b = vm("b", state=VmState.DRAINING, reason="drained", drain_deadline=NOW + b_left_s)
        (stop,) = decide(view, a, b).actions
        assert isinstance(stop, StopGeneration)
        assert stop.cause is EndCause.NOTICE
        return stop

    assert stop_of(30.0, 20.0).mode is StopMode.SAVE_FIRST
    assert stop_of(None, 6.0).mode is StopMode.SAVE_FIRST, "4 s of the step, the save and the margin"
    late = stop_of(30.0, 4.0)
    assert late.mode is StopMode.LEAVE_NOW
    assert late.reason == (
        "VM b is leaving: drained; VM a is leaving: notice; too soon to save: 3.0 s are left, but the rest of the step "
        "(4.0 s) and a save take 4.2 s, so the steps since the last checkpoint are done again"
    )
    slow_save = replace(
        view, generation=replace(running, plan=replace(plan, p=2, d=1)), morphs=MorphEstimate(save_s=25)
    )
    (stop,) = decide(slow_save, vm("a", state=VmState.DRAINING, notice_deadline=NOW + 12), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.LEAVE_NOW


@pytest.mark.parametrize(
    ("left_s", "changes", "mode"),
    [
        (6.0, {}, StopMode.HOLD_FIRST),  # 4 s of the step and the margin; a save would take 25
        (4.9, {}, StopMode.LEAVE_NOW),
        (60.0, {"min_gpus": 2}, StopMode.SAVE_FIRST),
    ],
)
def test_a_job_that_can_go_on_in_place_without_the_vm_that_leaves_does_not_save(
    left_s: float, changes: dict[str, object], mode: StopMode
) -> None:
    plan = replace(plan_for(2), predicted_minibatch_s=6.0)
    running = generation(worker(0, "a"), worker(1, "b"), plan=plan, progress_at=NOW - 2)
    view = job(running, morphs=MorphEstimate(save_s=25.0), **changes)
    leaving = vm("a", state=VmState.DRAINING, reason="notice", notice_deadline=NOW + left_s)
    (stop,) = decide(view, leaving, vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is mode
    if mode is StopMode.LEAVE_NOW:
        assert stop.reason == (
            "VM a is leaving: notice; too soon to finish the step: 3.9 s are left, but it takes another 4.0 s"
        )


def test_a_notice_in_what_was_left_of_a_step_leaves_time_to_finish_it() -> None:
    """Of a step of 6 s half was run before the job went on in place, 2 s ago."""
    plan = replace(plan_for(2), predicted_minibatch_s=6.0)
    half = count_micro_batches(plan.global_batch, plan.micro_batch) // 2
    running = generation(worker(0, "a"), worker(1, "b"), plan=plan, in_place=True, last_step=None, progress_at=NOW - 2)
    leaving = vm("a", state=VmState.DRAINING, reason="notice", notice_deadline=NOW + 2.5)
    for left, mode in [(half, StopMode.HOLD_FIRST), (None, StopMode.LEAVE_NOW)]:
        (stop,) = decide(job(replace(running, micro_batches_left=left)), leaving, vm("b")).actions
        assert isinstance(stop, StopGeneration)
        assert stop.mode is mode


@pytest.mark.parametrize(("p", "mode"), [(1, StopMode.HOLD_FIRST), (2, StopMode.SAVE_FIRST)])
def test_a_second_notice_finds_a_state_that_was_not_saved_after_the_first(p: int, mode: StopMode) -> None:
    """The generation goes on in place, and has not completed a step yet."""
    plan = replace(plan_for(2), p=p, d=2 // p)
    running = generation(worker(0, "a"), worker(1, "b"), plan=plan, in_place=True, last_step=None)
    leaving = vm("a", state=VmState.DRAINING, reason="notice", notice_deadline=NOW + 30)
    (stop,) = decide(job(running), leaving, vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is mode


@pytest.mark.parametrize(
    ("left_s", "changes", "mode"),
    [
        (30.0, {}, StopMode.HOLD_WITHIN_STEP),
        (12.0, {}, StopMode.LEAVE_NOW),
        (30.0, {"min_gpus": 2}, StopMode.LEAVE_NOW),
        (30.0, {"has_fixed_stages": True}, StopMode.LEAVE_NOW),
        (120.0, {}, StopMode.SAVE_FIRST),
    ],
)
def test_a_vm_that_alone_has_a_stage_leaves_it_to_others_if_it_is_too_soon_to_save(
    left_s: float, changes: dict[str, object], mode: StopMode
) -> None:
    plan = replace(plan_for(2), p=2, d=1, predicted_minibatch_s=100.0)
    running = generation(worker(0, "a"), worker(1, "b"), plan=plan, progress_at=NOW - 2)
    leaving = vm("a", state=VmState.DRAINING, reason="notice", notice_deadline=NOW + left_s)
    (stop,) = decide(job(running, **changes), leaving, vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is mode
    assert stop.reason.endswith("others get what only its VMs have") is (mode is StopMode.HOLD_WITHIN_STEP)


@pytest.mark.parametrize(
    ("left_s", "step_s", "changes", "mode"),
    [
        (42.0, 6.0, {}, None),  # 4 s of this step, 7.5 s of a longer one than most, and 30 s
        (41.0, 6.0, {}, StopMode.HOLD_FIRST),
        (120.0, 6.0, {"min_gpus": 2}, StopMode.SAVE_FIRST),
        (60.0, 100.0, {}, None),
        (30.0, 100.0, {}, StopMode.HOLD_WITHIN_STEP),
        (17.0, 100.0, {}, StopMode.HOLD_WITHIN_STEP),
        (15.0, 100.0, {}, StopMode.LEAVE_NOW),
        (30.0, 100.0, {"may_leave_steps": False}, StopMode.LEAVE_NOW),
        (120.0, 100.0, {}, StopMode.HOLD_FIRST),
    ],
)
def test_a_job_trains_on_while_a_vm_with_a_long_notice_is_there(
    left_s: float, step_s: float, changes: dict[str, object], mode: StopMode | None
) -> None:
    plan = replace(plan_for(2), predicted_minibatch_s=step_s)
    running = generation(worker(0, "a"), worker(1, "b"), plan=plan, progress_at=NOW - 2)
    leaving = vm("a", state=VmState.DRAINING, reason="notice", notice_deadline=NOW + left_s)
    decision = decide(job(running, **changes), leaving, vm("b"))
    if mode is None:
        assert decision.actions == ()
        assert decision.claims == running.devices
        assert decision.reason == ("generation 2 is under way; VM a has notice, but there is time to train on")
        drained = replace(leaving, cordoned=True)
        assert decide(job(running), drained, vm("b")).actions, "it is wanted elsewhere"
        return
    (stop,) = decision.actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is mode


@pytest.mark.parametrize(
    "other",
    [
        vm("b", cordoned=True),
        vm("b", connected=False),
        vm("b", quarantined=True),
        vm("b", state=VmState.DRAINING, drain_deadline=NOW + 90),
    ],
)
def test_a_vm_that_is_in_doubt_is_not_counted_on_when_another_leaves(other: VmView) -> None:
    running = generation(worker(0, "a"), worker(1, "b"), plan=plan_for(2))
    leaving = vm("a", state=VmState.DRAINING, reason="notice", notice_deadline=NOW + 60)
    (stop,) = decide(job(running), leaving, other).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.SAVE_FIRST
