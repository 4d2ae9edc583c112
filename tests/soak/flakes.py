"""Runs tests again and again on a busy machine, to find those that pass only on an idle one.

Each round is one pytest run of the selection beside busy loops. `--stop-s` also stops the whole run (SIGSTOP) once a
round, as a suspended laptop or an overcommitted host does. Every failure's text is kept in a file of its own. Exit code
1: some test failed in some round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
WITH_PROCESSES = ("tests/integration", "tests/e2e", "tests/dashboard", "tests/simulation")
"""The folders whose tests start processes, wait or measure. Those of tests/unit do none of these."""
_CHECK_EVERY = 1_000_000
"""Turns of a busy loop between two looks at whether its parent still lives."""


@dataclass
class Flakes:
    """The failures of all rounds so far; each one's text is a file in `folder`."""

    folder: Path
    rounds: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def add_round(self, report: Path) -> list[str]:
        """Count a round by its JUnit report. Returns the ids of the tests that failed in it."""
        failed = []
        for case in ElementTree.parse(report).iter("testcase"):
            problem = case.find("failure") if case.find("failure") is not None else case.find("error")
            if problem is None:
                continue
            test = f"{case.get('classname')}::{case.get('name')}"
            parts = [problem.text or "", *(part.text or "" for part in case if part.tag.startswith("system-"))]
            name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in test)[-150:]
            (self.folder / f"{name}.round{self.rounds}.log").write_text("\n\n".join(parts))
            failed.append(test)
        self.rounds += 1
        self.failures.update(failed)
        return failed


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the run under way ends
    arguments.logs.mkdir(parents=True, exist_ok=True)
    flakes = Flakes(arguments.logs)
    with busy_loops(arguments.load * (os.cpu_count() or 1)):
        for number in range(arguments.times):
            began = time.monotonic()
            code = run_round(arguments, arguments.logs / f"round{number}")
            failed = flakes.add_round(arguments.logs / f"round{number}.xml")
            took = time.monotonic() - began
            print(
                f"round {number + 1} of {arguments.times}: {took:.0f} s, {len(failed)} failed",
                *failed,
                sep="\n  ",
                flush=True,
            )
            if code not in (0, 1):
                print(f"pytest ended with {code}: see {arguments.logs}/round{number}.log", flush=True)
                return code
    if arguments.json:
        print(json.dumps({"rounds": flakes.rounds, "load_per_core": arguments.load, "failures": dict(flakes.failures)}))
    for test, count in flakes.failures.most_common():
        print(f"{count} of {flakes.rounds}: {test}")
    print(f"{len(flakes.failures)} tests failed in {flakes.rounds} rounds; logs in {arguments.logs}")
    return 1 if flakes.failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(WITH_PROCESSES), help="what pytest is to run")
    parser.add_argument("--times", type=int, default=50, help="rounds")
    parser.add_argument("--load", type=int, default=4, help="busy loops per core")
    parser.add_argument("--stop-s", type=float, default=0, help="stop the whole run for this long, once a round")
    parser.add_argument("--workers", default="3", help="pytest's workers (-n)")
    parser.add_argument("-k", dest="keyword", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("-m", dest="marker", default="", help="only tests with this mark, as pytest's -m")
    parser.add_argument("--logs", type=Path, default=ROOT / "test-artifacts" / "flakes", help="where failures are kept")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, too")
    return parser.parse_args()


def run_round(arguments: argparse.Namespace, base: Path) -> int:
    """One pytest run, which leaves its output in `base`.log and its report in `base`.xml."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        arguments.workers,
        "--dist",
        "loadgroup",
        "-v",
        f"--junitxml={base}.xml",
    ]
    command += [f"-k={arguments.keyword}"] * bool(arguments.keyword) + [f"-m={arguments.marker}"] * bool(
        arguments.marker
    )
    with base.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen([*command, *arguments.tests], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            if arguments.stop_s:
                stop_once(process, arguments.stop_s)
            return process.wait()
        finally:
            process.kill()
            process.wait()


def stop_once(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Stop the process and all that it has started, at some moment of its first minutes, and let them go on."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(random.uniform(10, 240))
        return
    stopped = []
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.suspend()
            stopped.append(each)
    time.sleep(seconds)
    for each in reversed(stopped):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.resume()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that take all the processor time that they get, until the block ends or this process dies."""
    spawning = multiprocessing.get_context("spawn")
    loops = [spawning.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        for _ in range(_CHECK_EVERY):
            pass


if __name__ == "__main__":
    sys.exit(main())
