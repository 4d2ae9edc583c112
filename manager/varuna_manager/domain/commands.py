"""What each agent should have been told by now: compared with what it was told on its present stream.

Commands are idempotent and carry the generation, so telling an agent again after a reconnection is harmless, and a
command that was lost with a stream (or with the manager) is simply missing from the comparison.
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
    """The one drain of a VM."""


CommandKey = LaunchKey | StopKey | DrainKey


@dataclass(frozen=True, kw_only=True)
class Presence:
    """A generation's part on one VM, as the store has it."""

    job_id: str
    generation: int
    state: GenerationState
    stop_mode: StopMode | None
    worker_states: tuple[WorkerState, ...]


def wanted_commands(
    parts: Iterable[Presence],
    running: Iterable[tuple[str, int]],
    seen: frozenset[tuple[str, int]],
    *,
    draining: bool,
) -> tuple[CommandKey, ...]:
    """The commands that an agent needs, stops before launches.

    `parts`: what the store expects on the VM; `running`: (job, generation) of the workers that its agent reports;
    `seen`: the generations that its agent said it has seen when it connected (these need no Launch).
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
