"""Simulates workers without processes: they load, step together at the predicted pace, save, leave, fail and hang.

Training is synchronous: a step is done by all ranks or by none, and ranks that miss a peer leave. Processes may stay
with the state of their stage, take a rank in place, with the same stages or others, and give their state to new
processes. It also has the truth that the manager's store is compared with: which steps each generation did, what is
saved, and who holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST, Mode, WorkerEnvironment
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w
from virtual_time import VirtualTime

if TYPE_CHECKING:
    from simulated_vm import SimulatedVm

KILLED = -9
HOLDERS_WAIT_S = 20.0
"""How long new processes wait for holders."""


class Carriage(StrEnum):
    """What becomes of a job's processes when they leave a generation."""

    IN_PLACE = "in place"
    GIVES_ONLY = "gives only"
    ENDS = "ends"


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
    carriage: Carriage = Carriage.IN_PLACE
    setup_s: float = 1.0
    """How long a VM takes to make its workdir ready, if the job has a setup."""
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


@dataclass(frozen=True)
class HeldStages:
    step: int
    p: int
    stages: frozenset[int]


@dataclass(kw_only=True, eq=False)
class SimulatedWorker:
    key: ins.WorkerKey
    start: ins.StartWorker
    vm: SimulatedVm
    connected: bool = False
    ready: bool = False
    leave_mode: int = 0
    """The StopMode of the command to leave; 0: there was none."""
    keeps_state: bool = True
    """By the newest command to leave."""
    leaves_within_step: bool = False
    """By the same."""
    alive: bool = True
    frozen: bool = False
    """It does nothing from now on."""
    held: HeldStages | None = None
    """What it has in memory; None: nothing yet."""
    left: bool = False
    """It has left its generation and stays."""
    gives_to: int = 0
    """The generation that was to take its state; 0: none."""
    asked_at: float = 0.0
    gives: bool = False
    """It has answered."""
    has_freed_device: bool = False


@dataclass(kw_only=True, eq=False)
class Group:
    """The ranks of one generation."""

    job: JobTruth
    generation: int
    world_size: int
    step_s: float
    members: dict[int, SimulatedWorker] = field(default_factory=dict)
    step: int = 0
    source: str | None = None
    """Where its state comes from, when that is known."""
    began: bool = False
    broken: bool = False
    finished: bool = False
    has_left_step: bool = False
    """Its ranks leave in the middle of a step."""
    late: dict[int, HeldStages] = field(default_factory=dict)
    """By rank, what it had before it moved, as long as some of its new stage's state is late."""
    fault: Fault | None = None


