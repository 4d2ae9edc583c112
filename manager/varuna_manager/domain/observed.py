"""What decisions see of jobs, generations and VMs: frozen, without access to the store or the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.limits import JobLimitsView
from varuna_manager.domain.memory_margin import NO_MARGIN, MemoryMargin, MemoryShortage
from varuna_manager.domain.morphs import MorphEstimate
from varuna_manager.domain.newcomers import NewcomersView
from varuna_manager.domain.setbacks import Setbacks
from varuna_manager.domain.setups import SetupProgress
from varuna_manager.domain.states import (
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
    WaitKind,
    WorkerState,
)
from varuna_planner.liveput.morph_cost import NO_MOVES, StateMoves
from varuna_proto.plan import Device, Plan

_OVERDUE_INTERVALS = 2.0
_OVERDUE_SHARE = 0.4
"""Who gives VMs more time until they are suspect gives it here, too."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Thresholds of the decisions; the defaults are the settings' defaults."""

    heartbeat_interval_s: float = 1.0
    suspect_after_s: float = 5.0
    """Silence after which nothing new is launched on a VM."""
    lost_after_s: float = 10.0
    """Silence after which a VM's workers are given up."""
    restart_grace_s: float = 30.0
    """Silence allowed to a VM whose agent has not reconnected since the manager started: agents redial with backoff."""
    common_silence_hold_s: float = 600.0
    """VMs that fell silent together with most others are neither replaced nor given back for this long."""
    lease_s: float = 60.0
    """An agent that is cut off from the manager for this long has ended its workers."""
    growth_settle_s: float = 2.0
    """The age that new devices must have before a job grows into them."""
    growth_prepare_s: float = 30.0
    """The longest time that a job waits for the agents of new devices to prepare for its workers."""
    newcomers_wait_s: float = 120.0
    """The longest time that a planned morph waits for the processes that are started ahead for it; 0: none are."""
    prepare_again_s: float = 60.0
    """Time after which an agent is asked again to prepare, because a setup that failed may succeed."""
    setup_failures: int = 3
    """A job that never ran fails when its setup has failed on this many VMs (or on all, if there are fewer)."""
    growth_ratio: float = 1.05
    """A job grows when the predicted rate of the larger plan is at least this many times the present one."""
    hang_minimum_s: float = 30.0
    """The shortest time without progress that makes a hang."""
    hang_steps: float = 20.0
    """Time without progress that makes a hang, in predicted steps."""
    hang_doublings: int = 6
    """The limit doubles after each hang, at most this many times, because a script that writes for long looks hung."""
    finish_timeout_s: float = 600.0
    """Time without a step that the other ranks have after one has finished: they may be writing the result."""
    first_step_timeout_s: float = 120.0
    """Time that a generation has from its launch to its first step, plus some mini-batches."""
    calibration_timeout_s: float = 300.0
    root_cause_wait_s: float = 2.0
    """When ranks have lost a peer: time to wait for a report about that peer."""
    survivors_wait_s: float = 2.0
    """When a generation has ended: time to wait for workers that may survive it with their state."""
    share_minibatches: float = 2.0
    """Times of a step that a replica has to finish its share of it before its workers leave."""
    survivors_kept_s: float = 60.0
    """Survivors wait in their processes for longer than this; later ones are not counted on."""
    memory_kept_s: float = 600.0
    """What workers that have ended left in their VM's memory is kept for longer than this."""
    agent_returns_s: float = 30.0
    """Time to wait for an agent that has ended, if its VM's memory has a stage that nobody else holds."""
    profile_exit_wait_s: float = 10.0
    """Time that calibrating workers have to leave after the profile has arrived."""
    stop_grace_s: float = 5.0
    """Time that workers have to leave (leave-now) before they are killed."""
    save_grace_s: float = 60.0
    """The same for save-first, plus two mini-batches. The deadline of a notice shortens it."""
    breaker: int = 5
    """A job fails after this many generations in a row that a fault ended before they passed the best step so far."""
    start_settle_s: float = 5.0
    """Time that a new job waits for VMs that are requested already."""
    slow_threshold: float = 0.15
    """A VM is slow when it takes longer than its peers for the same work by this fraction."""
    slow_looks: int = 3
    """Comparisons in a row that must show it."""
    slow_gain: float = 1.05
    """A job leaves slow VMs when the predicted rate without them is at least this many times the present one."""
    quarantine_s: float = 600.0
    """Duration of a VM's first quarantine; each further one lasts twice as long."""
    stacks_wait_s: float = 5.0
    """Time that a hanging generation is kept so that its ranks can report their stacks."""
    quarantine_hangs: int = 2
    """A VM is quarantined when this many hangs were attributed to it."""
    quarantine_deaths: int = 3
    """A VM is quarantined when its workers ended this many generations, each within death_window_s of the last."""
    death_window_s: float = 3600.0
    storm_losses: int = 4
    """VMs lost within storm_window_s that make a storm. Shapes are not changed by choice until it is over."""
    storm_window_s: float = 60.0
    storm_quiet_s: float = 15.0
    """Time without a loss after which a storm is over."""
    storm_wait_s: float = 180.0
    """The longest time that jobs wait for the end of a storm."""
    notice_overdue_s: float = 120.0
    """A VM that still exists this long after its deadline is given back: it has left every job."""
    request_timeout_s: float = 120.0
    """Time that a requested VM has until its agent connects, while there is a manager that can admit it."""

    @property
    def overdue_s(self) -> float:
        """Silence that counts where another witness agrees with it: a heartbeat is overdue by a whole interval."""
        return max(_OVERDUE_INTERVALS * self.heartbeat_interval_s, _OVERDUE_SHARE * self.suspect_after_s)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The planner's answer for the devices that the job could have now."""

    plan: Plan | None
    placement: tuple[Device, ...] = ()
    """The device of each rank; the index is the rank."""
    candidates: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    possible: bool = True
    """False: there is no plan for any number of GPUs."""
    present_examples_per_s: float | None = None
    """The rate of the newest generation's shape by the same profile; None: none has trained, or it does not fit."""
    moves: StateMoves = NO_MOVES
    """The time in which the state goes from the memories of the newest generation to this placement. What is late of
    it comes while the next step trains, if no process is new."""
    keeping: Proposal | None = None
    """The answer for the devices of the survivors alone, with a micro-batch that keeps the step under way; None: it was
    not asked for, or there is none."""


