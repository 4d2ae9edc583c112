"""Goodput of a training job on traces of spot VMs: examples that count, against a bound that knows the future.

    python benchmarks/goodput.py --trace ../shared/traces/aws-p3-spot.csv --global-batch 8192 512 --json out.json
    python benchmarks/goodput.py --trace a.csv b.json --charts docs/images

The paper's GPT-2 of 2.5 B parameters on V100s with 16 GB and 10 Gb/s. Time is simulated, event by event; rates come
from the planner, what a morph costs from `varuna_planner.liveput.morph_cost` at this model's state and links, decisions
from the manager. What copies take of the time that is trained is reckoned afterwards (`less copies`), by the shares of
`varuna_planner.liveput.copies`. `_goodput_job` follows the job, `_goodput_policies` has the policies. Traces are in
Bamboo's, Parcae's or SkyPilot's format (`varuna_planner.liveput.spot_trace`).

| policy | |
| --- | --- |
| varuna-2021 | always the best plan; each morph takes 120 s and restarts from the checkpoint |
| checkpoint | the manager's decisions; each morph restarts from the checkpoint, as with VARUNA_IN_PLACE=0 |
| parcae | the shapes that Parcae chose, where the trace has them; a morph takes 36 s, the mean of its 28.8 to 42.9 s |
| survivors | the manager's decisions: survivors go on, a lost replica's share is run again (`copies: off`) |
| auto | and the copies and marks that the manager finds worth their time, for each generation (the default) |
| copies | a second VM has each committed section, and replicas copy their sums to one another (`copies: on`) |
| design | not built: sums move to any shape at once, also at growth; new VMs are prepared ahead |
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from _goodput_charts import draw_goodput, draw_hours, draw_progress
from _goodput_job import Policy, ReplayedJob
from _goodput_policies import BestPlan, ManagersRules, Saves, TraceDecisions, WorthwhilePlan
from _goodput_setting import Plans, State, System
from _text_tables import render_table

from varuna_manager.domain.observed import Rules
from varuna_planner.hardware.table import built_in
from varuna_planner.liveput.morph_cost import MARKS_S, PRIOR_FIXED_S, MorphKind
from varuna_planner.liveput.spot_trace import SpotTrace, measure_hazard, parse_trace
from varuna_planner.profile.document import Profile
from varuna_planner.profile.shapes import ModelFamily, ModelShape
from varuna_planner.profile.synthesis import synthesise
from varuna_planner.search.auto_config import choose_plan
from varuna_planner.search.pins import NO_PINS, Pins
from varuna_proto.plan import Plan

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "aws-p3-spot.csv"
MODEL = ModelShape(family=ModelFamily.GPT2, layers=54, hidden=1920, seq=1024, fused_attention=False)
"""GPT-2 with 2.5 billion parameters (paper, section 3.2), as its code of 2021 computes it."""
GPU, NETWORK, MEMORY_BYTES = "v100-16gb", "ethernet-10g", 16 * 2**30
"""The trace's p3.2xlarge: one V100, up to 10 Gb/s."""
DOLLARS_PER_VM_HOUR = 0.612
"""Where a trace has no prices: a fifth of the $3.06 of such a VM, as docs/planner.md reckons."""
VARUNA_2021_S = 120.0
"""What its morphs wait before a relaunch."""
PARCAE_S = (28.8, 42.9)
"""Its restart on 1 and on 32 nodes."""
STARTED_AHEAD_S = 10.0
"""Until a process that is started beside training has imported all, has a context of its GPU, and has traced the
model."""
SUMS_COPIED_S = 15.0
"""The design's interval between copies of gradient sums: 1.1 GB a rank over 10 Gb/s, beside training."""


