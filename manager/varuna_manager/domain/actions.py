"""What a decision about a job asks for, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from varuna_manager.domain.memory_margin import MemoryLesson
from varuna_manager.domain.newcomers import WantedNewcomers
from varuna_manager.domain.observed import GenerationView, Holders, Suspect
from varuna_manager.domain.states import EndCause, GenerationKind, JobState, StopMode
from varuna_proto.plan import Device, Plan


@dataclass(frozen=True, kw_only=True)
class StartGeneration:
    number: int
    kind: GenerationKind
    placement: tuple[Device, ...]
    plan: Plan
    candidates: tuple[Mapping[str, Any], ...]
    reason: str
    in_place: bool = False
    """Whether its ranks are processes of the generation before, which keep their state."""
    holders: Holders | None = None
    """The processes that give it their state; None: none do. In place, they are its own, which take other stages."""


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
    """The script's exit code; None: it is not known."""
    note: str = ""
    """What a person has to know of a success, as the rest of a sentence; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class RequeueJob:
    """Move the job back to the queue, because other jobs got its GPUs."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class RequestStacks:
    """Request the stacks of all ranks from the agents of the generation."""

    number: int


@dataclass(frozen=True, kw_only=True)
class RecordHang:
    """Store the stacks, and emit an event that names the suspect."""

    number: int
    reason: str
    suspect: Suspect | None
    silent_s: float
    """Time without progress."""


@dataclass(frozen=True, kw_only=True)
class RecordDeath:
    """Store how many generations the workers of the VM have ended."""

    vm_id: str
    deaths: int


@dataclass(frozen=True, kw_only=True)
class RaiseMargin:
    """Store what a want of memory has taught, and emit an event with its figures."""

    number: int
    reason: str
    lesson: MemoryLesson


@dataclass(frozen=True, kw_only=True)
class QuarantineVms:
    """Take the VMs out of use until then."""

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
    | RequestStacks
    | RecordHang
    | RecordDeath
    | RaiseMargin
    | QuarantineVms
    | LiftQuarantine
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    reason: str
    """Why these actions, or why none."""
    actions: tuple[Action, ...] = ()
    claims: frozenset[Device] = frozenset()
    """Devices that jobs behind this one must not take."""
    notable: bool = True
    """Whether a new reason is emitted as an event."""
    newcomers: WantedNewcomers | None = None
    """The processes to have ready for the next generation. None: none; while no generation runs, those that are there
    stay."""

    @classmethod
    def stop_generation(cls, generation: GenerationView, mode: StopMode, cause: EndCause, reason: str) -> Decision:
        """A decision to stop the generation, which keeps its devices until it has ended."""
        action = StopGeneration(number=generation.number, mode=mode, cause=cause, reason=reason)
        return cls(reason=reason, actions=(action,), claims=generation.devices)