@dataclass(frozen=True, kw_only=True)
class VmView:
    id: str
    state: VmState
    gpus: int = 1
    device_memory_bytes: int | None = None
    connected: bool = True
    connected_since_start: bool = True
    """False: its agent has not connected since the manager started."""
    silent_since: float | None = None
    """When the last message of its agent arrived. Before the first: when the manager started, took the VM in, or last
    could not admit the agent. None: its heartbeats arrive in time."""
    ready_since: float | None = None
    """When its agent connected; None: it is not connected."""
    created_at: float = 0.0
    listed: bool | None = None
    """Whether the provider lists it; None: the provider was not asked yet."""
    end_reason: str = ""
    """Why it is no longer listed, by the provider; empty: it does not say."""
    notice_deadline: float | None = None
    drain_deadline: float | None = None
    """The time by which it should be empty, as the request to drain it gave it."""
    slow_ratio: float | None = None
    """Its time for the same work over that of its peers; None: it is not slow."""
    slow_reason: str = ""
    quarantined: bool = False
    quarantines: int = 0
    """Past and present ones."""
    hangs: int = 0
    """Hangs that were attributed to it."""
    deaths: int = 0
    """Generations that its workers have ended, each within death_window_s of the one before."""
    last_death_at: float | None = None
    workers: int = 0
    """Workers there that have not stopped."""
    port_free_at: float | None = 0.0
    """When its rendezvous port may be used: not a moment after another use. None: its agent offers none."""
    preparing: frozenset[str] = frozenset()
    """Ids of jobs whose imports its agent is doing in advance: their workers would have to wait there."""
    warm: frozenset[str] = frozenset()
    """Ids of jobs whose imports are done: their workers would start there at once."""
    prepared: frozenset[str] = frozenset()
    """Ids of jobs whose workdir is ready there, among jobs whose workdir needs preparation."""
    cordoned: bool = False
    """An operator has taken it out of use: no new workers start there."""
    drained: bool = False
    """An operator wants it given back when it is empty."""
    gpu_type: str = ""
    """The name of its GPUs; empty: not known."""
    zone: str = ""
    """Within which its network is fast; empty: not known."""
    setting_up: frozenset[str] = frozenset()
    """Ids of jobs whose workdir is being prepared there or is queued for that."""
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether workers may be started there."""
        return self.state is VmState.READY and self.connected and not self.cordoned

    @property
    def trusted(self) -> bool:
        """Whether workers may be started there, and nothing speaks against it."""
        return self.usable and not self.quarantined

    @property
    def leave_by(self) -> float | None:
        """The time by which all workers should have left it; None: there is no deadline."""
        deadlines = [at for at in (self.notice_deadline, self.drain_deadline) if at is not None]
        return min(deadlines, default=None)

    def silent_s(self, now: float) -> float:
        return 0.0 if self.silent_since is None else now - self.silent_since

    def is_overdue(self, now: float, rules: Rules) -> bool:
        """Whether its agent was connected to this manager and its heartbeat has not come for too long."""
        return self.connected_since_start and self.silent_s(now) >= rules.overdue_s

    def ready_for_s(self, now: float) -> float:
        return 0.0 if self.ready_since is None else now - self.ready_since

    def age_s(self, now: float) -> float:
        return now - self.created_at

    def has_rendezvous_port(self, now: float) -> bool:
        return self.port_free_at is not None and now >= self.port_free_at


Vms = Mapping[str, VmView]
"""By id."""


class KeptCopy(NamedTuple):
    """A copy of the state of a rank, of the same generation, in the memory of a process."""

    rank: int
    step: int


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
    """The last step that it completed, by its agent's last heartbeat; None: there was no heartbeat."""
    waiting_for: WaitKind | None = None
    """Where it waits for other ranks, by its agent's last heartbeat; None: nowhere."""
    quiet_ranks: frozenset[int] = frozenset()
    """The ranks that do not answer it while it waits, by its agent's last heartbeat."""
    unreached: int | None = None
    """The rank that it could not reach at the rendezvous; None: none is known."""
    shortage: MemoryShortage | None = None
    """Why it ran out of memory; None: it did not."""
    held_step: int | None = None
    """The step of the state that its process, or its VM's memory after it, holds for the next generation; None: none
    does."""
    held_copies: tuple[KeptCopy, ...] = ()
    """What its process holds besides, while it is there."""
    gives_only: bool = False
    """Whether the process can only give that state to new ones, and cannot go on in place."""
    lease_over: bool = False
    """Its VM has been silent for a whole lease: its agent has ended it."""

    @property
    def stopped(self) -> bool:
        return self.state is WorkerState.EXITED or self.state is WorkerState.LOST or self.lease_over


