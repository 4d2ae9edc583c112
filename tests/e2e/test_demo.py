"""The demo, shortened: what `make demo` runs, with fewer steps. And what it leaves behind when it is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("demo")

ROOT = Path(__file__).resolve().parents[2]
VARUNA = str(Path(sys.executable).parent / "varuna")
PROMISED = {"steps", "generations", "max_loss_difference", "reference_losses", "losses", "ok"}
PROMISED_OF_EACH = {"number", "p", "d", "micro_batch", "reason", "seconds_without_progress", "steps_redone"}


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process that names the folder in its command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in argument for argument in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_the_demo_morphs_three_times_and_every_loss_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    folder, out = tmp_path / "demo-out", tmp_path / "report.json"
    result = subprocess.run(
        [VARUNA, "demo", "--short", "--dir", str(folder), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=None,  # it gives up by itself when nothing happens for a long time
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "OK: 120 steps" in result.stdout
    assert "seconds without progress" in result.stdout

    report = json.loads(out.read_text())
    assert report.keys() >= PROMISED
    assert report["ok"] is True
    assert len(report["losses"]) == len(report["reference_losses"]) == report["steps"] == 120
    assert report["max_loss_difference"] <= 1e-4
    differences = [
        abs(loss - reference) / abs(reference)
        for loss, reference in zip(report["losses"], report["reference_losses"], strict=True)
    ]
    assert max(differences) <= 1e-4

    generations = report["generations"]
    assert all(generation.keys() >= PROMISED_OF_EACH for generation in generations)
    assert len(generations) >= 4
    assert generations[0]["kind_of_morph"] is None
    for morph in (generation for generation in generations[1:] if generation["steps"]):
        assert morph["kind_of_morph"] in ("reshape", "restart")
        assert (morph["micro_batches_redone"] is not None) is (morph["kind_of_morph"] == "reshape")
        assert sum(morph["state_from"].values()) > 0
    shapes = [(generation["p"], generation["d"]) for generation in generations]
    changed = [new for old, new in pairwise(shapes) if old != new]
    assert any(p > 1 for p, _ in changed)
    assert any(d > 1 for _, d in changed) is ("no morph went to another P×D with D > 1" not in result.stdout)
    assert all(p > 1 for p, _ in shapes), "one device cannot hold the model"
    assert [disturbance["kind"] for disturbance in report["disturbances"]] == ["KillVm", "OfferVm", "PreemptVm"]
    assert report["disturbances"][2]["left_after_s"] is not None
    assert processes_of(folder) == []


def family(demo: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All processes that the demo started, and those that these started."""
    try:
        return psutil.Process(demo.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(process: psutil.Process) -> bool:
    """Processes that run. One that has ended and waits for this machine's init does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def trains(process: psutil.Process) -> bool:
    try:
        return any(argument.endswith("train.py") for argument in process.cmdline())
    except psutil.Error:
        return False


def listen_to_interrupts() -> None:
    """A shell lets the programs that it starts in the background ignore Ctrl-C, these tests and their children too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, number: int, code: int) -> None:
    folder = tmp_path / "demo-out"
    demo = subprocess.Popen(
        [VARUNA, "demo", "--short", "--dir", str(folder), "--out", str(tmp_path / "report.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        preexec_fn=listen_to_interrupts,
    )
    try:

        def with_a_worker() -> list[psutil.Process]:
            assert demo.poll() is None
            found = family(demo)
            return found if any(map(trains, found)) else []

        started = wait_until(with_a_worker, "a worker")
        demo.send_signal(number)
        assert demo.wait(DEADLINE_S) == code
        # What an agent had just forked when it was killed ends by itself, once it has begun to run.
        wait_until(lambda: not any(map(alive, started)) and processes_of(folder) == [], "the end of all processes")
    finally:
        if demo.poll() is None:
            demo.send_signal(signal.SIGTERM)
            demo.wait(DEADLINE_S)
