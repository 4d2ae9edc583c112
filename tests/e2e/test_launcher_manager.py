"""A script of the seeds, handed to a manager by `run_varuna`, trains on the manager's VMs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manager_world import RunningManager
from repository import TRAINING_SCRIPTS
from seeds_script import SEEDS_SCRIPT
from varuna_proto.rest import END_STATES, PipelineDocument, StageTraceDocument
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow


def test_with_a_manager_the_script_becomes_a_job(running_manager: RunningManager, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEEDS_SCRIPT)
    (tmp_path / "env").write_text(f"PYTHONPATH={TRAINING_SCRIPTS}\n")
    flags = ["--manager_ip", running_manager.url, "--nstages", "2", "--batch_size", "8", "--env_file", "env"]
    name = submit(tmp_path, *flags, "--checkpoint_url", "job", "train.py", "--steps", "3", "--save", "store")

    with running_manager.client() as client:
        # Two generations that each start PyTorch: minutes, while other tests use the processors.
        wait_until(lambda: client.job(name)["state"] in END_STATES, "the job's end")
        assert client.job(name)["state"] == "succeeded", running_manager.varuna("logs", name).stdout
        assert (tmp_path / "store" / "varuna_ckpt_3" / "manifest.json").exists()
        check_pipeline(client.pipeline(name))
        again = client.job(submit(tmp_path, "--resume"))  # the same once more
        client.cancel(again["name"])
        first = client.job(name)
    assert again["id"] != first["id"]
    assert {**again["spec"], "name": name} == first["spec"]
    assert first["spec"]["checkpoint"]["url"] == str(tmp_path / "job")


def check_pipeline(traced: PipelineDocument) -> None:
    """What both stages did in the third step: every micro-batch forwards before backwards."""
    assert (traced["step"], traced["p"], traced["d"]) == (3, 2, 1)
    assert [(stage["stage"], stage["rank"]) for stage in traced["stages"]] == [(0, 0), (1, 1)]
    for stage in traced["stages"]:
        kinds = {kind: [op[1] for op in stage["ops"] if op[0] == kind] for kind in "FB"}
        assert kinds["F"] == kinds["B"] == list(range(len(kinds["F"]))) != []
        began = [op[2] for op in stage["ops"]]
        assert began == sorted(began)
        assert 0 <= began[0] < traced["span_us"]
    # Beginnings, not ends: on a busy machine a stage may lose its processor when it has sent, before it looks at the
    # clock. What it sent is under way by then.
    first, second = ({kind: starts(stage, kind) for kind in "FB"} for stage in traced["stages"])
    for forward, later in zip(first["F"], second["F"], strict=True):
        assert forward < later, "the second stage waits for what the first one sends"
    for backward, earlier in zip(first["B"], second["B"], strict=True):
        assert earlier < backward, "the first stage waits for the second one's gradients"


def starts(stage: StageTraceDocument, kind: str) -> list[float]:
    return [op[2] for op in stage["ops"] if op[0] == kind]


def submit(folder: Path, *arguments: str) -> str:
    """Submits the script with `run_varuna`. Returns the job's name."""
    command = [sys.executable, "-m", "varuna.run_varuna", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("job train-")
    return result.stdout.split()[1]
