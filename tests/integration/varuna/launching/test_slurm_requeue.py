"""A job of Slurm loses a node, is queued again, and goes on in the shape for the nodes that are left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launched_machines import FOREVER, Machines, assert_losses, find_free_port, list_losses, list_plans
from repository import ROOT
from slurm_cluster import SlurmCluster, slurm_cluster
from waiting import wait_until

BATCH = ROOT / "examples" / "launchers" / "slurm" / "train.sbatch"

pytestmark = [pytest.mark.slow, pytest.mark.needs("slurm")]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3) as started:
        yield started


class Training:
    """Jobs that run the example, whose logs it reads."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._jobs = 0
        # Nodes are on this machine, and their names lead nowhere.
        cluster.environment |= Machines(folder).environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
        }

    def submit(self, *options: str, arguments: tuple[str, ...]) -> int:
        self._jobs += 1
        log = self._folder / f"machine{self._jobs}.log"
        command = ["sbatch", "--parsable", f"--chdir={ROOT}", f"--output={log}", *options, str(BATCH), *arguments]
        return int(self._cluster.run(*command))

    def read_logs(self) -> list[str]:
        return [path.read_text() for path in sorted(self._folder.glob("machine*.log"))]

    def wait_for_steps(self, nodes: int, *, after: int) -> int:
        return Machines(self._folder).wait_for_steps(nodes, after=after)


def test_a_requeued_job_goes_on_with_the_nodes_that_are_left(cluster: SlurmCluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path)
    job = training.submit(arguments=FOREVER)
    plans = training.wait_for_steps(3, after=0)
    cluster.kill_node("n3")
    wait_until(lambda: "down" in cluster.run("sinfo", "-hN", "-nn3", "-o%t"), "the loss of the node")
    wait_until(lambda: cluster.state(job) == "PENDING", f"the job to be queued again\n{cluster.describe()}")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    training.wait_for_steps(2, after=plans)
    cluster.run("scancel", str(job))
    wait_until(lambda: cluster.state(job) in ("", "CANCELLED"), "the end of the job")

    newest = max(step for step, _ in list_losses(training.read_logs()))
    last = training.submit("--nodes=1", arguments=("--steps", str(newest + 2)))
    wait_until(lambda: cluster.state(last) in ("", "COMPLETED", "FAILED"), "the last steps")
    logs = training.read_logs()
    assert list_plans(logs[-1:])[-1][1] == 1
    assert_losses(list_losses(logs), tmp_path)
