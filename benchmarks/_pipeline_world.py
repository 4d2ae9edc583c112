"""The processes of one emulated pipeline, the links between them, and the clock that they share.

Every rank is a process of its own. A stage's device is emulated by sleeping, which takes no processor time, so that
eight stages run as eight devices would, even on two cores; all else (engine, transport, sockets) is real.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, cast

import torch
from _pipeline_network import find_free_port
from torch import Tensor

from varuna.distributed.departure import Departure
from varuna.distributed.gloo import NEVER, GlooGroup, Work
from varuna.distributed.rendezvous import Rendezvous
from varuna_planner.schedule.policies import Op
from varuna_planner.simulator.simulation import MinibatchTimes
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

__all__ = [
    "Conditions",
    "DelayedGroup",
    "DelayedRendezvous",
    "NamespaceNetwork",
    "Sender",
    "busy_until",
    "make_environment",
    "message_us",
    "run_ranks",
]

_PR_SET_TIMERSLACK = 29
_EXACT_NS = 1

_SLEEPS_LATE_S = 100e-6
"""Even so a sleep ends some 60 µs late (measured), which no device does; the rest of the time is polled."""

_PROBES = 21
_PROBE_EVERY_S = 0.01


def busy_until(ends_s: float) -> None:
    """The emulated device computes, until a moment of `time.perf_counter`."""
    time.sleep(max(0.0, ends_s - time.perf_counter() - _SLEEPS_LATE_S))
    while time.perf_counter() < ends_s:
        time.sleep(0)  # lets other threads have the interpreter


class Conditions:
    """The times of this rank's ops and messages in the present mini-batch: the same for every system and for the
    simulator.
    """

    def __init__(self, rank: int, latency_us: float) -> None:
        self._rank = rank
        self._latency_us = latency_us
        self._ops: dict[Op, Iterator[float]] = {}
        self._delays: dict[str, Iterator[float]] = {}

    def begin(self, course: MinibatchTimes) -> None:
        """Starts a mini-batch. No message of another one may be under way."""
        self._ops = {op: iter(course.action_us[op, self._rank]) for op in (Op.F, Op.R, Op.B)}
        self._delays = {}
        if self._rank > 0:
            self._delays[f"up/{self._rank - 1}"] = iter(course.delay_us[1, self._rank - 1])
        if self._rank + 1 < course.delay_us.shape[1]:
            self._delays[f"down/{self._rank}"] = iter(course.delay_us[0, self._rank + 1])

    def op_s(self, op: Op) -> float:
        """Seconds that the next op of a kind takes; micro-batches are in order."""
        return next(self._ops[op]) / 1e6

    def delay_s(self, link: str) -> float:
        """Seconds by which the next message that this rank sends on a link is late."""
        return (self._latency_us + next(self._delays[link])) / 1e6


class Sender:
    """Delivers messages late and in order, like a network: a message's delay does not occupy the link."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self._last_due_s = 0.0
        self._queue: SimpleQueue[tuple[float, Callable[[], Work]]] = SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def send(self, deliver: Callable[[], Work]) -> None:
        """Calls `deliver` when the message is due, but not before the previous message."""
        self._last_due_s = max(self._last_due_s, time.perf_counter() + self._delay_s())
        self._queue.put((self._last_due_s, deliver))

    def _deliver(self) -> None:
        while True:
            due_s, deliver = self._queue.get()
            busy_until(due_s)
            deliver().wait(NEVER)


class _Sent:
    """The work of a message that the network has taken."""

    def wait(self, timeout: timedelta = timedelta(0), /) -> bool:
        return True

    def get_future(self) -> Any:
        raise TypeError("a sent message has no future")


class DelayedGroup:
    """A gloo group whose sends arrive late."""

    def __init__(self, group: GlooGroup, delay_s: Callable[[], float]) -> None:
        self._group = group
        self._sender = Sender(delay_s)

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        self._sender.send(lambda: self._group.send(tensors, rank, tag))
        return _Sent()

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        return self._group.recv(tensors, rank, tag)


class DelayedRendezvous(Rendezvous):
    """Makes links with delays."""

    delays: Conditions | None = None

    def connect_gloo(self, name: str, ranks: Sequence[int]) -> GlooGroup:
        group: GlooGroup = super().connect_gloo(name, ranks)
        if self.delays is None or not name.startswith(("up/", "down/")):
            return group
        return cast(GlooGroup, DelayedGroup(group, partial(self.delays.delay_s, name)))


def message_us(group: GlooGroup, first: bool, size: int) -> float:
    """The time of a message of `size` bytes over a link, as calibration finds it: half of the shortest of some round
    trips, with receives posted ahead and an idle link. Both ends call it.
    """
    message = torch.zeros(size, dtype=torch.uint8)
    taken_s = []
    for number in range(_PROBES):
        answer = group.recv([torch.empty_like(message)], int(first), number)
        if not first:
            answer.wait(NEVER)
        else:
            time.sleep(_PROBE_EVERY_S)
            begun_s = time.perf_counter()
        sent = group.send([message], int(first), number)
        sent.wait(NEVER)
        if first:
            answer.wait(NEVER)
            taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s) / 2 * 1e6 if first else 0.0


class NamespaceNetwork(Protocol):
    """Where ranks live and how they reach each other."""

    @property
    def rendezvous_host(self) -> str: ...
    def enter(self, rank: int, /) -> None:
        """Moves this process, which becomes `rank`, to its place."""


def run_ranks(
    p: int, network: NamespaceNetwork, rank_main: Callable[[int, DelayedRendezvous, Departure], Any]
) -> list[Any]:
    """The results of `rank_main` in P processes (as JSON). Raises RuntimeError with the traceback of one."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        port = find_free_port()
        for rank in range(p):
            pid = os.fork()
            if pid == 0:
                _become_rank(rank, p=p, port=port, network=network, rank_main=rank_main, folder=Path(folder))
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        files = [Path(folder) / f"{rank}" for rank in range(p)]
        results = [
            json.loads(file.read_text()) if file.exists() else {"error": f"it ended with status {status}"}
            for file, status in zip(files, statuses, strict=True)
        ]
    for rank, result in enumerate(results):
        if "error" in result:
            raise RuntimeError(f"rank {rank} failed:\n{result['error']}")
    return [result["value"] for result in results]


def _become_rank(rank: int, *, p: int, port: int, network: NamespaceNetwork, rank_main: Any, folder: Path) -> None:
    out = folder / f"{rank}"
    try:
        network.enter(rank)
        # Sleeps end on time instead of up to 50 µs late; threads that start later inherit it.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _EXACT_NS)
        departure = Departure(grace_s=5.0)
        environment = make_environment(rank, p, port, network.rendezvous_host)
        out.write_text(json.dumps({"value": rank_main(rank, DelayedRendezvous(environment, departure), departure)}))
    except BaseException:
        out.write_text(json.dumps({"error": traceback.format_exc()}))
    os._exit(0)


def make_environment(rank: int, p: int, port: int, host: str, secret: str = "") -> WorkerEnvironment:
    return WorkerEnvironment(
        job_id="benchmark",
        generation=1,
        mode=Mode.TRAIN,
        rank=rank,
        local_rank=0,
        world_size=p,
        rendezvous_host=host,
        rendezvous_port=port,
        plan=Plan(p=p, d=1, micro_batch=1, global_batch=1),
        secret=secret,
    )
