"""One loss of a VM: a manager with its VMs, a job that trains, the kill, and the growth into the VM that comes back."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from _recovery_figures import StepLine, find_gap, find_idle, median_step_s, parse_activity, parse_record
from _recovery_memory import VmMemory, find_extra_bytes
from _recovery_network import VmNetwork

from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_planner.schedule.batching import count_micro_batches
from varuna_proto.rest import GenerationDocument, JobSpecDocument

BYTES_PER_PARAMETER = 12
"""fp32, with AdamW's two moments."""
_SCRIPT = Path(__file__).with_name("_recovery_training.py")
_DEADLINE_S = 600.0
_POLL_S, _RECORD_POLL_S = 0.05, 0.002
IDLE_STEPS = 3
"""The longest time without a micro-batch in training without a loss is that of this many steps."""
_DEVICE_MEMORY_BYTES = 2**31
"""The manager's default for local VMs."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model of `layers` Linear layers, whose steps take 0.3 to 2 s."""

    name: str
    width: int
    layers: int
    global_batch: int
    micro_batch: int
    example_ms: float
    """How long an example waits in the forward of a layer, as if a device computed it."""

    @property
    def state_bytes(self) -> int:
        return BYTES_PER_PARAMETER * self.layers * self.width**2


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    stages: int
    replicas: int
    steps_before: int
    """Steps before the kill."""
    kill_at: float
    """The part of a step that is done when the VM is killed."""
    notice_s: float
    """How long before its end the VM has notice; 0: it is killed without."""
    steps_after: int
    """Steps between the loss and the VM that comes back."""
    growth_wait_s: float
    """How long to wait for the growth; 0: no VM comes back."""
    mbit: float
    """What each VM's link carries in each direction; 0: all VMs share the machine's loopback."""

    @property
    def vms(self) -> int:
        return self.stages * self.replicas

    @classmethod
    def undisturbed(cls, stages: int, replicas: int) -> TrialOptions:
        """Of a job that loses no VM."""
        return cls(
            stages=stages,
            replicas=replicas,
            steps_before=0,
            kill_at=0.0,
            notice_s=0.0,
            steps_after=0,
            growth_wait_s=0.0,
            mbit=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class RecoveryWay:
    """A way to go on after a loss."""

    name: str
    flags: str = ""
    """Of the training script."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the job."""
    changes_cuts: bool = False
    """Whether the job may have other stages after the loss, and needs all devices that are left."""
    copies: str = "off"
    """As the job file has it."""


def run_trial(size: ModelSize, row: RecoveryWay, options: TrialOptions, profiles: Path) -> dict[str, Any]:
    """Returns the trial's figures. `profiles`: where the first trial of a size leaves its profile for the others."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="varuna-recovery-")))
        network = stack.enter_context(VmNetwork(options.vms + 1, options.mbit)) if options.mbit else None
        processes = stack.enter_context(DemoProcesses(folder))
        flags = network.make_manager_flags() if network else ["--grpc-port", "0"]
        flags += ["--profile-cache-url", str(profiles)]
        memory = size.state_bytes if row.changes_cuts else None
        with start_manager(processes, folder, size, options, flags, device_memory_bytes=memory) as client:
            trial = _Trial(client, size, folder / "record", options)
            figures = trial.run(row)
        processes.end_all()
    return figures


def start_manager(
    processes: DemoProcesses,
    folder: Path,
    size: ModelSize,
    options: TrialOptions,
    further_flags: Sequence[str],
    *,
    device_memory_bytes: int | None = None,
) -> Client:
    """A client of a manager whose VMs are all ready."""
    data = folder / "manager"
    flags = ["--data-dir", str(data), "--http-port", "0", "--vms", str(options.vms), *further_flags]
    # Calibration measures less of the layers' waiting than training has, so VMs would be found slow.
    flags += ["--no-keep-vms", "--slow-threshold", "1000"]
    flags += ["--first-step-timeout-s", str(_DEADLINE_S)]  # a busy machine imports for minutes
    memory = device_memory_bytes or max(_DEVICE_MEMORY_BYTES, 2 * size.state_bytes // options.stages)
    flags += ["--device-memory-bytes", str(memory)]
    processes.start(["-m", "varuna_manager.main", *flags], folder / "manager.log")
    wait_for((data / "manager.json").exists, "the manager")
    client = Client(f"http://{json.loads((data / 'manager.json').read_text())['http']}")
    wait_for(client.is_ready, "the manager")
    wait_for(lambda: sum(vm["state"] == "ready" for vm in client.vms()) == options.vms, "the VMs")
    return client


def wait_for(
    condition: Callable[[], Any], what: str, *, deadline_s: float = _DEADLINE_S, poll_s: float = _POLL_S
) -> Any:
    """The condition's first true value. Raises TimeoutError."""
    give_up = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what}: not within {deadline_s:.0f} s")
        time.sleep(poll_s)
    return value


