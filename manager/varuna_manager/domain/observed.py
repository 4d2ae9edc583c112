"""What the decisions look at, and what they may ask for. Frozen, with no way to reach the store or the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.limits import LimitsView
from varuna_manager.domain.morphs import Morphs
from varuna_manager.domain.setbacks import Setbacks
from varuna_manager.domain.setups import Setups
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
    WorkerState,
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Thresholds of the decisions; the defaults are the settings' defaults."""

    heartbeat_interval_s: float = 1.0
    suspect_after_s: float = 5.0
    """Silence after which nothing new is launched on a VM."""
    lost_after_s: float = 10.0
    """Silence after which a VM's workers are given up."""
    restart_grace_s: float = 30.0
    """Silence allowed to a VM that has not been heard since the manager started: agents redial with backoff."""
    together_hold_s: float = 600.0
    """For so long nothing is bought for VMs that fell silent together with most others, and none is given back."""
    lease_s: float = 60.0
    """An agent that hears nothing for so long has ended its workers."""
    growth_settle_s: float = 2.0
    """How long new devices must have been there before a job grows into them."""
    growth_prepare_s: float = 30.0
    """And how long at most it waits for their agents to prepare for its workers."""
    prepare_again_s: float = 60.0
    """After so long, an agent is told once more to prepare: a setup that failed may succeed."""
    setup_failures: int = 3
    """VMs on which the setup of a job that never ran has to fail, where there are so many, before the job fails."""
    growth_ratio: float = 1.05
    """Predicted rate of the bigger plan over the present one that makes growing worthwhile, at least."""
    hang_minimum_s: float = 30.0
    hang_steps: float = 20.0
    """Predicted steps without progress that make a hang (but not before hang_minimum_s)."""
    hang_doublings: int = 6
    """Each hang that was seen doubles the limit, at most so often: a script that writes for long looks like one."""
    finish_timeout_s: float = 600.0
    """After a rank has finished: how long the others may take without a step (they may be writing the result)."""
    first_step_timeout_s: float = 120.0
    """Time that a generation has from its launch to its first step, beside some mini-batches."""
    calibration_timeout_s: float = 300.0
    root_cause_wait_s: float = 2.0
    """When all that is known is that ranks lost a peer: how long to wait to hear of the peer."""
    profile_exit_wait_s: float = 10.0
    """After the profile has come: how long calibrating workers may take to leave."""
    stop_grace_s: float = 5.0
    """Leave-now: how long workers may take before they are killed."""
    save_grace_s: float = 60.0
    """Save-first: the same, beside two mini-batches: the one under way is finished. A notice's deadline shortens it."""
    breaker: int = 5
    """Generations in a row that a fault ended before they got beyond the best step so far: they fail the job."""
    start_settle_s: float = 5.0
    """How long a new job waits for VMs that are already on their way."""
    slow_threshold: float = 0.15
    """A VM that takes this much longer than its peers for the same work is slow."""
    slow_looks: int = 3
    """In a row, before it is."""
    slow_gain: float = 1.05
    """Predicted rate without the slow VM over the present one that makes leaving it worthwhile, at least."""
    quarantine_s: float = 600.0
    """The first time; each further one of the same VM lasts twice as long."""
    stacks_wait_s: float = 5.0
    """How long a generation that hangs is kept for its ranks to say where they stand."""
    quarantine_hangs: int = 2
    """A VM that so many hangs were put down to is quarantined."""
    quarantine_deaths: int = 3
    """A VM whose workers ended so many generations, each within death_window_s of the one before, is quarantined."""
    death_window_s: float = 3600.0
    storm_losses: int = 4
    """VMs lost within storm_window_s that make a storm: no shape is changed by choice before it is over."""
    storm_window_s: float = 60.0
    storm_quiet_s: float = 15.0
    """Without a loss, after which a storm is over."""
    storm_wait_s: float = 180.0
    """The longest that a storm is waited for."""
    notice_overdue_s: float = 120.0
    """A VM that is still there so long after its deadline is given back: it has left every job."""
    request_timeout_s: float = 120.0
    """How long a requested VM may take to say Hello."""


class Device(NamedTuple):
    """One accelerator (or CPU slot): the place of one worker."""

    vm_id: str
    local_rank: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shape of a training generation, as the planner chose it."""

    p: int
    d: int
    micro_batch: int
    global_batch: int
    stage_starts: tuple[int, ...] = ()
    policy: str = "work-conserving"
    run_ahead: int = 0
    recompute: tuple[bool, ...] = ()
    predicted_minibatch_s: float = 0.0
    examples_per_s: float = 0.0
    memory_bytes: tuple[int, ...] = ()

    def to_document(self) -> dict[str, Any]:
        return {
            "p": self.p,
            "d": self.d,
            "micro_batch": self.micro_batch,
            "global_batch": self.global_batch,
            "stage_starts": list(self.stage_starts),
            "policy": self.policy,
            "run_ahead": self.run_ahead,
            "recompute": list(self.recompute),
            "predicted_minibatch_s": self.predicted_minibatch_s,
            "examples_per_s": self.examples_per_s,
            "memory_bytes": list(self.memory_bytes),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Plan:
        tuples = {name: tuple(document[name]) for name in ("stage_starts", "recompute", "memory_bytes")}
        return cls(**{**document, **tuples})


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The planner's answer for the devices that the job could have now."""

    plan: Plan | None
    placement: tuple[Device, ...] = ()
    """Index = rank."""
    candidates: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    possible: bool = True
    """False: no number of GPUs would do."""
    present_examples_per_s: float | None = None
    """Of the running generation's shape, predicted from the same profile; None when none runs, or it does not fit."""


