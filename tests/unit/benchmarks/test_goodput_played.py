"""The trace that is played on local VMs (benchmarks/goodput_played.py): which part of it, and what is measured."""

from __future__ import annotations

import dataclasses
import functools
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from repository import ROOT
from varuna_planner.liveput.morph_cost import PRIOR_FIXED_S, MorphKind
from varuna_planner.liveput.spot_trace import SpotTrace, TraceEvent, parse_trace
from varuna_proto.plan import Plan

sys.path.append(str(ROOT / "benchmarks"))

import _goodput_books as books
import _goodput_nightly as nightly
import _goodput_segment as segments
import goodput_played
from _goodput_setting import State, System
from _recovery_figures import StepLine, Wait

BATCH = 8
STEP_S = {(1, 2, 1): 2.0, (1, 1, 1): 4.0}


class OneStage:
    """Replicas of one VM, 2 examples/s each; the planner predicts a tenth less time than steps take."""

    @staticmethod
    @functools.cache
    def shaped(p: int, d: int, micro_batch: int) -> Plan | None:
        seconds = 0.9 * BATCH / (2.0 * d)
        return Plan(
            p=p,
            d=d,
            micro_batch=micro_batch,
            global_batch=BATCH,
            stage_starts=(0,),
            recompute=(False,),
            predicted_minibatch_s=seconds,
            examples_per_s=BATCH / seconds,
            memory_bytes=(1,),
        )

    def best(self, gpus: int) -> Plan | None:
        return self.shaped(1, gpus, 1) if gpus else None

    def best_keeping(self, gpus: int, micro_batch: int) -> Plan | None:
        return self.shaped(1, gpus, micro_batch) if gpus else None


# ---------------------------------------------------------------- the segment


def test_a_segment_has_every_kth_node_of_a_part_of_the_trace_in_compressed_time() -> None:
    text = "0,add,a\n0,add,b\n0,add,c\n60000,remove,a\n120000,add,d\n180000,remove,d\n240000,remove,c\n900000,add,e"
    trace = parse_trace(text)

    events = segments.thin_out(trace, every=2, phase=0)
    cut = segments.cut_out(events, start_s=100.0, seconds=500.0, speed=10.0)

    assert {event.node for event in events} == {"a", "c", "e"}
    assert [(event.at_s, event.add, event.node) for event in cut.events] == [(0.0, True, "c"), (14.0, False, "c")]
    assert cut.ends_s == 50.0


def test_the_busiest_segment_stays_within_the_bounds() -> None:
    calm = [f"{at * 1000},{what}" for at, what in ((0, "add,a"), (0, "add,b"), (0, "add,c"), (0, "add,d"))]
    busy = ["2000000,remove,a", "2100000,add,e", "2300000,remove,e", "9000000,remove,b"]
    trace = parse_trace("\n".join([*calm, *busy]))

    found = segments.find_busiest_segment(trace, seconds=1200.0, speed=60.0, least_vms=1, most_vms=2)

    assert (found.every, found.phase, found.start_s) == (2, 0, 1200.0), "a, c and e, while a and e go"
    assert (found.removals, found.removal_moments, found.additions, found.fleet_sizes) == (2, 2, 1, (1, 2))
    assert found.trace.ends_s == 20.0
    with pytest.raises(ValueError, match="no part of 1200 s in which every 2th node gives 3 to 2 VMs"):
        segments.find_busiest_segment(trace, seconds=1200.0, speed=60.0, least_vms=3, most_vms=2)


# ---------------------------------------------------------------- what was measured


