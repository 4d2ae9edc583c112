"""The replay of spot traces (benchmarks/): every second is booked once, and no policy beats the upper bound."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repository import ROOT
from varuna_planner.liveput.morph_cost import MARKS_S
from varuna_planner.liveput.spot_trace import SpotTrace, TraceEvent, parse_trace
from varuna_proto.plan import Plan

sys.path.append(str(ROOT / "benchmarks"))

import goodput
from _goodput_generation import Holding
from _goodput_job import Replayed, ReplayedJob
from _goodput_policies import ManagersRules
from _goodput_setting import State, System

BATCH = 60
STATE = State(section_bytes=(100, 100), parameter_bytes=(30, 30), link_bytes_per_s=50.0)


class TwoStages:
    """Pairs of GPUs, 2 examples/s each GPU; one alone is too few."""

    def __init__(self, global_batch: int = BATCH) -> None:
        self._global_batch = global_batch
        self.shaped = functools.cache(self._shape)

    def _shape(self, p: int, d: int, micro_batch: int) -> Plan | None:
        if p != 2:
            return None
        return Plan(
            p=2,
            d=d,
            micro_batch=micro_batch,
            global_batch=self._global_batch,
            stage_starts=(0, 1),
            policy="work-conserving",
            run_ahead=0,
            recompute=(False, False),
            predicted_minibatch_s=self._global_batch / (4.0 * d),
            examples_per_s=4.0 * d,
            memory_bytes=(1, 1),
        )

    def best(self, gpus: int) -> Plan | None:
        return self.shaped(2, gpus // 2, 1) if gpus > 1 else None

    def best_keeping(self, gpus: int, micro_batch: int) -> Plan | None:
        return self.shaped(2, gpus // 2, micro_batch) if gpus > 1 else None


PLANS = TwoStages()
LONG = TwoStages(global_batch=720)
"""A step on two GPUs takes three minutes."""


def all_policies(trace: SpotTrace, plans: TwoStages = PLANS) -> dict[str, Any]:
    return goodput.list_policies(trace, plans, STATE, detect_s=4.0)


def replay(trace: SpotTrace, name: str, *, notice_s: float = 0.0, plans: TwoStages = PLANS) -> tuple[Replayed, Any]:
    system, policy = all_policies(trace, plans)[name]
    return ReplayedJob(trace, plans, STATE, system, policy, price=2.0, notice_s=notice_s).replay(), policy


def replay_as(trace: SpotTrace, system: System, plans: TwoStages = PLANS) -> tuple[Replayed, ManagersRules]:
    policy = goodput.make_managers_rules(trace, plans, STATE, system)
    return ReplayedJob(trace, plans, STATE, system, policy, price=2.0).replay(), policy


@st.composite
def traces(draw: st.DrawFn) -> SpotTrace:
    """Up to eight VMs that come and go, several at once at times."""
    events = [TraceEvent(at_s=0, add=True, node=node) for node in ("base", "n0", "n1", "n2")]
    there, at_s = {"n0", "n1", "n2"}, 0.0
    for _ in range(draw(st.integers(1, 16))):
        at_s += draw(st.sampled_from([0.0, 1.0, 5.0, 25.0, 70.0, 200.0]))
        node = f"n{draw(st.integers(0, 6))}"
        events.append(TraceEvent(at_s=at_s, add=node not in there, node=node))
        there ^= {node}
    shapes = tuple((number * 50.0, 2, draw(st.integers(0, 3))) for number in range(4))
    return SpotTrace(events=tuple(events), until_s=at_s + 100, decisions={"liveput_predict": shapes})


def seconds(replayed: Replayed) -> float:
    names = ("kept_s", "redone_s", "launching_s", "detecting_s", "saving_s", "waiting_s")
    return float(sum(getattr(replayed, name) for name in names))


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(traces(), st.sampled_from([3.0, 30.0, 120.0]))
def test_every_second_is_booked_once_and_no_policy_beats_the_bound(trace: SpotTrace, notice_s: float) -> None:
    bound = goodput.find_upper_bound(trace, PLANS)

    for name in all_policies(trace):
        replayed, _ = replay(trace, name)
        assert seconds(replayed) == pytest.approx(trace.ends_s - trace.starts_s, abs=1e-2), name
        assert -1e-6 <= replayed.examples <= bound + 1e-3, name
        assert min(replayed.kept_s, replayed.redone_s, replayed.waiting_s, replayed.idle_vm_hours) >= -1e-6, name
        assert replayed == replay(trace, name)[0], f"{name} is deterministic"
        assert [at_s for at_s, _ in replayed.progress] == sorted(at_s for at_s, _ in replayed.progress)

        noticed, _ = replay(trace, name, notice_s=notice_s)
        assert seconds(noticed) == pytest.approx(trace.ends_s - trace.starts_s, abs=1e-2), name
        assert -1e-6 <= noticed.examples <= bound + 1e-3, name


@settings(max_examples=25, deadline=None)
@given(traces())
def test_the_bound_holds_for_any_choice_of_shapes(trace: SpotTrace) -> None:
    """A job that knows the future, takes any shape for which there are VMs, and morphs for nothing, reaches it."""
    fleets = [*trace.iterate_fleets(), (trace.ends_s, frozenset[str]())]
    most = 0.0
    for (at_s, vms), (until_s, _) in itertools.pairwise(fleets):
        rates = [plan.examples_per_s for used in range(len(vms) + 1) if (plan := PLANS.best(used)) is not None]
        most += max(rates, default=0.0) * (until_s - at_s)
    assert goodput.find_upper_bound(trace, PLANS) == pytest.approx(most)


def test_processes_that_lose_one_while_they_start_from_the_store_do_so_again() -> None:
    """Two VMs go while three come. Until their loss is noticed, new processes are to start on them, too."""
    events = [TraceEvent(at_s=0, add=True, node=node) for node in "abc"]
    events += [TraceEvent(at_s=270, add=True, node=node) for node in "def"]
    events += [TraceEvent(at_s=270, add=False, node=node) for node in "bc"]
    found, _ = replay(SpotTrace(events=tuple(events), until_s=370), "survivors", notice_s=3.0)
    assert found.morphs == {"in place": 0, "from memory": 0, "from the store": 2}
    assert found.detecting_s == pytest.approx(4.0)


def test_a_fleet_that_stays_keeps_all_but_the_launch() -> None:
    trace = SpotTrace(events=tuple(TraceEvent(at_s=0, add=True, node=f"n{n}") for n in range(4)), until_s=1000.0)
    found, _ = replay(replace(trace, events=(*trace.events, TraceEvent(at_s=900, add=True, node="x"))), "survivors")
    assert found.launching_s == pytest.approx(1.7), "the state of the first generation comes from nowhere"
    assert (found.redone_s, found.waiting_s, found.detecting_s) == (0, 0, 0)
    assert found.examples == pytest.approx(8 * (1000 - 1.7 - found.saving_s))
    assert found.dollars == pytest.approx((4 * 900 + 5 * 100) / 3600 * 2)


@pytest.mark.long
@pytest.mark.parametrize("early_s", [1e-9, 0.9e-6, 1.1e-6])
def test_steps_end_when_they_are_due_though_something_else_happens_just_before(early_s: float) -> None:
    """A VM comes that is not needed: before a generation is ready, before a step ends, before a save is over."""
    fleet = tuple(TraceEvent(at_s=0, add=True, node=f"n{n}") for n in range(4))
    calm, _ = replay(SpotTrace(events=fleet, until_s=1000.0), "checkpoint")
    due = [at_s for at_s, _ in calm.progress if 0 < at_s < 1000.0]
    for number in (0, 1, 2, *range(3, len(due), 7)):
        extra = TraceEvent(at_s=due[number] - early_s, add=True, node="x")
        found, _ = replay(SpotTrace(events=(*fleet, extra), until_s=1000.0), "checkpoint")
        times = [at_s for at_s, _ in found.progress]
        late = [at_s for at_s in due if min(abs(at_s - other) for other in times) > 1e-4]
        assert not late, f"{found.examples} examples with a VM more after {due[number]} s"
        assert found.examples == pytest.approx(calm.examples, rel=1e-6)


LOSS = "\n".join([*(f"0,add,n{n}" for n in range(8)), "98700,remove,n7", "300000,add,z"])
"""Four replicas, 3.75 s a step, from 1.7 s on, with saves beside passes: the loss is 3.25 s into the 26th step."""


def test_a_loss_costs_the_lost_replicas_share_of_the_step() -> None:
    found, policy = replay(parse_trace(LOSS), "survivors")

    # 3.25 s of one of four replicas are run again. The others end their share 0.5 s later and wait until 4 s have
    # passed; in place takes 0.8 s.
    assert found.redone_s == pytest.approx(3.25 / 4, abs=1e-2)
    assert found.detecting_s == pytest.approx(3.5, abs=1e-2)
    assert found.morphs["in place"] == 1
    assert "go on from step 25" in policy.reasons[1][1]
    assert found.losses == 1


@pytest.mark.parametrize("notice_s", [20.0, 60.0])
def test_a_notice_leaves_time_to_finish_a_step(notice_s: float) -> None:
    """With a longer one the VM, which goes after 98.7 s, is used until half a minute before."""
    found, policy = replay(parse_trace(LOSS), "survivors", notice_s=notice_s)
    assert (found.redone_s, found.detecting_s, found.losses) == (0, 0, 0)
    assert found.morphs["in place"] == 1
    at_s, reason = policy.reasons[1]
    assert reason.startswith("VM n7 is leaving: it has notice")
    assert 98.7 - at_s == pytest.approx(20.0 if notice_s == 20.0 else 30.0 + 2 * 3.75 * 1.25, abs=3.75)


def test_a_notice_that_is_shorter_than_the_step_spares_the_time_to_notice_a_loss() -> None:
    """Of a step of 45 s. The VM is left 6 s before it goes, and the other replicas finish their shares."""
    found, policy = replay(parse_trace(LOSS), "survivors", notice_s=6.0, plans=LONG)
    assert "too soon to finish the step" in policy.reasons[1][1]
    assert (found.detecting_s, found.morphs["in place"]) == (0, 1)
    without, _ = replay(parse_trace(LOSS), "survivors", plans=LONG)
    assert without.detecting_s + without.redone_s > found.redone_s > 0


def test_with_marks_a_loss_costs_what_was_done_since_the_newest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 3.25 s, one of four replicas has lost what it did since its mark, on average a quarter of a second."""
    monkeypatch.setattr(goodput, "MARKS_S", 0.5)
    found, _ = replay(parse_trace(LOSS), "copies")
    assert found.redone_s == pytest.approx(0.25 / 4, abs=1e-2)
    without, _ = replay(parse_trace(LOSS), "survivors")
    assert found.examples > without.examples