def list_vm_processes(client: Client, vm_id: str) -> list[psutil.Process]:
    """The agent of a local VM, and all that it has started."""
    agent = psutil.Process(next(vm["ref"]["pid"] for vm in client.vms() if vm["id"] == vm_id))
    return [agent, *agent.children(recursive=True)]


def kill_all(victims: Iterable[psutil.Process]) -> None:
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()


def find_activity(record: Path) -> Path:
    """The file beside the record to which workers append when layers waited."""
    return record.with_name("activity")


def make_command(size: ModelSize, record: Path) -> str:
    """Runs the script that trains a model of this size, with its records in the folder of `record`."""
    run = f"python {_SCRIPT} --width {size.width} --layers {size.layers} --example-ms {size.example_ms}"
    return f"{run} --record {record} --activity {find_activity(record)}"


def make_job(
    size: ModelSize, options: TrialOptions, row: RecoveryWay, record: Path, flags: str = ""
) -> JobSpecDocument:
    """The job that trains a model of this size. `flags`: further ones of the training script."""
    return {
        "name": f"recovery-{record.parent.name}",
        "workdir": str(record.parent),
        "run": f"{make_command(size, record)} {row.flags} {flags}",
        "global_batch": size.global_batch,
        "plan": {"p": None if row.changes_cuts else options.stages, "micro_batch": size.micro_batch},
        "resources": {"min_gpus": options.vms - 1 if row.changes_cuts else 1},
        "env": dict(row.environment),
        "copies": row.copies,
    }


