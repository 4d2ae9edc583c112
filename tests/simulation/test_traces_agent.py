"""One agent and what the manager wants of it, over streams that break: commands and reports lost, repeated, late.

The agent's real state machine and the manager's real rule for the commands of an agent (`domain.commands`), with the
manager's books between them. Within a stream nothing overtakes anything (TCP). What is lost is what was under way when
a stream broke; what is repeated is all that comes again on the next stream, and whatever a peer sends twice
because an answer was lost; reports are late that the manager had in its memory when the stream broke, and reads after
the next has opened. Whatever happens of these, the manager's wishes and the workers' own ends decide the outcome: what
is wanted runs, all else has ended, each end is in the books, and no message is left to be sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from traces import traces
from varuna_agent.state import AgentState, Identity, WorkerKey
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_manager.domain.commands import CommandKey, GenerationOnVm, LaunchKey, StopKey, list_commands
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    WORKER_TRANSITIONS,
    GenerationState,
    StopMode,
    WorkerState,
    advance,
)
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w

GPUS = 2
JOBS = strategies.sampled_from(["a", "b"])
PICK = strategies.integers(0, 1000)
MODES = {
    StopMode.LEAVE_NOW: pb.STOP_MODE_LEAVE_NOW,
    StopMode.SAVE_FIRST: pb.STOP_MODE_SAVE_FIRST,
    StopMode.HOLD_FIRST: pb.STOP_MODE_HOLD_FIRST,
    StopMode.HOLD_WITHIN_STEP: pb.STOP_MODE_HOLD_FIRST,
}


@dataclass
class Session:
    """The manager's end of a stream."""

    seen: frozenset[tuple[str, int]]
    running: set[tuple[str, int]]
    sent_commands: set[CommandKey] = field(default_factory=set)


@dataclass
class Part:
    """One generation's part on the VM, as the manager's books have it."""

    device_of: dict[int, int]
    state: GenerationState = GenerationState.LAUNCHING
    stop_mode: StopMode | None = None
    workers: dict[int, WorkerState] = field(default_factory=dict)

    @property
    def alive(self) -> list[int]:
        return [rank for rank, state in self.workers.items() if state not in STOPPED_WORKER_STATES]


