"""Processes that have left their generation with its state in memory.

Each waits for the job's next generation. It takes a rank of it, or becomes a holder, which gives its state to the new
processes of that generation:

    WAITING ──assign──> the worker of a rank (`hosted_worker.py`)
       ├──ask──> ASKED ──answer──> GIVING ──ask, by a newer generation──> ASKED
       └──its time is over──> STORING, in memory that outlives it (`kept_memories.py`)
    WAITING, ASKED, GIVING ──another process of the agent follows──> STORING
    any ──kill──> KILLED               any ──its process ends──> forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hmac import compare_digest

from varuna_agent.state.admission import is_holder, make_environment, takes_survivor
from varuna_agent.state.hosted_worker import HostedWorker
from varuna_agent.state.instructions import AskToGive, KillWorker, SendStore
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.v1 import agent_pb2


class SurvivorPhase(StrEnum):
    WAITING = "waiting"
    ASKED = "asked"
    """To give its state."""
    GIVING = "giving"
    STORING = "storing"
    """It puts its state into memory, and ends."""
    KILLED = "killed"


@dataclass
class Survivor:
    key: WorkerKey
    """The rank that the process has left. The manager knows the exit of that rank."""
    local_rank: int
    held: agent_pb2.HeldState
    left_at: float
    release_at: float
    """When the process is killed, if it has no rank by then, has not answered, or its state has not been taken."""
    secret: str = field(repr=False)
    """Of the generation that it has left."""
    phase: SurvivorPhase = SurvivorPhase.WAITING
    asked_at: float = 0.0
    gives_to: int = 0
    """The generation that was to take its state; 0: none."""
    has_freed_device: bool = False
    """Its state is in host memory, and the next worker may use its device."""

    @property
    def is_killed(self) -> bool:
        return self.phase is SurvivorPhase.KILLED

    @property
    def newest_generation(self) -> int:
        """A Stop of an older generation does not concern it."""
        return max(self.key.generation, self.gives_to)


class Survivors:
    """Part of `HostedWorkers`: nothing that happens to a survivor is reported to the manager.

    Args:
        device: `cpu` or `cuda`.
        keep_s: how long a survivor waits for its rank, and how long a holder gives its state to a generation without
            workers here; 0: none is kept.
        answer_s: how long a survivor may take to begin to give its state.
        store_s: how long one that nobody needs may take to put its state into memory; 0: it is killed.
    """

    def __init__(self, device: str, *, keep_s: float, answer_s: float, store_s: float) -> None:
        self._device = device
        self._keep_s = keep_s
        self._answer_s = answer_s
        self._store_s = store_s
        self._by_key: dict[WorkerKey, Survivor] = {}
        self.are_kept = keep_s > 0

    @property
    def all(self) -> tuple[Survivor, ...]:
        """Those that were killed and have not ended, too."""
        return tuple(self._by_key.values())

    @property
    def used_devices(self) -> set[int]:
        """Devices on which no worker can start yet: the memory of a GPU is free when its survivor has freed it."""
        if self._device == "cpu":
            return set()
        return {survivor.local_rank for survivor in self._by_key.values() if not survivor.has_freed_device}

    def add_survivor(self, worker: HostedWorker, held: agent_pb2.HeldState, now: float) -> None:
        secret = worker.start.environment.secret
        self._by_key[worker.key] = Survivor(worker.key, worker.local_rank, held, now, now + self._keep_s, secret)

    def keep_longer(self, job_id: str, generation: int, seconds: float) -> None:
        """Keep those that wait longer by the time that other workers of the generation may take to leave it."""
        for survivor in self.all:
            is_concerned = survivor.key.job_id == job_id and survivor.key.generation <= generation
            if is_concerned and survivor.phase is SurvivorPhase.WAITING:
                survivor.release_at = max(survivor.release_at, survivor.left_at + self._keep_s + seconds)

    def get_survivor(self, job_id: str, local_rank: int) -> Survivor | None:
        """The survivor of the job on this device that can take a rank."""
        for survivor in self._by_key.values():
            is_there = survivor.key.job_id == job_id and survivor.local_rank == local_rank
            if is_there and survivor.phase is SurvivorPhase.WAITING and not survivor.held.gives_only:
                return survivor
        return None

    def remove_survivor(self, key: WorkerKey) -> bool:
        """Forget a survivor that takes a rank or has ended; returns whether there was one of this key."""
        return self._by_key.pop(key, None) is not None

    def may_store(self, key: WorkerKey, secret: str) -> bool:
        survivor = self._by_key.get(key)
        if survivor is None or survivor.phase is not SurvivorPhase.STORING:
            return False
        return compare_digest(survivor.secret.encode(), secret.encode())

    def is_survivor(self, key: WorkerKey) -> bool:
        return key in self._by_key

    # ------------------------------------------------------------ holders

    def make_room(self, launch: agent_pb2.Launch, now: float) -> Iterator[AskToGive | KillWorker]:
        """Ask the holders of a generation that starts to give their state, and kill the survivors in its way.

        In place, those of its job that wait may take its ranks. For new processes, only the state of its holders is of
        use, and their devices must be free.
        """
        devices = {each.local_rank for each in launch.workers if not takes_survivor(launch, each.rank)}
        ending = (SurvivorPhase.KILLED, SurvivorPhase.STORING)
        holders = [one for one in self.all if one.phase not in ending and is_holder(launch, one.key)]

        def is_in_the_way(survivor: Survivor) -> bool:
            if survivor in holders:
                return False
            if survivor.key.job_id == launch.job_id:
                may_wait = launch.in_place and survivor.phase is SurvivorPhase.WAITING
                return not may_wait or survivor.local_rank in devices
            return survivor.local_rank in devices

        yield from self.kill_survivors(
            is_in_the_way, f"generation {launch.generation} of job {launch.job_id} starts without it"
        )
        for holder in holders:
            holder.phase = SurvivorPhase.ASKED
            holder.asked_at, holder.gives_to = now, launch.generation
            holder.release_at = now + self._answer_s
            yield AskToGive(
                holder.key, make_environment(launch, holder.key.rank, holder.local_rank, device=self._device)
            )

    def record_giving(self, key: WorkerKey) -> bool:
        """The holder has answered; returns whether it was asked."""
        holder = self._by_key.get(key)
        if holder is None or holder.phase is not SurvivorPhase.ASKED:
            return False
        holder.phase = SurvivorPhase.GIVING
        holder.has_freed_device = True
        holder.release_at = holder.asked_at + self._keep_s
        return True

    def end_outdated(self, job_id: str, generation: int) -> Iterator[KillWorker]:
        """Kill the survivors of older generations: this one has made a step, so that all of its ranks have a state."""

        def is_outdated(survivor: Survivor) -> bool:
            is_older = survivor.key.generation < generation and survivor.gives_to <= generation
            return is_older and survivor.key.job_id == job_id

        yield from self.kill_survivors(is_outdated, f"generation {generation} has made a step since")

    # ------------------------------------------------------------ ends

    def kill_survivors(self, is_concerned: Callable[[Survivor], bool], reason: str) -> Iterator[KillWorker]:
        for survivor in self.all:
            if is_concerned(survivor) and not survivor.is_killed:
                survivor.phase = SurvivorPhase.KILLED
                yield KillWorker(survivor.key, reason)

    def end_overdue(self, hosted: Collection[tuple[str, int]], now: float) -> Iterator[KillWorker | SendStore]:
        """Kill those whose time is over; one that still waits first puts its state into memory.

        `hosted`: the generations with workers on this VM. Such workers may need their state hours later, when the
        script has prepared everything, and whatever becomes of them ends their holders, too."""
        reasons = {
            SurvivorPhase.WAITING: f"no generation has taken its process within {self._keep_s:g} s",
            SurvivorPhase.ASKED: f"it did not begin to give its state within {self._answer_s:g} s",
            SurvivorPhase.GIVING: f"its state was not taken within {self._keep_s:g} s",
            SurvivorPhase.STORING: f"it had not put its state into memory within {self._store_s:g} s",
        }
        for survivor in self.all:
            if survivor.phase is SurvivorPhase.GIVING and (survivor.key.job_id, survivor.gives_to) in hosted:
                survivor.release_at = now + self._keep_s
            if now < survivor.release_at or survivor.is_killed:
                continue
            if survivor.phase is SurvivorPhase.WAITING and self._store_s:
                yield self._store_state(survivor, now)
            else:
                reason = reasons[survivor.phase]
                survivor.phase = SurvivorPhase.KILLED
                yield KillWorker(survivor.key, reason)

    def end_and_store(self, reason: str, now: float) -> Iterator[KillWorker | SendStore]:
        """End all, but first let them put their state into memory, also those that were giving it."""
        for survivor in self.all:
            if not survivor.is_killed and survivor.phase is not SurvivorPhase.STORING and self._store_s:
                yield self._store_state(survivor, now)
        yield from self.kill_survivors(lambda survivor: survivor.phase is not SurvivorPhase.STORING, reason)

    def _store_state(self, survivor: Survivor, now: float) -> SendStore:
        survivor.phase, survivor.release_at = SurvivorPhase.STORING, now + self._store_s
        return SendStore(survivor.key)

    def list_deadlines(self) -> list[float]:
        return [survivor.release_at for survivor in self._by_key.values() if not survivor.is_killed]
