"""The manager's pure decisions: tables, one job's life, the fleet, commands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from varuna_manager.domain import states
from varuna_manager.domain.accounting import seconds_without_progress, steps_redone
from varuna_manager.domain.commands import DrainKey, LaunchKey, Presence, StopKey, wanted_commands
from varuna_manager.domain.fleet_decision import FleetView, backoff_s, decide_fleet, decide_vm
from varuna_manager.domain.job_decision import decide_job, next_devices, wants_plan
from varuna_manager.domain.morphs import Morphs, PastShape, look_back
from varuna_manager.domain.observed import (
    Decision,
    Device,
    EndGeneration,
    FinishJob,
    GenerationView,
    JobView,
    LiftQuarantine,
    Plan,
    Proposal,
    Quarantine,
    Rules,
    StartGeneration,
    StopGeneration,
    StopView,
    VmView,
    WorkerView,
)
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    IllegalTransitionError,
    JobState,
    StopMode,
    VmState,
    WorkerState,
)

NOW = 1000.0
RULES = Rules()


def vm(name: str, **changes: object) -> VmView:
    return replace(VmView(id=name, state=VmState.READY, ready_for_s=60.0, listed=True), **changes)


def plan_for(gpus: int, rate: float | None = None) -> Plan:
    return Plan(
        p=1, d=gpus, micro_batch=1, global_batch=8, predicted_minibatch_s=1.0, examples_per_s=rate or 8.0 * gpus
    )


def proposal(devices: tuple[Device, ...], rate: float | None = None) -> Proposal:
    return Proposal(plan=plan_for(len(devices), rate), placement=devices)


def devices(*names: str) -> tuple[Device, ...]:
    return tuple(Device(name, 0) for name in names)


def worker(rank: int, vm_id: str, cause: ExitCause | None = None, **changes: object) -> WorkerView:
    state = WorkerState.RUNNING if cause is None else WorkerState.EXITED
    if cause is ExitCause.VM_GONE:
        state = WorkerState.LOST
    stopped_at = None if cause is None else NOW - 10
    view = WorkerView(rank=rank, device=Device(vm_id, 0), state=state, cause=cause, stopped_at=stopped_at)
    return replace(view, **changes)


def generation(*workers: WorkerView, **changes: object) -> GenerationView:
    view = GenerationView(
        number=2,
        kind=GenerationKind.TRAINING,
        state=GenerationState.RUNNING,
        workers=workers,
        progress_at=NOW - 1,
        plan=plan_for(len(workers)),
        last_step=5,
    )
    return replace(view, **changes)


def stopping(mode: StopMode, cause: EndCause, *workers: WorkerView) -> GenerationView:
    stop = StopView(mode=mode, cause=cause, reason="because", requested_at=NOW - 1)
    return generation(*workers, state=GenerationState.STOPPING, stop=stop)


def job(current: GenerationView | None = None, **changes: object) -> JobView:
    state = JobState.QUEUED if current is None else JobState.RUNNING
    view = JobView(id="j", name="n", state=state, created_at=0.0, global_batch=8, profiled_at=500.0, generation=current)
    return replace(view, **changes)


def decide(view: JobView, *vms: VmView, now: float = NOW) -> Decision:
    return decide_job(now, view, {one.id: one for one in vms}, RULES)


def kinds(decision: Decision) -> list[type]:
    return [type(action) for action in decision.actions]


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("table", "machine"),
    [
        (states.JOB_TRANSITIONS, JobState),
        (states.GENERATION_TRANSITIONS, GenerationState),
        (states.VM_TRANSITIONS, VmState),
        (states.WORKER_TRANSITIONS, WorkerState),
    ],
)
def test_every_state_has_a_row_and_every_successor_is_a_state(table: states.Table, machine: type) -> None:
    assert set(table) == set(machine)
    assert {new for successors in table.values() for new in successors} <= set(machine)


def test_an_illegal_transition_tells_the_story() -> None:
    history = states.advance(
        states.JOB_TRANSITIONS, "job x", JobState.QUEUED, JobState.FAILED, [], now=1.0, reason="no"
    )
    with pytest.raises(IllegalTransitionError, match=r"job x cannot go from failed to running.*1.000 failed \(no\)"):
        states.advance(states.JOB_TRANSITIONS, "job x", JobState.FAILED, JobState.RUNNING, history, now=2.0, reason="?")


# ---------------------------------------------------------------- one job


def test_a_new_job_without_a_profile_calibrates_on_all_devices() -> None:
    view = job(profiled_at=None, devices=devices("a", "b"))
    (start,) = decide(view, vm("a"), vm("b")).actions
    assert isinstance(start, StartGeneration)
    assert (start.number, start.kind) == (1, GenerationKind.CALIBRATION)
    assert (start.plan.p, start.plan.d, start.plan.micro_batch) == (1, 2, 1)


def test_calibration_takes_no_more_devices_than_examples() -> None:
    view = job(profiled_at=None, devices=devices("a", "b", "c"), global_batch=2)
    (start,) = decide(view, vm("a"), vm("b"), vm("c")).actions
    assert isinstance(start, StartGeneration)
    assert start.plan.d == 2


def test_a_new_job_waits_for_vms_on_their_way_but_not_for_ever() -> None:
    view = job(profiled_at=None, devices=devices("a"), coming_vms=1, created_at=NOW - 1)
    assert "about to join" in decide(view, vm("a")).reason
    assert kinds(decide(view, vm("a"), now=NOW + RULES.start_settle_s)) == [StartGeneration]


def test_after_the_managers_restart_a_generation_waits_for_the_agents_to_come_back() -> None:
    lost = generation(worker(0, "gone", ExitCause.VM_GONE), state=GenerationState.ENDED, end_reason="VM gone is gone")
    view = job(lost, devices=devices("a"), proposal=proposal(devices("a")), returning_vms=2)
    decision = decide(view, vm("a"))
    assert not decision.actions
    assert "come back" in decision.reason
    assert kinds(decide(replace(view, returning_vms=0), vm("a"))) == [StartGeneration]
    assert kinds(decide(replace(view, max_gpus=1), vm("a"))) == [StartGeneration]


def test_too_few_gpus_wait_with_the_numbers() -> None:
    decision = decide(job(devices=devices("a"), min_gpus=2), vm("a"))
    assert not decision.actions
    assert "1 GPUs are free for this job and it needs 2" in decision.reason


def test_a_plan_that_does_not_fit_yet_waits_and_one_that_never_can_fails() -> None:
    none = Proposal(plan=None, reason="stage 0 needs 9 GB")
    waiting = decide(job(devices=devices("a"), proposal=none), vm("a"))
    assert not waiting.actions
    assert "9 GB" in waiting.reason
    (finish,) = decide(job(devices=devices("a"), proposal=replace(none, possible=False)), vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.state is JobState.FAILED
    assert "9 GB" in (finish.error or "")


def test_it_waits_for_a_rendezvous_port_that_no_generation_has_used() -> None:
    spent = vm("a", has_rendezvous_port=False)
    decision = decide(job(devices=devices("a"), proposal=proposal(devices("a"))), spent)
    assert not decision.actions
    assert "rendezvous port" in decision.reason


def test_a_gone_vm_stops_the_generation_ends_it_and_starts_the_next() -> None:
    lost = worker(0, "a", ExitCause.VM_GONE, error="VM a is gone: no notice")
    (stop,) = decide(job(generation(lost, worker(1, "b"))), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.LEAVE_NOW, EndCause.VM_LOST)
    ending = stopping(StopMode.LEAVE_NOW, EndCause.VM_LOST, lost, worker(1, "b"))
    assert kinds(decide(job(ending), vm("b"))) == [EndGeneration]
    over = replace(ending, state=GenerationState.ENDED, end_reason="VM a is gone")
    (start,) = decide(job(over, devices=devices("b"), proposal=proposal(devices("b"))), vm("b")).actions
    assert isinstance(start, StartGeneration)
    assert (start.number, start.reason) == (3, "VM a is gone")


def test_a_lost_vm_waits_for_a_stopped_rank_or_its_lease() -> None:
    silent = vm("a", state=VmState.LOST, reason="silent")
    (stop,) = decide(job(generation(worker(0, "a"), worker(1, "b"))), silent, vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.VM_LOST
    waiting = stopping(StopMode.LEAVE_NOW, EndCause.VM_LOST, worker(0, "a"), worker(1, "b"))
    assert not decide(job(waiting), silent, vm("b")).actions
    one_out = stopping(StopMode.LEAVE_NOW, EndCause.VM_LOST, worker(0, "a", lease_over=True), worker(1, "b"))
    assert kinds(decide(job(one_out), silent, vm("b"))) == [EndGeneration]


def test_a_script_failure_beats_peer_losses_and_waits_for_all_ranks() -> None:
    broken = worker(1, "b", ExitCause.SCRIPT_FAILED, error="Traceback\nValueError: x", stopped_at=NOW - 1)
    peer = worker(0, "a", ExitCause.PEER_LOST, stopped_at=NOW - 2)
    alive = worker(2, "c")
    vms = (vm("a"), vm("b"), vm("c"))
    (stop,) = decide(job(generation(peer, broken, alive)), *vms).actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.SCRIPT_FAILED
    assert not decide(job(stopping(stop.mode, stop.cause, peer, broken, alive)), *vms).actions
    killed = worker(2, "c", ExitCause.KILLED, stopped_at=NOW)
    end, finish = decide(job(stopping(stop.mode, stop.cause, peer, broken, killed)), *vms).actions
    assert isinstance(end, EndGeneration)
    assert isinstance(finish, FinishJob)
    assert (finish.state, finish.error) == (JobState.FAILED, "Traceback\nValueError: x")


def test_scripts_that_raise_because_a_vm_went_away_do_not_fail_the_job() -> None:
    lost = worker(0, "a", ExitCause.VM_GONE)
    raised = worker(1, "b", ExitCause.SCRIPT_FAILED, error="RuntimeError: connection closed by peer")
    decision = decide(job(generation(lost, raised)), vm("b"))
    assert kinds(decision) == [EndGeneration]
    assert decision.actions[0].cause is EndCause.VM_LOST  # type: ignore[union-attr]


def test_a_script_that_raised_before_the_loss_of_a_vm_was_known_does_not_fail_the_job() -> None:
    raised = worker(1, "b", ExitCause.SCRIPT_FAILED, error="DistNetworkError: broken pipe", stopped_at=NOW - 2)
    gone = worker(0, "a", ExitCause.VM_GONE, error="VM a is gone", stopped_at=NOW - 1)
    everyone = decide(job(stopping(StopMode.LEAVE_NOW, EndCause.SCRIPT_FAILED, gone, raised)), vm("b"))
    assert kinds(everyone) == [EndGeneration]
    assert everyone.actions[0].cause is EndCause.VM_LOST  # type: ignore[union-attr]
    with_others = stopping(StopMode.LEAVE_NOW, EndCause.SCRIPT_FAILED, gone, raised, worker(2, "c"))
    (stop,) = decide(job(with_others), vm("b"), vm("c")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.VM_LOST
    silent = stopping(StopMode.LEAVE_NOW, EndCause.SCRIPT_FAILED, worker(0, "a"), raised)
    (stop,) = decide(job(silent), vm("a", state=VmState.LOST, reason="silent"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.VM_LOST


def test_a_lost_peer_alone_waits_a_moment_for_its_cause() -> None:
    peer = worker(0, "a", ExitCause.PEER_LOST, stopped_at=NOW - 0.5)
    view = job(generation(peer, worker(1, "b")))
    assert not decide(view, vm("a"), vm("b")).actions
    assert kinds(decide(view, vm("a"), vm("b"), now=NOW + RULES.root_cause_wait_s)) == [StopGeneration]


def test_all_finished_succeeds_and_one_finished_waits_for_the_others() -> None:
    done = [worker(rank, name, ExitCause.FINISHED) for rank, name in enumerate("ab")]
    assert kinds(decide(job(generation(*done)), vm("a"), vm("b"))) == [EndGeneration, FinishJob]
    assert not decide(job(generation(done[0], worker(1, "b"))), vm("a"), vm("b")).actions
    saving = stopping(StopMode.SAVE_FIRST, EndCause.GROWTH, done[0], worker(1, "b"))
    assert not decide(job(saving), vm("a"), vm("b")).actions


def test_a_rejected_profile_is_the_jobs_error() -> None:
    done = generation(worker(0, "a", ExitCause.FINISHED), kind=GenerationKind.CALIBRATION, last_step=None)
    rejected = job(done, profiled_at=None, profile_error="the measured profile cannot be used: links are missing")
    _, finish = decide(rejected, vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.error == "the measured profile cannot be used: links are missing"


def test_a_calibration_that_gives_no_profile_fails_the_job() -> None:
    done = generation(worker(0, "a", ExitCause.FINISHED), kind=GenerationKind.CALIBRATION, last_step=None)
    end, finish = decide(job(done, profiled_at=None), vm("a")).actions
    assert isinstance(end, EndGeneration)
    assert isinstance(finish, FinishJob)
    assert "set_optimizer" in (finish.error or "")
    assert kinds(decide(job(done), vm("a"))) == [EndGeneration]


def test_a_job_that_is_only_to_be_profiled_is_over_when_it_is() -> None:
    done = generation(
        worker(0, "a", ExitCause.FINISHED), kind=GenerationKind.CALIBRATION, state=GenerationState.ENDED, last_step=None
    )
    view = job(done, profile_only=True, devices=devices("a"))
    assert not wants_plan(view, view.devices, {"a": vm("a")})
    (finish,) = decide(view, vm("a")).actions
    assert finish == FinishJob(state=JobState.SUCCEEDED)
    assert kinds(decide(job(profiled_at=None, profile_only=True, devices=devices("a")), vm("a"))) == [StartGeneration]


def test_a_notice_saves_first_once_there_is_a_step_to_save() -> None:
    leaving = vm("a", state=VmState.DRAINING, reason="notice")
    (stop,) = decide(job(generation(worker(0, "a"))), leaving).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, EndCause.NOTICE)
    (stop,) = decide(job(generation(worker(0, "a"), last_step=None)), leaving).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.LEAVE_NOW


def test_growth_needs_settled_devices_and_a_gain() -> None:
    here = devices("a", "b")
    young = vm("b", ready_for_s=0.5)
    view = job(generation(worker(0, "a")), devices=here)
    vms = {"a": vm("a"), "b": young}
    assert next_devices(view, vms, RULES) == devices("a")
    vms["b"] = vm("b")
    assert next_devices(view, vms, RULES) == here
    assert wants_plan(view, here, vms)
    (stop,) = decide(replace(view, proposal=proposal(here)), *vms.values()).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, EndCause.GROWTH)
    small = decide(replace(view, proposal=proposal(here, rate=8.0 * 1.04)), *vms.values())
    assert not small.actions
    assert "less than 1.05 times as much" in small.reason


def test_a_generation_makes_a_step_before_it_grows() -> None:
    here = devices("a", "b")
    view = job(generation(worker(0, "a"), last_step=None), devices=here, proposal=proposal(here))
    assert not decide(view, vm("a"), vm("b")).actions


def test_no_progress_is_a_hang() -> None:
    quick = generation(worker(0, "a"), progress_at=NOW - 31)
    (stop,) = decide(job(quick), vm("a")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.HANG
    slow = replace(quick, plan=replace(plan_for(1), predicted_minibatch_s=10.0))
    assert not decide(job(slow), vm("a")).actions
    starting = generation(worker(0, "a"), progress_at=NOW - 31, last_step=None)
    assert not decide(job(starting), vm("a")).actions


def test_five_failures_in_a_row_fail_the_job_with_their_reasons() -> None:
    over = generation(worker(0, "a", ExitCause.KILLED), state=GenerationState.ENDED, end_reason="killed")
    view = job(over, devices=devices("a"), proposal=proposal(devices("a")), setbacks=Setbacks(reasons=("killed",) * 5))
    (finish,) = decide(view, vm("a")).actions
    assert isinstance(finish, FinishJob)
    text = "5 generations in a row ended without a completed step"
    assert finish.error == f"{text}: each time since killed"
    several = replace(view, setbacks=Setbacks(reasons=(*("killed",) * 4, "hang")))
    (finish,) = decide(several, vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.error == f"{text}: 1. killed; 2. killed; 3. killed; 4. killed; 5. hang"
    stuck = replace(view, setbacks=replace(view.setbacks, best_step=7))
    (finish,) = decide(stuck, vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert "before they got beyond step 7" in (finish.error or "")
    early = replace(view, setbacks=Setbacks(reasons=("killed",) * 4, last_at=NOW - 1))
    waiting = decide(early, vm("a"))
    assert not waiting.actions
    assert "waiting 4 s before the next one (the last: killed)" in waiting.reason
    assert kinds(decide(early, vm("a"), now=NOW + 4)) == [StartGeneration]


def ended(cause: EndCause, last_step: int | None, at: float = NOW) -> PastGeneration:
    return PastGeneration(cause=cause, reason=cause.value, last_step=last_step, ended_at=at)


def test_a_job_that_dies_at_the_same_step_again_and_again_runs_into_the_breaker() -> None:
    past = [ended(EndCause.PROFILED, None), *(ended(EndCause.WORKER_FAILED, 8, at) for at in (1.0, 2.0, 3.0))]
    found = count_setbacks(past)
    assert found == Setbacks(reasons=("worker_failed",) * 2, last_at=3.0, best_step=8)


def test_a_job_that_gets_on_each_time_is_left_alone() -> None:
    past = [ended(EndCause.WORKER_FAILED, step) for step in (3, 3, 2, 4)]
    assert count_setbacks(past) == Setbacks(best_step=4)


@given(st.lists(st.tuples(st.sampled_from([EndCause.VM_LOST, EndCause.NOTICE, EndCause.GROWTH]), st.integers(0, 9))))
def test_what_vms_do_never_speaks_against_a_job(past: list[tuple[EndCause, int]]) -> None:
    assert count_setbacks(ended(cause, step or None) for cause, step in past).reasons == ()


def test_the_loss_of_a_vm_neither_counts_nor_forgives() -> None:
    killed = ended(EndCause.WORKER_FAILED, None)
    found = count_setbacks([killed, ended(EndCause.VM_LOST, None), killed])
    assert len(found.reasons) == 2


def test_a_limit_that_was_too_short_for_an_evaluation_is_stretched() -> None:
    quick = job(generation(worker(0, "a"), progress_at=NOW - 31))
    assert kinds(decide(quick, vm("a"))) == [StopGeneration]
    assert count_setbacks([ended(EndCause.HANG, 5)]).hangs == 1
    again = replace(quick, setbacks=Setbacks(hangs=1))
    assert not decide(again, vm("a")).actions
    assert kinds(decide(again, vm("a"), now=NOW + 30)) == [StopGeneration]


def test_who_writes_the_result_while_others_have_finished_is_not_hanging() -> None:
    writing = generation(worker(0, "a"), worker(1, "b", ExitCause.FINISHED), progress_at=NOW - 60)
    assert not decide(job(writing), vm("a"), vm("b")).actions
    assert kinds(decide(job(writing), vm("a"), vm("b"), now=NOW + RULES.finish_timeout_s)) == [StopGeneration]


def test_the_first_training_generation_says_what_the_planner_chose() -> None:
    calibrated = generation(
        worker(0, "a", ExitCause.FINISHED),
        kind=GenerationKind.CALIBRATION,
        state=GenerationState.ENDED,
        end_reason="the profile is measured",
    )
    (start,) = decide(job(calibrated, devices=devices("a"), proposal=proposal(devices("a"))), vm("a")).actions
    assert isinstance(start, StartGeneration)
    choice = "1×1 with micro-batch 1 is predicted fastest, 1.00 s per mini-batch"
    assert start.reason == f"the profile is measured: {choice}"


# ---------------------------------------------------------------- saving first


SAVED = ExitCause.GENERATION_ENDED


def saving(*workers: WorkerView) -> JobView:
    return job(stopping(StopMode.SAVE_FIRST, EndCause.GROWTH, *workers))


def test_a_save_first_stop_waits_for_every_rank() -> None:
    vms = (vm("a"), vm("b"))
    waiting = decide(saving(worker(0, "a"), worker(1, "b", SAVED)), *vms)
    assert not waiting.actions
    assert "waiting for its workers" in waiting.reason
    decision = decide(saving(worker(0, "a", SAVED), worker(1, "b", SAVED)), *vms)
    assert kinds(decision) == [EndGeneration]
    assert decision.actions[0].cause is EndCause.GROWTH  # type: ignore[union-attr]


@pytest.mark.parametrize("cause", [ExitCause.KILLED, ExitCause.PEER_LOST, ExitCause.VM_GONE])
def test_a_rank_that_did_not_get_to_save_ends_the_wait(cause: ExitCause) -> None:
    """A rank that hangs in its save is killed by its agent after the grace; one may go with its VM."""
    half = saving(worker(0, "a"), worker(1, "b", SAVED), worker(2, "c", cause))
    decision = decide(half, vm("a"), vm("b"), vm("c"))
    assert kinds(decision) == [EndGeneration]
    assert decision.actions[0].cause is EndCause.GROWTH  # type: ignore[union-attr]


def test_a_vm_that_falls_silent_during_a_save_ends_the_saving() -> None:
    silent = vm("a", state=VmState.LOST, reason="nothing was heard from it for 10 s")
    half = saving(worker(0, "a"), worker(1, "b", SAVED), worker(2, "c"))
    (stop,) = decide(half, silent, vm("b"), vm("c")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.LEAVE_NOW, EndCause.VM_LOST)
    assert "nothing was heard" in stop.reason


def test_a_vm_that_leaves_after_its_rank_has_saved_does_not_end_the_saving() -> None:
    half = saving(worker(0, "a"), worker(1, "gone", SAVED))
    assert not decide(half, vm("a")).actions


def test_cancelling_stops_then_cancels() -> None:
    view = job(generation(worker(0, "a")), state=JobState.CANCELLING)
    (stop,) = decide(view, vm("a")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.LEAVE_NOW
    saving = stopping(StopMode.SAVE_FIRST, EndCause.GROWTH, worker(0, "a"))
    assert kinds(decide(replace(view, generation=saving), vm("a"))) == [StopGeneration]
    assert kinds(decide(job(state=JobState.CANCELLING))) == [FinishJob]


def test_growth_must_earn_what_a_morph_costs() -> None:
    here = devices("a", "b")
    grown = proposal(here, 8.0 * 1.2)
    cheap = job(generation(worker(0, "a")), devices=here, proposal=grown, morphs=Morphs(cost_s=10.0, lifetime_s=600.0))
    assert kinds(decide(cheap, vm("a"), vm("b"))) == [StopGeneration]
    dear = replace(cheap, morphs=Morphs(cost_s=60.0, lifetime_s=100.0))
    decision = decide(dear, vm("a"), vm("b"))
    assert not decision.actions
    assert "less than 1.30 times as much (a morph costs 60.0 s)" in decision.reason


def test_what_a_morph_costs_is_learnt_from_the_recent_ones() -> None:
    assert look_back([]) == Morphs()
    one = PastShape(lifetime_s=1000.0, morph_s=4.0)
    assert look_back([one]) == Morphs(cost_s=4.0, lifetime_s=Morphs().lifetime_s), "one lifetime tells nothing"
    shapes = [*[one] * 3, PastShape(lifetime_s=5.0, morph_s=None), one]
    assert look_back(shapes) == Morphs(cost_s=4.0, lifetime_s=1000.0)
    assert look_back([PastShape(lifetime_s=1.0, morph_s=1.0)] * 5).lifetime_s == 60.0


def test_a_first_step_may_take_some_mini_batches_more() -> None:
    plan = replace(plan_for(1), predicted_minibatch_s=150.0)
    fresh = generation(worker(0, "a"), plan=plan, last_step=None, progress_at=NOW - 700)
    assert not decide(job(fresh), vm("a")).actions
    (stop,) = decide(job(replace(fresh, progress_at=NOW - 900)), vm("a")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.HANG


# ---------------------------------------------------------------- slow VMs


def slow_vm(name: str, ratio: float = 2.0, **changes: object) -> VmView:
    return vm(name, slow_ratio=ratio, slow_reason=f"rank 1 takes {ratio:.2f} times as long as its peers", **changes)


def with_slow(rate_without: float, slow: VmView) -> Decision:
    """Three VMs at 24 examples/s, of which `slow` is one; `rate_without` it."""
    here = devices("a", slow.id, "c")
    view = job(generation(worker(0, "a"), worker(1, slow.id), worker(2, "c")), devices=here)
    vms = {"a": vm("a"), slow.id: slow, "c": vm("c")}
    without = next_devices(view, vms, RULES)
    assert without == devices("a", "c")
    assert wants_plan(view, without, vms)
    return decide_job(NOW, replace(view, proposal=proposal(without, rate_without)), vms, RULES)


def test_a_slow_vm_is_left_when_the_others_are_faster_without() -> None:
    quarantine, stop = with_slow(16.0, slow_vm("b")).actions  # 24 at half the pace is 12
    assert quarantine == Quarantine(
        vm_ids=("b",), until=NOW + 600, reason="VM b: rank 1 takes 2.00 times as long as its peers"
    )
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, EndCause.SLOW_VM)
    assert "1×3 to 1×2, 12.0 to 16.0 examples/s" in stop.reason


def test_a_slow_vm_is_kept_when_it_is_still_worth_having() -> None:
    decision = with_slow(16.0, slow_vm("b", 1.3))
    assert not decision.actions
    assert "VM b: rank 1 takes 1.30 times" in decision.reason
    assert "1×2 without would give 16.0 examples/s, now 18.5" in decision.reason


def test_every_quarantine_of_a_vm_is_twice_as_long() -> None:
    quarantine, _ = with_slow(16.0, slow_vm("b", quarantines=2)).actions
    assert isinstance(quarantine, Quarantine)
    assert quarantine.until == NOW + 2400


def test_a_slow_vm_that_is_all_there_is_is_kept() -> None:
    view = job(generation(worker(0, "b")), devices=devices("b"))
    vms = {"b": slow_vm("b")}
    assert not wants_plan(view, next_devices(view, vms, RULES), vms)
    decision = decide_job(NOW, view, vms, RULES)
    assert not decision.actions
    assert "there is no plan without" in decision.reason


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


# ---------------------------------------------------------------- any life of a job


@dataclass
class World:
    """A small fleet with one job, that applies decisions as the controller does."""

    vms: dict[str, VmView]
    view: JobView = field(default_factory=lambda: job(profiled_at=None))
    now: float = NOW
    started: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Decide and apply until nothing is left to do."""
        for _ in range(20):
            usable = [one for one in self.vms.values() if one.usable]
            free = tuple(Device(one.id, 0) for one in usable if not one.quarantined)
            kept_out = tuple(Device(one.id, 0) for one in usable if one.quarantined)
            self.view = replace(self.view, devices=free, quarantined=kept_out, proposal=None)
            wanted = next_devices(self.view, self.vms, RULES)
            if wants_plan(self.view, wanted, self.vms):
                self.view = replace(self.view, proposal=proposal(wanted))
            decision = decide_job(self.now, self.view, self.vms, RULES)
            assert decision.reason
            if not decision.actions:
                return
            for action in decision.actions:
                self.apply(action)
        raise AssertionError("it never comes to rest")

    def apply(self, action: object) -> None:
        current = self.view.generation
        match action:
            case StartGeneration():
                assert current is None or not current.live, "two live generations"
                assert not self.started or action.number == self.started[-1] + 1
                assert all(self.vms[device.vm_id].usable for device in action.placement)
                self.started.append(action.number)
                workers = [worker(rank, device.vm_id) for rank, device in enumerate(action.placement)]
                launched = generation(*workers, number=action.number, kind=action.kind, plan=action.plan)
                launched = replace(launched, state=GenerationState.LAUNCHING, last_step=None, progress_at=self.now)
                self.view = replace(self.view, generation=launched, state=JobState.RUNNING)
            case StopGeneration():
                assert current is not None
                stop = StopView(mode=action.mode, cause=action.cause, reason=action.reason, requested_at=self.now)
                stopped = replace(current, state=GenerationState.STOPPING, stop=stop)
                self.view = replace(self.view, generation=stopped)
            case EndGeneration():
                assert current is not None
                assert any(one.stopped for one in current.workers), "nothing is known to have stopped"
                ended = replace(current, state=GenerationState.ENDED, end_reason=action.reason)
                self.view = replace(self.view, generation=ended)
            case FinishJob():
                assert current is None or not current.live
                self.view = replace(self.view, state=action.state)
            case Quarantine():
                assert set(action.vm_ids) < set(self.vms), "never all of them"
                for name in action.vm_ids:
                    self.vms[name] = replace(self.vms[name], quarantined=True, slow_ratio=None)
            case LiftQuarantine():
                for name in action.vm_ids:
                    self.vms[name] = replace(self.vms[name], quarantined=False)

    def change_worker(self, rank: int, **changes: object) -> None:
        current = self.view.generation
        if current is None or not current.live or current.workers[rank % len(current.workers)].stopped:
            return
        workers = list(current.workers)
        workers[rank % len(workers)] = replace(workers[rank % len(workers)], **changes)
        self.view = replace(self.view, generation=replace(current, workers=tuple(workers)))

    def lose(self, name: str) -> None:
        self.vms.pop(name, None)
        current = self.view.generation
        for rank, one in enumerate(current.workers if current is not None else ()):
            if one.device.vm_id == name:
                gone = {"state": WorkerState.LOST, "cause": ExitCause.VM_GONE, "stopped_at": self.now}
                self.change_worker(rank, **gone)


