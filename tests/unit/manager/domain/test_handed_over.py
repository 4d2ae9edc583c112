"""Workers that only end one step in a shape that their script cannot follow leave it by themselves. New processes take
their state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decision_views import NOW, decide, generation, job, proposal, vm, worker
from varuna_manager.domain.actions import EndGeneration, StartGeneration, StopGeneration
from varuna_manager.domain.observed import GenerationView, JobView, WorkerView
from varuna_manager.domain.setbacks import PastGeneration, count_setbacks
from varuna_manager.domain.states import EndCause, ExitCause, GenerationState
from varuna_proto.plan import Device

VMS = [vm("a"), vm("c")]


def left(rank: int, vm_id: str, cause: ExitCause = ExitCause.GENERATION_ENDED) -> WorkerView:
    return worker(rank, vm_id, cause, held_step=6, gives_only=True)


def in_place(*workers: WorkerView, **changes: object) -> GenerationView:
    return replace(generation(*workers, in_place=True, last_step=6), **changes)


def test_workers_that_leave_after_their_step_stop_the_generation() -> None:
    decision = decide(job(in_place(left(0, "a"), worker(1, "c"))), *VMS)
    (stop,) = decision.actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.HANDED_OVER
    assert stop.reason == "its workers have ended step 6, and their script cannot follow the shape"


@pytest.mark.parametrize("other", [ExitCause.GENERATION_ENDED, ExitCause.PEER_LOST])
@pytest.mark.parametrize("last_step", [6, None])
def test_the_generation_ends_without_blame_when_all_have_left(other: ExitCause, last_step: int | None) -> None:
    decision = decide(job(in_place(left(0, "a"), left(1, "c", other), last_step=last_step)), *VMS)
    (end,) = decision.actions
    assert isinstance(end, EndGeneration)
    assert end.cause is EndCause.HANDED_OVER
    assert ("could not end the step" in end.reason) is (last_step is None)
    past = PastGeneration(cause=end.cause, reason=end.reason, last_step=last_step, ended_at=NOW)
    assert count_setbacks([past]).reasons == ()


@pytest.mark.parametrize(
    "changes",
    [{"in_place": False}, {"workers": (worker(0, "a", ExitCause.GENERATION_ENDED), worker(1, "c"))}],
    ids=["new processes", "a process that has not kept its state"],
)
def test_other_workers_that_leave_by_themselves_have_failed(changes: dict[str, object]) -> None:
    decision = decide(job(in_place(left(0, "a"), worker(1, "c"), **changes)), *VMS)
    (stop,) = decision.actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.WORKER_FAILED


def test_a_vm_that_is_lost_meanwhile_is_the_cause() -> None:
    decision = decide(job(in_place(left(0, "a"), worker(1, "c", ExitCause.VM_GONE))), *VMS)
    assert [action.cause for action in decision.actions if isinstance(action, EndGeneration)] == [EndCause.VM_LOST]


@pytest.mark.parametrize("last_step", [6, None])
def test_new_processes_take_the_state_of_those_that_have_left(last_step: int | None) -> None:
    here = (Device("a", 0), Device("c", 0))
    ended = in_place(
        left(0, "a"),
        left(1, "c"),
        last_step=last_step,
        state=GenerationState.ENDED,
        ended_at=NOW,
        end_cause=EndCause.HANDED_OVER,
        end_reason="its workers have ended step 6, and their script cannot follow the shape",
    )
    view: JobView = job(ended, devices=here, survivors=frozenset(here), has_fixed_stages=True, proposal=proposal(here))
    starts = [action for action in decide(view, *VMS).actions if isinstance(action, StartGeneration)]
    assert [start.in_place for start in starts] == [False]
    assert starts[0].holders is not None
    assert [holder.rank for holder in starts[0].holders.members] == [0, 1]
    assert starts[0].reason == ended.end_reason
