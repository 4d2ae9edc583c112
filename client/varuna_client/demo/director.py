"""The demo from start to verdict: starts the manager, submits the job, plays the scenario, checks every loss."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.console import Console

from varuna_client.commands.options import make_console
from varuna_client.demo.other_load import OtherLoad
from varuna_client.demo.processes import DemoProcesses, fresh_folder, kill_group
from varuna_client.demo.report import DemoRecord, Report, busy_note, closing_table, make_report, replicas_note, verdict
from varuna_client.demo.scenario import (
    FULL_FLEET,
    DemoSnapshot,
    Disturbance,
    KillVm,
    OfferVm,
    PreemptVm,
    next_disturbance,
)
from varuna_client.demo.view import View, make_view
from varuna_client.errors import UserError, VarunaError
from varuna_client.jobfile.jobfile import load_job
from varuna_client.rest.client import Client
from varuna_proto.rest import EventDocument, JobDocument, JobSpecDocument, StepMetricsDocument

FULL_STEPS, SHORT_STEPS = 160, 120
"""On a busy machine 75 of them are over before a new VM has imported what it needs."""
FULL_PREPARE_S, SHORT_PREPARE_S = 15.0, 10.0
"""How long the job waits for a new VM's imports before it grows."""
DEVICE_MEMORY_BYTES = 24 * 1024 * 1024
"""The memory of each emulated device: too little for the model with its gradients and Adam's state, but not for half of
it. Of six blocks, 4×1 has two in its largest stages, 2×2 three for half as many examples: a quarter less time, by which
the planner prefers it for four VMs also where calibration is noisy."""
POLL_S = 0.25
MANAGER_DEADLINE_S = 300.0
FLEET_DEADLINE_S = 300.0
STALLED_S = 300.0
"""The demo gives up when the job has neither a step nor an event for this long."""
REFERENCE_DEADLINE_S = 1800.0
REQUEST_S = 120.0
"""How long one answer of the manager may take: it has as many processors as the training leaves it."""


def run_demo(*, out: Path, folder: Path, steps: int | None, short: bool, as_json: bool) -> bool:
    """Plays the demo, writes its report to `out` and returns whether all checks passed.

    Raises VarunaError, in one line, when the demo could not be played. All processes that it started have ended when
    it returns or raises.
    """
    steps = steps or (SHORT_STEPS if short else FULL_STEPS)
    steps_between = 5 if short else max(5, steps // 16)
    example = find_example()
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}: make it first, or give another file")
    fresh_folder(folder)
    console = make_console(stderr=as_json)
    began = time.monotonic()
    with DemoProcesses(folder) as processes, make_view(console, steps) as view:
        url = _start_manager(processes, view, SHORT_PREPARE_S if short else FULL_PREPARE_S)
        with Client(url, timeout_s=REQUEST_S) as client:
            director = DemoDirector(client, view, steps_between, OtherLoad(processes.list_marked))
            observed = director.play_scenario(job_spec(example, steps))
            reference = _run_reference(processes, example, observed, steps=steps, view=view)
        view.show_action("ending the manager, the VMs and their workers")
        processes.end_all()
        played = DemoRecord(
            disturbances=tuple(director.disturbances),
            problems=tuple(director.problems),
            other_load=director.other_load_by_generation(),
            elapsed_s=time.monotonic() - began,
        )
        report = make_report(steps, observed, reference, played)
    out.write_text(json.dumps(report.document, indent=1))
    _close(report, console, out, as_json)
    return report.ok


