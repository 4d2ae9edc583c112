"""The demo, shortened: what `make demo` runs, with fewer steps. And what it leaves behind when it is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from waiting import DEADLINE_S

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


def test_the_demo_morphs_three_times_and_every_loss_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    folder, out = tmp_path / "demo-out", tmp_path / "report.json"
    result = subprocess.run(
        [VARUNA, "demo", "--short", "--dir", str(folder), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=None,  # it gives up by itself when nothing happens for long
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "OK: 90 steps" in result.stdout
    assert "seconds without progress" in result.stdout

    report = json.loads(out.read_text())
    assert report.keys() >= PROMISED
    assert report["ok"] is True
    assert len(report["losses"]) == len(report["reference_losses"]) == report["steps"] == 90
    assert report["max_loss_difference"] <= 1e-4
    differences = [
        abs(loss - reference) / abs(reference)
        for loss, reference in zip(report["losses"], report["reference_losses"], strict=True)
    ]
    assert max(differences) <= 1e-4

    generations = report["generations"]
    assert all(generation.keys() >= PROMISED_OF_EACH for generation in generations)
    assert len(generations) >= 4
    shapes = [(generation["p"], generation["d"]) for generation in generations]
    changed = [new for old, new in pairwise(shapes) if old != new]
    assert any(p > 1 for p, _ in changed)
    assert any(d > 1 for _, d in changed)
    assert all(p > 1 for p, _ in shapes), "one device cannot hold the model"
    assert [disturbance["kind"] for disturbance in report["disturbances"]] == ["KillVm", "OfferVm", "PreemptVm"]
    assert report["disturbances"][2]["left_after_s"] is not None
    assert processes_of(folder) == []


def family(demo: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All that the demo started, and what these started."""
    try:
        return psutil.Process(demo.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(process: psutil.Process) -> bool:
    """Not ended; one that ended and waits for this machine's init to notice has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def trains(process: psutil.Process) -> bool:
    try:
        return any(argument.endswith("train.py") for argument in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, number: int, code: int) -> None:
    folder = tmp_path / "demo-out"
    demo = subprocess.Popen(
        [VARUNA, "demo", "--short", "--dir", str(folder), "--out", str(tmp_path / "report.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        deadline, started = time.monotonic() + 90, family(demo)
        while not any(map(trains, started)):
            assert time.monotonic() < deadline, "no worker came up"
            assert demo.poll() is None
            time.sleep(0.1)
            started = family(demo)
        demo.send_signal(number)
        assert demo.wait(DEADLINE_S) == code
        assert [process for process in started if alive(process)] == []
        assert processes_of(folder) == []
    finally:
        if demo.poll() is None:
            demo.send_signal(signal.SIGTERM)
            demo.wait(DEADLINE_S)
