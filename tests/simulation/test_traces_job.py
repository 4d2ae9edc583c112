"""One job's decisions over facts that come repeated, late, or in another order than they happened.

`decide_job` and the transition tables run over books in memory, beside what really happens to the job's ranks. Each
VM's agent reports the facts in their order, but those of different VMs mix in any order, a VM's end comes from its
provider before or after its agent's reports, facts are repeated, Launches and Stops arrive late or are lost with their
VM, and the manager dies between a decision and its writing. The end is the job's own: cancelled if it was, failed if
its script fails, else succeeded; with one live generation at most at every moment, numbered without gaps, on VMs that
are there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decision_views import proposal, vm
from traces import traces
from varuna_manager.domain.actions import (
    Action,
    EndGeneration,
    FinishJob,
    QuarantineVms,
    RecordDeath,
    StartGeneration,
    StopGeneration,
)
from varuna_manager.domain.job_decision import choose_devices, decide_job, wants_plan
from varuna_manager.domain.observed import GenerationView, JobView, Rules, StopView, VmView, WorkerView
from varuna_manager.domain.reshaping import SURVIVABLE_EXITS
from varuna_manager.domain.setbacks import PastGeneration, count_setbacks
from varuna_manager.domain.states import (
    GENERATION_TRANSITIONS,
    JOB_TRANSITIONS,
    TERMINAL_JOB_STATES,
    WORKER_TRANSITIONS,
    ExitCause,
    GenerationState,
    JobState,
    VmState,
    WorkerState,
    advance,
)
from varuna_proto.plan import Device

RULES = Rules()
STEPS = 3
"""Of the whole job; where its script is at fault, it raises at the second."""
MOST_KILLS = 3
"""Fewer than break a job (`Rules.breaker`)."""
PICK = strategies.integers(0, 1000)


@dataclass
class Truth:
    """A generation as it really is."""

    vm_of: dict[int, str]
    running: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)
    """The step of the state with which each rank's process stayed when it left, as its agent reports it."""
    waiting: set[int] = field(default_factory=set)
    """Ranks whose processes still wait."""

    @property
    def is_whole(self) -> bool:
        return self.running == set(self.vm_of)


Fact = tuple[str, int, int, ExitCause | int | None]
"""Kind, generation, rank, and the cause or the step."""


