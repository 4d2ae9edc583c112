"""This process as a worker of a generation: what it was told, whom it reports to, and how it ends."""

from __future__ import annotations

import atexit
import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil
import torch
from torch.distributed import distributed_c10d

from varuna._gloo import keep_for_ever
from varuna.agent_link import AgentLink, install_excepthook
from varuna.calls import Calls
from varuna.departure import Departure, end_process
from varuna.launch import Rendezvous
from varuna.launched import remember_environment
from varuna.meeting import check_arguments_agree, meet_through_torch
from varuna.phases import Phases
from varuna.pipeline.engine import PassResult
from varuna.presence import Presence
from varuna.start_spans import StartSpans
from varuna.topology import Topology
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.v1 import worker_pb2

__all__ = ["Worker", "choose_device", "make_current"]


@dataclass(frozen=True)
class Worker:
    """What every part of the runtime needs of this process."""

    environment: WorkerEnvironment
    topology: Topology
    departure: Departure
    link: AgentLink
    rendezvous: Rendezvous
    phases: Phases
    """Of its start, since it has connected to the agent."""
    spans: StartSpans
    calls: Calls
    """What this rank does together with the others."""

    @classmethod
    def join(cls, environment: WorkerEnvironment) -> Worker:
        """Reports to the agent, meets the other ranks, and sees to it that this process never hangs when it ends.

        Raises ConnectionError when the agent is not there, PeerLost when the other ranks do not come.
        """
        departure = Departure()
        # A process that leaves has threads inside gloo, for which interpreter shutdown would wait: it ends before that.
        atexit.register(_at_exit, departure)
        link = AgentLink(environment, departure)
        departure.report_unreached_to(link.unreached)
        phases = Phases()
        if environment.world_size > 1 or environment.agent_socket:
            install_excepthook(link)
        environment = replace(environment, secret=link.secret)
        if environment.launcher_map and environment.world_size > 1:
            environment = meet_through_torch(environment, departure)
            if environment.global_batch:
                remember_environment(environment)
        rendezvous = Rendezvous(environment, departure)
        calls = Calls(environment.rank, departure)
        if environment.world_size > 1:
            presence = Presence.join(
                environment.rank, environment.world_size, rendezvous.store, rendezvous.own_address(), departure, calls
            )
            atexit.register(presence.say_goodbye)  # before `_at_exit`: what is registered last is called first
            if environment.launcher_map:
                check_arguments_agree(environment, rendezvous.store)
        phases.done("meet")
        topology = Topology(environment.p, environment.d, environment.rank)
        return cls(environment, topology, departure, link, rendezvous, phases, StartSpans(environment, phases), calls)

    def report_step(
        self,
        step: int,
        loss: float,
        examples: int,
        passed: PassResult,
        step_ns: int,
        device: torch.device,
        *,
        skipped: bool = False,
    ) -> None:
        """Reports a step that is done to the agent. `skipped`: it was not finite, and has updated nothing."""
        self.link.step_done(
            worker_pb2.StepDone(
                step=step,
                loss=loss,
                step_us=step_ns // 1000,
                examples=examples,
                forward_us=passed.forward_us,
                backward_us=passed.backward_us,
                wait_us=passed.wait_us,
                memory_bytes=_memory_bytes(device),
                skipped=skipped,
            )
        )
        self.spans.step_done(step, step_ns / 1e9)


def _at_exit(departure: Departure) -> None:
    if departure.end_code is not None:
        end_process(departure.end_code)
    for group in distributed_c10d._world.pg_map:  # those that the script made
        keep_for_ever(group)
    _let_threads_hang()


def _let_threads_hang() -> None:
    """Keeps threads that sit inside gloo from ending this process with SIGABRT while the interpreter shuts down.

    When a peer's process ends first, such a thread wakes, asks for the interpreter's lock and, before Python 3.14, is
    made to exit by unwinding its stack; C++ frames that may not be unwound then call std::terminate. Here that makes
    the thread wait for the end of the process, which is what Python does from 3.14 on.
    """
    if sys.platform != "linux" or sys.version_info >= (3, 14):
        return
    with suppress(OSError, AttributeError):  # another C++ library: then as it was
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.argtypes = [ctypes.c_void_p]
        set_terminate.restype = ctypes.c_void_p
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


def choose_device(
    environment: WorkerEnvironment, device: int | str | torch.device | None, local_rank: int
) -> torch.device:
    """The device of this worker: the launcher's kind, and the script's index (else the local rank).

    torchrun and its like give no device: there the script's kind counts.

    Raises ValueError when the script asks for another kind of device than the launcher gave it.
    """
    given = torch.device(environment.device)
    index: int | None
    if isinstance(device, str | torch.device):
        asked = torch.device(device)
        if environment.launcher_map and asked.type == "cpu":
            given = asked
        if asked.type != given.type:
            raise ValueError(
                f"device={str(asked)!r}, but the launcher gave this worker a {given.type!r} device: leave it out"
            )
        index = asked.index if ":" in str(asked) else None
    else:
        index = device if device is not None and device >= 0 else None
    if given.type != "cuda":
        return given
    if index is None and ":" in environment.device:
        index = given.index
    if index is None:
        index = local_rank if local_rank >= 0 else environment.local_rank
    return torch.device("cuda", index)


def make_current(device: torch.device) -> torch.device:
    """`device`, which is from now on where CUDA calls that name no device go: an event's, a synchronisation's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _memory_bytes(device: torch.device) -> int:
    """What this process has needed at most of a GPU's memory; on the CPU: what it takes now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident: int = psutil.Process().memory_info().rss
    return resident
