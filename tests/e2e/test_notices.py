"""VMs have notice of their end: what their jobs do until then, and what it costs them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, make_job, start_manager, wait_for

from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_manager.domain.job_decision import LEFT_AHEAD_S

pytestmark = pytest.mark.xdist_group("e2e")

SIZE = ModelSize(name="small", width=64, layers=8, global_batch=32, micro_batch=4, example_ms=1.0)
LONG_STEPS = ModelSize(name="long", width=64, layers=8, global_batch=32, micro_batch=1, example_ms=60.0)
"""With two replicas, 23 s for a step."""
LONG_NOTICE_S = LEFT_AHEAD_S + 15.0
MIDDLE_NOTICE_S = 19.0
SHORT_NOTICE_S = 6.0


@contextmanager
def start_job(
    folder: Path, size: ModelSize, shape: tuple[int, int], flags: str = "", *, fixes_stages: bool = True
) -> Iterator[tuple[Client, str, Callable[[], list[Any]]]]:
    """A manager's client, its job of that shape, and what lists the job's training generations.

    Without `fixes_stages`, the job keeps the number of its replicas.
    """
    options = TrialOptions.undisturbed(*shape)
    with (
        DemoProcesses(folder) as processes,
        start_manager(processes, folder, size, options, ["--grpc-port", "0"]) as client,
    ):
        document = make_job(size, options, RecoveryWay(name="in place"), folder / "record", flags)
        if not fixes_stages:
            document["plan"] = {"d": shape[1], "micro_batch": size.micro_batch}
        job = client.submit(document)["id"]
        yield client, job, lambda: [one for one in client.generations(job) if one["kind"] == "training"]


def preempt(client: Client, generation: Any, rank: int, notice_s: float) -> float:
    """Gives the VM of a rank notice. Returns when it goes."""
    goes_at = time.time() + notice_s
    client.set_local_capacity(len(generation["placement"]) - 1)
    client.preempt(generation["placement"][rank]["vm_id"], notice_s=notice_s)
    return goes_at


def find_stop(client: Client, job: str) -> Any:
    """The newest event of a generation that stops."""
    return client.events(job, kind=["generation_stopping"])[-1]


@pytest.mark.slow
def test_a_job_trains_on_with_a_vm_that_has_a_long_notice(tmp_path: Path) -> None:
    with start_job(tmp_path, SIZE, (1, 2)) as (client, job, list_generations):
        wait_for(lambda: [one for one in list_generations() if (one["last_step"] or 0) > 3], "training")
        (before,) = list_generations()
        goes_at = preempt(client, before, 1, LONG_NOTICE_S)
        wait_for(lambda: "has notice, but there is time to train on" in client.job(job)["reason"], "the job's reason")
        (noticed,) = list_generations()
        wait_for(lambda: len(list_generations()) > 1 and list_generations()[1]["last_step"], "a step without the VM")
        left, after = list_generations()
        stopping = find_stop(client, job)
    assert left["last_step"] > noticed["last_step"], "it trained on"
    assert (left["end_cause"], stopping["data"]["mode"]) == ("notice", "hold_first")
    assert goes_at - datetime.fromisoformat(stopping["at"]).timestamp() > LEFT_AHEAD_S - 5.0
    assert (after["kind_of_morph"], after["d"], after["resumed_step"]) == ("reshape", 1, left["last_step"])


@pytest.mark.slow
def test_the_others_go_on_where_a_step_is_not_over_before_a_vm_goes(tmp_path: Path) -> None:
    """Its end was predicted to come in time. The VM that goes is a loss then; what the others hold is not given up."""
    allowed = tmp_path / "allowed"
    _allow_steps(allowed, 5)
    with start_job(tmp_path, SIZE, (1, 2), f"--allowed {allowed}") as (client, job, list_generations):
        wait_for(lambda: [one for one in list_generations() if one["last_step"] == 5], "training")
        (before,) = list_generations()
        preempt(client, before, 1, SHORT_NOTICE_S)
        wait_for(lambda: len(list_generations()) > 1, "the next generation")
        _allow_steps(allowed, 1000)
        wait_for(lambda: list_generations()[-1]["last_step"], "a step without the VM")
        left, after = list_generations()
        stopping = find_stop(client, job)
    assert (left["end_cause"], stopping["data"]["mode"]) == ("notice", "hold_first"), stopping
    assert (after["kind_of_morph"], after["d"], after["resumed_step"]) == ("reshape", 1, 5)


def _allow_steps(path: Path, count: int) -> None:
    """The script reads the file again and again, so it is whole at any time."""
    path.with_suffix(".new").write_text(str(count))
    path.with_suffix(".new").rename(path)


@pytest.mark.slow
def test_a_long_step_is_left_in_its_middle_before_a_vm_goes_and_nothing_is_run_again(tmp_path: Path) -> None:
    """The other VM has what the replica of the one that goes has done of the step."""
    with start_job(tmp_path, LONG_STEPS, (1, 2)) as (client, job, list_generations):
        wait_for(lambda: [one for one in list_generations() if one["last_step"] == 2], "training")
        time.sleep(1.0)
        (before,) = list_generations()
        goes_at = preempt(client, before, 1, MIDDLE_NOTICE_S)
        wait_for(lambda: len(list_generations()) > 1 and list_generations()[1]["resumed_step"], "a step without the VM")
        left, after = list_generations()
        stopping = find_stop(client, job)
    assert (left["end_cause"], stopping["data"]["mode"]) == ("notice", "hold_within_step"), stopping
    assert datetime.fromisoformat(left["ended_at"]).timestamp() < goes_at, "it has left before"
    assert (after["kind_of_morph"], after["d"], after["resumed_step"]) == ("reshape", 1, 2)
    assert after["micro_batches_redone"] == 0


@pytest.mark.slow
def test_a_vm_that_alone_has_a_stage_leaves_it_to_the_other(tmp_path: Path) -> None:
    """Without copies of states, and too soon to end the step and to save."""
    with start_job(tmp_path, LONG_STEPS, (2, 1), fixes_stages=False) as (client, job, list_generations):
        wait_for(lambda: [one for one in list_generations() if one["last_step"] == 2], "training")
        time.sleep(1.0)
        (before,) = list_generations()
        assert (before["p"], before["d"]) == (2, 1)
        preempt(client, before, 1, MIDDLE_NOTICE_S)
        wait_for(lambda: len(list_generations()) > 1 and list_generations()[1]["resumed_step"], "a step without the VM")
        left, after = list_generations()
        stopping = find_stop(client, job)
    assert (left["end_cause"], stopping["data"]["mode"]) == ("notice", "hold_within_step"), stopping
    assert (after["kind_of_morph"], after["p"], after["resumed_step"]) == ("reshape", 1, 2)
    assert after["micro_batches_redone"] == 0
    assert after["state_from"]["store"] == 0
