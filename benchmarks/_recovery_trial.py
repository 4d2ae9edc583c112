"""One loss of a VM: a manager with its VMs, a job that trains, the kill, and the growth into the VM that comes back."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_planner.schedule.batching import count_micro_batches
from varuna_proto.rest import GenerationDocument, JobSpecDocument

BYTES_PER_PARAMETER = 12
"""fp32, with AdamW's two moments."""
STAGES = 2
_SCRIPT = Path(__file__).with_name("_recovery_training.py")
_DEADLINE_S = 180.0
_POLL_S, _RECORD_POLL_S = 0.05, 0.002
_STEP_SAMPLE = 10
"""The median of this many steps is the duration of a step."""
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
    vms: int
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


@dataclass(frozen=True, kw_only=True)
class RecoveryWay:
    """A way to go on after a loss."""

    name: str
    flags: str = ""
    """Of the training script."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the job."""


class StepLine(NamedTuple):
    """One worker has ended one step."""

    step: int
    at: float


class Gap(NamedTuple):
    """The longest time without a step after a kill."""

    seconds: float
    last_step: int
    """The newest step before it."""
    next_step: int
    """The first step after it."""

    @property
    def steps_redone(self) -> int:
        return max(0, self.last_step - self.next_step + 1)


def parse_record(text: str) -> list[StepLine]:
    """All whole lines, by time."""
    lines = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
    return sorted((StepLine(int(step), float(at)) for _, step, at in lines), key=lambda line: line.at)


def find_gap(lines: Sequence[StepLine], killed_at: float) -> Gap:
    """Raises ValueError if there is no step before the kill, or none after it."""
    before = [line for line in lines if line.at <= killed_at]
    after = [line for line in lines if line.at > killed_at]
    if not before or not after:
        raise ValueError("no steps on both sides of the kill")
    around = [before[-1], *after]
    at = max(range(1, len(around)), key=lambda index: around[index].at - around[index - 1].at)
    last_step = max(line.step for line in [*before, *around[:at]])
    return Gap(around[at].at - around[at - 1].at, last_step, around[at].step)


def median_step_s(lines: Sequence[StepLine]) -> float:
    """The duration of the newest steps of these, from when the first worker ended each."""
    ends: dict[int, float] = {}
    for line in lines:
        ends.setdefault(line.step, line.at)
    times = sorted(ends.values())[-_STEP_SAMPLE - 1 :]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def run_trial(size: ModelSize, row: RecoveryWay, options: TrialOptions, profiles: Path) -> dict[str, Any]:
    """Returns the trial's figures. `profiles`: where the first trial of a size leaves its profile for the others."""
    with tempfile.TemporaryDirectory(prefix="varuna-recovery-") as name, DemoProcesses(Path(name)) as processes:
        folder = Path(name)
        with _start_manager(processes, folder, size, options, profiles) as client:
            trial = _Trial(client, size, folder / "record", options)
            figures = trial.run(row)
        processes.end_all()
    return figures


def _start_manager(
    processes: DemoProcesses, folder: Path, size: ModelSize, options: TrialOptions, profiles: Path
) -> Client:
    """A client of a manager whose VMs are all ready."""
    data = folder / "manager"
    flags = ["--data-dir", str(data), "--http-port", "0", "--grpc-port", "0", "--vms", str(options.vms)]
    # Calibration measures less of the layers' waiting than training has, so VMs would be found slow.
    flags += ["--local-ephemeral", "--profile-cache-url", str(profiles), "--slow-threshold", "1000"]
    flags += ["--device-memory-bytes", str(max(_DEVICE_MEMORY_BYTES, size.state_bytes))]
    processes.start(["-m", "varuna_manager.main", *flags], folder / "manager.log")
    _wait((data / "manager.json").exists, "the manager")
    client = Client(f"http://{json.loads((data / 'manager.json').read_text())['http']}")
    _wait(client.is_ready, "the manager")
    _wait(lambda: sum(vm["state"] == "ready" for vm in client.vms()) == options.vms, "the VMs")
    return client


def _wait(condition: Callable[[], Any], what: str, *, deadline_s: float = _DEADLINE_S, poll_s: float = _POLL_S) -> Any:
    """The condition's first true value. Raises TimeoutError."""
    give_up = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what}: not within {deadline_s:.0f} s")
        time.sleep(poll_s)
    return value


