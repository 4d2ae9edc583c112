"""What the World holds from the store: the columns that decisions need, frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from varuna_manager.db.changes import GenerationKey
from varuna_manager.domain.commands import GenerationOnVm
from varuna_manager.domain.memory_margin import MemoryShortage
from varuna_manager.domain.observed import Holder, Holders, KeptCopy, StopView, WorkerView, WorkerViews
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
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

ALIVE_STATES = frozenset(state.value for state in WorkerState if state not in STOPPED_WORKER_STATES)
"""States of workers that have not stopped."""
# Faster than `VmState(value)` and `WorkerState(value)`, which matters ten thousand times in a look.
_VM_STATES = {state.value: state for state in VmState}
_WORKER_STATES = {state.value: state for state in WorkerState}


class VmFacts(NamedTuple):
    """A VM's row without its history."""

    id: str
    version: int
    state: str
    gpus: int
    device_memory_bytes: int | None
    created_at: float
    reason: str | None
    notice_deadline: float | None
    drain_deadline: float | None
    slow_ratio: float | None
    slow_reason: str | None
    quarantined_until: float | None
    quarantines: int
    hangs: int
    deaths: int
    last_death_at: float | None
    cordoned_at: float | None
    request: str | None
    price_per_hour: float | None
    gpu_type: str | None = None
    pool: str | None = None
    zone: str | None = None
    drained_at: float | None = None
    machine_type: str | None = None

    @property
    def vm_state(self) -> VmState:
        return _VM_STATES[self.state]


class JobFacts(NamedTuple):
    """A job's row without its history."""

    id: str
    version: int
    name: str
    state: str
    spec: Mapping[str, Any]
    reason: str | None
    created_at: float
    checkpoint_url: str | None
    profile_json: str | None
    profiled_at: float | None
    profile_error: str | None
    retried_after: int | None
    cancel_saves: bool
    setup_error: str | None
    setup_exit_code: int | None
    retried_at: float | None
    run_since: float | None
    setup_failures: Mapping[str, Any] | None
    script_obstacles: Sequence[str] | None = None
    memory_margin: Mapping[str, Any] | None = None

    @property
    def job_state(self) -> JobState:
        return JobState(self.state)


@dataclass(frozen=True)
class StoredJob:
    row: JobFacts
    spec: JobSpec
    flaw: str
    """Why the spec cannot be used; empty if it can be."""


class GenerationFacts(NamedTuple):
    """A generation's row without its history and its candidates."""

    job_id: str
    number: int
    version: int
    kind: str
    state: str
    plan: Mapping[str, Any]
    rendezvous_host: str
    rendezvous_port: int
    secret: str | None
    committed_step: int | None
    in_place: bool
    holders_generation: int | None
    holders: Sequence[Mapping[str, Any]] | None
    keepers: Sequence[int] | None
    copies_shares: bool | None
    created_at: float
    ended_at: float | None
    end_cause: str | None
    end_reason: str | None
    stop_mode: str | None
    stop_cause: str | None
    stop_reason: str | None
    stop_requested_at: float | None

    @property
    def key(self) -> GenerationKey:
        return self.job_id, self.number

    @property
    def generation_kind(self) -> GenerationKind:
        return GenerationKind(self.kind)

    @property
    def generation_state(self) -> GenerationState:
        return GenerationState(self.state)

    @property
    def mode_of_stop(self) -> StopMode | None:
        return None if self.stop_mode is None else StopMode(self.stop_mode)

    @property
    def cause_of_end(self) -> EndCause | None:
        return None if self.end_cause is None else EndCause(self.end_cause)

    @property
    def cause_of_stop(self) -> EndCause | None:
        return None if self.stop_cause is None else EndCause(self.stop_cause)


class GenerationProgress(NamedTuple):
    """A generation's progress, which is written without raising its version."""

    last_step: int | None
    last_step_at: float | None
    resumed_step: int | None
    started_at: float | None
    not_finite_from: int | None
    steps_skipped: int
    micro_batches_left: int | None = None
    copies_obstacle: str | None = None
    marks_obstacle: str | None = None
    running_at: float | None = None

    @property
    def mean_step_s(self) -> float | None:
        """Seconds from step to step since the first one (`started_at`); None: there was no second one."""
        if self.last_step is None or self.last_step_at is None or self.started_at is None:
            return None
        steps = self.last_step - (self.resumed_step or 0) - 1
        return (self.last_step_at - self.started_at) / steps if steps > 0 else None