@dataclass(frozen=True, kw_only=True)
class VmView:
    id: str
    state: VmState
    gpus: int = 1
    device_memory_bytes: int | None = None
    connected: bool = True
    heard_since_start: bool = True
    """False: not since the manager started."""
    silent_s: float = 0.0
    """Since anything was heard from its agent (or since the manager started)."""
    ready_for_s: float = 0.0
    age_s: float = 0.0
    listed: bool | None = None
    """What the provider says: it has the VM, it has not; None: not asked yet."""
    notice_deadline: float | None = None
    drain_deadline: float | None = None
    """When whoever drained it wants it to be empty."""
    slow_ratio: float | None = None
    """How many times as long as its peers it takes; None: it is not slow."""
    slow_reason: str = ""
    quarantined: bool = False
    quarantines: int = 0
    """Those of the past and the present."""
    hangs: int = 0
    """Hangs that were put down to it."""
    deaths: int = 0
    """Generations that workers there have ended, each not long after the one before."""
    last_death_at: float | None = None
    workers: int = 0
    """Workers there that have not stopped."""
    has_rendezvous_port: bool = True
    preparing: frozenset[str] = frozenset()
    """Ids of jobs whose workers would have to wait there, for imports that its agent is doing ahead."""
    warm: frozenset[str] = frozenset()
    """Ids of jobs whose workers would start there at once: their imports are done."""
    prepared: frozenset[str] = frozenset()
    """Ids of the jobs whose workdir is ready there, of those that need it made."""
    cordoned: bool = False
    """A user wants nothing new to start there."""
    gpu_type: str = ""
    """What its GPUs are called; empty: not known."""
    setting_up: frozenset[str] = frozenset()
    """Ids of the jobs whose workdir is being made ready there, or waits for its turn."""
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether workers may be started there."""
        return self.state is VmState.READY and self.connected and not self.cordoned

    @property
    def leave_by(self) -> float | None:
        """When nothing of ours should be left there."""
        deadlines = [at for at in (self.notice_deadline, self.drain_deadline) if at is not None]
        return min(deadlines, default=None)


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    rank: int
    device: Device
    state: WorkerState
    cause: ExitCause | None = None
    error: str = ""
    exit_code: int | None = None
    stopped_at: float | None = None
    step: int | None = None
    """The last that it completed, as its agent last said; None: not heard."""
    unreached: int | None = None
    """The rank that it could not reach when they met; None: none is known."""
    lease_over: bool = False
    """Its VM has been silent for a whole lease: its agent has ended it."""

    @property
    def stopped(self) -> bool:
        return self.state is WorkerState.EXITED or self.state is WorkerState.LOST or self.lease_over


@dataclass(frozen=True, kw_only=True)
class StopView:
    mode: StopMode
    cause: EndCause
    reason: str
    requested_at: float


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Where a rank stands, as its agent answered."""

    text: str = ""
    """Python stacks of all its threads, as faulthandler writes them."""
    error: str = ""
    """Why there are none."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """What was answered when a generation that hangs was asked where its ranks stand."""

    generation: int
    asked_at: float
    answers: Mapping[int, RankStack]
    """By rank; those that have answered."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """The rank that everyone waits for, as far as that can be told."""

    rank: int
    vm_id: str
    why: str
    stack: str = ""
    """Of its thread that matters; empty: it did not tell."""


@dataclass(frozen=True, kw_only=True)
class GenerationView:
    number: int
    kind: GenerationKind
    state: GenerationState
    workers: tuple[WorkerView, ...]
    progress_at: float
    """When it last completed a step, or a micro-batch of an evaluation was seen to be done; before that, when it was
    launched (never before the manager started)."""
    plan: Plan | None = None
    last_step: int | None = None
    stop: StopView | None = None
    end_reason: str = ""

    @property
    def live(self) -> bool:
        return self.state is not GenerationState.ENDED

    def at(self, progress_at: float, last_step: int | None) -> GenerationView:
        """With its progress; what is worked out of its workers is not worked out again."""
        if (self.progress_at, self.last_step) == (progress_at, last_step):
            return self
        later = replace(self, progress_at=progress_at, last_step=last_step)
        later.__dict__.update({name: vars(self)[name] for name in _OF_WORKERS if name in vars(self)})
        return later

    @cached_property
    def devices(self) -> frozenset[Device]:
        return frozenset([worker.device for worker in self.workers])

    @cached_property
    def vm_ids(self) -> tuple[str, ...]:
        """Of its VMs, in their order."""
        return tuple(sorted({device.vm_id for device in self.devices}))

    @cached_property
    def running_on(self) -> tuple[str, ...]:
        """Ids of the VMs on which not all of its workers have stopped, in their order."""
        return tuple(sorted({worker.device.vm_id for worker in self.workers if not worker.stopped}))


_OF_WORKERS = ("devices", "vm_ids", "running_on")
"""Of a GenerationView: what only its workers decide."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    id: str
    name: str
    state: JobState
    created_at: float
    global_batch: int
    min_gpus: int = 1
    max_gpus: int | None = None
    profiled_at: float | None = None
    profile_only: bool = False
    """Whether it is over when it is profiled."""
    profile_error: str = ""
    """Why the profile that was measured could not be used."""
    flaw: str = ""
    """Why nothing can be done with it but to end it: its stored spec cannot be used, say; empty: all can."""
    generation: GenerationView | None = None
    """The newest."""
    setbacks: Setbacks = field(default_factory=Setbacks)
    """What its past generations say against it."""
    morphs: Morphs = field(default_factory=Morphs)
    """What they say of morphs."""
    devices: tuple[Device, ...] = ()
    """Those that it could be launched on now: on usable VMs, free or its own."""
    max_restarts_on_errors: int = 0
    cancel_saves: bool = False
    """Whether it is to be cancelled with a last checkpoint."""
    share: int | None = None
    """GPUs that are its own among all jobs (`domain.sharing`); None: it is the only job."""
    share_reason: str = ""
    """Why it has no more."""
    share_due: bool = False
    """Other jobs have more than their share, and are about to give it up."""
    stacks: Stacks | None = None
    """Of its newest generation; None: they were not asked for."""
    fleet: FleetPast = field(default_factory=FleetPast)
    proposal: Proposal | None = None
    """For `next_devices`; None when the planner was not asked."""
    quarantined: tuple[Device, ...] = ()
    """Those that it could be launched on, were their VMs not quarantined."""
    coming_vms: int = 0
    """VMs that were requested and are not here yet."""
    returning_vms: int = 0
    """VMs whose agents have not come back yet to a manager that has just started."""
    setups: Setups = field(default_factory=Setups)
    """Of its workdir, where that has to be made ready on its VMs."""
    prepared_s: float = 0.0
    """For how long that has been so on one VM at least; 0: it is on none."""
    setup_error: str = ""
    """Why that could not be made ready on a VM, as it was said last."""
    setup_exit_code: int | None = None
    missing_secret: str = ""
    """Which of its secrets the manager cannot read now, and why."""
    limits: LimitsView = field(default_factory=LimitsView)
    unfit: int = 0
    """Free devices that are not as it asks."""
    asks: str = ""
    """What it asks of its GPUs; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class StartGeneration:
    number: int
    kind: GenerationKind
    placement: tuple[Device, ...]
    plan: Plan
    candidates: tuple[Mapping[str, Any], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class StopGeneration:
    number: int
    mode: StopMode
    cause: EndCause
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndGeneration:
    number: int
    cause: EndCause
    reason: str


@dataclass(frozen=True, kw_only=True)
class FinishJob:
    state: JobState
    error: str | None = None
    exit_code: int | None = None
    """Of the script, where one is known."""


@dataclass(frozen=True, kw_only=True)
class RequeueJob:
    """Back to the queue: its GPUs went to other jobs."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class AskStacks:
    """Ask every agent of the generation where its ranks stand."""

    number: int