class WorkerViews(tuple[WorkerView, ...]):
    """The workers of a generation by rank, and what follows from them."""

    @cached_property
    def devices(self) -> frozenset[Device]:
        return frozenset([worker.device for worker in self])

    @cached_property
    def vm_ids(self) -> tuple[str, ...]:
        return tuple(sorted({device.vm_id for device in self.devices}))

    @cached_property
    def running_on(self) -> tuple[str, ...]:
        return tuple(sorted({worker.device.vm_id for worker in self if not worker.stopped}))


def as_worker_views(workers: tuple[WorkerView, ...]) -> WorkerViews:
    return workers if isinstance(workers, WorkerViews) else WorkerViews(workers)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that has left its generation and gives its state to the processes of a later one."""

    rank: int
    stage: int
    vm_id: str
    held_at: float
    """When its agent reported that it holds the state."""
    stages: tuple[int, ...] = ()
    """The stages whose state it has, its own or a copy; empty: only its own."""
    local_rank: int | None = None
    """The index of its device on the VM; None: an earlier manager has not stored it."""

    @property
    def held_stages(self) -> frozenset[int]:
        return frozenset(self.stages or (self.stage,))

    def to_document(self) -> dict[str, Any]:
        document = {"rank": self.rank, "stage": self.stage, "vm_id": self.vm_id, "held_at": self.held_at}
        document |= {} if self.local_rank is None else {"local_rank": self.local_rank}
        return document | ({"stages": list(self.stages)} if self.stages else {})

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Holder:
        return cls(**{**document, "stages": tuple(document.get("stages", ()))})


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Holders that have all stages of one step among them."""

    generation: int
    """The generation that they have left."""
    members: tuple[Holder, ...]
    """By rank."""


