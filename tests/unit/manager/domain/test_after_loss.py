"""Which way a job goes on after a loss in the middle of a long step, and what survivors have of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from decision_views import NOW, RULES, decide, generation, job, vm, worker
from varuna_manager.domain.actions import StartGeneration
from varuna_manager.domain.after_loss import Way, choose_way_on, predict_kept_examples
from varuna_manager.domain.observed import (
    GenerationView,
    Holder,
    Holders,
    JobView,
    KeptCopy,
    Proposal,
    StopView,
    WorkerView,
)
from varuna_manager.domain.other_stages import find_movers, find_unmoved
from varuna_manager.domain.reshaping import is_unmoved, may_gain_elsewhere, may_reshape
from varuna_manager.domain.states import EndCause, ExitCause, GenerationState, StopMode
from varuna_planner.liveput.morph_cost import MARKS_S, PRIOR_FIXED_S, MorphKind, MovingTime, StateMoves
from varuna_proto.plan import Device, Plan

BATCH, STEP_S = 1000, 100.0


def plan(p: int, d: int, micro_batch: int = 1, step_s: float = STEP_S) -> Plan:
    return Plan(
        p=p,
        d=d,
        micro_batch=micro_batch,
        global_batch=BATCH,
        predicted_minibatch_s=step_s,
        examples_per_s=BATCH / step_s,
    )


def survivor(rank: int, vm_id: str) -> WorkerView:
    return replace(worker(rank, vm_id, ExitCause.PEER_LOST, held_step=7), stopped_at=NOW)


def lost(rank: int, vm_id: str) -> WorkerView:
    return replace(worker(rank, vm_id, ExitCause.VM_GONE), stopped_at=NOW - 3.0)


def hit(p: int, d: int, gone: str, **changes: object) -> GenerationView:
    """Ranks a, b, c, ...; those in `gone` are lost 80 s (less half the time between marks) after a step's end."""
    names = "abcdefgh"[: p * d]
    workers = [lost(rank, name) if name in gone else survivor(rank, name) for rank, name in enumerate(names)]
    view = generation(
        *workers,
        state=GenerationState.ENDED,
        plan=plan(p, d),
        ended_at=NOW,
        end_cause=EndCause.VM_LOST,
        end_reason="VMs are lost",
        last_step=7,
    )
    return replace(view, stepped_at=NOW - 3.0 - 80.0 - MARKS_S / 2, **changes)


def after(last: GenerationView, spare: str = "", **changes: object) -> JobView:
    there = [one.device for one in last.workers if one.held_step is not None]
    free = (*there, *(Device(name, 0) for name in spare))
    return replace(job(last, devices=free, survivors=frozenset(there)), **{"copies_shares": True, **changes})


def proposal(made: Plan, names: str) -> Proposal:
    return Proposal(plan=made, placement=tuple(Device(name, 0) for name in names))


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("d", "gone", "marks", "kept"),
    [
        (2, "b", False, 500),
        (2, "b", True, 500 + 400),  # the other replica has the copies of the lost one's newest marks
        (2, "bc", False, 0),
        (2, "bc", True, 400 + 400),
        (2, "bd", True, 0),  # a stage has no survivor
        (3, "a", True, 2000 / 3 + 800 / 3),
        (3, "ac", True, 1000 / 3 + 800 / 3),  # of the first replica, rank c kept stage 0; e keeps that of c
        (1, "b", True, 0),
    ],
)
def test_survivors_have_whole_shares_and_the_marks_of_others(d: int, gone: str, marks: bool, kept: float) -> None:
    last = hit(2, d, gone)
    assert predict_kept_examples(after(last, copies_shares=marks), last) == pytest.approx(kept)


KEEPERS = (1, 2, 3, 0)


def hit_alone(gone: str, step: int = 7, **changes: object) -> GenerationView:
    """1 x 4, whose ranks keep copies of one another's states of that step."""
    last = hit(4, 1, gone, keepers=KEEPERS, **changes)
    kept = {keeper: of for of, keeper in enumerate(KEEPERS)}
    workers = [
        replace(one, held_copies=(KeptCopy(one.rank, step), KeptCopy(kept[one.rank], step)))
        if one.held_step is not None
        else one
        for one in last.workers
    ]
    return replace(last, workers=tuple(workers))


@pytest.mark.parametrize(
    ("gone", "marks", "kept"),
    [("b", True, 800), ("b", False, 0), ("bd", True, 800), ("bc", True, 0), ("cb", True, 0), ("", True, 800)],
)
def test_with_one_replica_marks_are_where_copies_are(gone: str, marks: bool, kept: float) -> None:
    """With `bc` a rank is lost together with the one that keeps its copies."""
    last = hit_alone(gone)
    whole = 0.0 if gone else BATCH
    assert predict_kept_examples(after(last, copies_shares=marks), last) == pytest.approx(max(kept, whole))


