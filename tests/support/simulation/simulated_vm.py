"""A VM without a machine: the real state machine of the agent, its stream and its workers' processes simulated."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulated_training import KILLED, SimulatedTraining, SimulatedWorker
from varuna_agent.state import AgentState, Identity, Timings, WorkerKey
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w
from virtual_time import VirtualTime

if TYPE_CHECKING:
    from simulated_manager import ManagerEnd

MANAGER_SILENT_S = (0.05, 4.0)
REDIAL_S = (0.05, 5.0)
TIMINGS = Timings()


class Stream:
    """One connection. What is under way when it breaks is lost, and each end notices that after a while.

    Within a stream nothing overtakes anything (TCP). What a busy manager has not read yet when the stream breaks may
    still be read after the VM's next stream has opened (`hold_back`); and `twice` delivers every message again, like
    a peer that did not get the answer.
    """

    def __init__(self, vm: SimulatedVm, time: VirtualTime, chance: Random) -> None:
        self.vm = vm
        self.is_open = True
        self.twice = False
        self._held_back: list[Callable[[], None]] | None = None
        """What the manager has received and does not read; None: it reads."""
        self._stuck: list[tuple[str, Callable[[], None]]] = []
        """Sent while there was no network: TCP sends it again."""
        self._time, self._chance = time, chance
        self._arrived = {"up": 0.0, "down": 0.0}

    def carry(self, way: str, deliver: Callable[[], None], *, once: bool = False) -> None:
        """After the network's latency, in the order of sending."""
        for _ in range(2 if self.twice and not once else 1):
            at = max(self._time.now + self._chance.uniform(0.001, 0.05), self._arrived[way])
            self._arrived[way] = at
            self._time.at(at, lambda: self._arrive(way, deliver))

    def _arrive(self, way: str, deliver: Callable[[], None]) -> None:
        if not self.is_open:
            return
        if not self.vm.reachable:
            self._stuck.append((way, deliver))
        elif way == "up" and self._held_back is not None:
            self._held_back.append(deliver)
        else:
            deliver()

    def reach_again(self) -> None:
        """There is a network again."""
        stuck, self._stuck = self._stuck, []
        for way, deliver in stuck:
            self._arrive(way, deliver)

    def hold_back(self) -> None:
        """From now on the manager does not read, until `read_the_rest`."""
        if self._held_back is None:
            self._held_back = []

    def read_the_rest(self) -> None:
        held_back, self._held_back = self._held_back or [], None
        for deliver in held_back:
            deliver()


