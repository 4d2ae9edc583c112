"""Simulates workers without processes: they load, step together at the predicted pace, save, leave, fail and hang.

Training is synchronous: a step is done by all ranks or by none, and ranks that miss a peer leave. It also
has the truth that the manager's store is compared with: which steps each generation did, and what is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST, Mode
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w
from virtual_time import VirtualTime

if TYPE_CHECKING:
    from simulated_vm import SimulatedVm

KILLED = -9


class Fault(StrEnum):
    HANG = "hang"
    CRASH = "crash"
    """A rank is killed, for instance by a lack of memory."""
    STUBBORN = "stubborn"
    """The ranks ignore the command to leave, so their agents kill them."""


@dataclass(kw_only=True)
class JobTruth:
    """One job as it really is. `steps`: until it is finished."""

    job_id: str
    steps: int
    profile_json: str
    save_every: int = 10
    saved_step: int = 0
    saved_by: int = 0
    """The generation that saved it."""
    done_step: int = 0
    """The newest that all ranks completed, whether it is saved or not."""
    redone: int = 0
    """Steps that were done more than once."""
    finished: bool = False
    newest_generation: int = 0


@dataclass(kw_only=True, eq=False)
class SimulatedWorker:
    key: ins.WorkerKey
    start: ins.StartWorker
    vm: SimulatedVm
    connected: bool = False
    ready: bool = False
    leave_mode: int = 0
    """The StopMode of the command to leave; 0: there was none."""
    alive: bool = True


@dataclass(kw_only=True, eq=False)
class Group:
    """The ranks of one generation."""

    job: JobTruth
    generation: int
    world_size: int
    step_s: float
    members: dict[int, SimulatedWorker] = field(default_factory=dict)
    step: int = 0
    began: bool = False
    broken: bool = False
    finished: bool = False
    fault: Fault | None = None


class SimulatedTraining:
    """All groups. `step_s` gives the predicted seconds of a mini-batch of (job, generation)."""

    def __init__(self, time: VirtualTime, chance: Random, step_s: Callable[[str, int], float]) -> None:
        self._time = time
        self._chance = chance
        self._step_s = step_s
        self.jobs: dict[str, JobTruth] = {}
        self.groups: dict[tuple[str, int], Group] = {}
        self.fault_rate = 0.0
        """Share of generations that get a fault."""
        self.steps_done = 0

    def group_of(self, start: ins.StartWorker) -> Group:
        key = start.key.generation_key
        if key not in self.groups:
            job = self.jobs[start.key.job_id]
            faulty = start.environment.mode is Mode.TRAIN and self._chance.random() < self.fault_rate
            self.groups[key] = Group(
                job=job,
                generation=start.key.generation,
                world_size=start.environment.world_size,
                step_s=self._step_s(*key),
                fault=self._chance.choice(list(Fault)) if faulty else None,
            )
        return self.groups[key]

    # ------------------------------------------------------------ a worker's life

    def start(self, worker: SimulatedWorker) -> None:
        self.group_of(worker.start).members[worker.key.rank] = worker
        self._time.after(self._chance.uniform(0.1, 2.0), lambda: self._connect(worker))

    def _connect(self, worker: SimulatedWorker) -> None:
        if worker.alive and worker.vm.alive:
            worker.connected = True
            worker.vm.handle(ev.WorkerConnected(worker.key, 1000 + worker.key.rank))
            self._time.after(self._chance.uniform(0.5, 6.0), lambda: self._load(worker))

    def _load(self, worker: SimulatedWorker) -> None:
        group = self.group_of(worker.start)
        if not worker.alive or worker.leave_mode or group.broken:
            return
        if group.step == 0:
            group.step = group.job.saved_step
        worker.ready = True
        worker.vm.receive_worker_message(worker.key, w.WorkerMessage(ready=w.WorkerReady(resumed_step=group.step)))
        if len(group.members) == group.world_size and all(m.ready for m in group.members.values()):
            self._begin(group, worker.start.environment.mode)

    def _begin(self, group: Group, mode: Mode) -> None:
        group.began = True
        if mode is Mode.CALIBRATE:
            self._time.after(self._chance.uniform(5.0, 20.0), lambda: self._profiled(group))
        elif group.step == group.job.steps:  # cancelled at its very end, and retried
            self._finish(group)
        else:
            self._next_step(group)

    def _profiled(self, group: Group) -> None:
        if not self._is_whole(group):
            return
        first = group.members[0]
        profile = w.ProfileDone(profile_json=group.job.profile_json)
        first.vm.receive_worker_message(first.key, w.WorkerMessage(profile_done=profile))
        self._finish(group)

    def alive(self) -> list[SimulatedWorker]:
        """The processes that run, on machines that are there."""
        members = (member for group in self.groups.values() for member in group.members.values())
        return [member for member in members if member.alive and member.vm.alive]

    def _is_whole(self, group: Group) -> bool:
        alive = sum(m.alive and m.vm.alive for m in group.members.values())
        return not group.broken and alive == group.world_size

    # ------------------------------------------------------------ steps

    def _next_step(self, group: Group) -> None:
        self._time.after(group.step_s * self._chance.uniform(0.98, 1.05), lambda: self._step(group))

    def _step(self, group: Group) -> None:
        if not self._is_whole(group) or any(m.leave_mode == pb.STOP_MODE_LEAVE_NOW for m in group.members.values()):
            return
        if group.fault is Fault.HANG and self._chance.random() < 0.2:
            return
        if group.fault is Fault.CRASH and self._chance.random() < 0.2:
            self.end(self._chance.choice(list(group.members.values())), KILLED)
            return
        job = group.job
        assert group.generation == job.newest_generation, (
            f"generation {group.generation} of {job.job_id} completed a step after {job.newest_generation} was started"
        )
        group.step += 1
        self.steps_done += 1
        if group.step <= job.done_step:
            job.redone += 1
        job.done_step = max(job.done_step, group.step)
        self._report_step(group)
        saves = [m.leave_mode in (pb.STOP_MODE_SAVE_FIRST, pb.STOP_MODE_HOLD_FIRST) for m in group.members.values()]
        if group.step == job.steps:
            self._save(group, group.step)
            job.finished = True
            self._finish(group)
        elif all(saves):
            self._save(group, group.step)
            for member in list(group.members.values()):
                self._leave(member)
        else:
            if group.step % job.save_every == 0:
                step = group.step
                self._time.after(group.step_s * self._chance.uniform(0.1, 2.0), lambda: self._save(group, step))
            self._next_step(group)

    def _report_step(self, group: Group) -> None:
        step_us = int(group.step_s * 1e6)
        for member in list(group.members.values()):
            done = w.StepDone(step=group.step, loss=1.0 / group.step, step_us=step_us, examples=1)
            member.vm.receive_worker_message(member.key, w.WorkerMessage(step_done=done))

    def _save(self, group: Group, step: int) -> None:
        """The checkpoint's commit: a rank must live to do it. An older generation's is refused by the store."""
        job, first = group.job, group.members[0]
        if not (first.alive and first.vm.alive) or group.broken or group.generation < job.newest_generation:
            return
        if step > job.saved_step:
            job.saved_step, job.saved_by = step, group.generation
        done = w.CheckpointDone(step=step, url=f"file:///checkpoints/{job.job_id}", total_bytes=10**9)
        first.vm.receive_worker_message(first.key, w.WorkerMessage(checkpoint_done=done))

    def _finish(self, group: Group) -> None:
        group.finished = True
        for member in list(group.members.values()):
            self._exit_after(member, self._chance.uniform(0.0, 2.0), 0)

    # ------------------------------------------------------------ ends

    def receive_leave(self, worker: SimulatedWorker, mode: int) -> None:
        group = self.group_of(worker.start)
        worker.leave_mode = mode
        if group.fault is Fault.STUBBORN or (group.fault is Fault.HANG and self._chance.random() < 0.5):
            return
        if mode == pb.STOP_MODE_LEAVE_NOW or not group.began:
            self._leave(worker)

    def _leave(self, worker: SimulatedWorker) -> None:
        self._exit_after(worker, self._chance.uniform(0.01, 0.5), EXIT_GENERATION_ENDED)

    def _exit_after(self, worker: SimulatedWorker, seconds: float, code: int) -> None:
        self._time.after(seconds, lambda: self.end(worker, code))

    def end(self, worker: SimulatedWorker, code: int) -> None:
        """The process is gone; its agent sees that, when there is one. Peers that still need it leave."""
        if not worker.alive:
            return
        worker.alive = False
        if worker.vm.alive:
            worker.vm.process_ended(worker, code)
        self.lost(worker)

    def lost(self, worker: SimulatedWorker) -> None:
        """The other ranks miss a peer."""
        worker.alive = False
        group = self.group_of(worker.start)
        if group.finished or group.broken:
            return
        group.broken = True
        for member in list(group.members.values()):
            if member.alive and member.vm.alive and not member.leave_mode and group.fault is not Fault.STUBBORN:
                self._exit_after(member, self._chance.uniform(0.02, 1.0), EXIT_PEER_LOST)