class Job(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.vms: dict[str, VmView] = {}
        """As the manager has them: all that are not gone."""
        self.there: set[str] = set()
        """VMs that exist."""
        self.made = 0
        self.unread: dict[str, deque[Fact]] = {}
        """Reported by each VM's agent and not read yet."""
        self.received: list[tuple[str, Fact]] = []
        self.truth: dict[int, Truth] = {}
        self.step = 0
        self.kills = 0
        self.is_faulty = self.is_cancelled = self.is_carried = False
        self.past: list[PastGeneration] = []
        self.job = JobView(id="j", name="n", state=JobState.QUEUED, created_at=0.0, global_batch=8, profiled_at=500.0)

    # ------------------------------------------------------------ what really happens

    @initialize(count=strategies.integers(1, 3), is_faulty=strategies.booleans(), is_carried=strategies.booleans())
    def begin(self, count: int, is_faulty: bool, is_carried: bool) -> None:
        """`is_carried`: its processes stay when they leave a generation."""
        self.is_faulty, self.is_carried = is_faulty, is_carried
        for _ in range(count):
            self.a_vm_joins()
        if is_carried:  # otherwise few traces come as far as a loss
            self.the_manager_looks(dies=False)
            for pick in range(count):
                self.a_launch_arrives(pick)
            self.a_step_is_done()

    @precondition(lambda self: len(self.there) < 3)
    @rule()
    def a_vm_joins(self) -> None:
        self.made += 1
        name = f"v{self.made}"
        self.there.add(name)
        self.unread[name] = deque()
        self.vms[name] = vm(name)

    @precondition(lambda self: self.there)
    @rule(pick=PICK)
    def a_vm_is_taken(self, pick: int) -> None:
        name = sorted(self.there)[pick % len(self.there)]
        self.there.remove(name)
        for number, truth in self.truth.items():
            for rank in [rank for rank in truth.running if truth.vm_of[rank] == name]:
                truth.running.remove(rank)
                truth.ended.add(rank)
                self.peers_leave(number)

    @precondition(lambda self: self.there)
    @rule(pick=PICK)
    def a_vm_gets_notice(self, pick: int) -> None:
        name = sorted(self.there)[pick % len(self.there)]
        self.vms[name] = replace(self.vms[name], state=VmState.DRAINING, notice_deadline=self.now + 30.0)

    @rule(pick=PICK)
    def a_launch_arrives(self, pick: int) -> None:
        """At one VM, unless its agent knows of a later generation or of the stop."""
        generation = self.job.generation
        if generation is None or generation.state not in (GenerationState.LAUNCHING, GenerationState.RUNNING):
            return
        worker = generation.workers[pick % len(generation.workers)]
        truth = self.truth[generation.number]
        if worker.rank in truth.running | truth.ended or worker.device.vm_id not in self.there:
            return
        for before, older in self.truth.items():  # it supersedes what still runs there
            for rank in [rank for rank in older.running if older.vm_of[rank] == worker.device.vm_id]:
                self.end(before, rank, ExitCause.GENERATION_ENDED)
        if not self.take_survivors(worker.device.vm_id, generation.number) and generation.in_place:
            self.end(generation.number, worker.rank, ExitCause.LAUNCH_REFUSED)
            self.peers_leave(generation.number)
            return
        truth.running.add(worker.rank)
        self.report_fact(worker.device.vm_id, ("started", generation.number, worker.rank, None))
        if truth.ended:
            self.end(generation.number, worker.rank, ExitCause.PEER_LOST)

    @rule(pick=PICK)
    def a_stop_arrives(self, pick: int) -> None:
        """At one VM: of a generation that is stopping or has ended."""
        for number, truth in self.truth.items():
            generation = self.job.generation
            assert generation is not None
            is_over = number < generation.number or not generation.live
            if not is_over and generation.state is not GenerationState.STOPPING:
                continue
            left = [rank for rank in truth.vm_of if rank not in truth.ended]
            if left:
                self.end(number, left[pick % len(left)], ExitCause.GENERATION_ENDED)

    @rule()
    def a_step_is_done(self) -> None:
        number = max(self.truth, default=0)
        if not number or not self.truth[number].is_whole:
            return
        truth = self.truth[number]
        if self.is_faulty and self.step == 1:
            self.end(number, max(truth.running), ExitCause.SCRIPT_FAILED)
            self.peers_leave(number)
            return
        self.step = min(self.step + 1, STEPS)
        self.report_fact(truth.vm_of[0], ("step", number, 0, self.step))
        if self.step == STEPS:
            for rank in sorted(truth.running):
                self.end(number, rank, ExitCause.FINISHED)

    @precondition(lambda self: self.kills < MOST_KILLS)
    @rule(pick=PICK)
    def a_rank_is_killed(self, pick: int) -> None:
        running = [(number, rank) for number, truth in self.truth.items() for rank in sorted(truth.running)]
        if running:
            self.kills += 1
            number, rank = running[pick % len(running)]
            self.end(number, rank, ExitCause.KILLED)
            self.peers_leave(number)

    @rule(pick=PICK)
    def a_waiting_process_ends(self, pick: int) -> None:
        waiting = [(number, rank) for number, truth in self.truth.items() for rank in sorted(truth.waiting)]
        if waiting:
            number, rank = waiting[pick % len(waiting)]
            self.truth[number].waiting.remove(rank)

    def take_survivors(self, vm_id: str, number: int) -> bool:
        """A launch takes or ends the processes that wait there; whether one was of the generation before."""
        is_found = False
        for before, truth in self.truth.items():
            for rank in [rank for rank in truth.waiting if truth.vm_of[rank] == vm_id]:
                truth.waiting.remove(rank)
                is_found |= before == number - 1
        return is_found

    def peers_leave(self, number: int) -> None:
        for rank in sorted(self.truth[number].running):
            self.end(number, rank, ExitCause.PEER_LOST)

    def end(self, number: int, rank: int, cause: ExitCause) -> None:
        truth = self.truth[number]
        if self.is_carried and cause in SURVIVABLE_EXITS and rank in truth.running:
            truth.held[rank] = self.step
            truth.waiting.add(rank)
        truth.running.discard(rank)
        truth.ended.add(rank)
        self.report_fact(truth.vm_of[rank], ("ended", number, rank, cause))

    def report_fact(self, vm_id: str, fact: Fact) -> None:
        if vm_id in self.there:
            self.unread[vm_id].append(fact)

    # ------------------------------------------------------------ what the manager learns

    @rule(pick=PICK)
    def a_fact_is_heard(self, pick: int) -> None:
        talking = sorted(vm_id for vm_id, facts in self.unread.items() if facts)
        if talking:
            vm_id = talking[pick % len(talking)]
            fact = self.unread[vm_id].popleft()
            self.received.append((vm_id, fact))
            self.note(vm_id, fact)

    @precondition(lambda self: self.received)
    @rule(pick=PICK)
    def a_fact_is_heard_again(self, pick: int) -> None:
        self.note(*self.received[pick % len(self.received)])

    @rule(pick=PICK)
    def the_provider_says_which_vm_is_gone(self, pick: int) -> None:
        gone = sorted(self.vms.keys() - self.there)
        if not gone:
            return
        vm_id = gone[pick % len(gone)]
        del self.vms[vm_id]
        generation = self.job.generation
        for worker in generation.workers if generation is not None else ():
            if worker.device.vm_id == vm_id and not worker.stopped:
                self.stop_worker(worker.rank, ExitCause.VM_GONE)

    def note(self, vm_id: str, fact: Fact) -> None:
        """Handles a fact as ReportService does: one that is known already changes nothing."""
        kind, number, rank, what = fact
        generation = self.job.generation
        if generation is None or generation.number != number or generation.workers[rank].device.vm_id != vm_id:
            return  # of an older one, whose workers no longer decide anything
        if kind == "ended" and not generation.workers[rank].stopped:
            assert isinstance(what, ExitCause)
            self.stop_worker(rank, what, self.truth[number].held.get(rank))
        elif kind == "started" and generation.workers[rank].state is WorkerState.ASSIGNED:
            self.change_worker(rank, state=WorkerState.RUNNING)
        elif kind == "step" and int(what or 0) > (generation.last_step or 0):
            state = generation.state
            if state is GenerationState.LAUNCHING:
                state = GenerationState.RUNNING
            self.job = replace(
                self.job, generation=replace(generation, last_step=what, state=state, progress_at=self.now)
            )

    def stop_worker(self, rank: int, cause: ExitCause, held_step: int | None = None) -> None:
        state = WorkerState.LOST if cause is ExitCause.VM_GONE else WorkerState.EXITED
        error = "it raised" if cause is ExitCause.SCRIPT_FAILED else ""
        self.change_worker(rank, state=state, cause=cause, stopped_at=self.now, error=error, held_step=held_step)

    def change_worker(self, rank: int, *, state: WorkerState, **changes: object) -> None:
        generation = self.job.generation
        assert generation is not None
        worker = generation.workers[rank]
        advance(WORKER_TRANSITIONS, f"rank {rank}", worker.state, state, (), now=self.now, reason="test")
        workers = list(generation.workers)
        workers[rank] = replace(worker, state=state, **changes)  # type: ignore[arg-type]
        self.job = replace(self.job, generation=replace(generation, workers=tuple(workers)))

    # ------------------------------------------------------------ what it decides

    @precondition(lambda self: self.job.state in (JobState.QUEUED, JobState.RUNNING))
    @rule(save=strategies.booleans())
    def the_user_cancels(self, save: bool) -> None:
        self.is_cancelled = True
        self.move_job(JobState.CANCELLING)
        self.job = replace(self.job, cancel_saves=save)

    @rule(dies=strategies.booleans())
    def the_manager_looks(self, dies: bool) -> None:
        """`dies`: before it has written what it decided."""
        usable = [one for one in sorted(self.vms.values(), key=lambda one: one.id) if one.usable]
        view = replace(self.job, devices=tuple(Device(one.id, 0) for one in usable), setbacks=count_setbacks(self.past))
        workers = () if view.generation is None else view.generation.workers
        held = [worker.device for worker in workers if worker.held_step is not None]
        view = replace(view, survivors=frozenset(device for device in held if device in view.devices))
        devices = choose_devices(self.now, view, self.vms, RULES)
        if wants_plan(view, devices, self.vms):
            view = replace(view, proposal=proposal(devices))
        decision = decide_job(self.now, view, self.vms, RULES)
        if not dies:
            for action in decision.actions:
                self.apply(action)

    def apply(self, action: Action) -> None:
        generation = self.job.generation
        match action:
            case StartGeneration(number=number, placement=placement):
                assert generation is None or not generation.live, "a second live generation"
                assert number == (0 if generation is None else generation.number) + 1
                assert all(self.vms[device.vm_id].usable for device in placement)
                workers = tuple(
                    WorkerView(rank=rank, device=device, state=WorkerState.ASSIGNED)
                    for rank, device in enumerate(placement)
                )
                if action.in_place:
                    assert generation is not None
                    held_by = {worker.device: worker for worker in generation.workers if worker.held_step is not None}
                    assert {held_by[device].held_step for device in placement} == {self.step}, "no step is lost"
                if action.holders is not None and action.in_place:  # they take other stages
                    members = [(holder.rank, holder.vm_id) for holder in action.holders.members]
                    assert members == [(rank, device.vm_id) for rank, device in enumerate(placement)]
                    assert action.holders.generation == number
                elif action.holders is not None:
                    held = self.truth[action.holders.generation].held
                    assert {held[holder.rank] for holder in action.holders.members} == {self.step}, "no step is lost"
                new = GenerationView(
                    number=number,
                    in_place=action.in_place,
                    holders=action.holders,
                    kind=action.kind,
                    state=GenerationState.LAUNCHING,
                    workers=workers,
                    progress_at=self.now,
                    plan=action.plan,
                )
                self.job = replace(self.job, generation=new)
                self.truth[number] = Truth({rank: device.vm_id for rank, device in enumerate(placement)})
                if self.job.state is JobState.QUEUED:
                    self.move_job(JobState.RUNNING)
            case StopGeneration():
                assert generation is not None
                stop = StopView(mode=action.mode, cause=action.cause, reason=action.reason, requested_at=self.now)
                if generation.state is not GenerationState.STOPPING:
                    self.move_generation(GenerationState.STOPPING)
                assert self.job.generation is not None
                self.job = replace(self.job, generation=replace(self.job.generation, stop=stop))
            case EndGeneration(cause=cause, reason=reason):
                assert generation is not None
                self.move_generation(GenerationState.ENDED)
                assert self.job.generation is not None
                last = replace(self.job.generation, ended_at=self.now, end_cause=cause, end_reason=reason)
                self.job = replace(self.job, generation=last)
                past = PastGeneration(cause=cause, reason=reason, last_step=generation.last_step, ended_at=self.now)
                self.past.append(past)
            case FinishJob(state=state):
                self.move_job(state)
            case RecordDeath(vm_id=vm_id, deaths=deaths):
                self.vms[vm_id] = replace(self.vms[vm_id], deaths=deaths, last_death_at=self.now)
            case QuarantineVms(vm_ids=vm_ids):
                assert generation is not None
                assert set(vm_ids) < set(generation.vm_ids), "never all that it has"
            case _:
                raise AssertionError(f"{action} was not expected here")

    def move_job(self, state: JobState) -> None:
        advance(JOB_TRANSITIONS, "job", self.job.state, state, (), now=self.now, reason="test")
        self.job = replace(self.job, state=state)

    def move_generation(self, state: GenerationState) -> None:
        generation = self.job.generation
        assert generation is not None
        advance(GENERATION_TRANSITIONS, "generation", generation.state, state, (), now=self.now, reason="test")
        self.job = replace(self.job, generation=replace(generation, state=state))

    @rule(seconds=strategies.sampled_from([0.1, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # ------------------------------------------------------------ what holds

    @invariant()
    def what_is_over_has_no_live_generation(self) -> None:
        generation = self.job.generation
        assert self.job.state not in TERMINAL_JOB_STATES or generation is None or not generation.live

    def teardown(self) -> None:
        """From now on nothing goes wrong, and the job comes to its end."""
        for _ in range(300):
            if self.job.state in TERMINAL_JOB_STATES:
                break
            if not any(one.usable and one.id in self.there for one in self.vms.values()):
                self.a_vm_joins()
            for pick in range(3):
                self.the_provider_says_which_vm_is_gone(pick)
                self.a_stop_arrives(pick)
                self.a_launch_arrives(pick)
            self.a_step_is_done()
            for pick in range(10):
                self.a_fact_is_heard(pick)
            self.the_manager_looks(dies=False)
            self.now += 1.0
        expected = JobState.FAILED if self.is_faulty else JobState.SUCCEEDED
        assert self.job.state is (JobState.CANCELLED if self.is_cancelled else expected), (self.job, self.past)


TestJob = Job.TestCase
TestJob.settings = traces(150, steps=40)