def test_what_a_generation_began_with_counts_before_its_first_step() -> None:
    last = hit(2, 2, "bc", last_step=None, in_place=True, micro_batches_left=600)
    last = replace(last, stepped_at=NOW - 3.0 - 30.0 - MARKS_S / 2)
    assert predict_kept_examples(after(last), last) == pytest.approx(700)
    done = replace(last, stepped_at=NOW - 200.0)
    assert predict_kept_examples(after(done), done) == pytest.approx(BATCH), "never more than the step"
    assert predict_kept_examples(after(replace(last, last_step=8)), replace(last, last_step=8)) == pytest.approx(300)


@pytest.mark.parametrize(("gone", "kept"), [("", 10 * (80 + MARKS_S / 2 + 3)), ("b", 2000 / 3)])
def test_all_that_was_done_counts_where_all_left_in_the_middle_of_the_step(gone: str, kept: float) -> None:
    """With the replica of a VM that had notice: others have its sums, unless it went before it had left."""
    last = hit(2, 3, gone)
    stop = StopView(mode=StopMode.HOLD_WITHIN_STEP, cause=EndCause.NOTICE, reason="notice", requested_at=NOW - 5)
    workers = tuple(
        replace(one, cause=ExitCause.GENERATION_ENDED) if one.held_step is not None else one for one in last.workers
    )
    last = replace(last, workers=workers, stop=stop, end_cause=EndCause.NOTICE)
    assert predict_kept_examples(after(last, copies_shares=False), last) == pytest.approx(kept)
    assert may_gain_elsewhere(last), "12 s of the step are left, or a third of it"
    soon_over = replace(last, stepped_at=last.stepped_at - 5.0)
    assert may_gain_elsewhere(soon_over) is bool(gone)


def test_short_steps_have_no_marks() -> None:
    last = hit(2, 2, "bc")
    assert last.plan is not None
    last = replace(last, plan=replace(last.plan, predicted_minibatch_s=MARKS_S - 1))
    assert predict_kept_examples(after(last), last) == 0


# ---------------------------------------------------------------- the way on


def start_of(current: JobView, names: str) -> StartGeneration:
    (start,) = decide(current, *(vm(name) for name in names)).actions
    assert isinstance(start, StartGeneration)
    return start


def test_survivors_take_the_shape_that_keeps_the_step_before_the_best_one() -> None:
    """Two replicas are hit after 80 of 100 s. With a VM that has no process, another micro-batch would be best."""
    last = hit(2, 3, "bc")
    best = proposal(plan(1, 5, micro_batch=2, step_s=90.0), "adefx")
    keeping = proposal(plan(4, 1, step_s=130.0), "adef")
    current = after(last, "x", proposal=replace(best, keeping=keeping))
    start = start_of(current, "adefx")
    assert (start.in_place, start.plan) == (True, keeping.plan)
    assert [device.vm_id for device in start.placement] == ["a", "d", "e", "f"]
    assert start.holders is not None
    assert "4×1 of micro-batch 1 " in start.reason
    assert "% of the step kept" in start.reason
    stays = start_of(replace(current, proposal=best), "adefx")
    assert (stays.in_place, stays.plan.p, stays.plan.d) == (True, 2, 2), "without such an answer"
    fixed = start_of(replace(current, has_fixed_stages=True), "adefx")
    assert (fixed.in_place, fixed.plan.p) == (True, 2), "processes that cannot take other stages"
    many = start_of(replace(current, min_gpus=5), "adefx")
    assert many.plan == best.plan, "the job needs more than the survivors"


@pytest.mark.parametrize(("micro_batch", "way"), [(2, Way.CHANGE), (8, Way.CHANGE), (6, Way.STAY)])
def test_the_best_shape_keeps_the_step_if_one_micro_batch_is_a_multiple_of_the_other(
    micro_batch: int, way: Way
) -> None:
    """Four VMs are left of 2 x 3, whose micro-batches have four examples."""
    last = hit(2, 3, "bc")
    assert last.plan is not None
    last = replace(last, plan=replace(last.plan, micro_batch=4))
    best = proposal(plan(4, 1, micro_batch=micro_batch, step_s=130.0), "adef")
    current = after(last, proposal=best)
    found = choose_way_on(NOW, current, {name: vm(name) for name in "adef"}, RULES)
    assert found.way is way


