"""A VM comes back, and a new process joins those that are there, under a real manager and agents."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT
from waiting import DEADLINE_S

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_figures import parse_record
from _recovery_trial import (
    ModelSize,
    RecoveryWay,
    TrialOptions,
    kill_all,
    list_vm_processes,
    make_job,
    run_trial,
    start_manager,
    wait_for,
)

from varuna_client.demo.processes import DemoProcesses

pytestmark = pytest.mark.xdist_group("e2e")

SIZE = ModelSize(name="small", width=64, layers=8, global_batch=32, micro_batch=4, example_ms=1.0)
OPTIONS = replace(
    TrialOptions.undisturbed(1, 2), steps_before=5, kill_at=0.5, steps_after=3, growth_wait_s=float(DEADLINE_S)
)


@pytest.mark.slow
def test_a_job_grows_with_the_process_that_trains_and_a_new_one(tmp_path: Path) -> None:
    figures = run_trial(SIZE, RecoveryWay(name="in place"), OPTIONS, tmp_path)
    growth = figures["growth"]
    assert growth is not None, "it did not grow"
    assert (growth["kind_of_morph"], growth["steps_redone"]) == ("reshape", 0)
    taken = growth["state_from"]
    assert taken["store"] == 0
    assert taken["kept"] > 0, "the process that was there has loaded nothing"
    assert taken["peers"] > 0, "and the new one has it from there"


LONG = replace(SIZE, name="long", example_ms=90.0)
"""Its steps take more than a minute on one VM; about forty seconds are predicted."""


@pytest.mark.slow
def test_a_job_grows_in_the_middle_of_a_long_step(tmp_path: Path) -> None:
    options = TrialOptions.undisturbed(1, 2)
    record = tmp_path / "record"
    with (
        DemoProcesses(tmp_path) as processes,
        start_manager(processes, tmp_path, LONG, options, ["--grpc-port", "0"]) as client,
    ):
        client.set_local_capacity(1)
        kill_all(list_vm_processes(client, client.vms()[-1]["id"]))
        wait_for(lambda: [vm["state"] for vm in client.vms()].count("ready") == 1, "the loss of a VM")
        job = client.submit(make_job(LONG, options, RecoveryWay(name="in place"), record))["id"]
        wait_for(lambda: any(one["kind"] == "training" for one in client.generations(job)), "training")
        client.set_local_capacity(2)

        def find_grown() -> Any:
            grown = [one for one in client.generations(job) if (one["p"], one["d"]) == (1, 2)]
            return grown[0] if grown and grown[0]["last_step"] else None

        grown = wait_for(find_grown, "the first step of the grown shape")
        (before,) = [one for one in client.generations(job) if one["number"] == grown["number"] - 1]
        (stopping,) = client.events(job, kind=["generation_stopping"])[-1:]
        steps = parse_record(record.read_text())
    assert grown["kind_of_morph"] == "reshape"
    assert (grown["resumed_step"], grown["steps_redone"]) == (before["last_step"], 0)
    assert grown["micro_batches_redone"] == 0
    stopped_at = datetime.fromisoformat(stopping["at"]).timestamp()
    ends = [line.at for line in steps if line.step <= before["last_step"]]
    if stopping["data"]["mode"] == "hold_within_step":
        assert "; within its step (" in stopping["message"]
    else:  # on a busy machine: its new process came when the step seemed nearly over
        assert stopped_at - ends[-2] > 25.0
