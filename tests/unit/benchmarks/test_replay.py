"""The replay of spot traces (benchmarks/): every second is booked once, and no policy beats the upper bound."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repository import ROOT
from varuna_planner.liveput.liveput import StopCosts
from varuna_planner.liveput.spot_trace import SpotTrace, TraceEvent, parse_trace
from varuna_proto.plan import Plan

sys.path.append(str(ROOT / "benchmarks"))

import _planner_replay as replay
import _planner_replay_job as job_module
import _planner_replay_policies as policies

COSTS = StopCosts(morph_s=20, detect_s=4, save_stall_s=1, save_write_s=6)
BATCH = 60


def plans(gpus: int) -> Plan | None:
    """Pairs of GPUs, 2 examples/s each GPU; one alone is too few."""
    used = gpus // 2 * 2
    if not used:
        return None
    return Plan(
        p=2,
        d=used // 2,
        micro_batch=1,
        global_batch=BATCH,
        stage_starts=(0, 1),
        policy="work-conserving",
        run_ahead=0,
        recompute=(False, False),
        predicted_minibatch_s=BATCH / (2.0 * used),
        examples_per_s=2.0 * used,
        memory_bytes=(1, 1),
    )


def all_policies(trace: SpotTrace) -> dict[str, Any]:
    return replay._policies(trace, plans, COSTS, 3600.0)


@st.composite
def traces(draw: st.DrawFn) -> SpotTrace:
    """Up to six VMs that come and go, several at once at times."""
    events = [TraceEvent(at_s=0, add=True, node=node) for node in ("base", "n0")]
    there, at_s = {"n0"}, 0.0
    for _ in range(draw(st.integers(1, 14))):
        at_s += draw(st.sampled_from([0.0, 3.0, 25.0, 70.0, 200.0]))
        node = f"n{draw(st.integers(0, 5))}"
        events.append(TraceEvent(at_s=at_s, add=node not in there, node=node))
        there ^= {node}
    events.append(TraceEvent(at_s=at_s + 100, add="n9" not in there, node="n9"))
    return SpotTrace(events=tuple(events))


def seconds(replayed: Any) -> float:
    names = ("kept_s", "redone_s", "launching_s", "detecting_s", "saving_s", "waiting_s")
    return float(sum(getattr(replayed, name) for name in names))


@settings(max_examples=40, deadline=None)
@given(traces())
def test_every_second_is_booked_once_and_no_policy_beats_the_bound(trace: SpotTrace) -> None:
    bound = replay.upper_bound(trace, plans, COSTS)

    for name, policy in all_policies(trace).items():
        replayed = job_module.ReplayedJob(trace, plans, COSTS, policy).replay()
        assert seconds(replayed) == pytest.approx(trace.ends_s - trace.starts_s, abs=1e-2), name
        assert replayed.examples <= bound + 1e-3, name
        assert 0 <= replayed.idle_gpus_s <= replayed.kept_s + 1e-6, name


def generations(trace: SpotTrace, grid_s: list[float]) -> Iterator[tuple[float, float, float]]:
    """Every generation with ends on a grid: (from, to, most examples)."""
    fleets = [*trace.iterate_fleets()]
    for from_s, to_s in itertools.combinations(grid_s, 2):
        there = [vms for at_s, vms in fleets if from_s < at_s < to_s]
        at_start = [vms for at_s, vms in fleets if at_s <= from_s][-1]
        plan = plans(len(at_start.intersection(*there)))
        if plan is not None:
            yield from_s, to_s, plan.examples_per_s * max(0.0, to_s - from_s - COSTS.morph_s)


@settings(max_examples=25, deadline=None)
@given(traces())
def test_generations_that_end_between_events_do_not_beat_the_bound(trace: SpotTrace) -> None:
    times = [at_s for at_s, _ in trace.iterate_fleets()]
    grid_s = sorted(
        {
            *times,
            *(from_s + part * (to_s - from_s) for from_s, to_s in itertools.pairwise(times) for part in (0.2, 0.5)),
        }
    )
    best = dict.fromkeys(grid_s, 0.0)
    for from_s, to_s, examples in sorted(generations(trace, grid_s), key=lambda one: one[0]):
        before = max(value for at_s, value in best.items() if at_s <= from_s)
        best[to_s] = max(best[to_s], before + examples)

    assert max(best.values()) == pytest.approx(replay.upper_bound(trace, plans, COSTS), abs=1e-6)


def test_a_loss_costs_what_was_not_saved_the_notice_and_a_launch() -> None:
    trace = parse_trace("0,add,a\n0,add,b\n0,add,c\n0,add,d\n100000,remove,d\n200000,add,e\n")

    found = job_module.ReplayedJob(trace, plans, COSTS, all_policies(trace)["greedy"]).replay()

    # 4 VMs train from 20 s on, 7.5 s a mini-batch; stalls take 1 %, so a save is due every 100 s: none is complete.
    # The loss at 100 s throws everything back; 2 VMs go on 4 s later, and train from 124 s to the end.
    assert found.redone_s == pytest.approx(80, abs=1e-3)
    assert (found.detecting_s, found.launching_s) == pytest.approx((4, 40), abs=1e-3)
    assert found.examples == pytest.approx(4 * 76, abs=0.1)
    assert (found.morphs, found.losses, found.growths) == (1, 1, 0)


def test_growth_ends_the_mini_batch_saves_and_loses_nothing() -> None:
    trace = parse_trace("0,add,a\n0,add,b\n60000,add,c\n60000,add,d\n300000,remove,a\n")

    found = job_module.ReplayedJob(trace, plans, COSTS, all_policies(trace)["manager, saves at 1 %"]).replay()

    # 15 s a mini-batch from 20 s on: at 62 s (settled) the third is under way, which ends at 65; saved at 72.
    assert found.growths == 1
    assert found.redone_s == pytest.approx(0, abs=1e-3)
    assert found.launching_s == pytest.approx(40, abs=1e-3)
    assert found.examples == pytest.approx(4 * 45 + 8 * (300 - 92 - 1), abs=0.1)  # one stall on the way


def test_the_manager_does_not_grow_for_less_than_its_ratio_and_greedy_does() -> None:
    trace = parse_trace(
        "\n".join([*(f"0,add,n{i}" for i in range(50)), "500000,add,x", "500000,add,y", "900000,remove,n0"])
    )

    manager = job_module.ReplayedJob(trace, plans, COSTS, all_policies(trace)["manager, saves at 1 %"]).replay()
    greedy = job_module.ReplayedJob(trace, plans, COSTS, all_policies(trace)["greedy"]).replay()

    assert (manager.growths, greedy.growths) == (0, 1)
    assert manager.idle_gpus_s > 0 == greedy.waiting_s


def test_a_job_without_enough_vms_waits() -> None:
    trace = parse_trace("0,add,a\n50000,add,b\n150000,remove,a\n")

    found = job_module.ReplayedJob(trace, plans, COSTS, all_policies(trace)["liveput"]).replay()

    assert found.waiting_s == pytest.approx(50, abs=1e-3)
    assert policies.automatic_saves(COSTS)(plans(4), 4) == 14  # type: ignore[arg-type]
