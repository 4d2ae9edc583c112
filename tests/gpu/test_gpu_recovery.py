"""A job on CUDA devices loses a VM under a real manager, and goes on in place with the same losses.

All VMs are of this machine and share its first device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manager_world import find_copied, find_training, kill_vm, start_manager
from repository import ROOT
from varuna_client import Client
from waiting import DEADLINE_S, wait_until

EXAMPLE = ROOT / "examples" / "gpt"
AGENT = [sys.executable, "-m", "varuna_agent.main", "--device", "cuda"]
STEPS, GLOBAL_BATCH = 80, 12


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of plain PyTorch, on the CPU."""
    options = ["--steps", str(STEPS), "--global-batch", str(GLOBAL_BATCH)]
    ended = subprocess.run(
        [sys.executable, "reference.py", *options],
        cwd=EXAMPLE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # a small model: more threads are slower
        capture_output=True,
        check=True,
        timeout=DEADLINE_S,
    )
    return list(json.loads(ended.stdout)["losses"])


@pytest.mark.parametrize(
    ("vms", "before", "after", "more"),
    [
        pytest.param(3, 3, 2, {"plan": {"p": 1}}, id="replicas"),
        pytest.param(4, 3, 3, {"plan": {"p": 3, "d": 1}, "copies": "on"}, id="stages"),
    ],
)
def test_survivors_go_on_with_the_same_losses(
    vms: int, before: int, after: int, more: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    """On so many VMs. `before` of them train at first, and `after` when one is lost."""
    options = ["--agent-command", json.dumps(AGENT), "--device-memory-bytes", str(1 << 33)]
    with start_manager(tmp_path, vms, *options) as client:
        spec: dict[str, Any] = {
            "name": "gpt",
            "run": f"{sys.executable} train.py --steps {STEPS}",
            "workdir": str(EXAMPLE),
        }
        spec |= {"checkpoint": {"interval_s": 3600}}  # none is newer than what memories hold
        job = client.submit({**spec, "global_batch": GLOBAL_BATCH, **more})["id"]  # type: ignore[typeddict-item]
        first = wait_until(lambda: find_training(client, job, 0, steps=20), "twenty steps")
        if "copies" in more:
            first = wait_until(lambda: find_copied(client, job, first["number"]), "copies of all stages")
        client.set_local_capacity(vms - 1)  # no VM comes in the lost one's place
        kill_vm(client, first["placement"][1]["vm_id"])
        ended = wait_until(lambda: find_ended(client, job), "the job's end")
        assert ended["state"] == "succeeded", ended["error"]
        training = [one for one in client.generations(job) if one["kind"] == "training"]
        losses = {one["step"]: one["loss"] for one in client.metrics(job)}
    assert [len(one["placement"]) for one in training[:2]] == [before, after]
    second = training[1]
    assert second["state_from"] is not None
    assert second["state_from"]["store"] == 0, "nothing came from a checkpoint"
    assert [losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-3)


def find_ended(client: Client, job: str) -> Any:
    document = client.job(job)
    return document if document["state"] in ("succeeded", "failed", "cancelled") else None
