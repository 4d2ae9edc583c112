"""Ends that are not the job's fault: agents that restart or refuse, managers that are away, VMs out of reach."""

from __future__ import annotations

import pytest

from decision_views import NOW, RULES, decide, generation, job, kinds, stopping, vm, worker
from varuna_manager.domain.actions import EndGeneration, FinishJob, QuarantineVms, RecordDeath, StopGeneration
from varuna_manager.domain.observed import GenerationView, VmView, WorkerView
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.states import EndCause, ExitCause, StopMode

OFTEN = 20


def end_of(view: GenerationView, *vms: VmView, now: float = NOW) -> tuple[EndCause, str]:
    """The cause and the reason with which a generation is stopped or ended."""
    for action in decide(job(view), *vms, now=now).actions:
        if isinstance(action, StopGeneration | EndGeneration):
            return action.cause, action.reason
    raise AssertionError("it goes on")


def after(cause: EndCause, times: int = OFTEN) -> Setbacks:
    return count_setbacks([PastGeneration(cause=cause, reason="x", last_step=None, ended_at=NOW)] * times)


# ---------------------------------------------------------------- blameless


@pytest.mark.parametrize(
    ("exit_cause", "end_cause"),
    [
        (ExitCause.LEASE_OVER, EndCause.MANAGER_AWAY),
        (ExitCause.AGENT_ENDED, EndCause.AGENT_ENDED),
        (ExitCause.LAUNCH_REFUSED, EndCause.LAUNCH_REFUSED),
    ],
)
def test_what_agents_and_managers_do_never_fails_a_job(exit_cause: ExitCause, end_cause: EndCause) -> None:
    stopped = generation(worker(0, "a", exit_cause, error="why"), worker(1, "b"))
    cause, reason = end_of(stopped, vm("a"), vm("b"))
    assert (cause, reason.endswith(": why")) == (end_cause, True)
    assert end_of(generation(worker(0, "a", exit_cause)), vm("a"))[0] is end_cause, "also when all stop at once"
    assert len(after(end_cause).reasons) < RULES.breaker


def test_a_fleet_that_lost_its_manager_goes_on_at_once_and_one_whose_agents_refuse_waits_a_little() -> None:
    assert after(EndCause.MANAGER_AWAY).backoff_s == 0.0
    assert [after(EndCause.LAUNCH_REFUSED, times).backoff_s for times in (1, 2, 3, OFTEN)] == [0.0, 1.0, 2.0, 30.0]


def test_scripts_that_raise_when_an_agent_ends_are_not_at_fault() -> None:
    raised = worker(0, "a", ExitCause.SCRIPT_FAILED, error="RuntimeError: lost", stopped_at=NOW - 20)
    ended = worker(1, "b", ExitCause.AGENT_ENDED, error="the agent restarted")
    for first in (generation(raised, ended), stopping(StopMode.LEAVE_NOW, EndCause.SCRIPT_FAILED, raised, ended)):
        decision = decide(job(first), vm("a"), vm("b"))
        assert FinishJob not in kinds(decision)
        assert end_of(first, vm("a"), vm("b"))[0] is EndCause.AGENT_ENDED


def test_a_script_that_failed_by_itself_fails_the_job_although_an_agent_knows_nothing_of_a_rank() -> None:
    raised = worker(0, "a", ExitCause.SCRIPT_FAILED, error="ValueError: x", stopped_at=NOW - 20)
    unknown = worker(1, "b", ExitCause.LAUNCH_REFUSED, error="nothing of it runs here")
    _, finish = decide(job(stopping(StopMode.LEAVE_NOW, EndCause.SCRIPT_FAILED, raised, unknown)), vm("a")).actions
    assert isinstance(finish, FinishJob)
    assert finish.error == "ValueError: x"


def test_a_rank_that_left_before_the_silence_of_its_peers_vm_was_known_is_no_failure() -> None:
    left = generation(worker(0, "a", ExitCause.PEER_LOST), worker(1, "b"))
    cause, reason = end_of(left, vm("a"), vm("b", silent_s=3.0))
    assert cause is EndCause.VM_LOST
    assert reason == "rank 0 on VM a lost a peer, and VM b is silent"
    assert end_of(left, vm("a"), vm("b", connected=False))[0] is EndCause.VM_LOST
    assert end_of(left, vm("a"), vm("b"))[0] is EndCause.WORKER_FAILED
    back = decide(job(left), vm("a"), vm("b", ready_for_s=0.1))
    assert not back.actions
    assert back.reason.endswith("waiting for a report of what happened to it"), "its agent is about to report"


def test_what_is_heard_late_of_an_agent_still_excuses() -> None:
    late = stopping(
        StopMode.LEAVE_NOW,
        EndCause.WORKER_FAILED,
        worker(0, "a", ExitCause.PEER_LOST),
        worker(1, "b", ExitCause.LEASE_OVER, error="the lease is over"),
    )
    assert end_of(late, vm("a"), vm("b"))[0] is EndCause.MANAGER_AWAY


# ---------------------------------------------------------------- deaths


def killed_on(vm_id: str, cause: ExitCause = ExitCause.KILLED) -> GenerationView:
    return stopping(StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, worker(0, "a"), worker(1, vm_id, cause))