def find_example() -> Path:
    """The folder `examples/gpt` of the checkout that this package is installed from. Raises UserError elsewhere."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "examples" / "gpt" / "job.yaml").is_file():
            return root / "examples" / "gpt"
    raise UserError("examples/gpt/job.yaml is not here: run the demo from a checkout of the repository")


def job_spec(example: Path, steps: int) -> JobSpecDocument:
    """The example's own job file, with the demo's number of steps."""
    spec = load_job(example / "job.yaml").spec
    run, replaced = re.subn(r"--steps \d+", f"--steps {steps}", str(spec["run"]))
    if replaced != 1:
        raise UserError(f"{example / 'job.yaml'}: its run line has no --steps, which the demo replaces")
    return {**spec, "run": run}


@dataclass
class DemoDirector:
    """Plays the scenario on a running manager and records what happened."""

    client: Client
    view: View
    steps_between: int
    other_load: OtherLoad
    disturbances: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _metrics: list[StepMetricsDocument] = field(default_factory=list)
    _events: list[EventDocument] = field(default_factory=list)
    _noticed_at: float = 0.0
    _trained: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By generation: when it was first and last seen running, on the monotonic clock."""

    def play_scenario(self, spec: JobSpecDocument) -> DemoSnapshot:
        """From the fleet's first VMs to the job's end, or until the job stands still for too long."""
        self._await_fleet()
        job = self.client.submit(spec)
        self.view.show_action(f"submitted {spec['name']}: {spec['run']} (global batch {spec['global_batch']})")
        seen, changed_at = (0, 0), time.monotonic()
        while True:
            observed = self._observe(job)
            self._note_load(observed, time.monotonic())
            self.view.show_snapshot(observed)
            self._watch_leaving()
            if observed.over:
                return observed
            news = (len(observed.metrics), len(observed.events))
            if news != seen:
                seen, changed_at = news, time.monotonic()
            if time.monotonic() > changed_at + STALLED_S:
                self.problems.append(f"nothing happened to the job for {STALLED_S:.0f} s")
                return observed
            self._disturb(observed)
            time.sleep(POLL_S)

    def other_load_by_generation(self) -> dict[int, float | None]:
        """The share of the processors that other programs used while each generation trained."""
        return {number: self.other_load.compute_share(*times) for number, times in self._trained.items()}

    def _note_load(self, observed: DemoSnapshot, now: float) -> None:
        self.other_load.add_sample(now)
        generation = observed.training
        if generation is not None and generation["state"] == "running":
            first, _ = self._trained.get(generation["number"], (now, now))
            self._trained[generation["number"]] = (first, now)

    def _await_fleet(self) -> None:
        self.view.show_action(f"waiting for {FULL_FLEET} spot VMs")
        deadline = time.monotonic() + FLEET_DEADLINE_S
        while (ready := sum(vm["state"] == "ready" for vm in self.client.vms())) < FULL_FLEET:
            if time.monotonic() > deadline:
                raise VarunaError(f"only {ready} of {FULL_FLEET} VMs came up in {FLEET_DEADLINE_S:.0f} s: see demo-out")
            time.sleep(POLL_S)

    def _observe(self, job: JobDocument) -> DemoSnapshot:
        # The job first: if it has ended, everything read after it is complete.
        now = self.client.job(job["id"])
        generations = self.client.generations(job["id"])
        after_step = max((metric["step"] for metric in self._metrics), default=0)
        # A later generation may redo steps: start from where the newest one resumed.
        resumed = generations[-1].get("resumed_step") if generations else None
        known = {(metric["generation"], metric["step"]) for metric in self._metrics}
        for metric in self.client.metrics(
            job["id"], after_step=min(after_step, after_step if resumed is None else resumed)
        ):
            if (metric["generation"], metric["step"]) not in known:
                self._metrics.append(metric)
        self._events += self.client.events(after=self._events[-1]["id"] if self._events else 0)
        return DemoSnapshot(
            job=now,
            generations=tuple(generations),
            metrics=tuple(self._metrics),
            events=tuple(self._events),
            vms=tuple(self.client.vms()),
        )

    def _disturb(self, observed: DemoSnapshot) -> None:
        hit = self.disturbances[-1]["generation"] if self.disturbances else 0
        due = next_disturbance(len(self.disturbances), hit, observed, steps_between=self.steps_between)
        if due is None or observed.training is None:
            return
        self.view.show_action(due.story)
        record: dict[str, Any] = {
            "kind": type(due).__name__,
            "story": due.story,
            "generation": observed.training["number"],
            "step": max(metric["step"] for metric in observed.metrics),
        }
        self._apply(due, record)
        self.disturbances.append(record)

    def _apply(self, due: Disturbance, record: dict[str, Any]) -> None:
        self.client.set_local_capacity(due.capacity)
        match due:
            case KillVm(vm_id=vm_id, pid=pid):
                record.update(vm_id=vm_id, pid=pid)
                kill_group(pid)
            case PreemptVm(vm_id=vm_id, pid=pid, notice_s=notice_s):
                record.update(vm_id=vm_id, pid=pid, notice_s=notice_s, left_after_s=None)
                self._noticed_at = time.monotonic()
                self.client.preempt(vm_id, notice_s=notice_s)
            case OfferVm():
                pass

    def _watch_leaving(self) -> None:
        """Records how long after its notice the preempted VM's agent ended."""
        for record in self.disturbances:
            if "notice_s" in record and record["left_after_s"] is None and not _alive(record["pid"]):
                record["left_after_s"] = round(time.monotonic() - self._noticed_at, 1)
                self.view.show_action(f"{record['vm_id']} left {record['left_after_s']} s after its notice")


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _start_manager(processes: DemoProcesses, view: View, prepare_s: float) -> str:
    """Starts the demo's own manager on free ports, with four local VMs to create. Returns its URL."""
    view.show_action(f"starting the manager (its files: {processes.folder})")
    data, log = processes.folder / "manager", processes.folder / "manager.log"
    manager = processes.start(["-m", "varuna_manager.main", *manager_arguments(data, prepare_s)], log)
    deadline = time.monotonic() + MANAGER_DEADLINE_S
    addresses = data / "manager.json"
    while time.monotonic() < deadline:
        if manager.poll() is not None:
            raise VarunaError(f"the manager ended with exit code {manager.returncode}: {_last_line(log)} ({log})")
        if addresses.is_file():
            url = _http_url(json.loads(addresses.read_text())["http"])
            with Client(url) as client:
                if client.is_ready():
                    return url
        time.sleep(POLL_S)
    raise VarunaError(f"the manager was not ready after {MANAGER_DEADLINE_S:.0f} s: {_last_line(log)} ({log})")


