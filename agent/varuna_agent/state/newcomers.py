"""Processes that the manager has had started ahead for a job's next generation, while the present one trains.

Each runs the job's script up to `Varuna()` and waits there. It is no worker: it belongs to no generation, keeps no
device from one, and takes a rank when a Launch starts a worker on its device (`hosted_workers.py`).

    STARTING ──at door──> AT_DOOR ──assign──> the worker of a rank (`hosted_worker.py`)
    any ──kill──> KILLED ──its process ends──> forgotten
    STARTING, AT_DOOR ──its process ends──> FAILED, so that the manager learns it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from varuna_agent.state.admission import make_worker
from varuna_agent.state.hosted_worker import HostedWorker
from varuna_agent.state.instructions import KillWorker, StartWorker
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.bounds import NAME_CHARS, clean_text
from varuna_proto.v1 import agent_pb2, worker_pb2


class NewcomerPhase(StrEnum):
    STARTING = "starting"
    AT_DOOR = "at_door"
    """It waits in `Varuna()`."""
    FAILED = "failed"
    """It has no process any longer, or one that can take no rank."""
    KILLED = "killed"


@dataclass
class HostedNewcomer:
    key: WorkerKey
    request: str
    """The StartNewcomers that wants it."""
    local_rank: int
    start: StartWorker
    phase: NewcomerPhase = NewcomerPhase.STARTING
    has_process: bool = True
    has_connected: bool = False
    read: frozenset[str] = frozenset()
    """The variables of the worker's environment that its script has read."""
    fault: str = ""

    def fits(self, start: StartWorker) -> bool:
        """Whether it can be that worker: its script has seen nothing that is otherwise there."""
        mine, its = self.start.environment.to_environ(), start.environment.to_environ()
        has_same_job = (self.start.command, self.start.workdir) == (start.command, start.workdir)
        has_same_job &= dict(self.start.extra_environment) == dict(start.extra_environment)
        has_same_job &= dict(self.start.secrets) == dict(start.secrets)
        return has_same_job and all(mine.get(name) == its.get(name) for name in self.read)


