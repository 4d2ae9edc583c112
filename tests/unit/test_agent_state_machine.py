"""Any manager, any workers, any order: what always holds of the agent's state."""

from __future__ import annotations

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from varuna_agent.state import AgentState, Identity, WorkerKey
from varuna_agent.state import stimuli as st
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w

GPUS = 3
LEASE_S = 10.0
JOBS = strategies.sampled_from(["a", "b"])
GENERATIONS = strategies.integers(1, 5)
PICK = strategies.integers(0, 1000)


class Agent(RuleBasedStateMachine):
    """Plays the manager, the processes and the clock; keeps its own books of what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.device = "cpu"
        self.incarnation = 0
        self.remembered: dict[str, int] = {}
        self.newest: dict[str, int] = {}
        self.now = 0.0
        self.port = 0
        self.next_port = 1
        self.begin()

    def begin(self) -> None:
        """A new agent process, in the folder of the one before; what is told about its workers begins anew."""
        self.incarnation += 1
        identity = Identity(
            vm_id="v", incarnation=str(self.incarnation), version="0", host="h", gpus=GPUS, device=self.device
        )
        self.state = AgentState(identity, seen=self.remembered)
        self.leaving: set[WorkerKey] = set()  # told to leave at once
        self.processes: dict[WorkerKey, bool] = {}  # running; whether told to be killed
        self.connected: set[WorkerKey] = set()
        self.devices: dict[WorkerKey, int] = {}
        self.accepted: set[WorkerKey] = set()
        self.exited: list[WorkerKey] = []
        self.open = False
        self.welcome = False
        self.stored: list[pb.Report] = []
        self.on_stream: list[int] = []
        self.steps_made: dict[tuple[str, int], list[int]] = {}
        self.claimed: set[int] = set()
        self.renewed_at: float | None = None
        self.sent_at: dict[int, float] = {}
        self.opened_at = 0.0
        self.exit_agent = False

    # ------------------------------------------------------------ the shell

    def handle(self, event: st.Event) -> None:
        for instruction in self.state.handle(event, self.now):
            self.carry_out(instruction)
        if self.port == 0:
            self.port, self.next_port = self.next_port, self.next_port + 1
            self.handle(st.RendezvousOpened(self.port))

    def carry_out(self, instruction: st.Instruction) -> None:
        match instruction:
            case st.StartWorker(key):
                assert key not in self.processes
                assert key.generation == self.newest[key.job_id], "an old generation was started"
                device = instruction.environment.local_rank
                assert self.remembered[key.job_id] >= key.generation, "started before it was remembered"
                holding = [other for other in self.processes if self.device == "cuda" or not self.ends(other)]
                assert device not in [self.devices[other] for other in holding], "two workers on one device"
                assert all(o.job_id != key.job_id or o.generation == key.generation for o in holding)
                if instruction.rendezvous_port:
                    self.claimed.remove(instruction.rendezvous_port)
                self.processes[key], self.devices[key] = False, device
            case st.KillWorker(key):
                assert not self.processes[key], "killed twice"
                self.processes[key] = True
            case st.TellWorkerToLeave(key, mode):
                assert key in self.connected
                if mode == pb.STOP_MODE_LEAVE_NOW:
                    self.leaving.add(key)
            case st.Remember(seen):
                assert all(seen[job] >= generation for job, generation in self.remembered.items())
                self.remembered = dict(seen)
            case st.ClaimRendezvous(port):
                assert port == self.port
                self.claimed.add(port)
                self.port = 0
            case st.ReleaseRendezvous(port):
                self.claimed.remove(port)
            case st.Send(message):
                self.receive(message)
            case st.HangUp():
                self.open = self.welcome = False
                self.on_stream = []
            case st.ExitAgent():
                assert not self.processes, "the agent left workers behind"
                self.exit_agent = True
            case _:
                raise AssertionError(instruction)

    def ends(self, key: WorkerKey) -> bool:
        """Whether a process was killed or told to leave at once."""
        return self.processes[key] or key in self.leaving

    def receive(self, message: pb.AgentMessage) -> None:
        match message.WhichOneof("body"):
            case "hello":
                assert self.open
                assert {(r.job_id, r.generation, r.rank) for r in message.hello.workers} >= {
                    (k.job_id, k.generation, k.rank) for k in self.processes
                }
            case "heartbeat":
                assert self.welcome
                self.sent_at[message.heartbeat.sequence] = self.now
            case "report":
                assert self.welcome
                number = message.report.number
                assert not self.on_stream or number == self.on_stream[-1] + 1, "a gap or a repetition on one stream"
                self.on_stream.append(number)
                if number == len(self.stored) + 1:
                    self.stored.append(message.report)
                assert self.stored[number - 1] == message.report, "a report changed after it was sent"

    # ------------------------------------------------------------ the manager

    @initialize(device=strategies.sampled_from(["cpu", "cuda"]))
    def start(self, device: str) -> None:
        self.device = device
        self.begin()
        self.connect()

    def connect(self) -> None:
        self.port, self.next_port = self.next_port, self.next_port + 1
        self.handle(st.RendezvousOpened(self.port))
        self.stream_opens()
        self.manager_welcomes()

    @rule()
    def agent_is_killed_and_comes_back(self) -> None:
        """Its workers ended with it; what it had seen is still over for it."""
        self.begin()
        self.newest = dict(self.remembered)
        self.connect()

    @precondition(lambda self: not self.open)
    @rule()
    def stream_opens(self) -> None:
        self.open, self.opened_at, self.on_stream = True, self.now, []
        self.sent_at = {}
        self.handle(st.StreamOpened())

    @precondition(lambda self: self.open and not self.welcome)
    @rule()
    def manager_welcomes(self) -> None:
        self.welcome = True
        self.renewed_at = self.opened_at
        self.handle(st.ManagerSaid(pb.ManagerMessage(welcome=pb.Welcome(lease_s=LEASE_S, heartbeat_interval_s=1))))

    @precondition(lambda self: self.open)
    @rule()
    def stream_breaks(self) -> None:
        self.open = self.welcome = False
        self.handle(st.StreamClosed("test"))

    @precondition(lambda self: self.welcome)
    @rule(pick=PICK, through=PICK)
    def manager_acknowledges(self, pick: int, through: int) -> None:
        sequence = sorted(self.sent_at)[pick % len(self.sent_at)] if self.sent_at else 0
        if sequence:
            self.renewed_at = self.sent_at[sequence]
            self.sent_at = {s: at for s, at in self.sent_at.items() if s > sequence}
        ack = pb.Ack(heartbeat_sequence=sequence, reports_through=through % (len(self.stored) + 1))
        self.handle(st.ManagerSaid(pb.ManagerMessage(ack=ack)))

    @precondition(lambda self: self.welcome)
    @rule(job=JOBS, generation=GENERATIONS, ranks=strategies.sets(strategies.integers(0, 3), max_size=3), off=PICK)
    def manager_launches(self, job: str, generation: int, ranks: set[int], off: int) -> None:
        before = {worker.key for worker in self.state.workers}
        workers = [pb.WorkerAssignment(rank=r, local_rank=(off + i) % GPUS) for i, r in enumerate(sorted(ranks))]
        launch = pb.Launch(
            job_id=job,
            generation=generation,
            kind=pb.GENERATION_KIND_TRAINING,
            workers=workers,
            plan=pb.PlanSpec(p=1, d=4),
            world_size=4,
            rendezvous_port=self.port - off % 2,
        )
        old_newest = self.newest.get(job, 0)
        self.newest[job] = max(old_newest, generation)
        self.handle(st.ManagerSaid(pb.ManagerMessage(launch=launch)))
        appeared = {worker.key for worker in self.state.workers} - before
        assert not appeared or generation > old_newest, "a stale launch was followed"
        if generation > old_newest and not appeared:
            seen = {s.job_id: s.generation for s in self.state._hello().seen_generations}
            self.newest[job] = seen.get(job, 0)  # refused: the older one may still be launched again
        self.accepted |= appeared

    @precondition(lambda self: self.welcome)
    @rule(
        job=JOBS,
        generation=GENERATIONS,
        grace_s=strategies.sampled_from([0.0, 2.0]),
        mode=strategies.sampled_from([1, 2]),
    )
    def manager_stops(self, job: str, generation: int, grace_s: float, mode: pb.StopMode.ValueType) -> None:
        self.newest[job] = max(self.newest.get(job, 0), generation)
        stop = pb.Stop(job_id=job, generation=generation, mode=mode, grace_s=grace_s)
        self.handle(st.ManagerSaid(pb.ManagerMessage(stop=stop)))

    # ------------------------------------------------------------ workers and time

    def pick(self, pick: int) -> WorkerKey:
        return sorted(self.processes)[pick % len(self.processes)]

    def ranks(self, key: WorkerKey) -> list[int]:
        return [other.rank for other in self.accepted if other.generation_key == key.generation_key]

    @precondition(lambda self: self.processes)
    @rule(pick=PICK)
    def worker_connects(self, pick: int) -> None:
        key = self.pick(pick)
        if self.state.expects(key):
            self.connected.add(key)
            self.handle(st.WorkerConnected(key, 5))
            self.handle(st.WorkerSaid(key, w.WorkerMessage(ready=w.WorkerReady())))

    @precondition(lambda self: self.connected)
    @rule(pick=PICK)
    def worker_makes_a_step(self, pick: int) -> None:
        key = sorted(self.connected)[pick % len(self.connected)]
        if key.rank == min(self.ranks(key)):
            steps = self.steps_made.setdefault(key.generation_key, [])
            steps.append(len(steps) + 1)
        step = len(self.steps_made.get(key.generation_key, [])) or 1
        self.handle(st.WorkerSaid(key, w.WorkerMessage(step_done=w.StepDone(step=step))))

    @precondition(lambda self: self.processes)
    @rule(pick=PICK, code=strategies.sampled_from([0, 1, 75, 76, -9]))
    def worker_ends(self, pick: int, code: int) -> None:
        key = self.pick(pick)
        if key in self.connected:
            self.connected.remove(key)
            self.handle(st.WorkerDisconnected(key))
        del self.processes[key]
        self.exited.append(key)
        self.handle(st.ProcessEnded(key, code, ""))

    @rule(seconds=strategies.sampled_from([0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        """The shell never sleeps past a deadline."""
        end = self.now + seconds
        while True:
            deadline = self.state.next_deadline()
            if deadline is None or deadline > end:
                break
            assert deadline >= self.now - 1e-9 or deadline == 0.0, "a deadline that passed was not handled"
            self.now = max(self.now, deadline)
            self.handle(st.Tick())
            assert self.state.next_deadline() != deadline or deadline > self.now, "a deadline that does not go away"
        self.now = end
        self.handle(st.Tick())

    # ------------------------------------------------------------ what always holds

    @invariant()
    def nothing_runs_beyond_the_lease(self) -> None:
        if self.renewed_at is not None and self.now >= self.renewed_at + LEASE_S:
            assert all(self.processes.values())

    @invariant()
    def the_books_agree(self) -> None:
        assert {worker.key for worker in self.state.workers if worker.has_process} == set(self.processes)
        waiting = [worker.start.rendezvous_port for worker in self.state.workers if not worker.has_process]
        assert self.claimed == {port for port in waiting if port}

    def teardown(self) -> None:
        """Whatever happened: in the end the manager knows all of it, once."""
        if not self.port:
            return
        for key in tuple(self.processes):
            self.connected.discard(key)
        while self.processes:
            self.worker_ends(0, -9)
        if self.open:
            self.stream_breaks()
        self.stream_opens()
        self.manager_welcomes()
        told: dict[WorkerKey, int] = {}
        steps: dict[tuple[str, int], list[int]] = {}
        for report in self.stored:
            if report.WhichOneof("fact") == "worker_exited":
                key = WorkerKey(report.worker_exited.job_id, report.worker_exited.generation, report.worker_exited.rank)
                told[key] = told.get(key, 0) + 1
                assert key.rank != min(self.ranks(key), default=-1) or (
                    steps.get(key.generation_key, []) == self.steps_made.get(key.generation_key, [])
                ), "an exit was told before the steps that came before it"
            elif report.WhichOneof("fact") == "steps_completed":
                fact = report.steps_completed
                steps.setdefault((fact.job_id, fact.generation), []).extend(s.step for s in fact.steps)
        assert all(told.get(key) == 1 for key in self.exited), "each exit is told exactly once"
        assert all(told.get(key) == 1 for key in self.accepted), "a launch was accepted, and its end never told"
        assert steps == self.steps_made


TestAgent = Agent.TestCase
TestAgent.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
