"""How fast a plan is found; how true its prediction is; the paper's models; GPUs of several types.

    python benchmarks/planner.py speed --json
    python benchmarks/planner.py accuracy | paper | mixed | all

`speed`: `choose_plan` on one thread for models of equal transformer blocks with tied embeddings, 16 GiB devices on a 10
Gb/s network unless the row says otherwise. Every round makes its plan from the profile object alone; numba's cache is
on disk. CPU time is shown beside elapsed time: where they differ, others were using the machine. The first plan of a
process is timed in fresh processes, imports shown separately; with `--cold`, also without any cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from varuna_planner.profile.document import Link, Links, Measurement, Profile, SectionProfile, SharedParameter
from varuna_planner.search.auto_config import choose_plan

GIB = 2**30
PARTS = ("speed", "accuracy", "paper", "mixed")
SEQUENCE, VOCABULARY = 1024, 50257
FLOP_PER_US, LAUNCH_US = 60e6, 150.0
"""The speed of a device, and the fixed time of a section."""


class SpeedCase(NamedTuple):
    """One row."""

    gpus: int
    sections: int
    hidden: int
    global_batch: int
    memory_gib: int | None
    target_ms: float

    @property
    def name(self) -> str:
        memory = "no limit" if self.memory_gib is None else f"{self.memory_gib} GiB"
        return f"{self.gpus:,} GPUs, {self.sections} sections, {memory}, batch {self.global_batch:,}"


CASES = (
    SpeedCase(128, 54, 1920, 8192, 16, 10),
    SpeedCase(128, 128, 1920, 8192, 16, 10),
    SpeedCase(256, 54, 1920, 8192, 16, 10),
    SpeedCase(256, 54, 1920, 8192, 8, 10),
    SpeedCase(4096, 96, 4096, 8192, 16, 50),
    SpeedCase(4096, 512, 4096, 8192, None, 50),
    SpeedCase(4096, 512, 4096, 8192, 16, 50),
    SpeedCase(4096, 512, 4096, 8192, 80, 50),
    SpeedCase(100_000, 96, 4096, 131_072, 16, 500),
    SpeedCase(100_000, 96, 4096, 1_048_576, 80, 500),
    SpeedCase(100_000, 512, 4096, 131_072, None, 500),
    SpeedCase(100_000, 512, 4096, 131_072, 16, 500),
    SpeedCase(100_000, 512, 4096, 131_072, 80, 500),
    SpeedCase(100_000, 512, 4096, 1_048_576, 80, 500),
)

FIRST_CALL = """
import time
began = time.perf_counter()
import sys
sys.path.insert(0, sys.argv[1])
from planner import CASES, blocks, plan
profile = blocks(CASES[0])
imported = time.perf_counter()
plan(profile, CASES[0])
print(imported - began, time.perf_counter() - imported)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "all"), nargs="?", default="all", help="its --help lists its options")
    parser.add_argument("--json", action="store_true")
    given, rest = parser.parse_known_args()
    report = {}
    for part in PARTS if given.part == "all" else (given.part,):
        # What the other parts need takes a while to import.
        module = sys.modules[__name__] if part == "speed" else importlib.import_module(f"_planner_{part}")
        options = argparse.ArgumentParser(prog=f"planner.py {part}")
        module.add_arguments(options)
        report[part] = module.run(options.parse_args([] if given.part == "all" else rest))
        if not given.json:
            Console().print(module.table(report[part]))
    if given.json:
        print(json.dumps(report, indent=2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `speed`."""
    parser.add_argument("--rounds", type=int, default=9, help="plans of each row")
    parser.add_argument("--cold", action="store_true", help="time a first plan without numba's cache, too")


def run(given: argparse.Namespace) -> dict[str, Any]:
    """The figures of `speed`."""
    rows = [_time(case, given.rounds) for case in CASES]
    report: dict[str, Any] = {"rows": rows, "first_call": _first_call(None)}
    if given.cold:
        with tempfile.TemporaryDirectory() as folder:
            report["first_call_cold"] = _first_call(folder)
    return report


def table(report: dict[str, Any]) -> Table:
    """`report` for people."""
    shown = Table("case", "min ms", "median ms", "CPU ms", "target ms", "candidates", "best", title="choose_plan")
    for row in report["rows"]:
        times = (f"{row[key]:.1f}" for key in ("min_ms", "median_ms", "cpu_ms"))
        shown.add_row(row["case"], *times, f"{row['target_ms']:g}", f"{row['candidates']:,}", row["best"])
    for key, name in (("first_call", "first plan of a process"), ("first_call_cold", "the same without numba's cache")):
        if key in report:
            first = report[key]
            shown.add_row(
                name, f"{first['plan_s'] * 1e3:.0f}", "", "", "1000", "", f"imports {first['import_s']:.2f} s"
            )
    return shown


def plan(profile: Profile, case: SpeedCase) -> Any:
    """The planner's answer."""
    memory = None if case.memory_gib is None else case.memory_gib * GIB
    return choose_plan(
        profile, gpus=case.gpus, global_batch=case.global_batch, device_memory_bytes=memory, gpus_per_vm=1
    )


def blocks(case: SpeedCase) -> Profile:
    """Sections of one transformer block each; the first has the embedding, the last the head."""
    hidden, last = case.hidden, case.sections - 1
    sections = []
    for index in range(case.sections):
        parameters = 12 * hidden**2 + (VOCABULARY * hidden if index == 0 else 0)
        measurements = []
        for m in (1, 2, 4, 8):
            flop = m * SEQUENCE * (24 * hidden**2 + 4 * SEQUENCE * hidden)
            forward_us = (LAUNCH_US + flop / FLOP_PER_US) * (1.35 if index == last else 1.02 if index == 0 else 1.0)
            message = 2 * m * SEQUENCE * hidden
            measurements.append(
                Measurement(
                    micro_batch=m,
                    forward_us=forward_us,
                    backward_us=2 * forward_us,
                    recompute_us=forward_us,
                    output_bytes=message,
                    input_bytes=message if index else 0,
                    activation_bytes=17 * message,
                )
            )
        sections.append(
            SectionProfile(
                index=index,
                name=f"block.{index}",
                parameter_bytes=2 * parameters,
                gradient_bytes=2 * parameters,
                optimizer_bytes=12 * parameters,
                measurements=tuple(measurements),
            )
        )
    return Profile(
        sections=tuple(sections),
        links=Links(other_vm=Link(latency_us=200, bandwidth_bytes_per_s=1.25e9, jitter_us=50)),
        shared_parameters=(SharedParameter(name="wte", sections=(0, last), bytes=2 * VOCABULARY * hidden),),
    )


def _time(case: SpeedCase, rounds: int) -> dict[str, Any]:
    profile = blocks(case)
    choice = plan(profile, case)  # warm
    elapsed_ms, cpu_ms = [], []
    for _ in range(rounds):
        elapsed, cpu = time.perf_counter(), time.thread_time()
        plan(profile, case)
        elapsed_ms.append((time.perf_counter() - elapsed) * 1e3)
        cpu_ms.append((time.thread_time() - cpu) * 1e3)
    best = choice.best
    return {
        "case": case.name,
        "min_ms": min(elapsed_ms),
        "median_ms": statistics.median(elapsed_ms),
        "cpu_ms": min(cpu_ms),
        "target_ms": case.target_ms,
        "candidates": len(choice.candidates),
        "best": "none fits" if best is None else f"{best.p}×{best.d}, m={best.micro_batch}, k={best.run_ahead}",
    }


def _first_call(cache: str | None) -> dict[str, float]:
    """The best of three fresh processes; with a folder for numba's cache, the one that has to fill it."""
    environment = {**os.environ} if cache is None else {**os.environ, "NUMBA_CACHE_DIR": cache}
    here = str(Path(__file__).resolve().parent)
    runs = []
    for _ in range(3 if cache is None else 1):
        command = [sys.executable, "-c", FIRST_CALL, here]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        runs.append([float(word) for word in done.stdout.split()])
    import_s, plan_s = min(runs, key=sum)
    return {"import_s": import_s, "plan_s": plan_s}


if __name__ == "__main__":
    main()
