"""The agent's end of a worker's Unix socket, served by the test."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from varuna_proto import framing
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.v1 import agent_pb2, worker_pb2
from waiting import DEADLINE_S


class AgentEnd:
    """Accepts one worker's connection and keeps its messages."""

    def __init__(self, secret: str = "", *, keeps_survivor: bool = False) -> None:
        """`secret`: the generation's, sent to the worker; "": the worker expects none.

        `keeps_survivor`: a worker that has left its generation waits for `assign` or `give_state`; without it,
        it is ended.
        """
        self._secret = secret
        self._keeps_survivor = keeps_survivor
        # A Unix socket's path must be short; pytest's folders may not be.
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name) / "agent.sock")
        self.messages: list[worker_pb2.WorkerMessage] = []
        self._changed = threading.Condition()
        self._is_over = False
        """No more messages come."""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen()
        self._worker: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> AgentEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        self._thread.join()
        self._folder.cleanup()

    def _serve(self) -> None:
        try:
            self._serve_worker()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _serve_worker(self) -> None:
        try:
            worker, _ = self._listening.accept()
        except OSError:
            return  # nobody ever came
        with worker:
            self._worker = worker
            if self._secret:
                admitted = worker_pb2.Admitted(secret=self._secret)
                worker.sendall(framing.frame(worker_pb2.AgentToWorker(admitted=admitted)))
            while (message := framing.receive(worker, worker_pb2.WorkerMessage)) is not None:
                with self._changed:
                    self.messages.append(message)
                    self._changed.notify_all()
                if message.HasField("generation_left") and not self._keeps_survivor:
                    self.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW)

    def send_leave(
        self,
        mode: agent_pb2.StopMode,
        *,
        keep_state: bool = False,
        in_place: bool = False,
        within_step: bool = False,
        spare: bool = False,
    ) -> None:
        assert self._worker is not None
        leave = worker_pb2.Leave(
            mode=mode, keep_state=keep_state, in_place=in_place, within_step=within_step, spare=spare
        )
        self._worker.sendall(framing.frame(worker_pb2.AgentToWorker(leave=leave)))

    def send_ahead_part(self, part: worker_pb2.AheadPart) -> None:
        assert self._worker is not None
        self._worker.sendall(framing.frame(worker_pb2.AgentToWorker(ahead_part=part)))

    def assign(self, environment: WorkerEnvironment, log: Path) -> None:
        """Gives a survivor its rank in the next generation."""
        assert self._worker is not None
        variables = replace(environment, secret="").to_environ()
        assigned = worker_pb2.Assigned(environment=variables, secret=environment.secret, log_path=str(log))
        self._worker.sendall(framing.frame(worker_pb2.AgentToWorker(assigned=assigned)))

    def give_state(self, environment: WorkerEnvironment) -> None:
        """Asks a survivor for its state, for the generation of that environment."""
        assert self._worker is not None
        variables = replace(environment, secret="").to_environ()
        give = worker_pb2.GiveState(environment=variables, secret=environment.secret)
        self._worker.sendall(framing.frame(worker_pb2.AgentToWorker(give_state=give)))

    def hang_up(self) -> None:
        for end in (self._listening, self._worker):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def wait_for(self, matches: Callable[[worker_pb2.WorkerMessage], bool]) -> worker_pb2.WorkerMessage:
        """Waits for the first message that matches."""
        return self._wait_for_messages(matches, 1)[0]

    def wait_for_number(self, field: str, number: int) -> worker_pb2.WorkerMessage:
        """Waits for the `number`th message, counted from 1, that has this field."""
        return self._wait_for_messages(lambda message: message.HasField(field), number)[number - 1]  # type: ignore[arg-type]

    def _wait_for_messages(
        self, matches: Callable[[worker_pb2.WorkerMessage], bool], count: int
    ) -> list[worker_pb2.WorkerMessage]:
        """Waits until `count` messages match. Fails when the worker has hung up before."""

        def matching() -> list[worker_pb2.WorkerMessage]:
            return list(filter(matches, self.messages))

        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(matching()) >= count, DEADLINE_S)
            assert len(matching()) >= count, f"got {self.messages}"
            return matching()

    def list_messages(self, field: str) -> list[worker_pb2.WorkerMessage]:
        """Those so far that have this field."""
        with self._changed:
            return [message for message in self.messages if message.HasField(field)]  # type: ignore[arg-type]

    def steps(self) -> list[worker_pb2.StepDone]:
        with self._changed:
            return [message.step_done for message in self.messages if message.HasField("step_done")]
