"""Views of jobs, generations and VMs for the tests of decisions."""

from __future__ import annotations

from dataclasses import replace

from varuna_manager.domain.actions import Decision
from varuna_manager.domain.job_decision import decide_job
from varuna_manager.domain.newcomers import NewcomersView, WantedNewcomers
from varuna_manager.domain.observed import GenerationView, JobView, Proposal, Rules, StopView, VmView, WorkerView
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
from varuna_proto.plan import Device, Plan

NOW = 1000.0
RULES = Rules()


def vm(
    name: str, *, silent_s: float | None = None, ready_for_s: float = 60.0, age_s: float = 0.0, **changes: object
) -> VmView:
    """A VM as it is at NOW."""
    view = VmView(
        id=name,
        state=VmState.READY,
        silent_since=None if silent_s is None else NOW - silent_s,
        ready_since=NOW - ready_for_s,
        created_at=NOW - age_s,
        listed=True,
    )
    return replace(view, **changes)


def plan_for(gpus: int, rate: float | None = None) -> Plan:
    return Plan(
        p=1, d=gpus, micro_batch=1, global_batch=8, predicted_minibatch_s=1.0, examples_per_s=rate or 8.0 * gpus
    )


def proposal(devices: tuple[Device, ...], rate: float | None = None) -> Proposal:
    return Proposal(plan=plan_for(len(devices), rate), placement=devices)


def devices(*names: str) -> tuple[Device, ...]:
    return tuple(Device(name, 0) for name in names)


def worker(rank: int, vm_id: str, cause: ExitCause | None = None, **changes: object) -> WorkerView:
    state = WorkerState.RUNNING if cause is None else WorkerState.EXITED
    if cause is ExitCause.VM_GONE:
        state = WorkerState.LOST
    stopped_at = None if cause is None else NOW - 10
    view = WorkerView(rank=rank, device=Device(vm_id, 0), state=state, cause=cause, stopped_at=stopped_at)
    return replace(view, **changes)


def generation(*workers: WorkerView, **changes: object) -> GenerationView:
    view = GenerationView(
        number=2,
        kind=GenerationKind.TRAINING,
        state=GenerationState.RUNNING,
        workers=workers,
        progress_at=NOW - 1,
        plan=plan_for(len(workers)),
        last_step=5,
    )
    return replace(view, **changes)


def stopping(mode: StopMode, cause: EndCause, *workers: WorkerView) -> GenerationView:
    stop = StopView(mode=mode, cause=cause, reason="because", requested_at=NOW - 1)
    return generation(*workers, state=GenerationState.STOPPING, stop=stop)


def job(current: GenerationView | None = None, **changes: object) -> JobView:
    state = JobState.QUEUED if current is None else JobState.RUNNING
    view = JobView(id="j", name="n", state=state, created_at=0.0, global_batch=8, profiled_at=500.0, generation=current)
    return replace(view, **changes)


def decide(view: JobView, *vms: VmView, now: float = NOW) -> Decision:
    return decide_job(now, view, {one.id: one for one in vms}, RULES)


def decide_when_prepared(view: JobView, *vms: VmView, now: float = NOW) -> Decision:
    """With the processes of the next generation at the door, if the job waits for them."""
    decision = decide(view, *vms, now=now)
    if decision.newcomers is None:
        return decision
    return decide(replace(view, newcomers=at_door(decision.newcomers, since=now)), *vms, now=now)


def at_door(wanted: WantedNewcomers, since: float = NOW, **changes: object) -> NewcomersView:
    """All of them."""
    view = NewcomersView(wanted=wanted, since=since, at_door=frozenset(wanted.placement))
    return replace(view, **changes)


def kinds(decision: Decision) -> list[type]:
    return [type(action) for action in decision.actions]
