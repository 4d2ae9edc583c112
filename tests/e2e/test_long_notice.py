"""A VM has a notice of more than half a minute, as on EC2: its job trains on meanwhile, and leaves in good time."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, make_job, start_manager, wait_for

from varuna_client.demo.processes import DemoProcesses
from varuna_manager.domain.job_decision import LEFT_AHEAD_S

pytestmark = pytest.mark.xdist_group("e2e")

SIZE = ModelSize(name="small", width=64, layers=8, global_batch=32, micro_batch=4, example_ms=1.0)
OPTIONS = TrialOptions.undisturbed(1, 2)
NOTICE_S = LEFT_AHEAD_S + 15.0


@pytest.mark.slow
def test_a_job_trains_on_with_a_vm_that_has_a_long_notice(tmp_path: Path) -> None:
    with (
        DemoProcesses(tmp_path) as processes,
        start_manager(processes, tmp_path, SIZE, OPTIONS, ["--grpc-port", "0"]) as client,
    ):
        job = client.submit(make_job(SIZE, OPTIONS, RecoveryWay(name="in place"), tmp_path / "record"))["id"]

        def list_generations() -> list[Any]:
            return [one for one in client.generations(job) if one["kind"] == "training"]

        wait_for(lambda: [one for one in list_generations() if (one["last_step"] or 0) > 3], "training")
        client.set_local_capacity(1)
        (before,) = list_generations()
        goes_at = time.time() + NOTICE_S
        client.preempt(before["placement"][1]["vm_id"], notice_s=NOTICE_S)
        wait_for(lambda: "has notice, but there is time to train on" in client.job(job)["reason"], "the job's reason")
        (noticed,) = list_generations()
        wait_for(lambda: len(list_generations()) > 1 and list_generations()[1]["last_step"], "a step without the VM")
        left, after = list_generations()
        (stopping,) = client.events(job, kind=["generation_stopping"])[-1:]
    assert left["last_step"] > noticed["last_step"], "it trained on"
    assert (left["end_cause"], stopping["data"]["mode"]) == ("notice", "hold_first")
    assert goes_at - datetime.fromisoformat(stopping["at"]).timestamp() > LEFT_AHEAD_S - 5.0
    assert (after["kind_of_morph"], after["d"], after["resumed_step"]) == ("reshape", 1, left["last_step"])
