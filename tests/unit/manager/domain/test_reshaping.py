"""Whether a job goes on with the survivors of its last generation, in which shape, and when it waits for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, RULES, decide, decide_when_prepared, generation, job, kinds, proposal, vm, worker
from varuna_manager.domain.actions import FinishJob, RequeueJob, StartGeneration, StopGeneration
from varuna_manager.domain.job_decision import wants_plan
from varuna_manager.domain.observed import GenerationView, JobView, Proposal, VmView, WorkerView
from varuna_manager.domain.reshaping import count_kept_replicas, keeps_state, may_gain_elsewhere, plan_reshape
from varuna_manager.domain.states import EndCause, ExitCause, GenerationState, JobState, StopMode, VmState
from varuna_planner.schedule.policies import Policy, most_in_flight
from varuna_proto.plan import Device, Plan

NAMES = "abcdefgh"


def plan(p: int, d: int, **changes: object) -> Plan:
    made = Plan(p=p, d=d, micro_batch=1, global_batch=16, predicted_minibatch_s=1.0, examples_per_s=16.0)
    return replace(made, **changes)


def survivor(rank: int, vm_id: str, step: int = 7) -> WorkerView:
    return worker(rank, vm_id, ExitCause.PEER_LOST, held_step=step)


def ended(p: int, d: int, *workers: WorkerView, **changes: object) -> GenerationView:
    view = generation(
        *workers,
        state=GenerationState.ENDED,
        plan=plan(p, d),
        ended_at=NOW,
        end_cause=EndCause.VM_LOST,
        end_reason="VM b is lost",
        last_step=7,
    )
    return replace(view, **changes)


def view(last: GenerationView, vms: list[VmView], **changes: object) -> JobView:
    free = tuple(Device(one.id, 0) for one in vms if one.usable and not one.quarantined)
    held = frozenset(one.device for one in last.workers if one.held_step is not None and one.device in free)
    return replace(job(last, devices=free, survivors=held), **changes)


def lost(rank: int, vm_id: str) -> WorkerView:
    return worker(rank, vm_id, ExitCause.VM_GONE)


# ---------------------------------------------------------------- the plan


@st.composite
def ends_of_generations(draw: st.DrawFn) -> tuple[Plan, list[WorkerView], frozenset[Device], int | None]:
    p, d = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    steps = draw(st.lists(st.sampled_from([None, 7, 7, 7, 8]), min_size=p * d, max_size=p * d))
    workers = [
        worker(rank, f"vm{rank}", ExitCause.PEER_LOST if step else None, held_step=step)
        for rank, step in enumerate(steps)
    ]
    usable = frozenset(one.device for one in workers if draw(st.booleans()) or draw(st.booleans()))
    return plan(p, d), workers, usable, draw(st.none() | st.integers(0, p * d))


@given(ends_of_generations(), st.randoms(use_true_random=False))
def test_every_survivor_keeps_its_stage_and_as_many_replicas_go_on_as_all_stages_have(
    given_: tuple[Plan, list[WorkerView], frozenset[Device], int | None], chance: random.Random
) -> None:
    before, workers, usable, most = given_
    made = plan_reshape(before, workers, usable, most)
    p = before.p
    by_device = {one.device: one for one in workers}
    usable_steps = {one.held_step for one in workers if one.held_step is not None and one.device in usable}
    # All that there are hold the newest step, or the one before, and complete the newest with the totals of the others.
    counts = [sum(one.held_step is not None and one.device in usable for one in workers[s::p]) for s in range(p)]
    expected = min(*counts, before.d, before.d if most is None else most // p)
    if expected <= 0:
        assert made is None
        return
    assert made is not None
    assert (made.step, made.plan.p, made.plan.d) == (max(usable_steps), p, expected)
    assert len(set(made.placement)) == len(made.placement) == p * made.plan.d
    for rank, device in enumerate(made.placement):
        assert by_device[device].rank % p == rank % p, "its stage is another"
        assert device in usable
    assert made.step in {by_device[device].held_step for device in made.placement}, "nobody knows the totals"
    left = [
        [one for one in workers[at : at + p] if one.held_step and one.device in usable]
        for at in range(0, len(workers), p)
    ]
    # Those that know the totals come first.
    whole = [replica for replica in left if len(replica) == p and made.step in {one.held_step for one in replica}]
    replicas = [tuple(made.placement[at : at + p]) for at in range(0, len(made.placement), p)]
    together = [r for r in replicas if len({by_device[device].rank // p for device in r}) == 1]
    assert len(together) >= min(len(whole), made.plan.d), "complete replicas stay together"
    shuffled = list(workers)
    chance.shuffle(shuffled)
    assert plan_reshape(before, shuffled, usable, most) == made


def test_a_replica_less_leaves_the_rest_as_it_was() -> None:
    before = plan(2, 2, stage_starts=(0, 3), recompute=(True, False), micro_batch=2)
    workers = [survivor(0, "a"), lost(1, "b"), survivor(2, "c"), survivor(3, "d")]
    made = plan_reshape(before, workers, {one.device for one in workers}, None)
    assert made is not None
    assert [device.vm_id for device in made.placement] == ["c", "d"]
    time_s = 1.0 * (8 + 1) / (4 + 1)  # 8 micro-batches a replica instead of 4, through 2 stages
    same = replace(before, d=1, predicted_minibatch_s=time_s, examples_per_s=pytest.approx(16.0 / time_s))
    assert made.plan == replace(same, predicted_minibatch_s=pytest.approx(time_s))


def test_ranks_that_missed_an_agreement_go_on_with_one_that_did_not() -> None:
    """Found by a soak: rank 3 had step 8, the ranks of the first stage step 7, and the job began at its checkpoint."""
    workers = [survivor(0, "a", 7), lost(1, "b"), survivor(2, "c", 7), survivor(3, "d", 8)]
    made = plan_reshape(plan(2, 2), workers, {one.device for one in workers}, None)
    assert made is not None
    assert ([device.vm_id for device in made.placement], made.step) == (["c", "d"], 8)
    other = [survivor(0, "a", 7), survivor(1, "b", 7), lost(2, "c"), survivor(3, "d", 8)]
    made = plan_reshape(plan(2, 2), other, {one.device for one in other}, None)
    assert made is not None
    assert ([device.vm_id for device in made.placement], made.step) == (["a", "d"], 8), "it knows the totals"
    far = [survivor(0, "a", 6), lost(1, "b"), lost(2, "c"), survivor(3, "d", 8)]
    assert plan_reshape(plan(2, 2), far, {one.device for one in far}, None) is None


def test_a_stage_is_taken_from_another_replica_where_its_own_is_lost() -> None:
    workers = [survivor(0, "a"), lost(1, "b"), lost(2, "c"), survivor(3, "d")]
    made = plan_reshape(plan(2, 2), workers, {one.device for one in workers}, None)
    assert made is not None
    assert [device.vm_id for device in made.placement] == ["a", "d"]


def test_survivors_of_a_mixed_plan_share_the_step_by_what_their_replicas_ran() -> None:
    before = plan(2, 3, shares=(8, 5, 3), gpu_types=("A",) * 2 + ("B",) * 2 + ("C",) * 2)
    workers = [survivor(0, "a"), lost(1, "b"), *(survivor(rank, NAMES[rank]) for rank in range(2, 6))]
    made = plan_reshape(before, workers, {one.device for one in workers}, None)
    assert made is not None
    assert [device.vm_id for device in made.placement] == ["c", "d", "e", "f"]
    assert made.plan.shares == (10, 6)
    assert made.plan.gpu_types == ("B", "B", "C", "C")
    assert made.plan.predicted_minibatch_s == pytest.approx((10 + 1) / (8 + 1))


def test_a_replica_made_up_of_two_is_as_slow_as_the_slower() -> None:
    before = plan(2, 2, shares=(12, 4), gpu_types=("A", "A", "B", "B"))
    workers = [survivor(0, "a"), lost(1, "b"), lost(2, "c"), survivor(3, "d")]
    made = plan_reshape(before, workers, {one.device for one in workers}, None)
    assert made is not None
    assert (made.plan.shares, made.plan.gpu_types) == ((16,), ("A", "B"))


@pytest.mark.parametrize(
    "before",
    [
        plan(1, 2, policy="gpipe"),
        plan(4, 2, global_batch=4),  # 2 micro-batches in flight become 4
        plan(4, 2, global_batch=4, policy="1f1b"),
    ],
    ids=["gpipe", "fewer micro-batches than stages", "1f1b"],
)
def test_a_schedule_that_would_keep_more_activations_whatever_its_run_ahead_asks_the_planner(before: Plan) -> None:
    workers = [survivor(rank, f"vm{rank}") for rank in range(before.p)]
    assert plan_reshape(before, workers, {one.device for one in workers}, None) is None
    alone = replace(before, d=1)
    assert plan_reshape(alone, workers, {one.device for one in workers}, None) is not None, "they are as many as before"


def test_a_replica_less_runs_ahead_only_as_far_as_there_is_memory() -> None:
    """The first of 4 stages has room for the 8 micro-batches of its replica, and runs 10 with a replica less."""
    before = plan(4, 8, global_batch=64, run_ahead=7, memory_bytes=(4, 3, 2, 1))
    workers = [survivor(rank, f"vm{rank}") for rank in range(28)]
    made = plan_reshape(before, workers, {one.device for one in workers}, None)
    assert made is not None
    assert (made.plan.d, made.plan.run_ahead, made.plan.memory_bytes) == (7, 4, before.memory_bytes)
    uneven = replace(before, d=2, global_batch=24, shares=(14, 10), run_ahead=8)
    made = plan_reshape(uneven, workers[:4], {one.device for one in workers}, None)
    assert made is not None
    assert (made.plan.shares, made.plan.run_ahead) == ((24,), 8), "14 were more than it ever had in flight"


@given(
    p=st.integers(1, 6),
    d=st.integers(1, 6),
    left=st.integers(1, 6),
    share=st.integers(1, 24),
    run_ahead=st.integers(0, 12),
    policy=st.sampled_from([each for each in Policy if each.executable]),
)
def test_no_stage_in_place_has_more_in_flight_than_its_memory_was_planned_for(
    p: int, d: int, left: int, share: int, run_ahead: int, policy: Policy
) -> None:
    before = plan(p, d, global_batch=share * d, run_ahead=run_ahead, policy=policy.value)
    workers = [survivor(rank, f"vm{rank}") for rank in range(p * min(left, d))]

    def count_in_flight(made: Plan, run_ahead: int) -> list[int]:
        N = -(-made.global_batch // made.d)
        return [most_in_flight(policy.code, stage, p, N, run_ahead) for stage in range(p)]

    def fits(made: Plan, run_ahead: int) -> bool:
        planned = count_in_flight(before, before.run_ahead)
        return all(now <= then for now, then in zip(count_in_flight(made, run_ahead), planned, strict=True))

    made = plan_reshape(before, workers, {one.device for one in workers}, None)
    smaller = replace(before, d=min(left, d))
    if made is None:
        assert not fits(smaller, 0)
        return
    assert made.plan.run_ahead <= run_ahead
    assert fits(made.plan, made.plan.run_ahead)
    assert made.plan.run_ahead == run_ahead or not fits(made.plan, made.plan.run_ahead + 1), "it is the largest"


# ---------------------------------------------------------------- the start


SHARE_S = RULES.share_minibatches * plan(1, 1).predicted_minibatch_s


def start_of(current: JobView, *vms: VmView, now: float = NOW) -> StartGeneration:
    (start,) = decide(current, *vms, now=now).actions
    assert isinstance(start, StartGeneration)
    return start


def test_survivors_go_on_in_place_without_asking_the_planner() -> None:
    vms = [vm("a"), vm("c"), vm("x")]
    last = ended(1, 3, survivor(0, "a"), lost(1, "b"), survivor(2, "c"))
    current = view(last, vms)
    start = start_of(current, *vms)
    assert (start.in_place, start.number, start.plan.p, start.plan.d) == (True, 3, 1, 2)
    assert [device.vm_id for device in start.placement] == ["a", "c"]
    assert "VM b is lost; 2 of its workers go on from step 7" in start.reason


def test_a_job_that_keeps_little_of_its_step_takes_the_better_shape_at_once() -> None:
    """Two replicas of three are hit: one would do what is left of the step, and three VMs could have another shape."""
    last = ended(2, 3, survivor(0, "a"), survivor(1, "b"), lost(2, "x"), survivor(3, "c"), lost(4, "y"), lost(5, "z"))
    assert last.plan is not None
    last = replace(last, plan=replace(last.plan, global_batch=1600, predicted_minibatch_s=100.0))
    assert count_kept_replicas(last.plan, last.workers) == 1
    assert may_gain_elsewhere(last)
    vms = [vm(name) for name in "abc"]
    where = tuple(Device(name, 0) for name in "abc")
    fast = Proposal(plan=plan(3, 1, examples_per_s=14.0), placement=where)
    start = start_of(view(last, vms, proposal=fast), *vms)
    assert (start.in_place, start.plan.p) == (True, 3), "each device has a process, which takes another stage"
    assert start.holders is not None
    moved = replace(view(last, vms, proposal=fast), has_fixed_stages=True)
    start = start_of(moved, *vms)
    assert (start.in_place, start.plan.p) == (False, 3)
    assert start.holders is not None
    assert start.reason.startswith("VM b is lost; over ")
    assert "3×1 of micro-batch 1 gives" in start.reason
    assert "2×1 in place" in start.reason
    assert start.reason.endswith("with 33 % of the step kept")
    assert start_of(view(last, vms), *vms).in_place, "without the planner's answer"
    slow = replace(fast, plan=plan(3, 1, examples_per_s=6.0))
    assert start_of(view(last, vms, proposal=slow), *vms).in_place
    nobody = replace(fast, placement=where[2:])
    assert start_of(view(last, vms, proposal=nobody), *vms).in_place, "a stage would come from the store"


def test_processes_take_another_shape_with_what_they_keep_of_a_long_step() -> None:
    """One replica of three is hit. Either shape keeps two thirds of the step, and five VMs are faster than four."""
    names = "abcde"
    last = ended(2, 3, lost(0, "x"), *(survivor(rank, name) for rank, name in enumerate(names, 1)))
    assert last.plan is not None
    long_steps = replace(last.plan, micro_batch=2, global_batch=1600, predicted_minibatch_s=100.0)
    assert not may_gain_elsewhere(replace(last, plan=replace(long_steps, predicted_minibatch_s=1.0)))
    last = replace(last, plan=long_steps)
    assert may_gain_elsewhere(last)
    vms = [vm(name) for name in names]
    faster = plan(5, 1, examples_per_s=12.0, micro_batch=long_steps.micro_batch)
    given_ = Proposal(plan=faster, placement=tuple(Device(name, 0) for name in names))
    start = start_of(view(last, vms, proposal=given_), *vms)
    assert (start.in_place, start.plan.p, start.plan.d) == (True, 5, 1)
    assert start.holders is not None
    for micro_batch, shape in ((1, (5, 1)), (4, (5, 1)), (3, (2, 2))):
        other = replace(given_, plan=replace(faster, micro_batch=micro_batch))
        start = start_of(view(last, vms, proposal=other), *vms)
        assert (start.in_place, start.plan.p, start.plan.d) == (True, *shape), (
            "nothing is kept with micro-batches of which neither divides the other"
        )


def test_a_job_restarts_where_a_stage_has_no_survivor() -> None:
    vms = [vm("a"), vm("c")]
    last = ended(2, 2, survivor(0, "a"), lost(1, "b"), survivor(2, "c"), lost(3, "d"))
    given_ = proposal((Device("a", 0), Device("c", 0)))
    start = start_of(view(last, vms, proposal=given_), *vms)
    assert (start.in_place, start.plan) == (False, given_.plan)


@pytest.mark.parametrize("changes", [{"survivors": frozenset()}, {"min_gpus": 3}, {"share": 1, "min_gpus": 2}], ids=str)
def test_a_job_restarts_or_waits_where_it_cannot_have_enough_of_its_survivors(changes: dict[str, object]) -> None:
    vms = [vm("a"), vm("c")]
    current = view(ended(1, 3, survivor(0, "a"), lost(1, "b"), survivor(2, "c")), vms, **changes)
    assert not any(isinstance(each, StartGeneration) for each in decide(current, *vms).actions)


def test_a_smaller_share_takes_replicas_away() -> None:
    vms = [vm(name) for name in "abcd"]
    last = ended(2, 2, *(survivor(rank, name) for rank, name in enumerate("abcd")), end_cause=EndCause.SHRUNK)
    start = start_of(view(last, vms, share=3), *vms)
    assert (start.in_place, [device.vm_id for device in start.placement]) == (True, ["a", "b"])


@pytest.mark.parametrize("cause", list(EndCause))
def test_only_after_ends_that_leave_the_processes_sound(cause: EndCause) -> None:
    vms = [vm("a"), vm("c")]
    last = ended(1, 3, survivor(0, "a"), lost(1, "b"), survivor(2, "c"), end_cause=cause)
    given_ = proposal((Device("a", 0), Device("c", 0)))
    start = start_of(view(last, vms, proposal=given_), *vms)
    assert (start.in_place or start.holders is not None) is keeps_state(cause)
    needs_new_processes = cause in (EndCause.SCRIPT_FAILED, EndCause.OUT_OF_MEMORY)
    assert start.in_place is (keeps_state(cause) and not needs_new_processes)


def test_survivors_are_not_counted_on_for_ever() -> None:
    vms = [vm("a"), vm("c")]
    last = ended(1, 3, survivor(0, "a"), lost(1, "b"), survivor(2, "c"))
    current = view(last, vms, proposal=proposal((Device("a", 0), Device("c", 0))))
    assert not start_of(current, *vms, now=NOW + RULES.survivors_kept_s + SHARE_S).in_place


def test_what_ends_a_job_or_makes_it_wait_comes_first() -> None:
    vms = [vm("a"), vm("c")]
    current = view(ended(1, 3, survivor(0, "a"), lost(1, "b"), survivor(2, "c")), vms)
    cancelled = decide(replace(current, state=JobState.CANCELLING), *vms)
    assert kinds(cancelled) == [FinishJob]
    preempted = decide(replace(current, share=0, share_reason="others come first"), *vms)
    assert kinds(preempted) == [RequeueJob]
    assert not decide(replace(current, missing_secret="TOKEN"), *vms).actions


# ---------------------------------------------------------------- the wait


def test_it_waits_for_workers_that_may_survive_but_not_for_long() -> None:
    vms = [vm("a"), vm("c"), vm("d")]
    last = ended(1, 4, survivor(0, "a"), lost(1, "b"), worker(2, "c"), worker(3, "d"))
    current = view(last, vms)
    waiting = decide(current, *vms, now=NOW + 1.0)
    assert not waiting.actions
    assert "waiting for workers that may go on" in waiting.reason
    assert waiting.claims == last.devices
    assert not decide(current, *vms, now=NOW + RULES.survivors_wait_s).actions, "their share takes longer"
    late = start_of(current, *vms, now=NOW + RULES.survivors_wait_s + SHARE_S)
    assert (late.in_place, [device.vm_id for device in late.placement]) == (True, ["a"])
    assert last.plan is not None
    slow = replace(last, mean_step_s=3 * last.plan.predicted_minibatch_s)
    assert not decide(view(slow, vms), *vms, now=NOW + RULES.survivors_wait_s + SHARE_S).actions, "steps take longer"
    late = start_of(view(slow, vms), *vms, now=NOW + RULES.survivors_wait_s + 3 * SHARE_S)
    assert [device.vm_id for device in late.placement] == ["a"]
    slow = replace(last, first_step_after_s=3 * last.plan.predicted_minibatch_s)
    assert not decide(view(slow, vms), *vms, now=NOW + RULES.survivors_wait_s + SHARE_S).actions, "its first step did"
    whole = ended(1, 4, survivor(0, "a"), lost(1, "b"), survivor(2, "c"), survivor(3, "d"))
    assert start_of(view(whole, vms), *vms).plan.d == 3


def test_it_does_not_wait_for_workers_that_change_nothing() -> None:
    vms = [vm("a"), vm("c"), vm("d")]
    last = ended(2, 2, worker(0, "a"), lost(1, "b"), survivor(2, "c"), survivor(3, "d"))
    start = start_of(view(last, vms), *vms)
    assert [device.vm_id for device in start.placement] == ["c", "d"], "rank 0 would be spare"


def test_it_waits_for_the_rest_of_a_complete_replica() -> None:
    """Rank 2 has not finished its share of the step, which counts only if the whole replica goes on."""
    vms = [vm("a"), vm("c"), vm("d")]
    last = ended(2, 2, survivor(0, "a"), lost(1, "b"), worker(2, "c"), survivor(3, "d"))
    assert "waiting for workers that may go on" in decide(view(last, vms), *vms).reason
    late = start_of(view(last, vms), *vms, now=NOW + RULES.survivors_wait_s + SHARE_S)
    assert [device.vm_id for device in late.placement] == ["a", "d"]


def test_it_does_not_wait_where_workers_cannot_stay() -> None:
    """Agents of an earlier version, scripts that cannot be carried."""
    vms = [vm("a"), vm("c"), vm("d")]
    given_ = proposal(tuple(Device(name, 0) for name in "acd"))
    left = worker(0, "a", ExitCause.PEER_LOST)
    last = ended(1, 4, left, lost(1, "b"), worker(2, "c"), worker(3, "d"))
    assert not start_of(view(last, vms, proposal=given_), *vms).in_place


@pytest.mark.parametrize("change", [{"state": VmState.SUSPECT}, {"cordoned": True}, {"quarantined": True}], ids=str)
def test_it_does_not_wait_for_workers_of_vms_that_cannot_be_used(change: dict[str, object]) -> None:
    vms = [vm("a"), vm("c", **change)]
    last = ended(1, 3, survivor(0, "a"), lost(1, "b"), worker(2, "c"))
    assert [device.vm_id for device in start_of(view(last, vms), *vms).placement] == ["a"]


# ---------------------------------------------------------------- one after another


@pytest.mark.parametrize(
    ("cause", "step", "in_place"),
    [
        (EndCause.VM_LOST, None, True),
        (EndCause.LAUNCH_REFUSED, None, True),
        (EndCause.WORKER_FAILED, None, False),
        (EndCause.UNREACHABLE, None, False),
        (EndCause.WORKER_FAILED, 8, True),
    ],
)
def test_a_generation_in_place_that_came_to_nothing_is_followed_by_another_only_if_it_lost_ranks(
    cause: EndCause, step: int | None, in_place: bool
) -> None:
    vms = [vm("a"), vm("c")]
    last = ended(1, 3, survivor(0, "a"), lost(1, "b"), survivor(2, "c"), in_place=True, end_cause=cause, last_step=step)
    current = view(last, vms, proposal=proposal((Device("a", 0), Device("c", 0))))
    assert start_of(current, *vms).in_place is in_place


def test_a_job_in_place_moves_to_a_better_shape_and_holds_its_state() -> None:
    """With spare devices, and with none where another shape of the same size is faster."""
    running = generation(worker(0, "a"), worker(1, "c"), plan=plan(2, 1), in_place=True)
    for names, shape in (("acd", plan(1, 3, examples_per_s=40.0)), ("ac", plan(1, 2, examples_per_s=30.0))):
        found = tuple(Device(name, 0) for name in names)
        vms = {name: vm(name) for name in names}
        current = job(running, devices=found)
        assert wants_plan(current, found, vms)
        offered = Proposal(plan=shape, placement=found, present_examples_per_s=16.0)
        (stop,) = decide_when_prepared(replace(current, proposal=offered), *vms.values()).actions
        assert isinstance(stop, StopGeneration)
        assert (stop.mode, stop.cause) == (StopMode.HOLD_FIRST, EndCause.GROWTH)
        assert not decide_when_prepared(
            replace(current, proposal=replace(offered, present_examples_per_s=39.0)), *vms.values()
        ).actions
    other = replace(running, in_place=False)
    assert not wants_plan(job(other, devices=found), found, vms), "the planner has chosen its shape"
