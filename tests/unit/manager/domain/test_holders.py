"""Which processes of an ended generation give their state to the next one, and when the job waits for their reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decision_views import NOW, RULES, decide, generation, job, proposal, vm, worker
from varuna_manager.domain.actions import StartGeneration
from varuna_manager.domain.holders import choose_planned_stop
from varuna_manager.domain.observed import GenerationView, Holder, Holders, JobView, KeptCopy, VmView, WorkerView
from varuna_manager.domain.reshaping import keeps_state
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
)
from varuna_proto.plan import Device, Plan

PLAN = Plan(p=2, d=2, micro_batch=1, global_batch=16, predicted_minibatch_s=1.0, examples_per_s=16.0)
FOUR = (vm("a"), vm("b"), vm("c"), vm("d"))


def holds(rank: int, vm_id: str, step: int = 7, held_s: float = 0.1) -> WorkerView:
    left = worker(rank, vm_id, ExitCause.PEER_LOST, held_step=step, gives_only=True)
    return replace(left, stopped_at=NOW - held_s)


def ended(*workers: WorkerView, **changes: object) -> GenerationView:
    view = generation(
        *workers,
        state=GenerationState.ENDED,
        plan=PLAN,
        ended_at=NOW,
        end_cause=EndCause.VM_LOST,
        end_reason="VM b is lost",
        last_step=7,
    )
    return replace(view, **changes)


LAST = ended(holds(0, "a"), worker(1, "b", ExitCause.VM_GONE), holds(2, "c"), holds(3, "d"))
"""Every stage has a process that holds it."""
TAKEN = Holders(generation=1, members=(Holder(rank=0, stage=0, vm_id="a", held_at=NOW - 20.0),))
VAIN = ended(worker(0, "a", ExitCause.GENERATION_ENDED), plan=replace(PLAN, p=1, d=1), last_step=None, holders=TAKEN)
"""The generation died before its first step. It was to take its state from holders of the one before."""


def view(last: GenerationView, vms: tuple[VmView, ...], **changes: object) -> JobView:
    free = tuple(Device(one.id, 0) for one in vms if one.usable)
    return replace(job(last, devices=free, proposal=proposal(free)), **changes)


def start_of(last: GenerationView, *vms: VmView, now: float = NOW, **changes: object) -> StartGeneration:
    (start,) = decide(view(last, vms, **changes), *vms, now=now).actions
    assert isinstance(start, StartGeneration)
    assert not start.in_place
    return start


def ranks(start: StartGeneration) -> list[int]:
    return [] if start.holders is None else [holder.rank for holder in start.holders.members]


WITHOUT_B = tuple(one for one in FOUR if one.id != "b")


def test_processes_that_hold_all_stages_give_them_to_the_next_generation() -> None:
    start = start_of(LAST, *WITHOUT_B)
    assert start.holders is not None
    assert start.holders.generation == LAST.number
    assert [(one.rank, one.stage, one.vm_id) for one in start.holders.members] == [
        (0, 0, "a"),
        (2, 0, "c"),
        (3, 1, "d"),
    ]


def test_the_newest_step_that_all_stages_hold_counts() -> None:
    newer = ended(holds(0, "a", 8), holds(1, "b", 7), holds(2, "c", 7), holds(3, "d", 7))
    assert ranks(start_of(newer, *FOUR)) == [1, 2, 3]
    newest = ended(holds(0, "a", 8), holds(1, "b", 8), holds(2, "c", 7), holds(3, "d", 7))
    assert ranks(start_of(newest, *FOUR)) == [0, 1]


def test_a_stage_that_no_process_holds_sends_all_to_the_checkpoint() -> None:
    last = ended(holds(0, "a"), worker(1, "b", ExitCause.VM_GONE), holds(2, "c"), worker(3, "d", ExitCause.VM_GONE))
    assert start_of(last, vm("a"), vm("c")).holders is None


ONE_EACH = replace(PLAN, p=3, d=1)


def keeps(rank: int, vm_id: str, step: int, *copies: tuple[int, int]) -> WorkerView:
    return replace(holds(rank, vm_id, step), held_copies=tuple(KeptCopy(*copy) for copy in copies))


def test_a_copy_stands_for_the_stage_that_is_lost() -> None:
    last = ended(
        keeps(0, "a", 7, (0, 6), (2, 7), (2, 6)),
        worker(1, "b", ExitCause.VM_GONE),
        keeps(2, "c", 7, (1, 7)),
        plan=ONE_EACH,
    )
    start = start_of(last, vm("a"), vm("c"))
    assert start.holders is not None
    assert [(one.rank, one.stages) for one in start.holders.members] == [(0, (0, 2)), (2, (1, 2))]
    assert [Holder.from_document(one.to_document()) for one in start.holders.members] == list(start.holders.members)


def test_all_go_back_to_the_step_of_which_every_stage_has_something() -> None:
    """The copy of rank 1's newest step was half way."""
    last = ended(
        keeps(0, "a", 7, (0, 6), (2, 6)),
        worker(1, "b", ExitCause.VM_GONE),
        keeps(2, "c", 7, (1, 6), (2, 6)),
        plan=ONE_EACH,
    )
    assert ranks(start_of(last, vm("a"), vm("c"))) == [0, 2]
    lost_keeper = ended(
        keeps(0, "a", 7, (0, 6), (2, 6)),
        worker(1, "b", ExitCause.VM_GONE),
        worker(2, "c", ExitCause.VM_GONE),
        plan=ONE_EACH,
    )
    assert start_of(lost_keeper, vm("a")).holders is None