class PlannersAnswers:
    """`Plans` of a model on a number of GPUs, cached."""

    def __init__(self, profile: Profile, global_batch: int, device_memory_bytes: int = MEMORY_BYTES) -> None:
        self._profile, self._global_batch, self._device_memory_bytes = profile, global_batch, device_memory_bytes
        self.best = cache(lambda gpus: self._ask(gpus, NO_PINS))
        self.best_keeping = cache(lambda gpus, micro_batch: self._ask(gpus, Pins(micro_batch=micro_batch)))
        self.shaped = cache(lambda p, d, micro_batch: self._ask(p * d, Pins(p=p, d=d, micro_batch=micro_batch)))

    def _ask(self, gpus: int, pins: Pins) -> Plan | None:
        try:
            return choose_plan(
                self._profile,
                gpus=gpus,
                global_batch=self._global_batch,
                device_memory_bytes=self._device_memory_bytes,
                pins=pins,
            ).best
        except ValueError:  # a shape that no fleet could have
            return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", default=[TRACE], help="(default: %(default)s)")
    parser.add_argument("--global-batch", type=int, nargs="+", default=[8192, 2400, 512])
    parser.add_argument(
        "--detect-s", type=float, default=System.detect_s, help="until a loss is noticed (default: %(default)s)"
    )
    parser.add_argument(
        "--notice-s", type=float, default=0.0, help="VMs have notice so long before they go (default: none)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--charts", type=Path, help="draw SVGs in this folder")
    arguments = parser.parse_args()
    if min(arguments.detect_s, arguments.notice_s) < 0 or min(arguments.global_batch) < 1:
        parser.error("--detect-s and --notice-s must not be negative, and --global-batch must be 1 or more")
    try:
        traces = {path.stem: parse_trace(path.read_text(), name=str(path)) for path in arguments.trace}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    report = run(traces, arguments.global_batch, arguments.detect_s, arguments.notice_s)
    print(table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    if arguments.charts:
        write_charts(report, arguments.charts)


def run(
    traces: dict[str, SpotTrace],
    global_batches: Sequence[int],
    detect_s: float = System.detect_s,
    notice_s: float = 0.0,
) -> dict[str, Any]:
    """Replays each trace once for each global batch and policy."""
    profile = synthesise(MODEL, built_in(), GPU, NETWORK)
    state = State.of_profile(profile)
    plans = {batch: PlannersAnswers(profile, batch) for batch in global_batches}
    replays = []
    for name, trace in traces.items():
        for batch in global_batches:
            bound = find_upper_bound(trace, plans[batch])
            for policy_name, (system, policy) in list_policies(trace, plans[batch], state, detect_s).items():
                job = ReplayedJob(trace, plans[batch], state, system, policy, DOLLARS_PER_VM_HOUR, notice_s)
                replayed = job.replay()
                dollars = replayed.dollars
                of_bound = replayed.examples / bound if bound else None
                trained_s = replayed.kept_s + replayed.redone_s
                replays.append(
                    {
                        "trace": name,
                        "global_batch": batch,
                        "policy": policy_name,
                        **asdict(replayed),
                        "upper_bound_examples": bound,
                        "of_bound": of_bound,
                        "of_bound_less_copies": (
                            of_bound * (1 - replayed.copying_s / trained_s) if of_bound and trained_s else of_bound
                        ),
                        "dollars_per_million_examples": (
                            dollars / replayed.examples * 1e6 if dollars and replayed.examples else None
                        ),
                    }
                )
    return {
        "setting": {
            "model": f"GPT-2, {MODEL.parameters / 1e9:.2f} B parameters",
            "state_bytes": sum(state.section_bytes),
            "gpu": GPU,
            "network": NETWORK,
            "detect_s": detect_s,
            "notice_s": notice_s,
            "traces": {name: _describe(trace) for name, trace in traces.items()},
        },
        "replays": replays,
    }


def _describe(trace: SpotTrace) -> dict[str, Any]:
    return {
        "hours": (trace.ends_s - trace.starts_s) / 3600,
        "hazard": asdict(measure_hazard(trace)),
        "has_prices": bool(trace.prices),
        "decisions": sorted(trace.decisions),
        "most_vms": max(len(vms) for _, vms in trace.iterate_fleets()),
    }


def list_policies(trace: SpotTrace, plans: Plans, state: State, detect_s: float) -> dict[str, tuple[System, Policy]]:
    """By name; a trace without decisions has no `parcae`."""
    old = System(fixed_s=dict.fromkeys(MorphKind, VARUNA_2021_S), detect_s=detect_s)
    parcae_s = sum(PARCAE_S) / 2
    parcae = System(fixed_s=dict.fromkeys(MorphKind, parcae_s), survivors=True, copies=True, detect_s=detect_s)
    before = System(fixed_s=PRIOR_FIXED_S, copies_beside_passes=True, detect_s=detect_s)
    design = System(
        fixed_s=dict.fromkeys(MorphKind, PRIOR_FIXED_S[MorphKind.IN_PLACE]),
        survivors=True,
        copies=True,
        sums_copied_s=SUMS_COPIED_S,
        prepares=True,
        copies_beside_passes=True,
        detect_s=detect_s,
    )
    saves = make_saves(trace, state, before)
    managed = {
        "checkpoint": before,
        "survivors": make_system_of_today(copies=False, detect_s=detect_s),
        "auto": replace(make_system_of_today(copies=True, detect_s=detect_s), weighs_copies=True),
        "copies": make_system_of_today(copies=True, detect_s=detect_s),
    }
    rules: dict[str, tuple[System, Policy]] = {
        name: (system, make_managers_rules(trace, plans, state, system)) for name, system in managed.items()
    }
    policies: dict[str, tuple[System, Policy]] = {
        "varuna-2021": (old, BestPlan(plans, saves)),
        "checkpoint": rules.pop("checkpoint"),
    }
    if trace.decisions:
        name = "liveput_predict" if "liveput_predict" in trace.decisions else min(trace.decisions)
        policies["parcae"] = (parcae, TraceDecisions(plans, saves, trace.decisions[name]))
    return policies | rules | {"design": (design, WorthwhilePlan(plans, saves))}


def make_system_of_today(*, copies: bool, detect_s: float = System.detect_s) -> System:
    """Varuna as it is, where a morph takes what the manager expects before it has seen one."""
    now = System(
        fixed_s=PRIOR_FIXED_S,
        survivors=True,
        moves=True,
        starts_ahead_s=STARTED_AHEAD_S,
        copies_beside_passes=True,
        detect_s=detect_s,
    )
    return replace(now, copies=True, marks_s=MARKS_S) if copies else now


def make_managers_rules(trace: SpotTrace, plans: Plans, state: State, system: System) -> ManagersRules:
    return ManagersRules(plans, Rules(lost_after_s=system.detect_s), make_saves(trace, state, system), state)


def make_saves(trace: SpotTrace, state: State, system: System) -> Saves:
    losses_at = [event.at_s for event in trace.events if not event.add]
    return Saves(state, system.save_stall_s, measure_hazard(trace).removals_per_vm_hour, losses_at)


def find_upper_bound(trace: SpotTrace, plans: Plans) -> float:
    """Examples that no policy can beat, even one that knows the future.

    At no moment does a job train faster than the best plan for the VMs that are there. So the integral of that rate
    over the trace is a bound; it is reached if losses cost nothing and every morph is done in no time.
    """
    fleets = [*trace.iterate_fleets(), (trace.ends_s, frozenset[str]())]
    plans_there = [
        (until_s - at_s, plans.best(len(vms))) for (at_s, vms), (until_s, _) in itertools.pairwise(fleets) if vms
    ]
    return sum(seconds * plan.examples_per_s for seconds, plan in plans_there if plan is not None)


COLUMNS: Sequence[tuple[str, str, str]] = (
    ("BATCH", "global_batch", "d"),
    ("POLICY", "policy", "s"),
    ("EXAMPLES", "examples", ",.0f"),
    ("OF BOUND", "of_bound", ".1%"),
    ("LESS COPIES", "of_bound_less_copies", ".1%"),
    ("KEPT", "kept_s", "h"),
    ("REDONE", "redone_s", "h"),
    ("LAUNCH", "launching_s", "h"),
    ("NOTICE", "detecting_s", "h"),
    ("SAVE", "saving_s", "h"),
    ("WAIT", "waiting_s", "h"),
    ("COPIES", "copying_s", "h"),
    ("IDLE VM-H", "idle_vm_hours", ".1f"),
    ("$/M", "dollars_per_million_examples", ".2f"),
)


def table(report: dict[str, Any]) -> str:
    """The figures as text. Times are in hours."""
    lines = []
    for name, facts in report["setting"]["traces"].items():
        hazard = facts["hazard"]["removals_per_vm_hour"]
        lines.append(f"{name}: {facts['hours']:.1f} h, {hazard:.2f} removals per VM-hour; times in hours")
        heads = [*(head for head, _, _ in COLUMNS), "IN PLACE / MEMORY / STORE"]
        rows = [heads]
        for replay in report["replays"]:
            if replay["trace"] == name:
                kinds = " / ".join(str(replay["morphs"][kind.value]) for kind in MorphKind)
                rows.append([*(_render(replay[key], form) for _, key, form in COLUMNS), kinds])
        lines.append(render_table(rows, words=1))
    return "\n".join(lines)


def _render(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return f"{value / 3600:.2f}" if form == "h" else format(value, form)


def write_charts(report: dict[str, Any], folder: Path) -> None:
    """For each trace: how much of the bound is kept, where the hours go, and examples over time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in report["setting"]["traces"]:
        replays = [replay for replay in report["replays"] if replay["trace"] == name]
        (folder / f"goodput-{name}.svg").write_text(draw_goodput(replays))
        (folder / f"goodput-{name}-hours.svg").write_text(draw_hours(replays))
        (folder / f"goodput-{name}-progress.svg").write_text(draw_progress(replays))


if __name__ == "__main__":
    main()
