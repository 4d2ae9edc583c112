"""A job's code goes from the user's folder to every VM, and is set up there, before it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from manager_world import RunningManager
from scripted_manager import profile_json

pytestmark = [pytest.mark.xdist_group("workdirs"), pytest.mark.timeout(240)]

WORKER = Path(__file__).with_name("counting_worker.py")


def write_job(folder: Path, setup: str, **more: str) -> Path:
    folder.mkdir()
    shutil.copy(WORKER, folder / "train.py")
    (folder / "template.json").write_text(profile_json())
    (folder / ".gitignore").write_text("*.bin\n")
    (folder / "data.bin").write_text("stays")
    job = {"setup": setup, "run": "python train.py profile.json", "global_batch": 8, "profile_only": True, **more}
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def test_code_is_copied_to_the_vms_and_set_up_once(running_manager: RunningManager, tmp_path: Path) -> None:
    job = write_job(tmp_path / "counting", "cp template.json profile.json && echo done >> count")
    submitted = running_manager.varuna("submit", str(job), "--watch", timeout_s=180)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    places = list(running_manager.folder.glob("**/workdirs/*/files"))
    assert len(places) == 2
    for place in places:
        assert (place / "count").read_text() == "done\n"
        assert not (place / "data.bin").exists()
    assert not (job.parent / "profile.json").exists()


def test_a_setup_that_fails_ends_the_job_with_its_exit_code(running_manager: RunningManager, tmp_path: Path) -> None:
    job = write_job(tmp_path / "broken", "echo there is no wheel of that name; exit 7")
    submitted = running_manager.varuna("submit", str(job), "--watch", timeout_s=180)
    assert submitted.returncode == 7, submitted.stdout + submitted.stderr
    shown = running_manager.varuna("show", "broken")
    assert "setup ended with exit code 7" in shown.stdout
    assert "there is no wheel of that name" in shown.stdout
