"""Plays a segment of a spot trace on local VMs with a job that trains, and keeps what happened, by the clock."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from _goodput_books import PlayedRun, read_time
from _recovery_figures import StepLine, Wait, parse_activity, parse_record
from _recovery_trial import (
    ModelSize,
    TrialOptions,
    find_activity,
    kill_all,
    list_vm_processes,
    make_command,
    start_manager,
    wait_for,
)

from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_planner.liveput.spot_trace import SpotTrace, TraceEvent
from varuna_proto.rest import GenerationDocument, JobSpecDocument

__all__ = ["kill_vm", "list_ready", "list_training", "play_segment", "run_manager"]

_POLL_S = 0.1


def kill_vm(client: Client, vm_id: str) -> float:
    """SIGKILL to all processes of a local VM, which the manager is not told. Returns when."""
    victims = list_vm_processes(client, vm_id)
    at = time.time()
    kill_all(victims)
    return at


def list_ready(client: Client) -> set[str]:
    return {vm["id"] for vm in client.vms() if vm["state"] == "ready"}


@contextlib.contextmanager
def run_manager(size: ModelSize, vms: int, device_memory_bytes: int | None) -> Iterator[tuple[Client, Path]]:
    """A manager with so many VMs that are ready, and a folder. All processes end with it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="varuna-goodput-")))
        processes = stack.enter_context(DemoProcesses(folder))
        options = TrialOptions.undisturbed(1, vms)
        client = start_manager(
            processes, folder, size, options, ["--grpc-port", "0"], device_memory_bytes=device_memory_bytes
        )
        yield stack.enter_context(client), folder


def play_segment(size: ModelSize, trace: SpotTrace, *, device_memory_bytes: int, copies: str) -> PlayedRun:
    """Trains the model on the VMs of the trace, in its own time. No device holds the whole model."""
    first = len([event for event in trace.events if event.at_s <= 0])
    with run_manager(size, first, device_memory_bytes) as (client, folder):
        client.set_local_capacity(first)
        record = folder / "record"
        spec: JobSpecDocument = {
            "name": "goodput",
            "workdir": str(folder),
            "run": make_command(size, record),
            "global_batch": size.global_batch,
            "copies": copies,
        }
        job = client.submit(spec)["id"]
        training = wait_for(lambda: list_training(client, job), "the first generation that trains")
        player = _Player(client, trace, read_time(training[0]["created_at"]))
        player.play()
        generations = list_training(client, job)
        times = client.time(job)
        profile_json = client.profile(job)
        checkpoints = len(client.checkpoints(job))
        lines = parse_record(record.read_text())
        waits = parse_activity(find_activity(record).read_text())
    began_at, ends_s = player.began_at, trace.ends_s
    return PlayedRun(
        trace=SpotTrace(events=tuple(sorted(player.played, key=lambda event: event.at_s)), until_s=ends_s),
        granted_s=tuple(player.granted_s),
        killed=tuple(player.killed),
        lines=tuple(StepLine(line.step, line.at - began_at) for line in lines if line.at - began_at <= ends_s),
        waits=tuple(
            Wait(wait.began - began_at, min(wait.ended - began_at, ends_s))
            for wait in waits
            if 0 <= wait.began - began_at <= ends_s
        ),
        generations=tuple(one for one in generations if read_time(one["created_at"]) - began_at <= ends_s),
        began_at=began_at,
        between_s=sum(one["between_s"] for one in times["generations"] if one["kind"] == "training"),
        checkpoints=checkpoints,
        profile_json=profile_json,
        goodput=times["goodput"],
    )


def list_training(client: Client, job: str) -> list[GenerationDocument]:
    document = client.job(job)
    if document["state"] == "failed":
        raise RuntimeError(f"the job failed: {document['reason']}")
    return [one for one in client.generations(job) if one["kind"] == "training"]


@dataclass
class _Player:
    """Kills and grants VMs when the trace says so."""

    client: Client
    trace: SpotTrace
    began_at: float
    played: list[TraceEvent] = field(default_factory=list)
    granted_s: list[float] = field(default_factory=list)
    killed: list[tuple[str, float]] = field(default_factory=list)
    _vms: dict[str, str] = field(default_factory=dict)
    """The VM that stands for each node."""
    _awaited: dict[str, float] = field(default_factory=dict)
    """Nodes whose VM has been granted, and is not ready yet: when the trace has them."""
    _leaving: set[str] = field(default_factory=set)
    """VMs that were killed, and that the manager may list yet."""

    def play(self) -> None:
        nodes = [event.node for event in self.trace.events if event.at_s <= 0]
        self._vms = dict(zip(nodes, sorted(list_ready(self.client)), strict=True))
        self.played = [TraceEvent(at_s=0.0, add=True, node=node) for node in nodes]
        for at_s, events in self.trace.iterate_bursts():
            if at_s > 0:
                self._wait_until(at_s)
                self._play_burst(at_s, [event.node for event in events if event.add], events)
        self._wait_until(self.trace.ends_s)

    def _play_burst(self, at_s: float, coming: list[str], events: tuple[TraceEvent, ...]) -> None:
        going = [event.node for event in events if not event.add]
        self._awaited |= dict.fromkeys(coming, at_s)
        here = (self._vms.keys() | self._awaited.keys()) - set(going)
        self.client.set_local_capacity(len(here))  # before a VM goes, so that the market does not replace it
        for node in going:
            if node in self._awaited:
                del self._awaited[node]  # it goes before it was there
                continue
            vm_id = self._vms.pop(node)
            killed_s = kill_vm(self.client, vm_id) - self.began_at
            self._leaving.add(vm_id)
            self.killed.append((vm_id, killed_s))
            self.played.append(TraceEvent(at_s=killed_s, add=False, node=node))
        if coming and not self._leaving:
            self.client.set_fleet_target(len(here))

    def _wait_until(self, at_s: float) -> None:
        """Looks after VMs that come and go meanwhile."""
        while (left_s := self.began_at + at_s - time.time()) > 0:
            if self._leaving or self._awaited:
                self._look(time.time() - self.began_at)
            time.sleep(max(0.0, min(_POLL_S if self._leaving or self._awaited else left_s, left_s)))

    def _look(self, now_s: float) -> None:
        states = {vm["id"]: vm["state"] for vm in self.client.vms()}
        ready = {vm_id for vm_id, state in states.items() if state == "ready"}
        counted = {vm_id for vm_id, state in states.items() if state in ("requested", "ready", "suspect")}
        if self._leaving and not self._leaving & counted:
            # Only now: a smaller fleet would drain another VM while the manager counts the one that is gone.
            self._leaving.clear()
            self.client.set_fleet_target(len(self._vms) + len(self._awaited))
        for vm_id in sorted(ready - set(self._vms.values()) - self._leaving):
            if self._awaited:
                node = next(iter(self._awaited))
                self.granted_s.append(now_s - self._awaited.pop(node))
                self._vms[node] = vm_id
                self.played.append(TraceEvent(at_s=now_s, add=True, node=node))
