"""Replays a trace of spot VMs for the paper's model of 2.5 B parameters, once with each policy.

    python benchmarks/_planner_replay.py --trace ../shared/traces/aws-p3-spot.csv
    python benchmarks/_planner_replay.py --global-batch 512 --morph-s 10 --json replay.json

Time is simulated, event by event; rates come from the planner. The job follows `_planner_replay_job`, the policies are
in `_planner_replay_policies`. No policy can beat the bound (`upper_bound` explains it). Only examples that no loss
threw back count; the generation that runs at the end counts in full.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from _planner_replay_job import ReplayedJob
from _planner_replay_policies import Greedy, Liveput, ManagersRules, Plans, ReplayPolicy, automatic_saves

from varuna_manager.domain.observed import Rules
from varuna_planner.hardware.table import built_in
from varuna_planner.liveput.liveput import StopCosts
from varuna_planner.liveput.spot_trace import SpotTrace, measure_hazard, parse_trace
from varuna_planner.profile.document import Profile
from varuna_planner.profile.shapes import ModelFamily, ModelShape
from varuna_planner.profile.synthesis import synthesise
from varuna_planner.search.auto_config import choose_plan
from varuna_proto.plan import Plan

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "aws-p3-spot.csv"
MODEL = ModelShape(family=ModelFamily.GPT2, layers=54, hidden=1920, seq=1024, fused_attention=False)
"""GPT-2 with 2.5 billion parameters (paper, section 3.2), as its code of 2021 computes it."""
GPU, NETWORK, MEMORY_BYTES = "v100-16gb", "ethernet-10g", 16 * 2**30
"""The trace's p3.2xlarge: one V100, up to 10 Gb/s."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    result = run(arguments)
    print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a replay."""
    usual = StopCosts()
    parser.add_argument("--trace", type=Path, default=TRACE, help="milliseconds,add|remove,node (default: %(default)s)")
    parser.add_argument(
        "--global-batch", type=int, nargs="+", default=[8192, 2400, 512], help="examples in a mini-batch"
    )
    parser.add_argument("--morph-s", type=float, default=usual.morph_s, help="from a stop to the next mini-batch")
    parser.add_argument("--detect-s", type=float, default=usual.detect_s, help="until a loss is noticed")
    parser.add_argument("--save-stall-s", type=float, default=usual.save_stall_s, help="of training, for each save")
    parser.add_argument("--save-write-s", type=float, default=usual.save_write_s, help="of a save, in the background")
    parser.add_argument("--horizon-s", type=float, default=3600.0, help="how far the liveput policy looks")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Replays the trace once for each global batch and policy. Raises ValueError and OSError about the trace."""
    trace = parse_trace(arguments.trace.read_text(), name=str(arguments.trace))
    costs = StopCosts(
        morph_s=arguments.morph_s,
        detect_s=arguments.detect_s,
        save_stall_s=arguments.save_stall_s,
        save_write_s=arguments.save_write_s,
    )
    profile = synthesise(MODEL, built_in(), GPU, NETWORK)
    hazard = measure_hazard(trace)
    replays = []
    for global_batch in arguments.global_batch:
        plans = make_plans(profile, global_batch)
        bound = upper_bound(trace, plans, costs)
        for name, policy in _policies(trace, plans, costs, arguments.horizon_s).items():
            replayed = ReplayedJob(trace, plans, costs, policy).replay()
            replays.append(
                {
                    "global_batch": global_batch,
                    "policy": name,
                    **asdict(replayed),
                    "upper_bound_examples": bound,
                    "of_bound": replayed.examples / bound,
                }
            )
    return {
        "setting": {
            "trace": str(arguments.trace),
            "model": f"GPT-2, {MODEL.parameters / 1e9:.2f} B parameters",
            "gpu": GPU,
            "network": NETWORK,
            "hours": (trace.ends_s - trace.starts_s) / 3600,
            "hazard": asdict(hazard),
            "costs": asdict(costs),
        },
        "replays": replays,
    }


def make_plans(profile: Profile, global_batch: int) -> Plans:
    """The best plan for a number of GPUs, cached."""

    @cache
    def best(gpus: int) -> Plan | None:
        return choose_plan(profile, gpus=gpus, global_batch=global_batch, device_memory_bytes=MEMORY_BYTES).best

    return best