class Talk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        identity = Identity(vm_id="v", incarnation="1", version="0", host="h", gpus=GPUS, device="cuda")
        self.state = AgentState(identity)
        self.now = 0.0
        self.processes: dict[WorkerKey, str] = {}
        """What each running process has been ordered: nothing, `leave` (when it can) or `killed`."""
        self.parts: dict[tuple[str, int], Part] = {}
        self.session: Session | None = None
        self.is_open = False
        self.down: deque[pb.ManagerMessage] = deque()
        self.up: deque[pb.AgentMessage] = deque()
        self.late: deque[pb.AgentMessage] = deque()
        """Sent on earlier streams; the manager will read them."""
        self.twice = False

    # ------------------------------------------------------------ the agent's shell

    def handle(self, event: ev.Event) -> None:
        hangs_up = False
        for instruction in self.state.handle_event(event, self.now):
            match instruction:
                case ins.SendMessage(message):
                    self.up.append(message)
                case ins.StartWorker(key):
                    assert (
                        self.parts[key.job_id, key.generation].state is not GenerationState.ENDED or key in self.behind
                    )
                    self.processes[key] = ""
                case ins.KillWorker(key):
                    self.processes[key] = "killed"
                case ins.SendLeave(key):
                    self.processes[key] = "leave"
                case ins.HangUp():
                    hangs_up = True
                case ins.SaveSeenGenerations():
                    pass
                case _:
                    raise AssertionError(instruction)
        if hangs_up:  # the manager was silent for too long
            self.the_stream_breaks(unread=0)

    @property
    def behind(self) -> set[WorkerKey]:
        """Workers that the agent may start although they are no longer wanted: it does not know that yet."""
        return {WorkerKey(job, number, rank) for (job, number), part in self.parts.items() for rank in part.alive}

    # ------------------------------------------------------------ streams

    @initialize(twice=strategies.booleans())
    def begin(self, twice: bool) -> None:
        self.dial(twice)

    @precondition(lambda self: not self.is_open)
    @rule(twice=strategies.booleans())
    def dial(self, twice: bool) -> None:
        """`twice`: everything but the Hello is sent twice on the new stream."""
        self.is_open, self.twice = True, twice
        self.handle(ev.StreamOpened())

    @precondition(lambda self: self.is_open)
    @rule(unread=strategies.integers(0, 4))
    def the_stream_breaks(self, unread: int) -> None:
        """`unread`: how many of its messages the manager has in its memory; the rest is lost."""
        self.late.extend([m for m in list(self.up)[:unread] if m.WhichOneof("body") != "hello"])
        self.up.clear()
        self.down.clear()
        self.session, self.is_open = None, False
        self.handle(ev.StreamClosed("test"))

    @rule(count=strategies.integers(1, 5))
    def the_agent_reads(self, count: int) -> None:
        for _ in range(min(count, len(self.down))):
            message = self.down.popleft()
            for _ in range(2 if self.twice else 1):
                self.handle(ev.ManagerMessageReceived(message))

    @rule(count=strategies.integers(1, 5), late=strategies.booleans())
    def the_manager_reads(self, count: int, late: bool) -> None:
        for _ in range(count):
            waiting = self.late if late else self.up
            if not waiting:
                return
            message = waiting.popleft()
            for _ in range(2 if self.twice and message.WhichOneof("body") != "hello" else 1):
                self.read(message, late=late)

    def read(self, message: pb.AgentMessage, *, late: bool) -> None:
        match message.WhichOneof("body"):
            case "hello":
                running = {(worker.job_id, worker.generation) for worker in message.hello.workers}
                seen = {(seen.job_id, seen.generation) for seen in message.hello.seen_generations}
                self.session = Session(frozenset(seen | running), running)
                self.down.append(pb.ManagerMessage(welcome=pb.Welcome(lease_s=1e9, heartbeat_interval_s=1.0)))
            case "heartbeat" if self.session is not None and not late:
                self.session.running = {(one.job_id, one.generation) for one in message.heartbeat.workers}
                self.down.append(pb.ManagerMessage(ack=pb.Ack(heartbeat_sequence=message.heartbeat.sequence)))
            case "report":
                self.note(message.report)
                if not late:
                    self.down.append(pb.ManagerMessage(ack=pb.Ack(reports_through=message.report.number)))

    # ------------------------------------------------------------ the manager

    def note(self, report: pb.Report) -> None:
        """Handles a report as ReportService does: one that is known already changes nothing."""
        match report.WhichOneof("fact"):
            case "worker_started":
                fact = report.worker_started
                if self.parts[fact.job_id, fact.generation].workers[fact.rank] is WorkerState.ASSIGNED:
                    self.move(fact.job_id, fact.generation, fact.rank, WorkerState.RUNNING)
            case "worker_exited":
                exited = report.worker_exited
                if exited.rank in self.parts[exited.job_id, exited.generation].alive:
                    self.move(exited.job_id, exited.generation, exited.rank, WorkerState.EXITED)
            case "command_refused":
                refused = report.command_refused
                part = self.parts[refused.job_id, refused.generation]
                for rank in [rank for rank, state in part.workers.items() if state is WorkerState.ASSIGNED]:
                    self.move(refused.job_id, refused.generation, rank, WorkerState.EXITED)

    def move(self, job: str, number: int, rank: int, new: WorkerState) -> None:
        part = self.parts[job, number]
        advance(WORKER_TRANSITIONS, f"{job}/{number}/{rank}", part.workers[rank], new, (), now=0.0, reason="test")
        part.workers[rank] = new

    def newest(self, job: str) -> tuple[int, Part | None]:
        number = max((number for of_job, number in self.parts if of_job == job), default=0)
        return number, self.parts.get((job, number))

    @rule(job=JOBS, ranks=strategies.integers(1, GPUS), off=strategies.integers(0, GPUS - 1))
    def a_generation_starts(self, job: str, ranks: int, off: int) -> None:
        """Where the one before has ended, on devices that no other job has."""
        number, before = self.newest(job)
        if before is not None and before.state is not GenerationState.ENDED:
            return
        devices = [(off + i) % GPUS for i in range(ranks)]
        taken = {part.device_of[rank] for (other, _), part in self.parts.items() if other != job for rank in part.alive}
        if taken & set(devices):
            return
        device_of = {rank + 1: device for rank, device in enumerate(devices)}  # rank 0 is on another VM
        part = Part(device_of, workers=dict.fromkeys(device_of, WorkerState.ASSIGNED))
        self.parts[job, number + 1] = part

    @rule(job=JOBS, mode=strategies.sampled_from(StopMode))
    def a_generation_is_stopped(self, job: str, mode: StopMode) -> None:
        _, part = self.newest(job)
        if part is not None and part.state in (GenerationState.LAUNCHING, GenerationState.RUNNING):
            part.state, part.stop_mode = GenerationState.STOPPING, mode

    @rule(job=JOBS)
    def a_generation_ends(self, job: str) -> None:
        """One of its ranks, here or elsewhere, has stopped: that is enough."""
        _, part = self.newest(job)
        if part is not None:
            part.state = GenerationState.ENDED

    @rule()
    def the_manager_looks(self) -> None:
        session = self.session
        if session is None:
            return
        present = [
            GenerationOnVm(
                job_id=job,
                generation=number,
                state=part.state,
                stop_mode=part.stop_mode,
                worker_states=tuple(part.workers[rank] for rank in part.alive),
            )
            for (job, number), part in self.parts.items()
            if part.alive
        ]
        for key in list_commands(present, session.running, session.seen, draining=False):
            if key not in session.sent_commands:
                session.sent_commands.add(key)
                self.down.append(self.command(key))

    def command(self, key: CommandKey) -> pb.ManagerMessage:
        if isinstance(key, StopKey):
            stop = pb.Stop(job_id=key.job_id, generation=key.generation, mode=MODES[key.mode], grace_s=2.0)
            return pb.ManagerMessage(stop=stop)
        assert isinstance(key, LaunchKey)
        device_of = self.parts[key.job_id, key.generation].device_of
        launch = pb.Launch(
            job_id=key.job_id,
            generation=key.generation,
            kind=pb.GENERATION_KIND_TRAINING,
            workers=[pb.WorkerAssignment(rank=rank, local_rank=device) for rank, device in device_of.items()],
            plan=pb.PlanSpec(p=1, d=4),
            world_size=4,
        )
        return pb.ManagerMessage(launch=launch)

    # ------------------------------------------------------------ workers and time

    @precondition(lambda self: self.processes)
    @rule(pick=PICK)
    def a_worker_is_ready(self, pick: int) -> None:
        key = sorted(self.processes)[pick % len(self.processes)]
        if self.state.is_expected(key) and self.processes[key] != "killed":
            self.handle(ev.WorkerConnected(key, 5))
            self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(ready=w.WorkerReady())))

    @precondition(lambda self: self.processes)
    @rule(pick=PICK, code=strategies.sampled_from([0, 1, 76, -9]))
    def a_worker_ends(self, pick: int, code: int) -> None:
        key = sorted(self.processes)[pick % len(self.processes)]
        del self.processes[key]
        self.handle(ev.ProcessEnded(key, code, ""))

    @rule()
    def a_second_passes(self) -> None:
        self.now += 1.0
        self.handle(ev.Tick())

    # ------------------------------------------------------------ what holds

    @invariant()
    def no_device_has_two_processes(self) -> None:
        devices = [self.parts[key.job_id, key.generation].device_of[key.rank] for key in self.processes]
        assert len(devices) == len(set(devices))

    @invariant()
    def what_runs_is_in_the_books(self) -> None:
        for key in self.processes:
            assert key.rank in self.parts[key.job_id, key.generation].alive, f"{key} runs, and the books say it ended"

    def teardown(self) -> None:
        for _ in range(100):
            if not self.is_open:
                self.dial(twice=False)
            self.the_manager_looks()
            self.the_agent_reads(1000)
            self.the_manager_reads(1000, late=True)
            self.the_manager_reads(1000, late=False)
            self.the_agent_reads(1000)
            for key in [key for key, is_leaving in self.processes.items() if is_leaving]:
                self.processes.pop(key)
                self.handle(ev.ProcessEnded(key, 75, ""))
            if self.is_settled():
                break
            self.a_second_passes()
        else:
            raise AssertionError("it never comes to rest")
        for (job, number), part in self.parts.items():
            wanted = part.state in (GenerationState.LAUNCHING, GenerationState.RUNNING)
            assert wanted or not part.alive, f"{job}/{number} is {part.state} and {part.alive} have not ended"
        alive = {WorkerKey(job, number, rank) for (job, number), part in self.parts.items() for rank in part.alive}
        assert alive == set(self.processes), "what is wanted runs"
        assert not any(self.processes.values())

    def is_settled(self) -> bool:
        """Whether no message is under way or waits to be sent, and nothing is about to end."""
        unwanted = [part for part in self.parts.values() if part.alive and part.stop_mode is not None]
        unwanted += [part for part in self.parts.values() if part.alive and part.state is GenerationState.ENDED]
        waiting = [worker for worker in self.state.workers if not worker.has_process]
        quiet = not (self.up or self.down or self.late or self.state.unacknowledged)
        return quiet and not unwanted and not waiting and not any(self.processes.values())


TestTalk = Talk.TestCase
TestTalk.settings = traces(150, steps=40)
