"""Wrong input through the command line, against a real manager: one clear line, and nothing is lost."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from manager_world import RunningManager, run_varuna
from waiting import DEADLINE_S

pytestmark = pytest.mark.xdist_group("e2e")


def job_file(folder: Path, script: str, **spec: Any) -> Path:
    (folder / "train.py").write_text(textwrap.dedent(script))
    path = folder / "job.yaml"  # YAML knows all of JSON
    path.write_text(json.dumps({"run": "python train.py", "global_batch": 4, **spec}))
    return path


def one_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize("command", ["show", "cancel", "logs", "events"])
def test_a_job_that_does_not_exist(running_manager: RunningManager, command: str) -> None:
    result = running_manager.varuna(command, "nobody")
    assert result.returncode == 1
    assert "'nobody' does not exist" in one_line(result.stderr)
    assert result.stdout == ""


def test_a_port_in_use(running_manager: RunningManager, tmp_path: Path) -> None:
    port = running_manager.url.rpartition(":")[2]
    result = run_varuna("manager", "--data-dir", str(tmp_path), "--http-port", port, "--grpc-port", "0")
    assert result.returncode == 1
    assert f"port {port}" in one_line(result.stderr)
    assert "--http-port" in result.stderr
    assert running_manager.varuna("ps").returncode == 0, "the one that has the port goes on"


@pytest.mark.slow
def test_a_script_that_raises_fails_the_job_with_its_traceback_and_is_not_started_again(
    running_manager: RunningManager, tmp_path: Path
) -> None:
    path = job_file(tmp_path, "def learn():\n    raise RuntimeError('no such corpus')\n\nlearn()\n", name="raises")
    result = running_manager.varuna("submit", str(path), "--watch", timeout_s=DEADLINE_S)
    assert result.returncode == 1
    assert "RuntimeError: no such corpus" in one_line(result.stderr)
    page = running_manager.varuna("show", "raises").stdout
    assert "✘ failed" in page
    assert "Traceback (most recent call last)" in page
    assert "in learn" in page
    job = json.loads(running_manager.varuna("show", "raises", "--json").stdout)
    assert len(job["generations"]) == 1
    assert "no such corpus" in running_manager.varuna("logs", "raises").stdout


@pytest.mark.slow
def test_the_log_shown_is_that_of_the_rank_whose_script_failed(running_manager: RunningManager, tmp_path: Path) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "1":
            raise RuntimeError("only here")
        time.sleep(600)
    """
    path = job_file(tmp_path, script, name="raises-on-one")
    assert running_manager.varuna("submit", str(path), "--watch", timeout_s=DEADLINE_S).returncode == 1
    assert "only here" in running_manager.varuna("logs", "raises-on-one").stdout
    assert "only here" in running_manager.varuna("logs", "raises-on-one", "--follow").stdout
    assert running_manager.varuna("logs", "raises-on-one", "--rank", "0").stdout == ""


def test_a_global_batch_smaller_than_the_pinned_replicas_is_refused(
    running_manager: RunningManager, tmp_path: Path
) -> None:
    path = job_file(tmp_path, "", name="small-batch", global_batch=1, plan={"d": 2})
    result = running_manager.varuna("submit", str(path))
    assert result.returncode == 1
    message = one_line(result.stderr)
    assert "plan.d 2" in message
    assert "global_batch" in message
    assert "small-batch" not in running_manager.varuna("ps").stdout


@pytest.mark.slow
def test_a_model_without_a_place_to_cut_trains_with_one_stage(running_manager: RunningManager, tmp_path: Path) -> None:
    script = """
        import torch
        from torch import nn
        from varuna import Varuna
        from varuna.data import Batches

        class Uncut(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(8, 1)

            def forward(self, x):
                return self.layer(x).square().mean()

        torch.manual_seed(0)
        data = [{"x": torch.full((8,), float(i))} for i in range(16)]
        model = Varuna(Uncut(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
        model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
        for step, batch in Batches(data, first_step=model.resume() + 1, last_step=3):
            print(step, model.step(batch))
    """
    path = job_file(tmp_path, script, name="uncut")
    result = running_manager.varuna("submit", str(path), "--watch", timeout_s=DEADLINE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    job = json.loads(running_manager.varuna("show", "uncut", "--json").stdout)
    trained = [generation for generation in job["generations"] if generation["kind"] == "training"]
    assert [generation["p"] for generation in trained] == [1]
    assert [metric["step"] for metric in job["metrics"]] == [1, 2, 3]
