"""Any manager, any workers, any order: what always holds of the agent's state."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from varuna_agent.state import AgentState, Identity, Timings, WorkerKey
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.state.hosted_worker import WorkerPhase
from varuna_agent.state.survivors import SurvivorPhase
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w

GPUS = 3
LEASE_S = 10.0
KEEP_S = 5.0
MEMORY_S = 8.0
ANSWER_S = 2.0
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
        """A new agent process in the folder of the one before. Its reports about workers start from nothing."""
        self.incarnation += 1
        identity = Identity(
            vm_id="v", incarnation=str(self.incarnation), version="0", host="h", gpus=GPUS, device=self.device
        )
        timings = Timings(
            keep_survivors_s=KEEP_S,
            assignment_s=ANSWER_S,
            answer_s=ANSWER_S,
            store_s=ANSWER_S,
            keep_memory_s=MEMORY_S,
        )
        self.state = AgentState(identity, timings, seen=self.remembered)
        self.leaving: set[WorkerKey] = set()  # got the command to leave at once
        self.processes: dict[WorkerKey, bool] = {}  # running; whether the agent has killed it
        self.left: set[WorkerKey] = set()  # running, but their exit is reported
        self.dying: set[WorkerKey] = set()  # of those; the agent's state does not know it yet
        self.unseen: set[WorkerKey] = set()  # of those; they were assigned, which they had ended before
        self.asked: dict[WorkerKey, tuple[int, float]] = {}  # of those: to give to this generation, since when
        self.gives: set[WorkerKey] = set()  # of those; they have answered the newest request
        self.freed: set[WorkerKey] = set()  # they have answered one
        self.gives_only: set[WorkerKey] = set()  # of those that left; they can take no rank
        self.storing: set[WorkerKey] = set()  # of those that left; they put their state into memory
        self.memories: set[WorkerKey] = set()  # the states there
        self.named: set[WorkerKey] = set()  # holders of the launch that is being handled
        self.newcomers: dict[WorkerKey, bool] = {}  # processes without a rank; whether the agent has killed it
        self.at_door: set[WorkerKey] = set()  # of those; they can take one
        self.later: list[ev.Event] = []
        self.ports: set[int] = set()  # of workers that were started
        self.lowest: dict[tuple[str, int], int] = {}
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
        self.is_drained = False
        self.spare: dict[str, bool] = {}
        """By job: what its newest stop says of the state."""
        self.handled = 0

    # ------------------------------------------------------------ the shell

    def handle(self, event: ev.Event) -> None:
        self.handled += 1
        for instruction in self.state.handle_event(event, self.now):
            self.carry_out(instruction)
        while self.later:
            self.handle(self.later.pop(0))
        if self.port == 0:
            self.port, self.next_port = self.next_port, self.next_port + 1
            self.handle(ev.RendezvousPortOpened(self.port))

    def carry_out(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.StartWorker(key) if key.newcomer:
                assert key not in self.newcomers
                assert key.generation > self.remembered.get(key.job_id, 0), "ahead of a generation that is over"
                assert not instruction.rendezvous_port
                self.newcomers[key], self.devices[key] = False, instruction.environment.local_rank
            case ins.AssignWorker(newcomer, start) if newcomer.newcomer:
                key = start.key
                assert key not in self.processes
                assert key.generation == self.newest[key.job_id]
                assert newcomer.job_id == key.job_id
                assert newcomer in self.at_door
                assert not self.newcomers.pop(newcomer), "a killed process was assigned"
                self.at_door.remove(newcomer)
                device = self.devices[newcomer]
                assert device == start.environment.local_rank
                holding = self.holding()
                assert device not in [self.devices[other] for other in holding], "two workers on one device"
                assert all(o.job_id != key.job_id or o.generation == key.generation for o in holding - self.left), (
                    "beside an older generation"
                )
                self.take_port(start)
                self.processes[key], self.devices[key] = False, device
            case ins.KillWorker(key) if key.newcomer:
                assert not self.newcomers[key], "killed twice"
                self.newcomers[key] = True
            case ins.StartWorker(key):
                assert key not in self.processes
                assert key.generation == self.newest[key.job_id], "an old generation was started"
                device = instruction.environment.local_rank
                assert self.remembered[key.job_id] >= key.generation, "started before it was remembered"
                holding = self.holding()
                assert device not in [self.devices[other] for other in holding], "two workers on one device"
                others = holding - self.left
                assert all(o.job_id != key.job_id or o.generation == key.generation for o in others)
                self.take_port(instruction)
                self.processes[key], self.devices[key] = False, device
            case ins.AssignWorker(survivor, start):
                key = start.key
                assert key.generation == self.newest[key.job_id] > survivor.generation
                assert survivor.job_id == key.job_id
                assert survivor in self.left
                assert not self.processes[survivor], "a killed process was assigned"
                assert survivor not in self.asked.keys() | self.gives_only, "a holder takes no rank"
                assert self.devices[survivor] == start.environment.local_rank
                if survivor in self.dying:
                    self.claimed.discard(start.rendezvous_port)
                    self.exited.append(key)
                    self.later.append(ev.ProcessNotStarted(key, "it has ended"))
                    self.unseen.add(survivor)
                    return
                self.take_port(start)
                self.left.remove(survivor)
                self.connected.remove(survivor)
                self.processes[key], self.devices[key] = self.processes.pop(survivor), self.devices[survivor]
            case ins.AskToGive(key, environment):
                assert key in self.named & self.left
                assert not self.processes[key], "a killed process was asked"
                assert environment.generation == self.newest[key.job_id] > key.generation
                assert self.remembered[key.job_id] >= environment.generation, "asked before it was remembered"
                assert (environment.rank, environment.local_rank) == (key.rank, self.devices[key])
                self.asked[key] = environment.generation, self.now
                self.gives.discard(key)
                self.named.remove(key)
            case ins.KillWorker(key):
                assert not self.processes[key], "killed twice"
                self.processes[key] = True
            case ins.SendLeave(key, mode, _, keep_state, _):
                assert key in self.connected - self.left
                is_needed = not self.spare.get(key.job_id, False)
                assert keep_state or mode != pb.STOP_MODE_HOLD_FIRST or not is_needed, "it would lose its state"
                if mode == pb.STOP_MODE_LEAVE_NOW:
                    self.leaving.add(key)
            case ins.SendStore(key):
                assert key in self.connected
                assert not self.processes[key], "a killed process cannot store"
                assert key not in self.asked, "one that gives need not"
                self.storing.add(key)
            case ins.FreeMemory(key):
                self.memories.remove(key)
            case ins.SaveSeenGenerations(seen):
                assert all(seen[job] >= generation for job, generation in self.remembered.items())
                self.remembered = dict(seen)
            case ins.ClaimRendezvousPort(port):
                assert port == self.port
                self.claimed.add(port)
                self.port = 0
            case ins.ReleaseRendezvousPort(port):
                (self.claimed if port in self.claimed else self.ports).remove(port)
            case ins.SendMessage(message):
                self.receive(message)
            case ins.HangUp():
                self.open = self.welcome = False
                self.on_stream = []
            case ins.ExitAgent():
                assert not self.processes, "the agent left workers behind"
                self.exit_agent = True
            case _:
                raise AssertionError(instruction)

    def take_port(self, start: ins.StartWorker) -> None:
        if start.rendezvous_port:
            self.claimed.remove(start.rendezvous_port)
            self.ports.add(start.rendezvous_port)

    def holding(self) -> set[WorkerKey]:
        """The processes on whose devices no other may start."""
        there = self.processes.keys() - self.unseen
        if self.device == "cuda":
            return there - self.freed
        return {key for key in there if not self.ends(key)} - self.asked.keys()

    def living(self) -> set[WorkerKey]:
        """The survivors that were not killed."""
        return {key for key in self.left - self.unseen if not self.processes[key]}

    def ends(self, key: WorkerKey) -> bool:
        """Whether a process was killed or ordered to leave at once, or will be as soon as it takes its rank."""
        modes = {worker.key: worker.leave_mode for worker in self.state.workers if not worker.has_connected}
        return self.processes[key] or key in self.leaving or modes.get(key) == pb.STOP_MODE_LEAVE_NOW

    def receive(self, message: pb.AgentMessage) -> None:
        match message.WhichOneof("body"):
            case "hello":
                assert self.open
                workers = {WorkerKey(r.job_id, r.generation, r.rank) for r in message.hello.workers}
                assert workers >= self.processes.keys() - self.left
                assert not workers & self.left
                assert workers == {worker.key for worker in self.state.workers}, "a newcomer is no worker"
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

    @initialize(device=strategies.sampled_from(["cpu", "cuda"]), left=strategies.integers(0, GPUS))
    def start(self, device: str, left: int) -> None:
        self.device = device
        self.begin()
        self.connect()
        if left:
            self.generation_comes_and_leaves("a", left, gives_only=False)

    def renew_lease(self) -> None:
        if self.open:
            self.stream_breaks()
        self.stream_opens()
        self.manager_welcomes()

    @rule(job=JOBS, count=strategies.integers(1, GPUS), gives_only=strategies.booleans())
    def generation_comes_and_leaves(self, job: str, count: int, *, gives_only: bool) -> None:
        """Without it, few runs get to what survivors do."""
        self.renew_lease()
        generation = self.newest.get(job, 0) + 1
        self.launch(job, generation, {1 + device: device for device in range(count)}, 0, False)
        for key in sorted(self.processes):
            if key.generation_key == (job, generation):
                self.connect_worker(key)
                self.leave_generation(key, 76, gives_only=gives_only)

    def connect(self) -> None:
        self.port, self.next_port = self.next_port, self.next_port + 1
        self.handle(ev.RendezvousPortOpened(self.port))
        self.stream_opens()
        self.manager_welcomes()

    @precondition(lambda self: self.handled > 50)
    @rule()
    def agent_is_killed_and_comes_back(self) -> None:
        """Its workers ended with it; the generations that it has seen stay over."""
        self.begin()
        self.newest = dict(self.remembered)
        self.connect()

    @precondition(lambda self: not self.open)
    @rule()
    def stream_opens(self) -> None:
        self.open, self.opened_at, self.on_stream = True, self.now, []
        self.sent_at = {}
        self.handle(ev.StreamOpened())

    @precondition(lambda self: self.open and not self.welcome)
    @rule()
    def manager_welcomes(self) -> None:
        self.welcome = True
        self.renewed_at = self.opened_at
        self.handle(
            ev.ManagerMessageReceived(pb.ManagerMessage(welcome=pb.Welcome(lease_s=LEASE_S, heartbeat_interval_s=1)))
        )

    @precondition(lambda self: self.open)
    @rule()
    def stream_breaks(self) -> None:
        self.open = self.welcome = False
        self.handle(ev.StreamClosed("test"))

    @precondition(lambda self: self.welcome)
    @rule(pick=PICK, through=PICK)
    def manager_acknowledges(self, pick: int, through: int) -> None:
        sequence = sorted(self.sent_at)[pick % len(self.sent_at)] if self.sent_at else 0
        if sequence:
            self.renewed_at = self.sent_at[sequence]
            self.sent_at = {s: at for s, at in self.sent_at.items() if s > sequence}
        ack = pb.Ack(heartbeat_sequence=sequence, reports_through=through % (len(self.stored) + 1))
        self.handle(ev.ManagerMessageReceived(pb.ManagerMessage(ack=ack)))

    @precondition(lambda self: self.welcome)
    @rule(
        job=JOBS,
        generation=GENERATIONS,
        ranks=strategies.sets(strategies.integers(0, 3), max_size=3),
        off=PICK,
        in_place=strategies.booleans(),
    )
    def manager_launches(self, job: str, generation: int, ranks: set[int], off: int, *, in_place: bool) -> None:
        self.launch(job, generation, {r: (off + i) % GPUS for i, r in enumerate(sorted(ranks))}, off, in_place)

    @precondition(lambda self: self.welcome)
    @rule(job=JOBS, rank=strategies.integers(0, 3), device=strategies.integers(0, GPUS - 1))
    def manager_launches_the_next_generation(self, job: str, rank: int, device: int) -> None:
        self.launch(job, self.newest.get(job, 0) + 1, {rank: device}, 0, False)

    @precondition(lambda self: self.welcome and self.processes)
    @rule(pick=PICK, first=strategies.integers(0, 1))
    def manager_goes_on_in_place(self, pick: int, first: int) -> None:
        """With each process of the job, whether it has left its generation or not."""
        job = self.pick(pick).job_id
        devices = {self.devices[key] for key in self.processes if key.job_id == job}
        ranks = {first + i: device for i, device in enumerate(sorted(devices))}
        self.launch(job, self.newest[job] + 1, ranks, 0, True)

    @precondition(lambda self: self.living())
    @rule(
        pick=PICK,
        some=strategies.sampled_from([{0, 1, 2, 3}, {1, 2}, set()]),
        ranks=strategies.dictionaries(strategies.integers(0, 3), strategies.integers(0, GPUS - 1), max_size=3),
        off=strategies.sampled_from([0, 0, 0, 1]),
        in_place=strategies.sampled_from([False, False, False, True]),
    )
    def manager_launches_with_holders(
        self, pick: int, some: set[int], ranks: dict[int, int], off: int, *, in_place: bool
    ) -> None:
        """Of one generation, here or not, asked before or not."""
        self.renew_lease()
        if not self.living():
            return  # they were over with the lease
        one = sorted(self.living())[pick % len(self.living())]
        holders = {WorkerKey(one.job_id, one.generation, rank) for rank in some} | {one}
        devices = {device: rank for rank, device in ranks.items()}
        placed = {rank: device for device, rank in devices.items()}
        self.launch(one.job_id, self.newest[one.job_id] + 1, placed, off, in_place, holders)

    def launch(
        self,
        job: str,
        generation: int,
        ranks: dict[int, int],
        off: int,
        in_place: bool,
        holders: set[WorkerKey] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        """`ranks`: their devices."""
        before = {worker.key for worker in self.state.workers}
        survivors = self.living()
        holders = holders - self.storing
        self.named = set() if in_place else survivors & holders
        was_asked = set(self.asked)
        workers = [pb.WorkerAssignment(rank=rank, local_rank=device) for rank, device in ranks.items()]
        launch = pb.Launch(
            job_id=job,
            generation=generation,
            kind=pb.GENERATION_KIND_TRAINING,
            workers=workers,
            plan=pb.PlanSpec(p=1, d=4),
            world_size=4,
            rendezvous_port=self.port - off % 2,
            in_place=in_place,
            holders_generation=next((key.generation for key in holders), 0),
            holders=sorted(key.rank for key in holders),
        )
        old_newest = self.newest.get(job, 0)
        self.newest[job] = max(old_newest, generation)
        if generation > old_newest:
            self.lowest[job, generation] = min(ranks, default=-1)
        self.handle(ev.ManagerMessageReceived(pb.ManagerMessage(launch=launch)))
        appeared = {worker.key for worker in self.state.workers} - before
        assert not appeared or generation > old_newest, "a stale launch was followed"
        if generation > old_newest and not appeared:
            seen = {s.job_id: s.generation for s in self.state._make_hello().seen_generations}
            self.newest[job] = seen.get(job, 0)  # refused: the older one may still be launched again
        self.accepted |= appeared
        if appeared or (not ranks and generation == self.newest[job] > old_newest):
            assert not self.named, "a holder was not asked"
            for survivor in survivors - (set() if in_place else holders):
                is_free = survivor.job_id != job and (in_place or self.devices[survivor] not in ranks.values())
                may_take_rank = survivor.job_id == job and in_place and survivor not in was_asked | self.storing
                assert is_free or may_take_rank or self.processes[survivor], "a survivor is of no use and lives"
        elif generation > old_newest and not in_place:
            assert all(not self.processes[key] for key in survivors if key in self.processes), "a refusal kills"
        self.named = set()
        if appeared:
            assert all(
                is_killed or (one.job_id != job and self.devices[one] not in ranks.values()) or one in self.to_take(job)
                for one, is_killed in self.newcomers.items()
            ), "a newcomer is of no use and lives"

    def to_take(self, job: str) -> set[WorkerKey]:
        """Newcomers whose rank waits for its device."""
        waiting = [worker for worker in self.state.workers if worker.phase is WorkerPhase.WAITING]
        devices = {worker.local_rank for worker in waiting if worker.key.job_id == job and not worker.is_in_place}
        return {one for one in self.at_door if one.job_id == job and self.devices[one] in devices}

    @precondition(lambda self: self.welcome)
    @rule(
        job=JOBS,
        ranks=strategies.dictionaries(strategies.integers(0, 3), strategies.integers(0, GPUS - 1), max_size=3),
        further=strategies.sampled_from([1, 1, 1, 0, 2]),
        request=strategies.sampled_from(["x", "y"]),
    )
    def manager_wants_newcomers(self, job: str, ranks: dict[int, int], further: int, request: str) -> None:
        placed = {device: rank for rank, device in ranks.items()}
        workers = [pb.WorkerAssignment(rank=rank, local_rank=device) for device, rank in placed.items()]
        launch = pb.Launch(
            job_id=job,
            generation=self.newest.get(job, 0) + further,
            kind=pb.GENERATION_KIND_TRAINING,
            workers=workers,
            plan=pb.PlanSpec(p=1, d=4),
            world_size=4,
        )
        command = pb.StartNewcomers(request=request, launch=launch)
        self.handle(ev.ManagerMessageReceived(pb.ManagerMessage(start_newcomers=command)))

    @precondition(lambda self: self.welcome)
    @rule(job=JOBS)
    def manager_no_longer_wants_newcomers(self, job: str) -> None:
        end = pb.ManagerMessage(end_newcomers=pb.EndNewcomers(job_id=job))
        self.handle(ev.ManagerMessageReceived(end))
        assert all(is_killed for key, is_killed in self.newcomers.items() if key.job_id == job)

    @precondition(lambda self: self.newcomers)
    @rule(
        pick=PICK, read=strategies.sampled_from([(), (), ("RANK",)]), obstacle=strategies.sampled_from(["", "", "no"])
    )
    def newcomer_reaches_the_door(self, pick: int, read: tuple[str, ...], obstacle: str) -> None:
        key = sorted(self.newcomers)[pick % len(self.newcomers)]
        if not self.state.is_expected(key):
            return
        self.handle(ev.WorkerConnected(key, 5))
        if not self.newcomers[key] and not obstacle:
            self.at_door.add(key)
        at_door = w.AtDoor(read_variables=read, obstacle=obstacle)
        self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(at_door=at_door)))

    @precondition(lambda self: self.newcomers)
    @rule(pick=PICK, code=strategies.sampled_from([0, 1, -9]))
    def newcomer_ends(self, pick: int, code: int) -> None:
        key = sorted(self.newcomers)[pick % len(self.newcomers)]
        del self.newcomers[key]
        self.at_door.discard(key)
        self.handle(ev.ProcessEnded(key, code, ""))

    @precondition(lambda self: self.welcome)
    @rule(
        job=JOBS,
        generation=GENERATIONS,
        grace_s=strategies.sampled_from([0.0, 2.0]),
        mode=strategies.sampled_from([1, 2, 3]),
        keep_state=strategies.booleans(),
        spare=strategies.booleans(),
    )
    def manager_stops(
        self, job: str, generation: int, grace_s: float, mode: pb.StopMode.ValueType, *, keep_state: bool, spare: bool
    ) -> None:
        self.newest[job] = max(self.newest.get(job, 0), generation)
        self.spare[job] = spare
        stop = pb.Stop(
            job_id=job, generation=generation, mode=mode, grace_s=grace_s, keep_state=keep_state, spare=spare
        )
        self.handle(ev.ManagerMessageReceived(pb.ManagerMessage(stop=stop)))

    @precondition(lambda self: self.welcome and self.handled > 60)
    @rule()
    def manager_drains(self) -> None:
        """Late, because little happens afterwards."""
        self.is_drained = True
        self.handle(ev.ManagerMessageReceived(pb.ManagerMessage(drain=pb.Drain())))

    # ------------------------------------------------------------ workers and time

    def pick(self, pick: int) -> WorkerKey:
        return sorted(self.processes)[pick % len(self.processes)]

    @precondition(lambda self: self.processes)
    @rule(pick=PICK)
    def worker_connects(self, pick: int) -> None:
        self.connect_worker(self.pick(pick))

    def connect_worker(self, key: WorkerKey) -> None:
        if self.state.is_expected(key):
            self.connected.add(key)
            self.handle(ev.WorkerConnected(key, 5))
            self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(ready=w.WorkerReady())))

    def pick_connected(self, pick: int) -> WorkerKey:
        working = sorted(self.connected - self.left)
        return working[pick % len(working)]

    @precondition(lambda self: self.processes)
    @rule(code=strategies.sampled_from([75, 76]))
    def all_leave_their_generation(self, code: int) -> None:
        for key in sorted(self.processes):
            self.connect_worker(key)
        for key in sorted(self.connected - self.left):
            self.leave_generation(key, code, gives_only=False)

    @precondition(lambda self: self.connected - self.left)
    @rule(pick=PICK, code=strategies.sampled_from([75, 76]), gives_only=strategies.booleans())
    def worker_leaves_its_generation(self, pick: int, code: int, *, gives_only: bool) -> None:
        self.leave_generation(self.pick_connected(pick), code, gives_only=gives_only)

    def leave_generation(self, key: WorkerKey, code: int, *, gives_only: bool) -> None:
        workers = self.state._workers
        stays = not self.processes[key] and workers._may_stay(workers._by_key[key])
        if stays:
            self.exited.append(key)
            self.left.add(key)
            if gives_only:
                self.gives_only.add(key)
        left = w.GenerationLeft(exit_code=code, step=3, gives_only=gives_only)
        self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(generation_left=left)))
        is_killed = self.processes.get(key, False)  # one that stays may have its next assignment at once
        assert is_killed is not stays, "a process that may not stay is killed"

    @precondition(lambda self: self.asked)
    @rule(pick=PICK)
    def holder_answers(self, pick: int) -> None:
        self.process_answers(sorted(self.asked)[pick % len(self.asked)])

    @precondition(lambda self: self.processes)
    @rule(pick=PICK)
    def some_process_answers(self, pick: int) -> None:
        """One that was asked, was never asked, has answered before, or was killed."""
        self.process_answers(self.pick(pick))

    def process_answers(self, key: WorkerKey) -> None:
        if key not in self.connected or key in self.unseen:
            return
        if key in self.asked and not self.processes[key]:
            self.gives.add(key)
            self.freed.add(key)
        self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(giving_state=w.GivingState(host_bytes=7))))

    @precondition(lambda self: self.left)
    @rule(pick=PICK)
    def survivor_ends_and_the_agent_does_not_know_yet(self, pick: int) -> None:
        self.dying.add(sorted(self.left)[pick % len(self.left)])

    @precondition(lambda self: self.connected - self.left)
    @rule(pick=PICK)
    def worker_makes_a_step(self, pick: int) -> None:
        self.step(self.pick_connected(pick))

    @precondition(lambda self: self.asked)
    @rule()
    def all_make_a_step(self) -> None:
        """So that holders are here when the generation that they give to makes its first step."""
        for key in sorted(self.processes):
            self.connect_worker(key)
        for key in sorted(self.connected - self.left):
            self.step(key)

    def step(self, key: WorkerKey) -> None:
        if key.rank == self.lowest[key.generation_key]:
            steps = self.steps_made.setdefault(key.generation_key, [])
            steps.append(len(steps) + 1)
        step = len(self.steps_made.get(key.generation_key, [])) or 1
        survivors = {survivor for survivor in self.living() if survivor.job_id == key.job_id}
        self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(step_done=w.StepDone(step=step))))
        for survivor in survivors:
            gives_to, _ = self.asked.get(survivor, (0, 0.0))
            is_outdated = survivor.generation < key.generation >= gives_to
            assert self.processes[survivor] is is_outdated, "the state is outdated, or of use"

    @precondition(lambda self: self.processes)
    @rule(pick=PICK, code=strategies.sampled_from([0, 1, 75, 76, -9]))
    def worker_ends(self, pick: int, code: int) -> None:
        key = self.pick(pick)
        if key in self.connected:
            self.connected.remove(key)
            self.handle(ev.WorkerDisconnected(key))
        del self.processes[key]
        self.dying.discard(key)
        if key in self.left:
            self.left.remove(key)
            self.unseen.discard(key)
            self.asked.pop(key, None)
            self.gives.discard(key)
            self.freed.discard(key)
            self.gives_only.discard(key)
            self.storing.discard(key)
        else:
            self.exited.append(key)
        self.handle(ev.ProcessEnded(key, code, ""))

    @precondition(lambda self: any(not self.processes[key] for key in self.storing))
    @rule(pick=PICK)
    def survivor_stores_its_state(self, pick: int) -> None:
        storing = sorted(key for key in self.storing if not self.processes[key])
        key = storing[pick % len(storing)]
        assert self.state.may_store(key, "")
        self.memories.add(key)
        self.handle(ev.StateStored(key, 1, 10))
        self.handle(ev.Tick())

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
            self.handle(ev.Tick())
            assert self.state.next_deadline() != deadline or deadline > self.now, "a deadline that does not go away"
        self.now = end
        self.handle(ev.Tick())

    # ------------------------------------------------------------ what always holds

    @invariant()
    def nothing_runs_beyond_the_lease(self) -> None:
        if self.renewed_at is not None and self.now >= self.renewed_at + LEASE_S:
            assert all(is_killed or key in self.unseen for key, is_killed in self.processes.items())
            assert all(self.newcomers.values())

    @invariant()
    def a_drained_agent_keeps_no_survivor(self) -> None:
        assert not self.is_drained or all(self.processes[key] for key in self.left - self.unseen)
        assert not self.is_drained or all(self.newcomers.values())

    @invariant()
    def the_books_agree(self) -> None:
        assert {worker.key for worker in self.state.workers if worker.has_process} == self.processes.keys() - self.left
        assert {survivor.key for survivor in self.state.survivors} == self.left - self.unseen
        assert {newcomer.key for newcomer in self.state.newcomers if newcomer.has_process} == self.newcomers.keys()
        assert {memory.key for memory in self.state.memories} == self.memories
        killed = {key for key, is_killed in self.processes.items() if is_killed}
        phases: dict[SurvivorPhase, set[WorkerKey]] = {}
        for survivor in self.state.survivors:
            phases.setdefault(survivor.phase, set()).add(survivor.key)
        assert phases.get(SurvivorPhase.GIVING, set()) == self.gives - killed
        assert phases.get(SurvivorPhase.ASKED, set()) == self.asked.keys() - self.gives - killed
        waiting = [worker.start.rendezvous_port for worker in self.state.workers if not worker.has_process]
        assert self.claimed == {port for port in waiting if port}

    @invariant()
    def no_holder_is_kept_for_ever(self) -> None:
        hosted = {worker.key.generation_key for worker in self.state.workers}
        for key, (generation, since) in self.asked.items():
            if key in self.gives and (key.job_id, generation) in hosted:
                self.asked[key] = generation, self.now  # those who take its state may need it for long
                continue
            limit_s = KEEP_S if key in self.gives else ANSWER_S
            assert self.processes[key] or self.now < since + limit_s + 1e-9

    @invariant()
    def a_worker_waits_for_something(self) -> None:
        waiting = {w.key: w for w in self.state.workers if w.phase is WorkerPhase.WAITING and not w.is_in_place}
        devices = {self.devices[key] for key in self.holding()}
        for key in waiting:
            mates = [worker for other, worker in waiting.items() if other.generation_key == key.generation_key]
            others = {o for o in self.holding() - self.left if o.job_id == key.job_id and o.generation < key.generation}
            assert others or any(mate.local_rank in devices for mate in mates), "nothing keeps it from its start"

    def teardown(self) -> None:
        """Whatever happened, in the end the manager has each report exactly once."""
        if not self.port:
            return
        for key in tuple(self.processes):
            self.connected.discard(key)
        while self.processes:
            self.worker_ends(0, -9)
        while self.newcomers:
            self.newcomer_ends(0, -9)
        if self.open:
            self.stream_breaks()
        self.stream_opens()
        self.manager_welcomes()
        exits: dict[WorkerKey, int] = {}
        steps: dict[tuple[str, int], list[int]] = {}
        for report in self.stored:
            if report.WhichOneof("fact") == "worker_exited":
                key = WorkerKey(report.worker_exited.job_id, report.worker_exited.generation, report.worker_exited.rank)
                exits[key] = exits.get(key, 0) + 1
                assert key.rank != self.lowest.get(key.generation_key, -1) or (
                    steps.get(key.generation_key, []) == self.steps_made.get(key.generation_key, [])
                ), "an exit was reported before the steps that came before it"
            elif report.WhichOneof("fact") == "steps_completed":
                fact = report.steps_completed
                steps.setdefault((fact.job_id, fact.generation), []).extend(s.step for s in fact.steps)
        assert all(exits.get(key) == 1 for key in self.exited), "each exit is reported exactly once"
        assert all(exits.get(key) == 1 for key in self.accepted), "a launch was accepted, and its end never reported"
        assert steps == self.steps_made


TestAgent = pytest.mark.long(Agent.TestCase)
TestAgent.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
