"""The manager's part of a morph's trace (`varuna_proto.spans`): from the last step before to the first one after it."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_manager.domain.downtime import Part
from varuna_proto.spans import SpanExporter
from varuna_proto.trace_context import traceparent


class MorphSpans:
    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """None: nobody traces."""
        self._exporter = exporter

    def context(self, job_id: str, generation: int) -> str:
        """For commands that belong to the morph which begins this generation; empty: nobody traces."""
        return "" if self._exporter is None else traceparent(job_id, generation)

    def first_step(
        self, job_id: str, generation: int, parts: Sequence[Part], *, first_step_at: float, step: int, steps_redone: int
    ) -> None:
        """The morph is over. `parts`: all of its time; what a rank did in it, that rank's VM tells."""
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
