"""Whether the processes of an ended generation take other stages in place, and what follows where that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, RULES, decide, generation, job, proposal, vm, worker
from varuna_manager.domain.actions import StartGeneration
from varuna_manager.domain.newcomers import NewcomersView, WantedNewcomers
from varuna_manager.domain.observed import GenerationView, Holder, Holders, JobView, Proposal, VmView, WorkerView
from varuna_manager.domain.other_stages import find_movers, find_unmoved
from varuna_manager.domain.states import EndCause, ExitCause, GenerationState
from varuna_proto.plan import Device, Plan

PLAN = Plan(p=2, d=2, micro_batch=1, global_batch=16, predicted_minibatch_s=1.0, examples_per_s=16.0)


def held(rank: int, vm_id: str, step: int = 7, **changes: object) -> WorkerView:
    return worker(rank, vm_id, ExitCause.GENERATION_ENDED, held_step=step, **changes)


def ended(*workers: WorkerView, **changes: object) -> GenerationView:
    view = generation(
        *workers,
        state=GenerationState.ENDED,
        plan=PLAN,
        ended_at=NOW,
        end_cause=EndCause.GROWTH,
        end_reason="a better shape",
        last_step=7,
    )
    return replace(view, **changes)


def planned(devices: tuple[Device, ...], p: int, d: int, examples_per_s: float = 100.0) -> Proposal:
    plan = replace(PLAN, p=p, d=d, examples_per_s=examples_per_s)
    return replace(proposal(devices), plan=plan, placement=devices)


def view(last: GenerationView, vms: list[VmView], p: int, d: int, **changes: object) -> JobView:
    free = tuple(Device(one.id, 0) for one in vms if one.usable)
    survivors = frozenset(one.device for one in last.workers if one.held_step is not None and one.device in free)
    made = replace(job(last, devices=free, survivors=survivors), proposal=planned(free[: p * d], p, d))
    return replace(made, **changes)


def start_of(current: JobView, *vms: VmView) -> StartGeneration:
    (start,) = decide(current, *vms, now=NOW).actions
    assert isinstance(start, StartGeneration)
    return start


THREE = [vm("a"), vm("c"), vm("d")]
AFTER_LOSS = ended(
    held(0, "a"),
    worker(1, "b", ExitCause.VM_GONE),
    held(2, "c"),
    held(3, "d"),
    end_cause=EndCause.VM_LOST,
    end_reason="VM b is lost",
)


def test_a_better_shape_begins_in_the_processes_that_there_are() -> None:
    last = ended(held(0, "a"), held(1, "c"), plan=replace(PLAN, d=1))
    start = start_of(view(last, THREE[:2], 1, 2), *THREE[:2])
    assert (start.in_place, start.plan.p, start.plan.d) == (True, 1, 2)
    assert start.holders is not None
    assert start.holders.generation == start.number
    assert [(one.rank, one.stage, one.vm_id) for one in start.holders.members] == [(0, 0, "a"), (1, 1, "c")]
    assert "2×1 to 1×2" in start.reason


def test_survivors_that_keep_half_of_the_step_keep_their_stages() -> None:
    kept = start_of(view(AFTER_LOSS, THREE, 3, 1), *THREE)
    assert (kept.in_place, kept.plan.p, kept.plan.d, kept.holders) == (True, 2, 1, None)


def test_a_job_that_needs_more_devices_than_its_stages_leave_takes_others_in_place() -> None:
    start = start_of(view(AFTER_LOSS, THREE, 3, 1, min_gpus=3), *THREE)
    assert (start.in_place, start.plan.p) == (True, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"has_fixed_stages": True},
        {"survivors": frozenset({Device("a", 0)})},
        {"generation": ended(held(0, "a"), held(1, "c", gives_only=True), plan=replace(PLAN, d=1))},
        {"generation": ended(held(0, "a"), held(1, "c", 8), plan=replace(PLAN, d=1))},
        {"generation": ended(held(0, "a"), held(1, "c"), plan=replace(PLAN, d=1), end_cause=EndCause.SCRIPT_FAILED)},
        {"generation": ended(held(0, "a"), held(1, "c"), plan=replace(PLAN, d=1), in_place=True, last_step=None)},
        {"proposal": planned((Device("a", 0), Device("x", 0)), 1, 2)},
    ],
    ids=["fixed", "taken", "gives only", "steps", "error", "in vain", "newcomer"],
)
def test_else_new_processes_start(changes: dict[str, object]) -> None:
    last = ended(held(0, "a"), held(1, "c"), plan=replace(PLAN, d=1))
    vms = [vm("a"), vm("c"), vm("x")]
    assert not start_of(view(last, vms, 1, 2, **changes), *vms).in_place


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_movers_have_all_of_the_state(p: int, d: int, data: st.DataObject) -> None:
    """They are found exactly where each device has a process of one step, and each stage of that step is among them."""
    steps = data.draw(st.lists(st.sampled_from([7, 7, 7, 8, None]), min_size=p * d, max_size=p * d))
    workers = [held(rank, f"v{rank}") for rank in range(p * d)]
    workers = [replace(one, held_step=step) for one, step in zip(workers, steps, strict=True)]
    last = ended(*workers, plan=replace(PLAN, p=p, d=d))
    ranks = data.draw(st.permutations(range(p * d)))[: data.draw(st.integers(1, p * d))]
    placement = tuple(workers[rank].device for rank in ranks)
    current = replace(job(last), survivors=frozenset(one.device for one in workers if one.held_step is not None))
    found = find_movers(NOW, current, last, planned(placement, len(placement), 1), RULES)
    is_alike = len({steps[rank] for rank in ranks}) == 1 and steps[ranks[0]] is not None
    assert (found is not None) is (is_alike and {rank % p for rank in ranks} == set(range(p)))
    if found is not None:
        assert [(one.rank, one.stage, one.vm_id) for one in found.members] == [
            (number, rank % p, f"v{rank}") for number, rank in enumerate(ranks)
        ]


MOVERS = Holders(
    generation=2,
    members=tuple(
        Holder(rank=rank, stage=stage, vm_id=name, held_at=NOW - 9.0)
        for rank, (stage, name) in enumerate([(0, "a"), (1, "d"), (0, "c")])
    ),
)


def unmoved(*workers: WorkerView, **changes: object) -> GenerationView:
    """Of 3×1, made of the survivors of 2×2; it has completed no step."""
    made = ended(*workers, plan=replace(PLAN, p=3, d=1), in_place=True, holders=MOVERS, last_step=None)
    return replace(made, end_cause=EndCause.VM_LOST, end_reason="VM c is lost", **changes)


@pytest.mark.parametrize("resumed_step", [None, 7], ids=["while they move", "when all have moved"])
def test_a_second_loss_finds_the_stages_that_there_were(resumed_step: int | None) -> None:
    last = unmoved(held(0, "a"), held(1, "d"), worker(2, "c", ExitCause.VM_GONE), resumed_step=resumed_step)
    vms = [vm("a"), vm("d")]
    start = start_of(view(last, vms, 2, 1), *vms)
    assert not start.in_place
    assert start.holders is not None
    assert start.holders.generation == last.number
    assert [(one.rank, one.stage) for one in start.holders.members] == [(0, 0), (1, 1)]


def test_a_second_loss_that_takes_a_stage_before_leaves_the_new_ones() -> None:
    """Of 1×3 each process has all of the model, and two had the same stage before."""
    lost = worker(1, "d", ExitCause.VM_GONE)
    last = unmoved(held(0, "a"), lost, held(2, "c"), resumed_step=7)
    last = replace(last, plan=replace(PLAN, p=1, d=3))
    vms = [vm("a"), vm("c"), vm("x")]
    current = view(last, vms, 1, 3, min_gpus=3)
    start = start_of(current, *vms)
    assert not start.in_place
    assert start.holders is not None
    assert [(one.rank, one.held_stages) for one in start.holders.members] == [(0, {0}), (2, {0})]


def test_a_second_loss_leaves_what_new_processes_have_taken_and_no_copies() -> None:
    """a, c and d go on from 2×2, with a copy of stage 1 on a, and e takes that with them. Then d is lost."""
    members = [(0, 0, "a", (0, 1)), (2, 0, "c", ()), (3, 1, "d", ())]
    holders = [Holder(rank=rank, stage=own, vm_id=name, held_at=NOW, stages=all_) for rank, own, name, all_ in members]
    there = [held(0, "a"), held(1, "e"), held(2, "c"), worker(3, "d", ExitCause.VM_GONE)]
    last = unmoved(*there, resumed_step=7)
    last = replace(last, plan=PLAN, holders=Holders(generation=2, members=tuple(holders)))
    vms = [vm("a"), vm("c"), vm("e"), vm("x")]
    start = start_of(view(last, vms, 2, 2, min_gpus=4), *vms)
    assert start.holders is not None
    assert [(one.rank, one.held_stages) for one in start.holders.members] == [(0, {0}), (1, {1}), (2, {0})]
    without = replace(last, workers=tuple(one for one in there if one.rank != 1))
    assert find_unmoved(without, lambda holder: True) is None, "the copies are dropped by a move"


def test_an_error_in_the_first_step_of_other_stages_is_no_ones_state() -> None:
    last = unmoved(held(0, "a"), held(1, "d"), held(2, "c"), resumed_step=7)
    last = replace(last, end_cause=EndCause.SCRIPT_FAILED, end_reason="the script failed")
    assert start_of(view(last, THREE, 3, 1), *THREE).holders is None


def test_a_section_that_was_lost_comes_from_the_checkpoint() -> None:
    last = unmoved(held(0, "a"), worker(1, "d", ExitCause.VM_GONE), held(2, "c"))
    vms = [vm("a"), vm("c")]
    assert start_of(view(last, vms, 2, 1), *vms).holders is None


def test_a_refusal_takes_the_job_to_new_processes_with_the_same_state() -> None:
    workers = [held(rank, name, gives_only=True) for rank, name in enumerate("adc")]
    last = unmoved(*workers, number=2)
    last = replace(last, end_cause=EndCause.WORKER_FAILED, end_reason="rank 0 left early")
    start = start_of(view(last, THREE, 3, 1, has_fixed_stages=True), *THREE)
    assert not start.in_place
    assert start.holders is not None
    assert [one.rank for one in start.holders.members] == [0, 1, 2]


def test_after_a_step_the_new_stages_count() -> None:
    last = unmoved(held(0, "a", 8), held(1, "d", 8), held(2, "c", 8))
    assert find_unmoved(replace(last, last_step=8), lambda holder: True) is None


GROWN = [vm("a"), vm("b"), vm("c"), vm("d")]
AFTER_GROWTH = ended(held(0, "a"), held(1, "b"), plan=replace(PLAN, d=1), end_reason="growth")


def newcomers(at: str, number: int = AFTER_GROWTH.number + 1) -> NewcomersView:
    placement = tuple(Device(name, 0) for name in "abcd")
    devices = frozenset(Device(name, 0) for name in at)
    wanted = WantedNewcomers(number=number, plan=PLAN, placement=placement, devices=devices)
    return NewcomersView(wanted=wanted, since=NOW, at_door=devices)


def test_new_processes_join_those_that_there_are() -> None:
    start = start_of(view(AFTER_GROWTH, GROWN, 2, 2, newcomers=newcomers("cd")), *GROWN)
    assert (start.in_place, start.plan.d, [device.vm_id for device in start.placement]) == (True, 2, list("abcd"))
    assert start.holders is not None
    assert [(one.rank, one.stage, one.vm_id) for one in start.holders.members] == [(0, 0, "a"), (1, 1, "b")]
    assert start.reason == "growth; 2 of its workers go on, and 2 new ones join them, 2×1 to 2×2"


@pytest.mark.parametrize(
    "changes",
    [
        {"newcomers": None},
        {"newcomers": newcomers("c")},
        {"newcomers": newcomers("cd", AFTER_GROWTH.number)},
        {"newcomers": newcomers("cd"), "has_fixed_stages": True},
    ],
)
def test_nobody_is_joined_by_processes_that_are_not_there(changes: dict[str, object]) -> None:
    """All are new then, and take the state from the old ones."""
    start = start_of(view(AFTER_GROWTH, GROWN, 2, 2, **changes), *GROWN)
    assert not start.in_place
    assert start.holders is not None
    assert start.holders.generation == AFTER_GROWTH.number


def test_where_joining_has_failed_the_old_processes_give_what_they_have() -> None:
    """The new ones had no state, so they are not asked."""
    start = start_of(view(AFTER_GROWTH, GROWN, 2, 2, newcomers=newcomers("cd")), *GROWN)
    failed = replace(
        AFTER_GROWTH,
        number=start.number,
        plan=start.plan,
        in_place=True,
        holders=start.holders,
        last_step=None,
        end_cause=EndCause.WORKER_FAILED,
        workers=(
            held(0, "a"),
            held(1, "b"),
            worker(2, "c", ExitCause.SCRIPT_FAILED),
            worker(3, "d", ExitCause.PEER_LOST),
        ),
    )
    again = start_of(view(failed, GROWN, 2, 2), *GROWN)
    assert not again.in_place
    assert again.holders is not None
    assert [(one.rank, one.vm_id) for one in again.holders.members] == [(0, "a"), (1, "b")]