def manager_arguments(data: Path, prepare_s: float) -> list[str]:
    """The manager's options for the demo: free ports, a store of its own, small devices."""
    return [
        *("--data-dir", str(data)),
        *("--http-port", "0", "--grpc-port", "0"),
        *("--vms", str(FULL_FLEET)),
        *("--device-memory-bytes", str(DEVICE_MEMORY_BYTES)),
        "--no-keep-vms",
        # With the defaults a fast machine would finish its few steps before the job may grow; on a slow one, its steps
        # keep a new VM's imports waiting for as long as they are waited for.
        *("--growth-settle-s", "0.5", "--growth-prepare-s", f"{prepare_s:g}"),
    ]


def _http_url(address: str) -> str:
    return address if address.startswith("http") else f"http://{address}"


def _run_reference(
    processes: DemoProcesses, example: Path, observed: DemoSnapshot, *, steps: int, view: View
) -> list[float]:
    """The losses of the uninterrupted run; none when the job did not finish, because nothing can be compared."""
    if observed.job["state"] != "succeeded":
        return []
    view.show_action("running the same training in one process of plain PyTorch, uninterrupted")
    out, log = (processes.folder / "reference.json").resolve(), processes.folder / "reference.log"
    batch = str(observed.job["spec"]["global_batch"])
    arguments = [str(example / "reference.py"), "--steps", str(steps), "--global-batch", batch, "--out", str(out)]
    # One thread: two would wait for each other whenever another program has a core.
    process = processes.start(arguments, log, {"OMP_NUM_THREADS": "1"})
    try:
        code = process.wait(REFERENCE_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise VarunaError(f"the reference run was not over after {REFERENCE_DEADLINE_S:.0f} s: see {log}") from None
    if code != 0:
        raise VarunaError(f"the reference run ended with exit code {code}: {_last_line(log)} ({log})")
    losses: list[float] = json.loads(out.read_text())["losses"]
    return losses


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def _close(report: Report, console: Console, out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.document))
    console.print(closing_table(report.document))
    for note in (busy_note(report.document), replicas_note(report.document)):
        if note is not None:
            console.print(note, style="yellow", soft_wrap=True)
    console.print(verdict(report), style="bold green" if report.ok else "bold red", soft_wrap=True)
    console.print(f"took {report.document['elapsed_s']:.0f} s; all of it is in {out}", soft_wrap=True)
    sys.stdout.flush()