EVENTS = st.one_of(
    st.tuples(st.just("lose"), st.sampled_from("abcd")),
    st.tuples(st.just("join"), st.sampled_from("abcd")),
    st.tuples(st.just("notice"), st.sampled_from("abcd")),
    st.tuples(
        st.just("exit"), st.integers(0, 3), st.sampled_from([c for c in ExitCause if c is not ExitCause.VM_GONE])
    ),
    st.tuples(st.just("step")),
    st.tuples(st.just("profile")),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0, 40.0, 200.0])),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("slow"), st.sampled_from("abcd"), st.sampled_from([1.2, 3.0])),
    st.tuples(st.just("probation"), st.sampled_from("abcd")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_whatever_happens_generations_grow_one_by_one_and_never_two_live(events: list[tuple]) -> None:
    world = World({name: vm(name) for name in "ab"})
    world.look()
    for event in events:
        current = world.view.generation
        match event:
            case ("lose", name):
                world.lose(name)
            case ("join", name):
                world.vms.setdefault(name, vm(name))
            case ("notice", name) if name in world.vms:
                world.vms[name] = replace(world.vms[name], state=VmState.DRAINING)
            case ("exit", rank, cause):
                world.change_worker(rank, state=WorkerState.EXITED, cause=cause, stopped_at=world.now, error="x")
            case ("step",) if current is not None and current.live and current.kind is GenerationKind.TRAINING:
                stepped = replace(current, last_step=(current.last_step or 0) + 1, progress_at=world.now)
                if stepped.state is GenerationState.LAUNCHING:
                    stepped = replace(stepped, state=GenerationState.RUNNING)
                world.view = replace(world.view, generation=stepped)
            case ("profile",):
                world.view = replace(world.view, profiled_at=world.view.profiled_at or world.now)
            case ("wait", seconds):
                world.now += seconds
            case ("slow", name, ratio) if name in world.vms:
                world.vms[name] = replace(world.vms[name], slow_ratio=ratio, slow_reason="it is slow")
            case ("probation", name) if name in world.vms:
                world.vms[name] = replace(world.vms[name], quarantined=False)
            case ("cancel",) if world.view.state in (JobState.QUEUED, JobState.RUNNING):
                world.view = replace(world.view, state=JobState.CANCELLING)
        world.look()
    assert world.started == list(range(1, len(world.started) + 1))


# ---------------------------------------------------------------- fleet


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (vm("a", state=VmState.REQUESTED, connected=False), None),
        (vm("a", state=VmState.REQUESTED), VmState.READY),
        (vm("a", silent_s=5.0), VmState.SUSPECT),
        (vm("a", silent_s=10.0), VmState.LOST),
        (vm("a", silent_s=10.0, heard_since_start=False), None),
        (vm("a", state=VmState.SUSPECT, silent_s=0.1), VmState.READY),
        (vm("a", state=VmState.LOST, silent_s=0.1), VmState.READY),
        (vm("a", state=VmState.LOST, silent_s=7.0), None),
        (vm("a", listed=False), VmState.GONE),
        (vm("a", listed=None), None),
        (vm("a", notice_deadline=NOW + 30), VmState.DRAINING),
        (vm("a", state=VmState.DRAINING, notice_deadline=NOW + 30), None),
        (vm("a", state=VmState.DRAINING, silent_s=11.0), VmState.LOST),
    ],
)
def test_a_vms_state_follows_what_is_heard_of_it(before: VmView, after: VmState | None) -> None:
    verdict = decide_vm(NOW, before, RULES)
    assert (verdict.state if verdict is not None else None) == after
    if verdict is not None:
        assert verdict.state in states.VM_TRANSITIONS[before.state]