class SimulatedVm:
    """`manager`: the manager's end of streams, while there is one."""

    def __init__(
        self,
        vm_id: str,
        incarnation: str,
        gpus: int,
        time: VirtualTime,
        chance: Random,
        training: SimulatedTraining,
        manager: ManagerEnd,
    ) -> None:
        self.vm_id = vm_id
        self.gpus = gpus
        self.alive = True
        self.reachable = True
        """Whether there is a network between it and the manager."""
        self.workers: dict[WorkerKey, SimulatedWorker] = {}
        self.newcomers: set[WorkerKey] = set()
        """Processes that were started ahead and have not ended."""
        self.stream: Stream | None = None
        self._time, self._chance, self._training, self._manager = time, chance, training, manager
        self._wake_at = float("inf")
        self._next_port = 20_000
        self._handling = False
        self._events: list[ev.Event] = []
        self._remembered: dict[str, int] = {}
        self._begin(incarnation)

    def _begin(self, incarnation: str) -> None:
        """A new agent process, with what the one before has written down."""
        identity = Identity(
            vm_id=self.vm_id,
            incarnation=incarnation,
            version="simulated",
            host="127.0.0.1",
            gpus=self.gpus,
            device_memory_bytes=16 * 2**30,
            device="cuda",
        )
        self.state = AgentState(identity, TIMINGS, seen=self._remembered)

    @property
    def incarnation(self) -> str:
        """Of the agent's process."""
        return self.state.identity.incarnation

    # ------------------------------------------------------------ the agent's shell

    def boot(self) -> None:
        self._open_rendezvous()
        self.dial()

    def handle(self, event: ev.Event) -> None:
        """Works as the runner does: events that arise while instructions are carried out are handled after them."""
        self._events.append(event)
        if self._handling or not self.alive:
            return
        self._handling = True
        try:
            while self._events and self.alive:
                for instruction in self.state.handle_event(self._events.pop(0), self._time.now):
                    self._carry_out(instruction)
        finally:
            self._handling = False
        self._set_timer()

    def receive_worker_message(self, key: WorkerKey, message: w.WorkerMessage) -> None:
        if self.alive and key in self.workers:
            self.handle(ev.WorkerMessageReceived(key, message))

    def _set_timer(self) -> None:
        deadline = self.state.next_deadline()
        if deadline is not None and deadline < self._wake_at:
            self._wake_at = max(deadline, self._time.now)
            wake_at = self._wake_at
            self._time.at(wake_at, lambda: self._wake(wake_at))

    def _wake(self, wake_at: float) -> None:
        if wake_at != self._wake_at or not self.alive:
            return  # a later timer has taken its place
        self._wake_at = float("inf")
        deadline = self.state.next_deadline()
        if deadline is not None and deadline <= self._time.now:
            self.handle(ev.Tick())
        else:
            self._set_timer()

    def _carry_out(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.SendMessage(message):
                self._send(message)
            case ins.StartWorker(key) if key.newcomer:
                self._start_newcomer(key)
            case ins.StartWorker():
                self._start(instruction)
            case ins.AssignWorker(process, start):
                if process in self.newcomers:
                    self.newcomers.remove(process)
                    self._start(start)
                elif process in self.workers:
                    self._start(start, self.workers.pop(process))
                else:
                    self.handle(ev.ProcessNotStarted(start.key, "it has ended"))
            case ins.AskToGive(key, environment):
                if key in self.workers:
                    self._training.give(self.workers[key], environment.generation)
            case ins.KillWorker(key, _) if key.newcomer:
                self._time.after(0.01, lambda: self._end_newcomer(key, KILLED))
            case ins.KillWorker(key, reason):
                if key in self.workers:  # else its end is about to be handled
                    self._kill(self.workers[key], reason)
            case ins.SendLeave(key, mode, _, keeps_state):
                worker, within_step = self.workers[key], instruction.within_step
                self._training.receive_leave(worker, mode, keeps_state, within_step=within_step)
            case ins.SendAheadPart(key, part):
                if key in self.workers:
                    self._time.after(self._chance.uniform(0.5, 6.0), lambda: self._send_ahead(key, part))
            case ins.ClaimRendezvousPort():
                self._time.after(0.0, self._open_rendezvous)
            case ins.HangUp(reason):
                self._close(reason)
            case ins.ExitAgent():
                self.end()
            case ins.SaveSeenGenerations(seen):
                self._remembered = dict(seen)
            case ins.PrepareJob(request) if request.setup:
                setup_s = self._training.jobs[request.job_id].setup_s
                self._time.after(setup_s, lambda: self._end_setup(request.job_id))
            case ins.ReleaseRendezvousPort() | ins.ReadLogs() | ins.ReadStacks() | ins.PrepareJob() | ins.AdmitWorker():
                pass
            case ins.CancelPreparation() | ins.KeepFolders():
                pass

    def _end_setup(self, job_id: str) -> None:
        if self.alive:
            self.handle(ev.PreparationEnded(job_id))

    def _open_rendezvous(self) -> None:
        self._next_port += 1
        self.handle(ev.RendezvousPortOpened(self._next_port))

    # ------------------------------------------------------------ workers

    def _start(self, start: ins.StartWorker, survivor: SimulatedWorker | None = None) -> None:
        """`survivor`: the process that takes the rank; None: a new one."""
        key = start.key
        running = [worker for worker in self.workers.values() if worker.alive and not worker.has_freed_device]
        devices = {worker.start.environment.local_rank for worker in running}
        assert start.environment.local_rank not in devices, f"{key}: device in use on VM {self.vm_id}"
        others = {worker.key.generation for worker in running if worker.key.job_id == key.job_id and not worker.left}
        assert others <= {key.generation}, f"{key} beside generations {others} on VM {self.vm_id}"
        worker = SimulatedWorker(key=key, start=start, vm=self)
        if survivor is not None:
            assert survivor.left, f"{survivor.key} has not left its generation"
            survivor.alive = False  # as that worker
            worker.held, worker.frozen = survivor.held, survivor.frozen
        self.workers[key] = worker
        self._training.start(worker)

    def _kill(self, worker: SimulatedWorker, reason: str) -> None:
        is_late = self._time.now - worker.asked_at >= min(TIMINGS.keep_survivors_s, TIMINGS.answer_s)
        is_for_nothing = self._training.is_awaited(worker) and not is_late and not self.state.is_departing
        assert not is_for_nothing, f"{worker.key} ({reason}) before generation {worker.gives_to} has its state"
        self._time.after(0.01, lambda: self._training.end(worker, KILLED))

    def _send_ahead(self, key: WorkerKey, part: w.AheadPart) -> None:
        """Has sent the state of the step under way; that of the next one follows."""
        worker = self.workers.get(key)
        if worker is None or not worker.alive or worker.left or not self.alive:
            return
        sent = w.SentAhead(request=part.command.request, step=self._training.group_of(worker.start).step)
        self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(sent_ahead=sent)))
        self._time.after(self._chance.uniform(2.0, 8.0), lambda: self._send_ahead(key, part))

    def _start_newcomer(self, key: WorkerKey) -> None:
        """Most reach the door; some end before, and some never do anything."""
        self.newcomers.add(key)
        fate = self._chance.random()
        if fate < 0.9:
            self._time.after(self._chance.uniform(0.5, 8.0), lambda: self._reach_door(key))
        elif fate < 0.95:
            self._time.after(self._chance.uniform(0.1, 8.0), lambda: self._end_newcomer(key, 1))

    def _reach_door(self, key: WorkerKey) -> None:
        if self.alive and key in self.newcomers:
            self.handle(ev.WorkerConnected(key, 1))
            at_door = w.WorkerMessage(at_door=w.AtDoor(read_variables=["RANK"]))
            self.handle(ev.WorkerMessageReceived(key, at_door))

    def _end_newcomer(self, key: WorkerKey, code: int) -> None:
        if self.alive and key in self.newcomers:
            self.newcomers.remove(key)
            self.handle(ev.ProcessEnded(key, code, ""))

    def process_ended(self, worker: SimulatedWorker, code: int) -> None:
        del self.workers[worker.key]
        if worker.connected:
            self.handle(ev.WorkerDisconnected(worker.key))
        self.handle(ev.ProcessEnded(worker.key, code, ""))

    def end(self) -> None:
        """The machine is gone, with all that ran on it."""
        if not self.alive:
            return
        self.alive = False
        self._lose_reports()
        self._break()
        for worker in list(self.workers.values()):
            self._training.lost(worker)
        self.workers.clear()
        self.newcomers.clear()

    def restart_agent(self) -> None:
        """SIGKILL to the agent, whose workers go with it; the machine starts another."""
        self._lose_reports()
        self._break()
        for worker in list(self.workers.values()):
            self._training.lost(worker)
        self.workers.clear()
        self.newcomers.clear()
        self._events.clear()
        self._begin(f"{self.incarnation}+")
        self._wake_at = float("inf")
        self._time.after(self._chance.uniform(0.5, 3.0), self.boot)

    def _lose_reports(self) -> None:
        """What the agent has not told the manager goes with it."""
        outbox = self.state._reports.outbox
        outbox.take_steps(even_if_full=True)
        for report in outbox.unacknowledged:
            done = report.steps_completed
            self._training.lose_steps(self.incarnation, done.job_id, [step.step for step in done.steps])

    # ------------------------------------------------------------ the stream

    def dial(self) -> None:
        if not self.alive or self.stream is not None:
            return
        if not self.reachable or not self._manager.is_up:
            self._time.after(self._chance.uniform(*REDIAL_S), self.dial)
            return
        self.stream = Stream(self, self._time, self._chance)
        self.handle(ev.StreamOpened())

    def _send(self, message: pb.AgentMessage) -> None:
        stream = self.stream
        if stream is not None:
            is_hello = message.HasField("hello")  # the manager ignores a second one on the same stream
            stream.carry("up", lambda: self._manager.received(stream, message), once=is_hello)

    def receive_message(self, stream: Stream, message: pb.ManagerMessage) -> None:
        if self.stream is stream:
            self.handle(ev.ManagerMessageReceived(message))

    def _close(self, reason: str) -> None:
        """The agent's end of the stream closes; it dials again after a while."""
        if self._break():
            self.handle(ev.StreamClosed(reason))
            self._time.after(self._chance.uniform(*REDIAL_S), self.dial)

    def _break(self) -> bool:
        """Breaks the stream, which the manager notices after a while; returns whether there was one."""
        stream, self.stream = self.stream, None
        if stream is not None and stream.is_open:
            stream.is_open = False
            self._time.after(self._chance.uniform(*MANAGER_SILENT_S), lambda: self._manager.broke(stream))
        return stream is not None

    def stream_ended(self, stream: Stream) -> None:
        """The manager's end has closed."""
        if self.stream is stream and self.alive:
            stream.is_open = False
            self._close("the manager closed the stream")

    def notice(self, notice_id: str, seconds_left: float) -> None:
        self.handle(ev.NoticeReceived(notice_id, seconds_left, "simulated"))

    def break_stream(self) -> None:
        """The connection is reset."""
        self._close("reset")

    def break_stream_late(self, after_s: float, read_after_s: float) -> None:
        """The manager stops reading; later the connection is reset, and the rest of it is read later still."""
        if (stream := self.stream) is not None:
            stream.hold_back()
            self._time.after(after_s, lambda: self.break_stream() if self.stream is stream else None)
            self._time.after(after_s + read_after_s, stream.read_the_rest)

    def reach_again(self) -> None:
        self.reachable = True
        if self.stream is not None:
            self.stream.reach_again()
