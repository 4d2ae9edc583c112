"""What is decided about one job: start, stop, end, finish, save first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decision_views import NOW, RULES, decide, devices, generation, job, kinds, proposal, stopping, vm, worker
from varuna_manager.domain.actions import EndGeneration, FinishJob, StartGeneration, StopGeneration
from varuna_manager.domain.job_decision import wants_plan
from varuna_manager.domain.observed import JobView, Proposal, WorkerView
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
)


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
    assert "agents to reconnect" in decision.reason
    assert kinds(decide(replace(view, returning_vms=0), vm("a"))) == [StartGeneration]
    assert kinds(decide(replace(view, max_gpus=1), vm("a"))) == [StartGeneration]


def test_too_few_gpus_wait_with_the_numbers() -> None:
    decision = decide(job(devices=devices("a"), min_gpus=2), vm("a"))
    assert not decision.actions
    assert "1 GPU is free for this job and it needs 2" in decision.reason


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
    spent = vm("a", port_free_at=None)
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


def test_a_lost_peer_and_the_broken_stream_of_its_agent_are_two_witnesses() -> None:
    peer = worker(0, "a", ExitCause.PEER_LOST, stopped_at=NOW - 0.6)
    view = job(generation(peer, worker(1, "b")))
    cut = vm("b", connected=False, silent_s=1.0)
    (stop,) = decide(view, vm("a"), cut).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.cause, stop.reason) == (EndCause.VM_LOST, "rank 0 on VM a lost a peer, and VM b is silent")
    assert not decide(view, vm("a"), cut, now=NOW - 0.3).actions, "its agent may be about to redial"
    restarted = replace(cut, connected_since_start=False)
    assert not decide(view, vm("a"), restarted).actions, "the manager has just started"


def test_all_finished_succeeds_and_one_finished_waits_for_the_others() -> None:
    done = [worker(rank, name, ExitCause.FINISHED) for rank, name in enumerate("ab")]
    assert kinds(decide(job(generation(*done)), vm("a"), vm("b"))) == [EndGeneration, FinishJob]
    assert not decide(job(generation(done[0], worker(1, "b"))), vm("a"), vm("b")).actions
    saving = stopping(StopMode.SAVE_FIRST, EndCause.GROWTH, done[0], worker(1, "b"))
    assert not decide(job(saving), vm("a"), vm("b")).actions


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, ""),
        (
            {"last_step": 8, "not_finite_from": 2, "steps_skipped": 7},
            "but the loss or gradient of its last 7 steps was not finite (7 skipped in all)",
        ),
        ({"last_step": 8, "not_finite_from": 8}, "but the loss or gradient of its last step was not finite"),
        ({"steps_skipped": 1}, "but 1 of its steps was skipped for a loss or gradient that was not finite"),
        ({"steps_skipped": 3}, "but 3 of its steps were skipped for a loss or gradient that was not finite"),
        ({"last_step": None, "resumed_step": 8}, "but generation 2 began at step 8 and ran no step"),
        ({"last_step": None}, "but generation 2 ran no step"),
    ],
)
def test_a_success_says_what_a_person_has_to_know_of_it(changes: dict[str, Any], note: str) -> None:
    decision = decide(job(generation(worker(0, "a", ExitCause.FINISHED), **changes)), vm("a"))
    _, finish = decision.actions
    assert finish == FinishJob(state=JobState.SUCCEEDED, exit_code=0, note=note)
    assert decision.reason == (f"succeeded, {note}" if note else "every rank finished")


def test_a_rejected_profile_is_the_jobs_error() -> None:
    done = generation(worker(0, "a", ExitCause.FINISHED), kind=GenerationKind.CALIBRATION, last_step=None)
    rejected = job(done, profiled_at=None, profile_error="the measured profile cannot be used: links are missing")
    _, finish = decide(rejected, vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.error == "the measured profile cannot be used: links are missing"


def test_a_calibration_that_gives_no_profile_fails_the_job() -> None:
    done = generation(worker(0, "a", ExitCause.FINISHED), kind=GenerationKind.CALIBRATION, last_step=None)
    decision = decide(job(done, profiled_at=None), vm("a"))
    end, finish = decision.actions
    assert isinstance(end, EndGeneration)
    assert end.reason == "every rank finished without handing in a profile"
    assert isinstance(finish, FinishJob)
    assert "set_optimizer" in (finish.error or "")
    assert decision.reason == finish.error
    assert kinds(decide(job(done), vm("a"))) == [EndGeneration]


def test_a_job_that_is_only_to_be_profiled_is_over_when_it_is() -> None:
    done = generation(
        worker(0, "a", ExitCause.FINISHED), kind=GenerationKind.CALIBRATION, state=GenerationState.ENDED, last_step=None
    )
    view = job(done, profile_only=True, devices=devices("a"))
    assert not wants_plan(view, view.devices, {"a": vm("a")})
    (finish,) = decide(view, vm("a")).actions
    assert finish == FinishJob(state=JobState.SUCCEEDED, exit_code=0)
    assert kinds(decide(job(profiled_at=None, profile_only=True, devices=devices("a")), vm("a"))) == [StartGeneration]


def test_a_notice_saves_first_once_there_is_a_step_to_save() -> None:
    leaving = vm("a", state=VmState.DRAINING, reason="notice")
    (stop,) = decide(job(generation(worker(0, "a"))), leaving).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST, EndCause.NOTICE)
    (stop,) = decide(job(generation(worker(0, "a"), last_step=None)), leaving).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.LEAVE_NOW


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


IN_ORDER = pytest.mark.parametrize("mode", [StopMode.SAVE_FIRST, StopMode.HOLD_FIRST])


def saving(mode: StopMode, *workers: WorkerView) -> JobView:
    return job(stopping(mode, EndCause.GROWTH, *workers))


@IN_ORDER
def test_a_stop_in_order_waits_for_every_rank(mode: StopMode) -> None:
    vms = (vm("a"), vm("b"))
    waiting = decide(saving(mode, worker(0, "a"), worker(1, "b", SAVED)), *vms)
    assert not waiting.actions
    assert "waiting for its workers" in waiting.reason
    decision = decide(saving(mode, worker(0, "a", SAVED), worker(1, "b", SAVED)), *vms)
    assert kinds(decision) == [EndGeneration]
    assert decision.actions[0].cause is EndCause.GROWTH  # type: ignore[union-attr]


@IN_ORDER
@pytest.mark.parametrize("cause", [ExitCause.KILLED, ExitCause.PEER_LOST, ExitCause.VM_GONE])
def test_a_rank_that_did_not_get_to_save_ends_the_wait(mode: StopMode, cause: ExitCause) -> None:
    """A rank that hangs in its save is killed by its agent after the grace; one may go with its VM."""
    half = saving(mode, worker(0, "a"), worker(1, "b", SAVED), worker(2, "c", cause))
    decision = decide(half, vm("a"), vm("b"), vm("c"))
    assert kinds(decision) == [EndGeneration]
    assert decision.actions[0].cause is EndCause.GROWTH  # type: ignore[union-attr]


@IN_ORDER
def test_a_vm_that_falls_silent_during_a_save_ends_the_saving(mode: StopMode) -> None:
    silent = vm("a", state=VmState.LOST, reason="it has been silent for 10 s")
    half = saving(mode, worker(0, "a"), worker(1, "b", SAVED), worker(2, "c"))
    (stop,) = decide(half, silent, vm("b"), vm("c")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.LEAVE_NOW, EndCause.VM_LOST)
    assert "it has been silent" in stop.reason


@IN_ORDER
def test_a_vm_that_leaves_after_its_rank_has_saved_does_not_end_the_saving(mode: StopMode) -> None:
    half = saving(mode, worker(0, "a"), worker(1, "gone", SAVED))
    assert not decide(half, vm("a")).actions


@IN_ORDER
@pytest.mark.parametrize("saves", [False, True])
def test_a_job_that_stops_in_order_is_cancelled_with_a_save_where_that_was_asked(mode: StopMode, saves: bool) -> None:
    view = replace(saving(mode, worker(0, "a")), state=JobState.CANCELLING, cancel_saves=saves)
    (stop,) = decide(view, vm("a")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.SAVE_FIRST if saves else StopMode.LEAVE_NOW, EndCause.CANCELLED)


def test_cancelling_stops_then_cancels() -> None:
    view = job(generation(worker(0, "a")), state=JobState.CANCELLING)
    (stop,) = decide(view, vm("a")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.LEAVE_NOW
    saving = stopping(StopMode.SAVE_FIRST, EndCause.GROWTH, worker(0, "a"))
    assert kinds(decide(replace(view, generation=saving), vm("a"))) == [StopGeneration]
    assert kinds(decide(job(state=JobState.CANCELLING))) == [FinishJob]
