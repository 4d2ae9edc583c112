"""The work of a rank in chosen steps, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

VARUNA_TRACE_STEPS=3,4 and VARUNA_TRACE_DIR=DIR in the environment of the workers make each rank write
`DIR/step<step>-rank<rank>.json` in the Trace Event Format: one process per rank, one track for ops (F, R, B with
their micro-batch), one per link and direction, one for the all-reduce. One file for all ranks of a step:

    python -m varuna.diagnostics.timeline DIR STEP > step.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from varuna_proto.v1 import agent_pb2

__all__ = ["ALL_REDUCE", "OPS", "Timeline", "merge_ranks"]

_log = structlog.get_logger("varuna")

OPS: Final = "ops"
ALL_REDUCE: Final = "all-reduce"
"""Tracks; the links add theirs."""
_FIRST_SENT_STEP = 3
_SENT_EVERY = 100
"""The manager receives the third step, when everything is warm, and each hundredth."""
_MOST_SENT_OPS = 8192
"""Ops of a step: enough for a drawing."""
_OP_CODES = {
    "F": agent_pb2.TRACE_OP_FORWARD,
    "R": agent_pb2.TRACE_OP_RECOMPUTE,
    "B": agent_pb2.TRACE_OP_BACKWARD,
}

StepSender = Callable[[agent_pb2.StepTraced], None]


@dataclass(frozen=True)
class _Span:
    track: str
    name: str
    begin_ns: int
    end_ns: int
    details: dict[str, Any]


class Timeline:
    """The spans of one rank. Any thread may add to it. When it does not record, it costs one read of `recording`."""

    def __init__(
        self,
        folder: Path | None = None,
        steps: Collection[int] = (),
        *,
        rank: int = 0,
        p: int = 1,
        send_step: StepSender | None = None,
    ) -> None:
        """Records `steps` (counted from 1) and writes them into `folder`, if there is one.

        `send_step`: receives this rank's ops in the third step and in each hundredth.
        """
        self.recording = False
        self._send_step = send_step
        self._sends = False
        self._steps_begun = 0
        self._folder = folder
        self._steps = frozenset(steps) if folder is not None else frozenset()
        self._rank = rank
        self._p = p
        self._step = 0
        self._spans: list[_Span] = []

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], *, rank: int, p: int, send_step: StepSender | None = None
    ) -> Timeline:
        """A timeline by VARUNA_TRACE_STEPS and VARUNA_TRACE_DIR. Raises ValueError when the steps are no numbers.

        Only ranks of the first replica send steps, because the other replicas do the same.
        """
        send_step = send_step if rank < p else None
        steps, folder = environ.get("VARUNA_TRACE_STEPS", ""), environ.get("VARUNA_TRACE_DIR", "")
        if not steps:
            return cls(rank=rank, p=p, send_step=send_step)
        if not folder:
            raise ValueError(f"VARUNA_TRACE_STEPS={steps!r} needs VARUNA_TRACE_DIR, the folder for the traces")
        try:
            numbers = [int(step) for step in steps.split(",")]
        except ValueError:
            raise ValueError(f"VARUNA_TRACE_STEPS={steps!r}: give step numbers joined by commas, such as 3,4") from None
        return cls(Path(folder), numbers, rank=rank, p=p, send_step=send_step)

    def begin_step(self, step: int) -> None:
        """Starts recording if the trace of `step` is wanted."""
        self._steps_begun += 1
        self._sends = self._send_step is not None and (self._steps_begun == _FIRST_SENT_STEP or step % _SENT_EVERY == 0)
        self.recording = self._sends or step in self._steps
        self._spans = []  # the previous step may have ended without `end_step`
        self._step = step

    def add_span(self, track: str, name: str, begin_ns: int, end_ns: int, **details: Any) -> None:
        """Adds a span from `begin_ns` to `end_ns` on `time.perf_counter_ns`. Does nothing when not recording."""
        if self.recording:
            self._spans.append(_Span(track, name, begin_ns, end_ns, details))

    def end_step(self) -> None:
        """Sends and writes the step, and stops recording. A folder that cannot be written causes a warning and does not
        stop training."""
        if not self.recording:
            return
        self.recording = False
        spans, self._spans = self._spans, []
        if self._sends and self._send_step is not None:
            self._send_step(_step_trace(self._step, spans))
        if self._folder is None or self._step not in self._steps:
            return
        path = self._folder / f"step{self._step}-rank{self._rank}.json"
        text = json.dumps({"traceEvents": self._events(spans), "displayTimeUnit": "ms"})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            _log.warning("the trace of a step cannot be written", path=str(path), error=str(error))

    def _events(self, spans: list[_Span]) -> list[dict[str, Any]]:
        links = sorted({span.track for span in spans} - {OPS, ALL_REDUCE})
        tracks = {track: number for number, track in enumerate((OPS, *links, ALL_REDUCE))}
        stage, replica = self._rank % self._p, self._rank // self._p
        named = [self._meta("process_name", 0, name=f"rank {self._rank}: stage {stage}, replica {replica}")]
        named.append(self._meta("process_sort_index", 0, sort_index=self._rank))
        for track, number in tracks.items():
            named.append(self._meta("thread_name", number, name=track))
            named.append(self._meta("thread_sort_index", number, sort_index=number))
        # By wall-clock time, so that ranks of different machines can be compared.
        to_wall_ns = _to_wall_ns()
        return named + [
            {
                "ph": "X",
                "pid": self._rank,
                "tid": tracks[span.track],
                "name": span.name,
                "cat": span.track,
                "ts": (span.begin_ns + to_wall_ns) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": {"step": self._step, **span.details},
            }
            for span in sorted(spans, key=lambda span: span.begin_ns)
        ]

    def _meta(self, kind: str, track: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": self._rank, "tid": track, "name": kind, "args": args}


def _to_wall_ns(tries: int = 5) -> int:
    """The difference of `time.time_ns` and `time.perf_counter_ns`: of several readings the fastest one.

    A thread that loses its processor between the readings of the two clocks would shift all spans of its rank, and its
    neighbours would seem to work on messages that it has not sent yet.
    """
    read = []
    for _ in range(tries):
        before_ns, wall_ns, after_ns = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        read.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(read)[1]


def _step_trace(step: int, spans: list[_Span]) -> agent_pb2.StepTraced:
    """The ops and all-reduces of a step, in µs from the start of the first."""
    to_wall_ns = _to_wall_ns()
    begin_ns = min((span.begin_ns for span in spans if span.track in (OPS, ALL_REDUCE)), default=0)
    trace = agent_pb2.StepTraced(step=step, begin_us=(begin_ns + to_wall_ns) / 1e3)
    for span in spans[:_MOST_SENT_OPS]:
        start_us, duration_us = (span.begin_ns - begin_ns) / 1e3, (span.end_ns - span.begin_ns) / 1e3
        if span.track == OPS:
            op, micro_batch = _OP_CODES[span.name[0]], span.details["micro_batch"]
            trace.ops.add(op=op, micro_batch=micro_batch, start_us=start_us, duration_us=duration_us)
        elif span.track == ALL_REDUCE:
            trace.all_reduce.add(name=span.name, start_us=start_us, duration_us=duration_us)
    return trace


def merge_ranks(folder: Path, step: int) -> dict[str, Any]:
    """The traces of one step from all ranks, as one. Raises FileNotFoundError when there are none."""
    paths = sorted(folder.glob(f"step{step}-rank*.json"))
    if not paths:
        raise FileNotFoundError(f"no trace of step {step} in {folder}: was it in VARUNA_TRACE_STEPS?")
    events = [event for path in paths for event in json.loads(path.read_text())["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m varuna.diagnostics.timeline DIR STEP")
    json.dump(merge_ranks(Path(sys.argv[1]), int(sys.argv[2])), sys.stdout)
