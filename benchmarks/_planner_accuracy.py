"""How accurate the planner's predictions are: predicted against real mini-batch times.

    python benchmarks/_planner_accuracy.py [--json accuracy.json] [--steps 6] [--rounds 5]

(a) The emulated-device runs of `benchmarks/pipeline.py`: stages sleep, all else is real; the engine's time per
action is calibrated in another shape. (b) The example GPT on this machine's CPU: a calibration by as many ranks as will
train, as the manager makes it, then the planner's prediction for each shape and the real steps. On 2 cores only
shapes of up to 2 ranks are valid; with more cores, pass more with --shapes.

Every error is shown with the noise of its measurement: half the relative distance of the quartiles. The GPT's ranks
calibrate again before and after every few steps, which gives three more figures: the error "at once" of the mean of the
predictions by the two calibrations around the steps (the median over rounds, without the machine's changes since the
first calibration); the part of it in the forwards and backwards alone; and the machine's drift, the distance of those
predictions relative to their median. Without drift both errors are the same but for noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _planner_accuracy_gpt import SHAPES, gpt_rows, parse_shape

from varuna_planner.schedule.policies import Policy
from varuna_planner.simulator.simulation import simulate, uniform

HERE = Path(__file__).resolve()
EMULATED_STAGES, EMULATED_MICRO_BATCHES = (2, 4), (8, 32)
CALIBRATION_SHAPE = (2, 16)
"""(P, N) of the emulated run from which the engine's overhead is taken; none of those that are predicted."""
PIPELINE_LIMIT_S = 300
TARGET_WORST, TARGET_MEAN = 0.05, 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` reads."""
    parser.add_argument("--steps", type=int, default=6, help="steps of the example GPT between two calibrations")
    parser.add_argument("--rounds", type=int, default=5, help="of emulated mini-batches, and of the GPT's steps")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="PxDxM", help="of the example GPT")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both comparisons."""
    emulated = emulated_rows(args.rounds)
    gpt = gpt_rows([parse_shape(shape) for shape in args.shapes], args.rounds, args.steps)
    return {
        "emulated": {"rows": emulated, **_summary(emulated, "error")},
        "gpt": {
            "rows": gpt,
            **_summary(gpt, "error"),
            "at_once": _summary(gpt, "at_once_error"),
            "ops": _summary(gpt, "ops_error"),
            "drift": max(row["drift"] for row in gpt),
        },
        "target": {"worst": TARGET_WORST, "mean": TARGET_MEAN},
        "environment": {"cores": os.cpu_count(), "load_1_minute": os.getloadavg()[0]},
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    emulated, gpt = result["emulated"], result["gpt"]
    heads = ("predicted", "real", "error", "noise", "at once", "ops", "drift")
    lines = [f"{'':<22} {heads[0]:>11} {heads[1]:>11}" + "".join(f" {head:>7}" for head in heads[2:])]
    for part, name in ((emulated, "emulated"), (gpt, "example GPT")):
        for row in part["rows"]:
            line = f"{name + ' ' + row['shape']:<22} {row['predicted_s'] * 1e3:>8.1f} ms {row['real_s'] * 1e3:>8.1f} ms"
            line += f" {row['error']:>+7.1%} {row['noise']:>7.1%}"
            if "drift" in row:
                line += f" {row['at_once_error']:>+7.1%} {row['ops_error']:>+7.1%} {row['drift']:>7.1%}"
            lines.append(line)
    parts = (("emulated", emulated), ("example GPT", gpt), ("example GPT, at once", gpt["at_once"]))
    for name, part in (*parts, ("forwards and backwards alone, at once", gpt["ops"])):
        lines.append(f"{name}: mean error {part['mean_error']:.1%}, worst {part['worst_error']:.1%}")
    bare = ", ".join(f"{row['without_overhead']:+.1%}" for row in emulated["rows"])
    lines.append(f"emulated, without the engine's own {emulated['rows'][0]['overhead_us']:.0f} µs per action: {bare}")
    return "\n".join(lines)


def _summary(rows: Sequence[dict[str, Any]], which: str) -> dict[str, float]:
    errors = [abs(row[which]) for row in rows]
    return {"mean_error": statistics.fmean(errors), "worst_error": max(errors)}


def _row(shape: str, predicted_s: float, real: Sequence[float]) -> dict[str, Any]:
    """`real` in seconds. Its median counts, so an interrupted step does not matter."""
    median = statistics.median(real)
    quartiles = statistics.quantiles(real, n=4) if len(real) > 1 else [median] * 3
    return {
        "shape": shape,
        "predicted_s": predicted_s,
        "real_s": median,
        "error": predicted_s / median - 1,
        "noise": (quartiles[2] - quartiles[0]) / 2 / median,
        "runs": len(real),
    }


# ---------------------------------------------------------------- (a) emulated devices


def emulated_rows(rounds: int) -> list[dict[str, Any]]:
    """Runs `pipeline.py`. One more shape calibrates the engine's own time for each action, which the emulated device's
    times do not have; `without_overhead` is the error when it is left out."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pipeline.json"
        p, n = CALIBRATION_SHAPE
        stages = [str(stages) for stages in sorted({p, *EMULATED_STAGES})]
        micro_batches = [str(count) for count in sorted({n, *EMULATED_MICRO_BATCHES})]
        shapes = ["--stages", *stages, "--micro-batches", *micro_batches]
        own = ["--systems", "work-conserving", "--rounds", str(rounds), "--json", str(out)]
        command = [sys.executable, str(HERE.parent / "pipeline.py"), *shapes, *own]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PIPELINE_LIMIT_S)
        found = json.loads(out.read_text())
    runs = {(row["p"], row["n"]): row for row in found["rows"]}
    overhead_us = _engine_overhead_us(found["setting"], runs[CALIBRATION_SHAPE])
    rows = []
    for p, n in itertools.product(EMULATED_STAGES, EMULATED_MICRO_BATCHES):
        real = [milliseconds / 1e3 for milliseconds in runs[p, n]["rounds_ms"]]
        row = _row(f"P={p} N={n}", _emulated_s(found["setting"], runs[p, n], overhead_us), real)
        bare = _emulated_s(found["setting"], runs[p, n], 0.0)
        rows.append({**row, "without_overhead": bare / row["real_s"] - 1, "overhead_us": overhead_us})
    return rows


def _emulated_s(setting: dict[str, Any], row: dict[str, Any], overhead_us: float) -> float:
    """The simulator's time of one of `pipeline.py`'s rows."""
    pipeline = uniform(
        row["p"],
        row["n"],
        forward_us=setting["forward_ms"] * 1e3 + overhead_us,
        recompute_us=setting["recompute_ms"] * 1e3 + overhead_us,
        backward_us=setting["backward_ms"] * 1e3 + overhead_us,
        latency_us=row["message_ms"] * 1e3,
    )
    return simulate(pipeline, Policy.WORK_CONSERVING, run_ahead=row["run_ahead"]).makespan_us / 1e6


def _engine_overhead_us(setting: dict[str, Any], row: dict[str, Any]) -> float:
    """Per action, from the slope of the simulated time, which is almost linear in a constant added to every action."""
    real_s, probe_us = statistics.median(row["rounds_ms"]) / 1e3, 100.0
    bare_s = _emulated_s(setting, row, 0.0)
    slope = (_emulated_s(setting, row, probe_us) - bare_s) / probe_us
    return max(0.0, (real_s - bare_s) / slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same figures there")
    given = parser.parse_args()
    result = run(given)
    print(table(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