class _Trial:
    def __init__(self, client: Client, size: ModelSize, record: Path, options: TrialOptions) -> None:
        self._client = client
        self._size = size
        self._record = record
        self._activity = find_activity(record)
        self._options = options
        self._job = ""

    def run(self, row: RecoveryWay) -> dict[str, Any]:
        self._job = self._client.submit(make_job(self._size, self._options, row, self._record))["id"]
        shape = (self._options.stages, self._options.replicas)
        generation = wait_for(lambda: self._find_generation(0), "training")
        if (generation["p"], generation["d"]) != shape:
            raise SystemExit(
                f"the planner prefers {generation['p']}×{generation['d']} to {shape[0]}×{shape[1]} for "
                f"{self._size.name} on these links: give others with --mbit, or another size"
            )
        with VmMemory(self._list_agents()) as memory:
            before_s, killed_at, saved = self._kill_vm(generation)
            follower = wait_for(lambda: self._find_generation(generation["number"]), "training after the kill")
            enough = follower["resumed_step"] + 1 + self._options.steps_after
            wait_for(lambda: self._has_made(enough, killed_at), "steps after the kill")
        lines = self._read_lines()
        waits = parse_activity(self._activity.read_text())
        gap = find_gap(lines, killed_at, follower["resumed_step"] + 1)
        loaded = [each for each in self._client.checkpoints(self._job) if each["step"] == follower["resumed_step"]]
        after_s = median_step_s([line for line in lines if line.at > killed_at and line.step >= gap.next_step])
        came_from = follower["state_from"] or {}
        return {
            "shape_before": f"{generation['p']}×{generation['d']}",
            "shape_after": f"{follower['p']}×{follower['d']}",
            "kind_of_morph": follower["kind_of_morph"],
            "reason": follower["reason"],
            "obstacles": [event["message"] for event in self._client.events(self._job, kind=["reshape_not_possible"])],
            "step_before_s": before_s,
            "step_after_s": after_s,
            "last_step": gap.last_step,
            "saved_step": saved,
            "kill_at": self._options.kill_at,
            "gap_s": gap.seconds,
            "idle_s": find_idle(waits, killed_at, gap.ended_at),
            "idle_before_s": find_idle(waits, killed_at - IDLE_STEPS * before_s, killed_at),
            "steps_redone": gap.steps_redone,
            "micro_batches_redone": follower["micro_batches_redone"],
            "micro_batches": count_micro_batches(self._size.global_batch, self._size.micro_batch),
            "pause_s": gap.seconds - after_s,
            "cost_s": gap.seconds + gap.steps_redone * before_s,
            "kept_bytes": came_from.get("kept", 0),
            "peer_bytes": came_from.get("peers", 0),
            "checkpoint_bytes": loaded[0]["total_bytes"] if loaded and came_from.get("store") else 0,
            "extra_bytes": find_extra_bytes(
                memory.copy_samples(), killed_at, [place["vm_id"] for place in follower["placement"]]
            ),
            "reported": _summarize_morph(follower),
            "growth": self._grow(follower),
        }

    def _find_generation(self, after: int, shape: tuple[int, int] | None = None) -> GenerationDocument | None:
        """The first training generation after that number that has completed a step, of this shape if one is given."""
        for generation in self._client.generations(self._job):
            started = generation["kind"] == "training" and generation["seconds_without_progress"] is not None
            fits = shape is None or (generation["p"], generation["d"]) == shape
            if generation["number"] > after and started and fits:
                return generation
        job = self._client.job(self._job)
        if job["state"] == "failed":
            raise RuntimeError(f"the job failed: {job['reason']}")
        return None

    def _kill_vm(self, generation: GenerationDocument) -> tuple[float, float, int]:
        """Kills the last rank's VM in the middle of a step, or gives it notice.

        Returns how long a step took, when that was done, and the step of the newest checkpoint.
        """
        last = max(generation["placement"], key=lambda place: place["rank"])["vm_id"]
        if self._options.replicas > 1:  # otherwise a new VM's start would disturb the measurement
            self._client.set_local_capacity(self._options.vms - 1)
        steps = self._options.steps_before
        wait_for(lambda: self._has_steps(0.0, steps), f"step {steps}", deadline_s=600.0)
        saved = max((checkpoint["step"] for checkpoint in self._client.checkpoints(self._job)), default=0)
        victims = list_vm_processes(self._client, last)
        newest = self._read_lines()[-1].step
        wait_for(lambda: self._has_steps(0.0, newest + 1), "the next step", poll_s=_RECORD_POLL_S)
        lines = self._read_lines()
        step_s = median_step_s(lines)
        began = next(line.at for line in lines if line.step == newest + 1)
        time.sleep(max(0.0, began + step_s * self._options.kill_at - time.time()))
        killed_at = time.time()
        if self._options.notice_s:
            self._client.preempt(last, notice_s=self._options.notice_s)
            return step_s, killed_at, saved
        kill_all(victims)
        return step_s, killed_at, saved

    def _grow(self, before: GenerationDocument) -> dict[str, Any] | None:
        """Lets the VM come back. Returns what the growth cost; None if the job did not grow in time."""
        if not self._options.growth_wait_s or self._options.replicas == 1:
            return None
        self._client.set_local_capacity(self._options.vms)
        shape = (self._options.stages, self._options.replicas)
        with suppress(TimeoutError):
            grown = wait_for(
                lambda: self._find_generation(before["number"], shape),
                "growth",
                deadline_s=self._options.growth_wait_s,
            )
            return _summarize_morph(grown)
        return None

    def _list_agents(self) -> dict[str, int]:
        return {vm["id"]: vm["ref"]["pid"] for vm in self._client.vms() if vm["state"] == "ready"}

    def _read_lines(self) -> list[StepLine]:
        return parse_record(self._record.read_text()) if self._record.exists() else []

    def _has_steps(self, since: float, step: int) -> bool:
        """Whether a worker has ended this step or a later one since then."""
        return any(line.step >= step and line.at > since for line in self._read_lines())

    def _has_made(self, step: int, since: float) -> bool:
        """As `_has_steps`, but this very step: a worker that the kill did not reach may end later ones first."""
        return any(line.step == step and line.at > since for line in self._read_lines())


def _summarize_morph(generation: GenerationDocument) -> dict[str, Any]:
    """The manager's figures of the morph before this generation."""
    parts: dict[str, float] = {}
    for part in generation["downtime"] or ():
        parts[part["name"]] = parts.get(part["name"], 0.0) + part["seconds"]
    return {
        "kind_of_morph": generation["kind_of_morph"],
        "seconds_without_progress": generation["seconds_without_progress"],
        "steps_redone": generation["steps_redone"],
        "resumed_step": generation["resumed_step"],
        "state_from": generation["state_from"],
        "downtime": parts,
    }