class _Trial:
    def __init__(self, client: Client, size: ModelSize, record: Path, options: TrialOptions) -> None:
        self._client = client
        self._size = size
        self._record = record
        self._options = options
        self._job = ""

    def run(self, row: RecoveryWay) -> dict[str, Any]:
        self._job = self._client.submit(self._make_spec(row))["id"]
        shape = (STAGES, self._options.vms // STAGES)
        generation = _wait(lambda: self._find_generation(0, shape), f"training as {shape[0]}×{shape[1]}")
        before_s, killed_at, saved = self._kill_vm(generation)
        follower = _wait(lambda: self._find_generation(generation["number"]), "training after the kill")
        enough = follower["resumed_step"] + 1 + self._options.steps_after
        _wait(lambda: self._has_steps(killed_at, enough), "steps after the kill")
        lines = self._read_lines()
        gap = find_gap(lines, killed_at)
        loaded = [each for each in self._client.checkpoints(self._job) if each["step"] == follower["resumed_step"]]
        after_s = median_step_s([line for line in lines if line.at > killed_at and line.step >= gap.next_step])
        came_from = follower["state_from"] or {}
        return {
            "shape_before": f"{generation['p']}×{generation['d']}",
            "shape_after": f"{follower['p']}×{follower['d']}",
            "kind_of_morph": follower["kind_of_morph"],
            "step_before_s": before_s,
            "step_after_s": after_s,
            "last_step": gap.last_step,
            "saved_step": saved,
            "gap_s": gap.seconds,
            "steps_redone": gap.steps_redone,
            "micro_batches_redone": follower["micro_batches_redone"],
            "micro_batches": count_micro_batches(self._size.global_batch, self._size.micro_batch),
            "pause_s": gap.seconds - after_s,
            "cost_s": gap.seconds + gap.steps_redone * before_s,
            "kept_bytes": came_from.get("kept", 0),
            "peer_bytes": came_from.get("peers", 0),
            "checkpoint_bytes": loaded[0]["total_bytes"] if loaded and came_from.get("store") else 0,
            "reported": _summarize_morph(follower),
            "growth": self._grow(follower),
        }

    def _make_spec(self, row: RecoveryWay) -> JobSpecDocument:
        size = self._size
        run = f"python {_SCRIPT} --width {size.width} --layers {size.layers} --example-ms {size.example_ms}"
        return {
            "name": "recovery",
            "workdir": str(self._record.parent),
            "run": f"{run} --record {self._record} {row.flags}",
            "global_batch": size.global_batch,
            "plan": {"p": STAGES, "micro_batch": size.micro_batch},
            "env": dict(row.environment),
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
        agent = psutil.Process(next(vm["ref"]["pid"] for vm in self._client.vms() if vm["id"] == last))
        self._client.set_local_capacity(
            self._options.vms - 1
        )  # otherwise a new VM's start would disturb the measurement
        steps = self._options.steps_before
        _wait(lambda: self._has_steps(0.0, steps), f"step {steps}", deadline_s=600.0)
        saved = max((checkpoint["step"] for checkpoint in self._client.checkpoints(self._job)), default=0)
        victims = [agent, *agent.children(recursive=True)]
        newest = self._read_lines()[-1].step
        _wait(lambda: self._has_steps(0.0, newest + 1), "the next step", poll_s=_RECORD_POLL_S)
        lines = self._read_lines()
        step_s = median_step_s(lines)
        began = next(line.at for line in lines if line.step == newest + 1)
        time.sleep(max(0.0, began + step_s * self._options.kill_at - time.time()))
        killed_at = time.time()
        if self._options.notice_s:
            self._client.preempt(last, notice_s=self._options.notice_s)
            return step_s, killed_at, saved
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        return step_s, killed_at, saved

    def _grow(self, before: GenerationDocument) -> dict[str, Any] | None:
        """Lets the VM come back. Returns what the growth cost; None if the job did not grow in time."""
        if not self._options.growth_wait_s:
            return None
        self._client.set_local_capacity(self._options.vms)
        shape = (STAGES, self._options.vms // STAGES)
        with suppress(TimeoutError):
            grown = _wait(
                lambda: self._find_generation(before["number"], shape),
                "growth",
                deadline_s=self._options.growth_wait_s,
            )
            return _summarize_morph(grown)
        return None

    def _read_lines(self) -> list[StepLine]:
        return parse_record(self._record.read_text()) if self._record.exists() else []

    def _has_steps(self, since: float, step: int) -> bool:
        """Whether a worker has ended this step or a later one since then."""
        return any(line.step >= step and line.at > since for line in self._read_lines())


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
