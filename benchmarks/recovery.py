"""What the loss of a VM, and a VM that comes back, cost a job: in place, from memory, and from a checkpoint.

    python benchmarks/recovery.py --json
    python benchmarks/recovery.py --sizes 22MB --rounds 1
    python benchmarks/recovery.py --sizes 22MB-10s --kill-at 0.2 0.5 0.8 --steps-before 3 --steps-after 1 --shape 2x3
    python benchmarks/recovery.py --sizes 1.2GB --mbit 1000        # each VM in a network namespace, which needs root

Each trial has a manager of its own with local VMs (`varuna manager --vms 4`, with a --slow-threshold that none reaches,
because waiting layers look slow), real agents and workers, and a job of Linear layers with AdamW as 2 stages × 2
replicas. Its layers also wait for as long as a device would compute; those of `22MB-10s` and
`22MB-40s` wait for so long in each step, and those of `200MB-30s` and `1.2GB-120s` after the loss of one VM of four
(`--shape 1x4`), and those of `4.8GB-60s` after that of one of two (`--shape 1x2`).
All processes of the last rank's VM get SIGKILL in the middle of a step (`--kill-at`), and no VM replaces it. Some steps
later one comes back, and the job grows. In the row `in place` processes stay at the loss and at the growth, where new
ones, which are started ahead, join them and take what they lack from their memories. In the row `not ahead`
(VARUNA_AHEAD=0) all processes of the growth start after the stop. In the row `memory` the script gives step() copies of
its batches, which keeps workers from staying, so both morphs take it from memory; in steps of ten seconds or more, the
survivors end the step under way first. In the row `restart`
(VARUNA_IN_PLACE=0 in the job's environment) both load a checkpoint; the growth saves one first. In the rows `other
cuts` the number of stages is the planner's choice, a device holds no whole model, and the job needs all VMs that are
left: after the loss the survivors of 2 × 2 become 3 × 1, in place or (`other cuts, memory`) in new processes. In the
row `other cuts, not late` (VARUNA_LATE_STATE=0) no state comes while passes run. Rows and sizes take turns. With
`--notice-s` the VM has that much notice instead: in the rows `memory` and `restart` the job saves before it leaves.

In the rows `marks` and `copies` the job has `copies: on`. So ranks also copy their sums of gradients to the other
replica every five seconds, and a loss in a long step costs less than the lost replica's share.

With `--shape 2x1` the job has one replica, and a third VM takes the place of the lost one. In the row `copies`, the
workers keep copies of each other's states, so the loss costs at most some steps; in the row `no copies` it is a restart
from the checkpoint.

`gap` is the longest time without a step, by lines that the workers write after each step. The step that ends it is in
it. `pause` is the gap less the duration of a step afterwards, which has one replica. `redone` are the committed steps
that the job does again. `cost` is the gap and the steps redone, at the duration of a step before the loss. The pause by
part, the bytes kept or taken from memories and the growth are the manager's figures (REST). What was taken went over
links. `idle` is the longest time from the kill to the end of the gap in which no layer waited in any process, so no
micro-batch ran anywhere; beside it, the same over three steps before the kill. `extra` is by how much the memory of a
survivor's VM rises above its peak before the kill, at most: what its processes do not share with files, each 0.1 s.

Without another replica (`--shape 2x1`), another VM replaces the lost one at once, and the job does not grow.
`recovery_peers.py` has torchrun and torchft beside one stage in place, `recovery_overhead.py` what undisturbed steps
cost. Not measured: several losses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _recovery_kill_points import name_state, render_kill_points, size_name, summarize_kill_points
from _recovery_network import VmNetwork
from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, run_trial

from varuna_client.errors import VarunaError

SIZES = {
    size.name: size
    for size in (
        ModelSize(name="22MB", width=256, layers=28, global_batch=64, micro_batch=8, example_ms=0.125),
        ModelSize(name="22MB-10s", width=256, layers=28, global_batch=64, micro_batch=4, example_ms=6.5),
        ModelSize(name="22MB-40s", width=256, layers=28, global_batch=64, micro_batch=2, example_ms=26.0),
        ModelSize(name="200MB", width=1024, layers=16, global_batch=64, micro_batch=8, example_ms=0.25),
        ModelSize(name="1.2GB", width=2048, layers=24, global_batch=32, micro_batch=4, example_ms=0.25),
        ModelSize(name="200MB-30s", width=1024, layers=16, global_batch=64, micro_batch=2, example_ms=28.0),
        ModelSize(name="1.2GB-120s", width=2048, layers=24, global_batch=32, micro_batch=1, example_ms=160.0),
        ModelSize(name="4.8GB", width=4096, layers=24, global_batch=32, micro_batch=4, example_ms=0.25),
        ModelSize(name="4.8GB-60s", width=4096, layers=24, global_batch=32, micro_batch=1, example_ms=26.0),
    )
}
USUAL_SIZES = ("22MB", "200MB", "1.2GB")
"""4.8GB takes more than 20 GiB of memory."""
ROWS = {
    row.name: row
    for row in (
        RecoveryWay(name="in place"),
        RecoveryWay(name="not ahead", environment={"VARUNA_AHEAD": "0"}),
        RecoveryWay(name="memory", flags="--copy-batches"),
        RecoveryWay(name="other cuts", changes_cuts=True),
        RecoveryWay(name="other cuts, not late", environment={"VARUNA_LATE_STATE": "0"}, changes_cuts=True),
        RecoveryWay(name="other cuts, memory", flags="--copy-batches", changes_cuts=True),
        RecoveryWay(name="restart", environment={"VARUNA_IN_PLACE": "0"}),
        RecoveryWay(name="marks", copies="on"),
        RecoveryWay(name="copies", copies="on"),
        RecoveryWay(name="no copies"),
    )
}

Trial = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=USUAL_SIZES, help="bytes of state of the model")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="ways to go on")
    parser.add_argument("--rounds", type=int, default=3, help="losses of each row and size")
    parser.add_argument("--shape", type=parse_shape, default="2x2", help="stages x replicas, a VM for each worker")
    parser.add_argument(
        "--mbit", type=float, default=0.0, help="what each VM's link carries in each direction; 0: loopback, not shaped"
    )
    parser.add_argument("--steps-before", type=int, default=25, help="steps before the kill")
    parser.add_argument("--kill-at", type=float, nargs="+", default=[0.5], help="how much of the step is done then")
    parser.add_argument(
        "--notice-s", type=float, default=0.0, help="the VM has notice instead of being killed; 0: none"
    )
    parser.add_argument("--steps-after", type=int, default=5, help="steps before a VM comes back")
    parser.add_argument("--growth-wait-s", type=float, default=90.0, help="0: no VM comes back")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    stages, replicas = given.shape
    options = [
        TrialOptions(
            stages=stages,
            replicas=replicas,
            steps_before=given.steps_before,
            kill_at=kill_at,
            notice_s=given.notice_s,
            steps_after=given.steps_after,
            growth_wait_s=given.growth_wait_s,
            mbit=given.mbit,
        )
        for kill_at in given.kill_at
    ]
    link_mbit = measure_links(given.mbit) if given.mbit else None
    trials: list[Trial] = []
    try:
        run_rounds([SIZES[name] for name in given.sizes], given.rows, given.rounds, options, trials.append)
    except (KeyboardInterrupt, SystemExit) as error:
        print(f"ended early: these are the trials until then. {error}", file=sys.stderr)
    report = make_report(trials) | {"link_mbit": {"set": given.mbit, "measured": link_mbit} if given.mbit else None}
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        print(render(report))


def parse_shape(text: str) -> tuple[int, int]:
    """Stages and replicas of text like 2x3."""
    stages, _, replicas = text.partition("x")
    if not (stages.isdecimal() and replicas.isdecimal() and int(stages) and int(replicas)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: it takes stages x replicas, such as 2x3")
    return int(stages), int(replicas)


def measure_links(mbit: float) -> float:
    """What a link that is set to `mbit` carries here, by one plain connection between two VMs."""
    with VmNetwork(2, mbit) as network:
        return network.measure_mbit()


def run_rounds(
    sizes: Sequence[ModelSize],
    rows: Sequence[str],
    rounds: int,
    options: Sequence[TrialOptions],
    add: Callable[[Trial], None],
) -> None:
    """Runs each row for each size and each of the options, in turns."""
    with tempfile.TemporaryDirectory(prefix="varuna-profiles-") as profiles:
        for number in range(1, rounds + 1):
            for size, chosen in itertools.product(sizes, options):
                for row in rows if number % 2 else rows[::-1]:
                    state = name_state(size.name, chosen.kill_at, len(options))
                    trial: Trial = {"state": state, "row": row, "round": number, "load": os.getloadavg()[0]}
                    try:
                        trial |= run_trial(size, ROWS[row], chosen, Path(profiles))
                    except (RuntimeError, TimeoutError, VarunaError) as error:
                        print(f"{state}, {row}, round {number}: no figures: {error}", file=sys.stderr, flush=True)
                        continue
                    print(json.dumps(trial), file=sys.stderr, flush=True)
                    add(trial)


def make_report(trials: Sequence[Trial]) -> dict[str, Any]:
    """Medians by state and row, with each value, and how many times as much the restart takes."""
    groups = [
        _summarize([trial for trial in trials if (trial["state"], trial["row"]) == (state, row)])
        for state in dict.fromkeys(trial["state"] for trial in trials)
        for row in ROWS
        if any((trial["state"], trial["row"]) == (state, row) for trial in trials)
    ]
    by_key = {(group["state"], group["row"]): group for group in groups}
    ratios = {
        state: {
            row: {
                name: _divide(base, other, name) for name in ("gap_s", "pause_s", "cost_s", "step_before_s", "growth_s")
            }
            for row in ROWS
            if row != "restart" and (other := by_key.get((state, row)))
        }
        for state in dict.fromkeys(trial["state"] for trial in trials)
        if (base := by_key.get((state, "restart")))
    }
    return {
        "cores": os.cpu_count(),
        "rows": groups,
        "restart_to_row": ratios,
        "kill_points": summarize_kill_points(trials),
        "trials": list(trials),
    }


def _divide(base: dict[str, Any], other: dict[str, Any], name: str) -> float | None:
    """How many times as much the first one's median is; None if one has none."""
    medians = base[name]["median"], other[name]["median"]
    return medians[0] / medians[1] if all(medians) else None


