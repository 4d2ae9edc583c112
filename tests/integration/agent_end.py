"""The agent's end of a worker's Unix socket, served by the test."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from varuna_proto import framing
from varuna_proto.v1 import agent_pb2, worker_pb2
from waiting import DEADLINE_S


class AgentEnd:
    """Takes one worker's connection and keeps what it says."""

    def __init__(self, secret: str = "") -> None:
        """`secret`: of the generation, which the worker is told; "": it expects none."""
        self._secret = secret
        # A Unix socket's path must be short; pytest's folders may not be.
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name) / "agent.sock")
        self.said: list[worker_pb2.WorkerMessage] = []
        self._heard = threading.Condition()
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
            worker, _ = self._listening.accept()
        except OSError:
            return  # nobody ever came
        with worker:
            self._worker = worker
            if self._secret:
                admitted = worker_pb2.Admitted(secret=self._secret)
                worker.sendall(framing.frame(worker_pb2.AgentToWorker(admitted=admitted)))
            while (message := framing.receive(worker, worker_pb2.WorkerMessage)) is not None:
                with self._heard:
                    self.said.append(message)
                    self._heard.notify_all()

    def tell_to_leave(self, mode: agent_pb2.StopMode) -> None:
        assert self._worker is not None
        leave = worker_pb2.AgentToWorker(leave=worker_pb2.Leave(mode=mode))
        self._worker.sendall(framing.frame(leave))

    def hang_up(self) -> None:
        for end in (self._listening, self._worker):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def wait_for(self, matches: Callable[[worker_pb2.WorkerMessage], bool]) -> worker_pb2.WorkerMessage:
        """The first message that matches, as soon as there is one."""
        with self._heard:
            assert self._heard.wait_for(lambda: any(map(matches, self.said)), DEADLINE_S), f"not said: {self.said}"
            return next(message for message in self.said if matches(message))

    def steps(self) -> list[worker_pb2.StepDone]:
        with self._heard:
            return [message.step_done for message in self.said if message.HasField("step_done")]