def test_holders_of_copies_serve_again_only_while_all_stages_are_there() -> None:
    members = (
        Holder(rank=0, stage=0, vm_id="a", held_at=NOW - 20.0, stages=(0, 2)),
        Holder(rank=2, stage=2, vm_id="c", held_at=NOW - 20.0, stages=(1, 2)),
    )
    again = replace(VAIN, holders=Holders(generation=1, members=members))
    assert ranks(start_of(again, vm("a"), vm("c"))) == [0, 2]
    there = tuple(Device(name, 0) for name in "a")
    assert start_of(again, vm("a"), proposal=proposal(there)).holders is None


def test_only_vms_that_take_part_count() -> None:
    vms = [vm("a"), vm("c"), vm("x")]
    assert start_of(LAST, *vms).holders is None, "rank 3, on VM d, holds the second stage"
    there = tuple(Device(name, 0) for name in "ac")
    assert start_of(LAST, *WITHOUT_B, proposal=proposal(there)).holders is None


def test_a_vm_that_is_not_ready_has_no_holders() -> None:
    four = [vm("a"), vm("c"), vm("d", state=VmState.SUSPECT)]
    there = tuple(Device(name, 0) for name in "acd")
    assert start_of(LAST, *four, proposal=proposal(there)).holders is None


def test_state_is_not_held_for_ever() -> None:
    late = RULES.survivors_kept_s - 0.1
    assert ranks(start_of(LAST, *WITHOUT_B, now=NOW + late - 0.1)) == [0, 2, 3]
    assert start_of(LAST, *WITHOUT_B, now=NOW + late).holders is None


@pytest.mark.parametrize("cause", list(EndCause))
def test_only_after_ends_that_leave_the_processes_sound(cause: EndCause) -> None:
    start = start_of(replace(LAST, end_cause=cause), *WITHOUT_B)
    assert (start.holders is not None) is keeps_state(cause)


def test_a_job_that_had_left_its_vms_has_no_holders() -> None:
    assert start_of(LAST, *WITHOUT_B, state=JobState.QUEUED).holders is None


def test_a_calibration_neither_has_nor_needs_holders() -> None:
    calibrated = ended(holds(0, "a"), kind=GenerationKind.CALIBRATION)
    assert start_of(calibrated, *FOUR).holders is None
    assert start_of(LAST, *FOUR, profiled_at=None).holders is None


# ---------------------------------------------------------------- the wait


def test_it_waits_for_reports_that_may_complete_the_stages_but_not_for_long() -> None:
    last = ended(holds(0, "a"), worker(1, "b", ExitCause.VM_GONE), holds(2, "c"), worker(3, "d"))
    waiting = decide(view(last, WITHOUT_B), *WITHOUT_B, now=NOW + 1.0)
    assert not waiting.actions
    assert "waiting for workers that may hold its state" in waiting.reason
    assert waiting.claims == {Device(name, 0) for name in "acd"}
    assert not start_of(last, *WITHOUT_B, now=NOW + RULES.survivors_wait_s).holders


def test_it_does_not_wait_for_reports_that_change_nothing() -> None:
    spare = ended(holds(0, "a"), holds(1, "b"), worker(2, "c"), worker(3, "d"))
    assert ranks(start_of(spare, *FOUR)) == [0, 1]
    elsewhere = ended(holds(0, "a"), worker(1, "b", ExitCause.VM_GONE), holds(2, "c"), worker(3, "d"))
    there = tuple(Device(name, 0) for name in "ac")
    assert start_of(elsewhere, *WITHOUT_B, proposal=proposal(there)).holders is None
    gone = worker(2, "c", ExitCause.PEER_LOST)
    assert start_of(ended(holds(0, "a"), worker(1, "b", ExitCause.VM_GONE), gone, worker(3, "d")), *WITHOUT_B)


