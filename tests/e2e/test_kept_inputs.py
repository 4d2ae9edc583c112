"""A script with a loader of its own loses a VM in a long step: its workers end the step, and new processes go on from
memory, under a real manager and agents."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_trial import (
    ModelSize,
    RecoveryWay,
    TrialOptions,
    kill_all,
    list_vm_processes,
    make_job,
    start_manager,
    wait_for,
)

from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses

pytestmark = pytest.mark.xdist_group("e2e")

SIZE = ModelSize(name="long", width=64, layers=8, global_batch=32, micro_batch=4, example_ms=50.0)
"""Its steps take more than ten seconds."""
OPTIONS = replace(TrialOptions.undisturbed(2, 2), steps_before=2)
WAY = RecoveryWay(name="memory", flags="--copy-batches")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with (
        DemoProcesses(tmp_path) as processes,
        start_manager(processes, tmp_path, SIZE, OPTIONS, ["--grpc-port", "0"]) as client,
    ):
        yield client


@pytest.mark.slow
def test_a_lost_vm_costs_a_script_with_its_own_loader_its_replicas_share(client: Client, tmp_path: Path) -> None:
    record = tmp_path / "record"
    job = client.submit(make_job(SIZE, OPTIONS, WAY, record))["id"]

    def list_steps() -> list[int]:
        return [int(line.split()[1]) for line in record.read_text().splitlines()] if record.exists() else []

    def list_generations() -> list[Any]:
        return [one for one in client.generations(job) if one["kind"] == "training"]

    wait_for(lambda: list_steps().count(OPTIONS.steps_before) == OPTIONS.vms, "the steps before the loss")
    time.sleep(4.0)  # in the middle of a step
    (first,) = list_generations()
    client.set_local_capacity(OPTIONS.vms - 1)  # another VM in its place would make a new shape better
    kill_all(list_vm_processes(client, first["placement"][3]["vm_id"]))
    step = OPTIONS.steps_before + 1
    wait_for(lambda: step + 1 in list_steps(), "the step after the loss")
    generations = list_generations()
    assert len(generations) == 3, [(one["kind_of_morph"], one["reason"]) for one in generations]
    _, in_place, restart = generations
    assert (in_place["kind_of_morph"], in_place["p"], in_place["d"]) == ("reshape", 2, 1)
    assert in_place["micro_batches_redone"] == SIZE.global_batch // SIZE.micro_batch // 2
    assert (in_place["end_cause"], in_place["last_step"]) == ("handed_over", step)
    assert restart["kind_of_morph"] == "restart"
    assert restart["reason"].startswith(f"its workers have ended step {step}, and their script cannot follow the shape")
    assert restart["resumed_step"] == step
    assert restart["state_from"]["store"] == 0 < restart["state_from"]["peers"]
    (event,) = client.events(job, kind=["reshape_not_possible"])
    assert "varuna.data.Batches" in event["message"]