@pytest.mark.parametrize(("global_batch", "like"), [(60, "survivors"), (20_000, "copies")])
def test_a_default_job_has_what_the_manager_finds_worth_its_time(global_batch: int, like: str) -> None:
    """A step takes four seconds, or 20 minutes."""
    trace, plans = parse_trace(LOSS), TwoStages(global_batch=global_batch)
    policies = goodput.list_policies(trace, plans, STATE, detect_s=4.0)
    found, same = (ReplayedJob(trace, plans, STATE, *policies[name]).replay() for name in ("auto", like))
    assert found.examples == pytest.approx(same.examples)
    assert (found.copying_s > 0) is (like == "copies")


class OneReplica:
    """As many stages as GPUs, 2 examples/s each GPU, of micro-batches that depend on nothing."""

    def best(self, gpus: int) -> Plan | None:
        return self.shaped(gpus, 1, 1) if gpus else None

    def best_keeping(self, gpus: int, micro_batch: int) -> Plan | None:
        return self.shaped(gpus, 1, micro_batch)

    @staticmethod
    def shaped(p: int, d: int, micro_batch: int) -> Plan | None:
        return Plan(
            p=p,
            d=d,
            micro_batch=micro_batch,
            global_batch=600,
            stage_starts=tuple(range(p)),
            recompute=(False,) * p,
            predicted_minibatch_s=300.0 / (p * d),
            examples_per_s=2.0 * p * d,
        )