class SimulatedTraining:
    """All groups.

    Args:
        step_s: gives the predicted seconds of a mini-batch of (job, generation).
        is_moved: whether the processes of (job, generation) take other stages in place.
    """

    def __init__(
        self,
        time: VirtualTime,
        chance: Random,
        step_s: Callable[[str, int], float],
        is_moved: Callable[[str, int], bool],
    ) -> None:
        self._time = time
        self._chance = chance
        self._step_s = step_s
        self.is_moved = is_moved
        self.jobs: dict[str, JobTruth] = {}
        self.groups: dict[tuple[str, int], Group] = {}
        self.fault_rate = 0.0
        """Share of generations that get a fault."""
        self._known_by: dict[tuple[str, int], set[str]] = {}
        """By job and step: what `find_agents` has."""
        self.steps_done = 0
        self.steps_left = 0
        """In their middle."""
        self.left_late = 0
        """Processes that left when some of their state was late."""

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
        members = self.group_of(worker.start).members
        assert worker.key.rank not in members, f"a second process for {worker.key}"
        members[worker.key.rank] = worker
        self._time.after(self._chance.uniform(0.1, 2.0), lambda: self._connect(worker))

    def _connect(self, worker: SimulatedWorker) -> None:
        if worker.alive and worker.vm.alive and not worker.frozen:
            worker.connected = True
            worker.vm.handle(ev.WorkerConnected(worker.key, 1000 + worker.key.rank))
            self._time.after(self._chance.uniform(0.5, 6.0), lambda: self._load(worker))

    def _load(self, worker: SimulatedWorker, since: float | None = None) -> None:
        group = self.group_of(worker.start)
        if not worker.alive or worker.frozen or worker.leave_mode or group.broken:
            return
        since = self._time.now if since is None else since
        if group.source is None and not self._find_source(group, worker.start.environment, since):
            self._time.after(0.5, lambda: self._load(worker, since))
            return
        worker.ready = True
        worker.vm.receive_worker_message(worker.key, w.WorkerMessage(ready=w.WorkerReady(resumed_step=group.step)))
        if len(group.members) == group.world_size and all(m.ready for m in group.members.values()):
            self._begin(group, worker.start.environment.mode)

    def _find_source(self, group: Group, environment: WorkerEnvironment, since: float) -> bool:
        """Whether it is known from which state the group goes on."""
        members = list(group.members.values())
        if any(member.held is not None for member in members):  # in place
            if len(members) < group.world_size:
                return False
            steps = {member.held.step for member in members if member.held is not None}
            assert len(steps) == 1, f"steps {steps} are to go on as generation {group.generation}"
            assert all(member.held is not None or member.start.environment.joins_survivors for member in members), (
                "a process without state among survivors"
            )
            self._check_stages(group, environment.plan.p)
            (group.step,) = steps
            group.source = "kept"
            return True
        if environment.holders:
            if (step := self._find_given_step(group)) is not None:
                group.step, group.source = step, "peers"
                return True
            if self._time.now - since < HOLDERS_WAIT_S:
                return False
        group.step, group.source = group.job.saved_step, "store"
        return True

    def _check_stages(self, group: Group, p: int) -> None:
        """That the members have every stage, and that those with the same cuts have each its own."""
        held = {rank: member.held for rank, member in group.members.items() if member.held is not None}
        before = {one.p for one in held.values()}
        assert len(before) == 1, f"stages of {before} cuts"
        is_moved = self.is_moved(group.job.job_id, group.generation)
        if not is_moved:
            misplaced = [rank for rank, one in held.items() if rank % p not in one.stages or one.p != p]
            assert not misplaced, f"ranks {misplaced} of generation {group.generation} have other stages"
        stages = frozenset().union(*(one.stages for one in held.values()))
        assert stages == set(range(before.pop())), f"generation {group.generation} lacks stages: {stages}"

    def _find_given_step(self, group: Group) -> int | None:
        givers = [one for one in self.alive() if one.gives and one.gives_to == group.generation]
        of_job = [one.held for one in givers if one.key.job_id == group.job.job_id and one.held is not None]
        for step in sorted({one.step for one in of_job}, reverse=True):
            held = [one for one in of_job if one.step == step]
            if frozenset().union(*(one.stages for one in held)) >= set(range(held[0].p)):
                return step
        return None

    def _begin(self, group: Group, mode: Mode) -> None:
        group.began = True
        is_kept = group.source == "kept"
        if mode is Mode.TRAIN and (not is_kept or self.is_moved(group.job.job_id, group.generation)):
            before = {rank: one.held for rank, one in group.members.items() if one.held is not None}
            if is_kept and len(before) == group.world_size and self._chance.random() < 0.7:
                group.late = before
                self._time.after(group.step_s * self._chance.uniform(0.1, 0.9), group.late.clear)
            # Processes that go on have their new stages from here on; copies of these come with the first step.
            self._hold(group, has_copies=not is_kept)
        self._end_givers(group)
        if mode is Mode.CALIBRATE:
            self._time.after(self._chance.uniform(5.0, 20.0), lambda: self._profiled(group))
        elif group.step == group.job.steps:  # cancelled at its very end, and retried
            self._finish(group)
        else:
            self._next_step(group)

    def _hold(self, group: Group, *, has_copies: bool = True) -> None:
        """Each rank has the state of its stage at the group's step, and of the stages that it keeps copies of."""
        for rank, member in group.members.items():
            environment = member.start.environment
            p = environment.plan.p
            copies = {of % p for of, keeper in enumerate(environment.keepers) if has_copies and keeper == rank}
            member.held = HeldStages(group.step, p, frozenset({rank % p} | copies))

    def _end_givers(self, group: Group) -> None:
        """Holders end when their state has been taken."""
        for one in self.alive():
            if one.key.job_id == group.job.job_id and one.gives and one.gives_to == group.generation:
                self._exit_after(one, self._chance.uniform(0.0, 1.0), EXIT_GENERATION_ENDED)

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
        alive = sum(m.alive and m.vm.alive and not m.left for m in group.members.values())
        return not group.broken and alive == group.world_size

    # ------------------------------------------------------------ steps

    def _next_step(self, group: Group) -> None:
        self._time.after(group.step_s * self._chance.uniform(0.98, 1.05), lambda: self._step(group))

    def _step(self, group: Group) -> None:
        if group.has_left_step:
            return
        if not self._is_whole(group) or any(m.leave_mode == pb.STOP_MODE_LEAVE_NOW for m in group.members.values()):
            return
        if group.fault is Fault.HANG and self._chance.random() < 0.2:
            return
        if any(m.frozen for m in group.members.values()):
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
        self._hold(group)
        self._report_step(group)
        modes = {member.leave_mode for member in group.members.values()}
        if group.step == job.steps:
            self._save(group, group.step)
            job.finished = True
            self._finish(group)
        elif 0 not in modes:
            if modes != {pb.STOP_MODE_HOLD_FIRST} or job.carriage is Carriage.ENDS:
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
        agents = {member.vm.incarnation for member in group.members.values()}
        self._known_by.setdefault((group.job.job_id, group.step), set()).update(agents)
        for member in list(group.members.values()):
            done = w.StepDone(step=group.step, loss=1.0 / group.step, step_us=step_us, examples=1)
            member.vm.receive_worker_message(member.key, w.WorkerMessage(step_done=done))

    def lose_steps(self, agent: str, job_id: str, steps: Iterable[int]) -> None:
        """An agent has ended that has not told the manager of these steps."""
        for step in steps:
            self._known_by[job_id, step].discard(agent)

    def find_agents(self, job_id: str) -> dict[int, set[str]]:
        """By step that the job has done: the agents that have told the manager of it, or still can."""
        return {step: agents for (job, step), agents in self._known_by.items() if job == job_id}

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

    def receive_leave(
        self, worker: SimulatedWorker, mode: int, keeps_state: bool, *, within_step: bool = False
    ) -> None:
        group = self.group_of(worker.start)
        worker.leave_mode, worker.keeps_state = mode, keeps_state
        worker.leaves_within_step = within_step
        if worker.frozen or worker.left:
            return
        if group.fault is Fault.STUBBORN or (group.fault is Fault.HANG and self._chance.random() < 0.5):
            return
        if mode == pb.STOP_MODE_LEAVE_NOW or not group.began:
            self._leave(worker)
        elif within_step and self._chance.random() < 0.8:  # else a rank cannot, and all finish the step
            self._time.after(self._chance.uniform(0.0, 1.0), lambda: self._leave_within_step(group, group.step))

    def _leave_within_step(self, group: Group, step: int) -> None:
        """All ranks leave with the state after `step` steps, if all have been asked to, and have not left already."""
        members = list(group.members.values())
        asked = all(one.leaves_within_step and one.leave_mode == pb.STOP_MODE_HOLD_FIRST for one in members)
        is_able = asked and not any(one.frozen for one in members) and group.job.carriage is Carriage.IN_PLACE
        if not is_able or group.late or group.step != step or not self._is_whole(group) or group.has_left_step:
            return
        group.has_left_step = True
        self.steps_left += 1
        for member in members:
            self._leave(member)

    def _leave(self, worker: SimulatedWorker) -> None:
        self._leave_after(worker, self._chance.uniform(0.01, 0.5), EXIT_GENERATION_ENDED)

    def _leave_after(self, worker: SimulatedWorker, seconds: float, code: int) -> None:
        """Leave the generation, and stay if it can."""
        self._time.after(seconds, lambda: self._leave_now(worker, code))

    def _leave_now(self, worker: SimulatedWorker, code: int) -> None:
        if not worker.alive or worker.frozen or worker.left:
            return
        group = self.group_of(worker.start)
        carriage, unmoved = group.job.carriage, group.late.get(worker.key.rank)
        if not worker.connected or worker.held is None or not worker.keeps_state or carriage is Carriage.ENDS:
            self.end(worker, code)
            return
        worker.left = True
        own = worker.key.rank % worker.held.p
        copies = [pb.KeptCopy(rank=stage, step=worker.held.step) for stage in sorted(worker.held.stages - {own})]
        if unmoved is not None:
            worker.held, copies = unmoved, []
            self.left_late += 1
        left = w.GenerationLeft(
            exit_code=code,
            step=worker.held.step,
            held_bytes=10**6,
            gives_only=carriage is Carriage.GIVES_ONLY or unmoved is not None,
            copies=copies,
        )
        worker.vm.receive_worker_message(worker.key, w.WorkerMessage(generation_left=left))
        self._miss(worker)

    def give(self, worker: SimulatedWorker, generation: int) -> None:
        """It is asked to give its state to a generation."""
        assert worker.left
        worker.gives_to, worker.asked_at, worker.gives = generation, self._time.now, False
        self._time.after(self._chance.uniform(0.1, 3.0), lambda: self._begin_to_give(worker, generation))

    def _begin_to_give(self, worker: SimulatedWorker, generation: int) -> None:
        if worker.alive and worker.vm.alive and not worker.frozen and worker.gives_to == generation:
            worker.gives = worker.has_freed_device = True
            worker.vm.receive_worker_message(worker.key, w.WorkerMessage(giving_state=w.GivingState(host_bytes=1)))

    def is_awaited(self, worker: SimulatedWorker) -> bool:
        """Whether a generation that lives is taking the worker's state."""
        group = self.groups.get((worker.key.job_id, worker.gives_to))
        if not worker.gives_to or group is None or group.began or group.broken:
            return False
        is_newest = group.generation == group.job.newest_generation
        members = group.members.values()
        return is_newest and self._is_whole(group) and not any(m.leave_mode or m.frozen for m in members)

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
        worker.alive = False
        self._miss(worker)

    def _miss(self, worker: SimulatedWorker) -> None:
        """The other ranks miss a peer."""
        group = self.group_of(worker.start)
        if group.finished or group.broken:
            return
        group.broken = True
        for member in list(group.members.values()):
            if member.alive and member.vm.alive and not member.leave_mode and group.fault is not Fault.STUBBORN:
                self._leave_after(member, self._chance.uniform(0.02, 1.0), EXIT_PEER_LOST)
