"""The agent's part of a morph's trace (`varuna_proto.spans`): when each rank on this VM left, and how each started."""

from __future__ import annotations

import time

from varuna_agent.state import HostedWorker, WorkerKey
from varuna_proto.bounds import MOST_SECONDS, bounded
from varuna_proto.spans import SpanExporter
from varuna_proto.trace_context import child
from varuna_proto.v1 import agent_pb2, worker_pb2

_MAX_COMMANDS = 64
_CLOSE_S = 10.0
"""A VM that leaves has a notice of 30 s at least."""


class RankSpans:
    """Exports a span for each end and each start of a rank."""

    def __init__(self, exporter: SpanExporter, vm_id: str) -> None:
        self._exporter = exporter
        self._vm_id = vm_id
        self._commands: dict[tuple[str, str, int], tuple[str, float]] = {}
        """By kind of command, job and generation: the trace context of the first such command, and when it arrived."""

    def record_command(self, message: agent_pb2.ManagerMessage) -> None:
        kind = message.WhichOneof("body")
        if kind != "launch" and kind != "stop":
            return
        command = message.launch if kind == "launch" else message.stop
        if command.traceparent:
            self._commands.setdefault((kind, command.job_id, command.generation), (command.traceparent, time.time()))
            while len(self._commands) > _MAX_COMMANDS:
                del self._commands[next(iter(self._commands))]

    def add_end(self, key: WorkerKey) -> None:
        """The worker's process has ended."""
        parent, since = self._commands.get(("stop", *key.generation_key), ("", 0.0))
        if parent:
            context = child(parent, f"stop rank {key.rank}")
            self._exporter.add(
                "stop rank", since, time.time(), context=context, parent=parent, attributes=self._attributes(key)
            )

    def add_start(self, worker: HostedWorker, message: worker_pb2.WorkerReady) -> None:
        """The worker has built its model and loaded its state."""
        own = worker.start.environment.traceparent
        parent, _ = self._commands.get(("launch", *worker.key.generation_key), ("", 0.0))
        if not (own and parent):
            return
        now = time.time()
        began = (
            now
            - sum(worker.start_phases.values())
            - sum(bounded(phase.seconds, MOST_SECONDS) for phase in message.phases)
        )
        self._exporter.add(
            "start rank", began, now, context=own, parent=parent, attributes=self._attributes(worker.key)
        )
        self._exporter.add_sequence(own, began, worker.start_phases.items())

    def flush(self) -> None:
        """Send the spans so far. Blocks."""
        self._exporter.flush()

    def close(self) -> None:
        """Send the remaining spans. Workers have ended by now, so that a slow export delays nothing."""
        self._exporter.close(_CLOSE_S)

    def _attributes(self, key: WorkerKey) -> dict[str, str | int]:
        return {
            "varuna.job": key.job_id,
            "varuna.generation": key.generation,
            "varuna.rank": key.rank,
            "varuna.vm": self._vm_id,
        }
