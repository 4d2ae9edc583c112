"""A script of the seeds, handed to a manager by `run_varuna`, trains on the manager's VMs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from manager_world import DEADLINE_S, RunningManager, wait_until
from test_launcher_run import SEEDS_SCRIPT

INTEGRATION = Path(__file__).resolve().parents[1] / "integration"


def test_with_a_manager_the_script_becomes_a_job(running_manager: RunningManager, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEEDS_SCRIPT)
    (tmp_path / "env").write_text(f"PYTHONPATH={INTEGRATION}\n")
    flags = ["--manager_ip", running_manager.url, "--nstages", "2", "--batch_size", "8", "--env_file", "env"]
    command = [sys.executable, "-m", "varuna.run_varuna", *flags, "train.py", "--steps", "3", "--save", "store"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    name = result.stdout.split()[1]
    assert name.startswith("train-")

    def job() -> str:
        shown = running_manager.varuna("ps").stdout
        [line] = [line for line in shown.splitlines() if name in line]
        return line

    line = wait_until(lambda: found if any(end in (found := job()) for end in ("succeeded", "failed")) else None, "end")
    assert "succeeded" in line, running_manager.varuna("logs", name).stdout
    assert (tmp_path / "store" / "varuna_ckpt_3" / "manifest.json").exists()
