"""Runs tests again and again on a busy machine, to find those that pass only on an idle one.

Each round is one pytest run of the selection beside busy loops. `--stop-s` also stops the whole run (SIGSTOP) once a
round, at any moment of it, as a suspended laptop or an overcommitted host does. Every failure's text is kept in a file
of its own as soon as the test has failed. Exit code 1: some test failed in some round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
WITH_PROCESSES = ("tests/integration", "tests/e2e", "tests/dashboard", "tests/simulation")
"""The folders whose tests start processes, wait or measure. Those of tests/unit do none of these."""
_PERCENT = re.compile(rb"\[ *(\d+)%\]")
"""How pytest says, at the end of a line, which share of the tests is done."""
_MARK = "FLAKES_RUN"
"""The environment variable that marks the processes of a run. Not VARUNA_*: agents keep those from workers."""
_CHECK_EVERY = 1_000_000
"""Turns of a busy loop between two looks at whether its parent still lives."""


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the run under way ends
    arguments.logs.mkdir(parents=True, exist_ok=True)
    failures: Counter[str] = Counter()
    with busy_loops(arguments.load * (os.cpu_count() or 1)):
        for number in range(1, arguments.times + 1):
            folder = arguments.logs / f"round{number}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            began = time.monotonic()
            code = run_round(arguments, folder)
            failed = sorted(log.read_text().partition("\n")[0] for log in (folder / "failures").iterdir())
            failures.update(failed)
            took = time.monotonic() - began
            print(
                f"round {number} of {arguments.times}: {took:.0f} s, {len(failed)} failed",
                *failed,
                sep="\n  ",
                flush=True,
            )
            if code not in (0, 1):
                print(f"pytest ended with {code}: see {folder}/output.log", flush=True)
                return code
    if arguments.json:
        print(json.dumps({"rounds": arguments.times, "load_per_core": arguments.load, "failures": dict(failures)}))
    for test, count in failures.most_common():
        print(f"{count} of {arguments.times}: {test}")
    print(f"{len(failures)} tests failed in {arguments.times} rounds; logs in {arguments.logs}")
    return 1 if failures else 0


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


def run_round(arguments: argparse.Namespace, folder: Path) -> int:
    """One pytest run, whose output and failures are in `folder`. Returns its exit code."""
    failures = folder / "failures"
    failures.mkdir()
    command = [sys.executable, "-m", "pytest", "-n", arguments.workers, "--dist", "loadgroup", "-v"]
    command += ["-p", "tests.soak.kept_failures", f"--failures-to={failures}"]
    command += [f"-k={arguments.keyword}"] * bool(arguments.keyword)
    command += [f"-m={arguments.marker}"] * bool(arguments.marker)
    output = folder / "output.log"
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark}
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments.tests], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            if arguments.stop_s:
                stop_once(process, mark, output, arguments.stop_s)
            return process.wait()
        finally:
            if process.poll() is None:  # an end from outside, in which tests cannot end what they have started
                end_run(mark)
            process.wait()


def end_run(mark: str) -> None:
    """Kill all processes of the run, and those that they start meanwhile."""
    while found := list_run(mark):
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(found, timeout=5)


def list_run(mark: str) -> list[psutil.Process]:
    """All processes of a run: those that carry its mark, and their descendants.

    Servers of PostgreSQL and browsers have left their parents, and workers of jobs do not get all of an environment.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_MARK) == mark:
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def stop_once(process: subprocess.Popen[bytes], mark: str, output: Path, seconds: float) -> None:
    """Stop all processes of the run when some share of the tests is done, and let them go on."""
    at_percent = random.randrange(95)
    while max(map(int, _PERCENT.findall(output.read_bytes())), default=0) < at_percent:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=random.uniform(1, 5))
            return
    print(f"stopped for {seconds:g} s at {at_percent} %", flush=True)
    stopped = []
    try:
        for each in list_run(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.status() != psutil.STATUS_STOPPED:  # else a test has stopped it, and it is to stay so
                    each.suspend()
                    stopped.append(each)
        time.sleep(seconds)
    finally:
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
