"""What the loss of a VM, and a VM that comes back, cost a job: in place, from memory, and from a checkpoint.

    python benchmarks/recovery.py --json
    python benchmarks/recovery.py --sizes 22MB --rounds 1
    python benchmarks/recovery.py --sizes 22MB-10s --kill-at 0.8 --steps-before 3 --steps-after 1 --vms 6

Each trial has a manager of its own with local VMs (`varuna manager --vms 4`, with a --slow-threshold that none reaches,
because waiting layers look slow), real agents and workers, and a job of Linear layers with AdamW as 2 stages × 2
replicas. Its layers also wait for as long as a device would compute; those of `22MB-10s` wait for 10 s in each step.
All processes of the last rank's VM get SIGKILL in the middle of a step (`--kill-at`), and no VM replaces it. Some steps
later one comes back, and the job grows. In the row `in place` the survivors keep their processes at the loss; at the
growth, new processes take the state from their memories. In the row `memory` the script gives step() copies of its
batches, which keeps workers from staying, so both morphs take it from memory. In the row `restart` (VARUNA_IN_PLACE=0
in the job's environment) both load a checkpoint; the growth saves one first. Rows and sizes take turns. With
`--notice-s` the VM has that much notice instead: in the rows `memory` and `restart` the job saves before it leaves.

`gap` is the longest time without a step, by lines that the workers write after each step. The step that ends it is in
it. `pause` is the gap less the duration of a step afterwards, which has one replica. `redone` are the committed steps
that the job does again. `cost` is the gap and the steps redone, at the duration of a step before the loss. The pause by
part, the bytes kept or taken from memories and the growth are the manager's figures (REST).

Not measured: seconds without any micro-batch; bytes over links, and links of 1 and 10 Gb/s; peak extra memory; D = 1;
several losses; torchrun and torchft. Undisturbed steps are compared between a worker that may stay and one that may
not, not with a Varuna that cannot go on in place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, run_trial

from varuna_client.errors import VarunaError

SIZES = {
    size.name: size
    for size in (
        ModelSize(name="22MB", width=256, layers=28, global_batch=64, micro_batch=8, example_ms=0.125),
        ModelSize(name="22MB-10s", width=256, layers=28, global_batch=64, micro_batch=4, example_ms=6.5),
        ModelSize(name="200MB", width=1024, layers=16, global_batch=64, micro_batch=8, example_ms=0.25),
        ModelSize(name="1.2GB", width=2048, layers=24, global_batch=32, micro_batch=4, example_ms=0.25),
        ModelSize(name="4.8GB", width=4096, layers=24, global_batch=32, micro_batch=4, example_ms=0.25),
    )
}
USUAL_SIZES = ("22MB", "200MB", "1.2GB")
"""4.8GB takes more than 20 GiB of memory."""
ROWS = {
    row.name: row
    for row in (
        RecoveryWay(name="in place"),
        RecoveryWay(name="memory", flags="--copy-batches"),
        RecoveryWay(name="restart", environment={"VARUNA_IN_PLACE": "0"}),
    )
}

Trial = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=USUAL_SIZES, help="bytes of state of the model")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="ways to go on")
    parser.add_argument("--rounds", type=int, default=3, help="losses of each row and size")
    parser.add_argument("--vms", type=int, default=4)
    parser.add_argument("--steps-before", type=int, default=25, help="steps before the kill")
    parser.add_argument("--kill-at", type=float, default=0.5, help="how much of the step is done then (0 to 1)")
    parser.add_argument(
        "--notice-s", type=float, default=0.0, help="the VM has notice instead of being killed; 0: none"
    )
    parser.add_argument("--steps-after", type=int, default=5, help="steps before a VM comes back")
    parser.add_argument("--growth-wait-s", type=float, default=90.0, help="0: no VM comes back")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = TrialOptions(
        vms=given.vms,
        steps_before=given.steps_before,
        kill_at=given.kill_at,
        notice_s=given.notice_s,
        steps_after=given.steps_after,
        growth_wait_s=given.growth_wait_s,
    )
    trials: list[Trial] = []
    try:
        run_rounds([SIZES[name] for name in given.sizes], given.rows, given.rounds, options, trials.append)
    except (KeyboardInterrupt, SystemExit):
        print("ended early: these are the trials until then", file=sys.stderr)
    report = make_report(trials)
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        print(render(report))


def run_rounds(
    sizes: Sequence[ModelSize], rows: Sequence[str], rounds: int, options: TrialOptions, add: Callable[[Trial], None]
) -> None:
    with tempfile.TemporaryDirectory(prefix="varuna-profiles-") as profiles:
        for number in range(1, rounds + 1):
            for size in sizes:
                for row in rows if number % 2 else rows[::-1]:
                    trial: Trial = {"state": size.name, "row": row, "round": number, "load": os.getloadavg()[0]}
                    try:
                        trial |= run_trial(size, ROWS[row], options, Path(profiles))
                    except (RuntimeError, TimeoutError, VarunaError) as error:
                        print(f"{size.name}, {row}, round {number}: no figures: {error}", file=sys.stderr, flush=True)
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
        for state in SIZES
        if (base := by_key.get((state, "restart")))
    }
    return {"cores": os.cpu_count(), "rows": groups, "restart_to_row": ratios, "trials": list(trials)}


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
        "state_bytes": SIZES[first["state"]].state_bytes,
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
    lines = [f"{'state':<7}{'row':<10}{columns}{'redone':<18}{'kept':>9}{'taken':>9}{'checkpoint':>12}"]
    for row in report["rows"]:
        times = "".join(f"{_render_spread(row[name], '.2f'):<26}" for name in ("gap_s", "pause_s", "cost_s"))
        kept, taken, saved = (row[name]["median"] / 1e6 for name in ("kept_bytes", "peer_bytes", "checkpoint_bytes"))
        redone = _render_spread(row["steps_redone"], "g")
        sizes = f"{kept:>6.0f} MB{taken:>6.0f} MB{saved:>9.0f} MB"
        lines.append(f"{row['state']:<7}{row['row']:<10}{times}{redone:<18}{sizes}")
    lines += ["", "the manager's figures: seconds without progress, by part (medians), steps redone; the growth"]
    for row in report["rows"]:
        parts = ", ".join(f"{name} {spread['median']:.2f}" for name, spread in row["parts_s"].items())
        lines += [
            f"{row['state']:<7}{row['row']:<10}{row['shape_before']} to {row['shape_after']}, {row['reshapes']} of "
            f"{row['trials']} by reshape: {_render_spread(row['reported_gap_s'], '.2f')} s, redone "
            f"{_render_spread(row['reported_redone'], 'g')}",
            f"{'':17}micro-batches redone of {row['micro_batches']}: "
            + ", ".join("unknown" if one is None else str(one) for one in row["micro_batches_redone"]),
            f"{'':17}{parts}",
            f"{'':17}growth ({row['growths']} of {row['trials']}): {_render_spread(row['growth_s'], '.2f')} s, redone "
            f"{_render_spread(row['growth_redone'], 'g')}",
        ]
    lines += ["", "an undisturbed step, s: before the loss, and after it"]
    for row in report["rows"]:
        before, after = (_render_spread(row[name], ".3f") for name in ("step_before_s", "step_after_s"))
        lines.append(f"{row['state']:<7}{row['row']:<10}{before:<36}{after}")
    lines += ["", "restart ÷ row, medians"]
    for state, by_row in report["restart_to_row"].items():
        for name, ratios in by_row.items():
            shown = (f"{key.removesuffix('_s')} {value:.2f}" for key, value in ratios.items() if value is not None)
            lines.append(f"{state:<7}{name:<10}{', '.join(shown)}")
    return "\n".join(lines)


def _render_spread(spread: dict[str, Any], form: str) -> str:
    """The median, and each value in brackets."""
    if spread["median"] is None:
        return "-"
    return f"{spread['median']:{form}} ({', '.join(f'{value:{form}}' for value in spread['each'])})"


if __name__ == "__main__":
    main()
