"""States of workers in memory files, which outlive the processes that have filled them.

KEPT ──launch that names its rank as a holder──> TAKEN by a worker of that generation
KEPT ──launch of new processes without it──> freed
any ──a newer generation makes a step, its time is over, the job ends──> freed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from varuna_agent.state.admission import is_holder
from varuna_agent.state.instructions import FreeMemory
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.v1 import agent_pb2


@dataclass
class KeptMemory:
    key: WorkerKey
    """The worker that has left it."""
    step: int
    """The committed step."""
    bytes: int
    release_at: float
    """When it is freed, unless a worker of the generation that takes it is here."""
    taker: WorkerKey | None = None
    """The worker that gives it to its generation."""

    @property
    def gives_to(self) -> int:
        """The generation that was to take it; 0: none."""
        return 0 if self.taker is None else self.taker.generation

    def make_held(self) -> agent_pb2.HeldState:
        """For the manager."""
        return agent_pb2.HeldState(step=self.step, bytes=self.bytes, gives_only=True)


class KeptMemories:
    """Part of `HostedWorkers`.

    Args:
        keep_s: how long a file is kept that no generation takes.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_key: dict[WorkerKey, KeptMemory] = {}

    @property
    def all(self) -> tuple[KeptMemory, ...]:
        return tuple(self._by_key.values())

    def add_memory(self, key: WorkerKey, step: int, size: int, now: float) -> KeptMemory:
        memory = KeptMemory(key, step, size, now + self._keep_s)
        self._by_key[key] = memory
        return memory

    def list_taken_by(self, key: WorkerKey) -> list[WorkerKey]:
        """The workers whose memory this one gives to its generation."""
        return [memory.key for memory in self._by_key.values() if memory.taker == key]

    def make_room(self, launch: agent_pb2.Launch, workers: Iterable[WorkerKey], now: float) -> Iterator[FreeMemory]:
        """Have the first worker of a generation that starts take what its holders have left here; free the rest of the
        job's. A generation in place takes none, and may need it again until it has made a step."""
        first = min(workers, key=lambda key: key.rank, default=None)
        for memory in self.all:
            if first is not None and is_holder(launch, memory.key):
                memory.taker, memory.release_at = first, now + self._keep_s
        yield from self.free_memories(
            lambda memory: (
                memory.key.job_id == launch.job_id and not launch.in_place and memory.gives_to != launch.generation
            ),
            f"generation {launch.generation} starts without it",
        )

    def end_outdated(self, job_id: str, generation: int) -> Iterator[FreeMemory]:
        """Free what generations before this one have left: it has made a step, so that all ranks have a state."""

        def is_outdated(memory: KeptMemory) -> bool:
            is_older = memory.key.generation < generation and memory.gives_to <= generation
            return is_older and memory.key.job_id == job_id

        yield from self.free_memories(is_outdated, f"generation {generation} has made a step since")

    def free_overdue(self, hosted: Collection[tuple[str, int]], now: float) -> Iterator[FreeMemory]:
        """`hosted`: the generations with workers on this VM, which may need it hours later."""
        for memory in self.all:
            if (memory.key.job_id, memory.gives_to) in hosted:
                memory.release_at = now + self._keep_s
        reason = f"no generation has taken it within {self._keep_s:g} s"
        yield from self.free_memories(lambda memory: now >= memory.release_at, reason)

    def free_memories(self, is_concerned: Callable[[KeptMemory], bool], reason: str) -> Iterator[FreeMemory]:
        for memory in self.all:
            if is_concerned(memory):
                del self._by_key[memory.key]
                yield FreeMemory(memory.key, reason)

    def list_deadlines(self) -> list[float]:
        return [memory.release_at for memory in self._by_key.values()]
