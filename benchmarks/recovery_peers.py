"""What the loss of a worker costs a data-parallel job: Varuna in place, torchrun with a save each step, and torchft.

    pip install --no-deps --target /tmp/torchft torchft            # it also needs what varuna[otel] does
    PYTHONPATH=/tmp/torchft python benchmarks/recovery_peers.py --json
    python benchmarks/recovery_peers.py --rows varuna torchrun --workers 2 --rounds 1

All rows train the model of `recovery.py` with AdamW over gloo, the same global batch in the same micro-batches, and the
same emulated device time, on `--workers` workers with one stage. Something gets SIGKILL in the middle of a step:

- `varuna`: all processes of a local VM, and no VM replaces it. The survivors go on in place (`recovery.py`).
- `torchrun`: one worker of one launcher. All workers end, and as many start again from the save of the newest step.
- `torchrun VM`: the last of as many launchers as workers (`--nnodes=1:N`), and its worker. The others start again
  without it.
- `torchft`: one of as many replica groups as workers. The others drop the step and go on without it. Gradients are
  summed by `Manager.allreduce`, because with gloo torchft's DistributedDataParallel ends the survivors. The lighthouse
  waits 100 ms for late replicas (`join_timeout_ms`, its default in Python), in the row `torchft 10 s` 10 s, as
  torchft's own instructions say.

With fewer workers, Varuna and torchrun keep the global batch, so a step takes longer; torchft's gets smaller, so a
step takes as long as before. `gap` is the longest time without a step. `pause` is the gap less a step afterwards.
`idle` is the longest time from the kill to the end of the gap in which no layer waited, so no micro-batch ran anywhere;
beside it, the same over three steps before the kill. `redone` are the committed steps that are run again, and
`discarded` the steps that survivors ended and dropped. `cost` is the gap and the steps redone. torchrun's step has the
save in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _recovery_peers import PEERS, run_peer_trial
from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, run_trial
from recovery import SIZES

from varuna_client.errors import VarunaError

Trial = dict[str, Any]
VARUNA = "varuna"
ROWS = (VARUNA, *PEERS)
COLUMNS = ("gap_s", "pause_s", "idle_s", "idle_before_s", "cost_s", "step_before_s", "step_after_s")
COUNTS = ("steps_redone", "steps_discarded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["22MB"], help="bytes of state of the model")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3, help="losses of each row and size")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps-before", type=int, default=15, help="steps before the kill")
    parser.add_argument("--kill-at", type=float, default=0.5, help="how much of the step is done then")
    parser.add_argument("--steps-after", type=int, default=5, help="steps that are measured after it")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = TrialOptions(
        stages=1,
        replicas=given.workers,
        steps_before=given.steps_before,
        kill_at=given.kill_at,
        notice_s=0.0,
        steps_after=given.steps_after,
        growth_wait_s=0.0,
        mbit=0.0,
    )
    trials: list[Trial] = []
    try:
        run_rounds([SIZES[name] for name in given.sizes], list_rows(given.rows), given.rounds, options, trials.append)
    except (KeyboardInterrupt, SystemExit):
        print("ended early: these are the trials until then", file=sys.stderr)
    report = make_report(trials)
    print(json.dumps(report, indent=2) if given.json else render(report))


def list_rows(rows: Sequence[str]) -> list[str]:
    """The rows that can run here."""
    if importlib.util.find_spec("torchft") is not None:
        return list(rows)
    kept = [row for row in rows if not row.startswith("torchft")]
    if len(kept) < len(rows):
        print("torchft is not installed: its rows are left out (see --help)", file=sys.stderr)
    return kept


def run_rounds(
    sizes: Sequence[ModelSize], rows: Sequence[str], rounds: int, options: TrialOptions, add: Callable[[Trial], None]
) -> None:
    with tempfile.TemporaryDirectory(prefix="varuna-profiles-") as profiles:
        for number in range(1, rounds + 1):
            for size in sizes:
                for row in rows if number % 2 else rows[::-1]:
                    trial: Trial = {"state": size.name, "row": row, "round": number, "load": os.getloadavg()[0]}
                    try:
                        if row == VARUNA:
                            trial |= run_trial(size, RecoveryWay(name=VARUNA), options, Path(profiles))
                        else:
                            trial |= run_peer_trial(PEERS[row], size, options)
                    except (RuntimeError, TimeoutError, ValueError, VarunaError) as error:
                        print(f"{size.name}, {row}, round {number}: no figures: {error}", file=sys.stderr, flush=True)
                        continue
                    print(json.dumps(trial), file=sys.stderr, flush=True)
                    add(trial)


def make_report(trials: Sequence[Trial]) -> dict[str, Any]:
    """Medians by state and row, with each value, and how many times as much as Varuna the others take."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial["state"], trial["row"]), []).append(trial)
    rows = [
        {
            "state": state,
            "row": row,
            "trials": len(group),
            "shape_before": group[0]["shape_before"],
            **{name: _spread([trial[name] for trial in group]) for name in COLUMNS},
            **{name: _spread([trial.get(name, 0) for trial in group]) for name in COUNTS},
        }
        for (state, row), group in groups.items()
    ]
    own = {row["state"]: row for row in rows if row["row"] == VARUNA}
    for row in rows:
        base = own.get(row["state"])
        row["to_varuna"] = base and {
            name: row[name]["median"] / base[name]["median"] for name in ("gap_s", "cost_s") if base[name]["median"]
        }
    return {"cores": os.cpu_count(), "rows": rows, "trials": list(trials)}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "each": list(values)}


def render(report: dict[str, Any]) -> str:
    """The report as text: medians, and each value in brackets."""
    names = (*COLUMNS, *COUNTS)
    lines = [f"{'state':<10}{'row':<14}" + "".join(f"{name.removesuffix('_s'):<24}" for name in names) + "to varuna"]
    for row in report["rows"]:
        cells = "".join(f"{_render_spread(row[name], 'g' if name in COUNTS else '.2f'):<24}" for name in names)
        ratios = ", ".join(f"{key.removesuffix('_s')} {value:.2f}" for key, value in (row["to_varuna"] or {}).items())
        lines.append(f"{row['state']:<10}{row['row']:<14}{cells}{ratios}")
    return "\n".join(lines)


def _render_spread(spread: dict[str, Any], form: str) -> str:
    return f"{spread['median']:{form}} ({', '.join(f'{value:{form}}' for value in spread['each'])})"


if __name__ == "__main__":
    main()