def _policies(trace: SpotTrace, plans: Plans, costs: StopCosts, horizon_s: float) -> dict[str, ReplayPolicy]:
    """The policies by name; from the manager's to liveput each changes one thing."""
    rules = Rules(lost_after_s=costs.detect_s)
    usual = automatic_saves(costs)
    saves = automatic_saves(costs, measure_hazard(trace).removals_per_vm_hour)
    liveput = Liveput(plans, rules, trace, costs, horizon_s)
    return {
        "greedy": Greedy(plans, rules, usual),
        "manager, saves at 1 %": ManagersRules(plans, rules, usual),
        "manager": ManagersRules(plans, rules, saves),
        "liveput": liveput,
    }


def upper_bound(trace: SpotTrace, plans: Plans, costs: StopCosts) -> float:
    """Examples that no policy can beat, even one that knows the future; exact for a relaxed job.

    In the relaxed job, losses are foreseen (none has to be noticed, none throws work back), saves are free and
    mini-batches divisible. A generation still trains only after morph_s, on VMs that are present from its start to its
    end, no faster than the best plan for these VMs.

    Any policy is a sequence of generations [a, b) with examples r·max(0, b - a - morph_s), where r is at most the best
    rate of the VMs that are present throughout. No boundary has to lie between two events of the trace. Take one that
    does, between generations with rates r1 and r2 (idle time goes to either). While it moves within the gap, no VM
    comes or goes, so both stay possible. The sum is convex in the boundary's position, because each term is. So it is
    greatest at an end of the gap, or where one generation has shrunk to nothing and is dropped. Dynamic programming
    over the times of the events therefore finds the best.
    """
    fleets = [*trace.iterate_fleets()]
    times = [at_s for at_s, _ in fleets]
    best = [0.0] * len(times)
    for start, (from_s, there) in enumerate(fleets):
        if start:
            best[start] = max(best[start], best[start - 1])
        throughout = there
        for end in range(start + 1, len(times)):
            throughout &= fleets[end - 1][1]
            plan = plans(len(throughout)) if throughout else None
            if plan is None:
                break
            trained_s = max(0.0, times[end] - from_s - costs.morph_s)
            best[end] = max(best[end], best[start] + plan.examples_per_s * trained_s)
    return max(best)


COLUMNS: Sequence[tuple[str, str, str]] = (
    ("BATCH", "global_batch", "d"),
    ("POLICY", "policy", "s"),
    ("EXAMPLES", "examples", ".0f"),
    ("OF BOUND", "of_bound", ".1%"),
    ("MORPHS", "morphs", "d"),
    ("LOSSES", "losses", "d"),
    ("GROWTHS", "growths", "d"),
    ("KEPT", "kept_s", "h"),
    ("REDONE", "redone_s", "h"),
    ("LAUNCH", "launching_s", "h"),
    ("NOTICE", "detecting_s", "h"),
    ("SAVE", "saving_s", "h"),
    ("WAIT", "waiting_s", "h"),
    ("IDLE GPUS", "idle_gpus_s", "h"),
)


def table(result: dict[str, Any]) -> str:
    """Renders the figures. Times are in hours; IDLE GPUS is the part of KEPT that the best plans would save."""
    setting = result["setting"]
    rows = [[head for head, _, _ in COLUMNS]]
    for replay in result["replays"]:
        rows.append(
            [f"{replay[name] / 3600:.2f}" if form == "h" else format(replay[name], form) for _, name, form in COLUMNS]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{setting['model']} on {setting['gpu']}, {setting['network']}; {setting['hours']:.1f} h, "
        f"{setting['hazard']['removals_per_vm_hour']:.2f} removals per VM-hour, "
        f"morph {setting['costs']['morph_s']:g} s; times in hours"
    ]
    for row in rows:
        cells = (
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells))
    for batch, group in itertools.groupby(result["replays"], key=lambda replay: replay["global_batch"]):
        lines.append(f"upper bound for batch {batch}: {next(group)['upper_bound_examples']:.0f} examples")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
