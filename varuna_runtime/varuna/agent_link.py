"""The worker's end of the Unix socket to its agent.

Messages go out from any thread. One daemon thread reads: `Leave` becomes a departure; the socket's end means that the
agent is gone, and then this process must end at once, for nobody would ever stop it.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType

from varuna.departure import Departure, GenerationEnded, end_process
from varuna_proto import framing
from varuna_proto.environment import EXIT_GENERATION_ENDED, WorkerEnvironment
from varuna_proto.v1 import agent_pb2, worker_pb2

__all__ = ["AgentLink", "install_excepthook"]


_EVALUATED_EVERY_S = 1.0
"""How often the count of evaluated micro-batches is sent: as often as agents send heartbeats."""


class AgentLink:
    """Reports to the agent, and hears from it. Without an agent (`VARUNA_AGENT_SOCKET` empty) reports go nowhere."""

    def __init__(self, environment: WorkerEnvironment, departure: Departure) -> None:
        """Raises ConnectionError when the agent's socket cannot be reached."""
        self._departure = departure
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None
        self.secret = environment.secret
        """Of the generation."""
        self._evaluated = 0
        self._evaluated_said_s = -math.inf
        if not environment.agent_socket:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(environment.agent_socket)
        except OSError as error:
            raise ConnectionError(
                f"no agent listens at VARUNA_AGENT_SOCKET={environment.agent_socket}: {error}"
            ) from error
        self._send(
            worker_pb2.WorkerMessage(
                hello=worker_pb2.WorkerHello(
                    job_id=environment.job_id,
                    generation=environment.generation,
                    rank=environment.rank,
                    pid=os.getpid(),
                )
            )
        )
        if environment.secret_from_agent:
            self.secret = _receive_secret(self._socket)
        threading.Thread(target=self._read, args=(self._socket,), name="varuna-agent-link", daemon=True).start()

    def ready(self, resumed_step: int, took_s: Mapping[str, float]) -> None:
        """The model is built and the state loaded, which has `resumed_step` steps behind it; `took_s`: by phase."""
        phases = [agent_pb2.Phase(name=name, seconds=seconds) for name, seconds in took_s.items()]
        ready = worker_pb2.WorkerReady(resumed_step=resumed_step, phases=phases)
        self._send(worker_pb2.WorkerMessage(ready=ready))

    def step_done(self, step: worker_pb2.StepDone) -> None:
        self._send(worker_pb2.WorkerMessage(step_done=step))

    def micro_batch_evaluated(self) -> None:
        """A micro-batch of an evaluation is done, which is no step but shows that this worker does not hang.

        Cheap enough for every one: the count is sent once in a while.
        """
        self._evaluated += 1
        now_s = time.monotonic()
        if now_s - self._evaluated_said_s >= _EVALUATED_EVERY_S:
            self._evaluated_said_s = now_s
            self._send(worker_pb2.WorkerMessage(evaluated=worker_pb2.Evaluated(micro_batches=self._evaluated)))

    def step_traced(self, traced: agent_pb2.StepTraced) -> None:
        """What this rank did in a step."""
        self._send(worker_pb2.WorkerMessage(step_traced=traced))

    def checkpoint_done(self, step: int, url: str, total_bytes: int) -> None:
        """A checkpoint is committed."""
        done = worker_pb2.CheckpointDone(step=step, url=url, total_bytes=total_bytes)
        self._send(worker_pb2.WorkerMessage(checkpoint_done=done))

    def profile_done(self, profile_json: str, *, from_cache: bool) -> None:
        """The profile is measured, or was by an earlier generation."""
        done = worker_pb2.ProfileDone(profile_json=profile_json, from_cache=from_cache)
        self._send(worker_pb2.WorkerMessage(profile_done=done))

    def failure(self, text: str) -> None:
        """The script failed: its traceback."""
        self._send(worker_pb2.WorkerMessage(failure=worker_pb2.WorkerFailure(traceback=text)))

    def unreached(self, rank: int, error: str) -> None:
        """This worker leaves because it cannot reach that rank."""
        self._send(worker_pb2.WorkerMessage(unreached=agent_pb2.Unreached(rank=rank, error=error)))

    def _send(self, message: worker_pb2.WorkerMessage) -> None:
        if self._socket is None:
            return
        data = framing.frame(message)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            end_process(EXIT_GENERATION_ENDED)

    def _read(self, connection: socket.socket) -> None:
        while (message := framing.receive(connection, worker_pb2.AgentToWorker)) is not None:
            if message.leave.mode == agent_pb2.STOP_MODE_SAVE_FIRST:
                self._departure.ask_save_first()
            elif message.leave.mode == agent_pb2.STOP_MODE_LEAVE_NOW:
                self._departure.leave(GenerationEnded("the agent said to leave now"))
        end_process(EXIT_GENERATION_ENDED)


def _receive_secret(connection: socket.socket) -> str:
    """What the agent answers to a worker of its own; it turns all others away, and then this process ends."""
    message = framing.receive(connection, worker_pb2.AgentToWorker)
    if message is None:
        end_process(EXIT_GENERATION_ENDED)
        raise SystemExit(EXIT_GENERATION_ENDED)
    return message.admitted.secret


def install_excepthook(link: AgentLink) -> None:
    """Makes an uncaught exception reach the agent with its traceback, and end the process without delay (code 1)."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        link.failure("".join(traceback.format_exception(kind, error, trace)))
        end_process(1)

    sys.excepthook = report