@given(
    st.builds(
        VmView,
        id=st.just("a"),
        state=st.sampled_from([state for state in VmState if state is not VmState.GONE]),
        connected=st.booleans(),
        heard_since_start=st.booleans(),
        silent_s=st.floats(0, 100),
        listed=st.sampled_from([True, False, None]),
        notice_deadline=st.none() | st.floats(900, 1100),
    )
)
def test_a_vms_verdict_is_always_a_legal_transition(view: VmView) -> None:
    verdict = decide_vm(NOW, view, RULES)
    assert verdict is None or verdict.state in states.VM_TRANSITIONS[view.state]


def test_the_fleet_asks_for_what_is_missing_and_backs_off_when_refused() -> None:
    fleet = FleetView(target=3, vms=(vm("a"), vm("b", state=VmState.LOST)))
    assert decide_fleet(NOW, fleet, RULES).create == 2
    refused = replace(fleet, refusals=2, refused_at=NOW - 1, refusal="no capacity")
    assert decide_fleet(NOW, refused, RULES).create == 0
    assert "no capacity" in decide_fleet(NOW, refused, RULES).reason
    assert decide_fleet(NOW + backoff_s(2), refused, RULES).create == 2


def test_a_smaller_target_drains_the_idle_first_and_gives_back_the_empty() -> None:
    fleet = FleetView(target=1, vms=(vm("a", workers=1), vm("b"), vm("c", workers=1, age_s=9.0)))
    assert decide_fleet(NOW, fleet, RULES).drain == ("b", "a")
    drained = vm("b", state=VmState.DRAINING)
    busy = vm("a", state=VmState.DRAINING, workers=1)
    assert decide_fleet(NOW, FleetView(target=0, vms=(drained, busy)), RULES).delete == ("b",)