@dataclass(frozen=True, kw_only=True)
class StopView:
    mode: StopMode
    cause: EndCause
    reason: str
    requested_at: float


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """The stacks of one rank, as its agent answered."""

    text: str = ""
    """Python stacks of all its threads, as faulthandler writes them."""
    error: str = ""
    """Why there are none."""


@dataclass(frozen=True, kw_only=True)
class StackAnswers:
    """The answers of the ranks of a hanging generation to a request for their stacks."""

    generation: int
    asked_at: float
    answers: Mapping[int, RankStack]
    """By rank, of the ranks that have answered."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """The rank that all others probably wait for."""

    rank: int
    vm_id: str
    why: str
    stack: str = ""
    """The stack of its main thread; empty: it did not answer."""


@dataclass(frozen=True, kw_only=True)
class GenerationView:
    number: int
    kind: GenerationKind
    state: GenerationState
    workers: tuple[WorkerView, ...]
    """By rank; best as WorkerViews, which keep what follows from them."""
    progress_at: float
    """When it last completed a step or a micro-batch of an evaluation. Before its first: the time of its launch or of
    the manager's start, whichever is later."""
    plan: Plan | None = None
    last_step: int | None = None
    resumed_step: int | None = None
    """The step of the state with which it began; None: it has not begun."""
    mean_step_s: float | None = None
    """Seconds from step to step since its first one; None: not known yet."""
    first_step_after_s: float | None = None
    """Seconds from its making to the end of its first step; None: it has made none."""
    stepped_at: float = 0.0
    """When it last completed a step; before its first: when all its ranks had started, or it was made."""
    micro_batches_left: int | None = None
    """Those of the step under way that it had to run when it began; None: not known, or all."""
    not_finite_from: int | None = None
    """The first of the newest steps in a row without a finite loss or gradient; None: the newest step's are finite."""
    steps_skipped: int = 0
    """The job's steps that updated nothing, because their loss or gradient was not finite."""
    in_place: bool = False
    """Whether its ranks are survivors of the generation before, which keep their processes and their state."""
    holders: Holders | None = None
    """The processes that give it their state; None: it goes on with the stages that its processes have, or from a
    checkpoint. In place, they are its own, by their ranks in it, with the stages that they had before."""
    keepers: tuple[int, ...] = ()
    """By stage: the rank that keeps a copy of its first replica's state (`domain.keepers`). Empty: no copies."""
    stop: StopView | None = None
    ended_at: float | None = None
    end_cause: EndCause | None = None
    end_reason: str = ""

    @property
    def live(self) -> bool:
        return self.state is not GenerationState.ENDED

    @property
    def step_s(self) -> float:
        """How long its steps take, for limits: the longer of the predicted and the measured time; 0: not known."""
        predicted_s = 0.0 if self.plan is None else self.plan.predicted_minibatch_s
        return max(predicted_s, self.mean_step_s or 0.0)

    @property
    def longest_step_s(self) -> float:
        """How long its next step may take. Before there is a measured time, a step may take as long as its first one.
        Only the end of that is known, and the predicted time may be far too short."""
        if self.mean_step_s is not None or self.first_step_after_s is None:
            return self.step_s
        return max(self.step_s, self.first_step_after_s)

    @property
    def stop_mode(self) -> StopMode:
        """How its workers leave when there is time: they save if they have a state that may not be saved, or are taking
        it from the memories of others."""
        is_taking = self.kind is GenerationKind.TRAINING and self.holders is not None
        return StopMode.SAVE_FIRST if self.has_new_state or is_taking else StopMode.LEAVE_NOW

    @property
    def is_taking_state(self) -> bool:
        """Whether its workers are about to begin with the state of processes. Stopped now, it could save nothing, and
        who has the state may be gone with it."""
        is_training = self.kind is GenerationKind.TRAINING
        return is_training and self.state is GenerationState.LAUNCHING and (self.in_place or self.holders is not None)

    @property
    def has_new_state(self) -> bool:
        """Whether its workers have trained, or go on from a state that was perhaps never saved."""
        return self.kind is GenerationKind.TRAINING and (self.last_step is not None or self.in_place)

    @property
    def devices(self) -> frozenset[Device]:
        return as_worker_views(self.workers).devices

    @property
    def vm_ids(self) -> tuple[str, ...]:
        """Ids of its VMs, sorted."""
        return as_worker_views(self.workers).vm_ids

    @property
    def running_on(self) -> tuple[str, ...]:
        """Ids of the VMs on which some of its workers have not stopped, sorted."""
        return as_worker_views(self.workers).running_on


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
    """Whether the job ends as soon as it is profiled."""
    profile_error: str = ""
    """Why the measured profile cannot be used; empty: it can."""
    flaw: str = ""
    """Why the job can only be ended, such as an invalid stored spec; empty: it is sound."""
    generation: GenerationView | None = None
    """The newest generation, live or ended."""
    setbacks: Setbacks = field(default_factory=Setbacks)
    """The past generations that count against it."""
    morphs: MorphEstimate = field(default_factory=MorphEstimate)
    """What its morphs cost, by its past generations."""
    margin: MemoryMargin = NO_MARGIN
    """By how much its plans allow for more memory than its profile says."""
    devices: tuple[Device, ...] = ()
    """Devices that it could be launched on now: on usable VMs, free or its own."""
    max_restarts_on_errors: int = 0
    cancel_saves: bool = False
    """Whether its cancellation begins with a last checkpoint."""
    share: int | None = None
    """Its share of the GPUs among all jobs (`domain.sharing`); None: it is the only job."""
    share_reason: str = ""
    """Why its share is not larger."""
    share_due: bool = False
    """Whether other jobs have more than their share and are about to release GPUs."""
    stacks: StackAnswers | None = None
    """Of its newest generation; None: none were requested."""
    fleet: FleetPast = field(default_factory=FleetPast)
    proposal: Proposal | None = None
    """The planner's answer for the devices of `choose_devices`; None: it was not asked."""
    newcomers: NewcomersView | None = None
    """The processes that are started ahead for its next generation; None: none are."""
    copies_shares: bool = False
    """Whether the ranks of its newest generation copy their sums to one another in long steps."""
    starts_ahead: bool = True
    """Whether its env allows that processes are started ahead."""
    newcomers_obstacle: str = ""
    """Why its processes cannot be started ahead; empty: they can."""
    survivors: frozenset[Device] = frozenset()
    """Devices where processes of its newest generation hold its state, and that no other job has or is about to get."""
    quarantined: tuple[Device, ...] = ()
    """Devices that it could be launched on if their VMs were not quarantined."""
    coming_vms: int = 0
    """VMs that are requested and have not connected yet."""
    returning_vms: int = 0
    """VMs whose agents have not reconnected yet to a manager that has just started."""
    setups: SetupProgress = field(default_factory=SetupProgress)
    """The preparation of its workdir on its VMs, where it needs one."""
    prepared_s: float = 0.0
    """Time since its workdir became ready on the first VM; 0: it is ready on none."""
    setup_error: str = ""
    """The last error of preparing its workdir on a VM."""
    setup_exit_code: int | None = None
    has_fixed_stages: bool = False
    """Whether its processes may not go on in place, or could not once, or not with other stages."""
    may_leave_steps: bool = True
    """Whether its processes may leave a step in its middle to go on with it: they have not said that they cannot go on
    in place, but for other stages."""
    missing_secret: str = ""
    """Which of its secrets the manager cannot read now, and why; empty: it can read all."""
    limits: JobLimitsView = field(default_factory=JobLimitsView)
    unfit: int = 0
    """Free devices that do not match its resources."""
    asks: str = ""
    """Its requirements for GPUs; empty: none."""

    @property
    def may_restart(self) -> bool:
        """Whether its script runs again after one more error."""
        return self.setbacks.errors < self.max_restarts_on_errors