class WorkerFacts(NamedTuple):
    """A worker's row without its history."""

    job_id: str
    generation: int
    rank: int
    vm_id: str
    local_rank: int
    state: str
    cause: str | None
    exit_code: int | None
    error_text: str | None
    unreached: int | None
    stopped_at: float | None
    held_step: int | None = None
    held_gives_only: bool = False
    held_copies: Sequence[Sequence[int]] | None = None
    shortage: Mapping[str, Any] | None = None

    @property
    def worker_state(self) -> WorkerState:
        return _WORKER_STATES[self.state]

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE_STATES

    @property
    def exit_cause(self) -> ExitCause | None:
        return None if self.cause is None else ExitCause(self.cause)

    def make_view(self, *, lease_over: bool = False) -> WorkerView:
        return WorkerView(
            rank=self.rank,
            device=Device(self.vm_id, self.local_rank),
            state=self.worker_state,
            cause=self.exit_cause,
            error=self.error_text or "",
            exit_code=self.exit_code,
            unreached=self.unreached,
            shortage=None if self.shortage is None else MemoryShortage(**self.shortage),
            held_step=self.held_step,
            gives_only=self.held_gives_only,
            held_copies=tuple(KeptCopy(*copy) for copy in self.held_copies or ()),
            stopped_at=self.stopped_at,
            lease_over=lease_over,
        )


class WorkerGroup:
    """All workers of one generation. Frozen: when one of them changes, the World makes a new group."""

    def __init__(self, workers: Iterable[WorkerFacts]) -> None:
        self.all = tuple(sorted(workers, key=lambda worker: worker.rank))

    @cached_property
    def vm_ids(self) -> frozenset[str]:
        return frozenset([worker.vm_id for worker in self.all])

    @cached_property
    def occupied(self) -> Mapping[Device, str]:
        """The job's id, by device of each worker that has not stopped."""
        return {Device(worker.vm_id, worker.local_rank): worker.job_id for worker in self.all if worker.is_alive}

    @cached_property
    def alive_on(self) -> Mapping[str, tuple[WorkerState, ...]]:
        """The states of the workers that have not stopped, by VM."""
        found: dict[str, tuple[WorkerState, ...]] = {}
        for worker in self.all:
            if worker.is_alive:
                found[worker.vm_id] = (*found.get(worker.vm_id, ()), worker.worker_state)
        return found

    @cached_property
    def views(self) -> WorkerViews:
        """Every worker as decisions see it, if every VM's agent may still hold a lease."""
        return WorkerViews(worker.make_view() for worker in self.all)

    def views_without_lease(self, lapsed: Collection[str]) -> WorkerViews:
        """The same, if these VMs' leases are over, so that their agents have ended their workers."""
        return WorkerViews(worker.make_view(lease_over=worker.vm_id in lapsed) for worker in self.all)


@dataclass(frozen=True)
class HeldGeneration:
    """A generation with its workers."""

    facts: GenerationFacts
    group: WorkerGroup

    @cached_property
    def plan(self) -> Plan:
        return Plan.from_document(self.facts.plan)

    @cached_property
    def holders(self) -> Holders | None:
        facts = self.facts
        if facts.holders_generation is None:
            return None
        members = tuple(Holder.from_document(document) for document in facts.holders or ())
        return Holders(generation=facts.holders_generation, members=members)

    @cached_property
    def presence(self) -> Mapping[str, tuple[GenerationOnVm, ...]]:
        """The generation's part on each VM where some of its workers have not stopped."""
        facts, state, stop_mode = self.facts, self.facts.generation_state, self.facts.mode_of_stop
        return {
            vm_id: (
                GenerationOnVm(
                    job_id=facts.job_id,
                    generation=facts.number,
                    state=state,
                    stop_mode=stop_mode,
                    worker_states=worker_states,
                ),
            )
            for vm_id, worker_states in self.group.alive_on.items()
        }

    @cached_property
    def stop(self) -> StopView | None:
        facts, mode, cause = self.facts, self.facts.mode_of_stop, self.facts.cause_of_stop
        if facts.stop_requested_at is None:
            return None
        assert mode is not None
        assert cause is not None
        return StopView(mode=mode, cause=cause, reason=facts.stop_reason or "", requested_at=facts.stop_requested_at)