def test_processes_that_only_give_never_go_on_in_place() -> None:
    last = replace(LAST, workers=tuple(replace(one, gives_only=False) for one in LAST.workers))
    held = frozenset(one.device for one in last.workers if one.held_step is not None)
    (start,) = decide(view(last, WITHOUT_B, survivors=held, has_fixed_stages=True), *WITHOUT_B).actions
    assert isinstance(start, StartGeneration)
    assert (start.in_place, start.holders) == (True, None)
    assert ranks(start_of(LAST, *WITHOUT_B, survivors=held)) == [0, 2, 3]


# ---------------------------------------------------------------- one after another


@pytest.mark.parametrize(
    ("cause", "first_try", "are_asked_again"),
    [
        (EndCause.VM_LOST, True, True),
        (EndCause.VM_LOST, False, True),
        (EndCause.WORKER_FAILED, True, True),
        (EndCause.WORKER_FAILED, False, False),
        (EndCause.HANG, True, False),
    ],
)
def test_holders_of_a_generation_that_came_to_nothing_are_asked_again(
    cause: EndCause, first_try: bool, are_asked_again: bool
) -> None:
    last = replace(VAIN, end_cause=cause, number=2 if first_try else 3)
    assert start_of(last, *FOUR).holders == (TAKEN if are_asked_again else None)


def test_holders_are_not_asked_again_when_one_that_is_needed_is_gone_or_a_step_is_done() -> None:
    assert start_of(VAIN, vm("c"), vm("d")).holders is None
    assert start_of(VAIN, *FOUR, now=NOW + RULES.survivors_kept_s - 20.0).holders is None
    assert start_of(replace(VAIN, last_step=8), *FOUR).holders is None
    both = replace(TAKEN, members=(*TAKEN.members, replace(TAKEN.members[0], rank=1, vm_id="c")))
    assert ranks(start_of(replace(VAIN, holders=both), vm("c"), vm("d"))) == [1]


def test_state_with_which_a_generation_failed_is_not_tried_for_ever() -> None:
    own = ended(holds(0, "a"), plan=replace(PLAN, p=1, d=1), last_step=None, holders=TAKEN)
    lost = start_of(own, *FOUR)
    assert lost.holders is not None
    assert lost.holders.generation == own.number, "its own processes hold the newest state"
    assert start_of(replace(own, end_cause=EndCause.WORKER_FAILED), *FOUR).holders is None
    assert start_of(replace(own, end_cause=EndCause.WORKER_FAILED, holders=None), *FOUR).holders is not None


# ---------------------------------------------------------------- planned stops


def test_a_planned_stop_saves_where_a_stage_would_be_held_by_no_vm_that_stays() -> None:
    running = generation(*(worker(rank, name) for rank, name in enumerate("abcd")), plan=PLAN)

    def mode(names: str) -> StopMode:
        return choose_planned_stop(running, [Device(name, 0) for name in names])

    assert mode("abcdx") is mode("bcx") is mode("ab") is StopMode.HOLD_FIRST
    assert mode("acx") is mode("x") is StopMode.SAVE_FIRST


def left_in_memory(rank: int, vm_id: str, cause: ExitCause, held_s: float = 0.1) -> WorkerView:
    return replace(holds(rank, vm_id, held_s=held_s), cause=cause)


def test_the_rank_that_failed_gives_what_it_has_left() -> None:
    failed = ended(
        left_in_memory(0, "a", ExitCause.SCRIPT_FAILED),
        holds(1, "b"),
        plan=replace(PLAN, d=1),
        end_cause=EndCause.SCRIPT_FAILED,
    )
    there = (Device("a", 0), Device("b", 0))
    assert ranks(start_of(failed, vm("a"), vm("b"), proposal=proposal(there))) == [0, 1]


@pytest.mark.parametrize(
    ("cause", "held_s", "are_asked"),
    [
        (EndCause.SCRIPT_FAILED, RULES.memory_kept_s - 1.0, True),
        (EndCause.SCRIPT_FAILED, RULES.memory_kept_s + 1.0, False),
        (EndCause.SHRUNK, 1.0, False),
    ],
)
def test_a_job_that_is_retried_takes_what_its_workers_have_left(
    cause: EndCause, held_s: float, *, are_asked: bool
) -> None:
    failed = ended(
        left_in_memory(0, "a", ExitCause.SCRIPT_FAILED, held_s),
        left_in_memory(1, "b", ExitCause.SCRIPT_FAILED, held_s),
        plan=replace(PLAN, d=1),
        end_cause=cause,
        ended_at=NOW - held_s,
    )
    there = (Device("a", 0), Device("b", 0))
    start = start_of(failed, vm("a"), vm("b"), proposal=proposal(there), state=JobState.QUEUED)
    assert ranks(start) == ([0, 1] if are_asked else [])


