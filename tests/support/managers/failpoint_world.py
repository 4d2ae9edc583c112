"""A job under real agents and a real manager. Any of them dies at an armed failpoint, and is replaced."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from counting_worker import loss_of
from manager_world import all_ready
from restartable_manager import RestartableManager
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_client.errors import VarunaError
from varuna_proto.failpoints import VARIABLE
from waiting import wait_until

VMS = 3
"""One VM is taken away and a failpoint kills another, so one is left that has made the same steps."""
WORKER = Path(__file__).with_name("counting_worker.py")


class FailpointWorld:
    """Restarts the manager whenever it is gone, as its supervisor would."""

    def __init__(self, manager: RestartableManager, folder: Path) -> None:
        self.manager = manager
        self.folder = folder
        self.armed = folder / "failpoints"

    def arm(self, name: str) -> None:
        (self.armed / name).touch()

    def fired(self, name: str) -> bool:
        return (self.armed / f"{name}.done").exists()

    def until(self, condition: Any, what: str) -> Any:
        """Wait for `condition`, which takes a client. A manager that is away answers later."""

        def holds() -> Any:
            try:
                with self.manager.client() as client:
                    return condition(client)
            except VarunaError:
                return False

        return wait_until(holds, what)

    def submit(self) -> None:
        # Run by a shell, so that no process is warmed for it: warming would take longer than the worker itself.
        run = f"true && exec {sys.executable} {WORKER} {self.folder / 'profile.json'}"
        spec = {"name": "counting", "workdir": str(self.folder), "run": run, "global_batch": 8}
        self.until(lambda client: all_ready(client, VMS), "the VMs")
        self.until(lambda client: client.submit(spec, idempotency_key="once"), "the job")

    def training(self, client: Client) -> dict[str, Any] | None:
        """The newest generation once it has made steps on all VMs; None before."""
        newest = client.generations("counting")[-1:]
        if not newest or newest[0]["kind"] != "training" or newest[0]["state"] != "running":
            return None
        stepped = newest[0]["last_step"] is not None and len(newest[0]["placement"]) == VMS
        return dict(newest[0]) if stepped else None

    def provoke_morph(self, name: str) -> None:
        """Arm the failpoint and take a VM away; returns when it has fired and a newer generation trains on all VMs."""
        before = self.until(self.training, f"training before {name}")
        self.arm(name)
        vm_id = before["placement"][-1]["vm_id"]

        def preempt(client: Client) -> bool:
            if not any(vm["id"] == vm_id and vm["state"] == "ready" for vm in client.vms()):
                return True  # the failpoint killed it
            client.preempt(vm_id, notice_s=0)
            return True

        self.until(preempt, f"the end of VM {vm_id}")

        def trains_again(client: Client) -> bool:
            now = self.training(client)
            return self.fired(name) and now is not None and now["number"] > before["number"]

        self.until(trains_again, f"{name} to fire, and training after it")

    def finish(self) -> None:
        """Let the job end, and check what must be true of it whatever happened."""
        with self.manager.client() as client:
            last = client.job("counting")["step"] + 10
        (self.folder / "end.part").write_text(str(last))
        (self.folder / "end.part").rename(self.folder / "end")
        over = self.until(lambda client: _over(client.job("counting")), "the job's end")
        assert (over["state"], over["error"]) == ("succeeded", None)
        with self.manager.client() as client:
            metrics = client.metrics("counting")
            generations = client.generations("counting")
            checkpoints = client.checkpoints("counting")
        steps = [metric["step"] for metric in metrics]
        assert steps == list(range(1, max(steps[-1], last) + 1))
        assert [metric["loss"] for metric in metrics] == [loss_of(step) for step in steps]
        assert [generation["number"] for generation in generations] == list(range(1, len(generations) + 1))
        assert all(generation["state"] == "ended" for generation in generations)
        _check_one_at_a_time(generations)
        saved = [(entry["generation"], entry["step"]) for entry in checkpoints]
        assert sorted(saved) == sorted(saved, key=lambda entry: (entry[1], entry[0])), "no generation goes back"
        wait_until(lambda: not _left_over(self.folder), "the end of all workers")


def _over(job: dict[str, Any]) -> dict[str, Any] | None:
    return job if job["state"] in ("succeeded", "failed", "cancelled") else None


def _check_one_at_a_time(generations: list[dict[str, Any]]) -> None:
    for before, after in itertools.pairwise(generations):
        assert before["ended_at"] <= after["created_at"], f"{after['number']} began before {before['number']} ended"


def _left_over(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(WORKER) in process.cmdline() and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


@contextmanager
def failpoint_world(tmp_path: Path, profile: str) -> Iterator[FailpointWorld]:
    """A manager with VMs; `profile`: what the workers hand in."""
    folder = tmp_path / "manager"
    folder.mkdir()
    armed = tmp_path / "failpoints"
    armed.mkdir()
    (tmp_path / "profile.json").write_text(profile)
    over = threading.Event()
    options = ["--vms", str(VMS), "--growth-settle-s", "0.1", "--storm-losses", "1000", "--no-keep-vms"]
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, folder, *options, environment={VARIABLE: str(armed)})
        manager.start()

        def supervise() -> None:
            while not over.wait(0.05):
                if not manager.runs():
                    manager.launch()

        supervisor = threading.Thread(target=supervise)
        supervisor.start()
        try:
            yield FailpointWorld(manager, tmp_path)
        finally:
            over.set()
            supervisor.join()
