"""The worker's part of a morph's trace (`varuna_proto.spans`): the phases of its start, and its first step."""

from __future__ import annotations

import os
import threading
import time

from varuna.diagnostics.start_phases import StartPhases
from varuna_proto import spans
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.trace_context import child

__all__ = ["StartSpans"]


class StartSpans:
    """Sends the spans in the background after the first step. Imports and sends nothing when tracing is off."""

    def __init__(self, environment: WorkerEnvironment, phases: StartPhases) -> None:
        self._environment = environment
        self._phases = phases
        self._is_due = bool(environment.traceparent) and spans.are_wanted(os.environ)

    def end_start(self, step: int, step_s: float) -> None:
        """To be called after each step: the first one ends the start."""
        if self._is_due:
            self._is_due = False
            threading.Thread(target=self._send, args=(step, step_s, time.time()), name="spans", daemon=True).start()

    def _send(self, step: int, step_s: float, done_at: float) -> None:
        environment = self._environment
        rank: dict[str, str | int] = {"varuna.job": environment.job_id, "varuna.rank": environment.rank}
        exporter = spans.exporter(os.environ, "varuna-worker", **rank)
        if exporter is None:
            return
        parent = environment.traceparent
        exporter.add_sequence(parent, self._phases.started_at, self._phases.durations_s.items())
        exporter.add(
            "first step",
            done_at - step_s,
            done_at,
            context=child(parent, "first step"),
            parent=parent,
            attributes={"varuna.step": step, "varuna.generation": environment.generation},
        )
        exporter.close()