def agent_ended(waited_s: float, *others: WorkerView) -> GenerationView:
    return ended(
        left_in_memory(0, "a", ExitCause.AGENT_ENDED),
        *others,
        plan=replace(PLAN, d=(1 + len(others)) // 2),
        end_cause=EndCause.AGENT_ENDED,
        end_reason="the agent of VM a has ended",
        ended_at=NOW - waited_s,
    )


def test_a_job_waits_for_an_agent_whose_vm_has_the_only_state_of_a_stage() -> None:
    away, there = replace(vm("a"), connected=False), (Device("b", 0),)
    waiting = agent_ended(5.0, holds(1, "b"))
    decision = decide(view(waiting, (away, vm("b"))), away, vm("b"))
    assert decision.reason == (
        "the agent of VM a has ended: waiting for the agent of VM a to start again, whose memory has its state"
    )
    assert decision.actions == ()
    assert ranks(start_of(waiting, vm("a"), vm("b"))) == [0, 1], "it is back"
    late = agent_ended(RULES.agent_returns_s + 1.0, holds(1, "b"))
    assert start_of(late, away, vm("b"), proposal=proposal(there)).holders is None


def test_it_waits_for_the_agent_that_is_replaced_next_too() -> None:
    """The rank there left with its peer's agent. Its own agent has ended since."""
    away, waiting = replace(vm("b"), connected=False), agent_ended(5.0, holds(1, "b"))
    decision = decide(view(waiting, (vm("a"), away)), vm("a"), away)
    assert decision.reason.endswith("waiting for the agent of VM b to start again, whose memory has its state")
    alone = proposal((Device("a", 0),))
    assert start_of(waiting, vm("a"), proposal=alone).holders is None, "that VM is gone"
    cordoned = replace(vm("b"), cordoned=True)
    assert start_of(waiting, vm("a"), cordoned, proposal=alone).number, "its agent is there, and is not waited for"


def test_a_job_does_not_wait_for_an_agent_if_others_have_all_stages() -> None:
    away = replace(vm("a"), connected=False)
    others = (holds(1, "b"), holds(2, "c"), holds(3, "d"))
    assert ranks(start_of(agent_ended(5.0, *others), away, vm("b"), vm("c"), vm("d"))) == [1, 2, 3]


COPIED = {"plan": ONE_EACH, "keepers": (1, 2, 0)}
"""One replica; rank 1 keeps a copy of the first stage, rank 2 of the second, rank 0 of the third."""


@pytest.mark.parametrize(
    "survivors",
    [
        (worker(0, "a"), worker(2, "c")),
        (keeps(0, "a", 7, (0, 6), (2, 6)), worker(2, "c")),
        (worker(0, "a"), keeps(2, "c", 7, (1, 6), (2, 6))),
    ],
)
def test_it_waits_for_reports_of_copies(survivors: tuple[WorkerView, WorkerView]) -> None:
    """The manager may see that a VM is gone before the survivors have left their generation."""
    first, last = survivors
    lost = ended(first, worker(1, "b", ExitCause.VM_GONE), last, **COPIED)
    waiting = decide(view(lost, (vm("a"), vm("c"))), vm("a"), vm("c"), now=NOW + 1.0)
    assert not waiting.actions
    assert "waiting for workers that may hold its state" in waiting.reason


def test_it_does_not_wait_for_copies_that_nobody_keeps() -> None:
    gone = worker(1, "b", ExitCause.VM_GONE)
    for lost in (
        ended(worker(0, "a"), gone, worker(2, "c"), plan=ONE_EACH),
        ended(worker(0, "a"), gone, worker(2, "c", ExitCause.VM_GONE), **COPIED),
        ended(keeps(0, "a", 7, (0, 6), (2, 6)), gone, keeps(2, "c", 7), **COPIED),
    ):
        assert start_of(lost, vm("a"), vm("c"))


def test_it_waits_for_a_newer_step_than_that_of_copies() -> None:
    lost = ended(
        keeps(0, "a", 7, (0, 5), (1, 5)),
        worker(1, "b"),
        holds(2, "c", 7),
        worker(3, "d", ExitCause.VM_GONE),
        keepers=(1, 0),
    )
    there = tuple(one for one in FOUR if one.id != "d")
    waiting = decide(view(lost, there), *there, now=NOW + 1.0)
    assert not waiting.actions
    assert ranks(start_of(lost, *there, now=NOW + RULES.survivors_wait_s)) == [0]