def test_a_vm_whose_workers_keep_dying_is_quarantined() -> None:
    _, note = decide(job(killed_on("b")), vm("a"), vm("b")).actions
    assert note == RecordDeath(vm_id="b", deaths=1)
    _, note, quarantine = decide(job(killed_on("b")), vm("a"), vm("b", deaths=2, last_death_at=NOW - 60)).actions
    assert note == RecordDeath(vm_id="b", deaths=3)
    assert isinstance(quarantine, QuarantineVms)
    assert (quarantine.vm_ids, quarantine.until) == (("b",), NOW + RULES.quarantine_s)
    assert quarantine.reason.startswith("3 generations in a row ended because of workers there")
    before = vm("b", deaths=3, last_death_at=NOW - 60, quarantines=1)
    _, _, quarantine = decide(job(killed_on("b")), vm("a"), before).actions
    assert quarantine.until == NOW + 2 * RULES.quarantine_s


def test_deaths_long_apart_or_on_the_only_vm_quarantine_nobody() -> None:
    old = vm("b", deaths=9, last_death_at=NOW - RULES.death_window_s)
    assert decide(job(killed_on("b")), vm("a"), old).actions[1:] == (RecordDeath(vm_id="b", deaths=1),)
    alone = stopping(StopMode.LEAVE_NOW, EndCause.WORKER_FAILED, worker(0, "b", ExitCause.KILLED))
    only = vm("b", deaths=9, last_death_at=NOW - 1)
    assert decide(job(alone), only).actions[1:] == (RecordDeath(vm_id="b", deaths=10),)


@pytest.mark.parametrize("cause", [ExitCause.SCRIPT_FAILED, ExitCause.LEASE_OVER, ExitCause.VM_GONE])
def test_scripts_managers_and_the_market_speak_against_no_vm(cause: ExitCause) -> None:
    view = generation(worker(0, "a", ExitCause.PEER_LOST), worker(1, "b", cause))
    decision = decide(job(view), vm("a"), vm("b", deaths=9, last_death_at=NOW - 1))
    assert EndGeneration in kinds(decision)
    assert not {RecordDeath, QuarantineVms} & set(kinds(decision))


# ---------------------------------------------------------------- VMs that do not reach each other


def unreached(rank: int, vm_id: str, peer: int) -> WorkerView:
    return worker(rank, vm_id, ExitCause.PEER_LOST, unreached=peer)


def test_of_two_vms_that_do_not_reach_each_other_one_is_left_out_and_the_job_is_not_blamed() -> None:
    fleet = [vm(name) for name in "abc"]
    meeting = generation(worker(0, "a"), worker(1, "b"), unreached(2, "c", 0), last_step=None)
    cause, reason = end_of(meeting, *fleet)
    assert cause is EndCause.UNREACHABLE
    assert reason == "rank 2 on VM c cannot reach rank 0 on VM a, although the manager reaches both"
    over = stopping(StopMode.LEAVE_NOW, cause, worker(0, "a"), worker(1, "b"), unreached(2, "c", 0))
    _, quarantine = decide(job(over), *fleet).actions
    assert quarantine == QuarantineVms(vm_ids=("c",), until=NOW + RULES.quarantine_s, reason=reason)
    assert len(after(EndCause.UNREACHABLE).reasons) < RULES.breaker


def test_all_ranks_may_have_left_when_the_manager_looks() -> None:
    over = generation(worker(0, "a", ExitCause.PEER_LOST), unreached(1, "b", 0))
    end, quarantine = decide(job(over), vm("a"), vm("b")).actions
    assert isinstance(end, EndGeneration)
    assert (end.cause, kinds(decide(job(over), vm("a"), vm("b")))) == (
        EndCause.UNREACHABLE,
        [EndGeneration, QuarantineVms],
    )
    assert quarantine.vm_ids == ("b",)


def test_the_vm_that_most_pairs_name_is_left_out() -> None:
    fleet = [vm(name) for name in "abcd"]
    out_of_reach = generation(worker(0, "a", ExitCause.PEER_LOST), *(unreached(n, "abcd"[n], 0) for n in (1, 2, 3)))
    assert decide(job(out_of_reach), *fleet).actions[1].vm_ids == ("a",)
    left = worker(3, "d", ExitCause.PEER_LOST)
    many = generation(unreached(0, "a", 1), unreached(1, "b", 2), unreached(2, "c", 1), left)
    assert decide(job(many), *fleet).actions[1].vm_ids == ("b",)


@pytest.mark.parametrize("peer", [2, 9], ids=["itself", "nobody"])
def test_evidence_that_names_no_other_vm_is_none(peer: int) -> None:
    odd = generation(worker(0, "a"), worker(1, "b"), unreached(2, "c", peer))
    assert end_of(odd, vm("a"), vm("b"), vm("c"))[0] is EndCause.WORKER_FAILED


def test_a_rank_that_was_killed_explains_more_than_one_that_did_not_reach_it() -> None:
    died = generation(worker(0, "a", ExitCause.KILLED), worker(1, "b"), unreached(2, "c", 0))
    assert end_of(died, vm("a"), vm("b"), vm("c"))[0] is EndCause.WORKER_FAILED
