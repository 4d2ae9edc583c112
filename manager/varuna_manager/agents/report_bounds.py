"""Checks an agent's reports before they are used: numbers within bounds, texts that can be stored.

Informative numbers are brought within their bounds, and texts are cleaned and cut. A report of something impossible (a
rank beyond the protocol's, a step beyond any training) has a flaw and is dropped. Of an exit only the worker's key can
be a flaw: an exit is never dropped because of its worker's output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from varuna_proto.bounds import (
    ERROR_CHARS,
    MOST_EXACT,
    MOST_INT,
    MOST_LOSS,
    MOST_SECONDS,
    MOST_STEP,
    NAME_CHARS,
    URL_CHARS,
    bounded,
    clean_text,
    logged_name_flaw,
)
from varuna_proto.names import is_plain
from varuna_proto.v1 import agent_pb2 as pb

_MOST_PHASES = 64
MOST_STATE_BYTES = 2**50
"""Of one worker. The sum over all workers of a generation is still an integer of the store."""
_MOST_MICROSECONDS = MOST_SECONDS * 1e6


def tidy(report: pb.Report) -> None:
    """Bring the report's texts and informative numbers within their bounds."""
    match report.WhichOneof("fact"):
        case "worker_started":
            started = report.worker_started
            started.kept_bytes = min(started.kept_bytes, MOST_STATE_BYTES)
            started.peer_bytes = min(started.peer_bytes, MOST_STATE_BYTES)
            started.late_bytes = min(started.late_bytes, MOST_STATE_BYTES)
            started.store_bytes = min(started.store_bytes, MOST_STATE_BYTES)
            del started.phases[_MOST_PHASES:]
            for phase in started.phases:
                phase.name = clean_text(phase.name, NAME_CHARS)
                phase.seconds = bounded(phase.seconds, MOST_SECONDS)
        case "worker_exited":
            _tidy_exit(report.worker_exited)
        case "setup_failed":
            report.setup_failed.error_text = clean_text(report.setup_failed.error_text, ERROR_CHARS)
        case "command_refused":
            report.command_refused.reason = clean_text(report.command_refused.reason, ERROR_CHARS)
        case "checkpoint_committed":
            committed = report.checkpoint_committed
            committed.total_bytes = min(committed.total_bytes, MOST_EXACT)
        case "preemption_notice":
            notice = report.preemption_notice
            notice.notice_id = clean_text(notice.notice_id, NAME_CHARS)
            notice.source = clean_text(notice.source, NAME_CHARS)
            notice.seconds_left = bounded(notice.seconds_left, MOST_SECONDS)
        case "steps_completed":
            _tidy_steps(report.steps_completed)
        case "step_traced":
            _tidy_trace(report.step_traced)
        case "values_logged":
            _tidy_values(report.values_logged)


def flaw_of(report: pb.Report) -> str | None:
    """Why the report, once it is tidy, is impossible; None: it is not."""
    kind = report.WhichOneof("fact")
    if kind is None:
        return "it has no content"
    fact = getattr(report, kind)
    if kind == "preemption_notice":
        return None
    if not is_plain(fact.job_id):
        return f"{fact.job_id[:80]!r} is no job's id"
    if kind == "setup_failed":
        return None
    numbers = {"generation": fact.generation, "rank": getattr(fact, "rank", 0)}
    beyond = [f"{name} {number}" for name, number in numbers.items() if number > MOST_INT]
    if not fact.generation:
        beyond.append("generation 0")
    step = getattr(fact, "step", 0) or getattr(fact, "resumed_step", 0)
    if step > MOST_STEP:
        beyond.append(f"step {step}")
    if beyond:
        return f"there is no {', no '.join(beyond)}"
    if kind == "checkpoint_committed" and clean_text(fact.url, URL_CHARS) != fact.url:
        return f"its URL has more than {URL_CHARS} characters, or a NUL"
    if kind == "step_traced" and not _has_times(fact):
        return "it was traced at times that are no numbers"
    return None


def _tidy_exit(fact: pb.WorkerExited) -> None:
    """State of an impossible step is not counted on, but the exit is."""
    fact.error_text = clean_text(fact.error_text, ERROR_CHARS)
    fact.script_obstacle = clean_text(fact.script_obstacle, NAME_CHARS)
    if fact.held.step > MOST_STEP:
        fact.ClearField("held")
    if fact.HasField("held"):
        fact.held.bytes = min(fact.held.bytes, MOST_STATE_BYTES)
    if fact.HasField("shortage"):
        short = fact.shortage
        short.asked_bytes = min(short.asked_bytes, MOST_STATE_BYTES)
        short.limit_bytes = min(short.limit_bytes, MOST_STATE_BYTES)
        short.free_bytes = min(short.free_bytes, short.limit_bytes)
        short.peak_bytes = min(short.peak_bytes, MOST_STATE_BYTES)


def _tidy_steps(fact: pb.StepsCompleted) -> None:
    """Drop impossible steps, so that the other steps of the report are not lost."""
    kept = [step for step in fact.steps if 1 <= step.step <= MOST_STEP]
    if len(kept) < len(fact.steps):
        del fact.steps[:]
        fact.steps.extend(kept)
    for step in fact.steps:
        step.step_us = min(step.step_us, int(_MOST_MICROSECONDS))
        step.examples = min(step.examples, MOST_INT)
        between = step.between
        if between.data_us + between.evaluation_us + between.checkpoint_us + between.script_us > step.step_us:
            step.ClearField("between")
        if not abs(step.loss) <= MOST_LOSS:
            step.loss = math.nan
        step.copies_obstacle = clean_text(step.copies_obstacle, NAME_CHARS)
        step.marks_obstacle = clean_text(step.marks_obstacle, NAME_CHARS)
        for name in ("gradient_norm", "learning_rate"):
            if not abs(getattr(step, name)) <= MOST_LOSS:
                step.ClearField(name)


def _tidy_values(fact: pb.ValuesLogged) -> None:
    """Drop impossible values, so that the others of the report are not lost."""
    kept = [
        one
        for one in fact.values
        if one.step <= MOST_STEP
        and one.rank <= MOST_INT
        and abs(one.value) <= MOST_LOSS
        and logged_name_flaw(one.name) is None
    ]
    if len(kept) < len(fact.values):
        del fact.values[:]
        fact.values.extend(kept)


def _tidy_trace(fact: pb.StepTraced) -> None:
    for one in fact.all_reduce:
        one.name = clean_text(one.name, NAME_CHARS)


def _has_times(fact: pb.StepTraced) -> bool:
    spans: Iterable[pb.TracedOp | pb.TracedSum] = (*fact.ops, *fact.all_reduce)
    times = [fact.begin_us, *(us for span in spans for us in (span.start_us, span.duration_us))]
    return all(abs(us) <= MOST_EXACT for us in times)
