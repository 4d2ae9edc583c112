"""What it costs undisturbed steps that a job is ready for a loss: pairs of turns.

    python benchmarks/recovery_overhead.py --json
    python benchmarks/recovery_overhead.py --no-waits --pairs 40
    python benchmarks/recovery_overhead.py --of copies --shape 2x1 --size 200MB --steps 20

Two jobs train the model of `recovery.py` under one manager, each on local VMs of its own. One is ready, the other is
not: with `--of "in place"` it may not go on in place (VARUNA_IN_PLACE=0), and keeps nothing for that; with `--of
copies` one has `copies: on`, the other `copies: off`. In all else they are alike. They take turns: while one makes
`--steps` steps, the workers of the other wait in their scripts. A pair is a turn of each, and who goes first
alternates. `ratio` is the mean step of a turn that is ready to that of the other turn: the geometric mean over all
pairs, with its 95 % interval (bootstrap over pairs). Aim: at most 1.01 in place, 1.02 for copies. An interval that
contains the aim says neither yes nor no; more pairs make it narrower.

While the other job has its turn, copies that are under way go on, and no new round begins. So a turn should be long
against a round.

Layers wait as on an emulated device, and some of the host's work hides behind that. With `--no-waits` nothing hides it.
What both jobs run alike does not show here; `overhead.py` compares all of Varuna with plain PyTorch and DDP.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _recovery_figures import measure_turn, parse_record
from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, make_job, start_manager, wait_for
from recovery import SIZES, parse_shape

from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses

_WAYS = {
    "in place": (
        RecoveryWay(name="in place"),
        RecoveryWay(name="not in place", environment={"VARUNA_IN_PLACE": "0"}),
    ),
    "copies": (RecoveryWay(name="copies", copies="on"), RecoveryWay(name="no copies", copies="off")),
}
"""What a job is ready with, and not ready."""
_RESAMPLES = 4000
_CONFIDENCE = 0.95
_FIRST_STEPS = 5
"""The first steps allocate, and are not measured."""
_TURN_DEADLINE_S = 600.0


@dataclass(frozen=True)
class TurnJob:
    """A job that makes only the steps that a file allows."""

    way: RecoveryWay
    folder: Path

    @property
    def record(self) -> Path:
        return self.folder / "record"

    @property
    def allowed(self) -> Path:
        return self.folder / "allowed"

    def allow(self, step: int) -> None:
        """Lets the job make the steps up to this one."""
        part = self.allowed.with_suffix(".part")
        part.write_text(str(step))
        part.rename(self.allowed)

    def run_to(self, step: int) -> None:
        """Lets the job make the steps up to this one, and waits for them."""
        self.allow(step)
        wait_for(lambda: self._has_ended(step), f"step {step} {self.way.name}", deadline_s=_TURN_DEADLINE_S)

    def _has_ended(self, step: int) -> bool:
        return self.record.exists() and any(line.step >= step for line in parse_record(self.record.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=_WAYS, default="in place", help="what one of the jobs is ready with")
    parser.add_argument("--size", choices=SIZES, default="22MB", help="bytes of state of the model")
    parser.add_argument("--shape", type=parse_shape, default="2x2", help="stages x replicas of each job")
    parser.add_argument("--pairs", type=int, default=20, help="turns of each job")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn; the first is not measured")
    parser.add_argument("--no-waits", action="store_true", help="layers do not wait as on a device")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.pairs < 2 or given.steps < 2:
        parser.error(f"--pairs {given.pairs} --steps {given.steps}: an interval takes 2 pairs, and a turn 2 steps")
    size = SIZES[given.size]
    if given.no_waits:
        size = replace(size, example_ms=0.0)
    pairs, load = measure_pairs(_WAYS[given.of], size, given.shape, pairs=given.pairs, steps=given.steps)
    report = make_report(pairs) | {
        "of": given.of,
        "state": size.name,
        "shape": "×".join(map(str, given.shape)),
        "steps_per_turn": given.steps,
        "waits": not given.no_waits,
        "load": load,
        "cores": os.cpu_count(),
    }
    print(json.dumps(report, indent=2) if given.json else render(report))


def measure_pairs(
    ways: tuple[RecoveryWay, RecoveryWay], size: ModelSize, shape: tuple[int, int], *, pairs: int, steps: int
) -> tuple[list[tuple[float, float]], float]:
    """The mean step of each pair's turns, ready and not, and the machine's load after half of them."""
    stages, replicas = shape
    options = TrialOptions.undisturbed(stages, replicas)
    with tempfile.TemporaryDirectory(prefix="varuna-overhead-") as name, DemoProcesses(Path(name)) as processes:
        folder = Path(name)
        jobs = [TurnJob(way, folder / way.name.replace(" ", "-")) for way in ways]
        flags = ["--grpc-port", "0", "--hang-minimum-s", "86400"]  # a job that waits for its turn is not hung
        both = replace(options, replicas=2 * replicas)
        with start_manager(processes, folder, size, both, flags) as client:
            done = _FIRST_STEPS
            plans = [_start(client, job, size, options) for job in jobs]  # the second takes the first one's profile
            if plans[0] != plans[1]:
                raise SystemExit(f"the jobs have different plans, and cannot be compared: {plans[0]}, {plans[1]}")
            found, load = [], 0.0
            for number in range(pairs):
                if number == pairs // 2:
                    load = os.getloadavg()[0]
                done += steps
                turns: dict[str, float] = {}
                for job in jobs if number % 2 else reversed(jobs):
                    job.run_to(done)
                    lines = parse_record(job.record.read_text())
                    turns[job.way.name] = measure_turn(lines, done - steps + 1, done)
                found.append((turns[ways[0].name], turns[ways[1].name]))
        processes.end_all()
    return found, load


def _start(client: Client, job: TurnJob, size: ModelSize, options: TrialOptions) -> Mapping[str, Any]:
    """Submits the job and waits for its first steps. Returns what of its plan changes how fast it is."""
    job.folder.mkdir()
    job.allow(_FIRST_STEPS)
    document = make_job(size, options, job.way, job.record, f"--allowed {job.allowed}")
    document["resources"] = {"min_gpus": options.vms, "max_gpus": options.vms}
    submitted = client.submit(document)
    job.run_to(_FIRST_STEPS)
    plan = client.plans(submitted["id"])[0]["plan"]
    return {name: plan[name] for name in ("p", "d", "micro_batch", "stage_starts", "run_ahead", "recompute")}


def make_report(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    logs = [math.log(ready / other) for ready, other in pairs]
    low, high = find_interval(logs)
    return {
        "ratio": math.exp(statistics.fmean(logs)),
        "interval": [math.exp(low), math.exp(high)],
        "confidence": _CONFIDENCE,
        "ready_s": statistics.median(ready for ready, _ in pairs),
        "not_ready_s": statistics.median(other for _, other in pairs),
        "pairs": [list(pair) for pair in pairs],
    }


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of their mean, by the bootstrap: means of as many values, drawn from them again and again."""
    draws = random.Random(0)
    means = sorted(statistics.fmean(draws.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    outside = round(_RESAMPLES * (1 - _CONFIDENCE) / 2)
    return means[outside], means[-1 - outside]


def render(report: dict[str, Any]) -> str:
    low, high = report["interval"]
    ready, other = 1e3 * report["ready_s"], 1e3 * report["not_ready_s"]
    with_it, without_it = (way.name for way in _WAYS[report["of"]])
    return (
        f"{report['state']}, {report['shape']}, {'' if report['waits'] else 'no '}waits: a step takes {ready:.1f} ms "
        f"{with_it}, {other:.1f} ms {without_it}; ratio {report['ratio']:.4f} "
        f"({report['confidence']:.0%}: {low:.4f} to {high:.4f}; {len(report['pairs'])} pairs, "
        f"load {report['load']:.1f})"
    )


if __name__ == "__main__":
    main()
