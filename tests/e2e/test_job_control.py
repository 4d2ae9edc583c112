"""A real job under real agents hangs, gives way, is drained, cancelled and retried: it ends with no step lost."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manager_world import all_ready, run_varuna
from restartable_manager import RestartableManager
from small_training import SMALL_MODEL
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("e2e")

SCRIPT = (
    SMALL_MODEL
    + """
    def get_stuck():
        Path("stuck").touch()
        time.sleep(3600)

    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        if step == 4 and os.environ["RANK"] == "1" and not Path("stuck").exists():
            get_stuck()
        model.step(batch)
        if Path("end").exists() and step >= int(Path("end").read_text()):
            break  # on every rank at the same step
        time.sleep(0.02)
"""
)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[RestartableManager]:
    folder = tmp_path / "manager"
    folder.mkdir()
    with DemoProcesses(folder) as processes:
        manager = RestartableManager(processes, folder, "--vms", "2", "--hang-minimum-s", "8")
        manager.start()
        yield manager


def job_file(folder: Path, **spec: Any) -> str:
    folder.mkdir()
    path = folder / "job.yaml"  # YAML knows all of JSON
    # Not copied: the script looks there for the test's later commands.
    path.write_text(json.dumps({"global_batch": 4, "copy_workdir": False, **spec}))
    return str(path)


def events(client: Client, kind: str) -> list[Any]:
    return [event for event in client.events("small") if event["kind"] == kind]


def go_on(client: Client, steps: int = 5) -> int:
    """Wait for this many more steps; returns the newest."""
    at_least = client.job("small")["step"] + steps
    wait_until(lambda: client.job("small")["step"] >= at_least, f"step {at_least}")
    return at_least


@pytest.mark.slow
def test_a_job_hangs_gives_way_is_drained_cancelled_and_retried(manager: RestartableManager, tmp_path: Path) -> None:
    def varuna(*arguments: str) -> str:
        result = run_varuna(*arguments, url=manager.url, timeout_s=DEADLINE_S)
        assert result.returncode == 0, result.stderr
        return result.stdout

    workdir = tmp_path / "small"
    path = job_file(workdir, name="small", run="python train.py", plan={"p": 2})
    (workdir / "train.py").write_text(textwrap.dedent(SCRIPT))
    with manager.client() as client:
        wait_until(lambda: all_ready(client, 2), "two VMs")
        varuna("submit", path)

        # It hangs: the event names the rank that the other one waits for, with its stack, and the job goes on.
        hang = wait_until(lambda: events(client, "hang"), "the hang")[0]
        assert hang["data"]["rank"] == 1
        assert "does not wait for other ranks" in hang["message"]
        assert "in get_stuck" in hang["data"]["stack"]
        assert "wait_until" in varuna("stacks", "small", "--generation", str(hang["generation"]))
        go_on(client)

        # A job of higher priority needs both GPUs: it saves and waits. The other's script fails twice, with its code.
        urgent = job_file(
            tmp_path / "urgent",
            name="urgent",
            run="exit 7",
            priority=1,
            max_restarts_on_errors=1,
            resources={"min_gpus": 2},
        )
        watched = run_varuna("submit", urgent, "--watch", url=manager.url, timeout_s=DEADLINE_S)
        assert watched.returncode == 7
        assert client.job("urgent")["exit_code"] == 7
        assert len(client.generations("urgent")) == 2
        (preempted,) = events(client, "job_preempted")
        assert "urgent (priority 1)" in preempted["message"]
        wait_until(lambda: client.generations("small")[-1]["last_step"], "the first step after it")
        assert client.generations("small")[-1]["steps_redone"] == 0

        # One of its VMs is drained.
        drained = client.generations("small")[-1]["placement"][0]["vm_id"]
        assert "draining" in varuna("drain", drained)
        wait_until(lambda: all(vm["id"] != drained for vm in client.vms()), "the drained VM's end")
        go_on(client)

        # Cancelled with a last checkpoint, and retried, it goes on from there as the same job.
        assert "cancelling" in varuna("cancel", "small", "--save")
        cancelled = wait_until(lambda: (job := client.job("small"))["state"] == "cancelled" and job, "the cancelling")
        saved = max(checkpoint["step"] for checkpoint in client.checkpoints("small"))
        assert saved == cancelled["step"]
        (workdir / "end.part").write_text(str(saved + 3))
        (workdir / "end.part").rename(workdir / "end")
        varuna("retry", "small", "--watch")
        job, last = client.job("small"), client.generations("small")[-1]
        assert (job["id"], job["state"], job["exit_code"]) == (cancelled["id"], "succeeded", 0)
        assert (last["resumed_step"], last["last_step"]) == (saved, saved + 3)
        causes = [generation["end_cause"] for generation in client.generations("small")]
        redone = [generation["steps_redone"] for generation in client.generations("small")]
        assert not any(count for count, before in zip(redone[1:], causes, strict=False) if before != "hang")
