"""A VM stands still while its job trains: the other workers are witnesses, and the job goes on without it."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from manager_world import all_ready
from restartable_manager import RestartableManager
from small_training import SmallTraining
from varuna_client.demo.processes import DemoProcesses
from waiting import wait_until

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.slow]

FLEET_WAITS = ("--suspect-after-s", "10", "--lost-after-s", "3000")
"""So that the job does not go on because the fleet has given the VM up."""


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def test_a_job_goes_on_without_a_vm_that_stands_still_which_finds_its_part_over_when_it_comes_back(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "manager"
    folder.mkdir()
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, folder, "--vms", "2", *FLEET_WAITS)
        training = SmallTraining([manager], folder / "vms", tmp_path / "work")
        manager.start()
        wait_until(lambda: training.ask(lambda client: all_ready(client, 2)), "two VMs")
        spec = {"name": "small", "workdir": str(tmp_path / "work"), "run": "python train.py", "global_batch": 4}
        spec |= {"plan": {"p": 1, "d": 2, "micro_batch": 1}}
        training.ask(lambda client: client.submit(spec, idempotency_key="small"))
        training.reach(3)

        def newest() -> dict[str, Any]:
            return dict(training.ask(lambda client: client.generations("small"))[-1])

        def trains_on(count: int) -> dict[str, Any] | None:
            found = newest()
            vms = {place["vm_id"] for place in found["placement"]}
            return found if found["kind"] == "training" and found["last_step"] and len(vms) == count else None

        before = wait_until(lambda: trains_on(2), "training on two VMs")
        silent = before["placement"][-1]["vm_id"]
        pid = next(vm["ref"]["pid"] for vm in training.ask(lambda client: client.vms()) if vm["id"] == silent)
        agent = psutil.Process(pid)
        everything = [agent, *agent.children(recursive=True)]
        signal_all(everything, signal.SIGSTOP)
        try:
            after = wait_until(lambda: trains_on(1), "training on the other VM")
            events = training.ask(lambda client: client.events())
            stops = [event["message"] for event in events if event["kind"] == "generation_stopping"]
            assert f"VM {silent} is given up for this job" in stops[-1]
            assert after["number"] == before["number"] + 1
            assert after["kind_of_morph"] == "reshape"
            assert not [event for event in events if event["kind"] == "vm_lost"]
        finally:
            signal_all(everything, signal.SIGCONT)
        pids = {worker["pid"] for worker in before["workers"] if worker["vm_id"] == silent}
        workers = [process for process in everything if process.pid in pids]
        assert workers
        wait_until(lambda: not any(worker.is_running() for worker in workers), "the end of the worker that came back")
        wait_until(lambda: training.step() > after["last_step"] + 3, "more steps")
        training.ask(lambda client: client.cancel("small"))
        wait_until(lambda: training.ask(lambda client: client.job("small")["state"]) == "cancelled", "the job's end")
