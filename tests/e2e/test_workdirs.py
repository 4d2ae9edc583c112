"""A job's code goes from the user's folder to every VM, and is set up there, before it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest

from manager_world import RunningManager
from repository import WORKERS
from scripted_manager import profile_json
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("workdirs")

WORKER = WORKERS / "counting_worker.py"


def write_job(folder: Path, setup: str, **more: object) -> Path:
    folder.mkdir()
    shutil.copy(WORKER, folder / "train.py")
    (folder / "template.json").write_text(profile_json())
    (folder / ".gitignore").write_text("*.bin\n")
    (folder / "data.bin").write_text("stays")
    job = {"setup": setup, "run": "python train.py profile.json", "global_batch": 8, "profile_only": True, **more}
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


@pytest.mark.slow
def test_code_is_copied_to_the_vms_and_set_up_once(running_manager: RunningManager, tmp_path: Path) -> None:
    job = write_job(tmp_path / "counting", "cp template.json profile.json && echo done >> count")
    submitted = running_manager.varuna("submit", str(job), "--watch", timeout_s=DEADLINE_S)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    places = list(running_manager.folder.glob("**/workdirs/*/files"))
    assert len(places) == 2
    for place in places:
        assert (place / "count").read_text() == "done\n"
        assert not (place / "data.bin").exists()
    assert not (job.parent / "profile.json").exists()


@pytest.mark.slow
def test_a_setup_that_fails_ends_the_job_with_its_exit_code(running_manager: RunningManager, tmp_path: Path) -> None:
    job = write_job(tmp_path / "broken", "echo there is no wheel of that name; exit 7")
    submitted = running_manager.varuna("submit", str(job), "--watch", timeout_s=DEADLINE_S)
    assert submitted.returncode == 7, submitted.stdout + submitted.stderr
    shown = running_manager.varuna("show", "broken")
    assert "setup ended with exit code 7" in shown.stdout
    assert "there is no wheel of that name" in shown.stdout


@pytest.mark.slow
def test_a_setup_that_fails_on_one_vm_does_not_fail_the_job(running_manager: RunningManager, tmp_path: Path) -> None:
    once = tmp_path / "once"  # whoever makes the folder fails
    job = write_job(tmp_path / "unlucky", f"mkdir {once} && exit 3; cp template.json profile.json")
    submitted = running_manager.varuna("submit", str(job), "--watch", timeout_s=DEADLINE_S)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert once.is_dir()
    assert "setup_failed" in running_manager.varuna("events", "unlucky", "--json").stdout


@pytest.mark.slow
def test_a_setup_ends_when_its_job_is_cancelled_and_the_next_job_has_its_turn(
    running_manager: RunningManager, tmp_path: Path
) -> None:
    def began(name: str) -> list[int]:
        return [int(path.suffix[1:]) for path in tmp_path.glob(f"{name}.began.*")]

    def sleeping(name: str) -> int:
        """How many of its setups run. Others may have the numbers of those that have ended."""
        return sum(map(_sleeps, began(name)))

    for name in ("first", "second"):
        job = write_job(tmp_path / name, f"touch {tmp_path}/{name}.began.$$; exec sleep 1000", setup_timeout_s=900)
        assert running_manager.varuna("submit", str(job)).returncode == 0
        wait_until(lambda name=name: began(name), f"the setup of {name}")
    assert running_manager.varuna("cancel", "first").returncode == 0
    wait_until(lambda: not sleeping("first"), "the end of the first job's setups")
    wait_until(lambda: sleeping("second") == 2, "the second job's turn on both VMs")
    assert running_manager.varuna("cancel", "second").returncode == 0
    wait_until(lambda: not sleeping("second"), "the end of the second job's setups")


def _sleeps(pid: int) -> bool:
    try:
        return "1000" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