@pytest.mark.parametrize(("policy", "redone_s"), [("copies", MARKS_S / 2), ("survivors", 73.3)])
def test_one_replica_with_copies_loses_what_it_has_done_since_its_mark(policy: str, redone_s: float) -> None:
    """The fourth step of 75 s is nearly over. Without copies all of it is run again, from a checkpoint."""
    trace = parse_trace("\n".join([*(f"0,add,n{n}" for n in range(4)), "300000,remove,n1", "600000,add,z"]))
    plans, state = (
        OneReplica(),
        State(section_bytes=(100,) * 6, parameter_bytes=(30,) * 6, link_bytes_per_s=1000.0),
    )
    system, manager = goodput.list_policies(trace, plans, state, detect_s=4.0)[policy]
    assert isinstance(manager, ManagersRules)
    found = ReplayedJob(trace, plans, state, replace(system, save_stall_s=1e-3), manager).replay()
    assert found.redone_s == pytest.approx(redone_s, abs=0.5)
    assert found.morphs["in place"] == (policy == "copies")
    if policy == "copies":
        assert "3 of its workers take the stages of another shape, 4×1 to 3×1" in manager.reasons[1][1]


def test_without_survivors_a_loss_costs_all_since_the_newest_checkpoint() -> None:
    found, _ = replay(parse_trace(LOSS), "checkpoint")
    assert found.redone_s >= 3.25
    assert found.morphs["in place"] == 0 < found.morphs["from the store"]


