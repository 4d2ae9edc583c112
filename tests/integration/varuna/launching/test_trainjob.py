"""Kubeflow's TrainJob: the command of its manifest, with the variables that the trainer gives each pod.

There is no cluster here: pods are processes, and the test does what JobSet does after a failure.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launched_machines import FOREVER, Machines, assert_losses, find_free_port, list_losses, list_plans
from repository import ROOT
from waiting import DEADLINE_S

FOLDER = ROOT / "examples" / "launchers" / "kubeflow"


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return document


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    started = Machines(tmp_path)
    yield started
    started.end()


def start_pods(machines: Machines, count: int, *arguments: str) -> list[Any]:
    """`arguments`: after the manifest's own."""
    trainer, port = load("trainjob.yaml")["spec"]["trainer"], find_free_port()
    program, *rest = [*trainer["command"], *trainer["args"], *arguments]
    found = shutil.which(program, path=machines.environ["PATH"])
    assert found is not None
    pods = []
    for rank in range(count):
        environ = {
            "PET_NNODES": str(count),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        pods.append(machines.start([found, *rest], environ))
    return pods


@pytest.mark.slow
def test_a_trainjob_goes_on_with_another_number_of_nodes(machines: Machines, tmp_path: Path) -> None:
    first, second = start_pods(machines, 2, *FOREVER)
    plans = machines.wait_for_steps(2, after=0)
    machines.kill(second)
    assert first.wait(DEADLINE_S) != 0, "the pod fails, so JobSet starts all of them again"
    start_pods(machines, 2, *FOREVER)
    machines.wait_for_steps(2, after=plans)
    machines.end()

    newest = max(step for step, _ in list_losses(machines.read_logs()))
    (last,) = start_pods(machines, 1, "--steps", str(newest + 2))
    assert last.wait(DEADLINE_S) == 0, machines.read_logs()[-1]
    logs = machines.read_logs()
    assert list_plans(logs[-1:])[-1][1] == 1
    assert_losses(list_losses(logs), tmp_path)


RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
"""What the trainer sets itself and refuses in a TrainJob."""


def test_the_manifests_have_the_fields_of_their_kinds() -> None:
    job, runtime = load("trainjob.yaml"), load("runtime.yaml")
    for document in (job, runtime):
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["kind"], runtime["kind"]) == ("TrainJob", "TrainingRuntime")
    assert set(job["spec"]) == {"runtimeRef", "trainer"}
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    trainer = job["spec"]["trainer"]
    fields = {"image", "command", "args", "numNodes", "numProcPerNode", "resourcesPerNode", "env"}
    assert set(trainer) == fields
    assert all(isinstance(word, str) for word in [*trainer["command"], *trainer["args"]])
    assert isinstance(trainer["numNodes"], int)
    assert RESERVED.isdisjoint(variable["name"] for variable in trainer["env"])
    assert set(runtime["spec"]) == {"mlPolicy", "template"}
    job_set = runtime["spec"]["template"]["spec"]
    assert job_set["failurePolicy"] == {"maxRestarts": 1000}
    (node,) = job_set["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["template"]["spec"]["backoffLimit"] == 0
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert (node["name"], container["name"]) == ("node", "node"), "the trainer looks for these names"
