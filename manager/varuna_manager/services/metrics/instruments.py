"""What is counted in memory as it happens. One `Instruments` per manager, with a registry of its own.

Labels have few values, whatever the size of the fleet: no VM, no rank and no path of a caller's choice is one.
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
from varuna_manager.services.metrics.family import COUNTER, HISTOGRAM, Family

_CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PLAN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_MORPH_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0)
_DETECTION_S = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0)
_PROVIDER_S = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_LAG_EVERY_S = 0.5
_PHASES, _START = ("notice", "stop", "plan"), "start"
"""Of a morph; what comes after the first three is the start, whatever its parts are called."""
_FROM_ZERO = (
    "checkpoint_passed_over",
    "steps_skipped",
    "first_step",
    "generation_started",
    "generation_ended",
    "hang",
    "job_cancelled",
    "job_failed",
    "job_succeeded",
    "manager_leads",
    "preemption_notice",
    "profile_rejected",
    "provider_away",
    "provider_refused",
    "vm_gone",
    "vm_lost",
    "vm_quarantined",
    "vm_ready",
    "vm_requested",
    "worker_exited",
)
"""Kinds of events that are shown before the first one: an increase from nothing is none to Prometheus."""

KNOWN = (
    Family("varuna_build_info", "1; its label is the version.", ("version",)),
    Family("varuna_leader", "Whether this manager leads (1) or stands by (0). Of all managers exactly one leads."),
    Family("varuna_heartbeats", "Heartbeats of agents that were handled.", kind=COUNTER),
    Family(
        "varuna_detection_seconds",
        "From the last sign of life to the moment when the manager counted it lost: of a VM (`vm`) since its last "
        "heartbeat, of a generation that hangs (`hang`) since its last step.",
        ("of",),
        HISTOGRAM,
    ),
    Family(
        "varuna_morph_phase_seconds",
        "Phases of morphs: `notice` (from the last step until the old generation is told to stop), `stop` (until it "
        "has ended), `plan` (until the next one is decided: for VMs, for the planner), `start` (launch, loading, its "
        "first step).",
        ("phase",),
        HISTOGRAM,
    ),
    Family(
        "varuna_morph_stall_seconds",
        "Time without a completed step at a morph, from the last step before it to the first one after it; at a job's "
        "start, from then on.",
        kind=HISTOGRAM,
    ),
    Family("varuna_redone_steps", "Steps done again after morphs, since no checkpoint held them.", kind=COUNTER),
    Family("varuna_events", "Entries of the event log, by their kind.", ("kind",), COUNTER),
    Family(
        "varuna_planner_seconds",
        "Time of the planner's answers: `plan` (a shape and its placement), `rates` (of one job, over several sizes of "
        "the fleet). Remembered answers are not counted.",
        ("question",),
        HISTOGRAM,
    ),
    Family(
        "varuna_controller_look_seconds",
        "Time of a controller's look at the fleet: load, decide, apply.",
        ("controller",),
        HISTOGRAM,
    ),
    Family(
        "varuna_store_commit_seconds",
        "Time of the store's transactions, from their begin to their commit.",
        kind=HISTOGRAM,
    ),
    Family(
        "varuna_event_loop_lag_seconds",
        f"By how much a timer of {_LAG_EVERY_S:g} s was late: heartbeats wait for so long.",
        kind=HISTOGRAM,
    ),
    Family(
        "varuna_http_request_seconds",
        "From a call of the REST API to the beginning of its answer. `route` is the API's pattern below "
        "/api/v1; `page` for the dashboard's files, `other` for what is no route.",
        ("method", "route"),
        HISTOGRAM,
    ),
    Family("varuna_http_requests", "Calls of the REST API, by their answer.", ("method", "route", "code"), COUNTER),
    Family(
        "varuna_provider_call_seconds",
        "Time of the calls of the provider: `list`, `create`, `delete`, `notices`, `offer`.",
        ("call",),
        HISTOGRAM,
    ),
    Family(
        "varuna_provider_calls",
        "Calls of the provider, by outcome: `ok`; `error` (it raised); for `create` also why it made fewer VMs than "
        "were asked for: `capacity`, `quota`, `throttled`, `failed`.",
        ("call", "outcome"),
        COUNTER,
    ),
)
"""In the order of the documentation."""


class Instruments:
    """`registry` holds them all."""

    def __init__(self, version: str = "unknown") -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        known = {each.name: each for each in KNOWN}

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
        self._redone = counter("varuna_redone_steps")
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

    def note_leading(self, leads: bool) -> None:
        self.leads = leads
        self._leader.set(leads)

    def note_event(self, row: EventRow) -> None:
        """An event that is committed."""
        self._events.labels(row.kind).inc()
        match row.kind:
            case "first_step" if row.data["seconds_without_progress"] is not None:
                self._stalls.observe(row.data["seconds_without_progress"])
                self._redone.inc(row.data["steps_redone"])
                self._note_morph(row.data["downtime"])
            case "hang":
                self._detection.labels("hang").observe(row.data["silent_s"])
            case "vm_lost" | "vm_gone" if row.data.get("silent_s") is not None:
                self._detection.labels("vm").observe(row.data["silent_s"])

    def _note_morph(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """`parts`: varuna_manager.domain.downtime's."""
        seconds: dict[str, float] = {}
        for part in parts:
            phase = part["name"] if part["name"] in _PHASES else _START
            seconds[phase] = seconds.get(phase, 0.0) + part["seconds"]
        for phase, taken_s in seconds.items():
            self._phases.labels(phase).observe(taken_s)

    def note_plan(self, question: str, seconds: float) -> None:
        """`question`: plan or rates. Called from any thread."""
        self._planner.labels(question).observe(seconds)

    def note_answer(self, method: str, route: str, code: int, seconds: float) -> None:
        self._http.labels(method, route).observe(seconds)
        self._answers.labels(method, route, str(code)).inc()

    def note_provider(self, call: str, outcome: str, seconds: float) -> None:
        self._provider.labels(call).observe(seconds)
        self._outcomes.labels(call, outcome).inc()

    @contextmanager
    def look(self, controller: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._looks.labels(controller).observe(time.perf_counter() - began)

    def watch_store(self, engine: AsyncEngine) -> None:
        """Time the engine's transactions."""
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

    async def watch_loop(self) -> None:
        """Time the event loop, without end."""
        while True:
            due = time.perf_counter() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(max(time.perf_counter() - due, 0.0))