def test_training_does_not_stand_still_for_a_save_in_steps_that_take_longer() -> None:
    trace = parse_trace("\n".join([*(f"0,add,n{n}" for n in range(8)), "300000,add,z"]))
    of_today = goodput.make_system_of_today(copies=False)
    assert replay_as(trace, of_today)[0].saving_s == 0
    before, _ = replay_as(trace, replace(of_today, copies_beside_passes=False))
    short, _ = replay_as(trace, of_today, TwoStages(global_batch=7))
    for found in (before, short):
        saves = round(found.saving_s / of_today.save_stall_s)
        assert saves > 0
        assert found.saving_s == pytest.approx(saves * of_today.save_stall_s)


def test_sums_that_are_copied_are_not_lost() -> None:
    found, _ = replay(parse_trace(LOSS), "design")
    assert found.redone_s == pytest.approx(0.4 / 4, abs=1e-2), "it began 0.9 s earlier, and is 0.4 s into a step"
    assert found.morphs["from memory"] >= 1
    slow, _ = replay(parse_trace(LOSS), "copies")
    assert found.examples > slow.examples


def test_a_stage_that_nobody_has_comes_from_the_store_or_from_a_copy() -> None:
    trace = parse_trace(
        "\n".join([*(f"0,add,n{n}" for n in range(2)), "33000,remove,n1", "50000,add,m", "90000,add,o"])
    )
    found, _ = replay(trace, "survivors")
    assert found.morphs["from the store"] == 1
    assert found.waiting_s == pytest.approx(50 - 37, abs=0.1)
    copied, _ = replay(trace, "copies")
    assert copied.morphs["from memory"] == 1
    assert copied.redone_s <= found.redone_s


@pytest.mark.parametrize("is_ahead", [True, False])
def test_growth_ends_the_step_and_loses_nothing(is_ahead: bool) -> None:
    trace = parse_trace("0,add,a\n0,add,b\n60000,add,c\n60000,add,d\n300000,add,z\n")
    system = goodput.make_system_of_today(copies=False)
    if not is_ahead:
        system = replace(system, starts_ahead_s=None)

    found, policy = replay_as(trace, system)

    kind, fixed_s = ("in place", 0.8) if is_ahead else ("from memory", 1.7)
    assert found.morphs == {"in place": 0, "from memory": 0, "from the store": 0} | {kind: 1}
    assert found.redone_s == pytest.approx(0, abs=1e-3)
    # Both stages move: one to a new VM each, 100 bytes at 50/s from a holder that gives to one VM, and at once locally.
    assert found.launching_s == pytest.approx(1.7 + fixed_s + 2.0, abs=0.01)
    costs = f"a morph costs {fixed_s + 2.0} s: {fixed_s} s to start and meet, 2.0 s for the state; over"
    assert costs in policy.reasons[1][1]


