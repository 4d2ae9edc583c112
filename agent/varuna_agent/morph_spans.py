"""The agent's part of a morph's trace (`varuna_proto.spans`): how each rank here left, and how each one started."""

from __future__ import annotations

import time

from varuna_agent.state import Worker, WorkerKey
from varuna_proto.bounds import MOST_SECONDS, bounded
from varuna_proto.spans import SpanExporter
from varuna_proto.trace_context import child
from varuna_proto.v1 import agent_pb2, worker_pb2

_MAX_TOLD = 64
_CLOSE_S = 10.0
"""A VM that leaves has a notice of 30 s at least."""


class MorphSpans:
    def __init__(self, exporter: SpanExporter, vm_id: str) -> None:
        self._exporter = exporter
        self._vm_id = vm_id
        self._told: dict[tuple[str, str, int], tuple[str, float]] = {}
        """By command, job and generation: the trace context in the first such command, and when that came."""

    def told(self, message: agent_pb2.ManagerMessage) -> None:
        kind = message.WhichOneof("body")
        if kind != "launch" and kind != "stop":
            return
        command = message.launch if kind == "launch" else message.stop
        if command.traceparent:
            self._told.setdefault((kind, command.job_id, command.generation), (command.traceparent, time.time()))
            while len(self._told) > _MAX_TOLD:
                del self._told[next(iter(self._told))]

    def ended(self, key: WorkerKey) -> None:
        """The worker's process is gone."""
        parent, since = self._told.get(("stop", *key.generation_key), ("", 0.0))
        if parent:
            context = child(parent, f"stop rank {key.rank}")
            self._exporter.add(
                "stop rank", since, time.time(), context=context, parent=parent, attributes=self._attributes(key)
            )

    def ready(self, worker: Worker, message: worker_pb2.WorkerReady) -> None:
        """Its model is built and its state loaded."""
        own = worker.start.environment.traceparent
        parent, _ = self._told.get(("launch", *worker.key.generation_key), ("", 0.0))
        if not (own and parent):
            return
        now = time.time()
        began = (
            now - sum(worker.phases.values()) - sum(bounded(phase.seconds, MOST_SECONDS) for phase in message.phases)
        )
        self._exporter.add(
            "start rank", began, now, context=own, parent=parent, attributes=self._attributes(worker.key)
        )
        self._exporter.add_sequence(own, began, worker.phases.items())

    def close(self) -> None:
        """Sends what is left. Nobody waits for this agent any more, and on a busy VM sending takes its time."""
        self._exporter.close(_CLOSE_S)

    def _attributes(self, key: WorkerKey) -> dict[str, str | int]:
        return {
            "varuna.job": key.job_id,
            "varuna.generation": key.generation,
            "varuna.rank": key.rank,
            "varuna.vm": self._vm_id,
        }