def _summarize(trials: Sequence[Trial]) -> dict[str, Any]:
    first = trials[0]
    parts = list(dict.fromkeys(name for trial in trials for name in trial["reported"]["downtime"]))
    grown = [trial["growth"] for trial in trials if trial["growth"] is not None]
    return {
        "state": first["state"],
        "state_bytes": SIZES[size_name(first["state"])].state_bytes,
        "row": first["row"],
        "trials": len(trials),
        "reshapes": sum(trial["kind_of_morph"] == "reshape" for trial in trials),
        "shape_before": first["shape_before"],
        "shape_after": first["shape_after"],
        **{
            name: _spread([trial[name] for trial in trials])
            for name in (
                "gap_s",
                "pause_s",
                "idle_s",
                "idle_before_s",
                "steps_redone",
                "cost_s",
                "kept_bytes",
                "peer_bytes",
                "checkpoint_bytes",
                "step_before_s",
                "step_after_s",
            )
        },
        "reported_gap_s": _spread([trial["reported"]["seconds_without_progress"] for trial in trials]),
        "micro_batches": first["micro_batches"],
        "micro_batches_redone": [trial["micro_batches_redone"] for trial in trials],
        "reported_redone": _spread([trial["reported"]["steps_redone"] for trial in trials]),
        "parts_s": {
            name: _spread([trial["reported"]["downtime"].get(name, 0.0) for trial in trials]) for name in parts
        },
        "extra_bytes": _spread([trial["extra_bytes"] for trial in trials if trial["extra_bytes"] is not None]),
        "growths": len(grown),
        "growth_s": _spread([growth["seconds_without_progress"] for growth in grown]),
        "growth_from": [growth["state_from"] for growth in grown],
        "growth_redone": _spread([growth["steps_redone"] for growth in grown]),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values) if values else None, "each": list(values)}