def test_growth_in_the_middle_of_a_long_step_runs_only_its_rest() -> None:
    """New processes are there ten seconds after they are wanted, and the step takes three minutes on two VMs. Its sums
    come while the rest trains."""
    trace = parse_trace("0,add,a\n0,add,b\n200000,add,c\n200000,add,d\n600000,add,z\n")
    system = goodput.make_system_of_today(copies=False)

    found, policy = replay_as(trace, system, LONG)

    assert found.morphs["in place"] == 1
    assert found.redone_s == pytest.approx(0, abs=1e-3)
    (growth,) = [(at_s, reason) for at_s, reason in policy.reasons if reason.startswith("growth: ")]
    assert "; within its step (" in growth[1]
    (start,) = [at_s for at_s, reason in policy.reasons if "new ones join" in reason]
    assert start == growth[0], "it does not wait for the end of the step"
    fill_s = LONG.shaped(2, 2, 1).predicted_minibatch_s / 361  # type: ignore[union-attr]
    assert found.launching_s == pytest.approx(1.7 + 0.8 + 2.0 + fill_s, abs=0.01)


def test_parcaes_decisions_are_followed_where_the_trace_has_them() -> None:
    lines = [
        [0, "add", {"nodes": ["a", "b", "c", "d"], "duration": 100000, "liveput_predict_strategy": [1, 2]}],
        [100000, "no-op", {"nodes": [], "duration": 100000, "liveput_predict_strategy": [2, 2]}],
    ]
    trace = parse_trace("\n".join(map(json.dumps, lines)))
    found, _ = replay(trace, "parcae")
    assert sum(found.morphs.values()) == 1
    assert found.idle_vm_hours == pytest.approx((2 * 105 + 2 * 36 - 10) / 3600, rel=0.6), "it used two VMs at first"
    assert "parcae" not in all_policies(parse_trace(LOSS))


def test_the_program_writes_the_share_of_the_bound_and_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "small.json", tmp_path / "out.json"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 900}, "data": [12, 12, 9], "prices": [1.0, 1.0, 2.0]}))
    options = ["--trace", str(trace), "--global-batch", "512", "--json", str(out), "--charts", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["goodput.py", *options])
    goodput.main()
    report = json.loads(out.read_text())
    shares = {one["policy"]: one["of_bound"] for one in report["replays"]}
    assert set(shares) == {"varuna-2021", "checkpoint", "survivors", "auto", "copies", "design"}
    assert all(0 < share <= 1 for share in shares.values())
    assert shares["survivors"] > shares["varuna-2021"]
    assert "survivors" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        f"goodput-small{which}.svg" for which in ("", "-hours", "-progress")
    }

    monkeypatch.setattr(sys, "argv", ["goodput.py", "--trace", "none.csv"])
    with pytest.raises(SystemExit):
        goodput.main()
    assert "none.csv" in capsys.readouterr().err


def test_a_copy_is_on_a_vm_of_another_stage() -> None:
    plan = PLANS.shaped(2, 2, 1)
    assert plan is not None
    holding = Holding(plan=plan, vms=("a", "b", "c", "d"))
    assert holding.find_holders({"a", "b"})
    assert not holding.find_holders({"a", "c"})
    assert replace(holding, has_copies=True).find_holders({"a", "c"})
    assert not holding.find_holders({"a"})


class OtherMicroBatches(OneReplica):
    """The best plan on fewer than four GPUs has another micro-batch."""

    def __init__(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch

    def best(self, gpus: int) -> Plan | None:
        return self.shaped(gpus, 1, 4 if gpus > 3 else self._micro_batch) if gpus else None


@pytest.mark.parametrize(("micro_batch", "taken"), [(8, 8), (2, 2), (6, 4)])
def test_a_replayed_step_goes_on_with_micro_batches_that_it_shares(micro_batch: int, taken: int) -> None:
    trace = parse_trace("\n".join([*(f"0,add,n{n}" for n in range(4)), "300000,remove,n1", "600000,add,z"]))
    plans, state = (
        OtherMicroBatches(micro_batch),
        State(section_bytes=(100,) * 6, parameter_bytes=(30,) * 6, link_bytes_per_s=1000.0),
    )
    system, manager = goodput.list_policies(trace, plans, state, detect_s=4.0)["copies"]
    job = ReplayedJob(trace, plans, state, replace(system, save_stall_s=1e-3), manager)
    found = job.replay()
    assert (found.redone_s, found.morphs["in place"]) == (pytest.approx(MARKS_S / 2, abs=0.5), 1)
    assert isinstance(manager, ManagersRules)
    assert manager._choose_keeping(3, 4) == plans.shaped(3, 1, taken)
