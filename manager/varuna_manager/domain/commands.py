"""The commands that each agent needs. The manager sends those that it has not sent on the agent's present stream.

Commands are idempotent and carry the generation, so sending one again after a reconnection is harmless, and a command
that was lost with a stream or with the manager is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from varuna_manager.domain.states import GenerationState, StopMode, WorkerState


@dataclass(frozen=True, kw_only=True)
class LaunchKey:
    job_id: str
    generation: int


@dataclass(frozen=True, kw_only=True)
class StopKey:
    job_id: str
    generation: int
    mode: StopMode


@dataclass(frozen=True, kw_only=True)
class DrainKey:
    """A VM has only one drain."""


CommandKey = LaunchKey | StopKey | DrainKey


@dataclass(frozen=True, kw_only=True)
class GenerationOnVm:
    """A generation on one VM, as the store has it."""

    job_id: str
    generation: int
    state: GenerationState
    stop_mode: StopMode | None
    worker_states: tuple[WorkerState, ...]


def list_commands(
    parts: Iterable[GenerationOnVm],
    running: Iterable[tuple[str, int]],
    seen: frozenset[tuple[str, int]],
    *,
    draining: bool,
) -> tuple[CommandKey, ...]:
    """The commands that an agent needs, stops before launches.

    `parts`: what the store expects on the VM; `running`: (job, generation) of the workers that its agent reports;
    `seen`: the generations that its agent listed when it connected (these need no Launch).
    """
    stops: list[CommandKey] = []
    launches: list[CommandKey] = []
    known: set[tuple[str, int]] = set()
    for part in parts:
        key = (part.job_id, part.generation)
        known.add(key)
        if part.state is GenerationState.ENDED or part.state is GenerationState.STOPPING:
            mode = part.stop_mode if part.state is GenerationState.STOPPING else StopMode.LEAVE_NOW
            stops.append(StopKey(job_id=key[0], generation=key[1], mode=mode or StopMode.LEAVE_NOW))
        elif WorkerState.ASSIGNED in part.worker_states and key not in seen:
            launches.append(LaunchKey(job_id=key[0], generation=key[1]))
    for job_id, generation in sorted(set(running) - known):
        stops.append(StopKey(job_id=job_id, generation=generation, mode=StopMode.LEAVE_NOW))
    drains: list[CommandKey] = [DrainKey()] if draining else []
    return (*stops, *launches, *drains)