@dataclass(frozen=True, kw_only=True)
class NoteHang:
    """Keep the stacks, and tell whom everyone waited for."""

    number: int
    reason: str
    suspect: Suspect | None
    silent_s: float
    """Without progress."""


@dataclass(frozen=True, kw_only=True)
class NoteDeath:
    """Count the generations that workers on the VM have ended."""

    vm_id: str
    deaths: int


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """Leave the VMs alone until then."""

    vm_ids: tuple[str, ...]
    until: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class LiftQuarantine:
    vm_ids: tuple[str, ...]
    reason: str


Action = (
    StartGeneration
    | StopGeneration
    | EndGeneration
    | FinishJob
    | RequeueJob
    | AskStacks
    | NoteHang
    | NoteDeath
    | Quarantine
    | LiftQuarantine
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    reason: str
    """Why these actions, or why none."""
    actions: tuple[Action, ...] = ()
    claims: frozenset[Device] = frozenset()
    """Devices that younger jobs must leave alone."""
    notable: bool = True
    """Whether a new reason is worth an event."""

    @classmethod
    def stop(cls, generation: GenerationView, mode: StopMode, cause: EndCause, reason: str) -> Decision:
        """To stop a generation, which keeps its devices meanwhile."""
        action = StopGeneration(number=generation.number, mode=mode, cause=cause, reason=reason)
        return cls(reason=reason, actions=(action,), claims=generation.devices)