def test_a_step_that_has_just_begun_is_given_up_for_the_best_shape() -> None:
    last = replace(hit(2, 3, "bc"), stepped_at=NOW - 4.0)
    last = replace(last, workers=tuple(replace(one, rank=one.rank) for one in last.workers))
    best = proposal(plan(1, 5, micro_batch=2, step_s=50.0), "adefx")
    keeping = proposal(plan(4, 1, step_s=400.0), "adef")
    current = after(last, "x", proposal=replace(best, keeping=keeping))
    vms = {name: vm(name) for name in "adefx"}
    assert choose_way_on(NOW, current, vms, RULES).way is Way.CHANGE
    assert start_of(current, "adefx").plan == best.plan


def test_survivors_of_one_replica_take_the_stage_of_which_they_have_a_copy() -> None:
    last = hit_alone("b")
    best = proposal(plan(2, 2, micro_batch=2, step_s=90.0), "acdx")
    keeping = proposal(plan(3, 1, step_s=130.0), "acd")
    current = after(last, "x", proposal=replace(best, keeping=keeping))
    start = start_of(current, "acdx")
    assert (start.in_place, start.plan) == (True, keeping.plan)
    assert start.holders is not None
    assert [sorted(holder.held_stages) for holder in start.holders.members] == [[0, 3], [1, 2], [2, 3]]
    assert "80 % of the step kept" in start.reason
    begun = replace(last, stepped_at=NOW - 4.0)
    keeps_little = proposal(plan(3, 1, step_s=400.0), "acd")
    start = start_of(after(begun, "x", proposal=replace(best, keeping=keeps_little)), "acdx")
    assert (start.plan, start.in_place) == (best.plan, False), "new processes, with the copies"
    assert start.holders is not None


def test_survivors_of_one_replica_take_the_best_shape_if_it_is_theirs() -> None:
    last, best = hit_alone("b"), proposal(plan(3, 1), "acd")
    start = start_of(after(last, proposal=replace(best, keeping=best)), "acd")
    assert (start.in_place, start.plan) == (True, best.plan)
    fixed = start_of(after(last, proposal=best, has_fixed_stages=True), "acd")
    assert (fixed.in_place, fixed.holders is not None) == (False, True)


def test_survivors_of_one_replica_go_on_together_where_the_best_shape_lacks_a_copy() -> None:
    """The best one has no place for rank c, which keeps the lost stage."""
    last = hit_alone("b")
    best, keeping = proposal(plan(1, 2, micro_batch=2, step_s=50.0), "ad"), proposal(plan(3, 1, step_s=130.0), "acd")
    start = start_of(after(last, proposal=replace(best, keeping=keeping)), "acd")
    assert (start.in_place, start.plan) == (True, keeping.plan)
    assert start.reason.endswith("; only all of them together have the whole state")


@pytest.mark.parametrize(("gone", "step"), [("bc", 7), ("b", 6)])
def test_one_replica_needs_a_copy_of_the_step_that_the_others_hold(gone: str, step: int) -> None:
    last = hit_alone(gone, step)
    there = "".join(name for name in "acd" if name not in gone)
    best = proposal(plan(len(there), 1), there)
    assert find_movers(NOW, after(last), last, best, RULES) is None
    start = start_of(after(last, proposal=replace(best, keeping=best)), there)
    assert (start.in_place, start.holders is not None) == (False, step == 6)


def test_one_replica_waits_for_a_process_whose_stage_another_one_has_a_copy_of() -> None:
    last = hit_alone("b")
    late = replace(last, workers=tuple(worker(3, "d") if one.rank == 3 else one for one in last.workers))
    two = proposal(plan(2, 1), "ac")
    copies = {0: (3, 0), 2: (1, 2)}
    late = replace(
        late,
        workers=tuple(
            replace(one, held_copies=tuple(KeptCopy(of, 7) for of in copies[one.rank])) if one.rank in copies else one
            for one in late.workers
        ),
    )
    current = after(late, proposal=replace(two, keeping=two))
    waits = decide(current, *(vm(name) for name in "acd"))
    assert (waits.actions, waits.reason) == ((), "VMs are lost: waiting for workers that may take other stages")
    (start,) = decide(current, *(vm(name) for name in "acd"), now=NOW + RULES.survivors_wait_s).actions
    assert isinstance(start, StartGeneration)
    assert (start.in_place, start.plan.p) == (True, 2)