def stamp(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(1_000_000 + at_s, UTC).isoformat()


def generation(number: int, vms: str, created_s: float, *, ended_s: float | None = None, **further: Any) -> Any:
    return {
        "number": number,
        "p": 1,
        "d": len(vms),
        "micro_batch": 1,
        "placement": [{"rank": rank, "vm_id": vm, "local_rank": 0} for rank, vm in enumerate(vms)],
        "created_at": stamp(created_s),
        "ended_at": stamp(ended_s),
        "stop_requested_at": stamp(ended_s),
        "end_cause": None,
        "kind_of_morph": "reshape",
        "state_from": {"kept": 1, "peers": 0, "store": 0},
        "steps_redone": 0,
        "micro_batches_redone": 0,
        **further,
    }


def play_loss() -> books.PlayedRun:
    """Two replicas from 1 s on, a step of 2 s each. One is lost in the middle of the third step, half a second later it
    is noticed, and 1.5 s after that the other one goes on with what it has, at 4 s a step.
    """
    first = generation(1, "ab", 0.0, ended_s=6.5, end_cause="vm_lost", kind_of_morph=None, state_from=None)
    second = generation(2, "a", 6.6, micro_batches_redone=4)
    ends = [3.0, 5.0, 11.0, 15.0, 19.0]
    busy = [(1.0, 6.0), (8.0, 20.0)]
    events = (
        *(TraceEvent(at_s=0.0, add=True, node=node) for node in "ab"),
        TraceEvent(at_s=6.0, add=False, node="b"),
    )
    return books.PlayedRun(
        trace=SpotTrace(events=events, until_s=20.0),
        granted_s=(),
        killed=(("b", 6.0),),
        lines=tuple(StepLine(step, at) for step, at in enumerate(ends, 1)),
        waits=tuple(Wait(*each) for each in busy),
        generations=(first, second),
        began_at=1_000_000.0,
        between_s=0.0,
        checkpoints=0,
        profile_json="",
        goodput=0.0,
    )


def test_the_time_without_a_micro_batch_is_split_into_noticing_and_launching() -> None:
    launch, loss = books.list_morphs(play_loss(), least_vms=1)

    assert (launch.kind, launch.launching_s, launch.noticed_s) == (MorphKind.FROM_STORE, 1.0, None)
    assert (loss.kind, loss.is_loss) == (MorphKind.IN_PLACE, True)
    assert (loss.noticing_s, loss.launching_s, loss.waiting_s) == (0.5, 1.5, 0.0)
    assert loss.noticed_s == 0.5


def test_the_pause_of_a_generation_that_ran_nothing_goes_on_in_the_next_and_no_second_is_in_both() -> None:
    run = play_loss()
    first, second = run.generations
    before = generation(1, "abc", 0.0, ended_s=0.4, end_cause="vm_lost", kind_of_morph=None, state_from=None)
    launched = {**first, "number": 2, "created_at": stamp(0.5)}
    run = dataclasses.replace(run, generations=(before, launched, {**second, "number": 3}))

    nothing, launch, loss = books.list_morphs(run, least_vms=1)

    assert (nothing.has_run, nothing.launching_s) == (False, 0.5)
    assert (launch.has_run, launch.began_s, launch.launching_s) == (True, 0.5, 0.5)
    assert loss.launching_s == 1.5
    system = books.make_system(run, [nothing, launch, loss], System(fixed_s=PRIOR_FIXED_S))
    assert system.fixed_s[MorphKind.FROM_STORE] == 0.5, "the one that ran nothing says nothing of the cost"


def test_a_morph_that_waits_for_vms_says_so() -> None:
    *_, loss = books.list_morphs(play_loss(), least_vms=2)
    assert (loss.noticing_s, loss.waiting_s, loss.launching_s) == (0.5, 1.5, 0.0)


def test_every_second_of_a_played_segment_is_booked_once() -> None:
    run = play_loss()
    times = books.measure_step_times(run)
    plans = books.MeasuredPlans(OneStage(), times)
    found = books.keep_books(run, books.list_morphs(run, least_vms=1), plans, BATCH)

    assert times == {(1, 1, 1): 4.0}, "the first generation has one undisturbed step, which is too few"
    assert plans.ratio == pytest.approx(1 / 0.9)
    assert plans.step_s((1, 2, 1)) == pytest.approx(2.0), "not seen: as much longer as the others"
    assert found.examples == pytest.approx((5 + 1 / 4) * BATCH)
    assert found.kept_s == pytest.approx(2 + 2 + 4 + 4 + 4 + 1)
    assert found.redone_s == pytest.approx(0.0)
    assert (found.launching_s, found.noticing_s, found.saving_s) == (2.5, 0.5, 0.0)


def test_the_replay_of_the_trace_with_the_costs_of_the_run_comes_to_what_was_measured() -> None:
    run = play_loss()
    plans = books.MeasuredPlans(OneStage(), STEP_S)
    morphs = books.list_morphs(run, least_vms=1)
    base = System(fixed_s=PRIOR_FIXED_S, survivors=True, moves=True)

    system = books.make_system(run, morphs, base)
    predicted = goodput_played.predict(
        run, plans, State(section_bytes=(1,), parameter_bytes=(1,), link_bytes_per_s=1e9), system
    )

    assert system.fixed_s == {MorphKind.IN_PLACE: 1.5, MorphKind.FROM_MEMORY: 1.7, MorphKind.FROM_STORE: 1.0}
    assert system.detect_s == 0.5
    # The survivor ends its share of the step while the loss is noticed, and runs the lost one's again.
    measured = books.keep_books(run, morphs, plans, BATCH)
    assert predicted.examples == pytest.approx(measured.examples, abs=0.2 * BATCH)
    assert predicted.morphs[MorphKind.IN_PLACE] == 1


def test_a_growth_in_place_counts_as_one_from_memory_as_in_the_replay() -> None:
    before, grown = generation(1, "a", 0.0), generation(2, "ab", 9.0)
    assert books.find_kind(before, grown) is MorphKind.FROM_MEMORY
    assert books.find_kind(grown, before) is MorphKind.IN_PLACE
    restarted = generation(3, "a", 9.0, kind_of_morph="restart", state_from={"kept": 0, "peers": 0, "store": 1})
    assert books.find_kind(grown, restarted) is MorphKind.FROM_STORE


# ---------------------------------------------------------------- Ray's nightly scenario


def test_steps_wasted_are_those_redone_and_micro_batches_in_steps() -> None:
    first = generation(1, "ab", 0.0, end_cause="vm_lost")
    in_place = generation(2, "a", 1.0, end_cause="growth", micro_batches_redone=4)
    grown = generation(3, "ab", 2.0, end_cause="vm_lost", micro_batches_redone=None)
    restarted = generation(4, "a", 3.0, steps_redone=7, micro_batches_redone=None)

    assert nightly.count_wasted_steps([first, in_place, grown], micro_batches=8) == 0.5
    assert nightly.count_wasted_steps([first, in_place, grown, restarted], micro_batches=8) == 8.5