class HostedNewcomers:
    """Part of `HostedWorkers`. What becomes of newcomers is in the heartbeats, and in no report.

    Args:
        device: `cpu` or `cuda`.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._by_key: dict[WorkerKey, HostedNewcomer] = {}
        self._number = 0

    @property
    def all(self) -> tuple[HostedNewcomer, ...]:
        return tuple(self._by_key.values())

    @property
    def are_running(self) -> bool:
        """Whether there is a process that was not killed."""
        return any(one.has_process and one.phase is not NewcomerPhase.KILLED for one in self._by_key.values())

    def is_expected(self, key: WorkerKey) -> bool:
        newcomer = self._by_key.get(key)
        return newcomer is not None and newcomer.has_process and not newcomer.has_connected

    def is_newcomer(self, key: WorkerKey) -> bool:
        return key in self._by_key

    def make_statuses(self) -> list[agent_pb2.Newcomer]:
        """For the heartbeat."""
        return [
            agent_pb2.Newcomer(
                job_id=one.key.job_id,
                request=one.request,
                local_rank=one.local_rank,
                at_door=one.phase is NewcomerPhase.AT_DOOR,
                fault=one.fault,
            )
            for one in self._by_key.values()
            if one.phase is not NewcomerPhase.KILLED
        ]

    def list_at_door(self, job_id: str, request: str) -> list[HostedNewcomer]:
        """Those of the request that can take a rank."""
        return [
            one
            for one in self.all
            if (one.key.job_id, one.request, one.phase) == (job_id, request, NewcomerPhase.AT_DOOR)
        ]

    # ------------------------------------------------------------ starting

    def start_all(self, command: agent_pb2.StartNewcomers, flaw: str) -> Iterator[StartWorker | KillWorker]:
        """Start the processes of the request; those of an earlier one that fit serve it as well, and the others end.

        A request that was followed before changes nothing. `flaw`: why none can be started; empty: nothing.
        """
        launch, request = command.launch, command.request
        if any(one.request == request and one.key.job_id == launch.job_id for one in self.all):
            return
        kept: list[HostedNewcomer] = []
        for assignment in launch.workers:
            worker = make_worker(launch, assignment, self._device, reports_steps=False)
            newcomer = self._find_at_door(worker) if not flaw else None
            if newcomer is None:
                newcomer = self._add_newcomer(request, worker)
                if flaw:
                    newcomer.phase, newcomer.fault, newcomer.has_process = NewcomerPhase.FAILED, flaw, False
                else:
                    yield newcomer.start
            newcomer.request = request
            kept.append(newcomer)
        yield from self.kill_newcomers(
            lambda one: one.key.job_id == launch.job_id and one not in kept, "the next generation is to be another one"
        )

    def _add_newcomer(self, request: str, worker: HostedWorker) -> HostedNewcomer:
        self._number += 1
        key = replace(worker.key, newcomer=self._number)
        environment = replace(worker.start.environment, newcomer=self._number)
        start = replace(worker.start, key=key, environment=environment, rendezvous_port=0)
        self._by_key[key] = newcomer = HostedNewcomer(key, request, worker.local_rank, start)
        return newcomer

    def _find_at_door(self, worker: HostedWorker) -> HostedNewcomer | None:
        for newcomer in self._by_key.values():
            is_there = newcomer.key.job_id == worker.key.job_id and newcomer.local_rank == worker.local_rank
            if is_there and newcomer.phase is NewcomerPhase.AT_DOOR and newcomer.fits(worker.start):
                return newcomer
        return None

    def take_newcomer(self, worker: HostedWorker) -> HostedNewcomer | None:
        """The newcomer that becomes this worker; None: it needs a process of its own."""
        newcomer = self._find_at_door(worker)
        if newcomer is not None:
            del self._by_key[newcomer.key]
        return newcomer

    # ------------------------------------------------------------ events

    def handle_connection(self, key: WorkerKey) -> None:
        self._by_key[key].has_connected = True

    def handle_message(self, key: WorkerKey, message: worker_pb2.WorkerMessage) -> Iterator[KillWorker]:
        newcomer = self._by_key[key]
        if message.HasField("at_door") and newcomer.phase is NewcomerPhase.STARTING:
            newcomer.phase, newcomer.read = NewcomerPhase.AT_DOOR, frozenset(message.at_door.read_variables)
            if message.at_door.obstacle:
                newcomer.phase = NewcomerPhase.FAILED
                newcomer.fault = clean_text(message.at_door.obstacle, NAME_CHARS)
                yield KillWorker(key, newcomer.fault)

    def handle_process_end(self, key: WorkerKey, reason: str) -> None:
        newcomer = self._by_key[key]
        newcomer.has_process = False
        if newcomer.phase is NewcomerPhase.KILLED:
            del self._by_key[key]
        elif newcomer.phase is not NewcomerPhase.FAILED:
            newcomer.phase, newcomer.fault = NewcomerPhase.FAILED, clean_text(reason, NAME_CHARS)

    # ------------------------------------------------------------ ends

    def make_room(self, launch: agent_pb2.Launch, workers: list[HostedWorker]) -> Iterator[KillWorker]:
        """Kill the newcomers that a generation which starts does not take, and those of other jobs on its devices."""
        taken = [self._find_at_door(worker) for worker in workers if not worker.is_in_place]
        devices = {worker.local_rank for worker in workers}

        def is_in_the_way(newcomer: HostedNewcomer) -> bool:
            if newcomer.key.job_id == launch.job_id:
                return newcomer not in taken
            return newcomer.local_rank in devices

        yield from self.kill_newcomers(
            is_in_the_way, f"generation {launch.generation} of job {launch.job_id} starts without it"
        )

    def kill_newcomers(self, is_concerned: Callable[[HostedNewcomer], bool], reason: str) -> Iterator[KillWorker]:
        """Those that have failed are forgotten."""
        for newcomer in self.all:
            if newcomer.phase is NewcomerPhase.KILLED or not is_concerned(newcomer):
                continue
            if not newcomer.has_process:
                del self._by_key[newcomer.key]
                continue
            is_dying = newcomer.phase is NewcomerPhase.FAILED  # it was killed when it told its obstacle
            newcomer.phase = NewcomerPhase.KILLED
            if not is_dying:
                yield KillWorker(newcomer.key, reason)
