"""The manager's part of a morph's trace (`varuna_proto.spans`): from the last step before to the first one after it."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_manager.domain.downtime import DowntimePart
from varuna_proto.spans import SpanExporter
from varuna_proto.trace_context import traceparent


class MorphSpans:
    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """None: tracing is off."""
        self._exporter = exporter

    def make_traceparent(self, job_id: str, generation: int) -> str:
        """For commands of the morph that begins this generation; empty: tracing is off."""
        return "" if self._exporter is None else traceparent(job_id, generation)

    def export_morph(
        self,
        job_id: str,
        generation: int,
        parts: Sequence[DowntimePart],
        *,
        first_step_at: float,
        step: int,
        steps_redone: int,
    ) -> None:
        """The morph is over. `parts`: its whole time; each rank's VM reports what that rank did."""
        if self._exporter is None:
            return
        root = traceparent(job_id, generation)
        at = began_at = first_step_at - sum(part.seconds for part in parts)
        self._exporter.add(
            "morph",
            began_at,
            first_step_at,
            context=root,
            attributes={
                "varuna.job": job_id,
                "varuna.generation": generation,
                "varuna.step": step,
                "varuna.steps_redone": steps_redone,
            },
        )
        for part in parts:
            if part.rank is None:
                self._exporter.add_sequence(root, at, [(part.name, part.seconds)])
            at += part.seconds
