"""Metrics that are counted in memory as things happen. One `Instruments` per manager, with a registry of its own.

Labels have few values, whatever the size of the fleet: never a VM, a rank or a path that a caller chose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from varuna_manager.db.models import EventRow
from varuna_manager.metrics.family import COUNTER, HISTOGRAM, MetricFamily

_CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PLAN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_MORPH_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0)
_DETECTION_S = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0)
_PROVIDER_S = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_LAG_EVERY_S = 0.5
_PHASES, _START = ("notice", "stop", "calibration", "share", "plan"), "start"
"""Phases of a morph. Everything after these belongs to the start."""
_FROM_ZERO = (
    "checkpoint_passed_over",
    "copies_not_kept",
    "loss_finite_again",
    "loss_not_finite",
    "resumed",
    "first_step",
    "generation_started",
    "generation_ended",
    "hang",
    "job_cancelled",
    "job_failed",
    "job_succeeded",
    "manager_leads",
    "out_of_memory",
    "preemption_notice",
    "profile_rejected",
    "provider_away",
    "provider_refused",
    "reshape_not_possible",
    "vm_gone",
    "vm_lost",
    "vm_quarantined",
    "vm_ready",
    "vm_requested",
    "worker_exited",
)
"""Kinds of events that start at 0: Prometheus sees no increase when a series appears with its first value."""

COUNTED_FAMILIES = (
    MetricFamily("varuna_build_info", "Always 1; the label has the version.", ("version",)),
    MetricFamily("varuna_leader", "Whether this manager leads (1) or stands by (0)."),
    MetricFamily("varuna_heartbeats", "Heartbeats received from agents.", kind=COUNTER),
    MetricFamily(
        "varuna_detection_seconds",
        "Time until the manager detected a loss: of a VM (`vm`) since its last heartbeat, of a generation that hangs "
        "(`hang`) since its last step.",
        ("of",),
        HISTOGRAM,
    ),
    MetricFamily(
        "varuna_morph_phase_seconds",
        "Phases of morphs: `notice` (from the last step to the stop command), `stop` (until the old generation has "
        "ended), `calibration` (the generation before, if it was one), `share` (until its survivors have ended their "
        "shares of the step), `plan` (until the next one is decided; includes waiting for VMs and the planner), "
        "`start` (launch, loading, first step).",
        ("phase",),
        HISTOGRAM,
    ),
    MetricFamily(
        "varuna_morph_stall_seconds",
        "Time without a completed step at a morph, from the last step before it to the first one after it; at a job's "
        "start, until its first step.",
        kind=HISTOGRAM,
    ),
    MetricFamily("varuna_redone_steps", "Steps computed again after morphs: no checkpoint held them.", kind=COUNTER),
    MetricFamily(
        "varuna_redone_micro_batches",
        "Micro-batches of steps under way that were run again after morphs in place.",
        kind=COUNTER,
    ),
    MetricFamily("varuna_events", "Entries of the event log, by kind.", ("kind",), COUNTER),
    MetricFamily(
        "varuna_planner_seconds",
        "Duration of the planner's work: `plan` (a shape and its placement), `rates` (of one job, for several sizes of "
        "the fleet). Cached answers do not count.",
        ("question",),
        HISTOGRAM,
    ),
    MetricFamily(
        "varuna_controller_look_seconds",
        "Duration of a controller's round: load, decide, apply.",
        ("controller",),
        HISTOGRAM,
    ),
    MetricFamily(
        "varuna_store_commit_seconds",
        "Duration of the store's transactions, from begin to commit.",
        kind=HISTOGRAM,
    ),
    MetricFamily(
        "varuna_event_loop_lag_seconds",
        f"Delay of a timer of {_LAG_EVERY_S:g} s; heartbeats wait as long.",
        kind=HISTOGRAM,
    ),
    MetricFamily(
        "varuna_http_request_seconds",
        "Time from a REST request to the beginning of its answer. `route` is the pattern below /api/v1; `page` for the "
        "dashboard's files, `other` for unknown paths.",
        ("method", "route"),
        HISTOGRAM,
    ),
    MetricFamily(
        "varuna_http_requests",
        "REST requests, by the status of their answers. `500` is there from 0 as soon as its route has answered.",
        ("method", "route", "code"),
        COUNTER,
    ),
    MetricFamily(
        "varuna_provider_call_seconds",
        "Duration of calls of the provider: `list`, `create`, `delete`, `notices`, `offer`.",
        ("call",),
        HISTOGRAM,
    ),
    MetricFamily(
        "varuna_provider_calls",
        "Calls of the provider, by outcome: `ok`; `error` (it failed); for `create` also why it made fewer VMs than "
        "requested: `capacity`, `quota`, `throttled`, `failed`.",
        ("call", "outcome"),
        COUNTER,
    ),
)
"""In the order of docs/metrics.md."""


class Instruments:
    """`registry` has all of them."""

    def __init__(self, version: str = "unknown") -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        known = {each.name: each for each in COUNTED_FAMILIES}

        def gauge(name: str) -> Gauge:
            return Gauge(name, known[name].help, known[name].labels, registry=registry)

        def counter(name: str) -> Counter:
            return Counter(name, known[name].help, known[name].labels, registry=registry)

        def histogram(name: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, known[name].help, known[name].labels, buckets=buckets, registry=registry)

        gauge("varuna_build_info").labels(version).set(1)
        self._leader = gauge("varuna_leader")
        self.leads = False
        self.heartbeats = counter("varuna_heartbeats")
        self._detection = histogram("varuna_detection_seconds", _DETECTION_S)
        self._phases = histogram("varuna_morph_phase_seconds", _MORPH_S)
        self._stalls = histogram("varuna_morph_stall_seconds", _MORPH_S)
        self._redone_steps = counter("varuna_redone_steps")
        self._redone_micro_batches = counter("varuna_redone_micro_batches")
        self._events = counter("varuna_events")
        self._planner = histogram("varuna_planner_seconds", _PLAN_S)
        self._looks = histogram("varuna_controller_look_seconds", _CALL_S)
        self._commits = histogram("varuna_store_commit_seconds", _CALL_S)
        self._lag = histogram("varuna_event_loop_lag_seconds", _CALL_S)
        self._http = histogram("varuna_http_request_seconds", _CALL_S)
        self._answers = counter("varuna_http_requests")
        self._provider = histogram("varuna_provider_call_seconds", _PROVIDER_S)
        self._outcomes = counter("varuna_provider_calls")
        self._start_from_zero()

    def _start_from_zero(self) -> None:
        for kind in _FROM_ZERO:
            self._events.labels(kind)
        for phase in (*_PHASES, _START):
            self._phases.labels(phase)
        for of in ("vm", "hang"):
            self._detection.labels(of)
        for question in ("plan", "rates"):
            self._planner.labels(question)
        for outcome in ("ok", "error", "capacity", "quota", "throttled", "failed"):
            self._outcomes.labels("create", outcome)

    # ------------------------------------------------------------ what happened

    def record_leading(self, leads: bool) -> None:
        self.leads = leads
        self._leader.set(leads)

    def record_event(self, row: EventRow) -> None:
        """Count a committed event."""
        self._events.labels(row.kind).inc()
        match row.kind:
            case "first_step" if row.data["seconds_without_progress"] is not None:
                self._stalls.observe(row.data["seconds_without_progress"])
                self._redone_steps.inc(row.data["steps_redone"])
                self._redone_micro_batches.inc(row.data["micro_batches_redone"] or 0)
                self._record_morph(row.data["downtime"])
            case "hang":
                self._detection.labels("hang").observe(row.data["silent_s"])
            case "vm_lost" | "vm_gone" if row.data.get("silent_s") is not None:
                self._detection.labels("vm").observe(row.data["silent_s"])

    def _record_morph(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """`parts`: of the downtime (`varuna_manager.domain.downtime`)."""
        seconds: dict[str, float] = {}
        for part in parts:
            phase = part["name"] if part["name"] in _PHASES else _START
            seconds[phase] = seconds.get(phase, 0.0) + part["seconds"]
        for phase, taken_s in seconds.items():
            self._phases.labels(phase).observe(taken_s)

    def record_plan(self, question: str, seconds: float) -> None:
        """`question`: plan or rates. Thread-safe."""
        self._planner.labels(question).observe(seconds)

    def record_answer(self, method: str, route: str, code: int, seconds: float) -> None:
        self._http.labels(method, route).observe(seconds)
        self._answers.labels(method, route, "500")  # from 0, so that Prometheus sees the first one as an increase
        self._answers.labels(method, route, str(code)).inc()

    def record_provider(self, call: str, outcome: str, seconds: float) -> None:
        self._provider.labels(call).observe(seconds)
        self._outcomes.labels(call, outcome).inc()

    @contextmanager
    def time_round(self, controller: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._looks.labels(controller).observe(time.perf_counter() - began)

    def time_store(self, engine: AsyncEngine) -> None:
        """Time every transaction of the engine."""
        began: dict[int, float] = {}

        def begin(connection: object) -> None:
            began[id(connection)] = time.perf_counter()

        def end(committed: bool) -> Callable[[object], None]:
            def note(connection: object) -> None:
                at = began.pop(id(connection), None)
                if committed and at is not None:
                    self._commits.observe(time.perf_counter() - at)

            return note

        event.listen(engine.sync_engine, "begin", begin)
        event.listen(engine.sync_engine, "commit", end(committed=True))
        event.listen(engine.sync_engine, "rollback", end(committed=False))

    async def time_event_loop(self) -> None:
        """Time the event loop for ever."""
        while True:
            due = time.perf_counter() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(max(time.perf_counter() - due, 0.0))