# ---------------------------------------------------------------- commands, accounting, spec


def test_agents_are_told_what_they_lack() -> None:
    running = Presence(
        job_id="j",
        generation=3,
        state=GenerationState.LAUNCHING,
        stop_mode=None,
        worker_states=(WorkerState.ASSIGNED,),
    )
    old = Presence(
        job_id="j", generation=2, state=GenerationState.ENDED, stop_mode=None, worker_states=(WorkerState.RUNNING,)
    )
    saving = replace(running, state=GenerationState.STOPPING, stop_mode=StopMode.SAVE_FIRST)
    stop_old = StopKey(job_id="j", generation=2, mode=StopMode.LEAVE_NOW)
    launch = LaunchKey(job_id="j", generation=3)
    assert wanted_commands([running, old], [], frozenset(), draining=False) == (stop_old, launch)
    assert wanted_commands([running], [], frozenset({("j", 3)}), draining=True) == (DrainKey(),)
    stop_saving = StopKey(job_id="j", generation=3, mode=StopMode.SAVE_FIRST)
    assert wanted_commands([saving], [("j", 3)], frozenset(), draining=False) == (stop_saving,)
    stray = StopKey(job_id="x", generation=1, mode=StopMode.LEAVE_NOW)
    assert wanted_commands([], [("x", 1)], frozenset(), draining=False) == (stray,)


def test_the_cost_of_a_morph() -> None:
    assert seconds_without_progress(last_progress_at=10.0, first_step_at=14.5) == 4.5
    assert steps_redone(last_step_before=12, resumed_step=10) == 2
    assert steps_redone(last_step_before=None, resumed_step=0) == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"global_batch": 0}, "greater than or equal to 1"),
        ({"plan": {"d": 9}}, "plan.d 9 is more than the 8 micro-batches"),
        ({"plan": {"micro_batch": 9}}, "plan.micro_batch 9 is more than global_batch 8"),
        ({"plan": {"p": 2, "d": 2}, "resources": {"max_gpus": 3}}, "needs 4 GPUs but resources.max_gpus is 3"),
        ({"resources": {"min_gpus": 3, "max_gpus": 2}}, "max_gpus 2 is below min_gpus 3"),
        ({"workdir": "here"}, "absolute path"),
        ({"name": "a b"}, "1 to 63 letters"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_a_bad_spec_is_refused_with_the_way_out(changes: dict[str, object], text: str) -> None:
    spec = {"name": "n", "workdir": "/w", "run": "true", "global_batch": 8, **changes}
    with pytest.raises(ValidationError, match=text):
        JobSpec.model_validate(spec)