def render(report: dict[str, Any]) -> str:
    """The report as text: medians, and each value in brackets."""
    columns = "".join(f"{name:<26}" for name in ("gap, s", "pause, s", "cost, s"))
    lines = [f"{'state':<10}{'row':<10}{columns}{'redone':<18}{'kept':>9}{'taken':>9}{'checkpoint':>12}"]
    for row in report["rows"]:
        times = "".join(f"{_render_spread(row[name], '.2f'):<26}" for name in ("gap_s", "pause_s", "cost_s"))
        kept, taken, saved = (row[name]["median"] / 1e6 for name in ("kept_bytes", "peer_bytes", "checkpoint_bytes"))
        redone = _render_spread(row["steps_redone"], "g")
        sizes = f"{kept:>6.0f} MB{taken:>6.0f} MB{saved:>9.0f} MB"
        lines.append(f"{row['state']:<10}{row['row']:<10}{times}{redone:<18}{sizes}")
    lines += ["", "the manager's figures: seconds without progress, by part (medians), steps redone; the growth"]
    for row in report["rows"]:
        parts = ", ".join(f"{name} {spread['median']:.2f}" for name, spread in row["parts_s"].items())
        lines += [
            f"{row['state']:<10}{row['row']:<10}{row['shape_before']} to {row['shape_after']}, {row['reshapes']} of "
            f"{row['trials']} by reshape: {_render_spread(row['reported_gap_s'], '.2f')} s, redone "
            f"{_render_spread(row['reported_redone'], 'g')}",
            f"{'':20}micro-batches redone of {row['micro_batches']}: "
            + ", ".join("unknown" if one is None else str(one) for one in row["micro_batches_redone"]),
            f"{'':20}{parts}",
            f"{'':20}growth ({row['growths']} of {row['trials']}): {_render_spread(row['growth_s'], '.2f')} s, redone "
            f"{_render_spread(row['growth_redone'], 'g')}",
        ]
    lines += [
        "",
        "no micro-batch anywhere, s: longest after the kill, and before it; extra memory of a survivor's VM, MB",
    ]
    for row in report["rows"]:
        idle, before = (_render_spread(row[name], ".2f") for name in ("idle_s", "idle_before_s"))
        extra = _render_spread(_scale_spread(row["extra_bytes"], 1e-6), ".0f")
        lines.append(f"{row['state']:<10}{row['row']:<10}{idle:<26}{before:<26}{extra}")
    lines += ["", "by kill point (medians)", render_kill_points(report["kill_points"])]
    lines += ["", "an undisturbed step, s: before the loss, and after it"]
    for row in report["rows"]:
        before, after = (_render_spread(row[name], ".3f") for name in ("step_before_s", "step_after_s"))
        lines.append(f"{row['state']:<10}{row['row']:<10}{before:<36}{after}")
    lines += ["", "restart ÷ row, medians"]
    for state, by_row in report["restart_to_row"].items():
        for name, ratios in by_row.items():
            shown = (f"{key.removesuffix('_s')} {value:.2f}" for key, value in ratios.items() if value is not None)
            lines.append(f"{state:<10}{name:<10}{', '.join(shown)}")
    if link := report.get("link_mbit"):
        lines += ["", f"links of {link['set']:g} Mbit/s: a plain connection carries {link['measured']:.0f}"]
    return "\n".join(lines)


def _scale_spread(spread: dict[str, Any], factor: float) -> dict[str, Any]:
    return _spread([value * factor for value in spread["each"]])


def _render_spread(spread: dict[str, Any], form: str) -> str:
    """The median, and each value in brackets."""
    if spread["median"] is None:
        return "-"
    return f"{spread['median']:{form}} ({', '.join(f'{value:{form}}' for value in spread['each'])})"


if __name__ == "__main__":
    main()