def test_a_move_waits_for_a_process_that_has_not_said_yet_what_it_holds() -> None:
    """Of 2 x 2 the job needs the three that are left. Two of them have the whole state; the third is about to say."""
    last = hit(2, 2, "d")
    late = replace(last, workers=tuple(worker(2, "c") if one.rank == 2 else one for one in last.workers))
    three = proposal(plan(3, 1), "abc")
    current = replace(after(late, "c", proposal=three), min_gpus=3)
    waits = decide(current, *(vm(name) for name in "abc"))
    assert not waits.actions
    assert waits.reason == "VMs are lost: waiting for workers that may take other stages"
    gave_up = decide(current, *(vm(name) for name in "abc"), now=NOW + RULES.survivors_wait_s)
    (start,) = gave_up.actions
    assert isinstance(start, StartGeneration)
    assert (start.in_place, start.holders is not None) == (False, True)
    start = start_of(replace(after(last, proposal=three), min_gpus=3), "abc")
    assert (start.in_place, start.plan.p) == (True, 3)


# ---------------------------------------------------------------- another loss before the first step


def moved(**changes: object) -> GenerationView:
    """1 x 4 after a move; rank b is lost."""
    members = tuple(Holder(rank=rank, stage=rank % 2, vm_id=name, held_at=NOW) for rank, name in enumerate("abcd"))
    holders = Holders(generation=1, members=members)
    return hit(1, 4, "b", last_step=None, in_place=True, holders=holders, **changes)


def test_processes_that_have_moved_go_on_with_their_new_stages() -> None:
    ready = moved(resumed_step=7)
    assert not is_unmoved(ready)
    assert may_reshape(ready)
    there = proposal(plan(3, 1), "acd")
    assert find_movers(NOW, after(ready), ready, there, RULES) is not None, "and may move again"
    failed = replace(ready, end_cause=EndCause.WORKER_FAILED)
    assert find_movers(NOW, after(failed), failed, there, RULES) is None, "or it would fail for ever"


def test_processes_that_could_not_move_give_their_copies() -> None:
    """1 x 3 after 1 x 4 had lost a stage. The process on VM c has the copy of that."""
    stages = {"a": (0, 3), "c": (1, 2), "d": (2, 3)}
    members = tuple(
        Holder(rank=rank, stage=own, vm_id=name, held_at=0.0, stages=stages[name])
        for rank, (name, own) in enumerate({"a": 0, "c": 2, "d": 3}.items())
    )
    workers = [replace(survivor(rank, name), gives_only=True) for rank, name in enumerate(stages)]
    ended = replace(
        hit(3, 1, "", last_step=None, in_place=True, holders=Holders(generation=1, members=members)),
        workers=tuple(workers),
    )
    found = find_unmoved(ended, lambda _: True)
    assert found is not None
    assert [(one.held_at, one.stages) for one in found.members] == [(NOW, held) for held in stages.values()]
    assert find_unmoved(ended, lambda holder: holder.vm_id != "d") is not None, "others have its stages, too"
    assert find_unmoved(ended, lambda holder: holder.vm_id != "c") is None


def test_processes_may_not_have_moved_if_nobody_has_begun_or_one_says_so() -> None:
    assert is_unmoved(moved())
    ready = moved(resumed_step=7)
    half = replace(ready, workers=tuple(replace(one, gives_only=one.rank == 3) for one in ready.workers))
    assert is_unmoved(half)
    assert not may_reshape(half)
    assert find_movers(NOW, after(half), half, proposal(plan(3, 1), "acd"), RULES) is None


@pytest.mark.parametrize(
    ("p", "d", "copies", "late_s", "pause_s"),
    [
        (3, 1, False, 0.0, 12.0),
        (3, 1, False, 5.0, 7.0),
        (3, 1, False, 8.0, 6.0),
        (1, 3, True, 5.0, 7.0),
        (3, 1, True, 5.0, 12.0),  # one replica begins at once to copy its stages
    ],
)
def test_what_no_pass_reads_comes_while_the_rest_of_the_step_trains(
    p: int, d: int, copies: bool, late_s: float, pause_s: float
) -> None:
    """The rest takes 10 s. The state moves in 12 s, and the sums of the step in a third of that."""
    last = hit(2, 2, "b", keepers=(2, 3) if copies else ())
    best = replace(proposal(plan(p, d), "acd"), moves=StateMoves(40.0, MovingTime(12.0, late_s)))
    current = after(last, proposal=best)
    found = choose_way_on(NOW, current, {name: vm(name) for name in "acd"}, RULES)
    said = re.search(rf"over (\d+) s .*?{p}×{d} of micro-batch 1\D* ([\d,]+)", found.reason)
    assert said is not None
    life_s, examples = (float(one.replace(",", "")) for one in said.groups())
    kept = predict_kept_examples(current, last)
    assert examples == pytest.approx(kept + 10 * (life_s - PRIOR_FIXED_S[MorphKind.IN_PLACE] - pause_s), abs=1)
