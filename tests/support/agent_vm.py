"""One VM's agent state, driven by events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from varuna_agent.state import AgentState, Identity, Timings, WorkerKey
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_agent.state.hosted_worker import WorkerPhase
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w

__all__ = [
    "LEASE_S",
    "PORT",
    "QUIET",
    "Vm",
    "exits",
    "held",
    "key",
    "killed",
    "launch",
    "leave",
    "of",
    "sent",
    "survive",
]


LEASE_S = 60.0


PORT = 4000


QUIET = Timings(silence_s=1000.0)


class Vm:
    """An AgentState with a clock, and all instructions that it has given."""

    def __init__(
        self,
        *,
        gpus: int = 4,
        welcome: bool = True,
        timings: Timings | None = None,
        device: str = "cuda",
        seen: dict[str, int] | None = None,
    ) -> None:
        identity = Identity(vm_id="vm-1", incarnation="i", version="1", host="h", gpus=gpus, device=device)
        self.state = AgentState(identity, timings, seen)
        self.now = 100.0
        self.instructions: list[ins.Instruction] = []
        self.handle(ev.RendezvousPortOpened(PORT))
        if welcome:
            self.connect()

    def handle(self, event: ev.Event) -> list[ins.Instruction]:
        instructions = list(self.state.handle_event(event, self.now))
        self.instructions += instructions
        return instructions

    def receive_message(self, **body: Any) -> list[ins.Instruction]:
        return self.handle(ev.ManagerMessageReceived(pb.ManagerMessage(**body)))

    def connect(self) -> list[ins.Instruction]:
        self.handle(ev.StreamOpened())
        return self.receive_message(welcome=pb.Welcome(lease_s=LEASE_S, heartbeat_interval_s=1.0))

    def tick(self, at: float) -> list[ins.Instruction]:
        self.now = at
        return self.handle(ev.Tick())

    def ready(self, key: WorkerKey, resumed_step: int = 0) -> list[ins.Instruction]:
        self.handle(ev.WorkerConnected(key, 77))
        return self.receive_worker_message(key, ready=w.WorkerReady(resumed_step=resumed_step))

    def receive_worker_message(self, key: WorkerKey, **body: Any) -> list[ins.Instruction]:
        return self.handle(ev.WorkerMessageReceived(key, w.WorkerMessage(**body)))

    def step(self, key: WorkerKey, step: int) -> list[ins.Instruction]:
        return self.receive_worker_message(key, step_done=w.StepDone(step=step, loss=1.0, forward_us=5))

    def ended(self, key: WorkerKey, code: int, tail: str = "") -> list[ins.Instruction]:
        return self.handle(ev.ProcessEnded(key, code, tail))

    def phases(self) -> dict[WorkerKey, WorkerPhase]:
        return {worker.key: worker.phase for worker in self.state.workers}


def launch(generation: int = 1, ranks: Iterable[int] = (1,), job_id: str = "job", **changes: Any) -> pb.Launch:
    fields: dict[str, Any] = {
        "job_id": job_id,
        "generation": generation,
        "kind": pb.GENERATION_KIND_TRAINING,
        "workers": [pb.WorkerAssignment(rank=rank, local_rank=index) for index, rank in enumerate(ranks)],
        "plan": pb.PlanSpec(p=2, d=4, micro_batch=2, global_batch=16, stage_starts=[0, 3], recompute=[True, False]),
        "command": "python train.py",
        "rendezvous_host": "10.0.0.1",
        "rendezvous_port": PORT,
        "world_size": 8,
    }
    return pb.Launch(**{**fields, **changes})


def key(generation: int = 1, rank: int = 1, job_id: str = "job") -> WorkerKey:
    return WorkerKey(job_id, generation, rank)


def sent(instructions: Iterable[ins.Instruction], kind: str) -> list[Any]:
    messages = [i.message for i in instructions if isinstance(i, ins.SendMessage)]
    bodies = [getattr(m, kind) for m in messages if m.WhichOneof("body") == kind]
    return bodies + [getattr(m.report, kind) for m in messages if m.report.WhichOneof("fact") == kind]


def exits(instructions: Iterable[ins.Instruction]) -> list[tuple[int, int, str]]:
    return [(e.generation, e.rank, pb.ExitCause.Name(e.cause)[11:]) for e in sent(instructions, "worker_exited")]


def of(kind: type, instructions: Iterable[ins.Instruction]) -> list[Any]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def killed(instructions: Iterable[ins.Instruction]) -> list[Any]:
    return [kill.key for kill in of(ins.KillWorker, instructions)]


def leave(vm: Vm, worker: Any, code: int = 76, step: int = 7, *, gives_only: bool = False) -> list[ins.Instruction]:
    """The worker's process leaves its generation with the state."""
    left = w.GenerationLeft(exit_code=code, step=step, held_bytes=100, gives_only=gives_only)
    return vm.receive_worker_message(worker, generation_left=left)


def survive(
    device: str = "cuda",
    ranks: Iterable[int] = (1,),
    *,
    gives_only: bool = False,
    timings: Timings = QUIET,
    **options: Any,
) -> Vm:
    """A VM whose workers of generation 1 have left it and stay."""
    vm = Vm(device=device, timings=timings, **options)
    vm.receive_message(launch=launch(1, ranks=ranks))
    for rank in ranks:
        vm.ready(key(1, rank))
    for rank in ranks:
        leave(vm, key(1, rank), gives_only=gives_only)
    return vm


def held(vm: Vm) -> list[Any]:
    """The survivors that were not killed."""
    return [survivor.key for survivor in vm.state.survivors if not survivor.is_killed]
